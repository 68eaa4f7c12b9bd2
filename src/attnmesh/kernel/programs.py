"""Attention as programs of Triton: a tile of rows against its run of keys, for any mask and layout in one launch.

A row is one query of one head. The heads that share a key head lie next to each other, query by query, so that a tile
of rows reads each key once. A row sees the keys from its query's `low` up to its `high`, and neither ever decreases:
a tile goes from its first row's low to its last row's high, and compares positions only at both edges of that run.

A width is cut into two parts, each a power of two, the second possibly none: 192 is 128 + 64, and 576 is 512 + 64.
What is named `_0` and `_1` are these parts of one tile.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


# --- tiles of two parts ---


@triton.jit
def _read_part(base, places, there, width, START: tl.constexpr, PART: tl.constexpr):
    columns = START + tl.arange(0, PART)
    return tl.load(base + places[:, None] + columns, mask=there[:, None] & (columns < width), other=0.0)


@triton.jit
def _read(base, places, there, width, FIRST: tl.constexpr, SECOND: tl.constexpr):
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
def _write(base, places, there, width, x_0, x_1, FIRST: tl.constexpr, SECOND: tl.constexpr):
    _write_part(base, places, there, width, x_0, 0, FIRST)
    if SECOND > 0:
        _write_part(base, places, there, width, x_1, FIRST, SECOND)


@triton.jit
def _zeros(ROWS: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr):
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
def _across(a_0, a_1, b_0, b_1, SECOND: tl.constexpr, PRECISION: tl.constexpr):
    """Each row of one times each row of the other."""
    product = _dot(a_0, tl.trans(b_0), PRECISION)
    if SECOND > 0:
        product += _dot(a_1, tl.trans(b_1), PRECISION)
    return product


@triton.jit
def _add(sum_0, sum_1, weights, x_0, x_1, SECOND: tl.constexpr, PRECISION: tl.constexpr):
    """A sum of tiles, and the rows of one more, weighed."""
    sum_0 += _dot(weights, x_0, PRECISION)
    if SECOND > 0:
        sum_1 += _dot(weights, x_1, PRECISION)
    return sum_0, sum_1


# --- rows ---


@triton.jit
def _seen(low, high, row, rows, group):
    """Of some rows: which there are, their queries and their places in a group, and the keys that each sees."""
    there = row < rows
    query, member = (row // group).to(tl.int64), (row % group).to(tl.int64)
    first = tl.load(low + query, mask=there, other=0)
    stop = tl.load(high + query, mask=there, other=0)
    return there, query, member, first, stop


@triton.jit
def _run(first, stop, keys):
    """From which key to which any of the rows sees one."""
    seeing = first < stop
    return tl.min(tl.where(seeing, first, keys)), tl.max(tl.where(seeing, stop, 0))


# --- forward ---


@triton.jit
def attend_program(
    q, k, v, low, high, out, lse,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row,
    rows, keys, group, kv_heads, span, width, values, scale,
    ROWS: tl.constexpr, KEYS: tl.constexpr,
    Q_0: tl.constexpr, Q_1: tl.constexpr, V_0: tl.constexpr, V_1: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """The partial of one tile of rows over one span of keys; `out` is (span, batch, head, query, width)."""
    tile, split, line = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    batch, head = line // kv_heads, line % kv_heads
    there, query, member, first, stop = _seen(low, high, tile * ROWS + tl.arange(0, ROWS), rows, group)
    start, end = _run(first, stop, keys)
    start, end = tl.maximum(start, split * span), tl.minimum(end, (split + 1) * span)
    # From `alike` up to `until`, in whole steps from start, every row of the tile sees every key.
    blind = tl.max((there & (first >= stop)).to(tl.int32))
    alike = tl.maximum(tl.max(tl.where(there, first, 0)), start)
    alike = tl.where(blind > 0, end, start + tl.cdiv(alike - start, KEYS) * KEYS)
    until = tl.minimum(tl.min(tl.where(there, stop, keys)), end)

    q += batch * q_batch + head * group * q_head
    k += batch * k_batch + head * k_head
    v += batch * v_batch + head * v_head
    q_0, q_1 = _read(q, member * q_head + query * q_row, there, width, Q_0, Q_1)
    peak = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    sum_0, sum_1 = _zeros(ROWS, V_0, V_1)
    for step in range(start, end, KEYS):
        place = step + tl.arange(0, KEYS).to(tl.int64)
        known = place < end
        k_0, k_1 = _read(k, place * k_row, known, width, Q_0, Q_1)
        logits = _across(q_0, q_1, k_0, k_1, Q_1, PRECISION) * (scale * LOG2E)
        if (step < alike) | (step + KEYS > until):
            sees = (first[:, None] <= place) & (place < stop[:, None]) & known
            logits = tl.where(sees, logits, -float("inf"))
        higher = tl.maximum(peak, tl.max(logits, 1))
        origin = tl.where(higher == -float("inf"), 0.0, higher)  # a row that has seen nothing yet
        weights, kept = tl.exp2(logits - origin[:, None]), tl.exp2(peak - origin)
        peak, total = higher, total * kept + tl.sum(weights, 1)
        sum_0 *= kept[:, None]
        if V_1 > 0:
            sum_1 *= kept[:, None]
        v_0, v_1 = _read(v, place * v_row, known, values, V_0, V_1)
        sum_0, sum_1 = _add(sum_0, sum_1, weights.to(v.dtype.element_ty), v_0, v_1, V_1, PRECISION)

    nothing = total == 0.0
    total = tl.where(nothing, 1.0, total)
    own = ((split * tl.num_programs(2) + line) * group + member) * (rows // group) + query
    _write(out, own * values, there, values, sum_0 / total[:, None], sum_1 / total[:, None], V_0, V_1)
    tl.store(lse + own, tl.where(nothing, -float("inf"), (peak + tl.log2(total)) * LN2), mask=there)


@triton.jit
def merge_program(outs, lses, out, lse, splits, rows, values, ROWS: tl.constexpr, V_0: tl.constexpr, V_1: tl.constexpr):
    """Partials of the same rows as one: (split, row, width) and (split, row)."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    there = row < rows
    peak = tl.full([ROWS], -float("inf"), tl.float32)
    for split in range(splits):
        peak = tl.maximum(peak, tl.load(lses + split * rows + row, mask=there, other=-float("inf")))
    origin = tl.where(peak == -float("inf"), 0.0, peak)
    total = tl.zeros([ROWS], tl.float32)
    sum_0, sum_1 = _zeros(ROWS, V_0, V_1)
    for split in range(splits):
        place = split * rows + row
        weight = tl.exp(tl.load(lses + place, mask=there, other=-float("inf")) - origin)
        total += weight
        out_0, out_1 = _read(outs, place * values, there, values, V_0, V_1)
        sum_0 += weight[:, None] * out_0
        if V_1 > 0:
            sum_1 += weight[:, None] * out_1
    nothing = total == 0.0
    total = tl.where(nothing, 1.0, total)
    _write(out, row * values, there, values, sum_0 / total[:, None], sum_1 / total[:, None], V_0, V_1)
    tl.store(lse + row, tl.where(nothing, -float("inf"), origin + tl.log(total)), mask=there)


# --- backward: dout, lse, delta and all gradients are (batch, head, token, ...), one after the other ---


@triton.jit
def _pulls(
    q_0, q_1, k_0, k_1, v_0, v_1, dout_0, dout_1, lse, delta, first, stop, place, scale,
    Q_1: tl.constexpr, V_1: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The weights of a tile, e^(logit - lse), 0 where nothing is seen, and the gradients of its logits."""
    logits = _across(q_0, q_1, k_0, k_1, Q_1, PRECISION) * scale
    sees = (first[:, None] <= place) & (place < stop[:, None])
    weights = tl.exp2(tl.where(sees, (logits - lse[:, None]) * LOG2E, -float("inf")))
    return weights, weights * (_across(dout_0, dout_1, v_0, v_1, V_1, PRECISION) - delta[:, None])


@triton.jit
def queries_backward_program(
    q, k, v, dout, lse, delta, low, high, dq,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row,
    rows, keys, group, kv_heads, width, values, scale,
    ROWS: tl.constexpr, KEYS: tl.constexpr,
    Q_0: tl.constexpr, Q_1: tl.constexpr, V_0: tl.constexpr, V_1: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """dq of one tile of rows."""
    tile, line = tl.program_id(0), tl.program_id(1).to(tl.int64)
    batch, head = line // kv_heads, line % kv_heads
    there, query, member, first, stop = _seen(low, high, tile * ROWS + tl.arange(0, ROWS), rows, group)
    start, end = _run(first, stop, keys)
    q += batch * q_batch + head * group * q_head
    k += batch * k_batch + head * k_head
    v += batch * v_batch + head * v_head
    own = (line * group + member) * (rows // group) + query
    q_0, q_1 = _read(q, member * q_head + query * q_row, there, width, Q_0, Q_1)
    dout_0, dout_1 = _read(dout, own * values, there, values, V_0, V_1)
    its_lse = tl.load(lse + own, mask=there, other=float("inf"))
    its_delta = tl.load(delta + own, mask=there, other=0.0)
    dq_0, dq_1 = _zeros(ROWS, Q_0, Q_1)
    for step in range(start, end, KEYS):
        place = step + tl.arange(0, KEYS).to(tl.int64)
        known = place < end
        k_0, k_1 = _read(k, place * k_row, known, width, Q_0, Q_1)
        v_0, v_1 = _read(v, place * v_row, known, values, V_0, V_1)
        _, pull = _pulls(
            q_0, q_1, k_0, k_1, v_0, v_1, dout_0, dout_1, its_lse, its_delta, first, stop, place, scale,
            Q_1, V_1, PRECISION,
        )  # fmt: skip
        dq_0, dq_1 = _add(dq_0, dq_1, pull.to(k.dtype.element_ty), k_0, k_1, Q_1, PRECISION)
    _write(dq, own * width, there, width, dq_0 * scale, dq_1 * scale, Q_0, Q_1)


@triton.jit
def keys_backward_program(
    q, k, v, dout, lse, delta, low, high, begin, finish, dk, dv,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row,
    rows, keys, group, kv_heads, width, values, scale,
    ROWS: tl.constexpr, KEYS: tl.constexpr,
    Q_0: tl.constexpr, Q_1: tl.constexpr, V_0: tl.constexpr, V_1: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """dk and dv of one tile of keys, which the queries from its `begin` up to its `finish` see."""
    tile, line = tl.program_id(0), tl.program_id(1).to(tl.int64)
    batch, head = line // kv_heads, line % kv_heads
    place = tile.to(tl.int64) * KEYS + tl.arange(0, KEYS)
    known = place < keys
    q += batch * q_batch + head * group * q_head
    k += batch * k_batch + head * k_head
    v += batch * v_batch + head * v_head
    k_0, k_1 = _read(k, place * k_row, known, width, Q_0, Q_1)
    v_0, v_1 = _read(v, place * v_row, known, values, V_0, V_1)
    dk_0, dk_1 = _zeros(KEYS, Q_0, Q_1)
    dv_0, dv_1 = _zeros(KEYS, V_0, V_1)
    end = tl.load(finish + tile) * group
    for step in range(tl.load(begin + tile) * group, end, ROWS):
        there, query, member, first, stop = _seen(low, high, step + tl.arange(0, ROWS), end, group)
        own = (line * group + member) * (rows // group) + query
        q_0, q_1 = _read(q, member * q_head + query * q_row, there, width, Q_0, Q_1)
        dout_0, dout_1 = _read(dout, own * values, there, values, V_0, V_1)
        its_lse = tl.load(lse + own, mask=there, other=float("inf"))
        its_delta = tl.load(delta + own, mask=there, other=0.0)
        weights, pull = _pulls(
            q_0, q_1, k_0, k_1, v_0, v_1, dout_0, dout_1, its_lse, its_delta, first, stop, place, scale,
            Q_1, V_1, PRECISION,
        )  # fmt: skip
        dv_0, dv_1 = _add(dv_0, dv_1, tl.trans(weights.to(dout.dtype.element_ty)), dout_0, dout_1, V_1, PRECISION)
        dk_0, dk_1 = _add(dk_0, dk_1, tl.trans(pull.to(q.dtype.element_ty)), q_0, q_1, Q_1, PRECISION)
    own = line * keys + place
    _write(dk, own * width, known, width, dk_0 * scale, dk_1 * scale, Q_0, Q_1)
    _write(dv, own * values, known, values, dv_0, dv_1, V_0, V_1)
