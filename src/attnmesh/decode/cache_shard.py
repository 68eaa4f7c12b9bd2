"""A rank's shard of one layer's cache, and the block-cyclic law that says which tokens it holds.

Memory for all tokens is reserved at once; how many are present is a tensor on the device.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from attnmesh.core.digest import mixed
from attnmesh.decode.cache_config import Sizes
from attnmesh.errors import LayoutError
from attnmesh.kernels.cache_view import CacheView, Padding
from attnmesh.mesh.axes import Axis


@dataclass(frozen=True)
class BlockCyclic:
    """Blocks of so many tokens, to so many ranks."""

    block: int
    ranks: int

    def owner(self, tokens: Tensor) -> Tensor:
        """To which rank each token goes.

        >>> import torch
        >>> BlockCyclic(block=2, ranks=2).owner(torch.arange(7))
        tensor([0, 0, 1, 1, 0, 0, 1])
        """
        return tokens // self.block % self.ranks

    def slot(self, tokens: Tensor) -> Tensor:
        """How many tokens before it the owner of each token has been dealt."""
        return tokens // (self.block * self.ranks) * self.block + tokens % self.block

    def count(self, rank: int, length: int) -> int:
        """How many of the first `length` tokens a rank has been dealt.

        >>> [BlockCyclic(block=2, ranks=2).count(rank, 7) for rank in range(2)]
        [4, 3]
        """
        rounds, rest = divmod(length, self.block * self.ranks)
        return rounds * self.block + min(max(rest - rank * self.block, 0), self.block)

    def to_one(self, start: int, stop: int) -> int | None:
        """The rank to which all of a run of tokens go, if it is one block."""
        first, last = start // self.block, (stop - 1) // self.block
        return first % self.ranks if first == last else None


@dataclass(frozen=True)
class TokenCounts:
    """How many tokens each rank holds: as they came up to `start`, from there on as they are dealt."""

    block_cyclic: BlockCyclic
    start: int
    came: tuple[int, ...]

    def counts(self, length: int) -> list[int]:
        """Of the first `length` tokens, by rank.

        >>> TokenCounts(BlockCyclic(block=2, ranks=2), start=3, came=(3, 0)).counts(7)
        [5, 2]
        """
        dealt = [
            self.block_cyclic.count(rank, length) - self.block_cyclic.count(rank, self.start)
            for rank in range(self.block_cyclic.ranks)
        ]
        return [before + more for before, more in zip(self.came, dealt, strict=True)]


def check_cover(sums: int, start: int, more: int) -> None:
    """Raise unless the sum over all ranks is that of `more` positions from `start` on, each once."""
    if (sums - cover(torch.arange(start, start + more))) % 2**64:
        expected = f"positions from {start} to {start + more - 1}, each on one rank"
        fix = "pass layout.positions(length, shards, index), counted from the cache's length"
        raise LayoutError("append_shard", expected, f"{more} others, or some twice", fix)


def cover(positions: Tensor) -> int:
    """A sum that tells one set of positions from another, modulo 2^64."""
    return int(mixed(positions + 1).sum())


SLACK = 2
"""Tokens by which a shard of a prefill may be larger than an even share: a zigzag's two chunks are rounded each."""


class CacheShard:
    """Keys and values of the tokens that are dealt to a rank, by its number along the tokens' axis, of its heads."""

    keys: Tensor
    values: Tensor

    def __init__(self, sizes: Sizes, heads: Axis, ranks: int, device: torch.device, index: int) -> None:
        self.sizes, self.heads, self.index, self.device = sizes, heads, index, device
        self.block_cyclic = BlockCyclic(sizes.block, ranks)
        self.slots = self._slots(sizes.capacity)
        # One slot more than is used: what is another rank's is written there, so that nobody need ask whose it is.
        room = sizes.batch, sizes.kv_heads // heads.size, self.slots + 1
        with torch.inference_mode(False):  # tensors that can be written to in any mode
            self.keys = torch.empty(*room, sizes.head_dim, dtype=sizes.dtype, device=device)
            self.values = torch.empty(*room, sizes.value_dim, dtype=sizes.dtype, device=device)
            self.token_index = torch.zeros(self.slots + 1, dtype=torch.int64, device=device)  # the token in each slot
            self.state = torch.zeros(2, dtype=torch.int64, device=device)  # tokens of all ranks, and held here
        self.padding: Padding | None = None

    @property
    def length(self) -> int:
        """Tokens so far, of all ranks."""
        return int(self.state.tolist()[0])

    @property
    def used(self) -> int:
        """Tokens that are here."""
        return int(self.state.tolist()[1])

    @property
    def held(self) -> CacheView:
        """What is here, as tensors of its device."""
        return CacheView(self.keys, self.values, self.token_index, self.state, self.padding)

    def add(self, k: Tensor, v: Tensor, real: Tensor | None) -> None:
        """Add those of the new tokens that are dealt to this rank; `k` and `v` have all heads."""
        more = k.shape[2]
        if self._all_elsewhere(more, real):
            self.state[0] += more
            return
        length, used = self.state.unbind()
        tokens = length + torch.arange(more, device=self.device)
        mine = (self.block_cyclic.owner(tokens) == self.index) & (tokens < self.sizes.capacity)
        slots = torch.where(mine, used + mine.cumsum(0) - 1, self.slots).clamp(max=self.slots)
        own_k, own_v = (x.chunk(self.heads.size, 1)[self.heads.index] for x in (k, v))
        self._write(own_k, own_v, tokens, slots)
        self._pad(tokens, slots, more, real)
        self.state += torch.stack((torch.full_like(length, more), mine.sum()))

    def place(self, k: Tensor, v: Tensor, tokens: Tensor, more: int, real: Tensor | None) -> None:
        """Add these tokens, with this rank's heads; all ranks together have `more` new ones."""
        order = tokens.argsort()
        slots = self.used + torch.arange(len(order), device=self.device)
        self._write(k.index_select(2, order), v.index_select(2, order), tokens[order], slots)
        self._pad(tokens[order], slots, more, real)
        self.state += torch.tensor([more, len(order)], device=self.device)

    def before(self, length: int) -> int:
        """How many of the first `length` tokens are here."""
        return int(torch.searchsorted(self.token_index[: self.used], length))

    def cut(self, length: int) -> None:
        """Forget the tokens from `length` on."""
        if self.padding is not None:
            self.padding.cut(length, self.length)
        self.state.copy_(torch.tensor([length, self.before(length)]))

    def grow(self, sizes: Sizes) -> None:
        """Room for more; one tensor is copied at a time."""
        used, slots = self.used, self._slots(sizes.capacity)
        with torch.inference_mode(False):
            columns = torch.nn.functional.pad(self.token_index, (0, slots + 1 - len(self.token_index)))
            padding = None if self.padding is None else self.padding.grown(sizes.capacity, slots + 1)
            for name in ("keys", "values"):
                old = getattr(self, name)
                new = old.new_empty(*old.shape[:2], slots + 1, old.shape[3])
                new[:, :, :used] = old[:, :, :used]
                setattr(self, name, new)
        # Only now: where there is no memory for it all, what there was serves on.
        self.sizes, self.slots, self.token_index, self.padding = sizes, slots, columns, padding

    def reorder(self, index: Tensor) -> None:
        """Sequence b becomes what sequence `index[b]` was; there may be more or fewer."""
        used = self.used
        if len(index) != self.sizes.batch:
            with torch.inference_mode(False):
                self.keys, self.values = (x.index_select(0, index) for x in (self.keys, self.values))
            self.sizes = replace(self.sizes, batch=len(index))
        else:
            for head in range(self.keys.shape[1]):  # one head at a time: the copy is no larger than that
                for x in (self.keys, self.values):
                    x[:, head, :used] = x[:, head, :used].index_select(0, index)
        if self.padding is not None:
            self.padding = self.padding.reordered(index)

    def filled(self, length: int, real: Tensor | None) -> int:
        """Tokens have been written where dealing puts them; now they count. How many are here."""
        held = self.block_cyclic.count(self.index, length)
        self.state.copy_(torch.tensor([length, held]))
        if real is not None:
            none = torch.zeros_like(self.state[0])
            self.padding = Padding.none(self.sizes.batch, self.sizes.capacity, self.token_index, none)
            self.padding.add(
                none, real.to(self.device), self.token_index[:held], torch.arange(held, device=self.device)
            )
        return held

    def twin(self) -> "CacheShard":
        """The same tokens in tensors of its own."""
        twin = object.__new__(type(self))
        twin.__dict__ = dict(self.__dict__)
        with torch.inference_mode(False):
            for name in ("keys", "values", "token_index", "state"):
                setattr(twin, name, getattr(self, name).clone())
            if self.padding is not None:
                twin.padding = Padding(*(x.clone() for x in self.padding))
        return twin

    def _slots(self, capacity: int) -> int:
        """Tokens for which a rank has room."""
        return min(capacity, -(-capacity // self.block_cyclic.ranks) + self.sizes.block + SLACK)

    def _all_elsewhere(self, more: int, real: Tensor | None) -> bool:
        """Whether all new tokens are dealt to one other rank, as most are; where it is free to know."""
        if torch.compiler.is_compiling() or self.device.type == "cuda" or not more:
            return False
        if self.padding is not None or real is not None:  # all ranks note what is real
            return False
        length = self.length
        return self.block_cyclic.to_one(length, length + more) not in (None, self.index)

    def _write(self, k: Tensor, v: Tensor, tokens: Tensor, slots: Tensor) -> None:
        """Put this rank's heads of its tokens into slots."""
        self.keys.index_copy_(2, slots, k)
        self.values.index_copy_(2, slots, v)
        self.token_index.index_copy_(0, slots, tokens)

    def _pad(self, tokens: Tensor, slots: Tensor, more: int, real: Tensor | None) -> None:
        """Note which of `more` new tokens of all ranks are real, if any ever was not, before the length counts them."""
        if real is None and self.padding is None:
            return
        length, sizes = self.state[0], self.sizes
        self.padding = self.padding or Padding.none(sizes.batch, sizes.capacity, self.token_index, length)
        all_real = torch.ones(sizes.batch, more, dtype=torch.bool, device=self.device)  # not brought there
        self.padding.add(length, all_real if real is None else real.to(self.device), tokens - length, slots)
