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
from attnmesh.runtime.ranges import MERGE, is_profiled, profiled_as
from attnmesh.runtime.world import cached_per_world


class QueryShard(NamedTuple):
    """This rank's queries, (batch, heads, tokens of this rank, dim), that a layout gives it of the last tokens."""

    q: Tensor
    layout: Layout
    length: int
    """Last tokens of the cache, of all ranks."""

    def owners(self, mesh: RankMesh, token_axis: Axis) -> "QueryOwners":
        """Return where the queries of all ranks are, or raise unless this rank has those of its shard."""
        owners = _owners(mesh, token_axis, self.layout, self.length)
        count, queries = owners.chunk_counts[mesh.heads.index], self.q.shape[2]
        if queries != count:
            fix = "pass the queries that the layout gives to this rank"
            given = f"{queries} queries of {count}"
            raise ShapeError("decode_shard q", "a query for each token of the shard", given, fix)
        return owners


class QueryOwners(NamedTuple):
    """Places of each rank's queries among all. `order` sorts queries that stand rank after rank by their tokens."""

    heads_axis: Axis
    token_axis: Axis
    chunk_counts: tuple[int, ...]
    """Tokens of each rank along the heads axis, in this rank's chunk."""
    chunks: tuple[Tensor, ...]
    """Tokens in the chunk of each rank along the axis of tokens."""
    order: Tensor

    def gather_queries(self, q: Tensor) -> Tensor:
        """Return the queries of all tokens, of this rank's heads, from those of this rank's tokens."""
        if self.heads_axis.size > 1:
            q = torch.cat(all_to_all_tokens(q.chunk(self.heads_axis.size, 1), self.chunk_counts, self.heads_axis), 2)
        q = torch.cat(all_to_all_tokens([q] * self.token_axis.size, [*map(len, self.chunks)], self.token_axis), 2)
        return q.index_select(2, index_on(self.order, q.device))

    def merge_at_owners(self, partial: Partial) -> Partial:
        """Return the merge of all ranks' partials, for the tokens of this rank's chunk."""
        returned = [tuple(x.index_select(2, index_on(chunk, x.device)) for x in partial) for chunk in self.chunks]
        for_chunk = tuple(meta_like(x, sum(self.chunk_counts)) for x in partial)
        merge = profiled_as(MERGE, merge_partials) if is_profiled() else merge_partials
        return merge(
            [Partial(*part) for part in all_to_all(returned, [for_chunk] * self.token_axis.size, self.token_axis)]
        )

    def all_heads(self, out: Tensor) -> Tensor:
        """Return the outputs of all heads for this rank's tokens, from those of its heads for its chunk."""
        if self.heads_axis.size == 1:
            return out
        count = self.chunk_counts[self.heads_axis.index]
        return torch.cat(
            all_to_all_tokens(out.split(self.chunk_counts, 2), [count] * self.heads_axis.size, self.heads_axis), 1
        )


@cached_per_world(1024)
def _owners(mesh: RankMesh, token_axis: Axis, layout: Layout, length: int) -> QueryOwners:
    """Return where so many queries of a layout are."""
    shape, chunks = mesh.shape, []
    for index in range(token_axis.size):
        row, column = divmod(index, shape.keys)
        shards = [shape.shard(head, row, column) for head in range(shape.heads)]
        chunks.append([layout.positions(length, shape.ranks, shard) for shard in shards])
    tokens_by_chunk = [torch.cat(chunk) for chunk in chunks]
    chunk_counts = tuple(map(len, chunks[token_axis.index]))
    return QueryOwners(
        mesh.heads, token_axis, chunk_counts, tuple(tokens_by_chunk), torch.cat(tokens_by_chunk).argsort()
    )
