"""Published packages that the prefill bench runs beside our shapes, each on the same inputs."""

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import attnmesh as am
from attnmesh.core.layout import Layout
from attnmesh.core.mask import Mask


@dataclass(frozen=True)
class Case:
    """A problem that all contenders solve."""

    name: str
    mask: Mask
    layout: Layout
    heads: tuple[int, int]
    length: int
    width: int = 64


def inputs(case: Case) -> list[Tensor]:
    """Return q, k and v of the whole sequence, the same on all ranks."""
    torch.manual_seed(0)
    return [torch.randn(1, heads, case.length, case.width) for heads in (case.heads[0], *[case.heads[1]] * 2)]


@dataclass(frozen=True)
class Peer:
    """A published package on one case: a call that returns dq, dk and dv, and its layout."""

    call: Callable[[], Any]
    layout: Layout


def wrong_gradients(peer: Peer, case: Case, qkv: list[Tensor]) -> str | None:
    """Return which gradients of a package differ on any rank from attention on one device, or None."""
    tensors = [x.clone().requires_grad_() for x in qkv]
    out = am.attention(*tensors, mesh=None, mask=case.mask)
    expected = [_share(x, peer.layout) for x in torch.autograd.grad(out.sum(), tensors)]
    gradients = [
        x if x.shape == other.shape else x.transpose(1, 2) for x, other in zip(peer.call(), expected, strict=True)
    ]
    off = torch.tensor([float((x - other).abs().max()) for x, other in zip(gradients, expected, strict=True)])
    dist.all_reduce(off, dist.ReduceOp.MAX)
    names = [name for name, error in zip(("dq", "dk", "dv"), off.tolist(), strict=True) if not error < 1e-2]
    return f"its {', '.join(names)} are wrong" if names else None


def _ring_attention_pytorch(case: Case, qkv: list[Tensor]) -> Peer | str:
    if find_spec("ring_attention_pytorch") is None:
        return "not installed: pip install 'attnmesh[bench]'"
    if case.mask not in (am.Causal(), am.Full()):
        return "it has no such mask"
    from ring_attention_pytorch import ring_flash_attn_

    causal, ranks = case.mask == am.Causal(), dist.get_world_size()
    layout = am.Striped() if causal else am.Contiguous()
    q, k, v = (_share(x, layout).transpose(1, 2) for x in qkv)
    q = q.unflatten(2, (case.heads[1], -1)).transpose(2, 3).flatten(2, 3)  # its grouped heads are interleaved
    q, k, v = (x.contiguous().requires_grad_() for x in (q, k, v))
    dout = torch.ones_like(q)

    def call() -> Any:
        out = ring_flash_attn_(q, k, v, None, causal, 1024, True, causal, None, ranks, False, 50.0)
        dq, dk, dv = torch.autograd.grad(out, (q, k, v), dout)
        return dq.unflatten(2, (-1, case.heads[1])).transpose(2, 3).flatten(2, 3), dk, dv

    return Peer(call, layout)


def _ringmaster(case: Case, qkv: list[Tensor]) -> Peer | str:
    if find_spec("ringmaster") is None:
        return "not installed: pip install 'attnmesh[bench]'"
    if case.mask != am.Causal():
        return "its ring is causal, and without windows off the GPU"
    if case.heads[0] != case.heads[1]:
        return "its ring without flash-attn takes no grouped heads"
    from ringmaster import RotateMethod
    from ringmaster.ring import ring_attention

    q, k, v = (_share(x, am.Contiguous()).requires_grad_() for x in qkv)
    group, scale = dist.group.WORLD, case.width**-0.5
    kernel = {"provider": "math", "attn_implementation": "math", "rotate_method": RotateMethod.ALLTOALL}

    def call() -> Any:
        out = ring_attention(q, k, v, group=group, causal=True, scaling=scale, dropout=0.0, **kernel)
        return torch.autograd.grad(out, (q, k, v), torch.ones_like(out))

    return Peer(call, am.Contiguous())


def _share(x: Tensor, layout: Layout) -> Tensor:
    return x[:, :, layout.positions(x.shape[2], dist.get_world_size(), dist.get_rank())]


PEERS = {
    "ring-attention-pytorch": _ring_attention_pytorch,
    "axolotl-ringmaster ring": _ringmaster,
}
