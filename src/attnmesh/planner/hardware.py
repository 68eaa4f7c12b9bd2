"""Rates of devices and links, and presets of machines.

A preset holds measured rates, not those of a data sheet, and names the source of each.
"""

from dataclasses import KW_ONLY, dataclass
from typing import NamedTuple

from attnmesh.errors import ClusterError

BOUNDLESS, DAY = 1e30, 86_400
"""The highest rate or size, and the longest time in seconds, that a device or a link takes."""


@dataclass(frozen=True)
class Device:
    """Device of one rank.

    Args:
        forward_rate: Flop/s of attention's forward pass.
        backward_rate: Flop/s of attention's backward pass.
        memory_rate: Bytes/s that attention reads.
        memory: Bytes of memory.
        copy_rate: Bytes/s that copies read and write. `memory_rate` by default.
        call: Seconds to start a kernel.
        alone: Speed of a rank while the other ranks rest, over its speed while all compute. 1 without shared cores.
    """

    forward_rate: float
    backward_rate: float
    memory_rate: float
    memory: float
    _: KW_ONLY
    copy_rate: float | None = None
    call: float = 0.0
    alone: float = 1.0

    def __post_init__(self) -> None:
        rates = "forward_rate", "backward_rate", "memory_rate", "memory", "alone"
        _check_rates("Device", self, rates, ("copy_rate",))
        _check_seconds("Device", self, ("call",))


@dataclass(frozen=True)
class Link:
    """One class of links: those inside a host, or those between hosts.

    Args:
        latency: Seconds before the first byte of a message.
        rate: Bytes/s of one rank.
        host_rate: Bytes/s of all ranks of a host together.
        short: Seconds before the first byte of a short message in a merge. `latency` by default.
        step: Seconds of each further step of a collective. `short` by default.
        message: Seconds of each further message that is sent at the same time.
        peer_rate: Bytes/s from one rank to one other. `rate` by default.
    """

    latency: float
    rate: float
    host_rate: float
    _: KW_ONLY
    short: float | None = None
    step: float | None = None
    message: float = 0.0
    peer_rate: float | None = None

    def __post_init__(self) -> None:
        _check_rates("Link", self, ("rate", "host_rate"), ("peer_rate",))
        _check_seconds("Link", self, ("latency", "message"), ("short", "step"))

    @property
    def merge_latency(self) -> float:
        """Seconds before the first byte of a short message in a merge."""
        return self.latency if self.short is None else self.short

    @property
    def collective_step(self) -> float:
        """Seconds of each further step of a collective."""
        return self.merge_latency if self.step is None else self.step


def _check_rates(subject: str, value: object, names: tuple[str, ...], optional: tuple[str, ...] = ()) -> None:
    for name in (*names, *optional):
        given = getattr(value, name)
        if not ((given is None and name in optional) or (_is_number(given) and 1 <= given <= BOUNDLESS)):
            expected, fix = f"a rate or size of 1 to {BOUNDLESS:.0e}", "measure it with attnmesh probe"
            raise ClusterError(f"{subject} {name}", expected, f"{given!r:.40}", fix)


def _check_seconds(subject: str, value: object, names: tuple[str, ...], optional: tuple[str, ...] = ()) -> None:
    for name in (*names, *optional):
        given = getattr(value, name)
        if not ((given is None and name in optional) or (_is_number(given) and 0 <= given <= DAY)):
            expected, fix = f"seconds, 0 to {DAY:,}", "measure it with attnmesh probe, or leave it at 0"
            raise ClusterError(f"{subject} {name}", expected, f"{given!r:.40}", fix)


def _is_number(given: object) -> bool:
    return isinstance(given, int | float) and not isinstance(given, bool)


NO_LINK = Link(0.0, 1e18, 1e18)
"""The links between hosts of a single host, and the links inside hosts of one rank each."""


class Preset(NamedTuple):
    """A machine: its usual numbers of hosts and of ranks per host, its rates, and their sources."""

    hosts: int
    ranks: int
    device: Device
    inside: Link
    between: Link
    short_collectives: str = "tree"
    sources: tuple[tuple[str, str], ...] = ()


NVLINK = "NCCL 2.28 src/graph/tuning.cc: base 8.4 us + ring step 3.4 us (Simple), 6.6 + 0.6 (LL) for short messages"


NET = "NCCL 2.28 src/graph/tuning.cc: base 8.4 us + ring step 14 us (Simple), 6.6 + 2.7 (LL) for short messages"


IB = "nccl-tests issues 267 and 290: 46 to 49 of 50 GB/s reached"


ASSUMED = "assumed: 1 us per further message, 10 us to start a call"


H100 = Device(648e12, 561e12, 3.35e12, 80e9, call=10e-6)


H100_SOURCES = (
    ("device", "FlashAttention-3 (2407.08608), charts: 648 and 561 TFLOP/s; datasheet: 3.35 TB/s, 80 GB"),
    ("between", f"{IB}; {NET}"),
    ("the rest", ASSUMED),
)


NDR = Link(22.4e-6, 48e9, 384e9, short=9.3e-6, step=2.7e-6, message=1e-6)


PRESETS = {
    "dgx-h100": Preset(
        hosts=16,
        ranks=8,
        device=H100,
        inside=Link(11.8e-6, 360e9, 2880e9, short=7.2e-6, step=0.6e-6, message=1e-6),
        between=NDR,
        sources=(*H100_SOURCES, ("inside", f"nccl-tests issue 326: 360 of 450 GB/s reached; {NVLINK}")),
    ),
    "h100x1": Preset(
        hosts=64,
        ranks=1,
        device=H100,
        inside=NO_LINK,
        between=Link(22.4e-6, 48e9, 48e9, short=11.6e-6, step=5e-6, message=1e-6),
        sources=(*H100_SOURCES, ("short", "NCCL's constants for one GPU per host: base 6.6 us + 5 us")),
    ),
    "a100x4": Preset(
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
            ("between", f"4 x HDR200 per host, as on JUWELS Booster; NCCL: 23.5 of 25 GB/s; {NET}"),
            ("the rest", ASSUMED),
        ),
    ),
    "mi300x": Preset(
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
            (
                "inside",
                "AMD on xGMI: 48 GB/s to each peer, 313 in total; RCCL's tuning: base 17 us + 3.6 us, LL 12 + 0.8",
            ),
            ("between", f"8 x 400 Gb/s, as on other hosts; {IB}; {NET}"),
            ("the rest", ASSUMED),
        ),
    ),
    "rtx4090": Preset(
        hosts=1,
        ranks=2,
        device=Device(150e12, 135e12, 1.008e12, 24e9, call=10e-6),
        inside=Link(14.1e-6, 13e9, 26e9, short=7.6e-6, step=1e-6, message=1e-6),
        between=Link(22.4e-6, 1.1e9, 1.1e9, short=9.3e-6, step=2.7e-6, message=1e-6),
        sources=(
            ("device", "datasheet: 165 TFLOP/s, 1.008 TB/s, 24 GB; 91% of it in attention, as on its successor"),
            (
                "inside",
                "through the host's memory, tinygrad/open-gpu-kernel-modules issue 6: 13 GB/s; NCCL: 8.4 + 5.7 us",
            ),
            ("between", "assumed: 10 Gbit/s Ethernet"),
            ("the rest", ASSUMED),
        ),
    ),
    "gb200-nvl72": Preset(
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
            ("inside", f"a rack counts as one host; NCCL topo.h: 722 of 900 GB/s; {NVLINK}"),
            ("between", f"one 400 Gb/s card per GPU; {IB}; {NET}"),
            ("the rest", ASSUMED),
        ),
    ),
    "local": Preset(
        hosts=1,
        ranks=4,
        device=Device(2.7e10, 3.0e10, 8e9, 6e9, copy_rate=4e9, call=4e-4),
        inside=Link(5e-4, 5e8, 2e9, short=1e-4, step=5e-4, message=1.5e-4),
        between=Link(5e-4, 1.18e8, 1.18e8, message=4e-4),
        short_collectives="ring",
        sources=(("all", "attnmesh probe on 2 cores of an AMD EPYC, 4 ranks; between hosts 1 Gbit/s Ethernet"),),
    ),
}
"""Presets by name. `attnmesh plan -v` prints the sources of the constants."""
