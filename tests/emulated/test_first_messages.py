"""The first messages of a group of NCCL, whose communicator all ranks have to join."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import attnmesh as am
from attnmesh.mesh.shapes import AXES
from tests.support.emulation.emulated_gpu import EmulatedGPU
from tests.support.emulation.emulated_nccl import BACKENDS, world
from tests.support.ranks.pool import on_each_rank
from tests.support.truth.seeds import pairs
from tests.support.truth.tolerances import FLOAT32, worst

DOCUMENTS = am.Causal() & am.Documents([8, 4, 4])
"""Ranks 0 and 1 share a document. Ranks 2 and 3 have one each, and send nothing."""


@on_each_rank
def attend_while_some_send_nothing(gpu: EmulatedGPU, checked: bool | None) -> float:
    mesh = init_device_mesh("cuda", (1, 4, 1), mesh_dim_names=AXES)
    q, k, v = torch.randn(3, 1, 2, 16, 8, generator=torch.Generator().manual_seed(0)).unbind()
    parts = [am.shard(x.cuda(), mesh, layout=am.Contiguous()) for x in (q, k, v)]
    out = am.attention(*parts, mesh=mesh, layout=am.Contiguous(), length=16, mask=DOCUMENTS, checked=checked)
    expected = am.attend(q, k, v, mask=DOCUMENTS, kernel="reference").out
    return float((am.unshard(out, mesh, layout=am.Contiguous()).cpu() - expected).abs().max())


@pytest.mark.parametrize(("backend", "checked"), pairs([*BACKENDS], [None, False]))
def test_ranks_that_send_nothing_join_too(backend: str, checked: bool | None) -> None:
    assert worst(world(4, attend_while_some_send_nothing, checked, backend=backend).results()) < FLOAT32
