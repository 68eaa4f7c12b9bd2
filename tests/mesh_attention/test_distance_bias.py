"""Bias of the logits by distance: forward and gradients on one device and on meshes, beside dense attention."""

from dataclasses import replace
from random import Random

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import attnmesh as am
from attnmesh.errors import DeviceError, DtypeError, InputError, KernelError, MeshError, ShapeError
from attnmesh.mesh.shapes import AXES, Shape
from tests.support.ranks.pool import Pool, on_each_rank
from tests.support.truth.dense import dense
from tests.support.truth.mesh_problems import SAMPLES, MeshProblem, draw, named_mesh, run_problem, shard_positions
from tests.support.truth.problems import draw as draw_alone
from tests.support.truth.seeds import batches_by_ranks, seeds

EXACT = {"rtol": 1e-9, "atol": 1e-9}
"""Tolerances in float64: sums of at most a few hundred terms of size 1."""


def bias_of(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + 7), dtype=torch.float64)


def dense_bias(bias: Tensor, queries: Tensor, keys: Tensor) -> Tensor:
    """The bias of each pair of query and key, as it is written."""
    distance = queries[:, None] - keys
    near = (distance >= 0) & (distance < bias.shape[-1])
    index = distance.clamp(0, bias.shape[-1] - 1).expand(*bias.shape[:2], -1, -1)
    return bias.gather(-1, index).masked_fill(~near, 0.0)


def truth(
    tensors: list[Tensor], bias: Tensor, places: tuple[Tensor, Tensor], visible: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Return dense attention as (out, lse). A key's unit vector gives the bias of each query."""
    q, k, v, *sinks = tensors
    units = torch.eye(k.shape[2], dtype=q.dtype).expand(*k.shape[:2], -1, -1)
    wide = torch.cat((q * scale, dense_bias(bias, *places)), -1)
    return dense(wide, torch.cat((k, units), -1), v, visible, 1.0, *sinks)[:2]


@pytest.mark.parametrize("seed", seeds(15, 200))
def test_one_device_agrees_with_dense_attention(seed: int) -> None:
    problem = replace(draw_alone(seed, longest=130), dtype=torch.float64, selected=None, softcap=None)
    q, k, v, *sinks = tensors = problem.tensors()
    scale = q.shape[-1] ** -0.5 if problem.scale is None else abs(problem.scale) or 0.3
    bias = bias_of(seed, *q.shape[:3], Random(seed).choice((1, 2, 17, 200))).requires_grad_()
    options = {"mask": problem.mask, "scale": scale, "key_lengths": problem.key_lengths, "distance_bias": bias}
    positions = {"q_positions": problem.q_positions, "k_positions": problem.k_positions}
    queries, keys = (
        torch.arange(n) if p is None else p for n, p in zip(problem.lengths, positions.values(), strict=True)
    )
    visible = problem.mask.visible(queries, keys)
    if problem.key_lengths is not None:
        visible = visible & (keys < problem.key_lengths[:, None, None, None])
    right = truth(tensors, bias, (queries, keys), visible, scale)
    given = (am.attention(q, k, v, sinks=sinks[0], **options),) if sinks else am.attend(q, k, v, **positions, **options)
    given, right = ([x.masked_fill(x == -torch.inf, 0.0) for x in both] for both in (given, right))
    loss, expected = (sum((x * x.cos()).sum() for x in both[: len(given)]) for both in (given, right))
    pairs = [torch.autograd.grad(x, [*tensors, bias], materialize_grads=True) for x in (loss, expected)]
    for some, other in (*zip(given, right, strict=False), *zip(*pairs, strict=True)):
        torch.testing.assert_close(some, other, **EXACT)


def biased(seed: int, ranks: int) -> MeshProblem:
    problem = draw(seed * 100 + ranks, ranks)
    scale = None if problem.scale is None else abs(problem.scale)
    return replace(problem, dtype=torch.float64, latent=False, softcap=None, scale=scale)


def window_of(problem: MeshProblem) -> int:
    return Random(problem.seed).choice((1, 9, 100))


@on_each_rank
def run_each(drawn: list[MeshProblem]) -> list[list[Tensor]]:
    found = []
    for problem in drawn:
        queries, keys = shard_positions(problem, named_mesh(problem.shape, problem.axes))
        sizes = problem.batch, problem.heads[0], problem.lengths[0], window_of(problem)
        bias = bias_of(problem.seed, *sizes)[:, :, queries].requires_grad_()
        found.append([queries, keys, *run_problem(problem, bias)])
    return found


@pytest.mark.parametrize(("ranks", "of"), batches_by_ranks({ranks: SAMPLES[ranks] for ranks in (1, 2, 3, 4)}))
def test_random_problems_on_a_mesh_agree_with_dense_attention(pool: Pool, ranks: int, of: list[int]) -> None:
    drawn = [biased(seed, ranks) for seed in of]
    for problem, results in zip(drawn, zip(*pool.run(ranks, run_each, drawn), strict=True), strict=True):
        q, k, v, dout, *sinks = (x.requires_grad_() for x in problem.whole())
        bias = bias_of(problem.seed, *q.shape[:3], window_of(problem)).requires_grad_()
        places = [torch.arange(n) for n in problem.lengths]
        visible = problem.mask.visible(*places)
        if problem.key_lengths is not None:
            visible = visible & (places[1] < problem.key_lengths[:, None, None, None])
        scale = problem.widths[0] ** -0.5 if problem.scale is None else problem.scale
        out, _ = truth([q, k, v, *sinks], bias, (places[0], places[1]), visible, scale)
        learned = [q, k, v, *sinks, bias]
        right = [out, *torch.autograd.grad(out, learned, dout, materialize_grads=True)]
        for queries, keys, *given in results:
            for number, (some, other) in enumerate(zip(given, right, strict=True)):
                if other.ndim == 4:
                    other = other[:, :, keys if number in (2, 3) else queries]
                    torch.testing.assert_close(some, other, **EXACT, msg=lambda x, p=problem: f"{p}: {x}")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_narrow_numbers_and_graphs_agree_with_float64(dtype: torch.dtype) -> None:
    q, k, v = (x.to(dtype).requires_grad_() for x in torch.randn(3, 1, 2, 40, 8))
    bias = torch.randn(1, 2, 40, 5).to(dtype).requires_grad_()
    places = torch.arange(40)

    def layer(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        return am.attention(q, k, v, distance_bias=bias)

    right, _ = truth(
        [x.double() for x in (q, k, v)], bias.double(), (places, places), places[:, None] >= places, 8**-0.5
    )
    out, compiled = layer(q, k, v, bias), torch.compile(layer, backend="aot_eager", fullgraph=True)(q, k, v, bias)
    close = {"rtol": 0, "atol": 2e-6 if dtype == torch.float32 else 2e-2}
    torch.testing.assert_close(out.double(), right, **close)
    for x in (out, compiled):
        gradient, expected = (
            torch.autograd.grad(x.sum(), bias, retain_graph=True),
            torch.autograd.grad(right.sum(), bias, retain_graph=True),
        )
        torch.testing.assert_close(gradient, expected, **close)


# --- what is refused ---

WRONG = {
    "list": ([1.0], {}, DtypeError),
    "integers": (torch.ones(1, 2, 5, 3).int(), {}, DtypeError),
    "dims": (torch.zeros(2, 3), {}, ShapeError),
    "queries": (torch.zeros(1, 2, 4, 3), {}, ShapeError),
    "no distances": (torch.zeros(1, 2, 5, 0), {}, ShapeError),
    "device": (torch.zeros(1, 2, 5, 3, device="meta"), {}, DeviceError),
    "kernel": (torch.zeros(1, 2, 5, 3), {"kernel": "triton"}, KernelError),
    "softcap": (torch.zeros(1, 2, 5, 3), {"softcap": 3.0}, KernelError),
    "scale": (torch.zeros(1, 2, 5, 3), {"scale": -1.0}, KernelError),
    "scale 0": (torch.zeros(1, 2, 5, 3), {"scale": 0.0}, KernelError),
    "selected": (torch.zeros(1, 2, 5, 3), {"selected": am.Selection(torch.zeros(1, 1, 5, 1).int())}, KernelError),
}


@on_each_rank
def catch_errors_of_the_last_rank() -> list[str]:
    """Return what each wrong bias of the last rank raises, and a right one unlike the others'."""
    mesh = named_mesh(Shape(1, 2, 1), AXES)
    found = []
    q = torch.randn(1, 2, 5, 8)
    where = {"mesh": mesh, "layout": am.Contiguous(), "length": 10}
    for name, (bias, options, kind) in WRONG.items():
        mine, more = (bias, options) if dist.get_rank() == 1 else (torch.zeros(1, 2, 5, 3), {})
        with pytest.raises(InputError) as raised:
            am.attention(q, q, q, distance_bias=mine, **where, **more)
        assert isinstance(raised.value, kind), name
        found.append(str(raised.value))
    for size in (2, 3):
        mine = torch.zeros(1, 2, 5, size) if dist.get_rank() == 1 else None if size == 2 else torch.zeros(1, 2, 5, 4)
        with pytest.raises(InputError) as raised:
            am.attention(q, q, q, distance_bias=mine, **where)
        found.append(str(raised.value))
    learned = torch.zeros(1, 2, 5, 3, requires_grad=dist.get_rank() == 1)  # else one rank alone would go backward
    with pytest.raises(MeshError, match=r"ranks  gradients\n(.*\n)*.*\['distance_bias'\]") as raised:
        am.attention(q, q, q, distance_bias=learned, **where)
    return [*found, str(raised.value)]


def test_a_wrong_bias_of_one_rank_raises_the_same_on_all(pool: Pool) -> None:
    first, second = pool.run(2, catch_errors_of_the_last_rank)
    assert first == second
    assert all("distance_bias" in text for text in first)


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_bias_is_refused_on_one_device(name: str) -> None:
    bias, options, kind = WRONG[name]
    q = torch.randn(1, 2, 5, 8)
    for function in (am.attend, am.attention):
        with pytest.raises(kind, match=r"distance_bias.*Fix: "):
            function(q, q, q, distance_bias=bias, **options)  # type: ignore[operator]
