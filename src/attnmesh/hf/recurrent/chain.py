"""Chain of the parts of a sequence, for recurrent layers: what a part needs from the parts before it.

A rank holds one part of a contiguous sequence. Of a zigzag sequence it holds two, an early and a late one: the ranks
hold the early parts in ascending order, and then the late parts in descending order.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import product
from typing import NoReturn, TypeVar

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from attnmesh.core.layout import Contiguous, Layout, Zigzag
from attnmesh.errors import KernelError, LayoutError, ShapeError, require
from attnmesh.mesh.axes import Axis, Mesh, attention_dims, flat_axis
from attnmesh.mesh.shapes import AXES
from attnmesh.recurrent.halo import halo_of_parts
from attnmesh.recurrent.heads import heads_to_tokens, tokens_to_heads
from attnmesh.recurrent.scan import AffineMap, scan
from attnmesh.runtime.world import cached_per_world


class Chain:
    """Parts of a sequence, one per rank, in order.

    Args:
        axis: The ranks.
        owners: The rank of each part, by index of the axis.
        lengths: Tokens of each part.
        entering: What the first rank keeps from the tokens before the first part, in the order in which the layer asks
            for it; None if there are none.
        kept: Tokens that a convolution leaves beyond those that it reads, for a cache.
    """

    def __init__(
        self,
        axis: Axis,
        owners: Sequence[int],
        lengths: Sequence[int],
        entering: Sequence[Tensor] | None = None,
        kept: int = 0,
    ) -> None:
        self.axis, self.owners, self.lengths, self.kept = axis, list(owners), list(lengths), kept
        self.place = self.owners.index(axis.index)
        self.tokens = self.lengths[self.place]
        self.continues = entering is not None
        self._entering = deque(entering or ())
        self.leaving: list[Tensor] = []
        """States after this rank's part, for later tokens, in the order of `entering`. The last rank's is right."""

    @property
    def last(self) -> int:
        """Index of the rank with the last part."""
        return self.owners[-1]

    def halo(self, x: Tensor, size: int, dim: int) -> Tensor:
        """Return the `size` tokens before this rank's part."""
        x, wanted = x if self.tokens else x.narrow(dim, 0, 0), size + self.kept
        owners, lengths, own = self.owners, self.lengths, x
        if self.continues:  # the tokens before the first part are a part of their own
            owners, lengths = [owners[0], *owners], [wanted, *lengths]
            own = torch.cat([self._entering.popleft(), x], dim) if self.place == 0 else x
        before = halo_of_parts(own, wanted, self.axis, owners, lengths, dim=dim)
        before = before.narrow(dim, before.shape[dim] - wanted, wanted)
        if self.kept or self._is_last:
            whole = torch.cat([before, x], dim)
            self.leaving.append(whole.narrow(dim, whole.shape[dim] - wanted, wanted))
        return before.narrow(dim, self.kept, size)

    def convolve(self, x: Tensor, size: int, function: Callable[[Tensor], Tensor]) -> Tensor:
        """Return a function of the tokens (batch, channels, tokens) and the `size` tokens before them."""
        return function(torch.cat([self.halo(x, size, dim=2), x], 2))

    def enter(self, part: AffineMap, convert: Callable[[Tensor], Tensor] = lambda state: state) -> Tensor:
        """Return the state with which this rank's part begins. `part` is the map of the part's tokens.

        `convert` returns a state of the layer's cache in the form (batch, heads, K, V).
        """
        part = part if self.tokens else _without_tokens(part)
        first = self.continues and self.place == 0
        entered = torch.zeros_like(part.bias)
        if first:
            entered = self._entering.popleft()
            entered = convert(entered).to(part.bias.dtype) if self.kept else entered
        element = AffineMap(part.linear, part(entered)) if first else part
        state = scan(element, self.axis, self.owners, whole=False).bias + entered
        if self._is_last:
            self.leaving.append(part(state))
        return state

    @property
    def _is_last(self) -> bool:
        return self.place == len(self.owners) - 1


class HeadChain:
    """All parts of a sequence at once: each rank runs the rule over the whole sequence for its share of the heads.

    Args:
        layer: Name of the recurrent layer.
        parts: Axis, owners and lengths of each chain of the layout, as `parts_of` returns them.
    """

    def __init__(self, layer: str, parts: Sequence[tuple[Axis, list[int], list[int]]]) -> None:
        self.layer, self.axis = layer, parts[0][0]
        self.owners = [owner for _, owners, _ in parts for owner in owners]
        self.lengths = [length for _, _, lengths in parts for length in lengths]
        self._place = self.axis, self.owners, self.lengths

    def convolve(self, x: Tensor, size: int, function: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the function of each part of `x` (batch, channels, tokens) and the `size` tokens before it.

        Only the last part keeps results beyond its tokens.
        """
        halos = halo_of_parts(x, size, *self._place, dim=2)
        mine = [tokens for owner, tokens in zip(self.owners, self.lengths, strict=True) if owner == self.axis.index]
        parts = x.split(mine, 2)
        before = [halos.narrow(2, part * size, size) for part in range(len(parts))]
        found = [function(torch.cat(each, 2)) for each in zip(before, parts, strict=True) if each[1].shape[2]]
        sizes = [tokens for tokens in mine if tokens]
        return torch.cat([out.narrow(2, 0, n) for out, n in zip(found[:-1], sizes, strict=False)] + found[-1:], 2)

    def gather(self, *tensors: Tensor) -> list[Tensor]:
        """Return all tokens of this rank's heads, for each (batch, own tokens, heads, ...): one exchange per dtype."""
        found: dict[int, Tensor] = {}
        for dtype in dict.fromkeys(x.dtype for x in tensors):
            chosen = [number for number, x in enumerate(tensors) if x.dtype == dtype]
            shares = [tensors[number].unflatten(2, (self.axis.size, -1)).flatten(3) for number in chosen]
            joined = tokens_to_heads(torch.cat(shares, -1), *self._place)
            widths = [share.shape[-1] for share in shares]
            for number, x in zip(chosen, joined.split(widths, -1), strict=True):
                found[number] = x.unflatten(-1, (-1, *tensors[number].shape[3:]))
        return [found[number] for number in range(len(tensors))]

    def scatter(self, x: Tensor) -> Tensor:
        """Return this rank's tokens of all heads, from (batch, all tokens, own heads, width)."""
        joined = heads_to_tokens(x.flatten(2), *self._place).flatten(2)
        return joined.view(*joined.shape[:2], -1, x.shape[-1])

    def own_heads(self, x: Tensor) -> Tensor:
        """Return this rank's share of a tensor with one entry per head."""
        return x.chunk(self.axis.size)[self.axis.index]

    def check_divided(self, counts: Mapping[str, int]) -> None:
        """Raise unless the ranks can divide these numbers of heads."""
        for name, count in counts.items():
            given, fix = f"{count} {name} in {self.layer}", 'pass exchange="scan", or use fewer ranks'
            expected = f"{name} that {self.axis.size} ranks divide evenly"
            require(count % self.axis.size == 0, ShapeError, "shard_batch exchange", expected, given, fix)

    def enter(self, *_: object) -> NoReturn:
        """Raise: the rule is run by a scan alone."""
        expected = "layers of the gated delta rule, KDA or Mamba-2, or short convolutions, for 'heads'"
        raise KernelError("shard_batch exchange", expected, self.layer, 'pass exchange="scan"')


AnyChain = TypeVar("AnyChain", Chain, HeadChain)

current_chain: ContextVar[Chain | HeadChain] = ContextVar("attnmesh chain of a recurrent layer")


@contextmanager
def running(chain: AnyChain) -> Iterator[AnyChain]:
    """Run a recurrent layer on this rank's part of a chain."""
    token = current_chain.set(chain)
    try:
        yield chain
    finally:
        current_chain.reset(token)


@cached_per_world(64)
def parts_of(layout: Layout, length: int, mesh: DeviceMesh | None) -> list[tuple[Axis, list[int], list[int]]]:
    """Return the axis, owners and lengths of each chain of a layout, early parts before late ones."""
    axis, order = _chain_axis(mesh)
    counts = [len(layout.positions(length, axis.size, shard)) for shard in range(axis.size)]
    if isinstance(layout, Contiguous) or axis.size == 1:
        return [(axis, order, counts)]
    if not isinstance(layout, Zigzag):
        fix = "pass layout=am.Zigzag() or am.Contiguous()"
        expected = "a layout whose shards are runs of tokens, for a model with recurrent layers"
        raise LayoutError("attnmesh.hf layout", expected, repr(layout), fix)
    edges = [part * length // (2 * axis.size) for part in range(2 * axis.size + 1)]
    early = [edges[part + 1] - edges[part] for part in range(axis.size)]
    late = [count - part for count, part in zip(counts, early, strict=True)]
    return [(axis, order, early), (axis, order[::-1], late[::-1])]


@cached_per_world(64)
def _chain_axis(mesh: DeviceMesh | None) -> tuple[Axis, list[int]]:
    """Return all ranks of a mesh as one axis, and the rank of each shard in it."""
    axis = flat_axis(mesh, AXES)
    if axis.size == 1 or mesh is None:
        return axis, [0]
    shape, mine = Mesh.of(mesh).shape, attention_dims(mesh)
    sizes = dict(zip(AXES, shape, strict=True))
    shards = []  # by index of the flat axis
    for indices in product(*(range(sizes[name]) for name in mine)):
        place = dict.fromkeys(AXES, 0) | dict(zip(mine, indices, strict=True))
        shards.append(shape.shard(*(place[name] for name in AXES)))
    return axis, [shards.index(shard) for shard in range(axis.size)]


def _without_tokens(part: AffineMap) -> AffineMap:
    """Return the identity. It depends on the part, so that all ranks have the same graph of gradients."""
    linear, bias = part
    one = torch.ones_like(linear)
    if linear.ndim == bias.ndim:
        one = torch.eye(linear.shape[-1], dtype=linear.dtype, device=linear.device).expand_as(linear)
    return AffineMap(one + 0 * linear, 0 * bias)
