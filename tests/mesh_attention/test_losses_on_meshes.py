"""Training on a mesh is training on one device: the same losses, step for step, and gradients that are as exact."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache, partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

import attnmesh as am
from attnmesh.core.layout import Layout
from attnmesh.mesh.shapes import AXES, Shape
from tests.support.models.tiny_decoder import Decoder, sequences, summed_loss
from tests.support.ranks.pool import SIZES, Pool, on_each_rank
from tests.support.truth.dense import truth
from tests.support.truth.mesh_problems import MeshProblem, named_mesh
from tests.support.truth.mesh_problems import run_problem as run_problem
from tests.support.truth.seeds import rotated

LENGTH = 47
"""A prime: no number of ranks divides it, so shards are uneven."""

BATCH = 2
STEPS = 30
EXCHANGE_MODES = ("bulk", "pipelined", "ring")
LAYOUTS = (am.Zigzag(), am.Striped(), am.Contiguous())

ATOL = 1e-5
"""Losses begin at 4.2, where float32 numbers lie 5e-7 apart: 20 of those, for sums taken in other orders.

What rounding does to the parameters in 30 steps comes on top. The worst loss was off by 3e-6.
"""

Place = tuple[DeviceMesh | None, str, Layout]
"""Where and how a step is made."""

ONE_DEVICE: Place = (None, "auto", am.Zigzag())


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """One device is a rank like the others; on a busy machine more threads take longer over so little."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


# --- the same losses ---


def heads(ranks: int) -> tuple[int, int]:
    """Query heads and key heads: those that every heads axis divides."""
    return 2 * ranks, ranks


def shapes(ranks: int) -> list[Shape]:
    sizes = range(1, ranks + 1)
    return [s for h in sizes for r in sizes for c in sizes if (s := Shape(h, r, c)).ranks == ranks]


def tour(ranks: int, exchanges: Sequence[str]) -> list[Place]:
    """Another shape at every step and another layout at every round: 30 steps see each of 10 shapes with each of 3.

    The exchange changes with the shape and with the layout: each shape is seen with each exchange too.
    """
    every = [
        (named_mesh(shape, AXES), exchanges[(number + turn) % len(exchanges)], layout)
        for turn, layout in enumerate(LAYOUTS)
        for number, shape in enumerate(shapes(ranks))
    ]
    return [every[step % len(every)] for step in range(STEPS)]


def losses(places: list[Place], head_counts: tuple[int, int]) -> list[float]:
    """Train a model, a step at each place, and say the loss of all tokens at every step."""
    model = Decoder(*head_counts)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    said = []
    for step, place in enumerate(places):
        loss = loss_at(place, model, *sequences(step, BATCH, LENGTH)) / (BATCH * LENGTH)
        optimizer.zero_grad()
        loss.backward()
        said.append(added_up(loss, model) if place[0] is not None else float(loss.detach()))
        optimizer.step()
    return said


def loss_at(place: Place, model: nn.Module, tokens: Tensor, labels: Tensor) -> Tensor:
    """The summed loss of this rank's tokens: labels were shifted while the sequence was whole."""
    mesh, exchange, layout = place
    tokens, labels = (am.shard(x, mesh, layout=layout, dim=1) for x in (tokens, labels))
    positions = am.shard(torch.arange(LENGTH), mesh, layout=layout, dim=0)
    attend = partial(am.attention, mesh=mesh, exchange=exchange, layout=layout)
    return summed_loss(model(tokens, positions, attend), labels)


def added_up(loss: Tensor, model: nn.Module) -> float:
    """The loss of all ranks, and their gradients put in place: one message for everything."""
    gradients = [p.grad for p in model.parameters()]
    total = torch.cat([loss.detach().view(1), *(x.flatten() for x in gradients)])
    dist.all_reduce(total)
    for x, part in zip(gradients, total[1:].split([x.numel() for x in gradients]), strict=True):
        x.copy_(part.view_as(x))
    return float(total[0])


@on_each_rank
def train_on_tour(ranks: int, exchanges: Sequence[str]) -> list[float]:
    return losses(tour(ranks, exchanges), heads(ranks))


@pytest.mark.parametrize(
    ("ranks", "exchanges"),
    [
        *((ranks, EXCHANGE_MODES) for ranks in (1, 2)),
        pytest.param(4, EXCHANGE_MODES, marks=pytest.mark.long),
        *(pytest.param(ranks, (each,), marks=pytest.mark.long) for ranks in SIZES for each in EXCHANGE_MODES),
    ],
)
def test_losses_are_those_of_one_device(pool: Pool, ranks: int, exchanges: Sequence[str]) -> None:
    """All exchanges in one training; each in one of its own takes three times as long."""
    expected = torch.tensor(losses([ONE_DEVICE] * STEPS, heads(ranks)))
    assert expected[-5:].mean() < expected[:5].mean() / 2, "it learns, or equal losses would say little"
    for given in pool.run(ranks, train_on_tour, ranks, exchanges):
        errors = (torch.tensor(given) - expected).abs()
        assert errors.max() <= ATOL, f"{errors.max():.1e} at step {int(errors.argmax())}"


@on_each_rank
def train_on(shape: Shape, exchange: str) -> list[float]:
    return losses([(named_mesh(shape, AXES), exchange, am.Zigzag())] * STEPS, heads(shape.ranks))


@pytest.mark.long
@pytest.mark.parametrize("exchange", EXCHANGE_MODES)
@pytest.mark.parametrize("shape", [shape for ranks in SIZES for shape in shapes(ranks)])
def test_losses_on_every_mesh_are_those_of_one_device(pool: Pool, shape: Shape, exchange: str) -> None:
    expected = torch.tensor(losses([ONE_DEVICE] * STEPS, heads(shape.ranks)))
    for given in pool.run(shape.ranks, train_on, shape, exchange):
        assert (torch.tensor(given) - expected).abs().max() <= ATOL


# --- errors in bfloat16 ---


BFLOAT16 = MeshProblem(
    seed=0,
    shape=Shape(1, 1, 1),
    exchange="bulk",
    dtype=torch.bfloat16,
    mask=am.Causal(),
    layouts=(am.Zigzag(), am.Zigzag()),
    lengths=(512, 512),
    heads=(4, 4),
    widths=(32, 32),
    batch=1,
    sinks=False,
    scale=None,
    say_length=False,
    axes=AXES,
)
GROWTH = 1.25
"""What several ranks add is that each part of a gradient is rounded before the parts are summed in float32."""

MESHES = [Shape(*shape) for shape in ((1, 2, 1), (1, 4, 1), (1, 2, 2), (1, 8, 1), (1, 4, 2))]


@cache
def exact_values() -> dict[str, Tensor]:
    """Return the output and the gradients in float64."""
    q, k, v, dout = BFLOAT16.whole()
    positions = torch.arange(512)
    return truth([q, k, v], BFLOAT16.mask.visible(positions, positions), 32**-0.5, dout).values


def errors_of(pool: Pool, problem: MeshProblem) -> dict[str, float]:
    """The size of each gradient's error beside the gradient's own size."""
    expected = exact_values()
    ranks = problem.shape.ranks
    order = torch.cat([am.Zigzag().positions(512, ranks, rank) for rank in range(ranks)])
    _, *gradients = (torch.cat(parts, dim=2) for parts in zip(*pool.run(ranks, run_problem, problem), strict=True))
    names = ("dq", "dk", "dv")
    pairs = [(x.double(), expected[name][:, :, order]) for name, x in zip(names, gradients, strict=True)]
    return {name: float((x - y).norm() / y.norm()) for name, (x, y) in zip(names, pairs, strict=True)}


@pytest.fixture(scope="module")
def alone(pool: Pool) -> dict[str, float]:
    """The errors of one device."""
    return errors_of(pool, BFLOAT16)


@pytest.mark.parametrize(("shape", "exchange"), rotated(MESHES, ("bulk", "ring"), every=2))
def test_errors_in_bfloat16_do_not_grow_with_the_ranks(
    pool: Pool, alone: dict[str, float], shape: Shape, exchange: str
) -> None:
    errors = errors_of(pool, replace(BFLOAT16, shape=shape, exchange=exchange))
    print("\nrelative error", *alone)
    for name, found in {"one device": alone, f"{' x '.join(map(str, shape))} {exchange}": errors}.items():
        print(f"{name:14}", *(f"{x:.6f}" for x in found.values()))
    assert all(errors[name] <= GROWTH * alone[name] for name in alone), (errors, alone)


# --- together with FSDP ---


@on_each_rank
def train_with_fsdp(axes: tuple[str, ...], steps: int) -> list[float]:
    """Two replicas hold the parameters together, each with a batch of its own on a mesh of its own."""
    mesh = init_device_mesh("cpu", (2,) * (1 + len(axes)), mesh_dim_names=("data", *axes))
    model = Decoder(8, 4)
    for part in (*model.layers, model):
        fully_shard(part, mesh=mesh["data"])
    assert isinstance(model, FSDPModule)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    said = []
    for step in range(steps):
        batch = (x.chunk(2)[mesh.get_local_rank("data")] for x in sequences(step, 2 * BATCH, LENGTH))
        loss = loss_at((mesh, "auto", am.Zigzag()), model, *batch) / (BATCH * LENGTH)
        optimizer.zero_grad()
        loss.backward()  # FSDP takes the mean over the replicas
        for axis in axes:
            for p in model.parameters():
                dist.all_reduce(p.grad.to_local(), group=mesh.get_group(axis))
        dist.all_reduce(total := loss.detach().clone())
        said.append(float(total) / 2)
        optimizer.step()
    return said


@pytest.mark.parametrize("axes", [("queries",), pytest.param(("queries", "keys"), marks=pytest.mark.long)])
def test_losses_are_the_same_with_parameters_sharded_by_fsdp(pool: Pool, axes: tuple[str, ...]) -> None:
    model = Decoder(8, 4)
    expected = []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(3):
        loss = loss_at(ONE_DEVICE, model, *sequences(step, 2 * BATCH, LENGTH)) / (2 * BATCH * LENGTH)
        optimizer.zero_grad()
        loss.backward()
        expected.append(float(loss.detach()))
        optimizer.step()
    for given in pool.run(2 ** (1 + len(axes)), train_with_fsdp, axes, 3):
        assert given == pytest.approx(expected, rel=0, abs=ATOL)
