"""What a CUDA graph of a step would meet: nothing that the CPU waits for, or an error that names it."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import attnmesh as am
from attnmesh.errors import DeviceError, InputError, KernelError
from attnmesh.mesh.shapes import AXES
from tests.support.emulation.emulated_gpu import EmulatedGPU
from tests.support.emulation.emulated_nccl import world
from tests.support.emulation.emulated_waits import filled_cache, random
from tests.support.ranks.pool import on_each_rank

CAPTURED = {
    "plain": {},
    "a window": {"mask": am.Window(5)},
    "chunks": {"mask": am.Causal() & am.Chunks(8)},
    "spans": {"mask": am.Spans([(3, 7)])},
    "a negative scale": {"scale": -0.5},
    "softcap": {"softcap": 3.0},
    "key_lengths": {"key_lengths": torch.tensor([7, 9])},
    "tree": {"merge": "tree"},
    "gather": {"merge": "gather"},
    "allreduce": {"merge": "allreduce"},
    "heads": {"output": "heads"},
    "reproducible": {"reproducible": True},
}


def waits_of_capture(gpu: EmulatedGPU, call: Callable[[], object]) -> list[str] | InputError:
    """Return what the CPU waits for in a capture, or the error of a refusal."""
    with gpu.capturing() as waits:
        try:
            call()
        except InputError as error:
            return error
    return [f"{wait.kind} {wait.operator} at {wait.place}" for wait in waits]


@on_each_rank
def capture_steps(gpu: EmulatedGPU, shape: tuple[int, int, int]) -> dict[str, Any]:
    """Return what a capture of an append and a step meets, by options of the step."""
    mesh = init_device_mesh("cuda", shape, mesh_dim_names=AXES)
    q, k, v = (random(seed, 2, heads, 1, 16) for seed, heads in ((3, 4), (4, 2), (5, 2)))
    found: dict[str, Any] = {}
    for name, options in CAPTURED.items():
        cache = filled_cache(mesh)
        given = {key: x.cuda() if isinstance(x, torch.Tensor) else x for key, x in options.items()}

        def step(cache: am.KVCache = cache, given: dict[str, Any] = given) -> None:
            cache.append(k, v)
            am.decode(q, cache, **given)

        step()
        found[name] = waits_of_capture(gpu, step)
    return found


@pytest.mark.parametrize("shape", [(1, 1, 2), pytest.param((2, 1, 2), marks=pytest.mark.long)])
def test_a_step_has_nothing_to_wait_for(shape: tuple[int, int, int]):
    for found in world(shape[0] * shape[2], capture_steps, shape).results():
        assert found == {name: [] for name in CAPTURED}, found


@on_each_rank
def catch_errors_in_capture(gpu: EmulatedGPU) -> dict[str, Any]:
    """Return what calls raise in a capture that read the device or copy from the CPU."""
    mesh = init_device_mesh("cuda", (1, 1, 2), mesh_dim_names=AXES)
    q, k, v = (random(seed, 2, heads, 1, 16) for seed, heads in ((3, 4), (4, 2), (5, 2)))
    cache, wide = filled_cache(mesh), filled_cache(mesh, torch.float64)
    real = torch.ones(2, 1, dtype=torch.bool).cuda()
    calls: dict[str, Callable[[], object]] = {
        "key_lengths": lambda: am.decode(q, cache, key_lengths=torch.tensor([7, 9])),
        "token_mask": lambda: cache.append(k, v, token_mask=real),
        "float64": lambda: am.decode(q.double(), wide),
        "reference": lambda: am.decode(q, cache, kernel="reference"),
        "capacity": lambda: cache.append(random(1, 2, 2, 500, 16), random(2, 2, 2, 500, 16)),
    }
    am.decode(q, cache)
    return {name: waits_of_capture(gpu, call) for name, call in calls.items()}


def test_what_reads_the_host_is_refused_by_name():
    for found in world(2, catch_errors_in_capture).results():
        assert isinstance(found["key_lengths"], DeviceError)
        assert str(found["key_lengths"]) == (
            "decode key_lengths: expected a tensor on the GPU in a CUDA graph, given one on the CPU. "
            "Fix: pass key_lengths.cuda(), made before the capture."
        )
        assert isinstance(found["token_mask"], KernelError)
        assert str(found["token_mask"]).startswith("append token_mask: expected None in a CUDA graph, given a tensor")
        for name in ("float64", "reference"):
            expected = "decode kernel: expected one that reads the cache's length on the GPU, in a CUDA graph, given"
            assert str(found[name]).startswith(expected)
        assert "room for the new tokens" in str(found["capacity"])


@on_each_rank
def catch_errors_of_known_steps(gpu: EmulatedGPU) -> dict[str, Any]:
    """Return what steps raise in a capture whose signatures were run before it."""
    mesh = init_device_mesh("cuda", (1, 1, 2), mesh_dim_names=AXES)
    q, several, window = random(3, 2, 4, 1, 16), random(4, 2, 4, 3, 16), am.Window(30)
    cache, wide, forgets = filled_cache(mesh), filled_cache(mesh, torch.float64), filled_cache(mesh, mask=window)
    steps: dict[str, Callable[[], object]] = {
        "float64": lambda: am.decode(q.double(), wide),
        "reference": lambda: am.decode(q, cache, kernel="reference"),
        "several queries of a window": lambda: am.decode(several, forgets, mask=window),
    }
    for step in steps.values():
        step()
    return {name: waits_of_capture(gpu, step) for name, step in steps.items()}


def test_a_known_step_that_no_graph_can_hold_is_refused_by_name():
    for found in world(2, catch_errors_of_known_steps).results():
        for name in ("float64", "reference"):
            expected = "decode kernel: expected one that reads the cache's length on the GPU, in a CUDA graph, given"
            assert str(found[name]).startswith(expected), found[name]
        refused = "decode: expected no graph around a cache that forgets, given one with mask=Window(30)"
        assert str(found["several queries of a window"]).startswith(refused), found


@on_each_rank
def catch_errors_beyond_capacity(gpu: EmulatedGPU) -> list[str]:
    """Return the errors of steps on a cache that replays of a graph have filled beyond its capacity."""
    cache, other = (
        am.KVCache(None, batch=1, kv_heads=2, head_dim=16, capacity=size, dtype=torch.float32, device="cuda")
        for size in (21, 50)
    )
    for each in (cache, other):
        each.append(*(random(seed, 1, 2, 20, 16) for seed in (1, 2)))
    q, k, v = (random(seed, 1, heads, 1, 16) for seed, heads in ((3, 4), (4, 2), (5, 2)))
    steps: list[Callable[[], object]] = [
        lambda: am.decode(q, cache, kernel="reference"),
        lambda: am.decode(q, cache),
        lambda: am.decode_rows(q.expand(2, -1, -1, -1).contiguous(), [cache, other]),
    ]
    for step in steps:
        step()
    for _ in range(2):  # the emulation runs at once what it captures, as a replay would
        with gpu.capturing():
            cache.append(k, v)
    errors = []
    for step in (*steps, lambda: am.decode(q, cache, kernel="reference", scale=0.1)):
        with pytest.raises(InputError) as caught:
            step()
        errors.append(str(caught.value))
    return errors


def test_a_cache_beyond_its_capacity_is_refused_after_a_graph():
    (errors,) = world(1, catch_errors_beyond_capacity).results()
    assert all("given 1 queries and 22 of 21 tokens in the cache" in error for error in errors), errors


class Replayed(NamedTuple):
    """The length of a cache after appends of a graph, and a step over it beside one over a cache without a graph."""

    length_by_cpu: int
    length_on_device: int
    out: torch.Tensor
    eager_out: torch.Tensor


@on_each_rank
def replay_appends(gpu: EmulatedGPU) -> Replayed:
    mesh = init_device_mesh("cuda", (1, 1, 2), mesh_dim_names=AXES)
    q, k, v = (random(seed, 2, heads, 1, 16) for seed, heads in ((3, 4), (4, 2), (5, 2)))
    cache, other = filled_cache(mesh), filled_cache(mesh)
    with gpu.capturing():
        cache.append(k, v)  # the emulation runs at once what it captures, as a replay would
    other.append(k, v)
    with pytest.raises(InputError, match="truncate"):
        cache.truncate(22)
    return Replayed(cache.length, int(cache.lengths[0].cpu()), am.decode(q, cache).cpu(), am.decode(q, other).cpu())


def test_the_length_is_right_after_a_graph_appends():
    for replayed in world(2, replay_appends).results():
        assert replayed.length_by_cpu == replayed.length_on_device == 21
        assert torch.equal(replayed.out, replayed.eager_out)


@on_each_rank
def step_with_counts(gpu: EmulatedGPU) -> list[torch.Tensor]:
    """Return a step with numbers of keys on the GPU: too many, fewer than none, and two that fit."""
    mesh = init_device_mesh("cuda", (1, 1, 2), mesh_dim_names=AXES)
    q, cache = random(3, 2, 4, 1, 16), filled_cache(mesh)
    return [am.decode(q, cache, key_lengths=torch.tensor(few).cuda()).cpu() for few in ((21, 20), (-1, 3), (20, 0))]


def test_wrong_key_lengths_on_the_gpu_give_nan_in_their_sequence_alone():
    for many, negative, right in world(2, step_with_counts).results():
        assert many[0].isnan().all()
        assert negative[0].isnan().all()
        assert not any(x.isnan().any() for x in (many[1], negative[1], right))
