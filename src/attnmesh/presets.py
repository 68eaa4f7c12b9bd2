"""Machines by name: what is reached, where somebody has measured it, rather than what is printed on the box.

TFLOP/s of attention are for heads of 128, as FlashAttention counts them.
"""

from typing import NamedTuple

from attnmesh.hardware import NOWHERE, Device, Link


class Machines(NamedTuple):
    """Hosts of so many ranks, as they are usually had; what each constant is from."""

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
ASSUMED = "assumed: 1 us for each further message, 10 us to start a call"
H100 = Device(648e12, 561e12, 3.35e12, 80e9, call=10e-6)
H100_SOURCES = (
    ("device", "FlashAttention-3 (2407.08608), charts: 648 and 561 TFLOP/s; datasheet: 3.35 TB/s, 80 GB"),
    ("between", f"{IB}; {NET}"),
    ("the rest", ASSUMED),
)
NDR = Link(22.4e-6, 48e9, 384e9, short=9.3e-6, step=2.7e-6, message=1e-6)

PRESETS = {
    "dgx-h100": Machines(
        hosts=16,
        ranks=8,
        device=H100,
        inside=Link(11.8e-6, 360e9, 2880e9, short=7.2e-6, step=0.6e-6, message=1e-6),
        between=NDR,
        sources=(*H100_SOURCES, ("inside", f"nccl-tests issue 326: 360 of 450 GB/s reached; {NVLINK}")),
    ),
    "h100x1": Machines(
        hosts=64,
        ranks=1,
        device=H100,
        inside=NOWHERE,
        between=Link(22.4e-6, 48e9, 48e9, short=11.6e-6, step=5e-6, message=1e-6),
        sources=(*H100_SOURCES, ("short", "as NCCL reckons with one GPU a host: base 6.6 us + 5 us")),
    ),
    "a100x4": Machines(
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
    "mi300x": Machines(
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
    "rtx4090": Machines(
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
    "gb200-nvl72": Machines(
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
    "local": Machines(
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
