"""Triton programs for attention, forward and backward: one launch for any mask and layout.

A row is one query of one head. Rows are ordered by query, then by the heads that share a key head, so that a tile of
rows reads each key once. A row sees the keys from its query's `low` up to its `high`. Neither bound decreases: a
tile visits the keys from its first row's low to its last row's high, and masks only at both edges of that run. The
queries that see a key of a tile of keys are from the tile's `begin` up to its `finish`.

A tile's columns are cut into two parts, named `_0` and `_1`, as in `tiles.py`.
"""

import triton
import triton.language as tl

from attnmesh.kernels.programs.tiles import (
    LN2,
    LOG2E,
    accumulate,
    add_weighted,
    logits_of,
    program,
    read,
    row_products,
    store_rows,
    tanh,
    write,
    zeros,
)

# --- rows ---


@triton.jit
def _load_rows(low, high, row, rows, group):
    """Return for some rows: if they are valid, query, member of the head group, and first and last key + 1."""
    valid = row < rows
    query, member = (row // group).to(tl.int64), (row % group).to(tl.int64)
    first = tl.load(low + query, mask=valid, other=0)
    stop = tl.load(high + query, mask=valid, other=0)
    return valid, query, member, first, stop


@triton.jit
def _key_run(first, stop, keys):
    """Return the run of keys that any of the rows sees."""
    sees_any = first < stop
    return tl.min(tl.where(sees_any, first, keys)), tl.max(tl.where(sees_any, stop, 0))


# --- forward ---


@program()
def attend_program(
    q, k, v, low, high, out, lse,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row,
    rows, keys, group, kv_heads, split_keys, width, value_width, scale, softcap,
    ROWS: tl.constexpr, KEYS: tl.constexpr,
    Q_0: tl.constexpr, Q_1: tl.constexpr, V_0: tl.constexpr, V_1: tl.constexpr,
    CAPPED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Store the partial of a tile of rows over a split, `split_keys` keys.

    `out` is (split, batch, head, query, value_width).
    """
    tile = tl.program_id(0)
    split = tl.program_id(1)
    batch_head = tl.program_id(2).to(tl.int64)
    batch, head = batch_head // kv_heads, batch_head % kv_heads
    valid, query, member, first, stop = _load_rows(low, high, tile * ROWS + tl.arange(0, ROWS), rows, group)
    start, end = _key_run(first, stop, keys)
    start = tl.maximum(start, split * split_keys)
    end = tl.minimum(end, (split + 1) * split_keys)
    # From `full_start` up to `full_end`, in whole steps from start, every row of the tile sees every key.
    any_empty = tl.max((valid & (first >= stop)).to(tl.int32))
    full_start = tl.maximum(tl.max(tl.where(valid, first, 0)), start)
    full_start = tl.where(any_empty > 0, end, start + tl.cdiv(full_start - start, KEYS) * KEYS)
    full_end = tl.minimum(tl.min(tl.where(valid, stop, keys)), end)

    q += batch * q_batch + head * group * q_head
    k += batch * k_batch + head * k_head
    v += batch * v_batch + head * v_head
    q_0, q_1 = read(q, member * q_head + query * q_row, valid, width, Q_0, Q_1)
    peak = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    sum_0, sum_1 = zeros(ROWS, V_0, V_1)
    for step in range(start, end, KEYS):
        key = step + tl.arange(0, KEYS).to(tl.int64)
        valid_keys = key < end
        logits = logits_of(q_0, q_1, k, key, valid_keys, k_row, width, scale, softcap, Q_0, Q_1, CAPPED, PRECISION)
        if (step < full_start) | (step + KEYS > full_end):
            visible = (first[:, None] <= key) & (key < stop[:, None]) & valid_keys
            logits = tl.where(visible, logits, -float("inf"))
        peak, total, sum_0, sum_1 = accumulate(
            peak, total, sum_0, sum_1, logits, v, key, valid_keys, v_row, value_width, V_0, V_1, PRECISION
        )
    out_row = ((split * tl.num_programs(2) + batch_head) * group + member) * (rows // group) + query
    store_rows(total, peak * LN2, sum_0, sum_1, out, lse, out_row, valid, value_width, V_0, V_1)


# --- backward: dout, lse, delta and all gradients are contiguous, (batch, head, token, ...) ---


@triton.jit
def _weights_and_gradients(
    q_0, q_1, k_0, k_1, v_0, v_1, dout_0, dout_1, lse, delta, first, stop, key, scale, softcap,
    Q_1: tl.constexpr, V_1: tl.constexpr, CAPPED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return the weights of a tile, e^(logit - lse), 0 for invisible keys, and the gradients of its scaled products."""
    logits = row_products(q_0, q_1, k_0, k_1, Q_1, PRECISION) * scale
    slope = 1.0
    if CAPPED:
        bounded = tanh(logits / softcap)
        logits, slope = bounded * softcap, 1.0 - bounded * bounded
    visible = (first[:, None] <= key) & (key < stop[:, None])
    weights = tl.exp2(tl.where(visible, (logits - lse[:, None]) * LOG2E, -float("inf")))
    return weights, weights * (row_products(dout_0, dout_1, v_0, v_1, V_1, PRECISION) - delta[:, None]) * slope


@program()
def queries_backward_program(
    q, k, v, dout, lse, delta, low, high, dq,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row,
    rows, keys, group, kv_heads, width, value_width, scale, softcap,
    ROWS: tl.constexpr, KEYS: tl.constexpr,
    Q_0: tl.constexpr, Q_1: tl.constexpr, V_0: tl.constexpr, V_1: tl.constexpr,
    CAPPED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Store dq of a tile of rows."""
    tile = tl.program_id(0)
    batch_head = tl.program_id(1).to(tl.int64)
    batch, head = batch_head // kv_heads, batch_head % kv_heads
    valid, query, member, first, stop = _load_rows(low, high, tile * ROWS + tl.arange(0, ROWS), rows, group)
    start, end = _key_run(first, stop, keys)
    q += batch * q_batch + head * group * q_head
    k += batch * k_batch + head * k_head
    v += batch * v_batch + head * v_head
    out_row = (batch_head * group + member) * (rows // group) + query
    q_0, q_1 = read(q, member * q_head + query * q_row, valid, width, Q_0, Q_1)
    dout_0, dout_1 = read(dout, out_row * value_width, valid, value_width, V_0, V_1)
    row_lse = tl.load(lse + out_row, mask=valid, other=float("inf"))
    row_delta = tl.load(delta + out_row, mask=valid, other=0.0)
    dq_0, dq_1 = zeros(ROWS, Q_0, Q_1)
    for step in range(start, end, KEYS):
        key = step + tl.arange(0, KEYS).to(tl.int64)
        valid_keys = key < end
        k_0, k_1 = read(k, key * k_row, valid_keys, width, Q_0, Q_1)
        v_0, v_1 = read(v, key * v_row, valid_keys, value_width, V_0, V_1)
        _, dlogits = _weights_and_gradients(
            q_0, q_1, k_0, k_1, v_0, v_1, dout_0, dout_1, row_lse, row_delta, first, stop, key, scale, softcap,
            Q_1, V_1, CAPPED, PRECISION,
        )  # fmt: skip
        dq_0, dq_1 = add_weighted(dq_0, dq_1, dlogits.to(k.dtype.element_ty), k_0, k_1, Q_1, PRECISION)
    write(dq, out_row * width, valid, width, dq_0 * scale, dq_1 * scale, Q_0, Q_1)


@program()
def keys_backward_program(
    q, k, v, dout, lse, delta, low, high, begin, finish, dk, dv,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row,
    rows, keys, group, kv_heads, width, value_width, scale, softcap,
    ROWS: tl.constexpr, KEYS: tl.constexpr,
    Q_0: tl.constexpr, Q_1: tl.constexpr, V_0: tl.constexpr, V_1: tl.constexpr,
    CAPPED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Store dk and dv of a tile of keys."""
    tile = tl.program_id(0)
    batch_head = tl.program_id(1).to(tl.int64)
    batch, head = batch_head // kv_heads, batch_head % kv_heads
    key = tile.to(tl.int64) * KEYS + tl.arange(0, KEYS)
    valid_keys = key < keys
    q += batch * q_batch + head * group * q_head
    k += batch * k_batch + head * k_head
    v += batch * v_batch + head * v_head
    k_0, k_1 = read(k, key * k_row, valid_keys, width, Q_0, Q_1)
    v_0, v_1 = read(v, key * v_row, valid_keys, value_width, V_0, V_1)
    dk_0, dk_1 = zeros(KEYS, Q_0, Q_1)
    dv_0, dv_1 = zeros(KEYS, V_0, V_1)
    end = tl.load(finish + tile) * group
    for step in range(tl.load(begin + tile) * group, end, ROWS):
        valid, query, member, first, stop = _load_rows(low, high, step + tl.arange(0, ROWS), end, group)
        out_row = (batch_head * group + member) * (rows // group) + query
        q_0, q_1 = read(q, member * q_head + query * q_row, valid, width, Q_0, Q_1)
        dout_0, dout_1 = read(dout, out_row * value_width, valid, value_width, V_0, V_1)
        row_lse = tl.load(lse + out_row, mask=valid, other=float("inf"))
        row_delta = tl.load(delta + out_row, mask=valid, other=0.0)
        weights, dlogits = _weights_and_gradients(
            q_0, q_1, k_0, k_1, v_0, v_1, dout_0, dout_1, row_lse, row_delta, first, stop, key, scale, softcap,
            Q_1, V_1, CAPPED, PRECISION,
        )  # fmt: skip
        dv_0, dv_1 = add_weighted(
            dv_0, dv_1, tl.trans(weights.to(dout.dtype.element_ty)), dout_0, dout_1, V_1, PRECISION
        )
        dk_0, dk_1 = add_weighted(dk_0, dk_1, tl.trans(dlogits.to(q.dtype.element_ty)), q_0, q_1, Q_1, PRECISION)
    out_row = batch_head * keys + key
    write(dk, out_row * width, valid_keys, width, dk_0 * scale, dk_1 * scale, Q_0, Q_1)
    write(dv, out_row * value_width, valid_keys, value_width, dv_0, dv_1, V_0, V_1)
