"""A kernel run on a problem of one device, forward and backward: on the rectangles of a band, or on selected keys.

A kernel attends one rectangle, with a positive scale and without autocast. So kernels do not depend on masks, layouts
or positions. Tensors have the shapes that `Kernel` says.
"""

from collections.abc import Sequence
from functools import partial as partial_of
from itertools import pairwise

import torch
from torch import Tensor

from attnmesh.core.band import Band
from attnmesh.core.partial import Partial
from attnmesh.core.scaling import Scaling
from attnmesh.kernels.kernel import Kernel
from attnmesh.kernels.rectangles import (
    BackwardInputs,
    Gradients,
    Rectangle,
    attend_rectangles,
    backward_rectangles,
    memo_of_band,
)
from attnmesh.kernels.selected_keys import SelectedKeys, attend_selected, backward_selected
from attnmesh.kernels.traced import without_autocast

VisibleKeys = Band | SelectedKeys
"""The keys that each query sees: a run of them, which kernels attend, or selected ones, which are read one by one."""

KeyCounts = Sequence[int] | None
"""Number of leading keys that each sequence of a batch sees; None for all keys."""


def visible_counts(positions: Tensor, key_lengths: Tensor | None) -> list[int] | None:
    """Return how many of ascending key positions, (keys,), are below each sequence's real keys, (batch,)."""
    if key_lengths is None:
        return None
    counts: list[int] = torch.searchsorted(positions, key_lengths.to(positions.device)).tolist()
    return counts


def _runs_of_equal_counts(counts: Sequence[int]) -> list[tuple[slice, int]]:
    """Return (sequences, count) for each run of equal counts."""
    edges = [0, *(row for row in range(1, len(counts)) if counts[row] != counts[row - 1]), len(counts)]
    return [(slice(start, stop), counts[start]) for start, stop in pairwise(edges)]


def attend_visible(
    kernel: Kernel,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    visible_keys: VisibleKeys | None,
    scaling: Scaling,
    counts: KeyCounts = None,
) -> Partial:
    """Return attention over the visible keys, in q's dtype or wider. Empty rows give the identity `(0, -inf)`.

    Without a band every row sees every key; `counts` is then None. For selected keys the kernel is not called.
    """
    if isinstance(visible_keys, SelectedKeys):
        with without_autocast(q):
            return attend_selected(q, k, v, visible_keys, scaling)
    band = visible_keys
    if counts:
        assert band is not None
        parts = [
            attend_visible(kernel, q[some], k[some], v[some], band.first(count), scaling)
            for some, count in _runs_of_equal_counts(counts)
        ]
        return parts[0] if len(parts) == 1 else Partial(*(torch.cat(x) for x in zip(*parts, strict=True)))
    whole = Rectangle(slice(0, q.shape[2]), slice(0, k.shape[2]))
    rectangles = _cut(kernel, band, q, k, v) if band is not None else [whole] if q.shape[0] else []
    sign, scaling = scaling.positive()  # kernels need a positive scale: they scale after adding -inf
    q = q if sign == 1 else q * sign
    with without_autocast(q):
        if _is_one_rectangle(rectangles, q, k):
            return _attend_rectangle(kernel, q, k, v, rectangles[0], scaling)
        return attend_rectangles(partial_of(_attend_rectangle, kernel, scaling=scaling), q, k, v, rectangles)


def backward_visible(
    kernel: Kernel,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    inputs: BackwardInputs,
    visible_keys: VisibleKeys,
    scaling: Scaling,
    counts: KeyCounts = None,
) -> Gradients:
    """Return gradients over the visible keys, in the inputs' dtype or wider."""
    if isinstance(visible_keys, SelectedKeys):
        with without_autocast(q):
            return backward_selected(q, k, v, _without_unseeing_rows(inputs), visible_keys, scaling)
    band = visible_keys
    if counts:
        parts = [
            backward_visible(
                kernel, q[some], k[some], v[some], inputs.select_sequences(some), band.first(count), scaling
            )
            for some, count in _runs_of_equal_counts(counts)
        ]
        return parts[0] if len(parts) == 1 else Gradients(*(torch.cat(x) for x in zip(*parts, strict=True)))
    rectangles = _cut(kernel, band, q, k, v)
    sign, scaling = scaling.positive()  # kernels need a positive scale: they scale after adding -inf
    q = q if sign == 1 else q * sign
    inputs = _without_unseeing_rows(inputs)
    with without_autocast(q):
        if _is_one_rectangle(rectangles, q, k):
            dq, dk, dv = kernel.backward(q, k, v, inputs, rectangles[0], scaling)
        else:
            dq, dk, dv = backward_rectangles(partial_of(kernel.backward, scaling=scaling), q, k, v, inputs, rectangles)
    return Gradients(dq if sign == 1 else dq * sign, dk, dv)


def _without_unseeing_rows(inputs: BackwardInputs) -> BackwardInputs:
    """Return the tensors with lse +inf and dout 0 in empty rows, so that all their weights are e^-inf = 0."""
    empty = inputs.lse == -torch.inf
    lse, dout = inputs.lse.masked_fill(empty, torch.inf), inputs.dout.masked_fill(empty.unsqueeze(-1), 0.0)
    return BackwardInputs(inputs.out, lse, dout)


def _attend_rectangle(
    kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, rectangle: Rectangle, scaling: Scaling
) -> Partial:
    """Return the rectangle's partial. Rows that see no key get the identity, as kernels differ there."""
    out, lse = kernel.attend(q, k, v, rectangle, scaling)
    unseeing = _unseeing_rows(rectangle, out.device)
    if len(unseeing):
        out, lse = out.index_fill(2, unseeing, 0.0), lse.index_fill(2, unseeing, -torch.inf)
    return Partial(out, lse)


def _unseeing_rows(rectangle: Rectangle, device: torch.device) -> Tensor:
    """Return the indices of rows that see no key of the rectangle, copied to a GPU once as long as its bounds live."""
    if rectangle.band is None or device.type == "cpu":
        return rectangle.unseeing_rows().to(device)
    name = "unseeing rows", rectangle.keys.stop - rectangle.keys.start, device
    return memo_of_band(rectangle.band, name, lambda: rectangle.unseeing_rows().to(device), lambda x: x.nbytes)


def _cut(kernel: Kernel, band: Band, q: Tensor, k: Tensor, v: Tensor) -> list[Rectangle]:
    """Return the rectangles of a band, cut once as long as it lives. So a GPU gets their bounds once."""
    if 0 in q.shape[:2]:
        return []
    signature = kernel.name, q.shape, k.shape, v.shape, q.dtype, q.device
    return memo_of_band(band, signature, lambda: kernel.cut(band, q, k, v), _bytes)


def _bytes(rectangles: Sequence[Rectangle]) -> int:
    return sum(
        rectangle.band.low.nbytes + rectangle.band.high.nbytes for rectangle in rectangles if rectangle.band is not None
    )


def _is_one_rectangle(rectangles: Sequence[Rectangle], q: Tensor, k: Tensor) -> bool:
    """Return True if one rectangle is the whole problem, so that nothing is copied, merged or summed."""
    if len(rectangles) != 1:
        return False
    queries, keys = rectangles[0].queries, rectangles[0].keys
    return (queries.start, queries.stop, keys.start, keys.stop) == (0, q.shape[2], 0, k.shape[2])
