"""The right shape before the run: every way that fits, priced, best first, each with its reasons in plain words."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from math import ceil

from torch.distributed.device_mesh import DeviceMesh

from attnmesh.core.layout import Contiguous, Layout, Striped, Zigzag
from attnmesh.core.mask import FAR
from attnmesh.errors import ClusterError
from attnmesh.mesh.schedule import EXCHANGES
from attnmesh.mesh.shapes import Shape
from attnmesh.planner.candidate import Bytes, Candidate, Cost
from attnmesh.planner.cluster import Cluster
from attnmesh.planner.cost import cost, min_memory
from attnmesh.planner.decode_cost import MERGES
from attnmesh.planner.traffic import tiles
from attnmesh.planner.workload import Workload

MAX_RANKS = 2048
"""Ranks that can be planned for: to price every way takes half a minute there."""

BLOCK = 16
"""Tokens of a cache's block, as `KVCache` deals them unless told otherwise."""


@dataclass(frozen=True)
class Plan:
    """One way to run a workload on a cluster, and what it will take.

    `shape` are the ranks along heads, queries and keys; `tile` is what of the mesh one host holds; `bytes` are those of
    all ranks over links inside hosts and between them, there in so many `messages`; `memory` is that of one rank.
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
    runner_up: "Plan | None" = field(default=None, repr=False, compare=False)

    @property
    def name(self) -> str:
        """As it is spoken of."""
        shape = "x".join(map(str, self.shape))
        placed_so = f", {'x'.join(map(str, self.tile))} a host" if 1 < self.cluster.ranks < self.shape.ranks else ""
        return f"{shape} {self.exchange}{placed_so}"

    @property
    def known_as(self) -> str:
        """The name that it goes by elsewhere."""
        return known_as(self.shape, self.exchange)

    def init_mesh(self, device_type: str) -> DeviceMesh:
        """The `DeviceMesh` of this plan: ranks of a host share a tile of it. All ranks ask at once."""
        from attnmesh.comm.init_mesh import init_plan_mesh  # ranks exchange messages here

        return init_plan_mesh(device_type, self.shape, self.tile)

    def explain(self) -> str:
        """What takes its time, and why it is faster or slower than the best other one, in plain words."""
        lines = [self._told()]
        if self.runner_up is not None:
            lines += [self._compared(self.runner_up), self.runner_up._told()]
        return "\n".join(lines)

    def _told(self) -> str:
        most, took = max(self.parts, key=lambda part: part[1])
        share = took / self.seconds if self.seconds else 0.0
        links = f"{in_bytes(self.bytes.between)} between hosts and {in_bytes(self.bytes.inside)} inside them"
        room = f"{in_bytes(self.memory)} of its {in_bytes(self.cluster.device.memory)}"
        return (
            f"{self.name} ({self.known_as}): {in_seconds(self.seconds)}, of which {share:.0%} {STAGES[most]}. "
            f"All ranks together send {links}; a rank holds {room}."
        )

    def _compared(self, other: "Plan") -> str:
        """The stage that makes most of the difference."""
        ahead, behind = sorted((self, other), key=lambda plan: plan.seconds)
        names = [one.name if ahead.name != behind.name else f"{one.name} in {one.layout}" for one in (ahead, behind)]
        if behind.seconds < 1.005 * ahead.seconds:
            return f"{names[0]} and {names[1]} take the same time, within half a percent."
        one, two = dict(ahead.parts), dict(behind.parts)
        differences = {name: two.get(name, 0.0) - one.get(name, 0.0) for name in {**one, **two}}
        stage = max(differences, key=lambda name: differences[name])
        spent = [in_seconds(parts.get(stage, 0.0)) for parts in (one, two)]
        lines = [
            f"{names[0]} is {_times(behind.seconds, ahead.seconds)} as fast as {names[1]}, mostly as it spends "
            f"{spent[0]} instead of {spent[1]} {STAGES[stage]}"
        ]
        if behind.bytes.between > 1.05 * ahead.bytes.between:
            lines.append(f"it sends {_times(ahead.bytes.between, behind.bytes.between)} as many bytes between hosts")
        elif ahead.bytes.between > 1.05 * behind.bytes.between:
            lines.append(
                f"although it sends {_times(ahead.bytes.between, behind.bytes.between)} as many bytes between hosts"
            )
        if ahead.tile != behind.tile and ahead.shape == behind.shape:
            lines.append("only which ranks share a host differs")
        return "; ".join(lines) + "."


STAGES = {
    "agree": "agreeing on the call",
    "heads": "swapping tokens for heads",
    "gather": "gathering queries and keys",
    "kernel": "computing attention",
    "waiting": "waiting for tokens that travel while it computes",
    "give back": "giving results back to their owners",
    "merge": "merging partials",
}
"""What a rank does in each part of a plan."""


def in_seconds(seconds: float) -> str:
    """A time as it is read: in s, ms or us."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 1e-6:.3g} us"


def in_bytes(count: float) -> str:
    """A count of bytes as it is read: in kB, MB, GB or TB."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count:.0f} bytes"


def _times(one: float, other: float) -> str:
    return f"{one / other:.2f} times" if other else "many times"


def plan(workload: Workload, cluster: Cluster, *, progress: Callable[[int, int], None] | None = None) -> list[Plan]:
    """Every way that fits the memory of the cluster's devices, best first.

    All shapes of heads x queries x keys, exchanges, layouts and placements are priced. `progress` hears how many of how
    many are done.

    >>> import attnmesh as am
    >>> cluster = am.Cluster.preset("dgx-h100", hosts=16)
    >>> best = am.plan(am.Workload(32, 8, 128, 5_000_000, phase="decode"), cluster)[0]
    >>> best.shape, best.exchange
    (Shape(heads=8, queries=1, keys=16), 'direct')
    """
    if not isinstance(workload, Workload) or not isinstance(cluster, Cluster):
        given = f"{type(workload).__name__} and {type(cluster).__name__}"
        raise ClusterError("plan", "a Workload and a Cluster", given, "as in plan(Workload(...), Cluster.preset(...))")
    if cluster.world > MAX_RANKS:
        raise ClusterError(
            "plan", f"a cluster of at most {MAX_RANKS:,} ranks", f"{cluster.world:,}", "plan for a part of it"
        )
    found = list(ways(workload, cluster))
    priced = []
    for number, way in enumerate(found):
        priced.append((way, cost(way, workload, cluster)))
        if progress is not None:
            progress(number + 1, len(found))
    _check_memory(priced, workload, cluster)
    fitting = [(way, spent) for way, spent in priced if spent.memory <= cluster.device.memory]
    fitting.sort(key=lambda pair: (pair[1].seconds, pair[1].between, pair[1].memory))
    plans = [_plan(way, spent, workload, cluster) for way, spent in fitting]
    best = replace(plans[0], runner_up=plans[1]) if len(plans) > 1 else plans[0]
    return [best, *(replace(other, runner_up=plans[0]) for other in plans[1:])]


def _plan(way: Candidate, spent: Cost, workload: Workload, cluster: Cluster) -> Plan:
    sent, parts = Bytes(spent.inside, spent.between), tuple(spent.parts.items())
    figures = spent.seconds, sent, spent.messages, spent.memory, parts
    return Plan(way.shape, way.exchange, way.layout, way.tile, *figures, workload, cluster)


def ways(workload: Workload, cluster: Cluster) -> Iterator[Candidate]:
    """All that can be run: heads divide, each host holds a tile, exchanges that are the same are there once."""
    world = cluster.world
    for heads in (n for n in range(1, world + 1) if world % n == 0 and workload.kv_heads % n == 0):
        for queries in (n for n in range(1, world // heads + 1) if world // heads % n == 0):
            shape = Shape(heads, queries, world // heads // queries)
            if workload.phase == "decode" and queries > 1:
                continue  # queries are few there: all ranks beyond the heads keep keys
            for tile in tiles(shape, cluster.ranks):
                for layout in _layouts(workload):
                    for exchange in _exchanges(workload, shape):
                        yield Candidate(shape, tile, layout, exchange)


def _layouts(workload: Workload) -> list[Layout]:
    """Balanced where the mask is not, in runs where it keeps tokens near each other."""
    if workload.phase == "decode":
        return [Striped(BLOCK)]
    uneven = workload.mask.left != workload.mask.right
    local = bool(workload.mask.ends) or workload.mask.left < FAR or workload.mask.right < FAR
    return [Zigzag()] * uneven + [Contiguous()] * (local or not uneven)


def _exchanges(workload: Workload, shape: Shape) -> list[str]:
    if workload.phase == "decode":
        return ["tree"] if shape.queries * shape.keys == 1 else list(MERGES)
    found = ["bulk"]
    if EXCHANGES["pipelined"].head_groups(shape, workload.kv_heads) > 1 and shape.queries * shape.keys > 1:
        found.append("pipelined")
    return found + ["ring"] * (shape.queries > 1)


def _check_memory(priced: list[tuple[Candidate, Cost]], workload: Workload, cluster: Cluster) -> None:
    least = min(spent.memory for _, spent in priced)
    if least > cluster.device.memory:
        expected = f"at most {cluster.device.memory / 1e9:,.1f} GB a rank"
        lacks = (least - cluster.device.memory) / 1e9
        given = f"{least / 1e9:,.1f} GB in the leanest way, {lacks:,.1f} GB too many, on {cluster.world} ranks"
        hosts = ceil(min_memory(workload) / cluster.device.memory / cluster.ranks)
        fix = (
            f"take about {hosts:,} hosts, or fewer tokens"
            if hosts * cluster.ranks <= MAX_RANKS
            else "take fewer tokens"
        )
        raise ClusterError(f"plan for {workload.phase}", expected, given, fix)


def known_as(shape: Shape, exchange: str) -> str:
    """The published scheme that a shape is."""
    heads, queries, keys = shape
    if exchange in MERGES:
        names = {"tree": "Tree Attention", "allreduce": "Tree Attention by all-reduces", "direct": "Helix, DCP"}
        return names.get(exchange, "gathered partials") + (" with split heads" if heads > 1 else "")
    if shape.ranks == 1:
        return "one device"
    if heads == shape.ranks:
        return "Ulysses"
    if heads > 1:
        return "USP" if keys == 1 else "heads x queries x keys"
    if keys == 1:
        return "Ring Attention" if exchange == "ring" else "KV all-gather"
    if queries == 1:
        return "query all-gather"
    return "ATTENTION2D" if queries == keys else "rectangular 2D"
