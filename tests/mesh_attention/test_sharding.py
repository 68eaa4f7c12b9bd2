"""`shard` and `unshard`: each layout comes back, and "auto" is the layout that `attention` takes."""

import pytest
import torch
from torch import Tensor

import attnmesh as am
from attnmesh import errors
from attnmesh.core.layout import Layout
from attnmesh.mesh.axes import RankMesh
from attnmesh.mesh.shapes import AXES, Shape
from attnmesh.mesh_attention.auto_choices import agreed_layout
from attnmesh.mesh_attention.sharding import unshard_runs
from tests.support.ranks.pool import Pool, on_each_rank
from tests.support.truth.mesh_problems import named_mesh
from tests.support.truth.tolerances import FLOAT32_SUMS, assert_near


def mesh_of(shape: Shape):  # type: ignore[no-untyped-def]
    return named_mesh(shape, AXES)


PAIR = Shape(1, 2, 1)


@on_each_rank
def check_there_and_back(shape: Shape, layout: Layout, length: int) -> None:
    mesh = mesh_of(shape)
    whole = torch.arange(2 * length * 3).view(2, length, 3)
    mine = am.shard(whole, mesh, layout=layout, dim=1)
    assert_near(am.unshard(mine, mesh, layout=layout, dim=1), whole)
    for dtype in (torch.uint16, torch.float8_e4m3fn):  # PyTorch has few operators for them
        again = am.unshard(mine.to(dtype), mesh, layout=layout, dim=1)
        assert torch.equal(again.float(), whole.to(dtype).float())


@pytest.mark.parametrize("shape", [Shape(1, 2, 3), Shape(6, 1, 1), Shape(3, 2, 1)])
@pytest.mark.parametrize("layout", [am.Contiguous(), am.Zigzag(), am.Striped(2)])
def test_unshard_is_the_inverse_of_shard(pool: Pool, shape: Shape, layout: Layout) -> None:
    for length in (0, 5, 31):
        pool.run(6, check_there_and_back, shape, layout, length)


@on_each_rank
def gather_runs_and_gradient() -> tuple[Tensor, Tensor]:
    """Return the whole of runs of 3, 5 and 2 tokens, and the gradient of this rank's run."""
    sizes, mesh = [3, 5, 2], RankMesh.of(mesh_of(Shape(1, 3, 1)))
    run = torch.arange(10.0).split(sizes)[mesh.shard_index].expand(2, -1).clone().requires_grad_()
    whole = unshard_runs(run, mesh, sizes, -1)
    (gradient,) = torch.autograd.grad((whole * torch.arange(10)).sum(), run)
    return whole.detach(), gradient


def test_runs_of_any_sizes_are_gathered_and_each_gets_its_part_of_the_gradient(pool: Pool) -> None:
    runs = torch.arange(10.0).expand(2, -1)
    for own, (whole, gradient) in zip(runs.split([3, 5, 2], -1), pool.run(3, gather_runs_and_gradient), strict=True):
        assert torch.equal(whole, runs)
        assert torch.equal(gradient, own)


@on_each_rank
def attend_packed(shape: Shape, documents: list[int]) -> tuple[bool, list[Tensor]]:
    """Return whether `shard` and `attention` choose the same, and the gathered output and gradients of q, k and v."""
    mesh, mask, length = mesh_of(shape), am.Causal() & am.Documents(documents), sum(documents)
    torch.manual_seed(0)
    where = {"layout": "auto", "mask": mask}
    tensors = [am.shard(x, mesh, **where).requires_grad_() for x in torch.randn(4, 1, 2, length, 8)]

    out = am.attention(*tensors[:3], mesh=mesh, length=length, key_length=length, **where)
    results = out.detach(), *torch.autograd.grad(out, tensors[:3], tensors[3].detach())
    chosen = agreed_layout("auto", mask, RankMesh.of(mesh)).positions(
        length, shape.ranks, RankMesh.of(mesh).shard_index
    )
    same = torch.equal(am.shard(torch.arange(length), mesh, dim=0, **where), chosen)
    return same, [am.unshard(x, mesh, **where) for x in results]


@pytest.mark.parametrize("shape", [Shape(1, 1, 2), Shape(2, 1, 1), Shape(1, 2, 2), PAIR])
def test_auto_layouts_are_exact(pool: Pool, shape: Shape) -> None:
    documents = [200, 300, 20, 31, 150, 90, 61, 7, 1, 44]
    length = sum(documents)
    torch.manual_seed(0)
    q, k, v, dout = torch.randn(4, 1, 2, length, 8).double().unbind()
    inputs = [x.requires_grad_() for x in (q, k, v)]
    visible = (am.Causal() & am.Documents(documents)).visible(torch.arange(length), torch.arange(length))
    out = torch.nn.functional.scaled_dot_product_attention(*inputs, attn_mask=visible)
    expected = [out, *torch.autograd.grad(out, inputs, dout)]
    for same, results in pool.run(shape.ranks, attend_packed, shape, documents):
        assert same
        for given, exact in zip(results, expected, strict=True):
            torch.testing.assert_close(given.double(), exact, atol=2 * FLOAT32_SUMS, rtol=FLOAT32_SUMS)


@on_each_rank
def attend_compiled_over_documents() -> str:
    mesh, mask = mesh_of(PAIR), am.Causal() & am.Documents([5, 11])

    def layer(x: Tensor) -> Tensor:
        return am.attention(x, x, x, mesh=mesh, length=16, key_length=16, layout="auto", mask=mask)

    with pytest.raises(errors.LayoutError) as caught:
        torch.compile(layer, backend="aot_eager")(torch.randn(1, 2, 8, 8))
    return str(caught.value)


def test_auto_layouts_of_documents_are_refused_in_a_graph(pool: Pool) -> None:
    for text in pool.run(2, attend_compiled_over_documents):
        assert "a layout of documents in a compiled model" in text
        assert "layout=am.Packed" in text
