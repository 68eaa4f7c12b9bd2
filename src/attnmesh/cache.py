"""Keys and values of a growing sequence, sharded over the ranks of a mesh, where decoding leaves them.

Tokens are dealt to ranks in blocks, in turn, so that shards stay even as the cache grows. After a sharded prefill they
stay on the rank that made them: a slot knows its token, so nothing is moved. All room is reserved at once and the
lengths live on the device: a step neither copies the cache nor waits for the device.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from attnmesh.agree import agree, agreed, askable, check_checked, fingerprints, stamp, told
from attnmesh.deal import Deal, check_cover, cover
from attnmesh.errors import DeviceError, InputError, ShapeError, StoreError
from attnmesh.exchange import blank, swap
from attnmesh.hosts import board_of, rounds
from attnmesh.mesh import Mesh, flat_axis
from attnmesh.padding import Padding
from attnmesh.saved import Header, Saving, Share, check_fits, fill, next_saving, opened, publish, real_tokens, save
from attnmesh.sizes import Sizes
from attnmesh.slots import Slots

SLACK = 2
"""Tokens by which a shard of a prefill may be larger than an even share: a zigzag's two chunks are rounded each."""


class KVCache:
    """One layer's keys and values, a shard on each rank of a mesh. Every rank makes the same calls.

    With a heads axis a rank keeps its share of the key heads; tokens are sharded over the other axes together. Only
    what every rank was told alike is right. `checked` says when ranks ask each other whether they were, and all raise
    the same error if not: at every call, if True; never, if False; else at the first `append`, `truncate`, `reorder`
    and `reserve`, and at each `decode`, where it costs nothing; on GPUs at the first of each kind. A rank that is told
    wrong when nobody asks raises alone; `decode` notices lengths, padding and orders that differ, and `truncate` mends
    lengths.

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
    ) -> None:
        """Reserve room for `capacity` tokens; `block` tokens in a row go to one rank."""
        widths = head_dim, head_dim if value_dim is None else value_dim
        self.sizes = Sizes(batch, kv_heads, *widths, capacity, block, dtype)
        self.device_mesh, self.mesh, self.tokens = mesh, Mesh.of(mesh), flat_axis(mesh, ("queries", "keys"))
        self.device = _device(mesh, device)
        call = told("KVCache", **vars(self.sizes), device=self.device.type, checked=checked)
        agreed(self.mesh, _device(mesh, None), call, lambda: self._check(device, checked))
        self.checked, self.kinds = checked, set[Any]()  # of calls that ranks have found to be the same
        self.deal = Deal(block, self.tokens.size)
        self.slots = self._slots(capacity)
        # One slot more than is used: what is another rank's is written there, so that nobody need ask whose it is.
        room = batch, kv_heads // self.mesh.heads.size, self.slots + 1
        with torch.inference_mode(False):  # tensors that can be written to in any mode
            self.keys, self.values = (torch.empty(*room, n, dtype=dtype, device=self.device) for n in widths)
            self.columns = torch.zeros(self.slots + 1, dtype=torch.int64, device=self.device)  # the token in each slot
            self.state = torch.zeros(2, dtype=torch.int64, device=self.device)  # tokens of all ranks, and held here
        self.padding: Padding | None = None
        self.stamp = 0  # of what was padding and how sequences were reordered: ranks that were told otherwise differ
        self._shards = 0, [0] * self.tokens.size  # up to which token each rank holds how many, before dealing goes on
        self._saving: Saving | None = None
        self._most = 0  # the length, or more where tokens were cut off since: known without asking the device
        if self.tokens.size > 1:
            rounds(self.tokens, False, self.device)  # the ranks tell each other now on which hosts they are
        for axis in (self.tokens, self.mesh.heads):
            board_of(axis, self.device)

    def _check(self, device: object, checked: object) -> None:
        check_checked("KVCache", checked)
        if fault := self.sizes.fault(self.mesh.heads.size) or _device_fault(self.device, device):
            raise fault

    def __repr__(self) -> str:
        """What it is made for, and what it holds."""
        held = f"{self.length} tokens, {self.used} of them here, {'' if self.dealt else 'not '}all dealt"
        return f"KVCache({self.sizes}, {held})"

    def __deepcopy__(self, memo: dict[int, Any]) -> "KVCache":
        """The same tokens in tensors of its own, on the same mesh."""
        twin = object.__new__(type(self))
        twin.__dict__ = {**self.__dict__, "_saving": None}
        with torch.inference_mode(False):
            for name in ("keys", "values", "columns", "state"):
                setattr(twin, name, getattr(self, name).clone())
            if self.padding is not None:
                twin.padding = Padding(*(x.clone() for x in self.padding))
        start, counts = self._shards
        twin._shards = start, list(counts)
        return twin

    @property
    def length(self) -> int:
        """Tokens so far, of all ranks; in a padded batch padding counts."""
        return int(self.state.tolist()[0])

    @property
    def used(self) -> int:
        """Tokens that this rank holds."""
        return int(self.state.tolist()[1])

    @property
    def held(self) -> Slots:
        """What this rank holds, as tensors of its device."""
        return Slots(self.keys, self.values, self.columns, self.state, self.padding)

    def holds(self, tokens: int) -> bool:
        """Whether there are so many, and none beyond the capacity: a GPU is asked if the host does not know it."""
        known = self._most if self.device.type == "cuda" else self.length
        if not tokens <= known <= self.sizes.capacity:
            known = self.length
        return tokens <= known <= self.sizes.capacity

    @property
    def lengths(self) -> Tensor:
        """Real tokens of each sequence, (batch,)."""
        return (self.state[0].expand(self.sizes.batch) if self.padding is None else self.padding.lengths).clone()

    @property
    def dealt(self) -> bool:
        """Whether every token lies where dealing puts it, as after `append` alone."""
        return self._shards[0] == 0

    def append(self, k: Tensor, v: Tensor, *, real: Tensor | None = None) -> None:
        """Add new tokens, the same on every rank; each keeps its own. `real`, (batch, tokens), is False for padding."""
        self.ask("append", lambda: self._check_append(k, v, real), lambda: fingerprints({"k": k, "v": v, "real": real}))
        more = k.shape[2]
        with torch.no_grad():
            if self._all_elsewhere(more, real):
                self.state[0] += more
            else:
                self._append(k, v, more, real)

    def _check_append(self, k: Tensor, v: Tensor, real: Tensor | None) -> tuple[()]:
        self.sizes.check_new("append", k, v, self.device)
        self.sizes.check_real("append", real, k.shape[2])
        if not torch.compiler.is_compiling():
            self._check_room("append", k.shape[2])
        return ()

    def _append(self, k: Tensor, v: Tensor, more: int, real: Tensor | None) -> None:
        length, used = self.state.unbind()
        tokens = length + torch.arange(more, device=self.device)
        mine = (self.deal.owner(tokens) == self.tokens.index) & (tokens < self.sizes.capacity)
        slots = torch.where(mine, used + mine.cumsum(0) - 1, self.slots).clamp(max=self.slots)
        own_k, own_v = (x.chunk(self.mesh.heads.size, 1)[self.mesh.heads.index] for x in (k, v))
        self._write(own_k, own_v, tokens, slots)
        self._pad(tokens, slots, more, real)
        self.state += torch.stack((torch.full_like(length, more), mine.sum()))

    def append_shard(self, k: Tensor, v: Tensor, positions: Tensor, *, real: Tensor | None = None) -> None:
        """Keep the tokens that this rank made, all heads of them, at these positions of the whole sequence.

        All ranks' positions together follow the cache's length, each once, as a layout deals them out. `real`, (batch,
        tokens of all ranks), is False for padding and the same on every rank.
        """
        start = self.length
        table = self.ask(
            "append_shard",
            lambda: self._check_append_shard(k, v, positions, real),
            lambda: {"tokens": start, "padding": None if real is None else list(real.shape), "stamp": stamp(0, real)},
            must=True,
        )
        more = sum(count for count, *_ in table)
        check_cover(sum(said for _, _, said, _ in table), start, more)
        self.sizes.check_real("append_shard", real, more)
        counts = self._counts(start)
        for count, owner, *_ in table:
            counts[owner] += count
        by_dealing = self.dealt and all(in_turn for *_, in_turn in table)
        self._check_room("append_shard", more, None if by_dealing else (start + more, counts))
        with torch.no_grad():
            k, v, tokens = self._all_tokens(k, v, positions.to(self.device), [count for count, *_ in table])
            order = tokens.argsort()
            slots = self.used + torch.arange(len(order), device=self.device)
            self._write(k.index_select(2, order), v.index_select(2, order), tokens[order], slots)
            self._pad(tokens[order], slots, more, real)
            self.state += torch.tensor([more, len(order)], device=self.device)

    @torch.no_grad()
    def truncate(self, length: int) -> None:
        """Forget the tokens from `length` on, as after a rejected speculation."""
        self._finish_saving()
        before = self.length

        def held() -> tuple[int, int]:
            if isinstance(length, bool) or not isinstance(length, int) or not 0 <= length <= before:
                given, fix = f"{length!r} of type {type(length).__name__}", "pass an int that is no more than it holds"
                raise ShapeError("truncate", f"a length from 0 to {before}", given, fix)
            return self.tokens.index, int(torch.searchsorted(self.columns[: self.used], length))

        dealt = self.dealt  # if not, only the others know how many of their tokens are left
        table = self.ask("truncate", held, lambda: {"to": length, "tokens": before}, must=not dealt)
        if not dealt and length < self._shards[0]:
            self._shards = length, [count for _, count in sorted({(rank, count) for rank, count in table})]
        if self.padding is not None:
            self.padding.cut(length, before)
        self.state.copy_(torch.tensor([length, held()[1]]))
        self._most = length

    @torch.no_grad()
    def reserve(self, capacity: int) -> None:
        """Make room for at least so many tokens; every rank calls it. One tensor is copied at a time."""
        sizes = replace(self.sizes, capacity=capacity)

        def check() -> tuple[()]:
            if fault := sizes.fault(self.mesh.heads.size):
                raise fault
            return ()

        self.ask("reserve", check, lambda: {"capacity": capacity})
        if capacity <= self.sizes.capacity:
            return
        used, self.slots = self.used, self._slots(capacity)
        with torch.inference_mode(False):
            for name in ("keys", "values"):
                old = getattr(self, name)
                new = old.new_empty(*old.shape[:2], self.slots + 1, old.shape[3])
                new[:, :, :used] = old[:, :, :used]
                setattr(self, name, new)
            self.columns = torch.nn.functional.pad(self.columns, (0, self.slots + 1 - len(self.columns)))
            if self.padding is not None:
                self.padding = self.padding.grown(capacity, self.slots + 1)
        self.sizes = sizes

    @torch.no_grad()
    def reorder(self, batch_index: Tensor) -> None:
        """Sequence b becomes what sequence `batch_index[b]` was, as beam search asks; there may be more or fewer."""
        self.ask("reorder", lambda: self.sizes.check_order(batch_index), lambda: {"to": batch_index.tolist()})
        self._finish_saving()
        index, batch, used = batch_index.to(self.device), self.sizes.batch, self.used
        if len(index) != batch:
            with torch.inference_mode(False):
                self.keys, self.values = (x.index_select(0, index) for x in (self.keys, self.values))
            self.sizes = replace(self.sizes, batch=len(index))
        else:
            for head in range(self.keys.shape[1]):  # one head at a time: the copy is no larger than that
                for x in (self.keys, self.values):
                    x[:, head, :used] = x[:, head, :used].index_select(0, index)
        if self.padding is not None:
            self.padding = self.padding.reordered(index)
        self.stamp = stamp(self.stamp, index)

    def save(self, path: str | Path, *, wait: bool = True) -> Saving:
        """Write the cache to a folder, each rank its own tokens; every rank calls it.

        What the folder held before stays until all is written. Without `wait`, it is written while decoding goes on;
        then every rank has to call `wait()` on what is returned.
        """
        self._finish_saving()
        folder = Path(path)
        number = agreed(self.mesh, self.device, "save", lambda: next_saving(folder))
        agree(self.mesh, self.device, told("save", number=number))
        header = Header(
            self.sizes, self.padding is not None, self.length, self.mesh.heads.size, self.tokens.size, number
        )
        share, used, padding = self._share(), self.used, self.padding

        def conclude(error: StoreError | None) -> None:
            agree(self.mesh, self.device, error or "save")
            agreed(self.mesh, self.device, "save", lambda: publish(folder, header) if share.first else None)

        self._saving = Saving(lambda: save(folder, number, share, used, padding, header.length), conclude)
        if wait:
            self._saving.wait()
        return self._saving

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
    ) -> "KVCache":
        """The cache that was saved, on any number of ranks: its tokens are dealt anew. Every rank calls it."""
        folder, place = Path(path), (Mesh.of(mesh), _device(mesh, device))
        header = agreed(*place, "load", lambda: opened(folder))
        sizes = header.sizes if capacity is None else replace(header.sizes, capacity=capacity)
        agreed(*place, "load", lambda: check_fits(sizes, *place))
        cache = cls(mesh, **vars(sizes), device=device)
        cache._check_room("load", header.length)
        with torch.no_grad():
            agreed(cache.mesh, cache.device, "load", lambda: cache._fill(folder, header))
        return cache

    def _fill(self, folder: Path, header: Header) -> None:
        held = fill(self._share(), folder, header)
        self.state.copy_(torch.tensor([header.length, held]))
        if header.padded:
            real = real_tokens(folder, header)
            self.padding, none = self._unpadded(torch.zeros_like(self.state[0])), torch.zeros_like(self.state[0])
            self.padding.add(none, real.to(self.device), self.columns[:held], torch.arange(held, device=self.device))

    def _share(self) -> Share:
        return Share(self.keys, self.values, self.columns, self.sizes, self.mesh.heads, self.tokens, self.deal)

    def _slots(self, capacity: int) -> int:
        """Tokens for which a rank has room."""
        return min(capacity, -(-capacity // self.tokens.size) + self.sizes.block + SLACK)

    def _unpadded(self, length: Tensor) -> Padding:
        return Padding.none(self.sizes.batch, self.sizes.capacity, self.columns, length)

    def _all_elsewhere(self, more: int, real: Tensor | None) -> bool:
        """Whether all new tokens are dealt to one other rank, as most are; where it is free to know."""
        if torch.compiler.is_compiling() or self.device.type == "cuda" or not more:
            return False
        if self.padding is not None or real is not None:  # all ranks note what is real
            return False
        return self.deal.to_one(self.length, self.length + more) not in (None, self.tokens.index)

    def _write(self, k: Tensor, v: Tensor, tokens: Tensor, slots: Tensor) -> None:
        """Put this rank's heads of its tokens into slots."""
        self.keys.index_copy_(2, slots, k)
        self.values.index_copy_(2, slots, v)
        self.columns.index_copy_(0, slots, tokens)

    def _pad(self, tokens: Tensor, slots: Tensor, more: int, real: Tensor | None) -> None:
        """Note which of `more` new tokens of all ranks are real, if any ever was not, before the length counts them."""
        if real is None and self.padding is None:
            return
        self.padding = self.padding or self._unpadded(self.state[0])
        told = torch.ones(self.sizes.batch, more, dtype=torch.bool) if real is None else real
        if not torch.compiler.is_compiling():
            self.stamp = stamp(self.stamp, told)
        there = torch.ones_like(told, device=self.device) if real is None else real.to(self.device)  # not brought there
        self.padding.add(self.state[0], there, tokens - self.state[0], slots)

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

    def _counts(self, length: int) -> list[int]:
        """How many of the first `length` tokens each rank along the tokens' axis holds."""
        start, counts = self._shards
        deal = self.deal
        return [count + deal.count(rank, length) - deal.count(rank, start) for rank, count in enumerate(counts)]

    def _check_room(self, subject: str, more: int, shards: tuple[int, list[int]] | None = None) -> None:
        """Raise, on all ranks alike and before anything is written, unless the tokens fit; then expect them."""
        known, capacity = self._most if self.device.type == "cuda" else self.length, self.sizes.capacity
        if known + more > capacity:
            known = self.length
        if known + more > capacity:
            given = f"{known} tokens and {more} more in a cache of {capacity}"
            fix = "reserve a larger capacity" + (", or truncate" if known else "")
            raise ShapeError(subject, "room for the new tokens", given, fix)
        before, self._shards = self._shards, shards or self._shards
        fullest = max(self._counts(known + more))
        if fullest > self.slots:
            self._shards = before
            given = f"{fullest} tokens on one rank, which has room for {self.slots}"
            fix = "prefill in shards of even size, or reserve a larger capacity"
            raise ShapeError(subject, "tokens spread evenly over the ranks", given, fix)
        self._most = known + more

    def _check_append_shard(
        self, k: Tensor, v: Tensor, positions: Tensor, real: Tensor | None
    ) -> tuple[int, int, int, bool]:
        self.sizes.check_new("append_shard", k, v, self.device)
        self.sizes.check_positions("append_shard", positions, k.shape[2])
        self.sizes.check_real("append_shard", real, None)
        in_turn = bool((self.deal.owner(positions) == self.tokens.index).all())
        return len(positions), self.tokens.index, cover(positions), in_turn

    def ask(
        self,
        name: str,
        check: Callable[[], Sequence[int]],
        fields: Callable[[], Mapping[str, object]],
        *,
        must: bool = False,
    ) -> list[list[int]]:
        """The numbers of all ranks that ask each other whether they make the same call; of those that do not, the own.

        What is wrong with a call then all raise, and else the rank that makes it.
        """
        asks = must or (name not in self.kinds if self.checked is None else self.checked)
        if not asks or self.mesh.shape.ranks == 1 or not askable(self.device):
            return [list(check())]
        numbers: Sequence[int] = ()
        call: str | InputError
        try:
            numbers = check()
            call = told(name, **fields())
        except InputError as error:
            call = error
        table = agree(self.mesh, self.device, call, numbers)
        self.kinds.add(name)
        return table


def _device(mesh: DeviceMesh | None, device: object) -> torch.device:
    """The device asked for, if there is such, else that of the mesh."""
    try:
        if isinstance(device, (str, torch.device)):
            return torch.device(device)
    except RuntimeError:
        pass
    return torch.device(mesh.device_type if mesh is not None else "cpu")


def _device_fault(found: torch.device, device: object) -> DeviceError | None:
    fix = "leave it out for the mesh's device type"
    if device is not None and str(device) not in (str(found), found.type):
        return DeviceError("KVCache device", "a device that PyTorch knows", repr(device), fix)
    try:
        torch.empty(0, device=found)
    except (RuntimeError, AssertionError, NotImplementedError) as error:  # each of PyTorch's devices has its own
        why = str(error).splitlines()[0].rstrip(".")
        return DeviceError("KVCache device", "a device that is there", f"{str(found)!r} ({why})", fix)
    return None
