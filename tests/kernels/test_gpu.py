"""On a GPU: a world of one NCCL rank, graphs that go on as a cache grows, and ranks that share its memory."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import attnmesh as am
from attnmesh.cli.launch import run_on_ranks
from attnmesh.comm.peer_memory import PeerMemory, agreed_peer_memory
from attnmesh.comm.topology import dist_all_gather_ints
from attnmesh.core.partial import Partial, merge_stack
from attnmesh.mesh.axes import Axis
from attnmesh.mesh_attention import merge_across as merge
from tests.support.caches.tiers import OneWay
from tests.support.ranks.pool import Pool, on_each_rank
from tests.support.truth import histories, mesh_problems
from tests.support.truth.seeds import in_turn
from tests.support.truth.tolerances import FLOAT32_SUMS, worst

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def nccl() -> Iterator[Pool]:
    """A world of one rank."""
    pool = Pool("nccl")
    yield pool
    pool.close()


@pytest.mark.parametrize("seed", range(60))
def test_random_problems_agree_with_float64(nccl: Pool, seed: int) -> None:
    problem = mesh_problems.draw(seed, 1)
    mesh_problems.check(problem, nccl.run(1, mesh_problems.run_problem, problem))


@pytest.mark.parametrize("seed", range(60))
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_random_histories_of_a_cache_agree_with_float64(
    nccl: Pool, tmp_path: Path, dtype: torch.dtype, seed: int
) -> None:
    histories.check(histories.draw(seed, (1,), (dtype,)), nccl, tmp_path)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("uploaded", [False, True])
def test_histories_in_two_memories_agree_with_float64(nccl: Pool, tmp_path: Path, uploaded: bool, seed: int) -> None:
    dtype = in_turn((torch.float32, torch.bfloat16, torch.float64), seed)
    history = histories.in_tiers(histories.draw(seed, (1,), (dtype,)), in_turn((1, 9, 16), seed))
    histories.check(history, OneWay(nccl, uploaded=uploaded), tmp_path)  # type: ignore[arg-type]


@on_each_rank
def gather_rows() -> list[list[int]]:
    return dist_all_gather_ints([3, 4], [Axis(1, 0, dist.group.WORLD)])


def test_nccl_gathers_ints(nccl: Pool) -> None:
    assert nccl.run(1, gather_rows) == [[[3, 4]]]


@pytest.mark.parametrize("mask", [am.Causal(), am.Window(40)])
@pytest.mark.parametrize("reproducible", [False, True])
def test_a_captured_step_serves_a_cache_that_grows(mask: am.Mask, reproducible: bool) -> None:
    """Append and decode once in a graph, which is then run again and again with other tokens."""
    eager, captured, warm = (cache_of(100) for _ in range(3))
    new = torch.randn(2, 2, 2, 1, 64, dtype=torch.bfloat16, device="cuda")
    q = torch.randn(2, 8, 1, 64, dtype=torch.bfloat16, device="cuda")

    def step(cache: am.KVCache) -> Tensor:
        cache.append(*new)
        return am.decode(q, cache, mask=mask, reproducible=reproducible, kernel="triton")

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step(warm)  # compiled before it is captured
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step(captured)
    for _ in range(250):
        new.copy_(torch.randn_like(new))
        q.copy_(torch.randn_like(q))
        graph.replay()
        assert torch.equal(out, step(eager))
    assert captured.length == eager.length == 350


def cache_of(tokens: int) -> am.KVCache:
    """Return a cache with the same tokens at each call."""
    sizes = {"batch": 2, "kv_heads": 2, "head_dim": 64, "capacity": 400, "dtype": torch.bfloat16, "device": "cuda"}
    cache = am.KVCache(None, **sizes)
    generator = torch.Generator("cuda").manual_seed(0)
    past = torch.randn(2, 2, 2, tokens, 64, device="cuda", generator=generator).bfloat16()
    cache.append(*past)
    return cache


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("padded", [False, True])
def test_a_step_waits_for_nothing(padded: bool) -> None:
    cache = cache_of(100)
    if padded:
        cache.append(
            *torch.randn(2, 2, 2, 3, 64, dtype=torch.bfloat16, device="cuda"), token_mask=torch.rand(2, 3) < 0.5
        )
    new = torch.randn(2, 2, 2, 1, 64, dtype=torch.bfloat16, device="cuda")
    q = torch.randn(2, 8, 1, 64, dtype=torch.bfloat16, device="cuda")
    am.decode(q, cache)
    cache.append(*new)
    try:
        torch.cuda.set_sync_debug_mode("error")
        cache.append(*new)
        out = am.decode(q, cache)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert out.isfinite().all()


# --- ranks that share a GPU ---


@on_each_rank
def measure_errors_of_shared_memory(ranks: int, steps: int) -> list[float]:
    """On one rank: the largest error of each step, of messages that all come by the shared memory.

    Ranks are spawned: CUDA does not start in a process that is forked from one that has asked it.
    """
    os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    torch.cuda.set_device(0)
    axis = Axis(ranks, dist.get_rank(), dist.group.WORLD)
    peers = agreed_peer_memory(axis, torch.device("cuda", 0))
    assert isinstance(peers, PeerMemory), "no symmetric memory"
    errors = []
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        shape = (1 + step % 3, 8, 1 + step % 2, 128)
        everyone = Partial(
            torch.randn(ranks, *shape, generator=generator), 30 * torch.randn(ranks, *shape[:-1], generator=generator)
        )
        mine = Partial(*(x[axis.index].cuda() for x in everyone))
        merged = merge.merge_across(mine, dist.group.WORLD, how="direct")
        expected = merge_stack(Partial(*(x.double() for x in everyone)))
        errors.append(float((merged.out.cpu().double() - expected.out).abs().max()))
    return errors


@pytest.mark.timeout(300)
@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_of_one_gpu_merge_in_one_launch(ranks: int) -> None:
    for errors in run_on_ranks(ranks, measure_errors_of_shared_memory, ranks, 50, seconds=240.0, spawned=True):
        assert worst(errors) < FLOAT32_SUMS
