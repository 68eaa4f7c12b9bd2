"""Tokens of one model on the mesh: how many each rank has of a stream, and of the streams that attend together."""

import operator
from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from attnmesh.attention.sharding import unshard_runs
from attnmesh.comm.p2p import all_gather_ints
from attnmesh.errors import MeshError, ShapeError
from attnmesh.mesh.axes import Mesh


def run_sizes(length: int, ranks: int) -> tuple[int, ...]:
    """Return the tokens of each rank: even, with one more on the first ranks, as `torch.tensor_split` cuts.

    >>> run_sizes(10, 4)
    (3, 3, 2, 2)
    """
    return tuple(length // ranks + (rank < length % ranks) for rank in range(ranks))


class Tokens:
    """Streams of tokens in the forward pass under way, by the name of their argument.

    Each rank holds a run of each stream. Attention gets the runs of one stream, or of all streams one after the other.
    From the number of its own tokens a rank derives which, and so the numbers of all ranks.
    """

    def __init__(self, place: Mesh) -> None:
        self.place = place
        self.lengths: dict[str, int] = {}
        self.others: dict[str, int] = {}
        """Tokens of what goes with the tokens of a stream, as rotary embeddings."""
        self.by_own: dict[int, tuple[int, ...]] | None = {}  # None: equal numbers here may differ elsewhere

    def begin(self) -> None:
        """Forget the streams of the last forward pass."""
        self.lengths.clear()
        self.others.clear()
        self.by_own = {}

    def add_stream(self, name: str, length: int) -> None:
        """Note the tokens of a stream, before it is cut. Models fail on ranks without tokens, so these are refused."""
        length, ranks = operator.index(length), self.place.shape.ranks  # constants of a compiled graph
        if length < ranks:
            expected, fix = f"{ranks} tokens or more, one a rank", "pad the text, or take a mesh of fewer ranks"
            raise ShapeError(f"attnmesh.diffusers {name}", expected, f"{length} tokens", fix)
        if self.lengths.get(name) != length:
            self.lengths[name] = length
            self._find_sizes()

    def cut(self, x: Tensor, dim: int) -> Tensor:
        """Return this rank's run of a tensor."""
        sizes, shard = run_sizes(operator.index(x.shape[dim]), self.place.shape.ranks), self.place.shard
        return x.narrow(dim, [0, *accumulate(sizes)][shard], sizes[shard])

    def cut_joined(self, x: Tensor, dim: int, own: Sequence[int]) -> Tensor:
        """Return this rank's runs of the streams that lie in a tensor, of so many tokens on this rank."""
        lengths = [sum(sizes) for sizes in self.sizes(*own)]
        if sum(lengths) != x.shape[dim]:
            given, fix = f"{x.shape[dim]} where the streams have {lengths}", "pass a mask of all keys"
            raise ShapeError("attnmesh.diffusers", "a mask of the tokens of all streams", given, fix)
        return torch.cat([self.cut(part, dim) for part in x.split(lengths, dim)], dim)

    def gather(self, x: Tensor, dim: int) -> Tensor:
        """Return the whole tensor on every rank, with gradients."""
        for name, length in self.others.items():
            if length not in self.lengths.values():
                given, fix = f"{length}", "pass one value for all tokens, or one for each"
                expected = f"values of {' or '.join(map(str, self.lengths.values()))} tokens"
                raise ShapeError(f"attnmesh.diffusers {name}", expected, given, fix)
        return unshard_runs(x, self.place, self.sizes(x.shape[dim])[0], dim)

    def sizes(self, *own: int) -> list[tuple[int, ...]]:
        """Return the tokens of each rank for tensors of so many tokens on this rank.

        Ranks count them together where this rank's numbers do not tell, and where a layer is computed anew in the
        backward pass, which may belong to an earlier forward pass.
        """
        ranks = self.place.shape.ranks
        if torch.compiler.is_compiling():
            if self.by_own is None:
                fix = "pass other numbers of tokens, or leave torch.compile out"
                given = f"streams of {sorted(self.lengths.values())} tokens on {ranks} ranks"
                raise MeshError("attnmesh.diffusers", "numbers of tokens that tell streams apart", given, fix)
        elif self.by_own is None or torch._C._current_graph_task_id() != -1:
            table = all_gather_ints(own, self.place.axes)
            return [tuple(column) for column in zip(*table, strict=True)]
        own = tuple(map(operator.index, own))
        for tokens in own:
            if tokens not in self.by_own:
                given = f"{tokens} tokens where a rank has {sorted(self.by_own)}"
                fix = "remove what adds tokens of its own, as an adapter for images"
                raise ShapeError(
                    "attnmesh.diffusers attention", "tokens of the streams that the plan splits", given, fix
                )
        return [self.by_own[tokens] for tokens in own]

    def _find_sizes(self) -> None:
        """Find which streams attend together from this rank's number of their tokens, if that tells on every rank."""
        ranks = self.place.shape.ranks
        single = [run_sizes(length, ranks) for length in self.lengths.values()]
        found = dict.fromkeys([*single, tuple(map(sum, zip(*single, strict=True)))])
        tells = all(len(set(column)) == len(found) for column in zip(*found, strict=True))
        self.by_own = {sizes[self.place.shard]: sizes for sizes in found} if tells else None
