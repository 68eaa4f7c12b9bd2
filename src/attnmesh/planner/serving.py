"""Ways to share a model's weights and keys over the ranks of a cluster in decoding: memory, tokens, seconds."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

from attnmesh.errors import ClusterError, require
from attnmesh.mesh.cluster import Cluster
from attnmesh.mesh.merge_cost import MergeGroup, all_reduce_seconds
from attnmesh.mesh.shapes import Shape, share_evenly
from attnmesh.mesh.traffic import divisors
from attnmesh.planner.cost import cost
from attnmesh.planner.plan import Plan, candidates, plan
from attnmesh.planner.workload import Workload

ROOMY = 1e30
"""Bytes of memory that any plan fits."""

ALL_REDUCES = 2
"""All-reduces of a layer whose weights are shared: after attention and after the feed-forward network."""

FLOPS = 2
"""Operations of a weight and a token."""


@dataclass(frozen=True)
class Model:
    """Bytes that decoding with a language model reads and keeps.

    Args:
        workload: The decode step of its attention layers, all heads. Its length is the number of cached tokens.
        hidden: Columns of a token between layers.
        layers: All layers.
        weights: Returns the bytes of weights on a rank, from the ranks that share them, and whether these are the ranks
            that share the keys.
        windows: Bytes that layers with windows keep, on all ranks together. They do not grow with the length.
        active: Weights that one token of a prompt is multiplied by; None if it is not known.
    """

    workload: Workload
    hidden: int
    layers: int
    weights: Callable[[int, bool], int]
    windows: int = 0
    active: int | None = None


class Serving(NamedTuple):
    """One way to share weights and keys."""

    tp: int
    """Ranks that share the weights."""
    is_shared: bool
    """True if the same ranks share the keys."""
    plan: Plan
    """Attention of the ranks that share the keys."""
    weights: int
    """Bytes of weights of a rank."""
    keys: float
    """Bytes of keys, values and index keys of a rank, at the length that is planned for."""
    tokens: int
    """Most tokens of each sequence whose keys fit beside the weights; 0 if the weights alone are too large."""
    seconds: float
    """Predicted seconds of a step: attention, reading the weights once, and the all-reduces between layers."""
    first: float | None
    """Predicted seconds to the first token of prompts of this length, or None if the active weights are not known."""
    fits: bool
    """True if the planned length fits."""


def serving(model: Model, cluster: Cluster) -> list[Serving]:
    """Return all ways to share weights and keys, those that fit the planned length first, then the fastest first.

    Left out are activations, and the time of layers with windows and of recurrent layers, which are the same in each.

    Raises:
        ClusterError: No number of ranks divides the heads.
    """
    world, q_heads, kv_heads = cluster.world, model.workload.q_heads, model.workload.kv_heads
    ways = [(tp, False) for tp in divisors(world) if q_heads % tp == 0 and share_evenly(kv_heads, tp)]
    ways += [(world, True)] * (world > 1 and q_heads % world == 0 and model.workload.latent is None)
    # The ranks that share weights are a part of each host, or whole hosts.
    found = [_serving(model, cluster, *way) for way in ways if share_evenly(cluster.ranks, way[0])]
    given = f"{q_heads}/{kv_heads} heads on {world}"
    require(bool(found), ClusterError, "plan", "ranks that divide the heads", given, "take another number of ranks")
    return sorted(found, key=lambda one: (not one.fits, one.seconds))


def _serving(model: Model, cluster: Cluster, tp: int, is_shared: bool) -> Serving:
    work, near = model.workload, min(tp, cluster.ranks)
    if is_shared:
        others = cluster
    else:  # the other ranks, each of which competes for its host's links with the ranks that it shares weights with
        if work.latent is None:  # else each rank computes all heads
            work = _with_heads(work, work.q_heads // tp, max(1, work.kv_heads // tp))
        hosts = cluster.hosts if tp <= cluster.ranks else cluster.world // tp
        inside, between = (replace(link, host_rate=link.host_rate / near) for link in (cluster.inside, cluster.between))
        others = replace(cluster, hosts=hosts, ranks=cluster.ranks // near, inside=inside, between=between)
    best = _fastest(work, others, Shape(1, 1, others.world) if is_shared else None)
    weights, group = model.weights(tp, is_shared), MergeGroup(tp, near)
    keys = (work.kept_bytes + work.index_bytes) / best.shape.ranks
    free = cluster.device.memory - weights - (model.windows / best.shape.ranks) - work.state_bytes
    reduced = work.batch * (work.q_len or 1) * model.hidden * work.item
    seconds = best.seconds + weights / cluster.device.memory_rate
    if tp > 1:
        seconds += ALL_REDUCES * model.layers * all_reduce_seconds(group, reduced, cluster)
    tokens = max(0, int(free * work.kept / keys))
    first = _first_seconds(model, cluster, group, best)
    return Serving(tp, is_shared, best, weights, keys, tokens, seconds, first, tokens >= work.length)


def _first_seconds(model: Model, cluster: Cluster, group: MergeGroup, step: Plan) -> float | None:
    """Return the seconds of a prompt: products with weights at attention's rate, attention, and all-reduces."""
    if model.active is None or step.workload.selected is not None:
        return None
    work = replace(step.workload, phase="prefill", q_len=None, storage=None)
    tokens, world = work.batch * work.length, cluster.world
    ways = [one for one in candidates(work, step.cluster) if one.shape == step.shape]
    seconds = min(cost(one, work, step.cluster).seconds for one in ways)
    seconds += FLOPS * model.active * tokens / world / cluster.device.forward_rate
    if group.ranks > 1:
        links = (cluster.inside.rate, cluster.between.host_rate)  # a long message leaves by all cards of a host
        rate = links[0] if group.ranks <= cluster.ranks else links[1] if group.near == 1 else min(links)
        sent = 2 * (group.ranks - 1) / world * tokens * model.hidden * work.item / rate
        seconds += ALL_REDUCES * model.layers * (sent + all_reduce_seconds(group, 0, cluster))
    return seconds


def _with_heads(work: Workload, q_heads: int, kv_heads: int) -> Workload:
    selected = work.selected
    if selected is not None:
        selected = replace(selected, heads=min(selected.heads, kv_heads))
    return replace(work, q_heads=q_heads, kv_heads=kv_heads, selected=selected)


def _fastest(work: Workload, cluster: Cluster, shape: Shape | None) -> Plan:
    """Return the fastest plan, of one shape if it is given, also where the planned length does not fit."""
    roomy = replace(cluster, device=replace(cluster.device, memory=ROOMY))
    plans = plan(work, roomy)
    return next(one for one in plans if shape is None or one.shape == shape)
