"""Tokens of one model on the mesh: how many each rank has of a stream, and of the streams that attend together."""

import operator
from collections.abc import Sequence

import torch
from torch import Tensor

from attnmesh.comm.topology import dist_all_gather_ints
from attnmesh.errors import MeshError, ShapeError
from attnmesh.mesh.axes import RankMesh
from attnmesh.mesh.shapes import even_slice
from attnmesh.mesh_attention.sharding import unshard_runs


def run_sizes(length: int, ranks: int) -> tuple[int, ...]:
    """Return the tokens of each rank: even, with one more on the first ranks, as `torch.tensor_split` splits.

    >>> run_sizes(10, 4)
    (3, 3, 2, 2)
    """
    slices = (even_slice(length, ranks, rank) for rank in range(ranks))
    return tuple(part.stop - part.start for part in slices)


class Streams:
    """Streams of tokens in the forward pass under way, by the name of their argument.

    Each rank holds a run of each stream. Attention gets the runs of one stream, or of all streams one after the other.
    A rank knows its own number of tokens in the tensor that attention gets, and finds by it the numbers of all ranks.
    """

    def __init__(self, mesh: RankMesh) -> None:
        self.mesh = mesh
        self.lengths: dict[str, int] = {}
        """Tokens of each stream."""
        self.companions: dict[str, int] = {}
        """Tokens of each tensor that has to match a stream, as rotary embeddings do."""
        self.sizes_by_own: dict[int, tuple[int, ...]] | None = {}
        """The tokens of all ranks, by this rank's. None if on some rank two streams have the same number."""

    def begin(self) -> None:
        """Forget the streams of the last forward pass."""
        self.lengths.clear()
        self.companions.clear()
        self.sizes_by_own = {}

    def add_stream(self, name: str, length: int) -> None:
        """Add a stream of `length` tokens. Raise if a rank would have no token, since models fail on none."""
        ranks = self.mesh.ranks
        length = operator.index(length)  # makes the symbolic length of a compiled graph a constant
        if length < ranks:
            expected, fix = f"{ranks} tokens or more, one a rank", "pad the text, or take a mesh of fewer ranks"
            raise ShapeError(f"attnmesh.diffusers {name}", expected, f"{length} tokens", fix)
        if self.lengths.get(name) != length:
            self.lengths[name] = length
            self._index_sizes()

    def split(self, x: Tensor, dim: int) -> Tensor:
        """Return this rank's run of a tensor."""
        run = even_slice(operator.index(x.shape[dim]), self.mesh.ranks, self.mesh.shard_index)
        return x.narrow(dim, run.start, run.stop - run.start)

    def split_joined(self, x: Tensor, dim: int, own: Sequence[int]) -> Tensor:
        """Return this rank's runs of a tensor in which streams lie one after the other. It has `own` tokens of each."""
        lengths = [sum(sizes) for sizes in self.sizes(*own)]
        if sum(lengths) != x.shape[dim]:
            given, fix = f"{x.shape[dim]} where the streams have {lengths}", "pass a mask of all keys"
            raise ShapeError("attnmesh.diffusers", "a mask of the tokens of all streams", given, fix)
        return torch.cat([self.split(part, dim) for part in x.split(lengths, dim)], dim)

    def gather(self, x: Tensor, dim: int) -> Tensor:
        """Return the whole tensor on every rank, with gradients."""
        return unshard_runs(x, self.mesh, self.sizes(x.shape[dim])[0], dim)

    def check_companions(self) -> None:
        """Raise if a tensor has tokens of its own, but not as many as a stream.

        A layer that is computed again in the backward pass was checked before, with the tensors of its forward pass.
        """
        if _is_in_backward():
            return
        for name, length in self.companions.items():
            if length not in self.lengths.values():
                expected = f"values of {' or '.join(map(str, self.lengths.values()))} tokens"
                fix = "pass one value for all tokens, or one for each"
                raise ShapeError(f"attnmesh.diffusers {name}", expected, f"{length}", fix)

    def sizes(self, *own: int) -> list[tuple[int, ...]]:
        """Return the tokens of each rank for tensors that have `own` tokens on this rank.

        Ranks exchange their numbers where a number does not identify a stream, and in the backward pass: a layer that
        is computed again there may belong to an earlier forward pass.
        """
        ranks = self.mesh.ranks
        if torch.compiler.is_compiling():
            if self.sizes_by_own is None:
                fix = "pass other numbers of tokens, or leave torch.compile out"
                given = f"streams of {sorted(self.lengths.values())} tokens on {ranks} ranks"
                raise MeshError("attnmesh.diffusers", "streams with different numbers of tokens", given, fix)
        elif self.sizes_by_own is None or _is_in_backward():
            table = dist_all_gather_ints(own, self.mesh.axes)
            return [tuple(column) for column in zip(*table, strict=True)]
        own = tuple(map(operator.index, own))
        for tokens in own:
            if tokens not in self.sizes_by_own:
                given = f"{tokens} tokens where a rank has {sorted(self.sizes_by_own)}"
                fix = "remove what adds tokens of its own, as an adapter for images"
                expected = "tokens of the streams that the plan splits"
                raise ShapeError("attnmesh.diffusers attention", expected, given, fix)
        return [self.sizes_by_own[tokens] for tokens in own]

    def _index_sizes(self) -> None:
        """Index the tokens of all ranks, for each stream and for all streams together, by this rank's number."""
        ranks = self.mesh.ranks
        stream_sizes = [run_sizes(length, ranks) for length in self.lengths.values()]
        all_sizes = dict.fromkeys([*stream_sizes, tuple(map(sum, zip(*stream_sizes, strict=True)))])
        is_unique = all(len(set(column)) == len(all_sizes) for column in zip(*all_sizes, strict=True))
        self.sizes_by_own = {sizes[self.mesh.shard_index]: sizes for sizes in all_sizes} if is_unique else None


def _is_in_backward() -> bool:
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1
