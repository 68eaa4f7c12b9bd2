"""The best plan of each published scheme, and how these fare on other sizes of a cluster and at other lengths."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple

from attnmesh.core.mask import Causal, Full
from attnmesh.errors import ClusterError
from attnmesh.planner.cluster import Cluster
from attnmesh.planner.hardware import NOWHERE
from attnmesh.planner.plan import Plan, plan
from attnmesh.planner.workload import Workload


class Line(NamedTuple):
    """How a scheme's curve is drawn."""

    colour: str
    dashed: bool = False


MERGED = {
    "Tree Attention": "#3b7dd8",
    "Helix, DCP": "#e07b2a",
    "gathered partials": "#2e9e6b",
    "Tree Attention by all-reduces": "#c2408f",
}

SCHEMES = {
    "one device": Line("#8a8f98"),
    "Ring Attention": Line("#3b7dd8"),
    "KV all-gather": Line("#e07b2a"),
    "query all-gather": Line("#a8862a"),
    "Ulysses": Line("#2e9e6b"),
    "USP": Line("#c2408f"),
    "ATTENTION2D": Line("#d64545"),
    "rectangular 2D": Line("#8463d1"),
    "heads x queries x keys": Line("#1795a6"),
    **{name: Line(colour) for name, colour in MERGED.items()},
    **{f"{name} with split heads": Line(colour, dashed=True) for name, colour in MERGED.items()},
}
"""All names that `Plan.known_as` gives, in the order in which figures list them: training's, then decoding's."""

Schemes = Mapping[str, Plan]
"""The best plan of each scheme, by its name, the fastest first."""

WIDE = 128
"""Devices up to which curves go, at the least."""


def best_by_scheme(
    workload: Workload, cluster: Cluster, *, progress: Callable[[int, int], None] | None = None
) -> Schemes:
    """The best plan of each scheme, the fastest first: none at all where nothing fits the memory.

    >>> import attnmesh as am
    >>> cluster = am.Cluster.preset("h100x1", hosts=8)
    >>> best = best_by_scheme(am.Workload(32, 8, 128, 1_000_000, phase="decode"), cluster)["Tree Attention"]
    >>> best.name
    '1x1x8 tree'
    >>> best_by_scheme(am.Workload(32, 8, 128, 10**12), cluster)
    {}
    """
    try:
        plans = plan(workload, cluster, progress=progress)
    except ClusterError:  # workload and cluster are sound by themselves: it does not fit
        return {}
    return best_of(plans)


def best_of(plans: Iterable[Plan]) -> dict[str, Plan]:
    """Of plans, the fastest first, the first of each scheme."""
    best: dict[str, Plan] = {}
    for one in plans:
        best.setdefault(one.known_as, one)
    return best


def sizes(cluster: Cluster) -> list[tuple[int, int]]:
    """Hosts and ranks a host to draw curves over: ranks of one host doubling, then hosts, to the cluster's or further.

    >>> sizes(Cluster.preset("dgx-h100", hosts=12))
    [(1, 1), (1, 2), (1, 4), (1, 8), (2, 8), (4, 8), (8, 8), (12, 8), (16, 8)]
    """
    one = {(1, ranks) for ranks in doubling(cluster.ranks)}
    most = max(cluster.hosts, -(-WIDE // cluster.ranks)) if cluster.between != NOWHERE else 1
    more = {(hosts, cluster.ranks) for hosts in {*doubling(most), cluster.hosts}}
    return sorted(one | more)


def lengths(length: int) -> list[int]:
    """Lengths to draw curves over: powers of 4 from 8,192 to beyond the given one, and that one.

    >>> lengths(100_000)
    [8192, 32768, 100000, 131072]
    """
    found = [8192]
    while found[-1] < length:
        found.append(4 * found[-1])
    return sorted({*found, length})


def doubling(most: int) -> list[int]:
    """1, 2, 4, ... and the most.

    >>> doubling(12)
    [1, 2, 4, 8, 12]
    """
    return sorted({*(1 << n for n in range(most.bit_length())), most})


def over_sizes(workload: Workload, cluster: Cluster) -> Iterator[tuple[int, Schemes]]:
    """The schemes on so many devices."""
    for hosts, ranks in sizes(cluster):
        yield hosts * ranks, best_by_scheme(workload, cluster.sized(hosts, ranks))


def over_lengths(workload: Workload, cluster: Cluster) -> Iterator[tuple[int, Schemes]]:
    """The schemes at so many tokens."""
    for length in lengths(workload.length):
        yield length, best_by_scheme(replace(workload, length=length), cluster)


def curves(points: Iterable[tuple[int, Schemes]]) -> dict[str, list[tuple[int, float]]]:
    """Seconds by scheme, in the order of `SCHEMES`; points that do not fit the memory are left out."""
    found: dict[str, list[tuple[int, float]]] = {name: [] for name in SCHEMES}
    for at, schemes in points:
        for name, best in schemes.items():
            found[name].append((at, best.seconds))
    return {name: points for name, points in found.items() if points}


def told_cluster(cluster: Cluster) -> str:
    """A cluster in a title.

    >>> told_cluster(Cluster.preset("dgx-h100"))
    'dgx-h100, 16 hosts of 8'
    """
    return f"{cluster.name}, {cluster.hosts} host{'s' * (cluster.hosts > 1)} of {cluster.ranks}"


def told_workload(work: Workload) -> str:
    """A workload in a title.

    >>> told_workload(Workload(32, 8, 128, 5_000_000, phase="decode", batch=4))
    'decode, 5,000,000 tokens, 32/8 heads of 128, bfloat16, causal, batch of 4'
    """
    width = f"{work.head_dim}" if work.value_dim is None else f"{work.head_dim} and {work.value_dim}"
    mask = {Causal(): "causal", Full(): "no mask"}.get(work.mask, repr(work.mask))
    counts = {"batch of {}": work.batch, "{} layers": work.layers, "{} new tokens": work.q_len or 1}
    told = [words.format(count) for words, count in counts.items() if count > 1]
    heads = f"{work.q_heads}/{work.kv_heads} heads of {width}"
    return ", ".join((work.phase, f"{work.length:,} tokens", heads, str(work.dtype), mask, *told))
