"""Tiny models with recurrent layers, and their losses and gradients in float64."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from tests.support.models.checks import DoublePrecision, loss_and_gradients
from tests.support.models.tiny_models import Case, build
from tests.support.truth.tolerances import worst

EXCHANGED = {
    "qwen3_next": Case("qwen3_next", "qwen3_next"),
    "bamba": Case("bamba", "bamba", {"mamba_n_groups": 2}),
    "kimi_linear": Case("kimi_linear", "kimi_linear"),
    "lfm2": Case("lfm2", "lfm2"),  # short convolutions without a rule
}

GENERATING = (
    *("bamba", "falcon_h1", "falcon_mamba", "granitemoehybrid", "jamba", "kimi_linear", "lfm2", "lfm2_moe", "mamba"),
    *("mamba2", "nemotron_h", "olmo_hybrid", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next", "zamba", "zamba2"),
    *("bailing_hybrid", "lfm3", "qwen4_exp_text", "zaya", "inkling_text"),
)

FAMILIES = (*GENERATING, "minimax", "recurrent_gemma")

TOLERANCE = 1e-9
"""All is computed in float64: what transformers casts to float32 as well. Gradients of decays are sums that cancel."""


def tolerance_of(family: str) -> float:
    """Return the tolerance of a family. MiniMax makes its buffers of decays in float32."""
    return 1e-6 if family == "minimax" else TOLERANCE


def model_of(family: str, attention: str = "attnmesh", dtype: torch.dtype = torch.float64) -> PreTrainedModel:
    return build(Case(family, family), attention, dtype)


def trained(model: PreTrainedModel, batch: dict[str, Any]) -> tuple[float, dict[str, Tensor]]:
    """Return the loss, and the gradients of all weights."""
    with DoublePrecision():
        return loss_and_gradients(model, batch)


def check_trained(
    results: list[tuple[float, dict[str, Tensor]]], loss: float, gradients: dict[str, Tensor], tolerance: float
) -> None:
    """Assert that the means over the ranks are the loss and the gradients."""
    assert sum(result[0] for result in results) / len(results) == pytest.approx(loss, rel=1e-7)  # float64
    largest = worst(float(x.abs().max()) for x in gradients.values())
    for name, expected in gradients.items():
        parts = [result[1].get(name, torch.zeros_like(expected)) for result in results]
        found = torch.stack(parts).mean(0)
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance * largest, msg=name)
