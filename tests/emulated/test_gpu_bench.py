"""The cases of `python -m benchmarks gpu-kernels` that need a GPU run on an emulated one: graphs, and two tiers."""

from collections.abc import Iterator, Mapping
from unittest.mock import patch

import pytest
import torch

from benchmarks import gpu_kernels
from benchmarks.timing import Call, Comparison, Timing
from tests.support.emulation.emulated_gpu import EmulatedGPU, EmulatedGraph, emulated_gpu

SIZES = gpu_kernels.Sizes(((1, 40), (2, 100)), heads=(4, 2), seconds=0.0, tiers=(100, 32), queries=(1, 3))


@pytest.fixture
def gpu() -> Iterator[EmulatedGPU]:
    with emulated_gpu() as gpu, torch.no_grad():
        yield gpu


@pytest.fixture
def graphs() -> Iterator[list[EmulatedGraph]]:
    """The graphs that are replayed, in place of a race by the clock of a GPU."""
    replayed = list[EmulatedGraph]()

    def race(calls: Mapping[str, Call], _: torch.device, seconds: float) -> dict[str, Timing]:
        for call in calls.values():
            call()
            replayed.append(call.__self__)  # type: ignore[attr-defined]
        return {name: Timing.of([1.0, 1.0]) for name in calls}

    with patch.object(gpu_kernels, "race", race), patch.object(gpu_kernels, "_rivals", lambda *_: {}):
        yield replayed


def test_steps_are_captured_beside_a_copy_of_what_they_read(gpu, graphs):
    device = torch.device("cuda", 0)
    rows = [row for batch, keys in SIZES.decoding for row in gpu_kernels._decoding(device, SIZES, batch, keys)]
    rows.append(gpu_kernels._overhead(device, SIZES))
    assert all(isinstance(row, Comparison) for row in rows)
    assert [graph.replays for graph in graphs] == [1] * 10  # for 100 keys also in 8 bits


def test_older_keys_of_two_tiers_go_each_way(gpu):
    rows = [*gpu_kernels._tiers(torch.device("cuda", 0), SIZES)]
    rivals = {"copying the older keys", "all on the device", "older where they lie", "older brought"}
    assert {row.rival for row in rows} == rivals
    assert len(rows) == 8
