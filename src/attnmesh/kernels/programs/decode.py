"""Triton programs for decoding: attention over the slots of a cache, merges of partials, checksums of calls.

They need no value from the CPU. The number of tokens and the position of each slot's token are on the device, and the
grid covers all slots. So one captured CUDA graph is valid while the cache grows.
"""

import triton
import triton.language as tl

from attnmesh.core import digest
from attnmesh.kernels.programs.tiles import (
    LN2,
    accumulate,
    logits_of,
    max_checksum,
    merge_rows,
    program,
    read,
    store_rows,
    zeros,
)

GOLDEN_GAMMA, MIX_FACTOR = tl.constexpr(digest.GOLDEN_GAMMA), tl.constexpr(digest.MIX_FACTOR)

# --- attention over this rank's slots ---


@triton.jit
def _count_below(numbers, count, target, WIDE: tl.constexpr):
    """Return how many of ascending numbers are below a target, by a search that reads WIDE numbers at once."""
    low, high = 0, count
    while low < high:
        stride = tl.cdiv(high - low, WIDE)
        index = low + tl.arange(0, WIDE) * stride
        inside = index < high
        smaller = tl.sum((inside & (tl.load(numbers + index, mask=inside, other=0) < target)).to(tl.int32))
        high = tl.minimum(low + smaller * stride, high)
        low = tl.where(smaller > 0, low + (smaller - 1) * stride + 1, low)
    return low


@program()
def attend_cache_program(
    q, k, v, positions, token_index, device_counts, firsts, lasts, out, lse,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row, positions_batch, bounds_batch,
    rows, group, kv_heads, block, capacity, left, right, width, value_width, scale, softcap,
    ROWS: tl.constexpr, KEYS: tl.constexpr,
    Q_0: tl.constexpr, Q_1: tl.constexpr, V_0: tl.constexpr, V_1: tl.constexpr,
    BOUNDED: tl.constexpr, NEAR: tl.constexpr, CAPPED: tl.constexpr, PRECISION: tl.constexpr,
    K_ROW: tl.constexpr, V_ROW: tl.constexpr, FLOAT8: tl.constexpr, SELECTED: tl.constexpr,
):  # fmt: skip
    """Store the partial of a tile of rows over a part of the slots; `out` is (part, batch, head, query, value_width).

    A part is `block` slots, or if that is 0 an equal share of the slots that any row can see. The result is NaN if
    there are more tokens than capacity, or fewer than queries.

        BOUNDED        positions that a row sees are read from `firsts` and `lasts`, and otherwise computed from the
                       mask's `left` and `right`
        NEAR           the mask hides old tokens, whose slots are skipped
        K_ROW, V_ROW   numbers of a row in 8 bits, before its scales; 0 for plain keys and values
        SELECTED       `positions` has the rows to read, -1 for none, and otherwise the position of each slot's token
    """
    part = tl.program_id(0)
    tile = tl.program_id(1)
    batch_head = tl.program_id(2).to(tl.int64)
    batch, head = batch_head // kv_heads, batch_head % kv_heads
    length = tl.load(device_counts)
    used = tl.load(device_counts + 1).to(tl.int32)
    row = tile * ROWS + tl.arange(0, ROWS)
    valid = row < rows
    query = (row // group).to(tl.int64)
    member = (row % group).to(tl.int64)
    queries = rows // group
    if BOUNDED:
        first = tl.load(firsts + batch * bounds_batch + query, mask=valid, other=0)
        last = tl.load(lasts + batch * bounds_batch + query, mask=valid, other=-1)
    else:
        position = length - queries + query
        first = tl.maximum(position - left, 0)
        last = tl.where(valid, position + right, -1)
    start = 0
    if NEAR:  # padding only makes a token's position smaller than its token index
        start = _count_below(token_index, used, tl.min(tl.where(valid & (last >= 0), first, length)), 256)
    begin = part * block
    share = block
    if block == 0:
        share = tl.cdiv(tl.cdiv(used - start, tl.num_programs(0)), KEYS) * KEYS
        begin = start + part * share
    end = tl.minimum(begin + share, used)
    begin += tl.maximum(start - begin, 0) // KEYS * KEYS

    q += batch * q_batch + head * group * q_head
    k += batch * k_batch + head * k_head
    v += batch * v_batch + head * v_head
    positions += batch * positions_batch
    q_0, q_1 = read(q, member * q_head + query * q_row, valid, width, Q_0, Q_1)
    peak = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    sum_0, sum_1 = zeros(ROWS, V_0, V_1)
    for step in range(begin, end, KEYS):
        slot = step + tl.arange(0, KEYS).to(tl.int64)
        valid_keys = slot < end
        key_position = tl.load(positions + slot, mask=valid_keys, other=-1)  # -1 for padding
        if SELECTED:
            slot = key_position.to(tl.int64)
            valid_keys = key_position >= 0
        logits = logits_of(
            q_0, q_1, k, slot, valid_keys, k_row, width, scale, softcap, Q_0, Q_1, CAPPED, PRECISION, K_ROW, FLOAT8
        )
        visible = (first[:, None] <= key_position) & (key_position <= last[:, None]) & (key_position >= 0)
        logits = tl.where(visible, logits, -float("inf"))
        peak, total, sum_0, sum_1 = accumulate(
            peak, total, sum_0, sum_1, logits, v, slot, valid_keys, v_row, value_width,
            V_0, V_1, PRECISION, V_ROW, FLOAT8,
        )  # fmt: skip
    if (length > capacity) | (length < queries):
        total += float("nan")
    out_row = ((part * tl.num_programs(2) + batch_head) * group + member) * queries + query
    store_rows(total, peak * LN2, sum_0, sum_1, out, lse, out_row, valid, value_width, V_0, V_1)


# --- merges ---


@program()
def merge_program(
    outs, lses, checksums, sinks, out, lse, checksum,
    splits, outs_split, lses_split, checksums_split, rows, queries, heads, value_width,
    ROWS: tl.constexpr, V_0: tl.constexpr, V_1: tl.constexpr,
    HAS_SINKS: tl.constexpr, HAS_CHECKSUMS: tl.constexpr,
):  # fmt: skip
    """Store the merge of partials of the same rows, from stacked tensors or from messages.

    If HAS_CHECKSUMS, the maximum of the checksums is stored, and the result is NaN if ranks disagree. A sink, one logit
    per head, is one more partial.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    valid = row < rows
    sink = tl.full([ROWS], -float("inf"), tl.float32)
    if HAS_SINKS:
        sink = tl.load(sinks + row // queries % heads, mask=valid, other=-float("inf")).to(tl.float32)
    total, origin, sum_0, sum_1 = merge_rows(
        outs, lses, splits, outs_split, lses_split, row, valid, value_width, sink, ROWS, V_0, V_1
    )
    if HAS_CHECKSUMS:
        highest = max_checksum(checksums, splits, checksums_split)
        total = tl.where(tl.sum(highest) == 0.0, total, float("nan"))
        if tl.program_id(0) == 0:
            tl.store(checksum + tl.arange(0, 2), highest)
    store_rows(total, origin, sum_0, sum_1, out, lse, row, valid, value_width, V_0, V_1)


# --- checksums of calls ---


@triton.jit
def _digest(bits, count, WIDE: tl.constexpr):
    """Return a weighted sum of bit patterns modulo 2^64, equal to `core.digest.digest` of a row."""
    total = tl.zeros([WIDE], tl.int64)
    for start in range(0, count, WIDE):
        index = start + tl.arange(0, WIDE).to(tl.int64)
        weight = (index + 1) * GOLDEN_GAMMA
        weight = (weight ^ (weight >> 29)) * MIX_FACTOR
        word = tl.load(bits + index, mask=index < count, other=0).to(tl.int64)
        if bits.dtype.element_ty == tl.int64:
            word = word ^ ((word >> 32) & 0xFFFFFFFF)
        total += word * (weight ^ (weight >> 32) | 1)
    return tl.sum(total)


@program()
def checksum_program(
    bits, count, other_bits, other_count, device_counts, call_hash, checksum, MODULUS: tl.constexpr, WIDE: tl.constexpr
):
    """Store the checksum of a call: of its hash, the cache's length and the bits of two tensors."""
    digests = _digest(bits, count, WIDE) + _digest(other_bits, other_count, WIDE)
    total = (digests + call_hash + tl.load(device_counts)) % MODULUS
    total = tl.where(total < 0, total + MODULUS, total).to(tl.float32)
    tl.store(checksum + tl.arange(0, 2), tl.where(tl.arange(0, 2) == 0, total, -total))
