"""Trainers with a reference model, on a mesh: the losses, metrics and weights of stock TRL, with nothing replaced."""

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch

from attnmesh.mesh.shapes import Shape
from tests.support.ranks.pool import Pool
from tests.support.training.trainers import FSDP, judged, train_on_rank
from tests.support.truth.tolerances import FLOAT64_LOSS, FLOAT64_MODEL

MESHES = {"keys": (1, Shape(1, 1, 2)), "queries": (1, Shape(1, 2, 1)), "data x keys": (2, Shape(1, 1, 2))}

UNSHIFTED = {"loss_type": "apo_zero_unpaired", "train_sampling_strategy": "random"}
"""Settings of a loss without a KL divergence, whose batches are drawn."""

SAVES = {"save_strategy": "steps", "save_steps": 1, "max_steps": 2}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "keys": ("keys", {}),
    "queries": ("queries", {}),
    "data x keys": ("data x keys", {}),
    "adapter": ("data x keys", {"lora": True, "gradient_checkpointing": True}),
    "no divergence": ("queries", UNSHIFTED),
    "adapter without a divergence": ("keys", {"lora": True, **UNSHIFTED}),
    "computed before": ("data x keys", {"rows": True}),
    "adapter, computed before": ("keys", {"rows": True, "lora": True}),
    "no divergence, computed before": ("keys", {"rows": True, **UNSHIFTED}),
    "a stop": ("data x keys", SAVES),
    "a stop of an adapter": ("keys", {"lora": True, **SAVES}),
    "sharded weights": ("data x keys", FSDP),
    "weights": ("keys", {"desirable_weight": 1.3, "undesirable_weight": 0.8, "beta": 0.2}),
}
"""Mesh and settings."""

SMALL = {"dtype": torch.float64, "initializer_range": 0.05}
"""Changes of a Llama. TRL sums log-probabilities in float32 all the same: a short answer has about 30."""

SHORT = ("data x keys", "adapter, computed before")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in SHORT else pytest.mark.long) for name in CASES]
)
def test_kto_on_a_mesh_is_that_of_stock_trl(name: str, pool: Pool, tmp_path: Path) -> None:
    """Compare it with as many processes as there are meshes: pairs of a divergence are those of a process."""
    where, options = CASES[name]
    data, shape = MESHES[where]
    options = {"changes": SMALL, **options}

    def trained(on: Shape | None, folder: str, **more: Any) -> Any:
        given = deepcopy(options) | more
        if on is None:
            given = {name: x for name, x in given.items() if "fsdp" not in name}
        if options.get("rows"):
            given["rows"] = str(tmp_path / f"{folder} rows")
            judged().save_to_disk(given["rows"])
        ranks = data * (1 if on is None else on.ranks)
        return pool.run(
            ranks, train_on_rank, "KTOTrainer", "llama", data, on, str(tmp_path / folder), given, deadline=350
        )

    alone, together = trained(None, "stock"), trained(shape, "mesh")
    for rank, (given, _, weights) in enumerate(together):
        expected, _, stock = alone[rank // shape.ranks]
        assert len(expected["loss"]) == options.get("max_steps", 3)
        assert any(expected["kl"]) != ("loss_type" in options)
        sums = max(map(abs, expected["logps/chosen"]))
        for entry, values in expected.items():
            if entry.endswith("kl"):  # a difference of such sums
                scale = sums
            elif "rewards/" in entry:  # beta times one, 0.1 unless it is set
                scale = max(1.0, options.get("beta", 0.1) * sums)
            else:
                scale = 1.0
            assert given[entry] == pytest.approx(values, rel=FLOAT64_LOSS, abs=FLOAT64_LOSS * scale), entry
        for parameter, x in stock.items():
            assert (weights[parameter] - x).abs().max() <= FLOAT64_MODEL, parameter
    if "save_steps" in options:
        resumed = trained(shape, "resumed", resume=str(tmp_path / "mesh" / "checkpoint-1"))
        for (given, _, weights), (expected, _, whole) in zip(resumed, together, strict=True):
            assert given["loss"] == expected["loss"]
            assert all(weights[parameter].equal(x) for parameter, x in whole.items())
