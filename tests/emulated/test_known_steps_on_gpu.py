"""Known steps on a GPU: their bits are those of a step that is checked, with the least work."""

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import attnmesh as am
from attnmesh.decoding import step_checks
from attnmesh.errors import KernelError
from attnmesh.mesh.shapes import AXES
from tests.support.caches.altered import forget_known_calls
from tests.support.emulation.emulated_gpu import EmulatedGPU
from tests.support.emulation.emulated_nccl import world
from tests.support.emulation.emulated_waits import random
from tests.support.ranks.pool import on_each_rank
from tests.support.truth.seeds import pairs
from tests.support.truth.tolerances import largest_difference, worst

STEPS: dict[str, dict[str, Any]] = {
    "plain": {},
    "a window": {"mask": am.Window(5)},
    "a window that forgets": {"mask": am.Window(5)},
    "chunks": {"mask": am.Causal() & am.Chunks(8)},
    "softcap": {"softcap": 3.0},
    "sinks": {"sinks": torch.ones(4)},
    "heads": {"output": "heads"},
    "tree": {"merge": "tree"},
    "padding": {},
    "a fork": {},
    "8 bits": {},
}
PROGRAMS = {1: ["attend_cache", "merge"], 2: ["attend_cache", "merge", "checksum"]}


@on_each_rank
def compare_known_steps(gpu: EmulatedGPU, ranks: int, names: list[str]) -> dict[str, Any]:
    """Return by step how much known ones differ from checked ones, how many were checked, and their launches."""
    mesh = init_device_mesh("cuda", (1, 1, ranks), mesh_dim_names=AXES) if ranks > 1 else None
    return {name: _steps(gpu, mesh, name, STEPS[name]) for name in names}


def _steps(gpu: EmulatedGPU, mesh: Any, name: str, options: dict[str, Any]) -> tuple[float, int, list[str]]:
    sizes: dict[str, Any] = {"batch": 2, "kv_heads": 2, "head_dim": 16, "capacity": 60, "dtype": torch.float32}
    sizes |= {"mask": options["mask"]} if "forgets" in name else {}
    sizes |= {"storage": "int8"} if name == "8 bits" else {}
    given = {key: x.cuda() if isinstance(x, Tensor) else x for key, x in options.items()}
    caches = [am.KVCache(mesh, device=torch.device("cuda", 0), block=4, **sizes) for _ in range(2)]
    real = torch.tensor([[False] * 3 + [True] * 17, [True] * 20]).cuda() if name == "padding" else None
    for cache in caches:
        cache.append(random(1, 2, 2, 20, 16), random(2, 2, 2, 20, 16), token_mask=real)
    kept = [cache.fork() for cache in caches] if name == "a fork" else []
    differences = []
    checks = 0
    check = step_checks.spec_of_step
    for number in range(5):
        k, v, q = (random(3 * number + part, 2, heads, 1, 16) for part, heads in ((4, 2), (5, 2), (6, 4)))
        with mock.patch.object(step_checks, "spec_of_step", side_effect=check) as checked, gpu.recording() as waits:
            caches[0].append(k, v)
            out = am.decode(q, caches[0], **given)
        assert number < 2 or not waits or "forgets" in name, waits  # tokens that are left move now and then
        checks, launches = checks + checked.call_count, list(gpu.launches)
        forget_known_calls(caches[1])
        caches[1].append(k, v)
        differences.append(largest_difference(out.cpu(), am.decode(q, caches[1], **given).cpu()))
    held = [(cache.keys.cpu()[:, :, : cache.used], cache.own_shard.token_index.cpu()[: cache.used]) for cache in caches]
    differences += [largest_difference(x, y) for x, y in zip(*held, strict=True)]
    assert len(kept) in (0, 2)
    return worst(differences), checks, launches


@pytest.mark.parametrize(("ranks", "part"), pairs([1, 2], range(4)))
def test_known_steps_have_the_bits_of_checked_ones(ranks: int, part: int):
    for found in world(ranks, compare_known_steps, ranks, list(STEPS)[part::4]).results():
        for name, (difference, checks, launches) in found.items():
            assert difference == 0, name
            assert checks == 1, name
            if name in ("plain", "a window", "sinks", "softcap", "8 bits", "padding"):
                assert sorted(launches)[:1] == ["attend_cache"], name
                assert launches.count("attend_cache") == 1, name
                assert set(launches) == set(PROGRAMS[ranks]), (name, launches)


@on_each_rank
def catch_error_of_rows_in_two_tiers(gpu: EmulatedGPU) -> str:
    """Return the error of a known reproducible step of which one row is now a cache with tokens on the CPU."""
    sizes: dict[str, Any] = {"batch": 1, "kv_heads": 2, "head_dim": 16, "capacity": 60, "dtype": torch.float32}
    caches = [am.KVCache(None, device="cuda", block=4, hot=hot, **sizes) for hot in (None, None, 8)]
    for cache in caches:
        cache.append(random(1, 1, 2, 40, 16), random(2, 1, 2, 40, 16))
    q = random(3, 2, 4, 1, 16)
    am.decode_rows(q, caches[:2], reproducible=True)
    with pytest.raises(KernelError) as caught:
        am.decode_rows(q, caches[::2], reproducible=True)
    return str(caught.value)


def test_a_known_step_is_none_of_caches_that_are_checked_otherwise():
    (error,) = world(1, catch_error_of_rows_in_two_tiers).results()
    assert error.startswith("decode_rows reproducible: expected keys that one kernel reads, given hot=8 on cuda"), error


@on_each_rank
def count_operators_of_appends(gpu: EmulatedGPU) -> list[int]:
    """Return how many operators appends of one token run, in the order in which a rank holds it or not."""
    mesh = init_device_mesh("cuda", (1, 1, 2), mesh_dim_names=AXES)
    cache = am.KVCache(mesh, batch=2, kv_heads=2, head_dim=16, capacity=60, dtype=torch.float32, block=4)
    found = []
    for number in range(17):
        k, v = (random(2 * number + part, 2, 2, 1, 16) for part in (0, 1))
        with mock.patch.object(gpu, "run", side_effect=gpu.run) as operators:
            cache.append(k, v)
        found.append(operators.call_count)
    return found[1:]


def test_one_token_is_written_by_few_operators():
    first, second = world(2, count_operators_of_appends).results()
    assert {*first, *second} == {2, 8}
    assert [a + b for a, b in zip(first, second, strict=True)] == [10] * 16
