"""Queries of a cache's last tokens, in shards: all queries go to each rank's keys, and partials return to their owners.

A merge on all ranks would send each partial to every rank.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from attnmesh.comm.p2p import all_to_all, all_to_all_tokens, meta_like
from attnmesh.core.layout import Layout
from attnmesh.core.partial import Partial, merge_partials
from attnmesh.errors import ShapeError
from attnmesh.mesh.axes import Axis, RankMesh
from attnmesh.runtime.memo import index_on
from attnmesh.runtime.ranges import MERGE_RANGE, is_profiled, profiled_as
from attnmesh.runtime.world import cached_per_world


class QueryShard(NamedTuple):
    """This rank's shard of the queries of a cache's last tokens."""

    q: Tensor
    """Queries of this rank, (batch, heads, tokens of this rank, dim)."""
    layout: Layout
    """Layout of the last tokens over all ranks."""
    length: int
    """Number of the last tokens, on all ranks together."""

    def owners(self, mesh: RankMesh, token_axis: Axis) -> "QueryOwners":
        """Return the places of all ranks' queries. Raise unless this rank has a query of each token of its shard."""
        owners = _owners(mesh, token_axis, self.layout, self.length)
        count, queries = owners.chunk_counts[mesh.heads.index], self.q.shape[2]
        if queries != count:
            fix = "pass the queries that the layout gives to this rank"
            given = f"{queries} queries of {count}"
            raise ShapeError("decode_shard q", "a query for each token of the shard", given, fix)
        return owners


class QueryOwners(NamedTuple):
    """Places of each rank's queries among all. A chunk is the tokens of all ranks along the heads axis."""

    heads_axis: Axis
    token_axis: Axis
    chunk_counts: tuple[int, ...]
    """Number of tokens of each rank along the heads axis, in this rank's chunk."""
    chunks: tuple[Tensor, ...]
    """Indices of the tokens of the chunk of each rank along the tokens axis."""
    order: Tensor
    """Indices that sort the queries of all chunks, one chunk after the other, by their tokens."""

    def gather_queries(self, q: Tensor) -> Tensor:
        """Return the queries of all tokens with this rank's heads. `q` has this rank's tokens with all heads."""
        if self.heads_axis.size > 1:
            q = torch.cat(all_to_all_tokens(q.chunk(self.heads_axis.size, 1), self.chunk_counts, self.heads_axis), 2)
        q = torch.cat(all_to_all_tokens([q] * self.token_axis.size, [*map(len, self.chunks)], self.token_axis), 2)
        return q.index_select(2, index_on(self.order, q.device))

    def merge_at_owners(self, partial: Partial) -> Partial:
        """Return the merge of all ranks' partials, for the tokens of this rank's chunk."""
        returned = [tuple(x.index_select(2, index_on(chunk, x.device)) for x in partial) for chunk in self.chunks]
        for_chunk = tuple(meta_like(x, sum(self.chunk_counts)) for x in partial)
        merge = profiled_as(MERGE_RANGE, merge_partials) if is_profiled() else merge_partials
        return merge(
            [Partial(*part) for part in all_to_all(returned, [for_chunk] * self.token_axis.size, self.token_axis)]
        )

    def all_heads(self, out: Tensor) -> Tensor:
        """Return the outputs of this rank's tokens with all heads. `out` has this rank's chunk with its heads."""
        if self.heads_axis.size == 1:
            return out
        count = self.chunk_counts[self.heads_axis.index]
        return torch.cat(
            all_to_all_tokens(out.split(self.chunk_counts, 2), [count] * self.heads_axis.size, self.heads_axis), 1
        )


@cached_per_world(1024)
def _owners(mesh: RankMesh, token_axis: Axis, layout: Layout, length: int) -> QueryOwners:
    """Return the places of the queries of `length` tokens in a layout."""
    shape, chunks = mesh.shape, []
    for index in range(token_axis.size):
        row, column = divmod(index, shape.keys)
        shards = [shape.shard(head, row, column) for head in range(shape.heads)]
        chunks.append([layout.positions(length, shape.ranks, shard) for shard in shards])
    indices_by_chunk = [torch.cat(chunk) for chunk in chunks]
    chunk_counts = tuple(map(len, chunks[token_axis.index]))
    return QueryOwners(
        mesh.heads, token_axis, chunk_counts, tuple(indices_by_chunk), torch.cat(indices_by_chunk).argsort()
    )
