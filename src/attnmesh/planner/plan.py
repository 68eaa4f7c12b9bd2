"""Plans: every way that fits the memory, priced, fastest first, each with its reasons in plain words."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import product
from math import ceil, gcd
from typing import NamedTuple

from torch.distributed.device_mesh import DeviceMesh

from attnmesh.comm.merges import MERGES
from attnmesh.core.layout import Layout, Packed, Striped
from attnmesh.cost.candidate_mesh import CandidateMesh, Cost
from attnmesh.cost.cluster import Cluster
from attnmesh.cost.exchange_cost import balanced_layouts
from attnmesh.cost.traffic import divisors, tiles
from attnmesh.errors import ClusterError
from attnmesh.mesh.schedule import EXCHANGE_MODES
from attnmesh.mesh.shapes import Shape
from attnmesh.planner.rank_bytes import cache_layouts, cached_bytes, min_memory
from attnmesh.planner.recurrent_cost import RecurrentCost, recurrent_cost
from attnmesh.planner.units import bytes_text, seconds_text
from attnmesh.planner.workload import Workload
from attnmesh.planner.workload_cost import cost, index_cost
from attnmesh.setup.init_mesh import init_plan_mesh

MAX_PRICED_RANKS = 2048
"""Most ranks that `plan` takes. Pricing all ways takes half a minute there."""

CACHE_BLOCK = 16
"""Tokens of a cache block, as in `KVCache` by default."""


class Bytes(NamedTuple):
    """Bytes that all ranks send in all layers, inside hosts and between hosts."""

    inside: float = 0.0
    between: float = 0.0


@dataclass(frozen=True)
class Plan:
    """One way to run a workload on a cluster, with its predicted time, bytes and memory. `plan` makes them.

    `print(plan)` is one line. `explain` gives the reasons, `parts` the seconds of each stage.

    Args:
        shape: Ranks along heads, queries and keys.
        exchange: The `exchange` of `attention`, or the `merge` of `decode`.
        layout: The layout of the tokens.
        tile: The part of the mesh that one host holds.
        seconds: Predicted seconds.
        bytes: Bytes that all ranks send, `inside` hosts and `between` them.
        messages: Messages between hosts.
        memory: Bytes per rank.
        parts: Pairs of a stage and its seconds, which add up to `seconds`.
        workload: The workload that is planned for.
        cluster: The cluster that is planned for.
        runner_up: The plan that `explain` compares with: the fastest plan. The fastest plan itself is compared with
            the best plan of another shape, or of its own shape if there is no other.

    >>> import attnmesh as am
    >>> best = am.plan(am.Workload(8, 8, 128, 65536), am.Cluster.preset("a100x4", hosts=1))[0]
    >>> best.shape, best.name, best.known_as
    (Shape(heads=4, queries=1, keys=1), '4x1x1 pipelined', 'Ulysses')
    >>> print(best)  # doctest: +ELLIPSIS
    Plan(4x1x1 pipelined; Contiguous(); ... ms; 0 bytes between hosts and ...; ... per rank; a100x4, 1 host of 4 ranks)
    """

    shape: Shape
    exchange: str
    layout: Layout
    tile: Shape
    seconds: float
    bytes: Bytes
    messages: float
    memory: float
    parts: tuple[tuple[str, float], ...]
    workload: Workload
    cluster: Cluster
    runner_up: "Plan | None" = field(default=None, compare=False)

    def __repr__(self) -> str:
        memory = f"{bytes_text(self.memory)} per rank"
        figures = self.name, self.layout, seconds_text(self.seconds), self._sent(), memory, self.cluster.title
        return f"Plan({'; '.join(map(str, figures))})"

    @property
    def name(self) -> str:
        """The mesh shape, the exchange, and the tile per host where the mesh spans several hosts.

        >>> import attnmesh as am
        >>> am.plan(am.Workload(8, 1, 128, 4_000_000, phase="decode"), am.Cluster.preset("a100x4", hosts=2))[0].name
        '1x1x8 direct, 1x1x4 a host'
        """
        tile = f", {shape_text(self.tile)} a host" if 1 < self.cluster.ranks < self.shape.ranks else ""
        return f"{shape_text(self.shape)} {self.exchange}{tile}"

    @property
    def shares(self) -> tuple[int, ...] | None:
        """Ratios of the tokens of each rank, for `KVCache`; None for even shares.

        >>> from dataclasses import replace
        >>> import attnmesh as am
        >>> unequal = replace(am.Cluster.preset("local", ranks=2), rates=(4e9, 1e9))
        >>> am.plan(am.Workload(8, 8, 128, 65536, phase="decode"), unequal)[0].shares
        (4, 1)
        """
        block = self.layout.block if isinstance(self.layout, Striped) else 1
        return tuple(width // gcd(*block) for width in block) if isinstance(block, tuple) else None

    @property
    def known_as(self) -> str:
        """The published scheme of this shape and exchange.

        >>> import attnmesh as am
        >>> am.plan(am.Workload(8, 1, 128, 4_000_000, phase="decode"), am.Cluster.preset("a100x4"))[0].known_as
        'Helix, DCP'
        """
        heads, queries, keys = self.shape
        if self.exchange in MERGES:
            return MERGES[self.exchange].known_as + (" with split heads" if heads > 1 else "")
        if self.shape.ranks == 1:
            return "one device"
        if heads == self.shape.ranks:
            return "Ulysses"
        if heads > 1:
            return "USP" if keys == 1 else "heads x queries x keys"
        if keys == 1:
            return "Ring Attention" if self.exchange == "ring" else "KV all-gather"
        if queries == 1:
            return "query all-gather"
        return "ATTENTION2D" if queries == keys else "rectangular 2D"

    def init_mesh(self, device_type: str) -> DeviceMesh:
        """Return the `DeviceMesh` of this plan, with ranks of one host in one tile. All ranks call it at once.

        Args:
            device_type: "cuda" or "cpu".

        Returns:
            A mesh with axes "heads", "queries" and "keys".

        Raises:
            MeshError: The number of started ranks is not that of the plan.

        >>> import attnmesh as am
        >>> best = am.plan(am.Workload(8, 8, 64, 1024), am.Cluster.preset("local", hosts=1, ranks=1))[0]
        >>> best.init_mesh("cpu").shape  # doctest: +SKIP
        (1, 1, 1)
        """
        return init_plan_mesh(device_type, self.shape, self.tile)

    def explain(self) -> str:
        """Return, in plain words, what takes most of the time, and a comparison with the best plan of another shape.

        >>> import attnmesh as am
        >>> best = am.plan(am.Workload(8, 8, 128, 65536), am.Cluster.preset("a100x4", hosts=1))[0]
        >>> print(best.explain())  # doctest: +ELLIPSIS
        On a100x4, 1 host of 4 ranks:
        4x1x1 pipelined (Ulysses): ... ms, of which ...% computing attention. All ranks together send ...
        4x1x1 pipelined is ... times as fast as 2x...
        """
        lines = [f"On {self.cluster.title}:", self._summary()]
        if self.workload.recurrent:
            lines.append(self._recurrent_line())
        if self.workload.selected is not None:
            lines.append(self._selection_line())
        if self.runner_up is not None:
            lines += [self._comparison(self.runner_up), self.runner_up._summary()]
        return "\n".join(lines)

    @property
    def _candidate(self) -> CandidateMesh:
        return CandidateMesh(self.shape, self.tile, self.layout, self.exchange)

    @property
    def recurrent(self) -> RecurrentCost:
        """Predicted scans, halos and states of the recurrent layers, which the plan's figures include."""
        return recurrent_cost(self._candidate, self.workload, self.cluster)

    @property
    def selection(self) -> Cost:
        """Predicted cost of the indexers, which the plan's figures include."""
        return index_cost(self._candidate, self.workload, self.cluster)

    def _selection_line(self) -> str:
        price, layers = self.selection, self.workload.indexers
        messages = "candidates" if self.workload.phase == "decode" else "index keys"
        sent = f"{messages} send {bytes_text(price.inside + price.between)}, " if self.shape.ranks > 1 else ""
        keys = "index keys and selected indices take" if self.workload.phase != "decode" else "index keys take"
        return (
            f"Indexers ({layers}) take {seconds_text(price.seconds)}: {sent}{keys} {bytes_text(price.memory)} a rank."
        )

    def _recurrent_line(self) -> str:
        scan, halo, memory = self.recurrent
        layers = sum(kind.layers for kind in self.workload.recurrent_kinds)
        exchanges = {"scans": (scan, scan.inside + scan.between), "halos": (halo, halo.inside + halo.between)}
        sends = [
            f"{name} send {bytes_text(x)} in {seconds_text(price.seconds)}"
            for name, (price, x) in exchanges.items()
            if x
        ]
        clause = f"are included: {', '.join(sends)}" if sends else "send nothing"
        return f"Recurrent layers ({layers}) {clause}; each rank holds {bytes_text(memory)} of states."

    def _sent(self) -> str:
        return f"{bytes_text(self.bytes.between)} between hosts and {bytes_text(self.bytes.inside)} inside hosts"

    def _summary(self) -> str:
        stage, longest_seconds = max(self.parts, key=lambda part: part[1])
        share = longest_seconds / self.seconds if self.seconds else 0.0
        memory = f"{bytes_text(self.memory)} of its {bytes_text(self.cluster.device.memory)} of memory"
        return (
            f"{self.name} ({self.known_as}): {seconds_text(self.seconds)}, of which {share:.0%} {STAGES[stage]}. "
            f"All ranks together send {self._sent()}; each rank needs {memory}, weights not counted."
        )

    def _comparison(self, other: "Plan") -> str:
        """Return which plan is faster, and the stage that makes most of the difference."""
        ahead, behind = sorted((self, other), key=lambda plan: plan.seconds)
        names = [
            plan.name if ahead.name != behind.name else f"{plan.name} in {plan.layout}" for plan in (ahead, behind)
        ]
        if behind.seconds < 1.005 * ahead.seconds:
            return f"{names[0]} and {names[1]} take the same time, within half a percent."
        fast, slow = dict(ahead.parts), dict(behind.parts)
        differences = {name: slow.get(name, 0.0) - fast.get(name, 0.0) for name in {**fast, **slow}}
        stage = max(differences, key=lambda name: differences[name])
        times = [seconds_text(parts.get(stage, 0.0)) for parts in (fast, slow)]
        lines = [
            f"{names[0]} is {_times(behind.seconds, ahead.seconds)} as fast as {names[1]}, mainly because "
            f"{STAGES[stage]} takes {times[0]} instead of {times[1]}."
        ]
        between = [plan.bytes.between for plan in (ahead, behind)]
        if max(between) > 1.05 * min(between):
            lines.append(f"It sends {_times(*between)} as many bytes between hosts.")
        if (ahead.shape, ahead.exchange, ahead.layout) == (behind.shape, behind.exchange, behind.layout):
            lines.append("They differ only in which ranks share a host.")
        return " ".join(lines)


STAGES = {
    "agree": "comparing the calls of all ranks",
    "heads": "swapping tokens for heads",
    "gather": "gathering queries and keys",
    "kernel": "computing attention",
    "waiting": "waiting for transfers that the kernel does not hide",
    "give back": "returning results to their owners",
    "merge": "merging partials",
    "score": "scoring index keys",
    "candidates": "merging candidates for the selection",
    "index keys": "gathering index keys",
    "scan": "scanning the states of recurrent layers",
    "halo": "exchanging the halos of convolutions",
}
"""Descriptions of the stages in `Plan.parts`."""


def shape_text(shape: Shape) -> str:
    """Return a shape as text, such as "1x4x2"."""
    return "x".join(map(str, shape))


def _times(number: float, base: float) -> str:
    return f"{number / base:.2f} times" if base else "many times"


def plan(workload: Workload, cluster: Cluster, *, progress: Callable[[int, int], None] | None = None) -> list[Plan]:
    """Return all plans that fit the memory of the cluster's devices, fastest first.

    Every mesh shape, exchange, layout and placement on hosts is priced.

    Args:
        workload: The attention to run.
        cluster: The machines to run it on, 2,048 ranks at most.
        progress: Called with the number of priced ways and the number of all ways.

    Returns:
        At least one plan.

    Raises:
        ClusterError: An argument is of a wrong type, there are too many ranks, or nothing fits the memory.

    >>> import attnmesh as am
    >>> cluster = am.Cluster.preset("dgx-h100", hosts=16)
    >>> best = am.plan(am.Workload(32, 8, 128, 5_000_000, phase="decode"), cluster)[0]
    >>> best.shape, best.exchange
    (Shape(heads=8, queries=1, keys=16), 'direct')
    """
    if not (isinstance(workload, Workload) and isinstance(cluster, Cluster)):
        given = f"{type(workload).__name__} and {type(cluster).__name__}"
        fix = "call plan(Workload(...), Cluster.preset(...))"
        raise ClusterError("plan", "a Workload and a Cluster", given, fix)
    if cluster.world > MAX_PRICED_RANKS:
        expected, fix = f"a cluster of at most {MAX_PRICED_RANKS:,} ranks", "plan for a part of it, with Cluster.sized"
        raise ClusterError("plan", expected, f"{cluster.world:,}", fix)
    candidates = list(all_candidates(workload, cluster))
    plans = []
    for number, candidate in enumerate(candidates, 1):
        price = cost(candidate, workload, cluster)
        plans.append(
            Plan(
                shape=candidate.shape,
                exchange=candidate.exchange_or_merge,
                layout=candidate.layout,
                tile=candidate.tile,
                seconds=price.seconds,
                bytes=Bytes(price.inside, price.between),
                messages=price.messages,
                memory=price.memory,
                parts=tuple(price.parts.items()),
                workload=workload,
                cluster=cluster,
            )
        )
        if progress is not None:
            progress(number, len(candidates))
    fitting = [plan for plan in plans if _fits(plan)]
    if not fitting:
        raise _memory_error(min(plan.memory for plan in plans), workload, cluster)
    fastest, *slower = sorted(fitting, key=lambda plan: (plan.seconds, plan.bytes.between, plan.memory))
    runner_up = next((plan for plan in slower if plan.shape != fastest.shape), slower[0] if slower else None)
    return [replace(fastest, runner_up=runner_up), *(replace(other, runner_up=fastest) for other in slower)]


def all_candidates(workload: Workload, cluster: Cluster) -> Iterator[CandidateMesh]:
    """Yield every candidate once: mesh shapes, their tiles, layouts and exchanges. A cache divides its heads evenly.

    Queries that select their keys stay on their rank, and index keys have one head: then all ranks are along one axis.
    """
    world = cluster.world
    is_decode = workload.phase == "decode"
    selects = workload.selected is not None
    kv_heads = 1 if selects else workload.travelling_heads
    for heads in divisors(gcd(world, kv_heads) if is_decode else world):
        if heads > kv_heads:
            break
        for queries in divisors(world // heads):
            shape = Shape(heads, queries, world // heads // queries)
            if (is_decode and queries > 1) or (selects and not is_decode and shape.keys > 1):
                continue  # a decode step has few queries: all ranks beyond the heads axis hold keys
            layouts = layouts_for(workload, shape, cluster)
            choices = product(tiles(shape, cluster.ranks), layouts, _exchanges(workload, shape))
            yield from (CandidateMesh(shape, *choice) for choice in choices)


def layouts_for(workload: Workload, shape: Shape, cluster: Cluster) -> list[Layout]:
    """Return the layouts that are priced on a shape. A state passes through tokens in order.

    A cache may have unequal shares, if ranks are unequal and all of them are along the keys axis.
    """
    if workload.phase == "decode":
        shares = cluster.shares(workload.kept_bytes) if shape.keys == cluster.world else ()
        return [*cache_layouts(CACHE_BLOCK, shares)]
    layouts = balanced_layouts(workload.mask, shape)
    return [layout for layout in layouts if not (workload.recurrent and isinstance(layout, Packed))]


def _fits(plan: Plan) -> bool:
    """Return whether each rank has the memory that it needs."""
    cluster = plan.cluster
    fits = plan.memory <= plan.cluster.device.memory
    if plan.workload.phase != "decode" or not cluster.memories or plan.shape.keys < cluster.world:
        return fits
    rank_bytes = cached_bytes(plan._candidate, plan.workload)
    return all(needed <= free for needed, free in zip(rank_bytes, cluster.memories, strict=True))


def _exchanges(workload: Workload, shape: Shape) -> list[str]:
    """Return the exchanges that differ on this shape: one group is no pipeline, and one rank of queries no ring."""
    if workload.phase == "decode":
        return list(MERGES)[: 1 if shape.queries * shape.keys == 1 else None]
    exchanges = ["bulk"]
    if EXCHANGE_MODES["pipelined"].head_groups(shape, workload.travelling_heads) > 1 and shape.ranks > 1:
        exchanges.append("pipelined")
    return exchanges + ["ring"] * (shape.queries > 1)


def _memory_error(rank_bytes: float, workload: Workload, cluster: Cluster) -> ClusterError:
    """Return the error of `rank_bytes` that no rank has memory for, with the number of hosts that would do."""
    memory = cluster.device.memory
    over = f"{(rank_bytes - memory) / 1e9:,.1f} GB too many"
    given = f"{rank_bytes / 1e9:,.1f} GB without weights in the plan that needs least, {over}, on {cluster.world} ranks"
    free = memory - workload.state_bytes  # every rank holds all states
    hosts = ceil(min_memory(workload) / max(1.0, free) / cluster.ranks)
    too_many = hosts * cluster.ranks > MAX_PRICED_RANKS
    fix = "take fewer tokens" if too_many else f"take about {hosts:,} hosts, more for the weights, or fewer tokens"
    fix = "take fewer sequences or smaller states" if free < 0 else fix
    return ClusterError(f"plan for {workload.phase}", f"at most {memory / 1e9:,.1f} GB a rank", given, fix)
