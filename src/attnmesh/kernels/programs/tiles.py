"""Tiles of Triton's programs, whose widths are cut into two parts: rows read, multiplied, summed and written.

Each part is a power of two, the second possibly none: 192 is 128 + 64, and 576 is 512 + 64. What is named `_0` and `_1`
are these parts of one tile.
"""

from functools import partial

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)

program = partial(
    triton.jit,
    do_not_specialize=(
        "rows", "keys", "group", "kv_heads", "span", "splits", "queries", "heads", "block", "capacity", "left", "right",
        "count", "more_count", "number", "rank", "ranks", "flags", "room", "patience",
    ),
)  # fmt: skip
"""A program that is not compiled anew for numbers that tell nothing of how memory lies."""


@triton.jit
def _read_part(base, places, there, width, START: tl.constexpr, PART: tl.constexpr):
    columns = START + tl.arange(0, PART)
    return tl.load(base + places[:, None] + columns, mask=there[:, None] & (columns < width), other=0.0)


@triton.jit
def read(base, places, there, width, FIRST: tl.constexpr, SECOND: tl.constexpr):
    """The rows of a matrix that begin at some places; 0 for rows and columns that are not there."""
    x_0 = _read_part(base, places, there, width, 0, FIRST)
    x_1 = x_0  # where there is no second part nobody asks for it
    if SECOND > 0:
        x_1 = _read_part(base, places, there, width, FIRST, SECOND)
    return x_0, x_1


@triton.jit
def _write_part(base, places, there, width, x, START: tl.constexpr, PART: tl.constexpr):
    columns = START + tl.arange(0, PART)
    tl.store(base + places[:, None] + columns, x.to(base.dtype.element_ty), mask=there[:, None] & (columns < width))


@triton.jit
def write(base, places, there, width, x_0, x_1, FIRST: tl.constexpr, SECOND: tl.constexpr):
    """The rows of a matrix that begin at some places, as they are now."""
    _write_part(base, places, there, width, x_0, 0, FIRST)
    if SECOND > 0:
        _write_part(base, places, there, width, x_1, FIRST, SECOND)


@triton.jit
def zeros(ROWS: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr):
    """So many rows of nothing."""
    x_0 = tl.zeros([ROWS, FIRST], tl.float32)
    x_1 = x_0
    if SECOND > 0:
        x_1 = tl.zeros([ROWS, SECOND], tl.float32)
    return x_0, x_1


@triton.jit
def _dot(a, b, PRECISION: tl.constexpr):
    """A product of two tiles, summed in float32; Triton's interpreter knows no bfloat16 there."""
    if PRECISION == "widened":
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    return tl.dot(a, b, input_precision=PRECISION)


@triton.jit
def across(a_0, a_1, b_0, b_1, SECOND: tl.constexpr, PRECISION: tl.constexpr):
    """Each row of one times each row of the other."""
    product = _dot(a_0, tl.trans(b_0), PRECISION)
    if SECOND > 0:
        product += _dot(a_1, tl.trans(b_1), PRECISION)
    return product


@triton.jit
def add(sum_0, sum_1, weights, x_0, x_1, SECOND: tl.constexpr, PRECISION: tl.constexpr):
    """A sum of tiles, and the rows of one more, weighed."""
    sum_0 += _dot(weights, x_0, PRECISION)
    if SECOND > 0:
        sum_1 += _dot(weights, x_1, PRECISION)
    return sum_0, sum_1


# --- attention, one step after another ---


@triton.jit
def logits_of(
    q_0, q_1, k, place, known, k_row, width, factor,
    Q_0: tl.constexpr, Q_1: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Of a tile of rows over the keys at some places, in powers of 2 if the factor has LOG2E in it."""
    k_0, k_1 = read(k, place * k_row, known, width, Q_0, Q_1)
    return across(q_0, q_1, k_0, k_1, Q_1, PRECISION) * factor


@triton.jit
def absorbed(
    peak, total, sum_0, sum_1, logits, v, place, known, v_row, values,
    V_0: tl.constexpr, V_1: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """What has been seen, and the keys of one more step."""
    higher = tl.maximum(peak, tl.max(logits, 1))
    origin = tl.where(higher == -float("inf"), 0.0, higher)  # a row that has seen nothing yet
    weights, kept = tl.exp2(logits - origin[:, None]), tl.exp2(peak - origin)
    total = total * kept + tl.sum(weights, 1)
    sum_0 *= kept[:, None]
    if V_1 > 0:
        sum_1 *= kept[:, None]
    v_0, v_1 = read(v, place * v_row, known, values, V_0, V_1)
    sum_0, sum_1 = add(sum_0, sum_1, weights.to(v.dtype.element_ty), v_0, v_1, V_1, PRECISION)
    return higher, total, sum_0, sum_1


# --- merges ---


@triton.jit
def joined(
    outs, lses, splits, outs_split, lses_split, row, there, values, sink,
    ROWS: tl.constexpr, V_0: tl.constexpr, V_1: tl.constexpr,
):  # fmt: skip
    """Rows of partials that lie one behind the other, and a sink: weights, from what they are measured, and sums."""
    peak = sink
    for split in range(splits):
        peak = tl.maximum(peak, tl.load(lses + split * lses_split + row, mask=there, other=-float("inf")))
    origin = tl.where(peak == -float("inf"), 0.0, peak)
    total = tl.exp(sink - origin)
    sum_0, sum_1 = zeros(ROWS, V_0, V_1)
    for split in range(splits):
        weight = tl.exp(tl.load(lses + split * lses_split + row, mask=there, other=-float("inf")) - origin)
        total += weight
        out_0, out_1 = read(outs + split * outs_split, row * values, there, values, V_0, V_1)
        sum_0 += weight[:, None] * out_0.to(tl.float32)
        if V_1 > 0:
            sum_1 += weight[:, None] * out_1.to(tl.float32)
    return total, origin, sum_0, sum_1


@triton.jit
def highest_of(checksums, splits, split_by):
    """The maximum of what ranks said; of those that said the same it cancels."""
    number = tl.arange(0, 2)
    highest = tl.load(checksums + number)
    for split in range(1, splits):
        highest = tl.maximum(highest, tl.load(checksums + split * split_by + number))
    return highest


@triton.jit
def settled(
    total, origin, sum_0, sum_1, out, lse, row, there, values,
    V_0: tl.constexpr, V_1: tl.constexpr,
):  # fmt: skip
    """Write each row at its own place: the identity where nothing was seen."""
    nothing = total == 0.0
    total = tl.where(nothing, 1.0, total)
    write(out, row * values, there, values, sum_0 / total[:, None], sum_1 / total[:, None], V_0, V_1)
    tl.store(lse + row, tl.where(nothing, -float("inf"), origin + tl.log(total)), mask=there)
