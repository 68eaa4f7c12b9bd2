"""Recovery after lost ranks: surviving shards and copies, resharded over another mesh.

Survivors leave the broken world and enter another, with new ranks or without. Then all of its ranks call `recover`.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Never

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from attnmesh.cache.block_cyclic import token_set_digest
from attnmesh.cache.cache import KVCache
from attnmesh.cache.cache_config import CacheConfig
from attnmesh.cache.cache_shard import CacheShard
from attnmesh.cache.window import WindowStart
from attnmesh.checks.argument_checks import check_unknown_options
from attnmesh.comm.gather import all_gather_texts
from attnmesh.comm.p2p import all_to_all, meta_like
from attnmesh.comm.topology import dist_all_gather_ints
from attnmesh.errors import DtypeError, KernelError, MeshError, ShapeError
from attnmesh.guard.agreement import Agreement
from attnmesh.mesh.axes import Axis, RankMesh, agreed_flat_axis, intersect
from attnmesh.mesh.shapes import AXES
from attnmesh.store.load_layers import make_alike

OldShard = tuple[int, int]
"""A shard's indices in the old mesh, along heads and along tokens."""

LOAD_INSTEAD = "load a save with KVCache.load(path, mesh), or prefill again"


def recover(
    caches: Sequence[KVCache] | None,
    mesh: DeviceMesh | None,
    *,
    capacity: int | None = None,
    device: torch.device | str | None = None,
    checked: bool | None = None,
    copies: int = 1,
    shares: Sequence[float] | str | None = None,
    **unsupported: Never,
) -> list[KVCache]:
    """Return the layers' caches on another mesh, from the shards and copies that its ranks still hold.

    Every rank of the mesh calls it. Some ranks may have been a step ahead, so the caches are truncated to the tokens
    that all ranks hold in all layers.

    Args:
        caches: The layers' caches on the old mesh, or None on a new rank.
        mesh: Mesh of all ranks, or None for one device.
        capacity: Tokens to reserve memory for; the old capacity by default.
        device: As in `KVCache`.
        checked: As in `KVCache`.
        copies: As in `KVCache`.
        shares: As in `KVCache`; those of the old caches need not be the same.
        **unsupported: Unknown arguments, which raise on all ranks.

    Returns:
        One cache per layer, its tokens block-cyclic.

    Raises:
        MeshError: A shard and all its copies are lost, or the ranks' caches do not fit together.
        ShapeError: `capacity` is less than the tokens that are left.
        DtypeError: `caches` is not a list of caches.
        ArgumentError: An argument is unknown.

    >>> cache = KVCache(None, batch=1, kv_heads=2, head_dim=4, capacity=100, dtype=torch.float32)
    >>> cache.append(*torch.randn(2, 1, 2, 5, 4))
    >>> [recovered] = recover([cache], None)
    >>> recovered.length
    5
    """
    rank_mesh = RankMesh.of(mesh)
    with Agreement(
        rank_mesh, "recover", {"capacity": capacity, "checked": checked, "copies": copies, "shares": shares}
    ):
        _check_caches(caches, unsupported)
        for cache in caches or ():
            cache.local_shards.join_pieces()
        text = json.dumps(_describe(caches))
    by_rank = [json.loads(description) for description in all_gather_texts(text, rank_mesh)]
    descriptions = [description for description in by_rank if description]
    length = min((description["length"] for description in descriptions), default=0)
    # Per layer the first token that any rank needs, and the first query that all ranks can decode.
    by_layer = zip(*(description["starts"] for description in descriptions), strict=False)
    starts = [WindowStart(max(first for first, _ in pairs), max(query for _, query in pairs)) for pairs in by_layer]
    _check_alike(descriptions, capacity, length, starts)  # raises the same on all ranks: all have the same texts
    capacity = max(description["capacity"] for description in descriptions) if capacity is None else capacity
    configs = [replace(CacheConfig.from_code(code), capacity=capacity) for code in descriptions[0]["configs"]]
    new_caches = make_alike(KVCache, mesh, configs, device=device, checked=checked, copies=copies, shares=shares)
    for cache, start in zip(new_caches, starts, strict=True):
        cache.local_shards.make_room_to_load(length, start._replace(oldest_query=min(start.oldest_query, length)))
    moves = _Moves(caches or (), new_caches, length, _sources(by_rank), [start.oldest_kept_token for start in starts])
    with torch.no_grad():
        token_mask = moves.token_mask() if descriptions[0]["padding"] < length else None
        for layer in range(len(new_caches)):
            moves.fill(layer, token_mask)
    return new_caches


class _Moves:
    """Messages that carry each old shard's tokens to their new ranks; every rank computes the same plan."""

    def __init__(
        self,
        old: Sequence[KVCache],
        new: Sequence[KVCache],
        length: int,
        sources: dict[OldShard, int],
        firsts: Sequence[int],
    ) -> None:
        self.old, self.new, self.length, self.sources, self.firsts = old, new, length, sources, firsts
        self.mesh, token_axis = new[0].rank_mesh, new[0].token_axis
        self.axis = agreed_flat_axis(new[0].device_mesh, AXES)
        indices = [self.axis.index, self.mesh.heads.index, token_axis.index]
        # Indices of each rank in the flat axis, heads and tokens.
        self.ranks = dist_all_gather_ints(indices, self.mesh.axes)
        counts = json.dumps([self._counts(layer) for layer in range(len(new))])
        self.counts: list[list[dict[str, list[int]]]] = [
            json.loads(text) for text in all_gather_texts(counts, self.mesh)
        ]
        for layer, first in enumerate(firsts):
            digest = token_set_digest(torch.arange(first, length, device="cpu"))
            expected = len({head_rank for head_rank, _ in sources}) * digest
            total = sum(counts[-1] for layers in self.counts for counts in layers[layer].values())
            if (total - expected) % 2**64:
                given = f"gaps or repeats in layer {layer}"
                raise MeshError("recover", f"each of {length} tokens once", given, LOAD_INSTEAD)

    def _counts(self, layer: int) -> dict[str, list[int]]:
        """Return, for each old shard that this rank sends, its tokens per new rank and a digest of them."""
        counts_by_shard = {}
        for old in self._sent_by(self.mesh.shard_index):
            shard = _shard(self.old[layer], old)
            indices = shard.token_index[self._slots(layer, shard)]
            counts = [int(turn.holds(indices).sum()) for turn in self.new[layer].own_shard.block_cyclic.turns]
            counts_by_shard[str(old)] = [*counts, token_set_digest(indices)]
        return counts_by_shard

    def _slots(self, layer: int, shard: CacheShard) -> slice:
        """Return the slots of an old shard's tokens that all ranks have reached and none has forgotten."""
        return slice(shard.count_before(self.firsts[layer]), shard.count_before(self.length))

    def _sent_by(self, rank: int) -> list[OldShard]:
        return [old for old, source in self.sources.items() if source == rank]

    def _common_heads(self, layer: int, rank: int, head_rank: int) -> Iterator[tuple[OldShard, slice, slice]]:
        """Yield the old shards that a rank sends to ranks of an index along heads, where they have the same key heads.

        The slices are of the heads of the old and of the new shard.
        """
        count = self.new[layer].config.kv_heads
        before = 1 + max(head_rank for head_rank, _ in self.sources)
        for old in self._sent_by(rank):
            saved_heads = Axis(before, old[0]).slice_of(count)
            source, target = intersect(saved_heads, Axis(self.mesh.heads.size, head_rank).slice_of(count))
            if source.start < source.stop:
                yield old, source, target

    def fill(self, layer: int, token_mask: Tensor | None) -> None:
        """Exchange the tokens of one layer, and write those received."""
        cache = self.new[layer]
        own_shard = self.new[layer].own_shard
        empty = torch.empty(0, dtype=torch.int64, device=cache.device)
        sends: list[tuple[Tensor, ...]] = [(empty,)] * len(self.ranks)
        receives = sends.copy()
        for rank, (peer, head_rank, index) in enumerate(self.ranks):
            for old, source, _ in self._common_heads(layer, self.mesh.shard_index, head_rank):
                shard = _shard(self.old[layer], old)
                own_slots = self._slots(layer, shard)
                indices = shard.token_index[own_slots]
                slots = own_shard.block_cyclic.turns[index].holds(indices).nonzero().flatten()
                kv = (x[:, source, own_slots].index_select(2, slots) for x in shard.kv_tensors)
                sends[peer] += indices[slots], *kv
            for old, _, target in self._common_heads(layer, rank, self.mesh.heads.index):
                count = self.counts[rank][layer][str(old)][cache.token_axis.index]
                kv = (meta_like(x[:, target], count) for x in own_shard.kv_tensors)
                receives[peer] += meta_like(own_shard.token_index, count, 0), *kv
        received = all_to_all(sends, receives, self.axis)
        forgotten = own_shard.turn.count(self.firsts[layer])
        for rank, (peer, _, _) in enumerate(self.ranks):
            arrived = iter(received[peer][1:])
            for _, _, target in self._common_heads(layer, rank, self.mesh.heads.index):
                indices = next(arrived)
                slots = own_shard.turn.slot(indices) - forgotten
                own_shard.token_index.index_copy_(0, slots, indices)
                for x in own_shard.kv_tensors:
                    x[:, target].index_copy_(2, slots, next(arrived))
        cache.local_shards.mark_present(self.length, token_mask, self.firsts[layer])

    def token_mask(self) -> Tensor:
        """Return the token mask of the first rank that has caches, on every rank."""
        first = min(self.sources.values())
        peer = self.ranks[first][0]
        shape = (self.new[0].config.batch, self.length)
        mask = empty = torch.empty(0, dtype=torch.bool, device=self.new[0].device)
        if self.mesh.shard_index == first and (padding := self.old[0].padding) is not None:
            mask = padding.token_mask[:, : self.length]
        receives = [(empty,)] * len(self.ranks)
        receives[peer] = (torch.empty(shape, dtype=torch.bool, device="meta"),)
        return all_to_all([(mask,)] * len(self.ranks), receives, self.axis)[peer][0]


def _describe(caches: Sequence[KVCache] | None) -> dict[str, Any] | None:
    """Return this rank's configurations, lengths and shards for JSON, its own shard first; None on a new rank."""
    if caches is None:
        return None
    first = caches[0]
    heads_axis = caches[0].rank_mesh.heads
    common = set.intersection(*({shard.index for shard in cache.local_shards.shards} for cache in caches))
    shards = [shard for cache in caches for shard in cache.local_shards.shards if shard.index in common]
    return {
        "configs": [replace(cache.config, capacity=1).to_code() for cache in caches],
        "capacity": max(cache.config.capacity for cache in caches),
        "mesh": [heads_axis.size, first.token_axis.size],
        "length": min(shard.length for shard in shards),
        "rewrites": [cache.rewrites for cache in caches],
        "padding": _first_padding(first),
        "starts": [cache.local_shards.window_start for cache in caches],
        "shards": [[heads_axis.index, shard.index] for shard in first.local_shards.shards if shard.index in common],
    }


def _first_padding(cache: KVCache) -> int:
    """Return how many tokens precede the first padding of any sequence; all tokens if there is none."""
    if (token_mask := cache.own_shard.token_mask) is None:
        return cache.length
    padded = (~token_mask).any(0).nonzero()
    return int(padded[0]) if len(padded) else cache.length


def _check_caches(caches: object, unsupported: dict[str, Never]) -> None:
    """Raise unless `caches` are caches of one mesh, or None."""
    if caches is not None and not (
        isinstance(caches, (list, tuple)) and caches and all(isinstance(cache, KVCache) for cache in caches)
    ):
        fix = "pass [cache], or None on a new rank"
        given = "no cache" if isinstance(caches, (list, tuple)) and not caches else type(caches).__name__
        raise DtypeError("recover", "a list of caches, one per layer", given, fix)
    check_unknown_options("recover", unsupported)
    hot = [cache.config.hot for cache in caches or () if cache.config.hot is not None]
    if hot:
        raise KernelError("recover", "caches in one memory", f"hot={min(hot)}", LOAD_INSTEAD)
    meshes = len({(cache.rank_mesh.heads, cache.token_axis) for cache in caches or ()})
    if meshes > 1:
        fix = "pass the caches of one model, one per layer"
        raise MeshError("recover", "caches of one mesh", f"caches of {meshes} meshes", fix)


def _check_alike(
    descriptions: list[dict[str, Any]], capacity: object, length: int, starts: Sequence[WindowStart]
) -> None:
    """Raise unless the ranks' caches can be recovered together."""
    if not descriptions:
        raise MeshError("recover", "caches on some rank", "None on all", "pass the caches on every surviving rank")
    first = descriptions[0]
    one_model = "pass the caches of one model on every rank, one per layer"
    head_ranks, token_ranks = first["mesh"]
    held_shards = {tuple(shard) for description in descriptions for shard in description["shards"]}
    lost = [
        (head_rank, token_rank)
        for head_rank in range(head_ranks)
        for token_rank in range(token_ranks)
        if (head_rank, token_rank) not in held_shards
    ]
    same_caches, same_rewrites = "the same caches on every rank", "caches truncated and reordered equally often"
    counts = [description["rewrites"] for description in descriptions]
    paddings = {min(description["padding"], length) for description in descriptions}
    for fits, expected, given, fix in (
        (
            all(x["configs"] == first["configs"] for x in descriptions),
            same_caches,
            "ranks whose sizes differ",
            one_model,
        ),
        (all(x["mesh"] == first["mesh"] for x in descriptions), same_caches, "ranks whose mesh differs", one_model),
        (all(count == counts[0] for count in counts), same_rewrites, f"counts {counts}", LOAD_INSTEAD),
        (len(paddings) == 1, "the same padding on every rank", "ranks whose padding differs", LOAD_INSTEAD),
        (
            all(start.oldest_kept_token == 0 or start.oldest_query <= length for start in starts),
            "ranks as far as each other",
            f"ranks that have forgotten what token {length} sees",
            LOAD_INSTEAD,
        ),
        (not lost, "a rank or a copy of each shard", f"none of {lost}, along heads and tokens", LOAD_INSTEAD),
    ):
        if not fits:
            raise MeshError("recover", expected, given, fix)
    if isinstance(capacity, int) and capacity < length:
        given, fix = f"{length} in a capacity of {capacity}", f"pass capacity={length}"
        raise ShapeError("recover", "room for the tokens that are left", given, fix)


def _sources(by_rank: list[dict[str, Any] | None]) -> dict[OldShard, int]:
    """Return the new rank that sends each old shard: its owner, or else the first rank with a copy."""
    sources: dict[OldShard, int] = {}
    for copy in (False, True):
        for rank, description in enumerate(by_rank):
            shards = description["shards"] if description else []
            for head_rank, token_rank in shards[1:] if copy else shards[:1]:
                sources.setdefault((head_rank, token_rank), rank)
    return sources


def _shard(cache: KVCache, old: OldShard) -> CacheShard:
    """Return an old shard that this rank holds, its own or a copy."""
    return next(shard for shard in cache.local_shards.shards if shard.index == old[1])
