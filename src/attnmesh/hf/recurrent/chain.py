"""Chain of the parts of a sequence, for recurrent layers: what a part needs from the parts before it.

A rank holds one part of a contiguous sequence. Of a zigzag sequence it holds two, an early and a late one: the ranks
hold the early parts in ascending order, and then the late parts in descending order.

Where documents begin inside a part, the part is cut into pieces, one of each document. The first piece continues the
document of the parts before, and the parts after continue the last piece. No state passes from one piece to the next:

    parts      |  rank 0  |  rank 1  |  rank 2  |
    documents  |- - - - - - - -|- -|- - - - - - |      rank 1 has three pieces, and hands on the state of the last
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import accumulate, chain, pairwise, product
from typing import NamedTuple, NoReturn, TypeVar

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.functional import pad

from attnmesh.core.layout import Contiguous, Layout, Split, Zigzag
from attnmesh.core.mask import FAR, Full, Mask
from attnmesh.errors import KernelError, LayoutError, ShapeError
from attnmesh.mesh.axes import Axis, RankMesh, agreed_flat_axis, attention_dims
from attnmesh.mesh.shapes import AXES
from attnmesh.recurrent.halo import halo_of_parts
from attnmesh.recurrent.head_exchange import heads_to_tokens, tokens_to_heads
from attnmesh.recurrent.scan import AffineMap, identity_linear, scan
from attnmesh.runtime.world import cached_per_world


class ChainParts(NamedTuple):
    """Parts of a sequence, one per rank, in order, and the documents in this rank's part."""

    axis: Axis
    """The ranks."""
    owners: list[int]
    """The rank of each part, by index of the axis."""
    lengths: list[int]
    """Tokens of each part."""
    document_lengths: list[int]
    """Tokens of each document in this rank's part."""
    before: int = FAR
    """Tokens of the part's first document before the part; `FAR` if the sequence is not packed."""
    resets: Sequence[int] = ()
    """1 for each part in which a document begins; none if the sequence is not packed."""


class Chain:
    """Parts of a sequence, one per rank, in order.

    Args:
        parts: The parts, and the pieces of this rank's.
        entering: What the first rank keeps from the tokens before the first part, in the order in which the layer asks
            for it; None if there are none.
        kept_tokens: Tokens that a convolution leaves beyond those that it reads, for a cache.
    """

    def __init__(self, parts: ChainParts, entering: Sequence[Tensor] | None = None, kept_tokens: int = 0) -> None:
        self.axis = parts.axis
        self.owners = parts.owners
        self.lengths = parts.lengths
        self.before = parts.before
        self.resets = parts.resets
        self.kept_tokens = kept_tokens
        self.index = self.owners.index(self.axis.index)
        self.tokens = self.lengths[self.index]
        self.document_lengths = parts.document_lengths if self.tokens else [1]
        """Tokens of each document among those that the layer computes: a rank without tokens computes a token of 0."""
        self.continues = entering is not None
        self._entering = deque(entering or ())
        self.leaving: list[Tensor] = []
        """States for tokens after the last part, in the order of `entering`. Only its rank's states are right."""

    def halo(self, x: Tensor, size: int) -> Tensor:
        """Return the `size` tokens before this rank's part `x`, (batch, channels, tokens). Collective."""
        x = x if self.tokens else x[:, :, :0]
        width = size + self.kept_tokens
        owners, lengths, own_part = self.owners, self.lengths, x
        if self.continues:  # the tokens before the first part are a part of their own
            owners, lengths = [owners[0], *owners], [width, *lengths]
            own_part = torch.cat([self._entering.popleft(), x], 2) if self.index == 0 else x
        halo = halo_of_parts(own_part, width, self.axis, owners, lengths, dim=2)
        halo = halo.narrow(2, halo.shape[2] - width, width)
        if self._fills_cache or self._is_last:
            joined = torch.cat([halo, x], 2)
            self.leaving.append(joined.narrow(2, joined.shape[2] - width, width))
        return halo.narrow(2, self.kept_tokens, size)

    def convolve(self, x: Tensor, size: int, function: Callable[[Tensor], Tensor]) -> Tensor:
        """Return a function of the tokens (batch, channels, tokens) and the `size` tokens before them."""
        return _convolve(_after_halo(self.halo(x, size), x, self.document_lengths, self.before), function)

    def enter(self, part: AffineMap, convert: Callable[[Tensor], Tensor] = lambda state: state) -> Tensor:
        """Return the state with which this rank's part begins. `part` is the map of the part's tokens. Collective.

        `convert` returns a state of the layer's cache in the form (batch, heads, K, V).
        """
        part = part if self.tokens else _without_tokens(part)
        if resets := any(self.resets[self.index : self.index + 1]):
            part = AffineMap(torch.zeros_like(part.linear), part.bias)
        is_first = self.continues and self.index == 0
        entered = torch.zeros_like(part.bias)
        if is_first:
            entered = self._entering.popleft()
            entered = convert(entered).to(part.bias.dtype) if self._fills_cache else entered
        element = AffineMap(part.linear, part(entered)) if is_first and not resets else part
        state = scan(element, self.axis, self.owners, linear_needs_grad=False, resets=self.resets).bias + entered
        if self._is_last:
            self.leaving.append(part.bias if resets else part(state))
        if self.before:
            return state
        # A document begins with this part, from zero. The zeros depend on the scan: all ranks need the same graph.
        return state.masked_fill(torch.ones_like(state, dtype=torch.bool), 0)

    @property
    def _fills_cache(self) -> bool:
        return self.kept_tokens > 0

    @property
    def _is_last(self) -> bool:
        return self.index == len(self.owners) - 1


class HeadChain:
    """All parts of a sequence at once: each rank runs the rule over the whole sequence for its share of the heads.

    Args:
        layer: Name of the recurrent layer.
        parts: The parts of each chain of the layout, as `parts_of` returns them.
        all_document_lengths: Tokens of each document of the sequence.
    """

    def __init__(self, layer: str, parts: Sequence[ChainParts], all_document_lengths: Sequence[int]) -> None:
        self.layer = layer
        self.axis = parts[0].axis
        self.all_document_lengths = list(all_document_lengths)
        self.owners = [owner for part in parts for owner in part.owners]
        self.lengths = [length for part in parts for length in part.lengths]
        self.document_lengths = [tokens for part in parts for tokens in part.document_lengths]
        self._parts = parts
        self._exchange_arguments = self.axis, self.owners, self.lengths

    def convolve(self, x: Tensor, size: int, function: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the function of each part of `x` (batch, channels, tokens) and the `size` tokens before it.

        Only the last part keeps results beyond its tokens.
        """
        halos = halo_of_parts(x, size, *self._exchange_arguments, dim=2)
        parts = zip(halos.split(size, 2), x.split([sum(part.document_lengths) for part in self._parts], 2), strict=True)
        pieces = [
            _after_halo(*part, own.document_lengths, own.before) for part, own in zip(parts, self._parts, strict=True)
        ]
        return _convolve([*chain.from_iterable(pieces)], function)

    def gather(self, *tensors: Tensor) -> list[Tensor]:
        """Return all tokens of this rank's heads, for each (batch, own tokens, heads, ...): one exchange per dtype."""
        gathered: dict[int, Tensor] = {}
        for dtype in dict.fromkeys(x.dtype for x in tensors):
            indices = [index for index, x in enumerate(tensors) if x.dtype == dtype]
            shares = [tensors[index].unflatten(2, (self.axis.size, -1)).flatten(3) for index in indices]
            joined = tokens_to_heads(torch.cat(shares, -1), *self._exchange_arguments)
            widths = [share.shape[-1] for share in shares]
            for index, x in zip(indices, joined.split(widths, -1), strict=True):
                gathered[index] = x.unflatten(-1, (-1, *tensors[index].shape[3:]))
        return [gathered[index] for index in range(len(tensors))]

    def scatter(self, x: Tensor) -> Tensor:
        """Return this rank's tokens of all heads, from (batch, all tokens, own heads, width)."""
        joined = heads_to_tokens(x.flatten(2), *self._exchange_arguments).flatten(2)
        return joined.view(*joined.shape[:2], -1, x.shape[-1])

    def own_heads(self, x: Tensor) -> Tensor:
        """Return this rank's share of a tensor with one entry per head."""
        return x.chunk(self.axis.size)[self.axis.index]

    def check_divided(self, counts: Mapping[str, int]) -> None:
        """Raise unless the ranks can divide these numbers of heads."""
        for name, count in counts.items():
            if count % self.axis.size:
                expected = f"{name} that {self.axis.size} ranks divide evenly"
                fix = 'pass exchange="scan", or use fewer ranks'
                raise ShapeError("shard_batch exchange", expected, f"{count} {name} in {self.layer}", fix)

    def enter(self, *_: object) -> NoReturn:
        """Raise: the rule is run by a scan alone."""
        expected = "layers of the gated delta rule, KDA or Mamba-2, or short convolutions, for 'heads'"
        raise KernelError("shard_batch exchange", expected, self.layer, 'pass exchange="scan"')


def _after_halo(halo: Tensor, x: Tensor, document_lengths: Sequence[int], tokens_before: int) -> list[Tensor]:
    """Return the pieces of a part (batch, channels, tokens), each after its halo: zeros for other documents' tokens."""
    foreign = max(halo.shape[2] - tokens_before, 0)
    zeros = torch.zeros_like(halo)
    first, *later = split(x, document_lengths, 2)
    return [pad(halo[..., foreign:], (foreign, 0)), first, *chain.from_iterable((zeros, piece) for piece in later)]


def _convolve(halos_and_pieces: list[Tensor], function: Callable[[Tensor], Tensor]) -> Tensor:
    """Return a function of the pieces, each after its halo. Only the last one keeps results beyond its tokens."""
    out = function(torch.cat(halos_and_pieces, 2))
    lengths = [x.shape[2] for x in halos_and_pieces[1:-1]]
    outputs = split(out, [*lengths, out.shape[2] - sum(lengths)], 2)[::2]  # the others mix two pieces
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, 2)


def split(x: Tensor, lengths: Sequence[int], dim: int) -> tuple[Tensor, ...]:
    """Return `x.split(lengths, dim)`. The gradient of a single length is not copied."""
    return (x,) if len(lengths) == 1 else x.split(lengths, dim)


AnyChain = TypeVar("AnyChain", Chain, HeadChain)

current_chain: ContextVar[Chain | HeadChain] = ContextVar("attnmesh chain of a recurrent layer")


@contextmanager
def running(layer_chain: AnyChain) -> Iterator[AnyChain]:
    """Run a recurrent layer on this rank's part of a chain."""
    token = current_chain.set(layer_chain)
    try:
        yield layer_chain
    finally:
        current_chain.reset(token)


@cached_per_world(64)
def parts_of(layout: Layout, length: int, device_mesh: DeviceMesh | None, mask: Mask = Full()) -> list[ChainParts]:
    """Return the parts of each chain of a layout, early parts before late ones."""
    all_parts = []
    begin = 0
    first_indices = mask.document_edges(0, length)
    for axis, owners, lengths in _chains(layout, length, device_mesh):
        edges = [*accumulate(lengths, initial=begin)]
        index = owners.index(axis.index)
        own_parts = ChainParts(axis, owners, lengths, document_lengths_of(mask, *edges[index : index + 2]))
        if mask.depends_on_length:
            tokens_before = edges[index] - max(token for token in first_indices if token <= edges[index])
            resets = [any(start <= token < stop for token in first_indices) for start, stop in pairwise(edges)]
            own_parts = own_parts._replace(before=tokens_before, resets=resets)
        all_parts.append(own_parts)
        begin = edges[-1]
    return all_parts


def document_lengths_of(mask: Mask, start: int, stop: int) -> list[int]:
    """Return the number of tokens of each document from `start` to `stop`."""
    return [after - first for first, after in pairwise(mask.document_edges(start, stop))]


def _chains(layout: Layout, length: int, device_mesh: DeviceMesh | None) -> list[tuple[Axis, list[int], list[int]]]:
    """Return the axis, owners and lengths of each chain of a layout."""
    axis, order = _chain_axis(device_mesh)
    counts = [len(layout.positions(length, axis.size, shard)) for shard in range(axis.size)]
    if isinstance(layout, Contiguous | Split) or axis.size == 1:
        return [(axis, order, counts)]
    if not isinstance(layout, Zigzag):
        expected = "a layout whose shards are runs of tokens, for a model with recurrent layers"
        raise LayoutError("attnmesh.hf layout", expected, repr(layout), "pass layout=am.Zigzag() or am.Contiguous()")
    edges = [part * length // (2 * axis.size) for part in range(2 * axis.size + 1)]
    early = [edges[part + 1] - edges[part] for part in range(axis.size)]
    late = [count - part for count, part in zip(counts, early, strict=True)]
    return [(axis, order, early), (axis, order[::-1], late[::-1])]


@cached_per_world(64)
def _chain_axis(device_mesh: DeviceMesh | None) -> tuple[Axis, list[int]]:
    """Return all ranks of a mesh as one axis, and the rank of each shard in it."""
    axis = agreed_flat_axis(device_mesh, AXES)
    if axis.size == 1 or device_mesh is None:
        return axis, [0]
    shape = RankMesh.of(device_mesh).shape
    names = attention_dims(device_mesh)
    sizes = dict(zip(AXES, shape, strict=True))
    shards = []  # by index of the flat axis
    for indices in product(*(range(sizes[name]) for name in names)):
        index_of = dict.fromkeys(AXES, 0) | dict(zip(names, indices, strict=True))
        shards.append(shape.shard(*(index_of[name] for name in AXES)))
    return axis, [shards.index(shard) for shard in range(axis.size)]


def _without_tokens(part: AffineMap) -> AffineMap:
    """Return the identity. It depends on the part, so that all ranks have the same graph of gradients."""
    linear, bias = part
    return AffineMap(identity_linear(linear, bias.ndim) + 0 * linear, 0 * bias)
