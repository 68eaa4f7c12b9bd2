"""A cache of rows for one step of decoding: each row has a `ShardedCache` of its own, and a length of its own.

Its layers are layers of a `ShardedCache` that append to the caches of all rows. Recurrent states of the rows are joined
for the step, and given back after it.
"""

from collections.abc import Sequence
from copy import copy
from typing import Any, NoReturn, cast

import torch
from torch import Tensor

from attnmesh.cache.cache import KVCache
from attnmesh.core.mask import Mask
from attnmesh.decoding.rows import decode_rows
from attnmesh.errors import InputError
from attnmesh.hf.cache.layer import PendingKV, ShardedLayer
from attnmesh.hf.cache.sharded_cache import ShardedCache
from attnmesh.hf.cache.state_layer import HybridLayer, StateLayer
from attnmesh.hf.transformers_names import LinearAttentionLayer


class RowsKV:
    """The caches of one layer, one for each row, in place of a `KVCache`."""

    padding = None

    def __init__(self, caches: Sequence[KVCache]) -> None:
        self.caches, self.sizes = caches, caches[0].sizes

    @property
    def length(self) -> int:
        """Cached tokens of the longest row."""
        return max(kv.length for kv in self.caches)

    def append(self, k: Tensor, v: Tensor | None, *, token_mask: None = None) -> None:
        """Append row r to cache r."""
        for row, kv in enumerate(self.caches):
            one = slice(row, row + 1)
            kv.append(k[one], None if v is None else v[one])


class RowsLayer(ShardedLayer):
    """One layer of a `RowsCache`."""

    def __init__(self, cache: "RowsCache", rows: Sequence[ShardedLayer]) -> None:
        super().__init__(cache)
        self.rows, self.is_initialized = rows, True
        self.projection, self.latent_widths = rows[0].projection, rows[0].latent_widths
        self.kv = cast(Any, RowsKV([row.cached for row in rows]))

    def reserve(self, pending: PendingKV, tokens: int, mask: Mask) -> KVCache:
        """Make room in the cache of each row."""
        for row in self.rows:
            row.reserve(pending, tokens, mask)
        return self.cached

    def raise_agreed(
        self, error: InputError, pending: PendingKV, tokens: int, *, is_compared: bool | None = None
    ) -> NoReturn:
        """Raise this rank's error on all ranks, as the first row does."""
        self.rows[0].raise_agreed(error, pending, tokens, is_compared=is_compared)


class RowsStates(StateLayer):
    """Recurrent states of one layer, of all rows."""

    def __init__(self, rows: Sequence[StateLayer]) -> None:
        LinearAttentionLayer.__init__(self, rows[0].number_of_states)
        held = [row.tensors for row in rows]
        self.set_tensors({name: torch.cat([tensors[name] for tensors in held]) for name in held[0]})

    def give_back(self, rows: Sequence[StateLayer]) -> None:
        """Set the states of the rows to these."""
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

    def __init__(self, caches: Sequence[ShardedCache]) -> None:
        self.__dict__ |= {**caches[0].__dict__, "rows": caches}
        layers = zip(*(cache.layers for cache in caches), strict=True)
        self.layers = [_layer_of(self, rows) for rows in layers]

    rows: Sequence[ShardedCache]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the number of cached tokens of the longest row."""
        return max(cache.get_seq_length(layer_idx) for cache in self.rows)

    def attend(self, q: Tensor, kv: Any, **layer: Any) -> Tensor:
        """Return attention of the last token of each row over the tokens of its cache."""
        for name in ("selected", "partial", "distance_bias"):
            more = layer.pop(name, None)
            assert more is None, f"models with {name}= are decoded a row at a time"
        return decode_rows(q, kv.caches, **self.decode_options(q), **layer)

    def finish(self) -> None:
        """Give recurrent states back to the rows."""
        for number, layer in enumerate(self.layers):
            if isinstance(layer, RowsStates):
                layer.give_back([cache.layers[number] for cache in self.rows])


def _layer_of(cache: RowsCache, rows: Sequence[Any]) -> Any:
    """Return a layer of all rows."""
    if isinstance(rows[0], HybridLayer):
        return RowsHybrid(cache, rows)
    if isinstance(rows[0], ShardedLayer):
        return RowsLayer(cache, rows)
    return RowsStates(rows) if isinstance(rows[0], StateLayer) else copy(rows[0])
