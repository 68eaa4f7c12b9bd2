"""Attention as programs of Triton: a tile of rows against its run of keys, for any mask and layout in one launch.

A row is one query of one head. The heads that share a key head lie next to each other, query by query, so that a tile
of rows reads each key once. A row sees the keys from its query's `low` up to its `high`, and neither ever decreases:
a tile goes from its first row's low to its last row's high, and compares positions only at both edges of that run.

A width is cut into two parts, each a power of two, the second possibly none: 192 is 128 + 64, and 576 is 512 + 64.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _read(base, places, stride, there, FIRST: tl.constexpr, PART: tl.constexpr, width):
    """Columns from `FIRST` on of some rows of a matrix; 0 for rows and columns that are not there."""
    columns = FIRST + tl.arange(0, PART)
    return tl.load(
        base + places[:, None] * stride + columns[None, :],
        mask=there[:, None] & (columns < width)[None, :],
        other=0.0,
    )


@triton.jit
def _write(base, places, stride, there, FIRST: tl.constexpr, PART: tl.constexpr, width, x):
    columns = FIRST + tl.arange(0, PART)
    tl.store(
        base + places[:, None] * stride + columns[None, :],
        x.to(base.dtype.element_ty),
        mask=there[:, None] & (columns < width)[None, :],
    )


@triton.jit
def _times(a, b, PRECISION: tl.constexpr):
    """A product of two tiles, summed in float32."""
    return tl.dot(a, b, input_precision=PRECISION)


@triton.jit
def _rows(low, high, tile, rows, group, keys, ROWS: tl.constexpr):
    """The rows of a tile: which there are, their queries and heads, and what they see; others see nothing."""
    row = tile * ROWS + tl.arange(0, ROWS)
    there = row < rows
    query, head = row // group, row % group
    first = tl.load(low + query, mask=there, other=0)
    stop = tl.load(high + query, mask=there, other=0)
    stop = tl.where(there, tl.minimum(stop, keys), 0)
    return there, query.to(tl.int64), head.to(tl.int64), tl.maximum(first, 0), stop


@triton.jit
def attend_program(
    q,
    k,
    v,
    low,
    high,
    out,
    lse,
    q_batch,
    q_head,
    q_row,
    k_batch,
    k_head,
    k_row,
    v_batch,
    v_head,
    v_row,
    bounds_batch,
    rows,
    keys,
    group,
    kv_heads,
    span,
    width,
    values,
    scale,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    Q_0: tl.constexpr,
    Q_1: tl.constexpr,
    V_0: tl.constexpr,
    V_1: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The partial of one tile of rows over one span of keys; `out` is (span, batch, head, query, width)."""
    tile, split, line = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    batch, head = line // kv_heads, line % kv_heads
    low += batch * bounds_batch
    high += batch * bounds_batch
    there, query, member, first, stop = _rows(low, high, tile, rows, group, keys, ROWS)
    seeing = there & (first < stop)
    start = tl.maximum(tl.min(tl.where(seeing, first, keys)), split * span)
    end = tl.minimum(tl.max(tl.where(seeing, stop, 0)), tl.minimum((split + 1) * span, keys))
    # From `alike` up to `until`, in whole steps from start, every row of the tile sees every key.
    all_see = tl.min(tl.where(there, seeing.to(tl.int32), 1)) > 0
    alike = tl.maximum(tl.max(tl.where(there, first, 0)), start)
    until = tl.minimum(tl.min(tl.where(there, stop, keys)), end)
    alike = tl.where(all_see, start + tl.cdiv(alike - start, KEYS) * KEYS, end)

    base = q + batch * q_batch + head * group * q_head
    places = member * q_head + query * q_row
    q_0 = _read(base, places, 1, there, 0, Q_0, width)
    if Q_1 > 0:
        q_1 = _read(base, places, 1, there, Q_0, Q_1, width)
    k += batch * k_batch + head * k_head
    v += batch * v_batch + head * v_head
    peak = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    sum_0 = tl.zeros([ROWS, V_0], tl.float32)
    if V_1 > 0:
        sum_1 = tl.zeros([ROWS, V_1], tl.float32)
    for step in range(start, end, KEYS):
        place = step + tl.arange(0, KEYS).to(tl.int64)
        known = place < end
        logits = _times(q_0, tl.trans(_read(k, place, k_row, known, 0, Q_0, width)), PRECISION)
        if Q_1 > 0:
            logits += _times(q_1, tl.trans(_read(k, place, k_row, known, Q_0, Q_1, width)), PRECISION)
        logits *= scale * LOG2E
        if (step < alike) | (step + KEYS > until):
            sees = (first[:, None] <= place[None, :]) & (place[None, :] < stop[:, None]) & known[None, :]
            logits = tl.where(sees, logits, -float("inf"))
        higher = tl.maximum(peak, tl.max(logits, 1))
        origin = tl.where(higher == -float("inf"), 0.0, higher)
        weights = tl.exp2(logits - origin[:, None])
        kept = tl.exp2(peak - origin)
        total = total * kept + tl.sum(weights, 1)
        peak = higher
        rounded = weights.to(v.dtype.element_ty)
        sum_0 = sum_0 * kept[:, None] + _times(rounded, _read(v, place, v_row, known, 0, V_0, values), PRECISION)
        if V_1 > 0:
            sum_1 = sum_1 * kept[:, None] + _times(rounded, _read(v, place, v_row, known, V_0, V_1, values), PRECISION)

    blind = total == 0.0
    total = tl.where(blind, 1.0, total)
    places = ((split * tl.num_programs(2) + line) * group + member) * (rows // group) + query
    _write(out, places, values, there, 0, V_0, values, sum_0 / total[:, None])
    if V_1 > 0:
        _write(out, places, values, there, V_0, V_1, values, sum_1 / total[:, None])
    tl.store(lse + places, tl.where(blind, -float("inf"), (peak + tl.log2(total)) * LN2), mask=there)


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
    sum_0 = tl.zeros([ROWS, V_0], tl.float32)
    if V_1 > 0:
        sum_1 = tl.zeros([ROWS, V_1], tl.float32)
    for split in range(splits):
        places = split * rows + row
        weight = tl.exp(tl.load(lses + places, mask=there, other=-float("inf")) - origin)
        total += weight
        sum_0 += weight[:, None] * _read(outs, places, values, there, 0, V_0, values).to(tl.float32)
        if V_1 > 0:
            sum_1 += weight[:, None] * _read(outs, places, values, there, V_0, V_1, values).to(tl.float32)
    blind = total == 0.0
    total = tl.where(blind, 1.0, total)
    _write(out, row, values, there, 0, V_0, values, sum_0 / total[:, None])
    if V_1 > 0:
        _write(out, row, values, there, V_0, V_1, values, sum_1 / total[:, None])
    tl.store(lse + row, tl.where(blind, -float("inf"), origin + tl.log(total)), mask=there)


@triton.jit
def _weighed(q_0, q_1, k_0, k_1, lse, first, stop, place, scale, Q_1: tl.constexpr, PRECISION: tl.constexpr):
    """The weights of a tile, e^(logit - lse), 0 where nothing is seen."""
    logits = _times(q_0, tl.trans(k_0), PRECISION)
    if Q_1 > 0:
        logits += _times(q_1, tl.trans(k_1), PRECISION)
    sees = (first[:, None] <= place[None, :]) & (place[None, :] < stop[:, None])
    return tl.where(sees, tl.exp2((logits * scale - lse[:, None]) * LOG2E), 0.0)


@triton.jit
def _pull(weights, dout_0, dout_1, v_0, v_1, delta, V_1: tl.constexpr, PRECISION: tl.constexpr):
    """The gradients of a tile's logits."""
    pull = _times(dout_0, tl.trans(v_0), PRECISION)
    if V_1 > 0:
        pull += _times(dout_1, tl.trans(v_1), PRECISION)
    return weights * (pull - delta[:, None])


@triton.jit
def queries_backward_program(
    q,
    k,
    v,
    dout,
    lse,
    delta,
    low,
    high,
    dq,
    q_batch,
    q_head,
    q_row,
    k_batch,
    k_head,
    k_row,
    v_batch,
    v_head,
    v_row,
    bounds_batch,
    rows,
    keys,
    group,
    kv_heads,
    width,
    values,
    scale,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    Q_0: tl.constexpr,
    Q_1: tl.constexpr,
    V_0: tl.constexpr,
    V_1: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """dq of one tile of rows; dout, lse, delta and dq are (batch, head, query, ...), one after the other."""
    tile, line = tl.program_id(0), tl.program_id(1).to(tl.int64)
    batch, head = line // kv_heads, line % kv_heads
    low += batch * bounds_batch
    high += batch * bounds_batch
    there, query, member, first, stop = _rows(low, high, tile, rows, group, keys, ROWS)
    seeing = there & (first < stop)
    start = tl.min(tl.where(seeing, first, keys))
    end = tl.max(tl.where(seeing, stop, 0))
    base, places = q + batch * q_batch + head * group * q_head, member * q_head + query * q_row
    own = (line * group + member) * (rows // group) + query
    q_0, q_1 = _read(base, places, 1, there, 0, Q_0, width), 0.0
    dout_0, dout_1 = _read(dout, own, values, there, 0, V_0, values), 0.0
    dq_0 = tl.zeros([ROWS, Q_0], tl.float32)
    if Q_1 > 0:
        q_1 = _read(base, places, 1, there, Q_0, Q_1, width)
        dq_1 = tl.zeros([ROWS, Q_1], tl.float32)
    if V_1 > 0:
        dout_1 = _read(dout, own, values, there, V_0, V_1, values)
    its_lse = tl.load(lse + own, mask=there, other=float("inf"))
    its_delta = tl.load(delta + own, mask=there, other=0.0)
    k += batch * k_batch + head * k_head
    v += batch * v_batch + head * v_head
    for step in range(start, end, KEYS):
        place = step + tl.arange(0, KEYS).to(tl.int64)
        known = place < end
        k_0, k_1 = _read(k, place, k_row, known, 0, Q_0, width), 0.0
        v_0, v_1 = _read(v, place, v_row, known, 0, V_0, values), 0.0
        if Q_1 > 0:
            k_1 = _read(k, place, k_row, known, Q_0, Q_1, width)
        if V_1 > 0:
            v_1 = _read(v, place, v_row, known, V_0, V_1, values)
        weights = _weighed(q_0, q_1, k_0, k_1, its_lse, first, stop, place, scale, Q_1, PRECISION)
        pull = _pull(weights, dout_0, dout_1, v_0, v_1, its_delta, V_1, PRECISION).to(k.dtype.element_ty)
        dq_0 += _times(pull, k_0, PRECISION)
        if Q_1 > 0:
            dq_1 += _times(pull, k_1, PRECISION)
    _write(dq, own, width, there, 0, Q_0, width, dq_0 * scale)
    if Q_1 > 0:
        _write(dq, own, width, there, Q_0, Q_1, width, dq_1 * scale)


@triton.jit
def keys_backward_program(
    q,
    k,
    v,
    dout,
    lse,
    delta,
    low,
    high,
    begin,
    finish,
    dk,
    dv,
    q_batch,
    q_head,
    q_row,
    k_batch,
    k_head,
    k_row,
    v_batch,
    v_head,
    v_row,
    bounds_batch,
    tiles_batch,
    rows,
    keys,
    group,
    kv_heads,
    width,
    values,
    scale,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    Q_0: tl.constexpr,
    Q_1: tl.constexpr,
    V_0: tl.constexpr,
    V_1: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """dk and dv of one tile of keys, which the queries from `begin` up to `finish` of the tile see."""
    tile, line = tl.program_id(0), tl.program_id(1).to(tl.int64)
    batch, head = line // kv_heads, line % kv_heads
    low += batch * bounds_batch
    high += batch * bounds_batch
    start = tl.load(begin + batch * tiles_batch + tile) * group
    end = tl.load(finish + batch * tiles_batch + tile) * group
    place = tile.to(tl.int64) * KEYS + tl.arange(0, KEYS)
    known = place < keys
    k += batch * k_batch + head * k_head
    v += batch * v_batch + head * v_head
    k_0, k_1 = _read(k, place, k_row, known, 0, Q_0, width), 0.0
    v_0, v_1 = _read(v, place, v_row, known, 0, V_0, values), 0.0
    dk_0 = tl.zeros([KEYS, Q_0], tl.float32)
    dv_0 = tl.zeros([KEYS, V_0], tl.float32)
    if Q_1 > 0:
        k_1 = _read(k, place, k_row, known, Q_0, Q_1, width)
        dk_1 = tl.zeros([KEYS, Q_1], tl.float32)
    if V_1 > 0:
        v_1 = _read(v, place, v_row, known, V_0, V_1, values)
        dv_1 = tl.zeros([KEYS, V_1], tl.float32)
    q += batch * q_batch + head * group * q_head
    for step in range(start, end, ROWS):
        row = step + tl.arange(0, ROWS)
        there = row < end
        query, member = (row // group).to(tl.int64), (row % group).to(tl.int64)
        first = tl.load(low + query, mask=there, other=0)
        stop = tl.load(high + query, mask=there, other=0)
        places, own = member * q_head + query * q_row, (line * group + member) * (rows // group) + query
        q_0, q_1 = _read(q, places, 1, there, 0, Q_0, width), 0.0
        dout_0, dout_1 = _read(dout, own, values, there, 0, V_0, values), 0.0
        if Q_1 > 0:
            q_1 = _read(q, places, 1, there, Q_0, Q_1, width)
        if V_1 > 0:
            dout_1 = _read(dout, own, values, there, V_0, V_1, values)
        its_lse = tl.load(lse + own, mask=there, other=float("inf"))
        its_delta = tl.load(delta + own, mask=there, other=0.0)
        weights = _weighed(q_0, q_1, k_0, k_1, its_lse, first, stop, place, scale, Q_1, PRECISION)
        pull = tl.trans(_pull(weights, dout_0, dout_1, v_0, v_1, its_delta, V_1, PRECISION).to(q.dtype.element_ty))
        weights = tl.trans(weights.to(dout.dtype.element_ty))
        dv_0 += _times(weights, dout_0, PRECISION)
        dk_0 += _times(pull, q_0, PRECISION)
        if V_1 > 0:
            dv_1 += _times(weights, dout_1, PRECISION)
        if Q_1 > 0:
            dk_1 += _times(pull, q_1, PRECISION)
    own = line * keys + place
    _write(dk, own, width, known, 0, Q_0, width, dk_0 * scale)
    _write(dv, own, values, known, 0, V_0, values, dv_0)
    if Q_1 > 0:
        _write(dk, own, width, known, Q_0, Q_1, width, dk_1 * scale)
    if V_1 > 0:
        _write(dv, own, values, known, V_0, V_1, values, dv_1)
