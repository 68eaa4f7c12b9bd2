"""Transformers of diffusers on a mesh are those on one device: outputs, gradients, and steps of a pipeline."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from attnmesh.core.layout import Split
from attnmesh.core.mask import Full
from attnmesh.cost.traffic import planned_traffic
from attnmesh.diffusers import disable, enable
from attnmesh.diffusers.tokens import run_sizes
from attnmesh.mesh.schedule import EXCHANGE_MODES, Problem
from attnmesh.mesh.shapes import AXES, Shape
from attnmesh.runtime.counters import count_traffic
from tests.support.models.diffusion import MODELS, PIPELINES, Inputs, pipeline_steps
from tests.support.ranks.pool import Pool, on_each_rank
from tests.support.truth.mesh_problems import named_mesh
from tests.support.truth.seeds import rotated
from tests.support.truth.tolerances import FLOAT32_SUMS, worst

OUTPUT = 1e-13
"""Outputs are computed in float64, and differ by the order of sums."""

GRADIENT = 2e-6
"""Some models normalise in float32, also in their backward pass: 2^-24 of the terms of sums."""

HEADS = 4
"""Heads of the tiny models."""

Case = tuple[str, Shape, str, int, int]
"""Model, mesh, exchange, rows of pixels and batch."""


def cases(name: str, ranks: int) -> Iterator[Case]:
    """Every mesh of so many ranks, each with the next exchange, number of rows and batch."""
    names = ("auto", *EXCHANGE_MODES)
    sizes = [(4, 1), (5, 2), (1, 1), (3, 2)]  # 1 row: some ranks have few tokens, or none
    shapes = [Shape(h, r, c) for h in (1, 2, 4) for r in range(1, 9) for c in range(1, 9) if h * r * c == ranks]
    for turn, shape in enumerate(shapes):
        yield name, shape, names[(turn + len(name)) % 4], *sizes[(turn + ranks) % 4]


def run(model: nn.Module, given: Inputs) -> tuple[Tensor, list[Tensor | None]]:
    """Output and gradients of a forward pass, the same on every rank."""
    out = model(**given, return_dict=False)
    whole = torch.cat([x.flatten() for x in out])
    torch.manual_seed(7)
    parameters = list(model.parameters())
    return whole.detach(), list(torch.autograd.grad(whole, parameters, torch.randn_like(whole), allow_unused=True))


@on_each_rank
def measure_deviations(cases: list[Case]) -> list[tuple[Case, float, float]]:
    """Relative deviations of outputs and of summed gradients, on one rank."""
    found = []
    for case in cases:
        name, shape, exchange, rows, batch = case
        model, given = MODELS[name].model(torch.float64), MODELS[name].given(rows, batch, torch.float64)
        expected, gradients = run(model, given)
        enable(model, named_mesh(shape, AXES), exchange)
        out, parts = run(model, given)
        disable(model)
        smallest = 1e-3 * worst(float(x.abs().max()) for x in gradients if x is not None)
        errors = []
        for whole, part in zip(gradients, parts, strict=True):
            if whole is not None:
                part = torch.zeros_like(whole) if part is None else part
                dist.all_reduce(part)
                errors.append(float((whole - part).abs().max() / whole.abs().max().clamp(min=smallest)))
        found.append((case, float((out - expected).abs().max() / expected.abs().max()), worst(errors)))
        with torch.no_grad():
            again = torch.cat([x.flatten() for x in model(**given, return_dict=False)])
        assert torch.equal(again, expected), "the model is not as it was"
    return found


SAMPLED = [*((2 + number % 2, name) for number, name in enumerate(MODELS) if number % 3 == 0)]
"""Worlds of `make test`: one of three models, each in one of the small ones, with every second case."""


@pytest.mark.parametrize(
    ("ranks", "name"),
    [
        pytest.param(ranks, name, marks=() if (ranks, name) in SAMPLED else pytest.mark.long)
        for ranks in (2, 3, 4)
        for name in MODELS
    ],
)
def test_outputs_and_gradients_are_those_of_one_device(pool: Pool, ranks: int, name: str) -> None:
    every = list(cases(name, ranks))
    few = every[::2] if (ranks, name) in SAMPLED else every
    for rank in pool.run(ranks, measure_deviations, few):
        for case, output, gradient in rank:
            assert output < OUTPUT, case
            assert gradient < GRADIENT, case


@on_each_rank
def run_pipeline_steps(name: str, shape: Shape) -> tuple[Tensor, Tensor]:
    model = MODELS[name].model()
    expected = pipeline_steps(name, model)
    enable(model, named_mesh(shape, AXES))
    return pipeline_steps(name, model), expected


MESHES = (Shape(1, 2, 2), Shape(1, 3, 1), Shape(2, 1, 2))


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        pytest.param(name, shape, marks=() if shape == MESHES[number % 3] else pytest.mark.long)
        for number, name in enumerate(PIPELINES)
        for shape in MESHES
    ],
)
def test_two_steps_of_the_pipeline_are_those_of_one_device(pool: Pool, name: str, shape: Shape) -> None:
    for out, expected in pool.run(shape.ranks, run_pipeline_steps, name, shape):
        torch.testing.assert_close(out, expected, rtol=FLOAT32_SUMS, atol=FLOAT32_SUMS)


@on_each_rank
def count_received_bytes(shape: Shape, exchange: str, rows: int) -> int:
    """Bytes that a forward pass receives on this rank."""
    model, given = MODELS["wan"].model(), MODELS["wan"].given(rows)
    enable(model, named_mesh(shape, AXES), exchange)
    with torch.no_grad(), count_traffic() as received:
        model(**given)
    return received.bytes


@pytest.mark.parametrize(
    ("shape", "exchange", "rows"),
    rotated([Shape(1, 2, 2), Shape(1, 3, 1), Shape(1, 1, 4)], [*EXCHANGE_MODES], [4, 5], every=2),
)
def test_ranks_receive_what_the_plan_says(pool: Pool, shape: Shape, exchange: str, rows: int) -> None:
    tokens, layers, width = 3 * rows * 3, 2, HEADS * 12
    layout = Split(run_sizes(tokens, shape.ranks))
    moves = planned_traffic(Problem(Full(), shape, layout, layout, tokens, tokens), shape)
    queries, keys = moves.queries.inside.total, moves.keys.inside.total
    attention = queries * (2 * width + HEADS) + keys * 2 * width  # queries come back as out and lse
    gathered = tokens * (shape.ranks - 1) * 16  # the output, 4 channels of 2 x 2 pixels a token
    assert sum(pool.run(shape.ranks, count_received_bytes, shape, exchange, rows)) == 4 * (
        layers * attention + gathered
    )


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["wan", "flux", "qwen-image"])
def test_a_model_on_one_gpu_is_that_of_diffusers(name: str) -> None:
    model, given = MODELS[name].model().cuda(), MODELS[name].given(5)
    given = {key: x.cuda() if isinstance(x, Tensor) else x for key, x in given.items()}
    expected = model(**given, return_dict=False)[0]
    enable(model, None)
    torch.testing.assert_close(model(**given, return_dict=False)[0], expected, rtol=1e-3, atol=1e-3)  # TF32 products
    disable(model)
