"""Hosts, what a rank's device does, and what the links inside a host and between hosts carry.

Rates are bytes a second each way. A link's `rate` is what one rank gets at the most, its `host_rate` what all ranks of
a host get together: eight ranks behind one card share it, eight ranks with a card each do not.
"""

import os
from dataclasses import KW_ONLY, dataclass, fields, replace
from math import inf

import torch
from torch.distributed.device_mesh import DeviceMesh

from attnmesh import probe
from attnmesh.errors import ClusterError
from attnmesh.mesh import AXES, flat_axis


@dataclass(frozen=True)
class Device:
    """One rank's device: flop/s that attention reaches, bytes/s and bytes of memory, seconds to start a call."""

    forward_rate: float
    backward_rate: float
    memory_rate: float
    memory: float
    _: KW_ONLY
    copy_rate: float | None = None  # bytes/s read and written, where copies go slower than attention reads
    call: float = 0.0
    alone: float = 1.0  # times faster than that a rank computes while others rest: of ranks that share cores

    def __post_init__(self) -> None:
        rates = "forward_rate", "backward_rate", "memory_rate", "memory", "alone"
        _check_positive("Device", self, rates, ("copy_rate",))
        _check_seconds("Device", self, ("call",))


@dataclass(frozen=True)
class Link:
    """One class of links: seconds before a message's first byte, and before that of a short one in a merge; rates."""

    latency: float
    rate: float
    host_rate: float
    _: KW_ONLY
    short: float | None = None
    step: float | None = None  # seconds of each further step of a collective, where its first costs more
    message: float = 0.0  # seconds that each further message takes which is sent at the same time
    peer_rate: float | None = None  # what goes to any one other rank, where that is less than what goes to all

    def __post_init__(self) -> None:
        _check_positive("Link", self, ("rate", "host_rate"), ("peer_rate",))
        _check_seconds("Link", self, ("latency", "message"), ("short", "step"))

    @property
    def merge_latency(self) -> float:
        """Seconds before the first byte of a short message in a merge."""
        return self.latency if self.short is None else self.short

    @property
    def collective_step(self) -> float:
        """Seconds of each further step of a collective."""
        return self.merge_latency if self.step is None else self.step


@dataclass(frozen=True)
class Cluster:
    """So many hosts of so many ranks each; `sources` says where each constant is from.

    >>> cluster = Cluster.preset("dgx-h100", hosts=16)
    >>> cluster.world, cluster.between.host_rate
    (128, 384000000000.0)
    """

    name: str
    hosts: int
    ranks: int
    device: Device
    inside: Link
    between: Link
    _: KW_ONLY
    short_collectives: str = "tree"  # how the library's all-reduce of a short message goes: by a tree, or round a ring
    sources: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        for name in ("hosts", "ranks"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                fix = "count them: a single machine is 1 host"
                raise ClusterError(f"Cluster {name}", "a whole number, 1 or more", repr(value), fix)
        for name, kind in (("device", Device), ("inside", Link), ("between", Link)):
            if not isinstance(getattr(self, name), kind):
                given, fix = type(getattr(self, name)).__name__, "as in Cluster.preset"
                raise ClusterError(f"Cluster {name}", f"a {kind.__name__}", given, fix)
        for count, link, where in ((self.hosts, self.between, "between hosts"), (self.ranks, self.inside, "in a host")):
            if count > 1 and link == NOWHERE:
                fix = "say what they do, or take as many as were measured"
                raise ClusterError(f"Cluster {self.name}", f"links {where} for {count} of them", "none", fix)
        if self.short_collectives not in ("tree", "ring"):
            given, fix = repr(self.short_collectives), "ring for gloo, tree for NCCL"
            raise ClusterError("Cluster short_collectives", "tree or ring", given, fix)

    @property
    def world(self) -> int:
        """All ranks."""
        return self.hosts * self.ranks

    def sized(self, hosts: int, ranks: int) -> "Cluster":
        """The same machines, another number of them."""
        return replace(self, hosts=hosts, ranks=ranks)

    @staticmethod
    def preset(name: str, hosts: int | None = None, ranks: int | None = None) -> "Cluster":
        """A cluster by name, with as many hosts, and ranks a host, as wanted."""
        found = PRESETS.get(name) if isinstance(name, str) else None
        if found is None:
            fix = "take one of these, describe yours as a Cluster, or measure it with attnmesh probe"
            raise ClusterError("Cluster.preset", f"one of {', '.join(PRESETS)}", repr(name), fix)
        most = found.ranks if name != "local" else None
        if most is not None and isinstance(ranks, int) and ranks > most:
            given, fix = f"{ranks} ranks a host", "take more hosts"
            raise ClusterError(f"Cluster.preset {name}", f"at most {most} ranks a host", given, fix)
        return found.sized(found.hosts if hosts is None else hosts, found.ranks if ranks is None else ranks)

    @staticmethod
    def measure(mesh: DeviceMesh | None, dtype: torch.dtype | None = None) -> "Cluster":
        """The cluster that the ranks of a mesh are on, by measurement: all its ranks ask at once, for some seconds."""
        axis = flat_axis(mesh, AXES)
        device = torch.device("cpu" if mesh is None else mesh.device_type)
        if device.type == "cuda":
            device = torch.device("cuda", torch.cuda.current_device())
        world = probe.World.of(axis, device)
        sizes = {len(host) for host in world.hosts}
        if len(sizes) > 1:
            given, fix = f"hosts of {sorted(sizes)}", "start as many ranks on each host"
            raise ClusterError("Cluster.measure", "as many ranks on each host", given, fix)
        dtype = dtype or (torch.float32 if device.type == "cpu" else torch.bfloat16)
        figures = probe.device_figures(world, dtype)
        inside, between = (_link(probe.line_figures(world, between=far)) for far in (False, True))
        chip = Device(
            figures.forward,
            figures.backward,
            figures.read,
            _memory(world),
            copy_rate=figures.copy,
            call=figures.call,
            alone=figures.alone,
        )
        ranks = sizes.pop()
        how = "ring" if device.type == "cpu" else "tree"
        source = (("all", f"measured on {world.axis.size} ranks in {dtype}, all at work, torch {torch.__version__}"),)
        name = f"measured {len(world.hosts)}x{ranks}"
        return Cluster(name, len(world.hosts), ranks, chip, inside, between, short_collectives=how, sources=source)

    def record(self) -> dict[str, object]:
        """As JSON holds it."""
        return {**_plain(self), "sources": dict(self.sources)}

    @staticmethod
    def of_record(record: object) -> "Cluster":
        """The cluster that `record` wrote."""
        if not isinstance(record, dict):
            fix = "write one with attnmesh probe --out"
            raise ClusterError("Cluster file", "a JSON object that probe wrote", type(record).__name__, fix)
        try:
            given = dict(record)
            parts = {"device": Device(**given.pop("device"))} | {k: Link(**given.pop(k)) for k in ("inside", "between")}
            return Cluster(**given | parts | {"sources": tuple(dict(given.get("sources", {})).items())})
        except (TypeError, KeyError, ValueError, AttributeError) as error:
            if isinstance(error, ClusterError):
                raise
            fix = "write one with attnmesh probe --out"
            raise ClusterError("Cluster file", "the fields that probe writes", str(error), fix) from None


def _plain(value: object) -> dict[str, object]:
    found = {field.name: getattr(value, field.name) for field in fields(value)}  # type: ignore[arg-type]
    return {name: _plain(x) if isinstance(x, Device | Link) else x for name, x in found.items()}


def _check_positive(subject: str, value: object, names: tuple[str, ...], optional: tuple[str, ...] = ()) -> None:
    for name in (*names, *optional):
        given = getattr(value, name)
        if not ((given is None and name in optional) or (_is_number(given) and given > 0)):
            fix = "say what the link or the device does; a link that is not there needs no ranks beyond it"
            raise ClusterError(f"{subject} {name}", "a rate or size above 0", repr(given), fix)


def _check_seconds(subject: str, value: object, names: tuple[str, ...], optional: tuple[str, ...] = ()) -> None:
    for name in (*names, *optional):
        given = getattr(value, name)
        if not ((given is None and name in optional) or (_is_number(given) and 0 <= given < inf)):
            raise ClusterError(f"{subject} {name}", "seconds, 0 or more", repr(given), "measure it, or leave it at 0")


def _is_number(given: object) -> bool:
    return isinstance(given, int | float) and not isinstance(given, bool)


NOWHERE = Link(0.0, 1e18, 1e18)
"""Links of a class that a world has none of."""


def _link(line: probe.Line | None) -> Link:
    if line is None:
        return NOWHERE
    return Link(line.latency, line.rank_rate, line.host_rate, short=line.short, step=line.latency, message=line.message)


def _memory(world: probe.World) -> float:
    """Bytes of memory a rank has: of the GPU, or its share of the machine's."""
    if world.device.type == "cuda":
        return float(torch.cuda.get_device_properties(world.device).total_memory)
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return float(pages) / max(map(len, world.hosts))


# What is reached, where somebody has measured it, rather than what is printed on the box. TFLOP/s of attention are for
# heads of 128, as FlashAttention counts them.

NVLINK = "NCCL 2.28 src/graph/tuning.cc: base 8.4 us + ring step 3.4 us (Simple), 6.6 + 0.6 (LL) for short messages"
NET = "NCCL 2.28 src/graph/tuning.cc: base 8.4 us + ring step 14 us (Simple), 6.6 + 2.7 (LL) for short messages"
IB = "nccl-tests issues 267 and 290: 46 to 49 of 50 GB/s reached"
ASSUMED = "assumed: 1 us for each further message, 10 us to start a call"
H100 = Device(648e12, 561e12, 3.35e12, 80e9, call=10e-6)
H100_SOURCES = (
    ("device", "FlashAttention-3 (2407.08608), charts: 648 and 561 TFLOP/s; datasheet: 3.35 TB/s, 80 GB"),
    ("between", f"{IB}; {NET}"),
    ("the rest", ASSUMED),
)
NDR = Link(22.4e-6, 48e9, 384e9, short=9.3e-6, step=2.7e-6, message=1e-6)

PRESETS = {
    "dgx-h100": Cluster(
        "dgx-h100",
        hosts=16,
        ranks=8,
        device=H100,
        inside=Link(11.8e-6, 360e9, 2880e9, short=7.2e-6, step=0.6e-6, message=1e-6),
        between=NDR,
        sources=(*H100_SOURCES, ("inside", f"nccl-tests issue 326: 360 of 450 GB/s reached; {NVLINK}")),
    ),
    "h100x1": Cluster(
        "h100x1",
        hosts=64,
        ranks=1,
        device=H100,
        inside=NOWHERE,
        between=Link(22.4e-6, 48e9, 48e9, short=11.6e-6, step=5e-6, message=1e-6),
        sources=(*H100_SOURCES, ("short", "as NCCL reckons with one GPU a host: base 6.6 us + 5 us")),
    ),
    "a100x4": Cluster(
        "a100x4",
        hosts=16,
        ranks=4,
        device=Device(225e12, 195e12, 2.039e12, 80e9, call=10e-6),
        inside=Link(11.8e-6, 240e9, 960e9, short=7.2e-6, step=0.6e-6, message=1e-6),
        between=Link(22.4e-6, 23.5e9, 94e9, short=9.3e-6, step=2.7e-6, message=1e-6),
        sources=(
            (
                "device",
                "FlashAttention-2 (2307.08691): 50 to 73% of 312 TFLOP/s, 225 forward; datasheet: 2.039 TB/s, 80 GB",
            ),
            ("inside", f"NCCL topo.h: 240 of 300 GB/s; {NVLINK}"),
            ("between", f"4 x HDR200 a host, as JUWELS Booster has them; NCCL: 23.5 of 25 GB/s; {NET}"),
            ("the rest", ASSUMED),
        ),
    ),
    "mi300x": Cluster(
        "mi300x",
        hosts=1,
        ranks=8,
        device=Device(570e12, 465e12, 5.3e12, 192e9, call=10e-6),
        inside=Link(20.6e-6, 313e9, 2504e9, short=12.8e-6, step=0.8e-6, message=1e-6, peer_rate=48e9),
        between=NDR,
        sources=(
            (
                "device",
                "ROCm/aiter op_tests/cpp/mha: 548 to 592 forward, 440 to 491 backward; datasheet: 5.3 TB/s, 192 GB",
            ),
            ("inside", "AMD on xGMI: 48 GB/s to any one, 313 in all; RCCL's tuning: base 17 us + 3.6 us, LL 12 + 0.8"),
            ("between", f"8 x 400 Gb/s, as in other hosts; {IB}; {NET}"),
            ("the rest", ASSUMED),
        ),
    ),
    "rtx4090": Cluster(
        "rtx4090",
        hosts=1,
        ranks=2,
        device=Device(150e12, 135e12, 1.008e12, 24e9, call=10e-6),
        inside=Link(14.1e-6, 13e9, 26e9, short=7.6e-6, step=1e-6, message=1e-6),
        between=Link(22.4e-6, 1.1e9, 1.1e9, short=9.3e-6, step=2.7e-6, message=1e-6),
        sources=(
            ("device", "datasheet: 165 TFLOP/s, 1.008 TB/s, 24 GB; attention's share of it as on its successor, 91%"),
            (
                "inside",
                "through the host's memory, tinygrad/open-gpu-kernel-modules issue 6: 13 GB/s; NCCL: 8.4 + 5.7 us",
            ),
            ("between", "assumed: 10 Gbit/s Ethernet"),
            ("the rest", ASSUMED),
        ),
    ),
    "gb200-nvl72": Cluster(
        "gb200-nvl72",
        hosts=1,
        ranks=72,
        device=Device(1535e12, 1360e12, 8.0e12, 186e9, call=10e-6),
        inside=Link(11.8e-6, 722e9, 51984e9, short=7.2e-6, step=0.6e-6, message=1e-6),
        between=Link(22.4e-6, 48e9, 3456e9, short=9.3e-6, step=2.7e-6, message=1e-6),
        sources=(
            (
                "device",
                "Dao-AILab/flash-attention pull request 2280: 1,535 and 1,360 TFLOP/s; datasheet: 8 TB/s, 186 GB",
            ),
            ("inside", f"a rack is a host here; NCCL topo.h: 722 of 900 GB/s; {NVLINK}"),
            ("between", f"a 400 Gb/s card a GPU; {IB}; {NET}"),
            ("the rest", ASSUMED),
        ),
    ),
    "local": Cluster(
        "local",
        hosts=1,
        ranks=4,
        device=Device(2.7e10, 3.0e10, 8e9, 6e9, copy_rate=4e9, call=4e-4),
        inside=Link(5e-4, 5e8, 2e9, short=1e-4, step=5e-4, message=1.5e-4),
        between=Link(5e-4, 1.18e8, 1.18e8, message=4e-4),
        short_collectives="ring",
        sources=(("all", "attnmesh probe on 2 cores of an AMD EPYC, 4 ranks; between hosts 1 Gbit/s Ethernet"),),
    ),
}
"""Clusters by name. `attnmesh plan -v` prints where their constants are from."""
