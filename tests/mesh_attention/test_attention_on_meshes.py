"""Attention on meshes of ranks, forward and gradients, against float64; and what else is asked of it."""

import re
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import scaled_dot_product_attention

import attnmesh as am
from attnmesh import errors
from attnmesh.comm import p2p
from attnmesh.comm.transport import Transport
from attnmesh.mesh.shapes import AXES, Shape, elements
from attnmesh.runtime.counters import ReceivedTraffic, count_traffic
from tests.support.ranks.pool import Pool, on_each_rank
from tests.support.truth.mesh_problems import SAMPLES, MeshProblem, check, draw, named_mesh, run_problem, traits
from tests.support.truth.problems import numbers
from tests.support.truth.seeds import batches_by_ranks, rotated
from tests.support.truth.tolerances import FLOAT32_SUMS, assert_near


@on_each_rank
def attend_to_shards(q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> list[Tensor]:
    """Return the output and the gradients of q, k and v, of all tokens."""
    two_ranks = named_mesh(Shape(1, 2, 1), AXES)  # along queries
    mine = [am.shard(x, two_ranks, layout=am.Zigzag()).requires_grad_() for x in (q, k, v)]
    out = am.attention(*mine, mesh=two_ranks, layout=am.Zigzag(), mask=am.Causal())
    gradients = torch.autograd.grad(out, mine, am.shard(dout, two_ranks, layout=am.Zigzag()))
    return [am.unshard(x.detach(), two_ranks, layout=am.Zigzag()) for x in (out, *gradients)]


@pytest.mark.quick
def test_causal_attention_on_two_ranks_is_that_of_one_device(pool: Pool) -> None:
    q, k, v, dout = numbers(4, 1, 2, 12, 8)
    exact = [x.double().requires_grad_() for x in (q, k, v)]
    out = scaled_dot_product_attention(*exact, is_causal=True)
    expected = [out.detach(), *torch.autograd.grad(out, exact, dout.double())]
    for found in pool.run(2, attend_to_shards, q, k, v, dout):
        for x, y in zip(found, expected, strict=True):
            assert_near(x.double(), y, FLOAT32_SUMS)


# --- random problems against float64 ---


def cases() -> list[Any]:
    """Batches of problems, of which samples of few ranks are quick."""
    return [
        each._replace(marks=[*each.marks, pytest.mark.quick])
        if not each.marks and each.values[0] in (1, 2, 4)
        else each
        for each in batches_by_ranks(SAMPLES)
    ]


SHAPES = [Shape(1, 4, 1), Shape(1, 1, 4), Shape(4, 1, 1), Shape(1, 2, 2), Shape(2, 1, 2), Shape(2, 2, 1)]


@on_each_rank
def run_each(problems: list[MeshProblem]) -> list[list[Tensor]]:
    return [run_problem(problem) for problem in problems]


@pytest.mark.parametrize(("ranks", "seeds"), cases())
def test_random_problems_on_a_mesh_agree_with_float64(pool: Pool, ranks: int, seeds: Sequence[int]) -> None:
    problems = [draw(seed * 100 + ranks, ranks) for seed in seeds]
    for problem, results in zip(problems, zip(*pool.run(ranks, run_each, problems), strict=True), strict=True):
        check(problem, list(results))


@on_each_rank
def run_in_turn(problems: list[MeshProblem]) -> tuple[list[list[Tensor]], int]:
    """Run problems with all messages sent by gloo, as between hosts, and taken for long ones. Count those in turn."""
    turns, sends_in_turn = list[bool](), Transport.sends_in_turn

    def counted(*message: Any) -> bool:
        turns.append(sends_in_turn(*message))
        return turns[-1]

    with (
        mock.patch.object(p2p, "LONG_MESSAGE_BYTES", 0),
        mock.patch.object(p2p, "agreed_transport", Transport),
        mock.patch.object(Transport, "sends_in_turn", counted),
    ):
        return run_each(problems), sum(turns)


@pytest.mark.parametrize(("ranks", "few"), [(4, range(10)), pytest.param(8, range(40), marks=pytest.mark.long)])
def test_messages_may_be_sent_in_turn(pool: Pool, ranks: int, few: range) -> None:
    problems = [problem for seed in few if max((problem := draw(seed * 100 + ranks, ranks)).shape) > 3]
    results, turns = zip(*pool.run(ranks, run_in_turn, problems), strict=True)
    assert all(turns)
    for problem, found in zip(problems, zip(*results, strict=True), strict=True):
        check(problem, list(found))


@pytest.mark.quick
@pytest.mark.parametrize("ranks", SAMPLES)
def test_the_sample_has_all_traits(ranks: int) -> None:
    sample, many = SAMPLES[ranks]
    some, every = (
        {x for seed in seeds for x in traits(draw(seed * 100 + ranks, ranks))} for seeds in (sample, range(many))
    )
    assert some == every


def mesh_of(shape: Shape):  # type: ignore[no-untyped-def]
    return named_mesh(shape, AXES)


PAIR = Shape(1, 2, 1)


# --- what travels ---


@on_each_rank
def count_traffic_of(
    shape: Shape, exchange: str, n: int, heads: tuple[int, int]
) -> tuple[ReceivedTraffic, ReceivedTraffic]:
    mesh, ranks = mesh_of(shape), dist.get_world_size()
    q = torch.randn(1, heads[0], n, 8, requires_grad=True)
    k, v = (torch.randn(1, heads[1], n, 8, requires_grad=True) for _ in range(2))
    with count_traffic() as forward:
        out = am.attention(q, k, v, mesh=mesh, layout=am.Zigzag(), mask=am.Full(), exchange=exchange, length=n * ranks)
    with count_traffic() as backward:
        out.sum().backward()
    return forward, backward


@pytest.mark.parametrize(
    ("shape", "exchange"),
    rotated(
        [*SHAPES, Shape(1, 4, 2), Shape(2, 2, 2), Shape(1, 8, 1), Shape(1, 3, 2)],
        ["bulk", "pipelined", "ring"],
        every=2,
    ),
)
def test_counted_elements_equal_the_formula(pool: Pool, shape: Shape, exchange: str) -> None:
    n, (hq, hk), d = 12, (8, 4), 8
    dq, dk = hq * d, hk * d
    swapped = (shape.heads - 1) * n * (2 * dq + 2 * dk) // shape.heads
    rows, columns = shape.keys - 1, shape.queries - 1
    forward = n * (2 * rows * dq + 2 * columns * dk) + swapped
    backward = n * (3 * rows * dq + 4 * columns * dk) + swapped
    for there, back in pool.run(shape.ranks, count_traffic_of, shape, exchange, n, (hq, hk)):
        assert (there.vectors, back.vectors) == (forward, backward)
        scalars = n * rows * hq + (shape.heads - 1) * n * hq // shape.heads
        assert (there.scalars, back.scalars) == (scalars, 2 * scalars)  # lse; lse and delta
    assert forward + backward == n * d * sum(elements(shape, hq, hk))


# --- meshes ---


@on_each_rank
def check_inside_a_bigger_mesh() -> None:
    whole = init_device_mesh("cpu", (2, 1, 2, 2), mesh_dim_names=("data", *AXES))
    torch.manual_seed(whole.get_local_rank("data"))  # each replica has a batch of its own
    q, k, v = torch.randn(3, 1, 2, 24, 8).unbind()
    expected = am.attention(q, k, v, mesh=None)
    for mesh in (whole, whole[AXES]):
        mine = (am.shard(x, mesh, layout=am.Zigzag()) for x in (q, k, v))
        out = am.unshard(am.attention(*mine, mesh=mesh, layout=am.Zigzag()), mesh, layout=am.Zigzag())
        assert_near(out, expected, FLOAT32_SUMS)


def test_a_part_of_a_bigger_mesh_attends_alone(pool: Pool) -> None:
    pool.run(8, check_inside_a_bigger_mesh)


# --- composition ---


@on_each_rank
def check_compiled_layer(shape: Shape, exchange: str, sizes: Sequence[int]) -> None:
    mesh = mesh_of(shape)

    def layer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return am.attention(q * 2, k, v, mesh=mesh, layout=am.Zigzag(), exchange=exchange).sin()

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for heads in sizes:  # a second graph has symbols for sizes that differ
        tensors = [torch.randn(1, h, 10, 8, requires_grad=True) for h in (2 * heads, heads, heads)]
        outs = [function(*tensors) for function in (layer, compiled)]
        eager, graph = [(out, *torch.autograd.grad(out.sum(), tensors)) for out in outs]
        for a, b in zip(eager, graph, strict=True):
            assert_near(b, a)


COMPILED = [
    (PAIR, "ring", (5, 3)),
    *((shape, "pipelined", (5,)) for shape in (Shape(2, 1, 1), Shape(1, 1, 2))),
    *(pytest.param(shape, "pipelined", (5, 3), marks=pytest.mark.long) for shape in (Shape(2, 1, 1), Shape(1, 1, 2))),
]


@pytest.mark.parametrize(("shape", "exchange", "sizes"), COMPILED)
def test_a_layer_on_a_mesh_compiles_to_one_graph(pool: Pool, shape: Shape, exchange: str, sizes: Sequence[int]) -> None:
    pool.run(2, check_compiled_layer, shape, exchange, sizes)


@on_each_rank
def check_compiled_masks() -> None:
    mesh = mesh_of(PAIR)
    x = torch.randn(1, 2, 10, 8)

    def layer(mask: am.Mask) -> Tensor:
        return am.attention(x, x, x, mesh=mesh, layout=am.Zigzag(), mask=mask)

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    packed = (am.Causal() & am.Documents(lengths) for lengths in ((5, 15), (7, 13)))
    for mask in (am.Causal(), am.Window(3), am.Window(5), *packed):
        assert_near(compiled(mask), layer(mask))


def test_a_compiled_layer_takes_one_mask_after_another(pool: Pool) -> None:
    """PyTorch traces the second value of a number as a symbol, and a mask takes none."""
    pool.run(2, check_compiled_masks)


@on_each_rank
def attend_compiled_over_uneven_shards() -> list[str]:
    mesh, where = mesh_of(PAIR), {"layout": am.Zigzag()}
    whole = torch.randn(3, 1, 2, 103, 8, generator=torch.Generator().manual_seed(0))
    shards = [am.shard(x, mesh, **where) for x in whole]

    def layer(length: int | None) -> Tensor:
        return am.attention(*shards, mesh=mesh, length=length, **where)

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    said = []
    broken = mock.patch(
        "attnmesh.mesh_attention.mesh_runs._run_spec", side_effect=errors.RankFailure([1], "gathering", "", "gone")
    )
    for length in (103, 109, None):
        with broken if length is None else nullcontext():
            try:
                said.append(f"{float((compiled(length) - layer(103)).abs().max())}")
            except (errors.ShapeError, errors.RankFailure) as error:
                said.append(str(error))
    return said


def test_in_a_graph_of_uneven_shards_length_is_enough_and_errors_name_it(pool: Pool) -> None:
    for rank, (difference, longer, unsaid) in enumerate(pool.run(2, attend_compiled_over_uneven_shards)):
        assert float(difference) == 0
        assert re.search(rf"a shard of {55 - rank} queries of 109 .* Fix: .* or correct length and key_length", longer)
        assert unsaid.endswith("gone; or shards are uneven: then pass length= to attention in torch.compile")


@on_each_rank
def check_composed() -> None:
    mesh = mesh_of(Shape(1, 2, 1))
    tensors = [torch.randn(1, 2, 10, 8, requires_grad=True) for _ in range(3)]

    def layer(*x: Tensor) -> Tensor:
        where = {"mesh": mesh, "layout": am.Zigzag()}
        return am.attention(*x, **where) + am.attention(*x, **where, mask=am.Window(2))

    plain = torch.autograd.grad(layer(*tensors).sum(), tensors)
    again = torch.utils.checkpoint.checkpoint(layer, *tensors, use_reentrant=False)
    recomputed = torch.autograd.grad(again.sum(), tensors)
    for _ in range(2):
        layer(*tensors).sum().backward()
    for p, again, x in zip(plain, recomputed, tensors, strict=True):
        assert_near(again, p)
        torch.testing.assert_close(x.grad, 2 * p, rtol=1e-5, atol=1e-8)  # as `torch.allclose` by default


def test_calls_in_flight_checkpointing_and_accumulation_compose(pool: Pool) -> None:
    pool.run(2, check_composed)


@on_each_rank
def catch_errors_of_second_gradients(shape: Shape) -> list[str]:
    q, k, v = (torch.randn(1, 2, 8, 4, requires_grad=True) for _ in range(3))
    weights = torch.randn(1, 2, 8, 4, requires_grad=True)
    out = am.attention(q, k, v, mesh=mesh_of(shape), layout=am.Zigzag())
    (gradient,) = torch.autograd.grad((out * weights).sum(), q, create_graph=True)
    texts = []
    for x in (k, weights):
        try:
            torch.autograd.grad(gradient.sum(), x, retain_graph=True)
        except ValueError as error:
            texts.append(str(error))
    return texts


@pytest.mark.parametrize("shape", [Shape(1, 2, 1), Shape(2, 1, 1)])
def test_second_gradients_are_refused(pool: Pool, shape: Shape) -> None:
    for by_keys, by_gradient_of_output in pool.run(2, catch_errors_of_second_gradients, shape):
        assert "given a gradient of a gradient. Fix: differentiate energy" in by_keys
        assert by_gradient_of_output == by_keys
