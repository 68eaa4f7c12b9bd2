"""Keys and values of a growing sequence, sharded over the ranks of a mesh, where decoding leaves them.

Tokens are dealt to ranks in blocks, in turn, so that shards stay even as the cache grows. With 2 ranks and blocks of 2:

        token    0 1 2 3 4 5 6        rank 0 holds 0 1 4 5, rank 1 holds 2 3 6
        rank     0 0 1 1 0 0 1

After a sharded prefill tokens stay on the rank that made them: a slot knows its token, so nothing is moved. All room is
reserved at once and the lengths live on the device: a step neither copies the cache nor waits for the device.
"""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, TypeVar
from zlib import crc32

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from attnmesh.across import rounds
from attnmesh.agree import agree
from attnmesh.errors import DeviceError, DtypeError, InputError, KernelError, LayoutError, ShapeError, StoreError
from attnmesh.exchange import swap
from attnmesh.inputs import DTYPES, check_same_kind
from attnmesh.mesh import AXES, Mesh, flat_axis
from attnmesh.store import Stored, write

T = TypeVar("T")

NUMBERS = ("batch", "kv_heads", "head_dim", "value_dim", "capacity", "block")
"""What a cache is made of."""

VERSION = 1

HEADER = "attnmesh cache"

PIECE = 4096
"""Tokens that are saved as one tensor, so that a rank need not read all of another's to find its own."""

SLACK = 2
"""Tokens by which a shard of a prefill may be larger than an even share: a zigzag's two chunks are rounded each."""


class Ragged(NamedTuple):
    """Where sequences of a batch differ in length: which tokens are real, and how many of them come before each."""

    real: Tensor  # (batch, capacity), of all tokens, on every rank
    places: Tensor  # (batch, slots + 1), each slot's place in its own sequence, -1 for padding
    lengths: Tensor  # (batch,), real tokens of each sequence


class KVCache:
    """One layer's keys and values, a shard on each rank of a mesh. Every rank makes the same calls.

    With a heads axis a rank keeps its share of the key heads; tokens are sharded over the other axes together.

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
    ) -> None:
        """Reserve room for `capacity` tokens; `block` tokens in a row go to one rank."""
        self.mesh, self.tokens = Mesh.of(mesh), flat_axis(mesh, ("queries", "keys"))
        self.device = _device(mesh, device)
        self.batch, self.kv_heads, self.head_dim, self.block = batch, kv_heads, head_dim, block
        self.value_dim = head_dim if value_dim is None else value_dim
        self.capacity, self.dtype, self.device_mesh = capacity, dtype, mesh
        agree(self.mesh, self.device, self._described(device))
        share = -(-capacity // self.tokens.size)
        self.slots = min(capacity, share + block + SLACK)
        # One slot more than is used: what is another rank's is written there, so that nobody need ask whose it is.
        room = (batch, kv_heads // self.mesh.heads.size, self.slots + 1)
        with torch.inference_mode(False):  # tensors that can be written to in any mode
            self.keys = torch.empty(*room, head_dim, dtype=dtype, device=self.device)
            self.values = torch.empty(*room, self.value_dim, dtype=dtype, device=self.device)
            self.columns = torch.zeros(self.slots + 1, dtype=torch.int64, device=self.device)
            self.state = torch.zeros(2, dtype=torch.int64, device=self.device)  # tokens of all ranks, and held here
        if self.tokens.size > 1:
            rounds(self.tokens, False, self.device)  # ranks tell each other on which hosts they are
        self.ragged: Ragged | None = None
        self.stamp = 0  # of what was padding and how sequences were reordered: ranks that were told otherwise differ
        self._shards = (
            0,
            [0] * self.tokens.size,
        )  # up to which token, how many each rank was given other than by dealing
        self._most = 0  # the length, or more where tokens were cut off since: known without asking the device

    @property
    def length(self) -> int:
        """Tokens so far, of all ranks; in a padded batch padding counts."""
        return int(self.state.tolist()[0])

    @property
    def used(self) -> int:
        """Tokens that this rank holds."""
        return int(self.state.tolist()[1])

    @property
    def lengths(self) -> Tensor:
        """Real tokens of each sequence, (batch,)."""
        return (self.state[0].expand(self.batch) if self.ragged is None else self.ragged.lengths).clone()

    @property
    def dealt(self) -> bool:
        """Whether every token lies where dealing puts it, as after `append` alone."""
        return self._shards[0] == 0

    def append(self, k: Tensor, v: Tensor, *, real: Tensor | None = None) -> None:
        """Add new tokens, the same on every rank; each keeps its own. `real`, (batch, tokens), is False for padding."""
        self._check_new("append", k, v)
        self._check_real("append", real, k.shape[2])
        if not torch.compiler.is_compiling():
            self._check_room("append", k.shape[2])
            if self._all_elsewhere(k.shape[2], real):
                self.state[0] += k.shape[2]
                return
        with torch.no_grad():
            self._append(k, v, real)

    def _append(self, k: Tensor, v: Tensor, real: Tensor | None) -> None:
        length, used = self.state.unbind()
        tokens = length + torch.arange(k.shape[2], device=self.device)
        mine = (self.owner(tokens) == self.tokens.index) & (tokens < self.capacity)
        slots = torch.where(mine, used + mine.cumsum(0) - 1, self.slots).clamp(max=self.slots)
        own_k, own_v = (x.chunk(self.mesh.heads.size, 1)[self.mesh.heads.index] for x in (k, v))
        self._write(own_k, own_v, tokens, slots, k.shape[2], real)
        self.state += torch.stack((torch.full_like(length, k.shape[2]), mine.sum()))

    def append_shard(self, k: Tensor, v: Tensor, positions: Tensor, *, real: Tensor | None = None) -> None:
        """Keep the tokens that this rank made, all heads of them, at these positions of the whole sequence.

        All ranks' positions together follow the cache's length, each once, as a layout deals them out. `real`, (batch,
        tokens of all ranks), is False for padding and the same on every rank.
        """
        start = self.length
        call: str | InputError
        try:
            self._check_new("append_shard", k, v)
            _check_positions(positions, k.shape[2])
            self._check_real("append_shard", real, None)
            call = f"append_shard at {start}, padding stamped {_stamp(0, real)} {[] if real is None else [*real.shape]}"
        except InputError as error:
            call = error
        table = agree(self.mesh, self.device, call, self._summary(positions) if isinstance(call, str) else [0] * 4)
        total = sum(count for count, *_ in table)
        _check_cover(table, start, total)
        self._check_real("append_shard", real, total)
        given = [sum(count for count, owner, *_ in table if owner == rank) for rank in range(self.tokens.size)]
        by_dealing = self.dealt and all(in_turn for *_, in_turn in table)
        counts = self._counts(start) if by_dealing else [a + b for a, b in zip(self._counts(start), given, strict=True)]
        self._check_room("append_shard", total, None if by_dealing else (start + total, counts))
        k, v, positions = self._all_tokens(k, v, positions.to(self.device), [count for count, *_ in table])
        order = positions.argsort()
        slots = self.used + torch.arange(len(order), device=self.device)
        with torch.no_grad():
            self._write(k.index_select(2, order), v.index_select(2, order), positions[order], slots, total, real)
            self.state += torch.tensor([total, len(order)], device=self.device)

    @torch.no_grad()
    def truncate(self, length: int) -> None:
        """Forget the tokens from `length` on, as after a rejected speculation."""
        before = self.length
        call: str | InputError = f"truncate to {length}"
        if isinstance(length, bool) or not isinstance(length, int) or not 0 <= length <= before:
            given, fix = (
                f"{length!r} of type {type(length).__name__}",
                "pass an int that the cache has had",
            )
            call = ShapeError("truncate", f"a length from 0 to {before}", given, fix)
        held = int(torch.searchsorted(self.columns[: self.used], length)) if isinstance(call, str) else 0
        if not self.dealt:  # only the others know how many of their tokens are left
            table = agree(self.mesh, self.device, call, [self.tokens.index, held])
            if length < self._shards[0]:
                self._shards = length, [count for _, count in sorted({(rank, count) for rank, count in table})]
        elif isinstance(call, InputError):
            raise call
        if self.ragged is not None:
            self.ragged.lengths.sub_(self.ragged.real[:, length:before].sum(1))
            self.ragged.real[:, length:] = True
        self.state.copy_(torch.tensor([length, held]))
        self._most = length

    @torch.no_grad()
    def reorder(self, batch_index: Tensor) -> None:
        """Sequence b becomes what sequence `batch_index[b]` was, as beam search asks."""
        if not isinstance(batch_index, Tensor) or batch_index.dtype != torch.int64:
            given = str(batch_index.dtype) if isinstance(batch_index, Tensor) else type(batch_index).__name__
            raise DtypeError("reorder", "a tensor of torch.int64", given, "pass torch.tensor([...])")
        index = batch_index.to(self.device)
        if index.shape != (self.batch,) or not bool(((index >= 0) & (index < self.batch)).all()):
            given = f"{batch_index.tolist()}"
            raise ShapeError("reorder", f"{self.batch} numbers of sequences below {self.batch}", given, "name one each")
        used = self.used
        for head in range(self.keys.shape[1]):  # one head at a time: the copy is no larger than that
            for x in (self.keys, self.values):
                x[:, head, :used] = x[:, head, :used].index_select(0, index)
        for each in self.ragged or ():
            each.copy_(each.index_select(0, index))
        self.stamp = _stamp(self.stamp, index)

    def save(self, path: str | Path) -> None:
        """Write the cache to a folder, each rank its own tokens; every rank calls it."""
        here, used = f"{self.mesh.heads.index}.{self.tokens.index}", self.used
        tensors = {f"{here} columns": self.columns[:used]}
        for piece, start in enumerate(range(0, used, PIECE)):
            some = slice(start, min(start + PIECE, used))
            tensors |= {
                f"{here} keys {piece}": self.keys[:, :, some],
                f"{here} values {piece}": self.values[:, :, some],
            }
        if self.mesh.shard == 0:
            kind = [DTYPES.index(str(self.dtype).removeprefix("torch.")), self.ragged is not None]
            place = [self.length, self.mesh.heads.size, self.tokens.size]
            numbers = [VERSION, *(getattr(self, name) for name in NUMBERS), *kind, *place]
            tensors[HEADER] = torch.tensor(numbers)
            if self.ragged is not None:
                tensors["real"] = self.ragged.real[:, : self.length]
        write(path, {name: x.clone() for name, x in tensors.items()}, flat_axis(self.device_mesh, AXES))

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
        place = _device(mesh, device)
        stored, numbers = _agreed(Mesh.of(mesh), place, lambda: _opened(path))
        sizes = dict(zip(NUMBERS, numbers[1:7], strict=True)) | ({} if capacity is None else {"capacity": capacity})
        kind, padded, length, *before = numbers[7:]
        cache = cls(mesh, **sizes, dtype=getattr(torch, DTYPES[kind]), device=device)
        cache._check_room("load", length)
        _agreed(cache.mesh, cache.device, lambda: cache._fill(stored, length, bool(padded), *before))
        return cache

    @torch.no_grad()
    def _fill(self, stored: Stored, length: int, padded: bool, heads: int, ranks: int) -> None:
        """Read this rank's tokens, wherever they were: every saved shard whose heads it shares may have some."""
        axis, found = self.mesh.heads, 0
        own = range(*(index * self.kv_heads // axis.size for index in (axis.index, axis.index + 1)))
        for h, t in ((h, t) for h in range(heads) for t in range(ranks)):
            theirs = range(h * self.kv_heads // heads, (h + 1) * self.kv_heads // heads)
            both = range(max(own.start, theirs.start), min(own.stop, theirs.stop))
            if both:
                into, of = (slice(both.start - x.start, both.stop - x.start) for x in (own, theirs))
                found += len(both) * self._fill_from(stored, f"{h}.{t}", into, of)
        held = self._counts(length)[self.tokens.index]
        if found != held * len(own):
            given = f"{found // len(own)} of this rank's {held} tokens in {stored.path}"
            raise StoreError("load", "every token once", given, "restore the folder from a copy, or save again")
        self.state.copy_(torch.tensor([length, held]))
        if padded:
            (real,) = stored.read(["real"])
            self.ragged = self._new_ragged()
            self.ragged.real[:, :length] = real.to(self.device)
            places = torch.where(real, real.cumsum(1) - 1, -1).to(self.device)
            self.ragged.places[:, :held] = places.index_select(1, self.columns[:held])
            self.ragged.lengths.copy_(real.sum(1))

    def _fill_from(self, stored: Stored, shard: str, into: slice, of: slice) -> int:
        """How many of a saved shard's tokens are dealt to this rank here."""
        (columns,), found = stored.read([f"{shard} columns"]), 0
        for piece, tokens in enumerate(columns.split(PIECE) if len(columns) else ()):
            mine = (self.owner(tokens) == self.tokens.index).nonzero().flatten()
            if len(mine):
                tokens = tokens[mine].to(self.device)
                slots = tokens // (self.block * self.tokens.size) * self.block + tokens % self.block
                self.columns[slots] = tokens
                read = stored.read([f"{shard} keys {piece}", f"{shard} values {piece}"])
                for held, x in zip((self.keys, self.values), read, strict=True):
                    held[:, into].index_copy_(2, slots, x[:, of, mine].to(self.device))
                found += len(mine)
        return found

    def _new_ragged(self) -> Ragged:
        """As if all tokens so far were real."""
        with torch.inference_mode(False):
            everything = torch.ones(self.batch, self.capacity, dtype=torch.bool, device=self.device)
            return Ragged(everything, self.columns.expand(self.batch, -1).clone(), self.lengths)

    def owner(self, tokens: Tensor) -> Tensor:
        """To which rank along the tokens' axis each token is dealt."""
        return tokens // self.block % self.tokens.size

    def _all_elsewhere(self, more: int, real: Tensor | None) -> bool:
        """Whether all new tokens are dealt to one other rank, as most are; where it is free to know."""
        if self.device.type == "cuda" or self.ragged is not None or real is not None or not more:
            return False
        first, last = ((self.length + token) // self.block for token in (0, more - 1))
        return first == last and first % self.tokens.size != self.tokens.index

    def _write(self, k: Tensor, v: Tensor, tokens: Tensor, slots: Tensor, total: int, real: Tensor | None) -> None:
        """Put this rank's heads of its tokens into slots, before the length counts the `total` of all ranks."""
        self.keys.index_copy_(2, slots, k)
        self.values.index_copy_(2, slots, v)
        self.columns.index_copy_(0, slots, tokens)
        if real is not None and self.ragged is None:
            self.ragged = self._new_ragged()
        if self.ragged is not None:
            self._place(self.ragged, tokens, slots, total, real)

    def _place(self, ragged: Ragged, tokens: Tensor, slots: Tensor, total: int, real: Tensor | None) -> None:
        """Where new tokens stand in their own sequences."""
        start = self.state[0]
        if real is None:
            real = torch.ones(self.batch, total, dtype=torch.bool)
        real = real.to(self.device)
        if not torch.compiler.is_compiling():
            self.stamp = _stamp(self.stamp, real)
        ragged.real.index_copy_(1, start + torch.arange(total, device=self.device), real)
        places = torch.where(real, ragged.lengths[:, None] + real.cumsum(1) - 1, -1)
        ragged.places.index_copy_(1, slots, places.index_select(1, tokens - start))
        ragged.lengths.add_(real.sum(1))

    def _all_tokens(self, k: Tensor, v: Tensor, positions: Tensor, counts: list[int]) -> tuple[Tensor, Tensor, Tensor]:
        """Along the heads axis: this rank's heads of the tokens of all in line."""
        axis = self.mesh.heads
        if axis.size == 1:
            return k, v, positions
        parts = [(*each, positions) for each in zip(k.chunk(axis.size, 1), v.chunk(axis.size, 1), strict=True)]
        shape = self.mesh.shape
        shards = [shape.shard(h, self.mesh.queries.index, self.mesh.keys.index) for h in range(axis.size)]
        wanted = [tuple(_sized(x, counts[shard]) for x in parts[0]) for shard in shards]
        columns = zip(*swap(parts, wanted, axis), strict=True)
        k, v, positions = (torch.cat(x, dim=-2 if x[0].ndim == 4 else 0) for x in columns)
        return k, v, positions

    def _summary(self, positions: Tensor) -> list[int]:
        """How many, for which rank along the tokens' axis, a sum that tells which, and whether dealing does it."""
        in_turn = bool((self.owner(positions) == self.tokens.index).all())
        return [len(positions), self.tokens.index, int(_scrambled(positions).sum()), in_turn]

    def _counts(self, length: int) -> list[int]:
        """How many of the first `length` tokens each rank along the tokens' axis holds."""
        start, counts = self._shards

        def dealt(rank: int, stop: int) -> int:
            rounds, rest = divmod(stop, self.block * self.tokens.size)
            return rounds * self.block + min(max(rest - rank * self.block, 0), self.block)

        return [count + dealt(rank, length) - dealt(rank, start) for rank, count in enumerate(counts)]

    def _check_room(self, subject: str, more: int, shards: tuple[int, list[int]] | None = None) -> None:
        """Raise, on all ranks alike and before anything is written, unless the tokens fit; then expect them."""
        known = self._most if self.device.type == "cuda" else self.length
        if known + more > self.capacity:
            known = self.length
        if known + more > self.capacity:
            given = f"{known} tokens and {more} more in a cache of {self.capacity}"
            raise ShapeError(subject, "room for the new tokens", given, "reserve a larger capacity, or truncate")
        before, self._shards = self._shards, shards or self._shards
        fullest = max(self._counts(known + more))
        if fullest > self.slots:
            self._shards = before
            given = f"{fullest} tokens on one rank, which has room for {self.slots}"
            fix = "prefill in shards of even size, or reserve a larger capacity"
            raise ShapeError(subject, "tokens spread evenly over the ranks", given, fix)
        self._most = known + more

    def _check_new(self, subject: str, k: Tensor, v: Tensor) -> None:
        check_same_kind(subject, {"k": k, "v": v})
        for name, x, width in (("k", k, self.head_dim), ("v", v, self.value_dim)):
            if x.ndim != 4 or (x.shape[0], x.shape[1], x.shape[3]) != (self.batch, self.kv_heads, width):
                expected = f"shape ({self.batch}, {self.kv_heads}, tokens, {width})"
                raise ShapeError(f"{subject} {name}", expected, f"{tuple(x.shape)}", "pass what the cache was made for")
            if x.dtype != self.dtype or x.device.type != self.device.type:
                given = f"{x.dtype} on {x.device}"
                raise DtypeError(f"{subject} {name}", f"{self.dtype} on {self.device}", given, "call .to(cache.dtype)")
            if x.requires_grad and torch.is_grad_enabled():
                fix = "decode under torch.no_grad(), or train with attention"
                raise KernelError(f"{subject} {name}", "a tensor without gradients", "one that asks for them", fix)
        if k.shape[2] != v.shape[2]:
            given = f"{k.shape[2]} and {v.shape[2]} tokens"
            raise ShapeError(subject, "k and v of the same tokens", given, "pair each key with its value")

    def _check_real(self, subject: str, real: Tensor | None, tokens: int | None) -> None:
        """Raise unless it tells of so many tokens, or of any number of them, which are padding."""
        if real is None:
            return
        shape = tuple(real.shape) if isinstance(real, Tensor) else ()
        wanted = (self.batch, shape[-1] if tokens is None and len(shape) == 2 else tokens)
        if not isinstance(real, Tensor) or real.dtype != torch.bool or shape != wanted:
            given = f"{real.dtype} {shape}" if isinstance(real, Tensor) else type(real).__name__
            fix = "pass attention_mask.bool(), of the new tokens alone"
            raise ShapeError(f"{subject} real", f"torch.bool {wanted}", given, fix)

    def _described(self, device: object) -> str | InputError:
        """The cache as ranks tell each other of it, or what is wrong with it."""
        if device is not None and self.device != _parsed(device):
            fix = "leave it out for the mesh's device type"
            return DeviceError("KVCache device", "a device that PyTorch knows", repr(device), fix)
        numbers = {name: getattr(self, name) for name in NUMBERS}
        for name, number in numbers.items():
            if isinstance(number, bool) or not isinstance(number, int) or number < 1:
                return ShapeError(f"KVCache {name}", "a whole number, 1 or more", repr(number), "count it as an int")
        if not isinstance(self.dtype, torch.dtype) or str(self.dtype).removeprefix("torch.") not in DTYPES:
            fix = "pass the model's dtype"
            return DtypeError("KVCache dtype", f"one of {', '.join(DTYPES)}", repr(self.dtype), fix)
        if self.kv_heads % self.mesh.heads.size:
            given = f"{self.kv_heads} key heads and a heads axis of {self.mesh.heads.size}"
            fix = "give those ranks to the keys axis"
            return ShapeError("KVCache", "key heads that the heads axis divides", given, fix)
        return f"KVCache of {numbers}, {self.dtype}"


def _device(mesh: DeviceMesh | None, device: object) -> torch.device:
    """The device asked for, if there is such, else that of the mesh."""
    return _parsed(device) or torch.device(mesh.device_type if mesh is not None else "cpu")


def _parsed(device: object) -> torch.device | None:
    try:
        return torch.device(device) if isinstance(device, (str, torch.device)) else None
    except RuntimeError:
        return None


def _stamp(before: int, told: Tensor | None) -> int:
    """A number for all that ranks were told so far, if they are told the same in turn."""
    return before if told is None else crc32(bytes(told.to(torch.uint8).cpu().flatten().tolist()), before)


def _agreed(mesh: Mesh, device: torch.device, act: Callable[[], T]) -> T:
    """What acting gives, once all ranks have; or the error that all raise if any did."""
    said: str | InputError = "load"
    try:
        result = act()
    except InputError as error:
        said = error
    agree(mesh, device, said)
    return result


def _opened(path: str | Path) -> tuple[Stored, list[int]]:
    stored = Stored(path)
    (header,) = stored.read([HEADER])
    numbers: list[int] = header.tolist()
    if len(numbers) != 12 or numbers[0] != VERSION:
        fix = "load it with the version of attnmesh that saved it"
        raise StoreError("load", f"a cache of version {VERSION}", f"{numbers[:1]}", fix)
    return stored, numbers


def _scrambled(positions: Tensor) -> Tensor:
    """Numbers whose sum tells one set of positions from another: a mixing of 64 bits, as a hash table does it."""
    x = (positions + 1) * -7046029254386353131
    x = (x ^ (x >> 29)) * -4658895280553007687
    return x ^ (x >> 32)


def _check_cover(table: list[list[int]], start: int, total: int) -> None:
    """All ranks see the same sums, so all raise alike."""
    expected = int(_scrambled(torch.arange(start, start + total)).sum())
    if (sum(said for _, _, said, _ in table) - expected) % 2**64:
        expected_text = f"positions from {start} to {start + total - 1}, each on one rank"
        fix = "pass layout.positions(length, shards, index), counted from the cache's length"
        raise LayoutError("append_shard", expected_text, f"{total} others, or some twice", fix)


def _check_positions(positions: Tensor, tokens: int) -> None:
    fix = "pass layout.positions(length, shards, index)"
    if not isinstance(positions, Tensor) or positions.dtype != torch.int64:
        given = str(positions.dtype) if isinstance(positions, Tensor) else type(positions).__name__
        raise DtypeError("append_shard positions", "a tensor of torch.int64", given, fix)
    if tuple(positions.shape) != (tokens,):
        raise ShapeError("append_shard positions", f"shape ({tokens},)", f"shape {tuple(positions.shape)}", fix)


def _sized(x: Tensor, tokens: int) -> Tensor:
    """The shape of so many tokens."""
    shape = (*x.shape[:2], tokens, x.shape[3]) if x.ndim == 4 else (tokens,)
    return torch.empty(shape, dtype=x.dtype, device="meta")
