"""After ranks are lost: what the others hold, and their copies, dealt anew to the ranks of another mesh.

Those that are left leave the broken world and enter another, with new ranks or without; then all of them `recover`.
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from attnmesh.agree import agreed, texts, told
from attnmesh.cache import KVCache
from attnmesh.errors import ArgumentError, DtypeError, InputError, MeshError, ShapeError
from attnmesh.exchange import blank, share, swap
from attnmesh.mesh import AXES, Axis, Mesh, flat_axis, overlap
from attnmesh.room import Room
from attnmesh.sizes import Sizes

Place = tuple[int, int]
"""Of a shard in the old mesh: along heads and along tokens."""


def recover(caches: Sequence[KVCache] | None, mesh: DeviceMesh | None, **options: Any) -> list[KVCache]:
    """The layers' caches on another mesh, from what the ranks that are left held before; every rank of it calls it.

    A rank that is new passes None. All come to the tokens that every one of them has in every layer: some may have been
    a step ahead. `options` are those of `KVCache`: `copies`, `capacity`, `checked`, `device`.
    """
    here = Mesh.of(mesh)
    call = told("recover", **{name: options[name] for name in sorted(options)})
    agreed(here, lambda: _check(caches, options), call)
    said = [json.loads(text) for text in texts(here, json.dumps(_told_of(caches)))]
    known = [each for each in said if each]
    length = min((each["length"] for each in known), default=0)
    if fault := _fault(known, here, options.get("capacity"), length):
        raise fault  # as all ranks do, who have heard the same
    room = max(each["capacity"] for each in known)
    sizes = [replace(Sizes.decode(code), capacity=room) for code in known[0]["sizes"]]
    sources = _sources(said)
    made = [KVCache(mesh, **{**vars(each), **options}) for each in sizes]
    moves = _Moves(caches, made[0], length, sources)
    with torch.no_grad():
        real = moves.real(known[0]["padded"])
        for layer, cache in enumerate(made):
            moves.fill(cache, None if caches is None else caches[layer], real)
    return made


class _Moves:
    """Who sends which tokens to whom: every rank works out the same."""

    def __init__(self, caches: Sequence[KVCache] | None, new: KVCache, length: int, sources: dict[Place, int]) -> None:
        self.old, self.new, self.length, self.sources = caches, new, length, sources
        self.axis = flat_axis(new.device_mesh, AXES)
        here = [self.axis.index, new.mesh.heads.index, new.tokens.index]
        self.ranks = share(here, new.mesh.axes)  # by shard: where it is in line, and in the new mesh
        counts = texts(new.mesh, json.dumps(self._counts()))
        self.counts: list[dict[str, list[int]]] = [json.loads(text) for text in counts]
        found = sum(sum(each) for held in self.counts for each in held.values())
        heads = len({heads for heads, _ in sources})
        if found != heads * length:
            fix = "load a checkpoint, or prefill once more"
            raise MeshError("recover", "every token once", f"{found // heads} of {length}", fix)

    def _counts(self) -> dict[str, list[int]]:
        """Of each old shard that comes from here, how many of its tokens go to each place of the new deal."""
        found = {}
        for place in self._sent_by(self.new.mesh.shard):
            room = _room(self.old[0], place)  # type: ignore[index]
            owners = self.new.room.deal.owner(room.columns[: room.before(self.length)])
            found[str(place)] = torch.bincount(owners, minlength=self.new.tokens.size).tolist()
        return found

    def _sent_by(self, shard: int) -> list[Place]:
        return [place for place, source in self.sources.items() if source == shard]

    def _shared(self, sizes: Sizes, place: Place, heads: int) -> tuple[slice, slice]:
        """The key heads that an old shard and a new one have in common: which of the old's, and which of the new's."""
        old, new = Axis(1 + max(h for h, _ in self.sources), place[0]), Axis(self.new.mesh.heads.size, heads)
        return overlap(old.own(sizes.kv_heads), new.own(sizes.kv_heads))

    def fill(self, cache: KVCache, old: KVCache | None, real: Tensor | None) -> None:
        """Send what others are to have of an old layer, and write what comes."""
        none = torch.empty(0, dtype=torch.int64, device=cache.device)
        wanted, places = self._wanted(cache, none)
        came = swap(self._parts(cache, old, none), wanted, self.axis)
        for line, first, heads in places:
            tokens, k, v = came[line][first : first + 3]
            slots = cache.room.deal.slot(tokens)
            cache.room.columns.index_copy_(0, slots, tokens)
            cache.keys[:, heads].index_copy_(2, slots, k)
            cache.values[:, heads].index_copy_(2, slots, v)
        cache.filled(self.length, real)

    def _parts(self, cache: KVCache, old: KVCache | None, none: Tensor) -> list[tuple[Tensor, ...]]:
        """For each rank in line its heads and tokens of what comes from here."""
        parts: list[tuple[Tensor, ...]] = [(none,)] * len(self.ranks)
        for place in self._sent_by(cache.mesh.shard):
            theirs = _room(old, place)  # type: ignore[arg-type]
            tokens = theirs.columns[: theirs.before(self.length)]
            owners = cache.room.deal.owner(tokens)
            for line, heads, index in self.ranks:
                of, _ = self._shared(cache.sizes, place, heads)
                mine = (owners == index).nonzero().flatten()
                if of.start < of.stop:
                    k, v = (x[:, of].index_select(2, mine) for x in (theirs.keys, theirs.values))
                    parts[line] += tokens[mine], k, v
        return parts

    def _wanted(self, cache: KVCache, none: Tensor) -> tuple[list[tuple[Tensor, ...]], list[tuple[int, int, slice]]]:
        """What will come of each rank in line; and of each shard in it where it is, and to which heads it goes."""
        wanted: list[tuple[Tensor, ...]] = [(none,)] * len(self.ranks)
        places: list[tuple[int, int, slice]] = []
        for shard, (line, _, _) in enumerate(self.ranks):
            for place in self._sent_by(shard):
                _, heads = self._shared(cache.sizes, place, cache.mesh.heads.index)
                count = self.counts[shard][str(place)][cache.tokens.index]
                if heads.start < heads.stop:
                    places.append((line, len(wanted[line]), heads))
                    k, v = (blank(x[:, heads], count) for x in (cache.keys, cache.values))
                    wanted[line] += blank(cache.room.columns, count, 0), k, v
        return wanted, places

    def real(self, padded: bool) -> Tensor | None:
        """Which tokens are real, as the first rank knows that has any."""
        if not padded:
            return None
        first = min(self.sources.values())
        line, shape = self.ranks[first][0], (self.new.sizes.batch, self.length)
        none = torch.empty(0, dtype=torch.bool, device=self.new.device)
        own = self.old[0].padding.real[:, : self.length] if self.new.mesh.shard == first else none  # type: ignore
        wanted = [(none,)] * len(self.ranks)
        wanted[line] = (torch.empty(shape, dtype=torch.bool, device="meta"),)
        return swap([(own,)] * len(self.ranks), wanted, self.axis)[line][0]


def _told_of(caches: Sequence[KVCache] | None) -> dict[str, Any] | None:
    """What a rank has: of its own, and copies."""
    if caches is None:
        return None
    first, heads = caches[0], caches[0].mesh.heads
    return {
        "sizes": [replace(cache.sizes, capacity=1).encode() for cache in caches],
        "capacity": max(cache.sizes.capacity for cache in caches),
        "mesh": [heads.size, first.tokens.size],
        "length": min(room.length for cache in caches for room in cache.rooms),
        "changes": sorted({cache.changes for cache in caches}),
        "padded": first.padding is not None,
        "held": [[heads.index, room.index] for room in first.rooms],
    }


def _check(caches: object, options: dict[str, Any]) -> None:
    if caches is not None and not (
        isinstance(caches, (list, tuple)) and caches and all(isinstance(cache, KVCache) for cache in caches)
    ):
        fix = "pass [cache], or None on a rank that is new"
        raise DtypeError("recover", "a list of caches, one a layer", type(caches).__name__, fix)
    for name in options:
        if name not in ("copies", "capacity", "checked", "device"):
            fix = "see help(attnmesh.recover)"
            raise ArgumentError("recover", "copies, capacity, checked or device", f"{name}=", fix)


def _fault(known: list[dict[str, Any]], here: Mesh, capacity: object, length: int) -> InputError | None:
    """What every rank finds wrong with what all said, if anything is."""
    if not known:
        fix = "pass what is left of the caches on the ranks that had them"
        return MeshError("recover", "caches on some rank", "None on all", fix)
    if len({change for each in known for change in each["changes"]}) > 1:
        given, fix = "ranks of which some were cut or reordered once more", "load a checkpoint, or prefill once more"
        return MeshError("recover", "caches whose tokens only grew since all were alike", given, fix)
    for name in ("sizes", "mesh", "padded"):
        if any(each[name] != known[0][name] for each in known):
            given, fix = f"ranks whose {name} differ", "pass the caches of one model, layer by layer, on every rank"
            return MeshError("recover", "the same caches on every rank", given, fix)
    heads, tokens = known[0]["mesh"]
    held = {tuple(place) for each in known for place in each["held"]}
    lost = [(h, t) for h in range(heads) for t in range(tokens) if (h, t) not in held]
    if lost:
        given, fix = f"none of {lost}, along heads and tokens", "load a checkpoint, or prefill once more"
        return MeshError("recover", "a rank or a copy of each shard", given, fix)
    if isinstance(capacity, int) and capacity < length:
        given = f"{length} in a capacity of {capacity}"
        return ShapeError("recover", "room for the tokens that are left", given, "say a larger capacity=")
    if known[0]["sizes"][0][1] % here.heads.size:
        given = f"{known[0]['sizes'][0][1]} key heads and a heads axis of {here.heads.size}"
        return MeshError("recover", "key heads that the heads axis divides", given, "give those ranks to the keys axis")
    return None


def _sources(said: list[dict[str, Any] | None]) -> dict[Place, int]:
    """From which rank of the new mesh each old shard comes: from who held it, or else from the first copy."""
    sources: dict[Place, int] = {}
    for copy in (False, True):
        for rank, each in enumerate(said):
            for heads, tokens in (each["held"][1:] if copy else each["held"][:1]) if each else ():
                sources.setdefault((heads, tokens), rank)
    return sources


def _room(cache: KVCache, place: Place) -> Room:
    """That of an old shard, of its own or a copy."""
    return next(room for room in cache.rooms if room.index == place[1])
