"""After ranks are lost: what the others hold, and their copies, dealt anew to the ranks of another mesh.

Those that are left leave the broken world and enter another, with new ranks or without; then all of them `recover`.
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Never

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from attnmesh.comm.consensus import describe_call, run_agreed, texts
from attnmesh.comm.p2p import all_gather_ints, blank, swap
from attnmesh.core.checks import check_unknown_options
from attnmesh.decode.cache import KVCache
from attnmesh.decode.cache_config import Sizes
from attnmesh.decode.cache_shard import CacheShard, cover
from attnmesh.errors import DtypeError, InputError, MeshError, ShapeError
from attnmesh.mesh.axes import Axis, Mesh, flat_axis, overlap
from attnmesh.mesh.shapes import AXES

Place = tuple[int, int]
"""Of a shard in the old mesh: along heads and along tokens."""


def recover(
    caches: Sequence[KVCache] | None,
    mesh: DeviceMesh | None,
    *,
    capacity: int | None = None,
    device: torch.device | str | None = None,
    checked: bool | None = None,
    copies: int = 1,
    **more: Never,
) -> list[KVCache]:
    """The layers' caches on another mesh, from what the ranks that are left held before; every rank of it calls it.

    A rank that is new passes None. All come to the tokens that every one of them has in every layer: some may have been
    a step ahead. The options are those of `KVCache`; without `capacity` it is what it was.
    """
    here = Mesh.of(mesh)

    def look() -> str:
        _check(caches, more)
        return json.dumps(_told_of(caches))

    mine = run_agreed(here, look, describe_call("recover", capacity=capacity, checked=checked, copies=copies))
    said = [json.loads(text) for text in texts(here, mine)]
    known = [each for each in said if each]
    length = min((each["length"] for each in known), default=0)
    if fault := _fault(known, here, capacity, length):
        raise fault  # as all ranks do, who have heard the same
    room = max(each["capacity"] for each in known) if capacity is None else capacity
    sizes = [replace(Sizes.decode(code), capacity=room) for code in known[0]["sizes"]]
    made = [KVCache(mesh, **vars(each), device=device, checked=checked, copies=copies) for each in sizes]
    moves = _Moves(caches or (), made, length, _sources(said))
    with torch.no_grad():
        real = moves.real() if known[0]["padding"] < length else None
        for layer in range(len(made)):
            moves.fill(layer, real)
    return made


class _Moves:
    """Who sends which tokens to whom: every rank works out the same."""

    def __init__(self, old: Sequence[KVCache], new: Sequence[KVCache], length: int, sources: dict[Place, int]) -> None:
        self.old, self.new, self.length, self.sources = old, new, length, sources
        self.mesh, tokens = new[0].mesh, new[0].tokens
        self.axis = flat_axis(new[0].device_mesh, AXES)
        here = [self.axis.index, self.mesh.heads.index, tokens.index]
        self.ranks = all_gather_ints(here, self.mesh.axes)  # by shard: where it is in line, and in the new mesh
        held = [json.loads(text) for text in texts(self.mesh, json.dumps([*map(self._counts, range(len(new)))]))]
        self.counts: list[list[dict[str, list[int]]]] = held  # by shard, layer and place in the old mesh
        whole = len({heads for heads, _ in sources}) * cover(torch.arange(length))
        for layer in range(len(new)):
            found = sum(counts.pop() for each in held for counts in each[layer].values())
            if (found - whole) % 2**64:
                given, fix = f"others in layer {layer}", "load a checkpoint, or prefill once more"
                raise MeshError("recover", f"each of {length} tokens once", given, fix)

    def _counts(self, layer: int) -> dict[str, list[int]]:
        """Of each old shard that comes from here, how many of its tokens go to each place of the new deal.

        At the end a sum that tells which they are.
        """
        found = {}
        for place in self._sent_by(self.mesh.shard):
            tokens = self._tokens(layer, place)
            owners = self.new[layer].shard.block_cyclic.owner(tokens)
            counts = torch.bincount(owners, minlength=self.new[layer].tokens.size)
            found[str(place)] = [*counts.tolist(), cover(tokens)]
        return found

    def _tokens(self, layer: int, place: Place) -> Tensor:
        """Those of an old shard that all ranks have come to."""
        room = _room(self.old[layer], place)
        return room.token_index[: room.before(self.length)]

    def _sent_by(self, shard: int) -> list[Place]:
        return [place for place, source in self.sources.items() if source == shard]

    def _shared(self, sizes: Sizes, place: Place, heads: int) -> tuple[slice, slice]:
        """The key heads that an old shard and a new one have in common: which of the old's, and which of the new's."""
        old, new = Axis(1 + max(h for h, _ in self.sources), place[0]), Axis(self.mesh.heads.size, heads)
        return overlap(old.share_of(sizes.kv_heads), new.share_of(sizes.kv_heads))

    def fill(self, layer: int, real: Tensor | None) -> None:
        """Send what others are to have of an old layer, and write what comes."""
        cache = self.new[layer]
        none = torch.empty(0, dtype=torch.int64, device=cache.device)
        wanted, places = self._wanted(layer, none)
        came = swap(self._parts(layer, none), wanted, self.axis)
        for line, first, heads in places:
            tokens, k, v = came[line][first : first + 3]
            slots = cache.shard.block_cyclic.slot(tokens)
            cache.shard.token_index.index_copy_(0, slots, tokens)
            cache.keys[:, heads].index_copy_(2, slots, k)
            cache.values[:, heads].index_copy_(2, slots, v)
        cache.filled(self.length, real)

    def _parts(self, layer: int, none: Tensor) -> list[tuple[Tensor, ...]]:
        """For each rank in line its heads and tokens of what comes from here."""
        cache = self.new[layer]
        parts: list[tuple[Tensor, ...]] = [(none,)] * len(self.ranks)
        for place in self._sent_by(self.mesh.shard):
            theirs, tokens = _room(self.old[layer], place), self._tokens(layer, place)
            owners = cache.shard.block_cyclic.owner(tokens)
            for line, heads, index in self.ranks:
                of, _ = self._shared(cache.sizes, place, heads)
                mine = (owners == index).nonzero().flatten()
                if of.start < of.stop:
                    k, v = (x[:, of].index_select(2, mine) for x in (theirs.keys, theirs.values))
                    parts[line] += tokens[mine], k, v
        return parts

    def _wanted(self, layer: int, none: Tensor) -> tuple[list[tuple[Tensor, ...]], list[tuple[int, int, slice]]]:
        """What will come of each rank in line; and of each shard in it where it is, and to which heads it goes."""
        cache = self.new[layer]
        wanted: list[tuple[Tensor, ...]] = [(none,)] * len(self.ranks)
        places: list[tuple[int, int, slice]] = []
        for shard, (line, _, _) in enumerate(self.ranks):
            for place in self._sent_by(shard):
                _, heads = self._shared(cache.sizes, place, self.mesh.heads.index)
                count = self.counts[shard][layer][str(place)][cache.tokens.index]
                if heads.start < heads.stop:
                    places.append((line, len(wanted[line]), heads))
                    k, v = (blank(x[:, heads], count) for x in (cache.keys, cache.values))
                    wanted[line] += blank(cache.shard.token_index, count, 0), k, v
        return wanted, places

    def real(self) -> Tensor:
        """Which tokens are real, as the first rank knows that has any."""
        first = min(self.sources.values())
        line, shape = self.ranks[first][0], (self.new[0].sizes.batch, self.length)
        own = none = torch.empty(0, dtype=torch.bool, device=self.new[0].device)
        if self.mesh.shard == first and (padding := self.old[0].padding) is not None:
            own = padding.token_mask[:, : self.length]
        wanted = [(none,)] * len(self.ranks)
        wanted[line] = (torch.empty(shape, dtype=torch.bool, device="meta"),)
        return swap([(own,)] * len(self.ranks), wanted, self.axis)[line][0]


def _told_of(caches: Sequence[KVCache] | None) -> dict[str, Any] | None:
    """What a rank has: of its own, and copies."""
    if caches is None:
        return None
    first, heads = caches[0], caches[0].mesh.heads
    common = set.intersection(*({room.index for room in cache.rooms} for cache in caches))
    rooms = [room for cache in caches for room in cache.rooms if room.index in common]
    return {
        "sizes": [replace(cache.sizes, capacity=1).encode() for cache in caches],
        "capacity": max(cache.sizes.capacity for cache in caches),
        "mesh": [heads.size, first.tokens.size],
        "length": min(room.length for room in rooms),
        "changes": [cache.changes for cache in caches],
        "padding": _first_padding(first),
        "held": [[heads.index, room.index] for room in first.rooms if room.index in common],
    }


def _first_padding(cache: KVCache) -> int:
    """How many tokens come before the first that is padding in some sequence: all, if none is."""
    if cache.padding is None:
        return cache.length
    padded = (~cache.padding.token_mask[:, : cache.length]).any(0).nonzero()
    return int(padded[0]) if len(padded) else cache.length


def _check(caches: object, more: dict[str, Never]) -> None:
    if caches is not None and not (
        isinstance(caches, (list, tuple)) and caches and all(isinstance(cache, KVCache) for cache in caches)
    ):
        fix = "pass [cache], or None on a rank that is new"
        raise DtypeError("recover", "a list of caches, one a layer", type(caches).__name__, fix)
    check_unknown_options("recover", more)
    if len({(cache.mesh.heads, cache.tokens) for cache in caches or ()}) > 1:
        fix = "pass the caches of one model, layer by layer"
        raise MeshError("recover", "caches of one mesh", "caches of several", fix)


def _fault(known: list[dict[str, Any]], here: Mesh, capacity: object, length: int) -> InputError | None:
    """What every rank finds wrong with what all said, if anything is."""
    if not known:
        fix = "pass what is left of the caches on the ranks that had them"
        return MeshError("recover", "caches on some rank", "None on all", fix)
    for name in ("sizes", "mesh"):
        if any(each[name] != known[0][name] for each in known):
            given, fix = f"ranks whose {name} differ", "pass the caches of one model, layer by layer, on every rank"
            return MeshError("recover", "the same caches on every rank", given, fix)
    if any(each["changes"] != known[0]["changes"] for each in known):
        given, fix = "ranks of which some were cut or reordered once more", "load a checkpoint, or prefill once more"
        return MeshError("recover", "caches whose tokens only grew since all were alike", given, fix)
    if any(min(each["padding"], length) != min(known[0]["padding"], length) for each in known):
        given, fix = "ranks whose padding differs", "load a checkpoint, or prefill once more"
        return MeshError("recover", "the same padding on every rank", given, fix)
    heads, tokens = known[0]["mesh"]
    held = {tuple(place) for each in known for place in each["held"]}
    lost = [(h, t) for h in range(heads) for t in range(tokens) if (h, t) not in held]
    if lost:
        given, fix = f"none of {lost}, along heads and tokens", "load a checkpoint, or prefill once more"
        return MeshError("recover", "a rank or a copy of each shard", given, fix)
    if isinstance(capacity, int) and capacity < length:
        given = f"{length} in a capacity of {capacity}"
        return ShapeError("recover", "room for the tokens that are left", given, "say a larger capacity=")
    return Sizes.decode(known[0]["sizes"][0]).fault(here.heads.size)


def _sources(said: list[dict[str, Any] | None]) -> dict[Place, int]:
    """From which rank of the new mesh each old shard comes: from who held it, or else from the first copy."""
    sources: dict[Place, int] = {}
    for copy in (False, True):
        for rank, each in enumerate(said):
            for heads, tokens in (each["held"][1:] if copy else each["held"][:1]) if each else ():
                sources.setdefault((heads, tokens), rank)
    return sources


def _room(cache: KVCache, place: Place) -> CacheShard:
    """That of an old shard, of its own or a copy."""
    return next(room for room in cache.rooms if room.index == place[1])
