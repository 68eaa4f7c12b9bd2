"""Decoding of a shard: each rank has the queries of some of the cache's last tokens, and gets their outputs.

Queries go to the ranks that hold the cache, and their partials come back to be merged where the queries are. A merge
on all ranks would send each partial to every rank.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from attnmesh.cache.cache import KVCache
from attnmesh.comm.p2p import meta_like, swap, swap_tokens
from attnmesh.core.layout import Layout
from attnmesh.core.logits import with_distance_bias
from attnmesh.core.mask import Causal, Mask
from attnmesh.core.partial import Partial, merge_unchecked, with_sinks
from attnmesh.core.selection import Selection
from attnmesh.decoding.decode_call import named_options, unchecked_step
from attnmesh.decoding.selected_tokens import selection_of_rank
from attnmesh.decoding.step import attend_views
from attnmesh.decoding.step_checks import StepInputs, check_bias, check_step
from attnmesh.errors import ShapeError, require
from attnmesh.guard.agreement import Agreement, may_compare
from attnmesh.kernels.blocks import Need
from attnmesh.kernels.cache_view import DecodeQuery
from attnmesh.kernels.choice import choose
from attnmesh.mesh.axes import Axis, Mesh
from attnmesh.mesh_attention.sharding import unshard
from attnmesh.runtime.caches import on_device
from attnmesh.runtime.ranges import ATTENTION, MERGE, is_profiled, named
from attnmesh.runtime.world import cached_per_world

Further = Callable[[Tensor], Partial | None]
"""Returns attention of all queries over further keys of this rank."""


class Places(NamedTuple):
    """Places of each rank's queries among all; `order` sorts those of all ranks."""

    own: tuple[int, ...]  # tokens of each rank along the heads axis, in this rank's chunk
    chunks: tuple[Tensor, ...]  # of each rank along the axis of tokens, those of its chunk
    order: Tensor


@torch.no_grad()
def decode_shard(
    q: Tensor,
    cache: KVCache,
    layout: Layout,
    length: int,
    *,
    mask: Mask = Causal(),
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    kernel: str = "auto",
    selected: Selection | None = None,
    distance_bias: Tensor | None = None,
    further: Further = lambda _: None,
) -> Tensor:
    """Return attention of this rank's queries, (batch, heads, tokens of this rank, dim), over the whole cache.

    The queries are those of the last `length` tokens, of which each rank has the ones that the layout gives it.
    `selected` and `distance_bias` are those of this rank's queries. The last bits of results
    depend on the number of ranks.
    """
    step = unchecked_step(cache, mask, scale, softcap, "auto", "replicated", False, kernel)

    def fields() -> dict[str, object]:
        contents = {"tokens in the cache": cache.length, "padding and order": cache.history_checksum}
        queries = {"dtype": q.dtype, "heads": q.shape[1], "layout": layout, "length": length}
        return {**queries, **contents, **named_options(step)}

    compares = cache.mesh.ranks > 1 and cache.calls.checked is not False and may_compare(q.device)
    with Agreement(cache.mesh, "decode_shard", fields, compares=compares):
        count = _places(cache.mesh, cache.tokens, layout, length).own[cache.mesh.heads.index]
        given, fix = f"{q.shape[2]} queries of {count}", "pass the queries that the layout gives to this rank"
        require(q.shape[2] == count, ShapeError, "decode_shard q", "a query for each token of the shard", given, fix)
        whole = q.new_empty(1).expand(*q.shape[:2], length, q.shape[3])
        inputs = StepInputs(q, (cache,), sinks, selected=selected)
        step = check_step(inputs._replace(q=whole) if selected is None else inputs, step, {})
        step = check_bias(inputs, distance_bias, step)
    q = with_distance_bias(q, distance_bias)
    places = _places(cache.mesh, cache.tokens, layout, length)
    heads, tokens = cache.mesh.heads, cache.tokens
    arrived = q if heads.size == 1 else torch.cat(swap_tokens(q.chunk(heads.size, 1), places.own, heads), 2)
    arrived = torch.cat(swap_tokens([arrived] * tokens.size, [*map(len, places.chunks)], tokens), 2)
    every = arrived.index_select(2, on_device(places.order, q.device))
    if selected is not None:
        indices = unshard(selected.indices, cache.device_mesh, layout=layout, length=length)
        selected = selection_of_rank(Selection(indices, selected.block), heads)
    view, query = cache.shard.view, DecodeQuery(every, step.mask, step.logits, step.capacity)
    chosen = choose(Need.of_cache(every, view, step.logits), step.kernel if selected is None else "reference")
    attend = named(ATTENTION, attend_views) if is_profiled() else attend_views
    partial = attend(query, [view], chosen, selected)
    if (more := further(every)) is not None:
        partial = merge_unchecked([partial, more])
    returned = [tuple(x.index_select(2, on_device(chunk, x.device)) for x in partial) for chunk in places.chunks]
    own = tuple(meta_like(x, sum(places.own)) for x in partial)
    merge = named(MERGE, merge_unchecked) if is_profiled() else merge_unchecked
    merged = merge([Partial(*part) for part in swap(returned, [own] * tokens.size, tokens)])
    out = with_sinks(merged, None if sinks is None else sinks[heads.share_of(q.shape[1])]).out.to(q.dtype)
    if heads.size == 1:
        return out
    return torch.cat(swap_tokens(out.split(places.own, 2), [q.shape[2]] * heads.size, heads), 1)


@cached_per_world(1024)
def _places(mesh: Mesh, tokens: Axis, layout: Layout, length: int) -> Places:
    """Return the places of so many queries in a layout."""
    shape, chunks = mesh.shape, []
    for place in range(tokens.size):
        row, column = divmod(place, shape.keys)
        shards = [shape.shard(head, row, column) for head in range(shape.heads)]
        chunks.append([layout.positions(length, shape.ranks, shard) for shard in shards])
    whole = [torch.cat(chunk) for chunk in chunks]
    return Places(tuple(map(len, chunks[tokens.index])), tuple(whole), torch.cat(whole).argsort())
