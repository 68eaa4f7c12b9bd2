"""Ways to spread a model's weights and keys over the ranks of a cluster in decoding: memory, tokens, seconds.

`attnmesh plan --decode` prints them, and `--mesh auto` and `--weights auto` take the first that they may.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import NamedTuple

from attnmesh.cost.candidate_mesh import Cost
from attnmesh.cost.cluster import Cluster
from attnmesh.cost.merge_cost import MergeGroup, all_reduce_seconds
from attnmesh.cost.traffic import divisors
from attnmesh.errors import ClusterError
from attnmesh.mesh.shapes import Shape, elements, share_evenly
from attnmesh.planner.decode_cost import (
    FLOPS,
    Experts,
    SharedLayers,
    add_outputs,
    add_results,
    add_small_calls,
    add_weights,
)
from attnmesh.planner.plan import Plan, all_candidates, plan
from attnmesh.planner.workload import Workload
from attnmesh.planner.workload_cost import cost

UNLIMITED_MEMORY = 1e30
"""Bytes of memory that any plan fits."""

ALL_REDUCES = 2
"""All-reduces of a layer whose weights are split by tp: after attention and after the feed-forward network."""


@dataclass(frozen=True)
class ModelSizes:
    """Bytes that decoding with a language model reads and keeps.

    Args:
        workload: The decode step of its attention layers, all heads. Its length is the number of cached tokens.
        hidden_size: Columns of a token between layers.
        layers: All layers.
        rank_weight_bytes: Returns the bytes of weights of a rank, from the ranks that split them, and whether these are
            the ranks that divide the keys.
        window_bytes: Bytes that layers with windows keep, on all ranks together. They do not grow with the length.
        active_parameters: Weights that one token of a prompt is multiplied by; None if it is not known.
        shared: The layers that ranks of a host can compute together; None without any.
        experts: The experts of its layers; None without any, or if it is not known how many a token takes.
    """

    workload: Workload
    hidden_size: int
    layers: int
    rank_weight_bytes: Callable[[int, bool], int]
    window_bytes: int = 0
    active_parameters: int | None = None
    shared: SharedLayers | None = None
    experts: Experts | None = None

    @property
    def step_tokens(self) -> int:
        """Tokens of a step."""
        return self.workload.batch * (self.workload.q_len or 1)


class WeightSharding(NamedTuple):
    """Ranks that hold weights, and ranks that compute the layers of a step."""

    tp: int
    """Ranks that split the weights."""
    is_joint: bool = False
    """True if the same ranks divide the keys."""
    layers_shared: bool = False
    """True if the ranks of a host share layers: they compute each one together."""


class ServingPlan(NamedTuple):
    """One way to spread weights and keys over ranks."""

    sharding: WeightSharding
    shape: Shape
    """Ranks along the axes of attention. A step uses the queries and keys axes as one, a prompt does not."""
    attention_plan: Plan
    """Attention of the ranks that divide the keys."""
    weight_bytes: int
    """Bytes of weights that a rank holds, with its part of pages that several ranks map."""
    read_bytes: float
    """Bytes of weights that a rank reads in a step."""
    key_bytes: float
    """Bytes of keys, values and index keys of a rank, at the length that is planned for."""
    tokens: int
    """Most tokens of each sequence whose keys fit beside the weights; 0 if the weights alone are too large."""
    seconds: float
    """Predicted seconds of a step: the sum of `parts`."""
    parts: tuple[tuple[str, float], ...]
    """Pairs of a stage of a step and its seconds: first those of attention, then those of the layers beside it."""
    first_token_seconds: float | None
    """Predicted seconds to the first token of prompts of this length, or None if the active weights are not known."""

    @property
    def ranks(self) -> int:
        """Number of all ranks."""
        return self.shape.ranks * (1 if self.sharding.is_joint else self.sharding.tp)

    @property
    def layer_ranks(self) -> int:
        """Ranks that compute each layer of a step together, by `hf.share_weights`; 1 where each computes it whole."""
        return max(self.shape) if self.sharding.layers_shared else 1

    @property
    def fits(self) -> bool:
        """True if the planned length fits."""
        return self.tokens >= self.attention_plan.workload.length


def serving_plans(model: ModelSizes, cluster: Cluster, shape: Shape | None = None) -> list[ServingPlan]:
    """Return all ways to spread weights and keys, those that fit the planned length first, then the fastest first.

    With a `shape`, attention is on this shape alone. Activations are left out, and the time of layers with windows and
    of recurrent layers: they are the same in each way.

    Raises:
        ClusterError: No number of ranks divides the heads.
    """
    world, q_heads, kv_heads = cluster.world, model.workload.q_heads, model.workload.kv_heads
    shardings = [WeightSharding(tp) for tp in divisors(world) if q_heads % tp == 0 and share_evenly(kv_heads, tp)]
    if world > 1 and q_heads % world == 0 and model.workload.latent is None:
        shardings.append(WeightSharding(world, is_joint=True))
    if world > 1 and why_not_shared(model, cluster) is None:
        shardings.append(WeightSharding(1, layers_shared=True))
    # The ranks that split weights are a part of each host, or whole hosts.
    shardings = [sharding for sharding in shardings if share_evenly(cluster.ranks, sharding.tp)]
    if shape is not None:
        shardings = [sharding for sharding in shardings if shape.ranks * sharding.tp == world and not sharding.is_joint]
    plans = [_serving(model, cluster, sharding, shape) for sharding in shardings]
    if not plans:
        given, fix = f"{q_heads}/{kv_heads} heads on {world}", "take another number of ranks"
        raise ClusterError("plan", "ranks that divide the heads", given, fix)
    if cluster.hosts == 1 < world and shape is None:
        plans.append(_serving(model, _one_rank(cluster), WeightSharding(1), None))
    return sorted(plans, key=lambda plan: (not plan.fits, plan.seconds, plan.first_token_seconds or 0.0, -plan.ranks))


def choose_plan(
    plans: Sequence[ServingPlan], ranks: int, tp: int = 1, layers_shared: bool | None = None
) -> ServingPlan:
    """Return the first way with this number of `ranks` and this `tp`: it fits if any does, and is fastest.

    With `layers_shared`, ways in which ranks share layers (True), or do not (False), come before all others.
    """
    fitting = [plan for plan in plans if (plan.ranks, plan.sharding.tp, plan.sharding.is_joint) == (ranks, tp, False)]
    preferred = [plan for plan in fitting if layers_shared in (None, plan.sharding.layers_shared)]
    return (preferred or fitting)[0]


def why_not_shared(model: ModelSizes, cluster: Cluster) -> str | None:
    """Return why ranks cannot share the layers of a step, or None if they can."""
    shared, tokens = model.shared, model.step_tokens
    if not cluster.on_cpus:
        return "GPUs split weights by tp"
    if shared is None:
        return "none of them is a linear layer that ranks can share"
    if cluster.hosts > 1:
        return "ranks of several hosts share no memory"
    if cluster.ranks > shared.most_ranks:
        return f"at most {shared.most_ranks} ranks of a host share memory"
    return f"steps of at most {shared.most_tokens} rows are shared" if tokens > shared.most_tokens else None


def over_hosts(model: ModelSizes, cluster: Cluster) -> ServingPlan | None:
    """Return what a step would take if the ranks of several hosts shared layers over the network, which they do not.

    None for ranks of one host, and for ranks that could not share them on one host either.
    """
    if cluster.hosts == 1:
        return None
    one_host = replace(cluster.sized(1, cluster.ranks), inside=cluster.between)
    if why_not_shared(model, one_host) is not None:
        return None
    return _serving(model, cluster, WeightSharding(1, layers_shared=True), None)


def _one_rank(cluster: Cluster) -> Cluster:
    """Return a cluster of one rank. On CPUs it has all cores and all memory of the host."""
    device = cluster.device
    if cluster.on_cpus:
        device = replace(device.of_cores(cluster.ranks), memory=device.memory * cluster.ranks)
    return replace(cluster.sized(1, 1), device=device)


def _serving(model: ModelSizes, cluster: Cluster, sharding: WeightSharding, shape: Shape | None) -> ServingPlan:
    """Return the way of a sharding with its price, on this shape of attention, or on the best shape."""
    attention = _attention(model.workload, cluster, sharding, shape)
    shape = shape or _shape_of_prompts(attention, sharding)
    step, read_bytes = _layers_cost(model, cluster, sharding, max(shape) if sharding.layers_shared else 1)
    weight_bytes = _held_weight_bytes(model, cluster, sharding)
    key_bytes, tokens = _key_bytes_and_tokens(model, cluster.device.memory - weight_bytes, attention)
    return ServingPlan(
        sharding=sharding,
        shape=shape,
        attention_plan=attention,
        weight_bytes=weight_bytes,
        read_bytes=read_bytes,
        key_bytes=key_bytes,
        tokens=tokens,
        seconds=attention.seconds + step.seconds,
        parts=(*attention.parts, *step.parts.items()),
        first_token_seconds=_first_token_seconds(model, cluster, sharding, attention, shape),
    )


def _attention(work: Workload, cluster: Cluster, sharding: WeightSharding, shape: Shape | None) -> Plan:
    """Return the fastest attention of the ranks that divide the keys, also where the planned length does not fit."""
    heads = shape.heads if shape is not None else 1 if _on_one_axis(sharding) else None
    if not sharding.is_joint:  # each competes for its host's links with the ranks of its `tp`
        if work.latent is None:  # with latents each rank computes all heads
            work = _with_heads(work, work.q_heads // sharding.tp, max(1, work.kv_heads // sharding.tp))
        ranks_per_host = min(sharding.tp, cluster.ranks)
        hosts = cluster.hosts if sharding.tp <= cluster.ranks else cluster.world // sharding.tp
        inside, between = (
            replace(link, host_rate=link.host_rate / ranks_per_host) for link in (cluster.inside, cluster.between)
        )
        cluster = replace(cluster.sized(hosts, cluster.ranks // ranks_per_host), inside=inside, between=between)
    roomy = replace(cluster, device=replace(cluster.device, memory=UNLIMITED_MEMORY), memories=())
    return next(candidate for candidate in plan(work, roomy) if heads in (None, candidate.shape.heads))


def _on_one_axis(sharding: WeightSharding) -> bool:
    """Return whether all ranks are along one axis of attention."""
    return sharding.is_joint or sharding.layers_shared


def _held_weight_bytes(model: ModelSizes, cluster: Cluster, sharding: WeightSharding) -> int:
    """Return the bytes of weights that a rank holds. Ranks of CPUs that load whole weights map the same pages."""
    maps = cluster.on_cpus and sharding.tp == 1
    return ceil(model.rank_weight_bytes(sharding.tp, sharding.is_joint) / (cluster.ranks if maps else 1))


def _key_bytes_and_tokens(model: ModelSizes, memory: float, attention: Plan) -> tuple[float, int]:
    """Return the bytes of keys on a rank, and the most tokens of each sequence that fit in what weights leave."""
    work, ranks = attention.workload, attention.shape.ranks
    key_bytes = (work.kept_bytes + work.index_bytes) / ranks
    free = memory - model.window_bytes / ranks - work.state_bytes
    return key_bytes, max(0, int(free * work.kept / key_bytes))


def _layers_cost(model: ModelSizes, cluster: Cluster, sharding: WeightSharding, layer_ranks: int) -> tuple[Cost, float]:
    """Return the cost of the layers of a step beside attention, and the bytes of weights that a rank reads.

    `layer_ranks` compute each layer together.
    """
    total = Cost()
    tokens = model.step_tokens
    itemsize = model.workload.itemsize
    read_bytes = used_bytes = float(model.rank_weight_bytes(sharding.tp, sharding.is_joint))
    share = read_bytes / model.rank_weight_bytes(1, False)  # a rank's part of the experts, too
    if layer_ranks > 1 and model.shared is not None:
        read_bytes = used_bytes = read_bytes - model.shared.weight_bytes * (layer_ranks - 1) / layer_ranks
        add_outputs(model.shared, layer_ranks, tokens, cluster, total)
    if (experts := model.experts) is not None:
        ranks = layer_ranks if experts.shareable_layers else 1
        read_bytes -= (experts.weight_bytes - experts.read_bytes(tokens, ranks)) * share
        used_bytes -= (experts.weight_bytes - experts.token_bytes / ranks) * share
        if ranks > 1:
            add_results(experts, ranks, tokens * experts.per_token * model.hidden_size * itemsize, cluster, total)
    add_weights(read_bytes, used_bytes, tokens, itemsize, cluster, total)
    add_small_calls(model.layers, cluster, total)
    if sharding.tp > 1:
        reduced = tokens * model.hidden_size * itemsize
        group = _group(sharding, cluster)
        total.add_stage("all-reduces", ALL_REDUCES * model.layers * all_reduce_seconds(group, reduced, cluster))
    return total, read_bytes


def _group(sharding: WeightSharding, cluster: Cluster) -> MergeGroup:
    """Return the ranks that split the weights."""
    return MergeGroup(sharding.tp, min(sharding.tp, cluster.ranks))


def _shape_of_prompts(attention: Plan, sharding: WeightSharding) -> Shape:
    """Return the shape in which a prompt sends least, of those with a step's heads axis."""
    work, step = attention.workload, attention.shape
    if sharding.is_joint:
        return step
    kv_heads = work.travelling_heads
    token_ranks = step.queries * step.keys
    shapes = [Shape(step.heads, queries, token_ranks // queries) for queries in divisors(token_ranks)]
    if _on_one_axis(sharding):
        shapes = [shape for shape in shapes if max(shape) == token_ranks]
    if work.selected is not None:
        shapes = [shape for shape in shapes if shape.keys == 1]
    return min(shapes, key=lambda shape: sum(elements(shape, work.q_heads, kv_heads, training=False)))


def _first_token_seconds(
    model: ModelSizes, cluster: Cluster, sharding: WeightSharding, step: Plan, shape: Shape
) -> float | None:
    """Return the seconds of a prompt: products with weights at attention's rate, attention, and all-reduces."""
    if model.active_parameters is None or step.workload.selected is not None:
        return None
    work = replace(step.workload, phase="prefill", q_len=None, storage=None)
    tokens = work.batch * work.length
    world = cluster.world
    candidates = [candidate for candidate in all_candidates(work, step.cluster) if candidate.shape == shape]
    seconds = min(cost(candidate, work, step.cluster).seconds for candidate in candidates)
    seconds += FLOPS * model.active_parameters * tokens / world / cluster.device.forward_rate
    if sharding.tp > 1:
        group = _group(sharding, cluster)
        links = (cluster.inside.rate, cluster.between.host_rate)  # a long message leaves by all cards of a host
        rate = links[0] if group.ranks <= cluster.ranks else links[1] if group.ranks_per_host == 1 else min(links)
        transfer = 2 * (group.ranks - 1) / world * tokens * model.hidden_size * work.itemsize / rate
        seconds += ALL_REDUCES * model.layers * (transfer + all_reduce_seconds(group, 0, cluster))
    return seconds


def _with_heads(work: Workload, q_heads: int, kv_heads: int) -> Workload:
    selected = work.selected
    if selected is not None:
        selected = replace(selected, heads=min(selected.heads, kv_heads))
    return replace(work, q_heads=q_heads, kv_heads=kv_heads, selected=selected)
