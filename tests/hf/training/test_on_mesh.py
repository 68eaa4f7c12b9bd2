"""What `on_mesh` takes: meshes that cover the ranks, trainers, models that are compiled in part."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import PreTrainedModel, Trainer

import attnmesh.hf as hf
from attnmesh import errors
from attnmesh.mesh.shapes import AXES, Shape
from tests.refusals.cases.trainers import nothing, train
from tests.refusals.refusal import Place
from tests.support.ranks.pool import Pool, on_each_rank
from tests.support.truth.mesh_problems import named_mesh


@on_each_rank
def train_on_the_first_mesh_of_two() -> None:
    mesh: Any = named_mesh(Shape(1, 1, 2), AXES)  # all ranks take part in making it
    train(Place(mesh if dist.get_rank() < 2 else None, Path()))


def test_meshes_that_leave_ranks_out_are_refused_alike(pool: Pool) -> None:
    for error in pool.ask(4, train_on_the_first_mesh_of_two):
        assert isinstance(error, errors.MeshError)
        assert str(error).startswith("on_mesh mesh: expected meshes of one size that cover the 4 ranks, given")


def compile_the_half(model: PreTrainedModel) -> None:
    model.model = torch.compile(model.model, backend="eager")


@on_each_rank
def compute_loss_of(change: str) -> float:
    changes = {"half compiled": compile_the_half, "plain": nothing}
    return round(train(Place(named_mesh(Shape(1, 1, 2), AXES), Path()), change=changes[change]), 6)


@pytest.mark.long
def test_a_half_compiled_model_trains_like_a_plain_one(pool: Pool) -> None:
    compiled, plain = (set(pool.run(2, compute_loss_of, name)) for name in ("half compiled", "plain"))
    assert [*compiled] == pytest.approx([*plain], abs=2e-6)  # two roundings to six digits, beside those of sums


def test_only_trainers_are_put_on_a_mesh() -> None:
    for kind in (torch.nn.Linear, hf.on_mesh(Trainer, None), "Trainer"):
        with pytest.raises(errors.ArgumentError, match="on_mesh trainer_class: expected a "):
            hf.on_mesh(kind, None)  # type: ignore[arg-type]
    with pytest.raises(errors.ArgumentError, match=r"on_mesh shape: expected None or .auto., given .1x2x2."):
        hf.on_mesh(Trainer, None, shape="1x2x2")
    with pytest.raises(errors.MeshError):
        hf.on_mesh(Trainer, "cp", shape="auto")  # type: ignore[arg-type]
    with pytest.raises(errors.LayoutError, match='on_mesh layout: expected "auto", Contiguous'):
        hf.on_mesh(Trainer, None, "best")
    assert "create_accelerator_and_postprocess" in vars(Trainer)  # its own attributes are as they were
