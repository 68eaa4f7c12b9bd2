"""A cache of rows for one step of decoding: each row has a `ShardedCache` of its own, and a length of its own.

If each row has one token, the rows are a batch. If a row has several tokens, the rows follow each other in one
sequence; their numbers of tokens may differ. The layers of a `RowsCache` are layers of a `ShardedCache` that append to
the caches of all rows. Recurrent states of the rows are joined for the step, and given back after it.
"""

from collections.abc import Sequence
from copy import copy
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import Cache

from attnmesh.cache.cache import KVCache
from attnmesh.core.mask import Mask
from attnmesh.decoding.rows import decode_rows
from attnmesh.errors import InputError
from attnmesh.hf.cache.history import CacheHistory
from attnmesh.hf.cache.layer import PendingKV, ShardedLayer
from attnmesh.hf.cache.layer_protocols import StepCache
from attnmesh.hf.cache.sharded_cache import ShardedCache
from attnmesh.hf.cache.state_layer import HybridLayer, StateLayer
from attnmesh.hf.transformers_names import LinearAttentionLayer


class RowTokens(tuple[int, ...]):
    """The new tokens of each row, and how tensors of all of them are cut into rows."""

    def split(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return the part of each row, (1, heads, tokens of the row, dim)."""
        parts: tuple[Tensor, ...] = x.split(1) if max(self) == 1 else x.split(self, 2)
        return parts

    @property
    def size(self) -> int:
        """Queries of each row in a step of all: rounded up to 2, 3, 5, 9, ..., so that few signatures are prepared."""
        return 1 + (1 << (max(self) - 2).bit_length()) if max(self) > 1 else 1


class JoinedCaches:
    """The caches of one layer, one for each row: a `StepCache`."""

    padding = None

    def __init__(self, caches: Sequence[KVCache], row_tokens: RowTokens) -> None:
        self.caches = caches
        self.row_tokens = row_tokens
        self.config = caches[0].config

    @property
    def length(self) -> int:
        """Cached tokens of the longest row."""
        return max(kv_cache.length for kv_cache in self.caches)

    def append(self, k: Tensor, v: Tensor | None = None, *, token_mask: Tensor | None = None) -> None:
        """Append row r to cache r."""
        keys = self.row_tokens.split(k)
        values = None if v is None else self.row_tokens.split(v)
        for row, kv_cache in enumerate(self.caches):
            kv_cache.append(keys[row], None if values is None else values[row])


class RowsLayer(ShardedLayer):
    """One layer of a `RowsCache`."""

    sharded_cache: "RowsCache"
    is_made = True

    def __init__(self, cache: "RowsCache", rows: Sequence[ShardedLayer]) -> None:
        super().__init__(cache)
        self.rows = rows
        self.is_initialized = True
        self.projection = rows[0].projection
        self.latent_widths = rows[0].latent_widths
        self.joined_caches = JoinedCaches([row.kv_cache for row in rows], cache.row_tokens)

    def reserve_step(self, pending: PendingKV, tokens: int, mask: Mask) -> StepCache:
        """Make room in the cache of each row."""
        for row, count in zip(self.rows, self.sharded_cache.row_tokens, strict=True):
            row.reserve(pending, count, mask)
        return self.joined_caches

    @property
    def step_cache(self) -> StepCache:
        """The caches of the rows."""
        return self.joined_caches

    def get_seq_length(self) -> int:
        """Return the number of cached tokens of the longest row."""
        return self.joined_caches.length

    def attend(self, q: Tensor, **options: Any) -> Tensor:
        """Return attention of the last tokens of each row over the tokens of its cache."""
        return self.sharded_cache.attend_rows(q, self.joined_caches, **options)

    def is_first(self, pending: PendingKV) -> bool:
        """Return False: all rows have tokens, as one without is computed alone."""
        return False

    def raise_agreed(
        self, error: InputError, pending: PendingKV, tokens: int, *, is_compared: bool | None = None
    ) -> NoReturn:
        """Raise this rank's error on all ranks, as the first row does."""
        self.rows[0].raise_agreed(error, pending, tokens, is_compared=is_compared)


class RowsStates(StateLayer):
    """Recurrent states of one layer, of all rows."""

    def __init__(self, rows: Sequence[StateLayer]) -> None:
        LinearAttentionLayer.__init__(self, rows[0].number_of_states)
        row_tensors = [row.tensors for row in rows]
        self.set_tensors({name: torch.cat([tensors[name] for tensors in row_tensors]) for name in row_tensors[0]})

    def give_back(self, rows: Sequence[StateLayer]) -> None:
        """Set the states of each row to its part of these tensors."""
        for number, row in enumerate(rows):
            row.set_tensors({name: x[number : number + 1].clone() for name, x in self.tensors.items()})


class RowsHybrid(RowsStates, RowsLayer):
    """Keys and values, and the states of a recurrent layer beside them."""

    def __init__(self, cache: "RowsCache", rows: Sequence[HybridLayer]) -> None:
        RowsLayer.__init__(self, cache, rows)
        RowsStates.__init__(self, rows)

    lazy_initialization = HybridLayer.lazy_initialization
    crop = RowsLayer.crop
    reset = RowsLayer.reset
    reorder_cache = RowsLayer.reorder_cache


class RowsCache(ShardedCache):
    """`past_key_values` of one step, with the options of the first row's cache."""

    def __init__(self, caches: Sequence[ShardedCache], counts: Sequence[int]) -> None:
        first = caches[0]
        self.config, self.stock_window = first.config, first.stock_window
        self.mesh, self.ranks = first.mesh, first.ranks
        self.settings = first.settings
        self.history = CacheHistory()
        self.rows = caches
        self.row_tokens = RowTokens(counts)
        layers = zip(*(cache.layers for cache in caches), strict=True)
        Cache.__init__(self, layers=[_layer_of(self, rows) for rows in layers])

    rows: Sequence[ShardedCache]
    row_tokens: RowTokens
    folder = None
    """None, as the folder of a row has the tokens of that row alone."""

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the number of cached tokens of the longest row."""
        return max(cache.get_seq_length(layer_idx) for cache in self.rows)

    def attend_rows(self, q: Tensor, joined_caches: JoinedCaches, **options: Any) -> Tensor:
        """Return attention of the last tokens of each row over the tokens of its cache.

        All rows are one step. Rows of fewer tokens get padding before their queries, whose outputs are dropped. Where
        padding could see tokens that a cache has forgotten or never had, rows of equally many tokens are a step.
        """
        for name in ("selected", "partial", "distance_bias"):
            more = options.pop(name, None)
            assert more is None, f"models with {name}= are decoded a row at a time"
        options = {**self.decode_options(q), **options}
        if max(self.row_tokens) == 1:
            return decode_rows(q, joined_caches.caches, **options)
        queries = self.row_tokens.split(q)
        outs = dict[int, Tensor]()
        longest = self.row_tokens.size
        whole = all(cache.config.mask is None and cache.length >= longest for cache in joined_caches.caches)
        steps = {count: longest if whole else count for count in self.row_tokens}
        for size in sorted({*steps.values()}):
            rows = [row for row, count in enumerate(self.row_tokens) if steps[count] == size]
            own = torch.cat([pad(queries[row], (0, 0, size - queries[row].shape[2], 0)) for row in rows])
            out = decode_rows(own, [joined_caches.caches[row] for row in rows], **options)
            outs.update(zip(rows, out.split(1), strict=True))
        return torch.cat([outs[row][:, :, -count:] for row, count in enumerate(self.row_tokens)], 2)

    def finish(self) -> None:
        """Give recurrent states back to the rows."""
        for number, layer in enumerate(self.layers):
            if isinstance(layer, RowsStates):
                layer.give_back([cache.layers[number] for cache in self.rows])


def _layer_of(cache: RowsCache, rows: Sequence[Any]) -> Any:
    if isinstance(rows[0], HybridLayer):
        return RowsHybrid(cache, rows)
    if isinstance(rows[0], ShardedLayer):
        return RowsLayer(cache, rows)
    return RowsStates(rows) if isinstance(rows[0], StateLayer) else copy(rows[0])
