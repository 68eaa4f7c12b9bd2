"""Compiled transformers on a mesh are those on one device, with gradients, for one number of tokens after another."""

import pytest
import torch
from torch import Tensor, nn

from attnmesh.diffusers import disable, enable
from attnmesh.mesh.shapes import AXES, Shape
from tests.support.models.diffusion import MODELS
from tests.support.ranks.pool import Pool, on_each_rank
from tests.support.truth.mesh_problems import named_mesh
from tests.support.truth.tolerances import FLOAT32_SUMS

ROWS = (4, 5)


def gradient(model: nn.Module, out: Tensor) -> Tensor:
    (found,) = torch.autograd.grad(out.square().sum(), [next(model.parameters())])
    return found


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max())


@on_each_rank
def measure_compiled_errors(name: str, how: str) -> list[tuple[float, float]]:
    """Errors of output and of a gradient for each number of rows."""
    torch._dynamo.reset()
    model = MODELS[name].model()
    found = []
    on_mesh = MODELS[name].model()
    enable(on_mesh, named_mesh(Shape(1, 1, 2), AXES), "bulk")
    run = on_mesh
    if how == "blocks":
        on_mesh.compile_repeated_blocks(fullgraph=True, backend="aot_eager")
    else:
        backend = "eager" if how == "traced" else "aot_eager"
        run = torch.compile(on_mesh, backend=backend, fullgraph=how != "graphs")
    for rows in ROWS[: 1 if how == "traced" else None]:
        given = MODELS[name].given(rows)
        expected, out = (each(**given, return_dict=False)[0] for each in (model, run))
        whole, part = gradient(model, expected), gradient(on_mesh, out)
        torch.distributed.all_reduce(part)
        found.append((relative(out.detach(), expected.detach()), relative(part, whole)))
    disable(on_mesh)
    torch._dynamo.reset()
    return found


@pytest.mark.parametrize(
    ("name", "how"),
    [
        pytest.param("flux", "traced", marks=pytest.mark.long),
        pytest.param("flux", "one graph", marks=pytest.mark.long),
        pytest.param("wan", "blocks", marks=pytest.mark.long),
        pytest.param("qwen-image", "graphs", marks=pytest.mark.long),
    ],
)
def test_a_compiled_model_is_that_of_one_device(pool: Pool, name: str, how: str) -> None:
    for rank in pool.run(2, measure_compiled_errors, name, how):
        for output, gradient in rank:
            assert output < FLOAT32_SUMS
            assert gradient < 1e-4  # a sum over all tokens and ranks
