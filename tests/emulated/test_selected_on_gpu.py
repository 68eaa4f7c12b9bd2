"""Steps over selected tokens on GPUs, where the CPU reads neither indices nor how many tokens a rank holds."""

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import attnmesh as am
from attnmesh.decoding.index_search import top_k_tokens
from attnmesh.mesh.shapes import AXES
from tests.support.emulation.emulated_gpu import EmulatedGPU
from tests.support.emulation.emulated_nccl import BACKENDS, world
from tests.support.emulation.emulated_waits import random
from tests.support.ranks.pool import on_each_rank
from tests.support.truth.seeds import pairs

INDICES = torch.tensor([[3, 22, 7], [19, 0, 2**31 - 1]], dtype=torch.int32)[:, None, None]


@on_each_rank
def select_on_gpu(gpu: EmulatedGPU, ranks: int, padded: bool) -> list[Tensor]:
    """Return outputs of selected tokens, then with faulty rows, and the best tokens by a score; of forks, too."""
    mesh = init_device_mesh("cuda", (1, 1, ranks), mesh_dim_names=AXES)
    sizes = {"batch": 2, "head_dim": 16, "capacity": 100, "block": 4, "dtype": torch.float32}
    cache, index = am.KVCache(mesh, kv_heads=2, **sizes), am.KVCache(mesh, kv_heads=1, values="none", **sizes)
    real = torch.tensor([True, True, False, True]).repeat(2, 6) if padded else None
    cache.append(random(1, 2, 2, 24, 16), random(2, 2, 2, 24, 16), token_mask=real)
    index.append(random(3, 2, 1, 24, 16), token_mask=real)
    q = random(4, 2, 4, 1, 16)
    found = []
    wrong = INDICES.clone()
    wrong[0, 0, 0, 1], wrong[1, 0, 0, 1] = 24, 19
    with torch.no_grad():
        for kv_cache, keys in ((cache, index), (cache.fork(), index.fork())):
            found += [am.decode(q, kv_cache, selected=am.Selection(x.cuda())).cpu() for x in (INDICES, wrong)]
            found.append(top_k_tokens(keys, lambda k, given: given[0] @ k.mT, [q[:, 0]], 30).cpu())
    return found


@pytest.mark.parametrize(("backend", "padded"), pairs([*BACKENDS], [False, True]))
def test_selected_tokens_are_the_same_on_gpus(backend: str, padded: bool) -> None:
    real = torch.tensor([True, True, False, True]).repeat(2, 6) if padded else torch.ones(2, 24, dtype=torch.bool)
    q, k, v = (
        torch.randn(2, n, t, 16, generator=torch.Generator().manual_seed(s))
        for s, n, t in ((4, 4, 1), (1, 2, 24), (2, 2, 24))
    )
    chosen = torch.zeros(2, 25, dtype=torch.bool).scatter(1, INDICES[:, 0, 0].long().clamp(max=24), True)[:, :24] & real
    logits = q @ k.repeat_interleave(2, 1).mT / 4
    right = logits.masked_fill(~chosen[:, None, None], -torch.inf).softmax(-1) @ v.repeat_interleave(2, 1)
    keys = torch.randn(2, 1, 24, 16, generator=torch.Generator().manual_seed(3))
    order = (q[:, :1] @ keys.mT)[:, 0].masked_fill(~real[:, None], -torch.inf).sort(-1, descending=True)
    best = order.indices.masked_fill(order.values == -torch.inf, 2**31 - 1)
    for found in world(2, select_on_gpu, 2, padded, backend=backend).results():
        for out, faulty, tokens in (found[:3], found[3:]):
            torch.testing.assert_close(out, right)
            assert faulty.isnan().all()
            assert torch.equal(tokens[..., :24].long(), best)
