"""Rows of a block's tokens in the caches of a rank: to be stored, and to be read by any number of ranks."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from attnmesh.cache.cache import KVCache
from attnmesh.cache.cache_shard import CacheShard
from attnmesh.cache.window import WindowStart
from attnmesh.errors import StoreError
from attnmesh.mesh.axes import Axis, intersect
from attnmesh.store.block_names import StoredBlock
from attnmesh.store.layer_files import TOKEN_INDEX
from attnmesh.store.tensor_file import DAMAGED_FIX

HEADS_TENSOR = "heads"
"""Name of the tensor with a file's index along the heads axis, and the number of ranks along it."""

WINDOW_STARTS = "floors"
"""Name of the tensor with the `WindowStart` of each layer, in the files of a state. Files that exist have this name."""


def groups_of(kv_caches: Sequence[KVCache], block: StoredBlock) -> list[list[int]]:
    """Return the layers that have rows in a block, in groups of the same tokens and key heads.

    Layers that keep all tokens come first, then each one that forgets, of which a state alone has rows.
    """
    groups: dict[int, list[int]] = {}
    for layer, kv_cache in enumerate(kv_caches):
        if kv_cache.config.mask is None:
            groups.setdefault(kv_cache.config.kv_heads, []).append(layer)
    forgetting = [[layer] for layer, kv_cache in enumerate(kv_caches) if kv_cache.config.mask is not None]
    return [*groups.values(), *(forgetting if block.is_state else ())]


def name_of_group(kv_caches: Sequence[KVCache], group: Sequence[int]) -> str:
    """Return the name of the tokens of a group in a block."""
    return TOKEN_INDEX if kv_caches[group[0]].config.mask is None else f"{TOKEN_INDEX} {group[0]}"


def rows_of_block(kv_caches: Sequence[KVCache], block: StoredBlock, *, is_apart: bool = False) -> dict[str, Tensor]:
    """Return copies of this rank's rows of a block, named as in the files of a saved cache; none if it has no token.

    With `is_apart` each rank writes a file. That of a rank without tokens has `HEADS_TENSOR` alone.
    """
    rows: dict[str, Tensor] = {}
    for group in groups_of(kv_caches, block):
        first = kv_caches[group[0]]
        start = block.start if first.config.mask is None else first.local_shards.window_start.oldest_kept_token
        bounds = _bounds(first.own_shard, start, block.stop)
        if any(low < high for low, high in bounds) or block.is_state:
            indices = (*(piece.token_index for piece in first.own_shard.earlier_pieces), first.own_shard.token_index)
            rows[name_of_group(kv_caches, group)] = _join(indices, bounds, 0)
            for layer in group:
                shard = kv_caches[layer].own_shard
                held = [*(piece.kv_tensors for piece in shard.earlier_pieces), shard.kv_tensors]
                for kind, tensors in zip(("keys", "values"), zip(*held, strict=True), strict=False):
                    rows[f"{kind} {layer}"] = _join(tensors, bounds, 2)
    if rows or is_apart:
        heads_axis = kv_caches[0].own_shard.heads_axis if kv_caches else Axis(1, 0)
        rows[HEADS_TENSOR] = torch.tensor([heads_axis.index, heads_axis.size], device="cpu")
    if block.is_state:
        layers = [(kv_cache.config.mask, kv_cache.local_shards) for kv_cache in kv_caches]
        starts = [WindowStart() if mask is None else shards.window_start for mask, shards in layers]
        rows[WINDOW_STARTS] = torch.tensor(starts, dtype=torch.int64, device="cpu").view(-1, 2)
    return rows


def _bounds(shard: CacheShard, start: int, stop: int) -> list[tuple[int, int]]:
    """Return which slots hold the tokens from `start` up to `stop`, in each part of a shard."""
    parts = [*(piece.token_index[:-1] for piece in shard.earlier_pieces), shard.token_index[: shard.used_slots]]
    ends = torch.tensor([start, stop], device=shard.device)
    return [tuple(torch.searchsorted(tokens, ends).tolist()) for tokens in parts]


def _join(parts: Sequence[Tensor], bounds: Sequence[tuple[int, int]], dim: int) -> Tensor:
    """Return some slots of each part as one tensor in CPU memory, which is a copy."""
    own = [x.narrow(dim, low, high - low) for x, (low, high) in zip(parts, bounds, strict=True) if low < high]
    return torch.cat(own or [parts[-1].narrow(dim, 0, 0)], dim).cpu()


class RowMapping(NamedTuple):
    """Rows of a file that go to the shards of a group."""

    heads: slice
    """Heads of the shards that take rows."""
    source: slice
    """The same heads in the file."""
    head_count: int
    """Number of heads of the file."""
    chosen: Tensor
    """Indices of the rows in the file."""
    slots: Tensor
    """Slots of the shards that these rows go to."""


@dataclass
class CacheFiller:
    """Empty caches of a rank, which it fills with rows of blocks, at their block-cyclic slots."""

    kv_caches: Sequence[KVCache]
    window_starts: list[WindowStart] = field(default_factory=list)
    """The start of each layer's window, once a state is read."""

    def needs(self, block: StoredBlock) -> bool:
        """Return whether this rank needs rows of a block. Of a state every rank may need some."""
        return block.is_state or bool(len(self._own_tokens(groups_of(self.kv_caches, block)[0], block)))

    def begin(self, block: StoredBlock, rows_by_file: Sequence[Mapping[str, Tensor]]) -> None:
        """Make room for the rows of a state, and for the tokens before it."""
        starts = rows_by_file[0].get(WINDOW_STARTS, torch.empty(0, device="cpu")).tolist()
        if len(starts) != len(self.kv_caches):
            raise StoreError("load", "a state of each layer", f"{len(starts)}", DAMAGED_FIX)
        self.window_starts = [WindowStart(int(token), int(query)) for token, query in starts]
        for kv_cache, start in zip(self.kv_caches, self.window_starts, strict=True):
            kv_cache.local_shards.prepare(block.stop, start)

    def put(self, block: StoredBlock, rows_by_file: Sequence[Mapping[str, Tensor]]) -> None:
        """Write this rank's rows of a block. Raise unless the files have each row once, with its dtype and shape."""
        for group in groups_of(self.kv_caches, block):
            first = self.kv_caches[group[0]]
            needed = self._own_tokens(group, block)
            heads = first.own_shard.heads_axis.slice_of(first.config.kv_heads)
            counts = torch.zeros(heads.stop - heads.start, len(needed), dtype=torch.int64, device="cpu")
            for rows in rows_by_file:
                if (mapping := self._row_mapping(group, rows, needed, counts)) is not None:
                    for layer in group:
                        self._put_rows(layer, rows, mapping, needed)
            if not bool((counts == 1).all()):
                given = f"{int((counts == 1).sum())} of {counts.numel()}"
                raise StoreError("load", f"each row of {block.name} once", given, DAMAGED_FIX)

    def _own_tokens(self, group: Sequence[int], block: StoredBlock) -> Tensor:
        """Return the tokens of a block that this rank holds, in the layers of a group."""
        shard = self.kv_caches[group[0]].own_shard
        forgets = self.kv_caches[group[0]].config.mask is not None
        first = self.window_starts[group[0]].oldest_kept_token if forgets else block.start
        tokens = torch.arange(first, block.stop, device="cpu")
        return tokens[shard.turn.holds(tokens)]

    def _row_mapping(
        self, group: Sequence[int], rows: Mapping[str, Tensor], needed: Tensor, counts: Tensor
    ) -> RowMapping | None:
        """Return where rows of a file go, and count them by head and token; None if this rank needs none of them."""
        shard, config = self.kv_caches[group[0]].own_shard, self.kv_caches[group[0]].config
        token_index = rows.get(name_of_group(self.kv_caches, group), needed[:0])
        head_rank, head_ranks = rows.get(HEADS_TENSOR, torch.tensor([0, 0], device="cpu")).tolist()
        if token_index.dtype != torch.int64 or not 0 <= head_rank < head_ranks or config.kv_heads % head_ranks:
            raise StoreError("load", "tokens and heads of a cache", f"{head_rank} of {head_ranks} heads", DAMAGED_FIX)
        saved_heads = Axis(head_ranks, head_rank).slice_of(config.kv_heads)
        to, source = intersect(shard.heads_axis.slice_of(config.kv_heads), saved_heads)
        chosen = torch.isin(token_index, needed).nonzero().flatten()
        if to.start >= to.stop or not len(chosen):
            return None
        indices = torch.searchsorted(needed, token_index[chosen])
        counts[to].index_add_(1, indices, torch.ones(to.stop - to.start, len(indices), dtype=torch.int64, device="cpu"))
        gone = shard.turn.count(self.window_starts[group[0]].oldest_kept_token) if self.window_starts else 0
        slots = shard.turn.slot(token_index[chosen]) - gone
        return RowMapping(to, source, saved_heads.stop - saved_heads.start, chosen, slots.to(shard.device))

    def _put_rows(self, layer: int, rows: Mapping[str, Tensor], mapping: RowMapping, needed: Tensor) -> None:
        shard, config = self.kv_caches[layer].own_shard, self.kv_caches[layer].config
        token_index = rows[name_of_group(self.kv_caches, [layer])]
        for kind, x in zip(("keys", "values"), shard.kv_tensors, strict=False):
            block_tensor = rows.get(f"{kind} {layer}", needed[:0])
            shape = config.batch, mapping.head_count, len(token_index), x.shape[3]
            if tuple(block_tensor.shape) != shape or block_tensor.dtype != x.dtype:
                given = f"{block_tensor.dtype} {tuple(block_tensor.shape)}"
                raise StoreError("load", f"{x.dtype} {shape}", given, DAMAGED_FIX)
            new = block_tensor[:, mapping.source, mapping.chosen].to(shard.device)
            x[:, mapping.heads].index_copy_(2, mapping.slots, new)
        shard.token_index.index_copy_(0, mapping.slots, token_index[mapping.chosen].to(shard.device))

    def finish(self, length: int) -> None:
        """Mark the first `length` tokens as present. Collective."""
        starts = self.window_starts or [WindowStart()] * len(self.kv_caches)
        for kv_cache, start in zip(self.kv_caches, starts, strict=True):
            kv_cache.local_shards.mark_present(length, None, start.oldest_kept_token)
