"""Rows of a block's tokens in the caches of a rank: to be stored, and to be read by any number of ranks."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial as partial_of

import torch
from torch import Tensor

from attnmesh.cache.cache import KVCache
from attnmesh.cache.cache_shard import CacheShard
from attnmesh.cache.window import WindowStart
from attnmesh.errors import StoreError
from attnmesh.mesh.axes import Axis
from attnmesh.store.block_names import StoredBlock
from attnmesh.store.layer_files import TOKEN_INDEX, kv_names
from attnmesh.store.shard_filler import ShardFiller
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
                kv_pieces = [*(piece.kv_tensors for piece in shard.earlier_pieces), shard.kv_tensors]
                for name, tensors in zip(kv_names(layer), zip(*kv_pieces, strict=True), strict=False):
                    rows[name] = _join(tensors, bounds, 2)
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
    parts = [*(piece.indices for piece in shard.earlier_pieces), shard.token_index[: shard.used_slots]]
    ends = torch.tensor([start, stop], device=shard.device)
    return [tuple(torch.searchsorted(indices, ends).tolist()) for indices in parts]


def _join(parts: Sequence[Tensor], bounds: Sequence[tuple[int, int]], dim: int) -> Tensor:
    """Return some slots of each part as one tensor in CPU memory, which is a copy."""
    own = [x.narrow(dim, low, high - low) for x, (low, high) in zip(parts, bounds, strict=True) if low < high]
    return torch.cat(own or [parts[-1].narrow(dim, 0, 0)], dim).cpu()


@dataclass
class CacheFiller:
    """Empty caches of a rank, which it fills with rows of blocks, at their block-cyclic slots."""

    kv_caches: Sequence[KVCache]
    window_starts: list[WindowStart] = field(default_factory=list)
    """The start of each layer's window, once a state is read."""

    def needs(self, block: StoredBlock) -> bool:
        """Return whether this rank needs rows of a block. Of a state every rank may need some."""
        if block.is_state:
            return True
        turn = self.kv_caches[groups_of(self.kv_caches, block)[0][0]].own_shard.turn
        return turn.count(block.start) < turn.count(block.stop)

    def begin(self, block: StoredBlock, rows_by_file: Sequence[Mapping[str, Tensor]]) -> None:
        """Make room for the rows of a state, and for the tokens before it."""
        starts = rows_by_file[0].get(WINDOW_STARTS, torch.empty(0, device="cpu")).tolist()
        if len(starts) != len(self.kv_caches):
            raise StoreError("load", "a state of each layer", f"{len(starts)}", DAMAGED_FIX)
        self.window_starts = [WindowStart(int(token), int(query)) for token, query in starts]
        for kv_cache, start in zip(self.kv_caches, self.window_starts, strict=True):
            kv_cache.local_shards.make_room_to_load(block.stop, start)

    def put(self, block: StoredBlock, rows_by_file: Sequence[Mapping[str, Tensor]]) -> None:
        """Write this rank's rows of a block. Raise unless the files have each row once, with its dtype and shape."""
        for group in groups_of(self.kv_caches, block):
            shards = {layer: self.kv_caches[layer].own_shard for layer in group}
            oldest = self.window_starts[group[0]].oldest_kept_token if self.window_starts else 0
            config = self.kv_caches[group[0]].config
            filler = ShardFiller(shards, block.start if config.mask is None else oldest, block.stop, oldest)
            for rows in rows_by_file:
                saved_heads = _saved_heads(rows, config.kv_heads)
                token_name = name_of_group(self.kv_caches, group)
                if token_name in rows:
                    token_index = _read_rows(rows, token_name, torch.int64, (rows[token_name].numel(),))
                    filler.put(token_index, saved_heads, partial_of(_read_rows, rows), block.name)
            filler.check_all_filled(block.name)

    def finish(self, length: int) -> None:
        """Mark the first `length` tokens as present. Collective."""
        starts = self.window_starts or [WindowStart()] * len(self.kv_caches)
        for kv_cache, start in zip(self.kv_caches, starts, strict=True):
            kv_cache.local_shards.mark_present(length, None, start.oldest_kept_token)


def _saved_heads(rows: Mapping[str, Tensor], kv_heads: int) -> Axis:
    """Return where the rank that wrote a file is along the heads axis."""
    head_rank, head_ranks = _read_rows(rows, HEADS_TENSOR, torch.int64, (2,)).tolist()
    if not 0 <= head_rank < head_ranks or kv_heads % head_ranks:
        raise StoreError("load", "heads of a cache", f"rank {head_rank} of {head_ranks} along them", DAMAGED_FIX)
    return Axis(head_ranks, head_rank)


def _read_rows(rows: Mapping[str, Tensor], name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """Return a tensor of a file that is in memory. Raise unless it has this dtype and shape."""
    x = rows.get(name)
    if x is None or x.dtype != dtype or tuple(x.shape) != shape:
        given = "none" if x is None else f"{x.dtype} {tuple(x.shape)}"
        raise StoreError("load", f"{name!r} as {dtype} {shape}", given, DAMAGED_FIX)
    return x
