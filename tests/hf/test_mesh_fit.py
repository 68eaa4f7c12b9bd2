"""A heads axis that is too long for a model is refused when the model is put on the mesh, by all ranks alike."""

from collections.abc import Callable
from typing import Any

from transformers import Trainer, TrainingArguments

import attnmesh.hf as hf
from attnmesh import errors
from attnmesh.hf.models import key_heads
from attnmesh.mesh.shapes import AXES, Shape
from tests.support import families
from tests.support.mesh_problems import named_mesh
from tests.support.models.tiny_models import tiny_config
from tests.support.models.variants import VARIANTS
from tests.support.pool import Pool, on_each_rank
from tests.support.trainers import launched, settings

GIVEN = "given 2 key heads and a heads axis of 3. Fix:"

TRAINED = f"ShapeError: on_mesh mesh: expected at least one key head a rank of the heads axis, {GIVEN} shorten it to at"

CACHED = f"ShapeError: ShardedCache mesh: expected key heads that the heads axis divides, {GIVEN} give its ranks to the"


@on_each_rank
def refusals() -> list[str]:
    """Return the errors of a trainer, a prepared model, a cache and an engine that are made and not used."""
    from accelerate import Accelerator

    model, mesh = families.model("llama", "attnmesh"), named_mesh(Shape(3, 1, 1), AXES)
    makers: list[Callable[[], Any]] = [
        lambda: hf.on_mesh(Trainer, mesh)(model=model, args=settings(TrainingArguments, "/nonexistent")),
        lambda: hf.prepare(Accelerator(cpu=True), model, mesh),
        lambda: hf.ShardedCache(model.config, mesh),
        lambda: hf.Engine(model, mesh),
    ]
    found = []
    with launched():
        for make in makers:
            try:
                make()
            except errors.InputError as error:
                found.append(f"{type(error).__name__}: {error}")
    return found


def test_a_heads_axis_that_is_too_long_is_refused_before_the_first_call(pool: Pool) -> None:
    for said in pool.run(3, refusals):
        assert [text.startswith(TRAINED) for text in said] == [True, True, False, False]
        assert [text.startswith(CACHED) for text in said] == [False, False, True, True]


def test_layers_whose_key_heads_differ_have_the_fewest() -> None:
    case = next(case for case in VARIANTS if case.name == "gemma4_text+keys-as-values")
    assert key_heads(tiny_config(case)) == 1
