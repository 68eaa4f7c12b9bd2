"""A kernel on a band: the driver gives it rectangles, and the result is dense attention in float64."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

import attnmesh as am
from attnmesh.core.band import Band
from attnmesh.core.partial import Partial
from attnmesh.core.scaling import Scaling
from attnmesh.kernels.driver import attend_visible, backward_visible, visible_counts
from attnmesh.kernels.implementations.reference import Reference
from attnmesh.kernels.rectangles import BackwardInputs, Gradients, Rectangle
from tests.support.truth.dense import dense
from tests.support.truth.tolerances import FLOAT64

pytestmark = pytest.mark.quick

QUERIES, KEYS = 70, 90


class Noting(Reference):
    """The reference kernel, which notes the rectangles of its calls and demands what the driver promises."""

    def __init__(self) -> None:
        super().__init__()
        self.rectangles: list[Rectangle] = []

    def note(self, rectangle: Rectangle, scaling: Scaling) -> None:
        assert scaling.scale > 0
        assert not torch.is_autocast_enabled("cpu")
        self.rectangles.append(rectangle)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, rectangle: Rectangle, scaling: Scaling) -> Partial:
        self.note(rectangle, scaling)
        out, lse = super().attend(q, k, v, rectangle, scaling)
        unseeing = rectangle.unseeing_rows()  # in which kernels differ
        return Partial(out.index_fill(2, unseeing, torch.nan), lse.index_fill(2, unseeing, torch.nan))

    def backward(
        self, q: Tensor, k: Tensor, v: Tensor, inputs: BackwardInputs, rectangle: Rectangle, scaling: Scaling
    ) -> Gradients:
        self.note(rectangle, scaling)
        return super().backward(q, k, v, inputs, rectangle, scaling)


def tensors(batch: int = 3) -> list[Tensor]:
    shapes = (batch, 4, QUERIES, 8), (batch, 2, KEYS, 8), (batch, 2, KEYS, 5)
    return [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


def band_of(mask: am.Mask, first_query: int = 20) -> Band:
    return Band.of(mask, torch.arange(QUERIES) + first_query, KEYS)


def test_rows_of_a_causal_square_are_means_of_the_values_that_they_see() -> None:
    x = torch.zeros(1, 1, 2, 1)
    values = torch.tensor([[[[1.0], [3.0]]]])
    out, lse = attend_visible(Noting(), x, x, values, Band.of(am.Causal(), torch.arange(2), 2), Scaling(1.0))
    assert out.flatten().tolist() == [1.0, 2.0]
    torch.testing.assert_close(lse.exp().flatten(), torch.tensor([1.0, 2.0]))


def test_a_causal_square_is_one_call_of_the_kernel() -> None:
    kernel, x = Noting(), torch.zeros(1, 1, KEYS, 1)
    attend_visible(kernel, x, x, x, Band.of(am.Causal(), torch.arange(KEYS), KEYS), Scaling(1.0))
    assert kernel.rectangles == [Rectangle(slice(0, KEYS), slice(0, KEYS), causal=True)]


MASKS = [am.Full(), am.Causal(), am.Window(9), am.Documents((40, 50)), am.Causal() & am.Chunks(16)]


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("scale", [0.3, -0.3, 0.0])
@pytest.mark.parametrize("counts", [None, [90, 41, 0]])
def test_results_and_gradients_are_those_of_dense_attention(
    mask: am.Mask, scale: float, counts: Sequence[int] | None
) -> None:
    q, k, v = tensors()
    band = band_of(mask)
    visible = torch.stack([band.first(count).visible(KEYS) for count in counts or [KEYS] * 3])[:, None]
    expected_out, expected_lse, _ = dense(q, k, v, visible, scale)
    dout = torch.randn_like(expected_out)
    expected = torch.autograd.grad(expected_out, (q, k, v), dout)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        out, lse = attend_visible(Noting(), q, k, v, band, Scaling(scale), counts)
        gradients = backward_visible(Noting(), q, k, v, BackwardInputs(out, lse, dout), band, Scaling(scale), counts)
    torch.testing.assert_close(out, expected_out, rtol=0, atol=FLOAT64)
    torch.testing.assert_close(lse, expected_lse, rtol=0, atol=FLOAT64)
    for gradient, right in zip(gradients, expected, strict=True):
        torch.testing.assert_close(gradient, right, rtol=0, atol=1e-12)  # float64, summed over 70 queries


def test_without_a_band_each_row_sees_each_key() -> None:
    q, k, v = (x.detach() for x in tensors())
    kernel = Noting()
    found = attend_visible(kernel, q, k, v, None, Scaling(0.3))
    everything = torch.ones(QUERIES, KEYS, dtype=torch.bool)
    torch.testing.assert_close(found.out, dense(q, k, v, everything, 0.3)[0], rtol=0, atol=FLOAT64)
    assert kernel.rectangles == [Rectangle(slice(0, QUERIES), slice(0, KEYS))]


def test_a_band_is_cut_once_as_long_as_it_lives() -> None:
    q, k, v = (x.detach() for x in tensors())
    first, second, other = Noting(), Noting(), Noting()
    band = band_of(am.Window(9))
    for kernel, cut in ((first, band), (second, band), (other, band_of(am.Window(9)))):
        attend_visible(kernel, q, k, v, cut, Scaling(0.3))
    one, again, anew = ([id(x) for x in kernel.rectangles] for kernel in (first, second, other))
    assert one == again
    assert one != anew


def test_an_empty_batch_calls_no_kernel() -> None:
    kernel = Noting()
    for band in (None, band_of(am.Causal())):
        out, lse = attend_visible(kernel, *tensors(batch=0), band, Scaling(0.3))
        assert (out.shape, lse.shape) == ((0, 4, QUERIES, 5), (0, 4, QUERIES))
    assert not kernel.rectangles


def test_keys_below_the_length_of_each_sequence_are_counted() -> None:
    positions = torch.tensor([0, 2, 4, 6])
    assert visible_counts(positions, torch.tensor([0, 1, 4, 5, 100])) == [0, 1, 2, 3, 4]
    assert visible_counts(positions, None) is None
