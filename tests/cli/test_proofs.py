"""The proofs of `attnmesh check`: a kernel with NaN in one case is wrong, whatever its other errors are."""

from math import isnan

import pytest
import torch
from torch import Tensor

from attnmesh.cli import proofs
from attnmesh.core.partial import Partial
from attnmesh.core.scaling import Scaling
from attnmesh.core.storage import STORAGES
from attnmesh.kernels import choice
from attnmesh.kernels.implementations.reference import Reference
from attnmesh.kernels.rectangles import BackwardInputs, Gradients, Rectangle

CPU = torch.device("cpu")


class NanOut(Reference):
    """The reference, with NaN where it sees some of the 300 keys: in no first case."""

    name = "nan"

    def attend(self, q: Tensor, k: Tensor, v: Tensor, rectangle: Rectangle, scaling: Scaling) -> Partial:
        out, lse = super().attend(q, k, v, rectangle, scaling)
        return Partial(out if k.shape[2] == 300 else out * torch.nan, lse)


class NanGradient(Reference):
    """The reference, with NaN in the last gradient."""

    name = "nan"

    def backward(
        self, q: Tensor, k: Tensor, v: Tensor, saved: BackwardInputs, rectangle: Rectangle, scaling: Scaling
    ) -> Gradients:
        dq, dk, dv = super().backward(q, k, v, saved, rectangle, scaling)
        return Gradients(dq, dk, dv * torch.nan)


@pytest.mark.parametrize("kernel", [NanOut(), NanGradient()])
def test_a_kernel_with_nan_in_one_case_is_wrong(kernel: Reference, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "KERNELS", (*choice.KERNELS, kernel))
    proof = proofs._proof(kernel, CPU, torch.float32)
    errors = (proof.out_error, proof.gradient_error)
    assert isnan(errors[isinstance(kernel, NanGradient)] or 0.0)
    assert not proof.holds


def test_a_kernel_with_nan_over_stored_keys_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = NanOut()
    monkeypatch.setattr(choice, "KERNELS", (*choice.KERNELS, kernel))
    proof = proofs._quantized_proof(kernel, CPU, STORAGES["int8"])
    assert isnan(proof.out_error or 0.0)
    assert not proof.holds


def test_a_law_with_nan_in_a_gradient_does_not_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = NanGradient()
    kernel.name = "reference"
    monkeypatch.setattr(choice, "KERNELS", (kernel,))
    assert isnan(proofs.law_error())
