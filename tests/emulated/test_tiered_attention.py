"""Caches whose older tokens are in CPU memory, or in files, beside a GPU: attended there, or uploaded in parts."""

from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import attnmesh as am
import attnmesh.hf as hf
from attnmesh import errors
from attnmesh.core.storage import STORAGES
from attnmesh.kernels import tiered_attention
from attnmesh.mesh.shapes import AXES
from tests.support.caches.tiers import OneWay, run_one_way
from tests.support.emulation.emulated_gpu import EmulatedGPU
from tests.support.emulation.emulated_nccl import BACKENDS, world
from tests.support.emulation.emulated_problems import Ranks
from tests.support.emulation.emulated_waits import on_gpu, random, tiny_model
from tests.support.ranks.pool import on_each_rank
from tests.support.truth import histories
from tests.support.truth.seeds import in_turn, pairs
from tests.support.truth.tolerances import FLOAT32_SUMS


@pytest.mark.parametrize(("seed", "uploaded"), pairs(range(60), [False, True], 4))
def test_random_histories_agree_with_float64(seed: int, uploaded: bool, tmp_path: Path) -> None:
    history = histories.in_tiers(histories.draw(seed + 300, sizes=(1, 2), most=8), in_turn((1, 9, 16), seed))
    history = replace(history, phases=history.phases[:1], storage=in_turn(STORAGES, seed) if seed % 4 == 3 else None)
    histories.check(history, OneWay(Ranks(in_turn(BACKENDS, seed)), uploaded=uploaded), tmp_path)  # type: ignore[arg-type]


def outputs(gpu: EmulatedGPU, folder: Path) -> list[Tensor]:
    """Return outputs over tokens in GPU memory and in files: of one query, several, a window, and a selection."""
    mesh = init_device_mesh("cuda", (1, 1, 2), mesh_dim_names=AXES)
    sizes: dict[str, Any] = {"batch": 1, "kv_heads": 2, "head_dim": 16, "capacity": 300, "dtype": torch.float32}
    caches = [am.KVCache(mesh, **sizes, folder=folder, hot=32), am.KVCache(mesh, **sizes)]
    k, v = (random(seed, 1, 2, 200, 16) for seed in (1, 2))
    chosen = am.Selection(torch.tensor([3, 199, 7, 60]).int().expand(1, 1, 1, -1).cuda())
    found = []
    for cache in caches:
        for start in range(0, 200, 50):
            cache.append(k[:, :, start : start + 50], v[:, :, start : start + 50])
        for rows, options in ((1, {}), (3, {}), (1, {"mask": am.Window(90)}), (1, {"selected": chosen})):
            found.append(am.decode(random(3, 1, 4, rows, 16), cache, **options).cpu())
    assert caches[0].own_shard.earlier_tokens > 40
    caches[0].flush()
    del caches[0], cache
    again = am.KVCache(mesh, **sizes, folder=folder, hot=32)
    assert again.length == 200
    assert torch.allclose(am.decode(random(3, 1, 4, 1, 16), again).cpu(), found[4], atol=FLOAT32_SUMS)
    return found


@on_each_rank
def attend_one_way(gpu: EmulatedGPU, uploaded: bool, folder: Path) -> list[Tensor]:
    return run_one_way(uploaded, outputs, gpu, folder)


@pytest.mark.parametrize("uploaded", [pytest.param(False, marks=pytest.mark.long), True])
def test_a_gpu_has_a_context_in_a_folder(uploaded: bool, tmp_path: Path) -> None:
    for found in world(2, attend_one_way, uploaded, tmp_path).results():
        for ours, plain in zip(found[:4], found[4:], strict=True):
            assert torch.allclose(ours, plain, atol=FLOAT32_SUMS)


@on_each_rank
def step_around_a_move(gpu: EmulatedGPU) -> tuple[bool, list[str]]:
    """Return whether a known step has the same output once the newest tokens are on a GPU, and its launches there."""
    sizes: dict[str, Any] = {"batch": 1, "kv_heads": 2, "head_dim": 16, "capacity": 300, "dtype": torch.float32}
    cache = am.KVCache(None, **sizes, device="cpu", hot=32)
    k, v, q = (random(seed, 1, heads, length, 16).cpu() for seed, heads, length in ((1, 2, 90), (2, 2, 90), (3, 4, 1)))
    cache.append(k, v)
    before = am.decode(q, cache)
    cache.move_hot(torch.device("cuda", 0))
    am.decode(q.cuda(), cache)
    with gpu.recording():
        after = am.decode(q.cuda(), cache).cpu()
    return torch.allclose(before, after, atol=FLOAT32_SUMS), list(gpu.launches)


def test_a_known_step_is_another_one_once_its_cache_has_moved() -> None:
    ((same, launches),) = world(1, step_around_a_move).results()
    assert same
    assert "attend_cache" in launches


@on_each_rank
def generate_in_two_tiers(gpu: EmulatedGPU) -> list[int]:
    """Return new tokens of a model whose older keys are on the CPU, after those of one whose keys are on the GPU."""
    mesh = init_device_mesh("cuda", (1, 1, 2), mesh_dim_names=AXES)
    torch.manual_seed(0)
    model = on_gpu(tiny_model())
    ids = torch.randint(64, (1, 36), generator=torch.Generator().manual_seed(1)).cuda()
    found: list[int] = []
    with torch.no_grad():
        for hot in (None, 8):
            cache = hf.ShardedCache(model.config, mesh, hot=hot, block=4)
            logits = model(ids, past_key_values=cache).logits[:, -1:]
            for _ in range(2):
                token = logits.argmax(-1)
                found.append(int(token))
                place = torch.full((1, 1), cache.get_seq_length()).cuda()
                logits = model(token, past_key_values=cache, position_ids=place).logits
    assert cache.kv_caches[0].own_shard.earlier_tokens > 0
    return found


def test_a_model_gives_the_tokens_of_one_memory() -> None:
    for found in world(2, generate_in_two_tiers, backend="cpu:gloo,cuda:nccl").results():
        assert found[:2] == found[2:]


class Reopened(NamedTuple):
    """A folder that goes on with a model: the devices of its caches, and whether a step is that of one memory."""

    devices: set[str]
    is_exact: bool


@on_each_rank
def reopen_folder(gpu: EmulatedGPU, folder: Path) -> Reopened:
    torch.manual_seed(0)
    model, devices = on_gpu(tiny_model()), set[str]()
    ids = torch.randint(64, (1, 40), generator=torch.Generator().manual_seed(1)).cuda()
    with torch.no_grad():
        for part in (ids[:, :30], ids):
            cache = hf.ShardedCache(model.config, None, folder=folder, hot=16)
            start = cache.get_seq_length()
            place = torch.arange(start, part.shape[1])[None].cuda()
            logits = model(part[:, start:], past_key_values=cache, position_ids=place).logits[:, -1].cpu()
            devices |= {kv_cache.own_shard.kv_tensors[0].device.type for kv_cache in cache.kv_caches}
            cache.tokens = part.cpu()
            cache.flush()
            del cache
        plain = model(ids, past_key_values=hf.ShardedCache(model.config, None)).logits[:, -1].cpu()
    return Reopened(devices, torch.allclose(logits, plain, atol=FLOAT32_SUMS))


def test_a_folder_goes_on_with_a_model_on_one_gpu(tmp_path: Path) -> None:
    (reopened,) = world(1, reopen_folder, tmp_path).results()
    assert reopened.devices == {"cuda"}
    assert reopened.is_exact


@on_each_rank
def catch_refusals(gpu: EmulatedGPU) -> list[str]:
    """Return what is said to calls that a GPU does not serve."""
    sizes: dict[str, Any] = {"batch": 1, "kv_heads": 2, "head_dim": 16, "capacity": 300, "dtype": torch.float32}
    cache = am.KVCache(None, **sizes, device="cuda", hot=16)
    k, v, q = random(1, 1, 2, 90, 16), random(2, 1, 2, 90, 16), random(3, 1, 4, 1, 16)
    cache.append(k, v)
    am.decode(q, cache)

    def captured(call: Any) -> None:
        with gpu.capturing():
            call()

    answers = []
    for call in (
        lambda: am.decode(q, cache, reproducible=True),
        lambda: captured(lambda: am.decode(q, cache)),
        lambda: captured(lambda: cache.append(k[:, :, :1], v[:, :, :1])),
        lambda: am.KVCache(None, **sizes, device="cuda", folder="nowhere"),
    ):
        with pytest.raises(errors.KernelError) as error:
            call()
        answers.append(str(error.value))
    return answers


def test_what_a_gpu_does_not_serve_is_refused_by_name() -> None:
    (answers,) = world(1, catch_refusals).results()
    for answer, start in zip(
        answers,
        (
            "decode reproducible: expected keys that one kernel reads, given hot=16 on cuda",
            "decode: expected no graph around a cache that has two memories, given one with hot=16",
            "append: expected no graph around a cache that has two memories, given one with hot=16",
            "KVCache folder: expected a cache on a CPU, or one whose newest tokens alone are on a device, given cuda",
        ),
        strict=True,
    ):
        assert answer.startswith(start)


@on_each_rank
def sample_and_choose(gpu: EmulatedGPU) -> dict[str, bool]:
    """Return whether the step that chooses is right, and whether its choice is kept."""
    sizes: dict[str, Any] = {"batch": 1, "kv_heads": 2, "head_dim": 16, "capacity": 700, "dtype": torch.float32}
    caches = [am.KVCache(None, **sizes, device="cuda", **options) for options in ({"hot": 16}, {})]
    k, v, q = random(1, 1, 2, 600, 16), random(2, 1, 2, 600, 16), random(3, 1, 4, 1, 16)
    for cache in caches:
        cache.append(k, v)
    found = [am.decode(q, cache, mask=am.Window(300)).cpu() for cache in (*caches, caches[0])]
    right = torch.allclose(found[0], found[1], atol=FLOAT32_SUMS)
    return {"right": right, "kept": len(tiered_attention.IS_UPLOAD_FASTER) == 1}


def test_a_sample_chooses_the_way() -> None:
    assert world(1, sample_and_choose).results() == [{"right": True, "kept": True}]
