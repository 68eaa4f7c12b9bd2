"""Decoding of a shard: each rank has the queries of some of the cache's last tokens, and gets their outputs."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial as partial_of

import torch
from torch import Tensor

from attnmesh.cache.cache import KVCache
from attnmesh.core.partial import Partial, merge_partials, with_sinks
from attnmesh.core.scaling import Scores
from attnmesh.core.selection import Selection, Visible
from attnmesh.decoding.query_shard import QueryShard
from attnmesh.decoding.step_arguments import StepInputs, StepOptions, StepSpec, selection_of_rank
from attnmesh.decoding.step_checks import spec_of_step, spec_with_bias
from attnmesh.guard.agreement import Agreement, may_compare
from attnmesh.kernels.cache_view import DecodeQuery
from attnmesh.mesh_attention.sharding import unshard
from attnmesh.runtime.ranges import ATTENTION_RANGE, is_profiled, profiled_as

AttendOtherKeys = Callable[[Tensor], Partial | None]
"""Returns attention of all queries over other keys of this rank."""


@torch.no_grad()
def decode_shard(
    queries: QueryShard,
    cache: KVCache,
    visible: Visible,
    scores: Scores,
    *,
    sinks: Tensor | None = None,
    kernel: str = "auto",
    attend_other_keys: AttendOtherKeys = lambda _: None,
) -> Tensor:
    """Return attention of this rank's queries, (batch, heads, tokens of this rank, dim), over the whole cache.

    The mask of `visible` and its selection, and the bias of `scores`, are those of this rank's queries; nothing else
    limits what they see. The last bits of results depend on the number of ranks.
    """
    q, layout, length = queries
    selected = visible.selected
    # Positions are those of the last tokens, and all keys are real.
    assert visible.q_positions is visible.k_positions is visible.key_lengths is None
    options = StepOptions(
        mask=visible.mask,
        scale=scores.scale,
        softcap=scores.softcap,
        merge="auto",
        output="replicated",
        reproducible=False,
        kernel=kernel,
    )

    is_compared = cache.rank_mesh.ranks > 1 and cache.guard.checked is not False and may_compare(q.device)
    with Agreement(cache.rank_mesh, "decode_shard", is_compared=is_compared) as agreement:
        owners = queries.owners(cache.rank_mesh, cache.token_axis)
        like_all_queries = q.new_empty(1).expand(*q.shape[:2], length, q.shape[3])
        inputs = StepInputs(q, (cache,), sinks, selected=selected)
        spec = spec_of_step(replace(inputs, q=like_all_queries) if selected is None else inputs, options, {})
        spec = spec_with_bias(inputs, scores.distance_bias, spec)
        agreement.compare(partial_of(_fields, queries, cache, spec))
    heads_axis = cache.rank_mesh.heads
    every = owners.gather_queries(scores.widened(q))
    if selected is not None:
        indices = unshard(selected.indices, cache.device_mesh, layout=layout, length=length)
        selected = selection_of_rank(Selection(indices, selected.block), heads_axis)
    view = cache.own_shard.view
    query = DecodeQuery(every, spec.options.mask, spec.scaling, spec.capacity)
    attention = spec.attention_for(every, view)
    attend = profiled_as(ATTENTION_RANGE, attention.attend) if is_profiled() else attention.attend
    partial = attend(query, [view], selected)
    if (other_partial := attend_other_keys(every)) is not None:
        partial = merge_partials([partial, other_partial])
    merged = owners.merge_at_owners(partial)
    rank_sinks = None if sinks is None else sinks[heads_axis.slice_of(q.shape[1])]
    return owners.all_heads(with_sinks(merged, rank_sinks).out.to(q.dtype))


def _fields(queries: QueryShard, cache: KVCache, spec: StepSpec) -> dict[str, object]:
    """Return the arguments that ranks compare, with the options of the step, such as whether tokens are selected."""
    q, layout, length = queries
    contents = {"tokens in the cache": cache.length, "padding and order": cache.history.digest}
    query_fields = {"dtype": q.dtype, "heads": q.shape[1], "layout": layout, "length": length}
    return {**query_fields, **contents, **spec.fields_to_compare}
