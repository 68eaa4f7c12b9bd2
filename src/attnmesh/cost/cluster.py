"""Hosts, their ranks, and the links between them: from a preset, by hand, or measured.

A preset holds measured rates, not those of a data sheet, and names the source of each.
"""

from dataclasses import KW_ONLY, asdict, dataclass, replace

import torch
from torch.distributed.device_mesh import DeviceMesh

from attnmesh.cost.rates import BOUNDLESS, NO_LINK, Device, Link
from attnmesh.errors import ClusterError, check_choice, checked_count
from attnmesh.mesh.shares import recommended_shares
from attnmesh.runtime.late_bound import LateBound


@dataclass(frozen=True)
class Cluster:
    """Equal hosts, each with the same number of ranks.

    Args:
        name: The name in tables and explanations, on one line.
        hosts: Hosts.
        ranks: Ranks of each host. `world` is the number of all ranks, and so is `ranks` of a `Shape`.
        device: The device of each rank.
        inside: The links between ranks of a host.
        between: The links between hosts.
        short_collectives: How the backend all-reduces a short message: "tree" (NCCL) or "ring" (gloo).
        sources: Pairs of a constant's name and its source.
        rates: Bytes/s that each rank reads, if ranks are unequal; `device` is then that of the slowest.
        memories: Free bytes of each rank, if ranks are unequal.

    Raises:
        ClusterError: A field is of a wrong type, a count is below 1, or links are missing.

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
    short_collectives: str = "tree"
    sources: tuple[tuple[str, str], ...] = ()
    rates: tuple[float, ...] = ()
    memories: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        pairs = isinstance(self.sources, tuple) and all(isinstance(x, tuple) and len(x) == 2 for x in self.sources)
        words = (self.name, *(word for pair in self.sources for word in pair)) if pairs else ()
        if not (pairs and all(isinstance(word, str) and word.isprintable() for word in words)):
            expected = "a name, and pairs of a constant and its source, each on one line"
            raise ClusterError("Cluster", expected, f"{words or self.sources!r:.60}", "pass printable strings")
        for name in ("hosts", "ranks"):
            fix = "pass a positive integer: a single machine is 1 host"
            count = checked_count(f"Cluster {name}", getattr(self, name), fix, error=ClusterError)
            object.__setattr__(self, name, count)
        for name, kind in (("device", Device), ("inside", Link), ("between", Link)):
            part = getattr(self, name)
            if not isinstance(part, kind):
                expected, given = f"a {kind.__name__}", type(part).__name__
                raise ClusterError(f"Cluster {name}", expected, given, f"pass {expected}, as Cluster.preset does")
        for count, link, where in ((self.hosts, self.between, "between hosts"), (self.ranks, self.inside, "in a host")):
            if count > 1 and link == NO_LINK:
                expected = f"links {where} for {count} of them"
                fix = "pass a Link with their rates, or keep the counts that were measured"
                raise ClusterError(f"Cluster {self.name}", expected, "none", fix)
        if self.short_collectives not in ("tree", "ring"):
            given, fix = repr(self.short_collectives), 'pass "ring" for gloo, "tree" for NCCL'
            raise ClusterError("Cluster short_collectives", "tree or ring", given, fix)
        for name in ("rates", "memories"):
            numbers = getattr(self, name)
            numbers = tuple(numbers) if isinstance(numbers, (tuple, list)) else (0,)
            object.__setattr__(self, name, numbers)
            if numbers and not (len(numbers) == self.world and all(map(_is_positive, numbers))):
                expected = f"a positive number of each of {self.world} ranks, or none"
                raise ClusterError(f"Cluster {name}", expected, f"{numbers!r:.60}", "measure with attnmesh probe")

    def shares(self, needed: float = 0.0) -> tuple[int, ...]:
        """Return the ratios of tokens with which ranks of these rates are done at once; equal ones for equal ranks.

        Args:
            needed: Bytes of keys and values on all ranks. What a rank has no memory for goes to the others.

        >>> from dataclasses import replace
        >>> replace(Cluster.preset("local", ranks=2), rates=(4e9, 1e9)).shares()
        (4, 1)
        """
        if not self.rates:
            return (1,) * self.world
        return recommended_shares(self.rates, self.memories, needed)

    @property
    def world(self) -> int:
        """Number of all ranks."""
        return self.hosts * self.ranks

    @property
    def on_cpus(self) -> bool:
        """True if ranks compute on the CPUs of their hosts, whose cores and memory they share: gloo connects them."""
        return self.short_collectives == "ring"

    @property
    def title(self) -> str:
        """The name and the numbers of hosts and ranks.

        >>> Cluster.preset("a100x4", hosts=1).title
        'a100x4, 1 host of 4 ranks'
        """
        hosts, ranks = (f"{n} {word}{'s' * (n > 1)}" for n, word in ((self.hosts, "host"), (self.ranks, "rank")))
        return f"{self.name}, {hosts} of {ranks}"

    def sized(self, hosts: int, ranks: int) -> "Cluster":
        """Return a cluster of the same machines with other counts.

        Args:
            hosts: Hosts.
            ranks: Ranks per host.

        Raises:
            ClusterError: A count is below 1, or there are no links for it.

        >>> Cluster.preset("dgx-h100").sized(2, 4).world
        8
        """
        is_same = hosts == self.hosts and ranks == self.ranks  # rates of other counts would be of other ranks
        rates, memories = (self.rates, self.memories) if is_same else ((), ())
        return replace(self, hosts=hosts, ranks=ranks, rates=rates, memories=memories)

    @staticmethod
    def preset(name: str, hosts: int | None = None, ranks: int | None = None) -> "Cluster":
        """Return the cluster of a preset.

        A name alone is a whole cluster, not one machine. Its hosts and the ranks of each host are

            dgx-h100     16 hosts of 8        a100x4       16 hosts of 4
            dgx-h200     16 hosts of 8        mi300x        1 host of 8
            dgx-b200     16 hosts of 8        rtx4090       1 host of 2
            h100x1       64 hosts of 1        gb200-nvl72   1 host of 72
            local         1 host of 4

        Args:
            name: One of these names.
            hosts: Hosts, 1 for a single machine. The number of the table by default.
            ranks: Ranks per host. The number of the table by default.

        Raises:
            ClusterError: The preset is unknown, a count is below 1, or a host has fewer devices.

        >>> Cluster.preset("dgx-h100").title
        'dgx-h100, 16 hosts of 8 ranks'
        >>> Cluster.preset("a100x4", hosts=2).world
        8
        """
        fix = "pass one of these, describe yours as a Cluster, or measure it with attnmesh probe"
        check_choice("Cluster.preset", name, PRESETS, fix, ClusterError)
        preset = PRESETS[name]
        if name != "local" and isinstance(ranks, int) and ranks > preset.ranks:
            expected, given = f"at most {preset.ranks} ranks a host", f"{ranks} ranks a host"
            raise ClusterError(f"Cluster.preset {name}", expected, given, "take more hosts")
        return preset.sized(preset.hosts if hosts is None else hosts, preset.ranks if ranks is None else ranks)

    @staticmethod
    def measure(mesh: DeviceMesh | None, dtype: torch.dtype | None = None) -> "Cluster":
        """Return the measured cluster of a mesh. Collective: all ranks of the mesh call it at once, for some seconds.

        Args:
            mesh: The mesh, or None for this process alone.
            dtype: The dtype to measure attention in. float32 on a CPU and bfloat16 on a GPU by default.

        Raises:
            ClusterError: Hosts have different numbers of ranks.
            DtypeError: The dtype is not supported.

        >>> Cluster.measure(None).world
        1
        """
        return measured(mesh, dtype)

    def record(self) -> dict[str, object]:
        """Return the cluster as a JSON object."""
        return asdict(self) | {"sources": dict(self.sources)}

    @staticmethod
    def of_record(record: object) -> "Cluster":
        """Return the cluster of a JSON object that `record` returned."""
        fix = "write one with attnmesh probe --out"
        if not isinstance(record, dict):
            raise ClusterError("Cluster file", "a JSON object that probe wrote", type(record).__name__, fix)
        try:
            fields = dict(record)
            rates = {"device": Device(**fields.pop("device"))} | {
                k: Link(**fields.pop(k)) for k in ("inside", "between")
            }
            return Cluster(**fields | rates | {"sources": tuple(dict(fields.get("sources", {})).items())})
        except ClusterError:
            raise
        except (TypeError, KeyError, ValueError, AttributeError) as error:
            raise ClusterError("Cluster file", "the fields that probe writes", str(error), fix) from None


def _is_positive(number: object) -> bool:
    """Return whether a value is a number above 0."""
    return isinstance(number, int | float) and not isinstance(number, bool) and 0 < number < BOUNDLESS


measured = LateBound[[DeviceMesh | None, torch.dtype | None], Cluster]("attnmesh.setup")
"""Measures the ranks of a mesh, by messages between them. `setup.measure` binds it."""

NVLINK = "NCCL 2.28 src/graph/tuning.cc: base 8.4 us + ring step 3.4 us (Simple), 6.6 + 0.6 (LL) for short messages"
NET = "NCCL 2.28 src/graph/tuning.cc: base 8.4 us + ring step 14 us (Simple), 6.6 + 2.7 (LL) for short messages"
IB = "nccl-tests issues 267 and 290: 46 to 49 of 50 GB/s reached"
H100_CHARTS = "FlashAttention-3 (2407.08608), charts: 648 and 561 TFLOP/s; datasheet: 3.35 TB/s, 80 GB"
H100 = Device(648e12, 561e12, 3.35e12, 80e9, call=10e-6)
NVLINK_4 = Link(11.8e-6, 360e9, 2880e9, short=7.2e-6, step=0.6e-6, message=1e-6)
NDR = Link(22.4e-6, 48e9, 384e9, short=9.3e-6, step=2.7e-6, message=1e-6)
BLACKWELL = "Dao-AILab/flash-attention pull request 2280: 1,535 and 1,360 TFLOP/s"
NVLINK_5 = f"NCCL topo.h: 722 of 900 GB/s; {NVLINK}"


def _gpus(
    name: str, counts: tuple[int, int], device: Device, inside: Link, between: Link, /, **sources: str
) -> Cluster:
    sources["the rest"] = "assumed: 1 us per further message, 10 us to start a call"
    return Cluster(name, *counts, device, inside, between, sources=tuple(sources.items()))


CLUSTERS = (
    _gpus(
        "dgx-h100",
        (16, 8),
        H100,
        NVLINK_4,
        NDR,
        device=H100_CHARTS,
        inside=f"nccl-tests issue 326: 360 of 450 GB/s reached; {NVLINK}",
        between=f"{IB}; {NET}",
    ),
    _gpus(
        "dgx-h200",
        (16, 8),
        replace(H100, memory_rate=4.8e12, memory=141e9),
        NVLINK_4,
        NDR,
        device="rates of the H100, whose chip it has; NVIDIA's H200 datasheet: 4.8 TB/s, 141 GB",
        inside=f"as dgx-h100, 900 GB/s both ways in both datasheets; {NVLINK}",
        between=f"8 x 400 Gb/s a host (DGX H200 datasheet); {IB}; {NET}",
    ),
    _gpus(
        "dgx-b200",
        (16, 8),
        Device(1535e12, 1360e12, 8.0e12, 180e9, call=10e-6),
        Link(11.8e-6, 722e9, 5776e9, short=7.2e-6, step=0.6e-6, message=1e-6),
        NDR,
        device=f"{BLACKWELL}; NVIDIA's DGX B200 datasheet: 64 TB/s and 1,440 GB of 8 GPUs",
        inside=NVLINK_5,
        between=f"8 x 400 Gb/s a host (DGX B200 user guide); {IB}; {NET}",
    ),
    _gpus(
        "h100x1",
        (64, 1),
        H100,
        NO_LINK,
        Link(22.4e-6, 48e9, 48e9, short=11.6e-6, step=5e-6, message=1e-6),
        device=H100_CHARTS,
        between=f"{IB}; {NET}",
        short="NCCL's constants for one GPU per host: base 6.6 us + 5 us",
    ),
    _gpus(
        "a100x4",
        (16, 4),
        Device(225e12, 195e12, 2.039e12, 80e9, call=10e-6),
        Link(11.8e-6, 240e9, 960e9, short=7.2e-6, step=0.6e-6, message=1e-6),
        Link(22.4e-6, 23.5e9, 94e9, short=9.3e-6, step=2.7e-6, message=1e-6),
        device="FlashAttention-2 (2307.08691): 50 to 73% of 312 TFLOP/s, 225 forward; datasheet: 2.039 TB/s, 80 GB",
        inside=f"NCCL topo.h: 240 of 300 GB/s; {NVLINK}",
        between=f"4 x HDR200 per host, as on JUWELS Booster; NCCL: 23.5 of 25 GB/s; {NET}",
    ),
    _gpus(
        "mi300x",
        (1, 8),
        Device(570e12, 465e12, 5.3e12, 192e9, call=10e-6),
        Link(20.6e-6, 313e9, 2504e9, short=12.8e-6, step=0.8e-6, message=1e-6, peer_rate=48e9),
        NDR,
        device="ROCm/aiter op_tests/cpp/mha: 548 to 592 forward, 440 to 491 backward; datasheet: 5.3 TB/s, 192 GB",
        inside="AMD on xGMI: 48 GB/s to each peer, 313 in total; RCCL's tuning: base 17 us + 3.6 us, LL 12 + 0.8",
        between=f"8 x 400 Gb/s, as on other hosts; {IB}; {NET}",
    ),
    _gpus(
        "rtx4090",
        (1, 2),
        Device(150e12, 135e12, 1.008e12, 24e9, call=10e-6),
        Link(14.1e-6, 13e9, 26e9, short=7.6e-6, step=1e-6, message=1e-6),
        Link(22.4e-6, 1.1e9, 1.1e9, short=9.3e-6, step=2.7e-6, message=1e-6),
        device="datasheet: 165 TFLOP/s, 1.008 TB/s, 24 GB; 91% of it in attention, as on its successor",
        inside="through CPU memory, tinygrad/open-gpu-kernel-modules issue 6: 13 GB/s; NCCL: 8.4 + 5.7 us",
        between="assumed: 10 Gbit/s Ethernet",
    ),
    _gpus(
        "gb200-nvl72",
        (1, 72),
        Device(1535e12, 1360e12, 8.0e12, 186e9, call=10e-6),
        Link(11.8e-6, 722e9, 51984e9, short=7.2e-6, step=0.6e-6, message=1e-6),
        Link(22.4e-6, 48e9, 3456e9, short=9.3e-6, step=2.7e-6, message=1e-6),
        device=f"{BLACKWELL}; datasheet: 8 TB/s, 186 GB",
        inside=f"a rack counts as one host; {NVLINK_5}",
        between=f"one 400 Gb/s card per GPU; {IB}; {NET}",
    ),
    Cluster(
        "local",
        1,
        4,
        Device(1.0e11, 1.0e11, 1.27e10, 6e9, copy_rate=4.8e9, call=2.7e-5, run=1.3e-4),
        Link(7.7e-5, 1.1e9, 2.2e9, short=1e-5, step=1.15e-4, message=6e-6),
        Link(1e-4, 1.18e8, 1.18e8, step=1.3e-4, message=7e-6),
        short_collectives="ring",
        sources=(("all", "attnmesh probe on 2 cores of an Intel Xeon, 2 ranks; between hosts 1 Gbit/s Ethernet"),),
    ),
)

PRESETS = {cluster.name: cluster for cluster in CLUSTERS}
"""Presets by name. `attnmesh plan -v` prints the sources of the constants."""
