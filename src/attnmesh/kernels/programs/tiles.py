"""Operations on tiles, for Triton programs: load, multiply, accumulate and store rows.

A width is cut into two parts, named `_0` and `_1`. Each is a power of two, and the second may be 0: 192 is 128 + 64,
and 576 is 512 + 64.
"""

from functools import partial as partial_of

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
"""Programs take exponentials and logarithms to the base 2, which GPUs have, and not to the base e."""

SCALE_COLUMNS = tl.constexpr(128)
"""As in `core/storage.py`."""

program = partial_of(
    triton.jit,
    do_not_specialize=(
        "rows", "keys", "group", "kv_heads", "split_keys", "splits", "queries", "heads", "block", "capacity", "left",
        "right", "count", "other_count", "call_hash", "rank", "ranks", "flags", "box_size", "max_polls",
    ),
)  # fmt: skip
"""Decorator of programs. They are not recompiled for new values of arguments that do not affect alignment."""


@triton.jit
def _read_part(base, offsets, valid, width, START: tl.constexpr, PART: tl.constexpr):
    columns = START + tl.arange(0, PART)
    return tl.load(base + offsets[:, None] + columns, mask=valid[:, None] & (columns < width), other=0.0)


@triton.jit
def read(base, offsets, valid, width, FIRST: tl.constexpr, SECOND: tl.constexpr):
    """Return the rows of a matrix that start at some offsets; 0 for invalid rows and columns."""
    x_0 = _read_part(base, offsets, valid, width, 0, FIRST)
    x_1 = x_0  # unused if there is no second part
    if SECOND > 0:
        x_1 = _read_part(base, offsets, valid, width, FIRST, SECOND)
    return x_0, x_1


@triton.jit
def _write_part(base, offsets, valid, width, x, START: tl.constexpr, PART: tl.constexpr):
    columns = START + tl.arange(0, PART)
    tl.store(base + offsets[:, None] + columns, x.to(base.dtype.element_ty), mask=valid[:, None] & (columns < width))


@triton.jit
def write(base, offsets, valid, width, x_0, x_1, FIRST: tl.constexpr, SECOND: tl.constexpr):
    """Store the rows of a matrix that start at some offsets."""
    _write_part(base, offsets, valid, width, x_0, 0, FIRST)
    if SECOND > 0:
        _write_part(base, offsets, valid, width, x_1, FIRST, SECOND)


@triton.jit
def zeros(ROWS: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr):
    """Return rows of zeros."""
    x_0 = tl.zeros([ROWS, FIRST], tl.float32)
    x_1 = x_0
    if SECOND > 0:
        x_1 = tl.zeros([ROWS, SECOND], tl.float32)
    return x_0, x_1


@triton.jit
def _dot(a, b, PRECISION: tl.constexpr):
    """Return a product of two tiles, summed in float32. Triton's interpreter has no bfloat16 product."""
    if PRECISION == "widened":
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    return tl.dot(a, b, input_precision=PRECISION)


@triton.jit
def row_products(a_0, a_1, b_0, b_1, SECOND: tl.constexpr, PRECISION: tl.constexpr):
    """Return the dot products of the rows of a with the rows of b."""
    product = _dot(a_0, tl.trans(b_0), PRECISION)
    if SECOND > 0:
        product += _dot(a_1, tl.trans(b_1), PRECISION)
    return product


@triton.jit
def add_weighted(sum_0, sum_1, weights, x_0, x_1, SECOND: tl.constexpr, PRECISION: tl.constexpr):
    """Return the sum plus the weighted rows x."""
    sum_0 += _dot(weights, x_0, PRECISION)
    if SECOND > 0:
        sum_1 += _dot(weights, x_1, PRECISION)
    return sum_0, sum_1


# --- rows stored in 8 bits: numbers, and then a scale for each SCALE_COLUMNS of them ---


@triton.jit
def _numbers(x, FLOAT8: tl.constexpr):
    """Return the numbers of bytes in bfloat16, which has all of them."""
    number = x.to(tl.float32)
    if FLOAT8:  # the bits of e4m3 are among those of float32, whose exponent is 120 more
        bits = x.to(tl.int32)
        number = ((bits & 0x7F) << 20 | (bits & 0x80) << 24).to(tl.float32, bitcast=True) * 1.329227995784916e36
    return number.to(tl.bfloat16)


@triton.jit
def _scales(base, offsets, valid, row, START: tl.constexpr):
    """Return the scale of each row for the SCALE_COLUMNS from a column on."""
    at = (base + offsets + row).to(tl.pointer_type(tl.bfloat16), bitcast=True) + START // SCALE_COLUMNS
    return tl.load(at, mask=valid, other=0.0).to(tl.float32)


@triton.jit
def _scaled(x, base, offsets, valid, row, START: tl.constexpr, FLOAT8: tl.constexpr, PART: tl.constexpr):
    """Return the values of bytes of several groups, in float32."""
    columns = START + tl.arange(0, PART)
    at = (base + offsets[:, None] + row).to(tl.pointer_type(tl.bfloat16), bitcast=True) + columns // SCALE_COLUMNS
    scales = tl.load(at, mask=valid[:, None] & (columns < row), other=0.0).to(tl.float32)
    return _numbers(x, FLOAT8).to(tl.float32) * scales


@triton.jit
def _exact_dot(a, numbers, PRECISION: tl.constexpr):
    """Return a product with numbers that bfloat16 has. A float32 is the sum of three bfloat16."""
    if PRECISION == "widened" or a.dtype == tl.bfloat16:
        return _dot(a, numbers, PRECISION)
    a = a.to(tl.float32)
    high = a.to(tl.bfloat16)
    remainder = a - high.to(tl.float32)
    middle = remainder.to(tl.bfloat16)
    low = (remainder - middle.to(tl.float32)).to(tl.bfloat16)
    return tl.dot(high, numbers) + (tl.dot(middle, numbers) + tl.dot(low, numbers))


@triton.jit
def _quantized_products(
    q, base, offsets, valid, width,
    START: tl.constexpr, PART: tl.constexpr, ROW: tl.constexpr, FLOAT8: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return the dot products of a part of the columns of q with that of rows in 8 bits."""
    x = _read_part(base, offsets, valid, width, START, PART)
    if PART > SCALE_COLUMNS:
        values = _scaled(x, base, offsets, valid, ROW, START, FLOAT8, PART)
        return _dot(q.to(tl.float32), tl.trans(values), PRECISION)
    return _exact_dot(q, tl.trans(_numbers(x, FLOAT8)), PRECISION) * _scales(base, offsets, valid, ROW, START)[None, :]


@triton.jit
def _quantized_sum(
    weights, base, offsets, valid, width,
    START: tl.constexpr, PART: tl.constexpr, ROW: tl.constexpr, FLOAT8: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return the weighted sum of a part of the columns of rows in 8 bits."""
    x = _read_part(base, offsets, valid, width, START, PART)
    if PART > SCALE_COLUMNS:
        return _dot(weights, _scaled(x, base, offsets, valid, ROW, START, FLOAT8, PART), PRECISION)
    return _exact_dot(weights * _scales(base, offsets, valid, ROW, START)[None, :], _numbers(x, FLOAT8), PRECISION)


# --- attention, one step after another ---


@triton.jit
def logits_of(
    q_0, q_1, k, key, valid_keys, k_row, width, scale, softcap,
    Q_0: tl.constexpr, Q_1: tl.constexpr, CAPPED: tl.constexpr, PRECISION: tl.constexpr,
    ROW: tl.constexpr = 0, FLOAT8: tl.constexpr = False,
):  # fmt: skip
    """Return the logits of a tile of rows over some keys, times LOG2E, for powers of 2.

    Keys that are stored in 8 bits have ROW numbers, and ROW is 0 for plain ones.
    """
    if ROW > 0:
        products = _quantized_products(q_0, k, key * k_row, valid_keys, width, 0, Q_0, ROW, FLOAT8, PRECISION)
        if Q_1 > 0:
            products += _quantized_products(q_1, k, key * k_row, valid_keys, width, Q_0, Q_1, ROW, FLOAT8, PRECISION)
    else:
        k_0, k_1 = read(k, key * k_row, valid_keys, width, Q_0, Q_1)
        products = row_products(q_0, q_1, k_0, k_1, Q_1, PRECISION)
    if CAPPED:
        return tanh(products * (scale / softcap)) * (softcap * LOG2E)
    return products * (scale * LOG2E)


@triton.jit
def tanh(x):
    """Return tanh: a polynomial for small x, since `1 - 2 / (1 + e^2x)` is exact beside 1 only."""
    square = x * x
    small = x + x * square * (-0.33333218 + square * (0.13316220 - square * 0.050170722))
    large = 1.0 - 2.0 / (1.0 + tl.exp2(x * (2.0 * LOG2E)))
    return tl.where(tl.abs(x) < 0.35, small, large)


@triton.jit
def accumulate(
    peak, total, sum_0, sum_1, logits, v, key, valid_keys, v_row, value_width,
    V_0: tl.constexpr, V_1: tl.constexpr, PRECISION: tl.constexpr, ROW: tl.constexpr = 0, FLOAT8: tl.constexpr = False,
):  # fmt: skip
    """Return the running peak, total and sums after one more step of keys."""
    new_peak = tl.maximum(peak, tl.max(logits, 1))
    origin = tl.where(new_peak == -float("inf"), 0.0, new_peak)  # rows without a visible key so far
    weights, decay = tl.exp2(logits - origin[:, None]), tl.exp2(peak - origin)
    total = total * decay + tl.sum(weights, 1)
    sum_0 *= decay[:, None]
    if V_1 > 0:
        sum_1 *= decay[:, None]
    if ROW > 0:
        sum_0 += _quantized_sum(weights, v, key * v_row, valid_keys, value_width, 0, V_0, ROW, FLOAT8, PRECISION)
        if V_1 > 0:
            sum_1 += _quantized_sum(weights, v, key * v_row, valid_keys, value_width, V_0, V_1, ROW, FLOAT8, PRECISION)
    else:
        v_0, v_1 = read(v, key * v_row, valid_keys, value_width, V_0, V_1)
        sum_0, sum_1 = add_weighted(sum_0, sum_1, weights.to(v_0.dtype), v_0, v_1, V_1, PRECISION)
    return new_peak, total, sum_0, sum_1


# --- merges ---


@triton.jit
def merge_rows(
    outs, lses, splits, outs_split, lses_split, row, valid, value_width, sink,
    ROWS: tl.constexpr, V_0: tl.constexpr, V_1: tl.constexpr,
):  # fmt: skip
    """Return total, origin and sums of the merge of some partials' rows and a sink. Weights are `e^(lse - origin)`."""
    peak = sink
    for split in range(splits):
        peak = tl.maximum(peak, tl.load(lses + split * lses_split + row, mask=valid, other=-float("inf")))
    origin = tl.where(peak == -float("inf"), 0.0, peak)
    total = tl.exp(sink - origin)
    sum_0, sum_1 = zeros(ROWS, V_0, V_1)
    for split in range(splits):
        weight = tl.exp(tl.load(lses + split * lses_split + row, mask=valid, other=-float("inf")) - origin)
        total += weight
        out_0, out_1 = read(outs + split * outs_split, row * value_width, valid, value_width, V_0, V_1)
        sum_0 += weight[:, None] * out_0.to(tl.float32)
        if V_1 > 0:
            sum_1 += weight[:, None] * out_1.to(tl.float32)
    return total, origin, sum_0, sum_1


@triton.jit
def max_checksum(checksums, splits, stride):
    """Return the maximum of the ranks' checksums, which are (c, -c): its sum is 0 if all ranks agree."""
    index = tl.arange(0, 2)
    highest = tl.load(checksums + index)
    for split in range(1, splits):
        highest = tl.maximum(highest, tl.load(checksums + split * stride + index))
    return highest


@triton.jit
def store_rows(
    total, origin, sum_0, sum_1, out, lse, row, valid, value_width,
    V_0: tl.constexpr, V_1: tl.constexpr,
):  # fmt: skip
    """Store normalised rows and their lse; the identity for empty rows."""
    empty = total == 0.0
    total = tl.where(empty, 1.0, total)
    write(out, row * value_width, valid, value_width, sum_0 / total[:, None], sum_1 / total[:, None], V_0, V_1)
    tl.store(lse + row, tl.where(empty, -float("inf"), origin + tl.log(total)), mask=valid)
