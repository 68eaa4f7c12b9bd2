"""Logits that are no numbers: one warning, on one rank, that names where they begin."""

import warnings
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import attnmesh.hf as hf
from attnmesh.hf.finite import NanWatch
from attnmesh.mesh.shapes import AXES, Shape
from tests.support.models import families
from tests.support.models.families import prompt
from tests.support.ranks.pool import Pool, on_each_rank
from tests.support.truth.mesh_problems import named_mesh

BROKEN = {
    "nothing": (None, 1.0, None),
    "a weight": (
        "model.layers.1.mlp.up_proj.weight",
        float("nan"),
        "The weights model.layers.1.mlp.up_proj.weight are",
    ),
    "an overflow": (
        "model.layers.1.mlp.up_proj.weight",
        1e38,
        "They begin in the output of model.layers.1.mlp.up_proj. Fix: look for weights of extreme size",
    ),
}


@on_each_rank
def record_warnings_of_generation(name: str, ranks: int, **options: Any) -> list[str]:
    """Return the warnings of a generation with a broken weight, on a rank."""
    model, (weight, value, _) = families.model("llama", "attnmesh"), BROKEN[name]
    if weight is not None:
        model.get_parameter(weight).data.fill_(value)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        hf.generate(model, prompt(40), mesh=named_mesh(Shape(1, 1, ranks), AXES), max_new_tokens=5, **options)
    return [str(each.message) for each in caught if "NaN" in str(each.message)]


@pytest.mark.parametrize("name", BROKEN)
def test_nan_logits_are_reported_once(name: str, pool: Pool) -> None:
    first, second = pool.run(2, record_warnings_of_generation, name, 2)
    expected = BROKEN[name][2]
    assert second == []
    assert len(first) == (expected is not None)
    assert all(expected in text for text in first), first


class Reads(TorchDispatchMode):
    """Counts the values that the CPU reads."""

    count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += function is torch.ops.aten._local_scalar_dense.default
        return function(*args, **(kwargs or {}))


def test_a_watch_for_nan_reads_nothing_of_a_step() -> None:
    watch, scores = NanWatch(), torch.randn(2, 97)
    with Reads() as reads:
        for _ in range(3):
            assert watch(prompt(4), scores) is scores
    assert reads.count == 0
