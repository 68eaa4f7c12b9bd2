"""A new mask, layout, kernel or merge is one value: each is made here, of what there is, and nothing else knows it.

In the package a mask would be a function of `core/mask.py`, a layout a class of `core/layout.py`, a kernel a file of
`kernels/implementations`, and a merge a record of `comm/merges.py`. A test of `hf/families/test_families.py` adds a
family, `test_a_family_is_one_file`.
"""

from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import attnmesh as am
from attnmesh.comm.merges import MERGES, Form, Merge, MergeTransport, PartialWithChecksum
from attnmesh.core.layout import Layout, check_layout
from attnmesh.core.mask import Mask
from attnmesh.core.partial import Partial
from attnmesh.core.scaling import Scaling
from attnmesh.cost.merge_cost import add_all_to_all
from attnmesh.errors import LayoutError
from attnmesh.kernels import choice
from attnmesh.kernels.kernel import Kernel, KernelRequest
from attnmesh.kernels.rectangles import BackwardInputs, Gradients, Rectangle
from attnmesh.mesh.shapes import AXES, Shape
from tests.support.ranks.pool import Pool, on_each_rank
from tests.support.truth.dense import dense
from tests.support.truth.mesh_problems import named_mesh

TOKENS, WIDTH, PREFIX = 40, 8, 7


def Prefix(tokens: int) -> Mask:
    """Return a made-up mask: a prompt whose tokens see each other both ways, and causal tokens after it."""
    return Mask(right=0, spans=(0, tokens))


def new_layout(shards: int) -> Layout:
    """Return a made-up layout: the shards of `Striped` in reverse."""

    @dataclass(frozen=True)
    class Ordered(Layout):
        order: tuple[int, ...]
        block: int = 1

        def positions(self, length: int, shards: int, index: int) -> Tensor:
            return am.Striped(self.block).positions(length, shards, self.order[index])

    with pytest.raises(LayoutError, match=r"given .*Ordered"):  # of another file
        check_layout("layout", Ordered((0,)))
    Layout.kinds.append(Ordered)
    layout = Ordered(tuple(reversed(range(shards))), 3)
    assert Layout.from_code([*layout.to_code(), 7, 8]) == (layout, [7, 8])
    with pytest.raises(LayoutError, match=r"Packed\(documents, shape\) or Ordered\(order\), given"):
        check_layout("layout", "ordered")
    return layout


class Dense(Kernel):
    """A made-up kernel: the formula, with the gradients of autograd. It counts its calls."""

    name, calls = "added", 0  # the first of all names

    def unsupported_reason(self, request: KernelRequest) -> str | None:
        return None

    def attend(self, q: Tensor, k: Tensor, v: Tensor, rectangle: Rectangle, scaling: Scaling) -> Partial:
        self.calls += 1
        return Partial(*dense(q, k, v, rectangle.visible(), scaling.scale)[:2])

    def backward(
        self, q: Tensor, k: Tensor, v: Tensor, inputs: BackwardInputs, rectangle: Rectangle, scaling: Scaling
    ) -> Gradients:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        weights = (q @ k.mT * scaling.scale).masked_fill(~rectangle.visible(), -torch.inf)
        weights = torch.exp(weights - inputs.lse.unsqueeze(-1))
        delta = (inputs.out * inputs.dout).sum(-1, keepdim=True)
        dlogits = weights * (inputs.dout @ v.mT - delta) * scaling.scale
        dk, dv = (x.unflatten(1, (2, -1)).sum(2) for x in (dlogits.mT @ q, weights.mT @ inputs.dout))
        return Gradients(dlogits @ k, dk, dv)


def merge_around(ranks: MergeTransport[Form], message: Tensor, form: Form, _: bool) -> PartialWithChecksum:
    """Send on what came, to the next rank of a ring, until all have all messages."""
    (size, rank), rows = (ranks.axis.size, ranks.axis.index), [message]
    for _step in range(1, size):
        into, ring = torch.empty_like(message), ((rank + 1) % size, (rank - 1) % size)
        for wait in ranks.post([(dist.isend, ring[0], rows[-1]), (dist.irecv, ring[1], into)], "merging"):
            wait()
        rows.append(into)
    return form.merge(torch.stack([rows[(rank - other) % size] for other in range(size)]))


RING = Merge(
    "ring",
    merge_around,
    lambda group, payload, *to: add_all_to_all("merge", group, (group.ranks - 1) * payload.size, *to),
)
"""A made-up merge. It is as dear as an all-to-all of all that goes round."""


def given(heads: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(heads)
    return [*torch.randn(2 if heads == 2 else 1, 1, heads, TOKENS, WIDTH, generator=generator).unbind()]


class Run(NamedTuple):
    """Attention of shards with its gradients, a decode step, and the calls of the made-up kernel."""

    attention: list[Tensor]
    step: Tensor
    calls: int


@on_each_rank
def attend_and_decode(mask: Mask, layout_name: str, kernel: str, merge: str) -> Run:
    made_up, stack = Dense(), ExitStack()
    stack.enter_context(patch.object(choice, "KERNELS", choice.in_order((*choice.KERNELS, made_up))))
    stack.enter_context(patch.dict(MERGES, {RING.name: RING}))
    stack.enter_context(patch.object(Layout, "kinds", [*Layout.kinds]))
    with stack:
        ranks = dist.get_world_size()
        mesh = named_mesh(Shape(1, 1, ranks), AXES)
        layout = new_layout(ranks) if layout_name == "added" else am.Contiguous()
        cache = am.KVCache(mesh, batch=1, kv_heads=2, head_dim=WIDTH, capacity=TOKENS, dtype=torch.float32, block=4)
        (q,), (k, v) = given(4), given(2)
        cache.append(k, v)
        step = am.decode(q[:, :, -15:], cache, mask=mask, kernel=kernel, merge=merge)
        shards = [am.shard(x, mesh, layout=layout).requires_grad_() for x in (q, k, v)]
        out = am.attention(*shards, mesh=mesh, layout=layout, mask=mask, kernel=kernel)
        found = [out.detach(), *torch.autograd.grad(out.square().sum(), shards)]
        return Run([am.unshard(x, mesh, layout=layout, length=TOKENS) for x in found], step, made_up.calls)


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize(
    ("mask", "layout", "kernel", "merge"),
    [
        (Prefix(PREFIX), "contiguous", "auto", "auto"),
        (Prefix(PREFIX), "contiguous", "reference", "tree"),
        (am.Causal(), "added", "auto", "auto"),
        (am.Causal(), "contiguous", "added", "auto"),
        (am.Causal(), "contiguous", "auto", "ring"),
        (Prefix(PREFIX), "added", "added", "ring"),
    ],
)
def test_attention_and_decoding_are_exact_with_what_is_new(
    ranks: int, mask: Mask, layout: str, kernel: str, merge: str, pool: Pool
) -> None:
    at = torch.arange(TOKENS)
    visible = at <= at[:, None]
    if mask != am.Causal():
        visible |= (at < PREFIX) & (at[:, None] < PREFIX)
    assert torch.equal(mask.visible(at, at), visible)
    assert Mask.from_code(mask.to_code()) == mask
    exact = [x.double().requires_grad_() for x in (*given(4), *given(2))]
    out = dense(*exact, visible, WIDTH**-0.5)[0]
    expected: list[Any] = [out.detach(), *torch.autograd.grad(out.square().sum(), exact)]
    for found in pool.run(ranks, attend_and_decode, mask, layout, kernel, merge):
        torch.testing.assert_close(found.attention, expected, check_dtype=False)
        torch.testing.assert_close(found.step, expected[0][:, :, -15:], check_dtype=False)
        assert (found.calls > 0) == (kernel == "added")


def test_a_new_merge_is_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    work, cluster = am.Workload(32, 8, 128, 1_000_000, phase="decode"), am.Cluster.preset("h100x1", hosts=4)
    assert "ring" not in {one.exchange for one in am.plan(work, cluster)}
    monkeypatch.setitem(MERGES, "ring", RING)
    plans = {one.exchange: one for one in reversed(am.plan(work, cluster))}
    assert plans["ring"].seconds > plans["direct"].seconds
    assert plans["ring"].known_as == "ring"
