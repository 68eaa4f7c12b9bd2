"""What results may differ by, and why: more than floats are rounded by, and far less than a mistake changes.

One key too many among some hundreds changes an output by about 1e-3. A tolerance of one test has its reason beside it.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

FLOAT32 = 1e-6
"""Outputs of one call in float32, of size 1: sums in another order differ by a few roundings of 6e-8."""

FLOAT32_SUMS = 1e-5
"""Float32 that is rounded in several places: merges between ranks, gradients, energies, a layer, losses of a step."""

FLOAT32_MODEL = 1e-4
"""Logits and log-probabilities of float32 models: each layer rounds, and logits of 20 are rounded by 1e-6."""

FLOAT64 = 1e-14
"""Outputs of one call in float64, of size 1: some tens of roundings of 1e-16."""

FLOAT64_MODEL = 1e-5
"""Logits and gradients of float64 models: transformers computes norms, rotary angles and losses in float32."""

FLOAT64_LOSS = 1e-6
"""Losses of float64 models, as a part of the loss: means over tokens, which round less than one."""

TRAINED = 1e-4
"""Losses of float32 models after some steps: each step moves weights by what the steps before were rounded by."""


def worst(errors: Iterable[float]) -> float:
    """Return the largest error, NaN if one is: Python's `max` drops a NaN that is not the first."""
    return float(torch.tensor([*errors], dtype=torch.float64).max())


def largest_difference(one: Tensor, other: Tensor) -> float:
    """Return the largest difference of two tensors of one shape: 0 if all numbers are equal, and NaN if one is NaN."""
    assert one.shape == other.shape, (one.shape, other.shape)
    return worst([0.0, *(one.double() - other.double()).abs().flatten().tolist()])


def assert_near(found: Tensor, expected: Tensor, tolerance: float = 0.0) -> None:
    """Raise unless numbers are as `torch.allclose` wants them, or equal: also on ranks the error has what differs."""
    torch.testing.assert_close(found, expected, rtol=1e-5 if tolerance else 0.0, atol=tolerance)
