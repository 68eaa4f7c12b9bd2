"""Predicted seconds and memory of exchanges; memory beside the tensors that live during a backward pass."""

import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import attnmesh as am
from attnmesh.cost.candidate_mesh import CandidateMesh
from attnmesh.cost.exchange_cost import LayerWork, attention_seconds, fastest_candidate, peak_activations
from attnmesh.mesh.schedule import EXCHANGE_MODES
from attnmesh.mesh.shapes import AXES, Shape
from attnmesh.planner.workload_cost import cost
from tests.support.process.live_tensors import LiveTensors
from tests.support.ranks.pool import Pool, on_each_rank
from tests.support.truth.mesh_problems import named_mesh
from tests.support.truth.problems import numbers

pytestmark = pytest.mark.quick

TOKENS, WIDTH = 32, 64
SHAPES = [Shape(1, r, c) for r in (1, 2, 3, 6) for c in (1, 2, 3, 6) if r * c == 6]


def measured_peak(shape: Shape, exchange: str, kv_heads: int) -> float:
    """Return the peak in elements per token of a shard and per column of a head, as `peak_activations` does."""
    module = sys.modules["attnmesh.mesh_attention.mesh_runs"]
    tensors, backward = LiveTensors(), module.backward

    def watched(*arguments: object) -> object:
        with tensors:
            return backward(*arguments)

    layout, length = am.Contiguous(), TOKENS * shape.ranks
    options: dict[str, Any] = {"mesh": named_mesh(shape, AXES), "layout": layout, "length": length}
    q, k, v = (
        numbers(1, heads, TOKENS, WIDTH, seed=dist.get_rank()).requires_grad_() for heads in (8, kv_heads, kv_heads)
    )
    module.backward = watched
    try:
        out = am.attention(q, k, v, mask=am.Full(), exchange=exchange, **options)
        torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
    finally:
        module.backward = backward
    return tensors.most / 4 / TOKENS / WIDTH


@on_each_rank
def measure_all_peaks(kv_heads: int) -> list[float]:
    return [measured_peak(shape, exchange, kv_heads) for exchange in EXCHANGE_MODES for shape in SHAPES]


@pytest.mark.parametrize("kv_heads", [8, 2])
def test_predicted_memory_is_the_measured_peak(pool: Pool, kv_heads: int) -> None:
    """The formula leaves out lse and delta, one column of 64 each, and counts all that a rank may hold at once."""
    predicted = [peak_activations(shape, 8, kv_heads, mode) for mode in EXCHANGE_MODES.values() for shape in SHAPES]
    for peak, expected in zip(pool.run(6, measure_all_peaks, kv_heads)[0], predicted, strict=True):
        assert peak == pytest.approx(expected, rel=0.15)


@pytest.mark.parametrize("heads", [(8, 8), (32, 8), (32, 32)])
def test_pipelined_holds_about_what_a_ring_does(heads: tuple[int, int]) -> None:
    for ranks in (2, 3, 4, 6, 8, 16):
        pipelined, ring = (
            peak_activations(Shape(1, ranks, 1), *heads, EXCHANGE_MODES[name]) for name in ("pipelined", "ring")
        )
        assert pipelined <= 1.3 * ring


def test_each_group_of_heads_pays_for_each_further_run() -> None:
    shape, device = Shape(1, 2, 1), replace(am.Cluster.preset("local").device, run=7.0)
    cluster = replace(am.Cluster.preset("local", ranks=2), device=device)
    work = LayerWork(8, 4, 64, 64, length=2048, itemsize=4, mask=am.Causal(), backward=False)
    seconds = {
        (block, name): attention_seconds(CandidateMesh(shape, shape, am.Striped(block), name), work, cluster)
        for block in (128, 256)
        for name in ("bulk", "pipelined")
    }
    further = [seconds[128, name] - seconds[256, name] for name in ("bulk", "pipelined")]
    # In all else blocks differ by little of the 7 s of a run.
    assert further == pytest.approx([4 * device.run, 4 * 4 * device.run], rel=1e-3)


@pytest.mark.parametrize(("batch", "by_memory"), [(1, False), (4096, True)])
def test_auto_takes_the_fastest_exchange_within_the_memory_share(batch: int, by_memory: bool) -> None:
    shape = Shape(1, 4, 1)
    workload = am.Workload(8, 8, 64, 4096, batch=batch, dtype="float32")
    cluster = am.Cluster.preset("local")
    candidates = [CandidateMesh(shape, shape, am.Zigzag(), name) for name in EXCHANGE_MODES]
    costs = {candidate: cost(candidate, workload, cluster) for candidate in candidates}
    first = min(costs, key=lambda candidate: costs[candidate].memory if by_memory else costs[candidate].seconds)
    assert fastest_candidate(candidates, workload.one_layer, cluster) == first
