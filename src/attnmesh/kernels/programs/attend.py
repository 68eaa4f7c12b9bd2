"""Attention as programs of Triton: a tile of rows against its run of keys, for any mask and layout in one launch.

A row is one query of one head. The heads that share a key head lie next to each other, query by query, so that a tile
of rows reads each key once. A row sees the keys from its query's `low` up to its `high`, and neither ever decreases:
a tile goes from its first row's low to its last row's high, and compares positions only at both edges of that run.
"""

import triton
import triton.language as tl

from attnmesh.kernels.programs.tiles import (
    LN2,
    LOG2E,
    absorbed,
    across,
    add,
    logits_of,
    program,
    read,
    settled,
    write,
    zeros,
)

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


@program()
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
    q_0, q_1 = read(q, member * q_head + query * q_row, there, width, Q_0, Q_1)
    peak = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    sum_0, sum_1 = zeros(ROWS, V_0, V_1)
    for step in range(start, end, KEYS):
        place = step + tl.arange(0, KEYS).to(tl.int64)
        known = place < end
        logits = logits_of(q_0, q_1, k, place, known, k_row, width, scale * LOG2E, Q_0, Q_1, PRECISION)
        if (step < alike) | (step + KEYS > until):
            sees = (first[:, None] <= place) & (place < stop[:, None]) & known
            logits = tl.where(sees, logits, -float("inf"))
        peak, total, sum_0, sum_1 = absorbed(
            peak, total, sum_0, sum_1, logits, v, place, known, v_row, values, V_0, V_1, PRECISION
        )
    own = ((split * tl.num_programs(2) + line) * group + member) * (rows // group) + query
    settled(total, peak * LN2, sum_0, sum_1, out, lse, own, there, values, V_0, V_1)


# --- backward: dout, lse, delta and all gradients are (batch, head, token, ...), one after the other ---


@triton.jit
def _pulls(
    q_0, q_1, k_0, k_1, v_0, v_1, dout_0, dout_1, lse, delta, first, stop, place, scale,
    Q_1: tl.constexpr, V_1: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The weights of a tile, e^(logit - lse), 0 where nothing is seen, and the gradients of its logits."""
    logits = across(q_0, q_1, k_0, k_1, Q_1, PRECISION) * scale
    sees = (first[:, None] <= place) & (place < stop[:, None])
    weights = tl.exp2(tl.where(sees, (logits - lse[:, None]) * LOG2E, -float("inf")))
    return weights, weights * (across(dout_0, dout_1, v_0, v_1, V_1, PRECISION) - delta[:, None])


@program()
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
    q_0, q_1 = read(q, member * q_head + query * q_row, there, width, Q_0, Q_1)
    dout_0, dout_1 = read(dout, own * values, there, values, V_0, V_1)
    its_lse = tl.load(lse + own, mask=there, other=float("inf"))
    its_delta = tl.load(delta + own, mask=there, other=0.0)
    dq_0, dq_1 = zeros(ROWS, Q_0, Q_1)
    for step in range(start, end, KEYS):
        place = step + tl.arange(0, KEYS).to(tl.int64)
        known = place < end
        k_0, k_1 = read(k, place * k_row, known, width, Q_0, Q_1)
        v_0, v_1 = read(v, place * v_row, known, values, V_0, V_1)
        _, pull = _pulls(
            q_0, q_1, k_0, k_1, v_0, v_1, dout_0, dout_1, its_lse, its_delta, first, stop, place, scale,
            Q_1, V_1, PRECISION,
        )  # fmt: skip
        dq_0, dq_1 = add(dq_0, dq_1, pull.to(k.dtype.element_ty), k_0, k_1, Q_1, PRECISION)
    write(dq, own * width, there, width, dq_0 * scale, dq_1 * scale, Q_0, Q_1)


@program()
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
    k_0, k_1 = read(k, place * k_row, known, width, Q_0, Q_1)
    v_0, v_1 = read(v, place * v_row, known, values, V_0, V_1)
    dk_0, dk_1 = zeros(KEYS, Q_0, Q_1)
    dv_0, dv_1 = zeros(KEYS, V_0, V_1)
    end = tl.load(finish + tile) * group
    for step in range(tl.load(begin + tile) * group, end, ROWS):
        there, query, member, first, stop = _seen(low, high, step + tl.arange(0, ROWS), end, group)
        own = (line * group + member) * (rows // group) + query
        q_0, q_1 = read(q, member * q_head + query * q_row, there, width, Q_0, Q_1)
        dout_0, dout_1 = read(dout, own * values, there, values, V_0, V_1)
        its_lse = tl.load(lse + own, mask=there, other=float("inf"))
        its_delta = tl.load(delta + own, mask=there, other=0.0)
        weights, pull = _pulls(
            q_0, q_1, k_0, k_1, v_0, v_1, dout_0, dout_1, its_lse, its_delta, first, stop, place, scale,
            Q_1, V_1, PRECISION,
        )  # fmt: skip
        dv_0, dv_1 = add(dv_0, dv_1, tl.trans(weights.to(dout.dtype.element_ty)), dout_0, dout_1, V_1, PRECISION)
        dk_0, dk_1 = add(dk_0, dk_1, tl.trans(pull.to(q.dtype.element_ty)), q_0, q_1, Q_1, PRECISION)
    own = line * keys + place
    write(dk, own * width, known, width, dk_0 * scale, dk_1 * scale, Q_0, Q_1)
    write(dv, own * values, known, values, dv_0, dv_1, V_0, V_1)
