"""Keys and values of a growing sequence, sharded over the ranks of a mesh, where decoding leaves them.

Tokens are dealt to ranks in blocks, in turn, so that shards stay even as the cache grows. After a sharded prefill they
stay on the rank that made them: a slot knows its token, so nothing is moved. All room is reserved at once and the
lengths live on the device: a step neither copies the cache nor waits for the device.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from attnmesh.comm.consensus import CallChecker, describe_call, run_agreed
from attnmesh.comm.init_mesh import device_fault, device_for
from attnmesh.comm.p2p import blank, swap
from attnmesh.comm.topology import mailboxes_of, rounds
from attnmesh.core.checks import check_checked
from attnmesh.core.digest import fingerprints, history_checksum
from attnmesh.decode.cache_config import Sizes
from attnmesh.decode.cache_shard import CacheShard, TokenCounts, check_cover, cover
from attnmesh.decode.checkpoint import Layers, SavedPieces
from attnmesh.decode.checkpoint_reader import Found, fill, inspect
from attnmesh.decode.checkpoint_writer import Saving, begin
from attnmesh.decode.replicas import Copies, check_copies
from attnmesh.errors import ShapeError
from attnmesh.kernels.cache_view import CacheView, Padding
from attnmesh.mesh.axes import Mesh, flat_axis


class KVCache:
    """One layer's keys and values, a shard on each rank of a mesh. Every rank makes the same calls.

    With a heads axis a rank keeps its share of the key heads; tokens are sharded over the other axes together. Results
    are right only if every rank makes the same calls. `checked` says when ranks ask each other whether they do, and all
    raise the same error if not: at every call, if True; never, if False; else at the first `append`, `truncate` and
    `reorder`, at each `reserve`, and at each `decode`, where it costs nothing; on GPUs at the first of each kind. Who
    is called wrong when nobody asks raises alone; `decode` notices lengths, padding and orders that differ, and
    `truncate` mends lengths.

    >>> cache = KVCache(None, batch=1, kv_heads=2, head_dim=4, capacity=100, dtype=torch.float32)
    >>> cache.append(*torch.randn(2, 1, 2, 5, 4))
    >>> cache.truncate(3)
    >>> cache.length
    3
    """

    def __init__(
        self,
        mesh: DeviceMesh | None,
        *,
        batch: int,
        kv_heads: int,
        head_dim: int,
        value_dim: int | None = None,
        capacity: int,
        dtype: torch.dtype,
        device: torch.device | str | None = None,
        block: int = 16,
        checked: bool | None = None,
        copies: int = 1,
    ) -> None:
        """Reserve room for `capacity` tokens; `block` tokens in a row go to one rank.

        With `copies=2` the next host keeps them too, or on one host the next rank: see `attnmesh.recover`.
        """
        widths = head_dim, head_dim if value_dim is None else value_dim
        sizes = Sizes(batch, kv_heads, *widths, capacity, block, dtype)
        self.device_mesh, self.mesh, self.device = mesh, Mesh.of(mesh), device_for(mesh, device)
        call = describe_call("KVCache", **vars(sizes), device=self.device.type, checked=checked, copies=copies)
        run_agreed(self.mesh, lambda: self._check(sizes, device, checked, copies), call)
        self.tokens = flat_axis(mesh, ("queries", "keys"))  # a group may be made of it, by all ranks at once
        self.checker = CallChecker(self.mesh, self.device, checked)
        self.history_checksum = (
            0  # of what was padding and how sequences were reordered: ranks that were told otherwise differ
        )
        self._saving: Saving | None = None
        self._known = SavedPieces()
        self.changes = 0  # how often it was cut or reordered: `recover` is for caches that have grown
        self._most = 0  # the length, as far as the host knows: what a replayed graph appends it does not
        if self.tokens.size > 1:
            rounds(self.tokens, False)  # the ranks tell each other now on which hosts they are
        for axis in (self.tokens, self.mesh.heads):
            mailboxes_of(axis, self.device)
        room = partial(CacheShard, sizes, self.mesh.heads, self.tokens.size, self.device)
        self.copies = Copies(self.tokens, copies)
        made = run_agreed(self.mesh, lambda: [room(index) for index in (self.tokens.index, *self.copies.of)], "KVCache")
        self.shard, self.copies.rooms = made[0], dict(zip(self.copies.of, made[1:], strict=True))
        self._spread = TokenCounts(self.shard.block_cyclic, 0, (0,) * self.tokens.size)

    def _check(self, sizes: Sizes, device: object, checked: object, copies: object) -> None:
        check_checked("KVCache", checked)
        check_copies(copies, self.mesh.queries.size * self.mesh.keys.size)
        if fault := sizes.fault(self.mesh.heads.size) or device_fault("KVCache", self.device, device):
            raise fault

    def __repr__(self) -> str:
        """What it is made for, and what it holds."""
        held = f"{self.length} tokens, {self.used} of them here, {'' if self.is_block_cyclic else 'not '}all dealt"
        return f"KVCache({self.sizes}, {held})"

    def __deepcopy__(self, memo: dict[int, Any]) -> "KVCache":
        """The same tokens in tensors of its own, on the same mesh."""
        twin = object.__new__(type(self))
        twin.__dict__ = {**self.__dict__, "_saving": None, "_known": SavedPieces()}
        twin.shard, twin.copies = self.shard.twin(), self.copies.twin()
        return twin

    @property
    def sizes(self) -> Sizes:
        """What it is made for."""
        return self.shard.sizes

    @property
    def rooms(self) -> list[CacheShard]:
        """That of this rank's own tokens, and those of its copies of others'."""
        return [self.shard, *self.copies.rooms.values()]

    @property
    def keys(self) -> Tensor:
        """This rank's keys, (batch, heads, slots, dim), of which the first are `used`."""
        return self.shard.keys

    @property
    def values(self) -> Tensor:
        """This rank's values, as its keys."""
        return self.shard.values

    @property
    def padding(self) -> Padding | None:
        """Which tokens are real, if any is not."""
        return self.shard.padding

    @property
    def length(self) -> int:
        """Tokens so far, of all ranks; in a padded batch padding counts."""
        return self.shard.length

    @property
    def used(self) -> int:
        """Tokens that this rank holds."""
        return self.shard.used

    @property
    def held(self) -> CacheView:
        """What this rank holds, as tensors of its device."""
        return self.shard.held

    def holds(self, tokens: int) -> bool:
        """Whether there are so many, and none beyond the capacity: a GPU is asked if the host does not know it."""
        known = self._most if self.device.type == "cuda" else self.length
        if not tokens <= known <= self.sizes.capacity:
            known = self.length
        return tokens <= known <= self.sizes.capacity

    @property
    def lengths(self) -> Tensor:
        """Real tokens of each sequence, (batch,)."""
        state = self.shard.state
        return (state[0].expand(self.sizes.batch) if self.padding is None else self.padding.lengths).clone()

    @property
    def is_block_cyclic(self) -> bool:
        """Whether every token lies where dealing puts it, as after `append` alone."""
        return self._spread.start == 0

    def append(self, k: Tensor, v: Tensor, *, real: Tensor | None = None) -> None:
        """Add new tokens, the same on every rank; each keeps its own. `real`, (batch, tokens), is False for padding."""
        new = {"k": k, "v": v, "real": real}
        self.checker.check("append", lambda: self._check_append(k, v, real), lambda: fingerprints(new))
        self._note(real, k.shape[2])
        with torch.no_grad():
            for room in self.rooms:
                room.add(k, v, real)

    def _check_append(self, k: Tensor, v: Tensor, real: Tensor | None) -> None:
        self.sizes.check_new("append", k, v, self.device)
        self.sizes.check_real("append", real, k.shape[2])
        if not torch.compiler.is_compiling():
            self._check_room("append", k.shape[2], self._spread)

    def append_shard(self, k: Tensor, v: Tensor, positions: Tensor, *, real: Tensor | None = None) -> None:
        """Keep the tokens that this rank made, all heads of them, at these positions of the whole sequence.

        All ranks' positions together follow the cache's length, each once, as a layout deals them out. `real`, (batch,
        tokens of all ranks), is False for padding and the same on every rank.
        """
        start = self.length
        table = self.checker.check(
            "append_shard",
            lambda: self._check_append_shard(k, v, positions, real),
            lambda: {
                "tokens": start,
                "capacity": self.sizes.capacity,
                "padding": None if real is None else list(real.shape),
                "stamp": history_checksum(0, real),
            },
            must=True,
        )
        more = sum(count for count, *_ in table)
        check_cover(sum(said for _, _, said, _ in table), start, more)
        self.sizes.check_real("append_shard", real, more)
        counts = self._spread.counts(start)
        for count, owner, *_ in table:
            counts[owner] += count
        by_dealing = self.is_block_cyclic and all(in_turn for *_, in_turn in table)
        spread = self._spread if by_dealing else TokenCounts(self.shard.block_cyclic, start + more, tuple(counts))
        self._check_room("append_shard", more, spread)
        self._spread = spread
        self._note(real, more)
        with torch.no_grad():
            k, v, tokens = self._all_tokens(k, v, positions.to(self.device), [count for count, *_ in table])
            self.shard.place(k, v, tokens, more, real)
            self.copies.send(k, v, tokens, more, real)

    @torch.no_grad()
    def truncate(self, length: int) -> None:
        """Forget the tokens from `length` on, as after a rejected speculation."""
        self._finish_saving()
        before = self.length

        def before_it() -> tuple[int, int]:
            if isinstance(length, bool) or not isinstance(length, int) or not 0 <= length <= before:
                given, fix = f"{length!r} of type {type(length).__name__}", "pass an int that is no more than it holds"
                raise ShapeError("truncate", f"a length from 0 to {before}", given, fix)
            return self.tokens.index, self.shard.before(length)

        dealt = self.is_block_cyclic  # if not, only the others know how many of their tokens are left
        table = self.checker.check("truncate", before_it, lambda: {"to": length, "tokens": before}, must=not dealt)
        if not dealt and length < self._spread.start:
            held = sorted(set(map(tuple, table)))  # of ranks with the same tokens of other heads once
            self._spread = TokenCounts(self.shard.block_cyclic, length, tuple(count for _, count in held))
        for room in self.rooms:
            room.cut(length)
        self._known.forget(self.used)
        self._most, self.changes = length, self.changes + 1

    @torch.no_grad()
    def reserve(self, capacity: int) -> None:
        """Make room for at least so many tokens; every rank calls it. One tensor is copied at a time."""
        sizes = replace(self.sizes, capacity=capacity)

        def check() -> None:
            if fault := sizes.fault(self.mesh.heads.size):
                raise fault

        asked = self.checker.checked is not False
        self.checker.check("reserve", check, lambda: {"capacity": capacity}, must=asked)

        def grow() -> None:
            for room in self.rooms[::-1]:  # its own at last, by which it is known how many tokens fit
                if capacity > room.sizes.capacity:
                    room.grow(sizes)

        self.checker.check("reserve", grow, dict, must=asked)

    @torch.no_grad()
    def reorder(self, batch_index: Tensor) -> None:
        """Sequence b becomes what sequence `batch_index[b]` was, as beam search asks; there may be more or fewer."""
        self.checker.check("reorder", lambda: self.sizes.check_order(batch_index), lambda: {"to": batch_index.tolist()})
        self._finish_saving()
        index = batch_index.to(self.device)
        for room in self.rooms:
            room.reorder(index)
        self._known.forget()
        self.history_checksum, self.changes = history_checksum(self.history_checksum, index), self.changes + 1

    def save(self, path: str | Path, *, wait: bool = True) -> Saving:
        """Write the cache to a folder, each rank its own tokens; every rank calls it.

        What the folder held before stays until all is written. Without `wait`, it is written while decoding goes on;
        then every rank has to call `wait()` on what is returned.
        """
        return save_layers([self], path, wait=wait)

    def _finish_saving(self) -> None:
        """What is being written is not to change."""
        if self._saving is not None:
            self._saving.finish_writing()

    @classmethod
    def load(
        cls,
        path: str | Path,
        mesh: DeviceMesh | None,
        *,
        capacity: int | None = None,
        device: torch.device | str | None = None,
        checked: bool | None = None,
        copies: int = 1,
    ) -> "KVCache":
        """The cache that was saved, on any number of ranks: its tokens are dealt anew. Every rank calls it."""
        (cache,), _, _ = load_layers(
            path, mesh, layers=1, capacity=capacity, device=device, checked=checked, copies=copies
        )
        return cache

    def filled(self, length: int, real: Tensor | None) -> None:
        """All tokens have been written where dealing puts them; now they count, and copies are sent out."""
        held = self.shard.filled(length, real)
        k, v = (x[:, :, :held] for x in (self.keys, self.values))
        self.copies.send(k, v, self.shard.token_index[:held], length, real)
        self._most = length

    def _note(self, real: Tensor | None, more: int) -> None:
        """What the host knows of so many new tokens: how many at most, and which are real, once any was not."""
        if torch.compiler.is_compiling():
            return
        self._most += more
        if real is not None or self.padding is not None:
            self.history_checksum = history_checksum(
                self.history_checksum, torch.ones(self.sizes.batch, more) > 0 if real is None else real
            )

    def _all_tokens(self, k: Tensor, v: Tensor, positions: Tensor, counts: list[int]) -> tuple[Tensor, Tensor, Tensor]:
        """Along the heads axis: this rank's heads of the tokens of all in line."""
        axis = self.mesh.heads
        if axis.size == 1:
            return k, v, positions
        parts = [(*each, positions) for each in zip(k.chunk(axis.size, 1), v.chunk(axis.size, 1), strict=True)]
        shape = self.mesh.shape
        shards = [shape.shard(h, self.mesh.queries.index, self.mesh.keys.index) for h in range(axis.size)]
        wanted = [tuple(blank(x, counts[shard], 2 if x.ndim == 4 else 0) for x in parts[0]) for shard in shards]
        columns = zip(*swap(parts, wanted, axis), strict=True)
        k, v, positions = (torch.cat(x, dim=-2 if x[0].ndim == 4 else 0) for x in columns)
        return k, v, positions

    def _check_room(self, subject: str, more: int, spread: TokenCounts) -> None:
        """Raise, on all ranks alike and before anything is written, unless the tokens fit, if they lie like this."""
        capacity = self.sizes.capacity
        if self.device.type != "cuda" or self._most + more > capacity:
            self._most = self.length
        if self._most + more > capacity:
            given = f"{self._most} tokens and {more} more in a cache of {capacity}"
            fix = "reserve a larger capacity" + (", or truncate" if self._most else "")
            raise ShapeError(subject, "room for the new tokens", given, fix)
        if not spread.start:  # dealing fills no rank beyond its room
            return
        fullest = max(spread.counts(self._most + more))
        if fullest > self.shard.slots:
            given = f"{fullest} tokens on one rank, which has room for {self.shard.slots}"
            fix = "prefill in shards of even size, or reserve a larger capacity"
            raise ShapeError(subject, "tokens spread evenly over the ranks", given, fix)

    def _check_append_shard(
        self, k: Tensor, v: Tensor, positions: Tensor, real: Tensor | None
    ) -> tuple[int, int, int, bool]:
        self.sizes.check_new("append_shard", k, v, self.device)
        self.sizes.check_positions(positions, k.shape[2])
        self.sizes.check_real("append_shard", real, None)
        in_turn = bool((self.shard.block_cyclic.owner(positions) == self.tokens.index).all())
        return len(positions), self.tokens.index, cover(positions), in_turn


def save_layers(
    caches: Sequence[KVCache],
    path: str | Path,
    *,
    more: Mapping[str, Tensor] | None = None,
    note: str = "",
    wait: bool = True,
) -> Saving:
    """Write caches of the same tokens to a folder, as `KVCache.save` does one."""
    first = caches[0]
    for cache in caches:
        if cache._saving is not None and not cache._saving.concluded:
            cache._saving.wait()  # or two would write to one place
    real = None if first.padding is None else first.padding.token_mask[:, : first.length]
    known = first._known
    if known.of != tuple(map(id, caches)) or any(cache._known is not known for cache in caches):
        known = SavedPieces(caches)
    rooms, lengths = tuple(cache.shard for cache in caches), tuple(cache.length for cache in caches)
    saving = begin(path, Layers(first.mesh, rooms, lengths, first.used, real, known), more or {}, note)
    for cache in caches:
        cache._saving, cache._known = saving, known
    if wait:
        saving.wait()
    return saving


def load_layers(
    path: str | Path,
    mesh: DeviceMesh | None,
    *,
    layers: int | None = None,
    capacity: int | None = None,
    device: torch.device | str | None = None,
    checked: bool | None = None,
    copies: int = 1,
) -> tuple[list[KVCache], dict[str, Tensor], str]:
    """What `save_layers` wrote, on any number of ranks: the caches, what more there was, and its note."""
    here, place = Mesh.of(mesh), device_for(mesh, device)

    def look() -> Found:
        if fault := device_fault("load", place, device):
            raise fault
        check_copies(copies, here.queries.size * here.keys.size)
        return inspect(path, here, place, layers, capacity, copies)

    found = run_agreed(here, look, lambda came: describe_call("load", of=came.header, capacity=capacity))
    caches = [KVCache(mesh, **vars(each), device=device, checked=checked, copies=copies) for each in found.sizes]
    with torch.no_grad():
        run_agreed(here, lambda: fill([cache.shard for cache in caches], found.path, found.header), "load")
        for cache in caches:
            cache.filled(found.header.length, found.real)
    return caches, found.more, found.header.note
