"""The GPU of a rank is the current device before anything is allocated on one."""

from unittest.mock import patch

import pytest
import torch

import attnmesh as am
from attnmesh.core.storage import STORAGES
from attnmesh.errors import InputError
from attnmesh.setup import init_mesh as module
from tests.support.emulation import emulated_gpu
from tests.support.emulation.emulated_gpu import EmulatedGPU, EmulatedTensor
from tests.support.emulation.emulated_nccl import BACKENDS, world
from tests.support.ranks.pool import on_each_rank


@on_each_rank
def record_events(gpu: EmulatedGPU, used: bool) -> list[str]:
    """Return in which order `init_mesh` sets the device, compares calls and makes groups."""
    found: list[str] = []
    make = module.init_device_mesh

    class Recorded(module.Agreement):
        def __enter__(self) -> "Recorded":
            found.append("compare")
            return self

    def init(*arguments: object, **named: object) -> object:
        found.append("make groups")
        return make(*arguments, **named)  # type: ignore[arg-type]

    device = {
        "is_initialized": lambda: used,
        "device_count": lambda: 2,
        "set_device": lambda number: found.append(f"set {number}"),
    }
    order = patch.multiple(module, Agreement=Recorded, init_device_mesh=init)
    with patch.multiple(torch.cuda, **device), order:
        am.init_mesh("cuda", (1, 1, 2))
    return found[: found.index("make groups") + 1]


@pytest.mark.parametrize("backend", BACKENDS)
def test_init_mesh_sets_the_device_first(backend: str):
    expected = [["compare", f"set {rank}", "make groups"] for rank in range(2)]
    assert world(2, record_events, False, backend=backend).results() == expected


def test_init_mesh_leaves_a_device_that_is_in_use():
    assert world(2, record_events, True).results() == [["compare", "make groups"]] * 2


@on_each_rank
def measure_row_distances(gpu: EmulatedGPU, storage: str) -> list[list[int]]:
    """Return the bytes from row to row of keys and values: of a new cache, a grown one, and one of another batch."""
    sizes = {"batch": 2, "kv_heads": 2, "head_dim": 64, "value_dim": 32, "capacity": 16, "dtype": torch.bfloat16}
    cache = am.KVCache(None, device="cuda", storage=storage, **sizes)
    found = []

    def note() -> None:
        found.append([x.stride(2) for x in cache.own_shard.kv_tensors])

    note()
    cache.append(*(torch.randn(2, 2, 5, width, dtype=torch.bfloat16).cuda() for width in (64, 32)))
    cache.reserve(400)
    note()
    cache.reorder(torch.tensor([1, 0, 1]).cuda())
    note()
    return found


@pytest.mark.parametrize("storage", STORAGES)
def test_rows_of_bytes_begin_where_a_gpu_loads_wide_words(storage: str) -> None:
    """A row of 64 numbers and a scale has 66 bytes, which would be loaded one by one."""
    assert world(1, measure_row_distances, storage).results() == [[[80, 48]] * 3]
    cache = am.KVCache(None, batch=1, kv_heads=1, head_dim=64, capacity=16, dtype=torch.float32, storage=storage)
    assert [x.stride(2) for x in cache.own_shard.kv_tensors] == [66, 66]


@on_each_rank
def catch_errors_of_another_gpu(gpu: EmulatedGPU) -> list[str]:
    """Return the errors of a new and a known append and step whose tensors are on another GPU than the cache."""
    sizes = {"batch": 1, "kv_heads": 2, "head_dim": 16, "capacity": 40, "dtype": torch.float32}
    cache = am.KVCache(None, device="cuda", **sizes)
    q, k, sinks = torch.randn(1, 2, 1, 16), torch.randn(1, 2, 1, 16), torch.randn(2)
    errors = []
    for _ in range(2):
        with patch.object(emulated_gpu, "DEVICE", torch.device("cuda", 1)):
            far_q, far_k, far_sinks = (EmulatedTensor(x, gpu) for x in (q, k, sinks))
        calls = (
            lambda far=far_k: cache.append(far, far),
            lambda far=far_q: am.decode(far, cache),
            lambda far=far_sinks: am.decode(q.cuda(), cache, sinks=far),
        )
        cache.append(k.cuda(), k.cuda())
        am.decode(q.cuda(), cache)
        am.decode(q.cuda(), cache, sinks=sinks.cuda())
        for call in calls:
            with pytest.raises(InputError) as caught:
                call()
            errors.append(str(caught.value))
    return errors


def test_tensors_of_another_gpu_are_refused() -> None:
    (errors,) = world(1, catch_errors_of_another_gpu).results()
    assert errors[:3] == errors[3:]
    fix = "Fix: call .to() with the cache's dtype and device"
    assert errors[0].startswith("append k: expected torch.float32 on cuda:0, given torch.float32 on cuda:1")
    assert errors[1].startswith("decode q: expected torch.float32 on cuda:0, given torch.float32 on cuda:1")
    assert all(fix in error for error in errors[:2])
    assert "decode sinks: expected one device, given sinks cuda:1, q cuda:0" in errors[2]
