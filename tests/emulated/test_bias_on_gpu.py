"""A bias by distance on GPUs: `attention` on shards, and a step of decoding."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import attnmesh as am
from attnmesh.mesh.shapes import AXES
from tests.support.emulation.emulated_gpu import EmulatedGPU
from tests.support.emulation.emulated_nccl import BACKENDS, world
from tests.support.emulation.emulated_waits import random
from tests.support.ranks.pool import on_each_rank


@on_each_rank
def attend_with_a_bias(gpu: EmulatedGPU) -> list[tuple[Tensor, Tensor]]:
    """Return what this rank gets, and what `attend` gives on the CPU."""
    mesh = init_device_mesh("cuda", (1, 2, 1), mesh_dim_names=AXES)
    q, k, v = (random(seed, 1, 2, 10, 8) for seed in (1, 2, 3))
    bias, mine = random(4, 1, 2, 10, 4), am.Zigzag().positions(10, 2, dist.get_rank())
    shards = (x[:, :, mine.cuda()] for x in (q, k, v, bias))
    with torch.no_grad():
        *own, own_bias = shards
        where = {"mesh": mesh, "layout": am.Zigzag(), "length": 10}
        out = am.attention(*own, distance_bias=own_bias, **where)
        cache = am.KVCache(mesh, batch=1, kv_heads=2, head_dim=8, capacity=32, block=4, dtype=torch.float32)
        cache.append(k, v)
        step = am.decode(q[:, :, -2:], cache, distance_bias=bias[:, :, -2:])
        right = am.attend(*(x.cpu() for x in (q, k, v)), mask=am.Causal(), distance_bias=bias.cpu()).out
    return [(out.cpu(), right[:, :, mine]), (step.cpu(), right[:, :, -2:])]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_bias_by_distance_gives_the_same_on_gpus(backend: str) -> None:
    for found in world(2, attend_with_a_bias, backend=backend).results():
        for given, expected in found:
            torch.testing.assert_close(given, expected)
