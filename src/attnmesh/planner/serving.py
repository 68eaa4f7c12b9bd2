"""Ways to share a model's weights and keys over the ranks of a cluster in decoding: memory, tokens, seconds.

`attnmesh plan --decode` prints them, and `--mesh auto` and `--weights auto` take the first that they may.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from attnmesh.errors import ClusterError, require
from attnmesh.mesh.cluster import Cluster
from attnmesh.mesh.merge_cost import MergeGroup, all_reduce_seconds
from attnmesh.mesh.prices import Cost
from attnmesh.mesh.shapes import Shape, elements, share_evenly
from attnmesh.mesh.traffic import divisors
from attnmesh.planner.cost import cost
from attnmesh.planner.decode_cost import FLOPS, SharedLayers, add_outputs, add_small_calls, add_weights
from attnmesh.planner.plan import Plan, candidates, plan
from attnmesh.planner.workload import Workload

ROOMY = 1e30
"""Bytes of memory that any plan fits."""

ALL_REDUCES = 2
"""All-reduces of a layer whose weights are shared by tp: after attention and after the feed-forward network."""


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
        shared: The layers that ranks of a host can compute together; None without any.
    """

    workload: Workload
    hidden: int
    layers: int
    weights: Callable[[int, bool], int]
    windows: int = 0
    active: int | None = None
    shared: SharedLayers | None = None

    @property
    def rows(self) -> int:
        """Tokens of a step."""
        return self.workload.batch * (self.workload.q_len or 1)


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
    """Predicted seconds of a step: the sum of `parts`."""
    first: float | None
    """Predicted seconds to the first token of prompts of this length, or None if the active weights are not known."""
    fits: bool
    """True if the planned length fits."""
    shape: Shape
    """Ranks along the axes of attention. A step is the same along queries and keys, a prompt is not."""
    sharing: int
    """Ranks that compute each layer of a step together, by `hf.share_weights`; 1 where each computes it whole."""
    read: float
    """Bytes of weights that a rank reads in a step."""
    parts: tuple[tuple[str, float], ...]
    """Pairs of a stage of a step and its seconds, those of attention and of `layers` apart."""

    @property
    def ranks(self) -> int:
        """All ranks."""
        return self.shape.ranks * (1 if self.is_shared else self.tp)


class Way(NamedTuple):
    """Shares: `tp` ranks share the weights, which are those of the keys or not, and ranks share layers or not."""

    tp: int
    is_shared: bool = False
    shares_layers: bool = False


def serving(model: Model, cluster: Cluster, shape: Shape | None = None) -> list[Serving]:
    """Return all ways to share weights and keys, those that fit the planned length first, then the fastest first.

    With a shape, the ways of attention on this shape alone. Left out are activations, and the time of layers with
    windows and of recurrent layers, which are the same in each.

    Raises:
        ClusterError: No number of ranks divides the heads.
    """
    world, q_heads, kv_heads = cluster.world, model.workload.q_heads, model.workload.kv_heads
    ways = [Way(tp) for tp in divisors(world) if q_heads % tp == 0 and share_evenly(kv_heads, tp)]
    ways += [Way(world, is_shared=True)] * (world > 1 and q_heads % world == 0 and model.workload.latent is None)
    ways += [Way(1, shares_layers=True)] * (world > 1 and why_whole(model, cluster) is None)
    # The ranks that share weights are a part of each host, or whole hosts.
    ways = [way for way in ways if share_evenly(cluster.ranks, way.tp)]
    if shape is not None:
        ways = [way for way in ways if shape.ranks * way.tp == world and not way.is_shared]
    found = [_serving(model, cluster, way, shape) for way in ways]
    given = f"{q_heads}/{kv_heads} heads on {world}"
    require(bool(found), ClusterError, "plan", "ranks that divide the heads", given, "take another number of ranks")
    if cluster.hosts == 1 < world and shape is None:
        found.append(_serving(model, _one_rank(cluster), Way(1), None))
    return sorted(found, key=lambda one: (not one.fits, one.seconds, one.first or 0.0, -one.ranks))


def chosen(ways: Sequence[Serving], ranks: int, tp: int = 1, shares_layers: bool | None = None) -> Serving:
    """Return the way that is taken for so many ranks: of those with this `tp` the first, which fits and is fastest.

    `shares_layers` takes those alone in which ranks share layers, or do not, if there are any.
    """
    fitting = [one for one in ways if (one.ranks, one.tp, one.is_shared) == (ranks, tp, False)]
    wanted = [one for one in fitting if shares_layers in (None, one.sharing > 1)]
    return (wanted or fitting)[0]


def why_whole(model: Model, cluster: Cluster) -> str | None:
    """Return why ranks cannot share the layers of a step, or None if they can."""
    shared, rows = model.shared, model.rows
    if not cluster.on_cpus:
        return "GPUs share weights by tp"
    if shared is None:
        return "none of them is a linear layer that ranks can share"
    if cluster.hosts > 1:
        return "ranks of several hosts share no memory"
    if cluster.ranks > shared.most_ranks:
        return f"at most {shared.most_ranks} ranks of a host share memory"
    return f"steps of at most {shared.most_rows} rows are shared" if rows > shared.most_rows else None


def over_hosts(model: Model, cluster: Cluster) -> Serving | None:
    """Return what a step would take if the ranks of several hosts shared layers over the network, which they do not.

    None for ranks that cannot for another reason, or do.
    """
    if cluster.hosts == 1 or why_whole(model, replace(cluster, hosts=1, inside=cluster.between)) is not None:
        return None
    return _serving(model, cluster, Way(1, shares_layers=True), None)


def _one_rank(cluster: Cluster) -> Cluster:
    """Return one rank of a host; on CPUs it has all cores and the memory."""
    device = cluster.device
    if cluster.on_cpus:
        device = replace(device.of_cores(cluster.ranks), memory=device.memory * cluster.ranks)
    return replace(cluster, hosts=1, ranks=1, device=device)


def _serving(model: Model, cluster: Cluster, way: Way, shape: Shape | None) -> Serving:
    tp, is_shared, shares_layers = way
    work, near = model.workload, min(tp, cluster.ranks)
    if is_shared:
        others = cluster
    else:  # the other ranks, each of which competes for its host's links with the ranks that it shares weights with
        if work.latent is None:  # else each rank computes all heads
            work = _with_heads(work, work.q_heads // tp, max(1, work.kv_heads // tp))
        hosts = cluster.hosts if tp <= cluster.ranks else cluster.world // tp
        inside, between = (replace(link, host_rate=link.host_rate / near) for link in (cluster.inside, cluster.between))
        others = replace(cluster, hosts=hosts, ranks=cluster.ranks // near, inside=inside, between=between)
    line = is_shared or shares_layers  # on one axis, along which all ranks share
    heads = shape.heads if shape is not None else 1 if line else None
    best = _fastest(work, others, heads)
    shape = shape or (best.shape if is_shared else _shape_of_prompts(work, best.shape, line))
    sharing = max(shape) if shares_layers else 1
    weights, group = model.weights(tp, is_shared), MergeGroup(tp, near)
    keys = (work.kept_bytes + work.index_bytes) / best.shape.ranks
    free = cluster.device.memory - weights - (model.windows / best.shape.ranks) - work.state_bytes
    step, read = _layers_cost(model, cluster, group, weights, sharing)
    tokens = max(0, int(free * work.kept / keys))
    first = _first_seconds(model, cluster, group, best, shape)
    seconds, parts = best.seconds + step.seconds, (*best.parts, *step.parts.items())
    fits = tokens >= work.length
    return Serving(tp, is_shared, best, weights, keys, tokens, seconds, first, fits, shape, sharing, read, parts)


def _layers_cost(model: Model, cluster: Cluster, group: MergeGroup, weights: int, sharing: int) -> tuple[Cost, float]:
    """Return the cost of the layers of a step beside attention, and the bytes of weights that a rank reads."""
    total, read, rows, item = Cost(), float(weights), model.rows, model.workload.item
    if sharing > 1 and model.shared is not None:
        read -= model.shared.weights * (sharing - 1) / sharing
        add_outputs(model.shared, sharing, rows, cluster, total)
    add_weights(read, rows, item, cluster, total)
    add_small_calls(model.layers, cluster, total)
    if group.ranks > 1:
        reduced = rows * model.hidden * item
        total.add_stage("all-reduces", ALL_REDUCES * model.layers * all_reduce_seconds(group, reduced, cluster))
    return total, read


def _shape_of_prompts(work: Workload, step: Shape, line: bool) -> Shape:
    """Return the shape in which a prompt sends least, of those with a step's heads axis; on `line`, of one axis."""
    kv_heads, others = work.travelling[0], step.queries * step.keys
    shapes = [Shape(step.heads, queries, others // queries) for queries in divisors(others)]
    if line:
        shapes = [one for one in shapes if max(one) == others]
    if work.selected is not None:
        shapes = [one for one in shapes if one.keys == 1]
    return min(shapes, key=lambda one: sum(elements(one, work.q_heads, kv_heads, training=False)))


def _first_seconds(model: Model, cluster: Cluster, group: MergeGroup, step: Plan, shape: Shape) -> float | None:
    """Return the seconds of a prompt: products with weights at attention's rate, attention, and all-reduces."""
    if model.active is None or step.workload.selected is not None:
        return None
    work = replace(step.workload, phase="prefill", q_len=None, storage=None)
    tokens, world = work.batch * work.length, cluster.world
    ways = [one for one in candidates(work, step.cluster) if one.shape == shape]
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


def _fastest(work: Workload, cluster: Cluster, heads: int | None) -> Plan:
    """Return the fastest plan, of one heads axis if it is given, also where the planned length does not fit."""
    roomy = replace(cluster, device=replace(cluster.device, memory=ROOMY))
    return next(one for one in plan(work, roomy) if heads in (None, one.shape.heads))
