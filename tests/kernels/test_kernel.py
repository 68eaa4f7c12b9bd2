"""What a call asks of a kernel, and what a kernel says of itself that states no more than it must."""

from typing import Any

import pytest
import torch

import attnmesh as am
from attnmesh.core.band import Band
from attnmesh.core.scaling import Scaling, with_distance_bias
from attnmesh.kernels.kernel import Kernel, KernelRequest
from attnmesh.kernels.rectangles import cut

pytestmark = pytest.mark.quick


class Least(Kernel):
    """A kernel that says nothing of itself but its name, and the width that it does not support."""

    name = "least"

    def unsupported_reason(self, request: KernelRequest) -> str | None:
        return "it is made for 64 columns" if request.width > 64 else None


class OnXpu(Least):
    """The same on one type of device."""

    device_type = "xpu"


class WithoutCap(Least):
    """The same without a soft cap, but with a bias and scattered keys."""

    caps_logits, adds_bias, reads_scattered = False, True, True


Q, K, V = torch.zeros(2, 6, 5, 8), torch.zeros(2, 2, 9, 8), torch.zeros(2, 2, 9, 12)
REQUEST = KernelRequest.of(Q, K, V, Scaling(1.0))


def test_a_request_has_the_rows_of_a_key_head_and_the_columns_of_the_widest_head() -> None:
    assert (REQUEST.device.type, REQUEST.dtype) == ("cpu", torch.float32)
    assert REQUEST.rows == 3 * 5  # three query heads share a key head
    assert REQUEST.width == 12
    assert not REQUEST.capped
    assert KernelRequest.of(Q, K, V, Scaling(1.0, 2.0)).capped


def test_a_request_has_the_positions_of_a_bias_alone() -> None:
    given = torch.arange(9) * 2
    assert KernelRequest.of(Q, K, V, Scaling(1.0), (None, given)).positions is None
    biased = KernelRequest.of(with_distance_bias(Q, torch.zeros(2, 6, 5, 4)), K, V, Scaling(1.0), (None, given))
    assert biased.biased
    assert biased.positions is not None
    assert biased.positions[0].tolist() == [0, 1, 2, 3, 4]
    assert biased.positions[1] is given


@pytest.mark.parametrize(
    ("kernel", "changes", "reason"),
    [
        (Least(), {}, None),
        (Least(), {"device": torch.device("meta")}, None),
        (Least(), {"capped": True, "cached": True}, None),
        (Least(), {"biased": True}, "it adds no bias by distance"),
        (Least(), {"scattered": True}, "it reads no scattered keys"),
        (Least(), {"width": 65, "biased": True}, "it is made for 64 columns"),
        (OnXpu(), {}, "it runs on xpu, the tensors are on cpu"),
        (WithoutCap(), {"capped": True}, "it has no soft cap"),
        (WithoutCap(), {"biased": True, "scattered": True}, None),
    ],
)
def test_a_kernel_says_why_it_does_not_serve_a_call(
    kernel: Kernel, changes: dict[str, Any], reason: str | None
) -> None:
    assert kernel.refusal(REQUEST._replace(**changes)) == reason


def test_a_kernel_that_says_no_more_is_made_for_no_call_and_binds_nothing() -> None:
    kernel = Least()
    assert not kernel.is_made_for(REQUEST)
    assert kernel.bind(Q, K, V, Scaling(1.0)) is None
    assert not any((kernel.reads_cache, kernel.reads_8_bits, kernel.reads_scattered, kernel.adds_bias))
    band = Band.of(am.Window(2), torch.arange(5), 9)
    [rectangle], [expected] = kernel.cut(band, Q, K, V), cut(band)
    assert (rectangle.queries, rectangle.keys) == (expected.queries, expected.keys)
    assert kernel.operator_name(Q, K, V, rectangle) == "least"
