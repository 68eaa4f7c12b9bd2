"""Decoding as programs of Triton: the last queries against the slots of a cache, merges, and what ranks compare.

Nothing here asks the host. How many tokens there are stands on the device, each slot has its token's position beside
it, and the grid is as large as the cache's room: one captured graph serves a cache that grows.
"""

import triton
import triton.language as tl

from attnmesh.kernels.programs.tiles import (
    LN2,
    LOG2E,
    absorbed,
    highest_of,
    joined,
    logits_of,
    program,
    read,
    settled,
    zeros,
)

# --- a rank's own part of a step ---


@triton.jit
def _below(numbers, count, target, WIDE: tl.constexpr):
    """How many of ascending numbers are below a target, looking at many of them at once."""
    low, high = 0, count
    while low < high:
        stride = tl.cdiv(high - low, WIDE)
        place = low + tl.arange(0, WIDE) * stride
        inside = place < high
        smaller = tl.sum((inside & (tl.load(numbers + place, mask=inside, other=0) < target)).to(tl.int32))
        high = tl.minimum(low + smaller * stride, high)
        low = tl.where(smaller > 0, low + (smaller - 1) * stride + 1, low)
    return low


@program()
def held_program(
    q, k, v, places, columns, state, firsts, lasts, out, lse,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row, places_batch, bounds_batch,
    rows, group, kv_heads, block, capacity, left, right, width, values, scale,
    ROWS: tl.constexpr, KEYS: tl.constexpr,
    Q_0: tl.constexpr, Q_1: tl.constexpr, V_0: tl.constexpr, V_1: tl.constexpr,
    BOUNDED: tl.constexpr, NEAR: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The partial of one tile of rows over one part of the slots; `out` is (part, batch, head, query, width).

    A part is `block` slots, or where that is 0 an even share of those that any row can see. A row sees positions from
    its first to its last: read where they are BOUNDED, else told by the mask's reach. NEAR masks leave old slots out.
    A cache that holds more than its capacity, or fewer tokens than there are queries, answers with NaN.
    """
    part, tile, line = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    batch, head = line // kv_heads, line % kv_heads
    length, used = tl.load(state), tl.load(state + 1).to(tl.int32)
    row = tile * ROWS + tl.arange(0, ROWS)
    there, query, member = row < rows, (row // group).to(tl.int64), (row % group).to(tl.int64)
    queries = rows // group
    if BOUNDED:
        first = tl.load(firsts + batch * bounds_batch + query, mask=there, other=0)
        last = tl.load(lasts + batch * bounds_batch + query, mask=there, other=-1)
    else:
        position = length - queries + query
        first, last = tl.maximum(position - left, 0), tl.where(there, position + right, -1)
    start = 0
    if NEAR:  # padding only ever moves a token's place forward from its column
        start = _below(columns, used, tl.min(tl.where(there & (last >= 0), first, length)), 256)
    begin, share = part * block, block
    if block == 0:
        share = tl.cdiv(tl.cdiv(used - start, tl.num_programs(0)), KEYS) * KEYS
        begin = start + part * share
    end = tl.minimum(begin + share, used)
    begin += tl.maximum(start - begin, 0) // KEYS * KEYS

    q += batch * q_batch + head * group * q_head
    k += batch * k_batch + head * k_head
    v += batch * v_batch + head * v_head
    places += batch * places_batch
    q_0, q_1 = read(q, member * q_head + query * q_row, there, width, Q_0, Q_1)
    peak = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    sum_0, sum_1 = zeros(ROWS, V_0, V_1)
    for step in range(begin, end, KEYS):
        slot = step + tl.arange(0, KEYS).to(tl.int64)
        known = slot < end
        place = tl.load(places + slot, mask=known, other=-1)
        logits = logits_of(q_0, q_1, k, slot, known, k_row, width, scale * LOG2E, Q_0, Q_1, PRECISION)
        sees = (first[:, None] <= place) & (place <= last[:, None]) & (place >= 0)
        logits = tl.where(sees, logits, -float("inf"))
        peak, total, sum_0, sum_1 = absorbed(
            peak, total, sum_0, sum_1, logits, v, slot, known, v_row, values, V_0, V_1, PRECISION
        )
    if (length > capacity) | (length < queries):
        total += float("nan")
    own = ((part * tl.num_programs(2) + line) * group + member) * queries + query
    settled(total, peak * LN2, sum_0, sum_1, out, lse, own, there, values, V_0, V_1)


# --- merges ---


@program()
def merge_program(
    outs, lses, checksums, sinks, out, lse, checksum,
    splits, outs_split, lses_split, checksums_split, rows, queries, heads, values,
    ROWS: tl.constexpr, V_0: tl.constexpr, V_1: tl.constexpr,
    SUNK: tl.constexpr, WITNESSED: tl.constexpr,
):  # fmt: skip
    """Partials of the same rows as one, wherever they lie: in tensors of their own, or packed in messages.

    WITNESSED ones are compared: what is written is the maximum, and if ranks said different things all get NaN. A sink,
    one logit a head, is one more partial.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    there = row < rows
    sink = tl.full([ROWS], -float("inf"), tl.float32)
    if SUNK:
        sink = tl.load(sinks + row // queries % heads, mask=there, other=-float("inf")).to(tl.float32)
    total, origin, sum_0, sum_1 = joined(
        outs, lses, splits, outs_split, lses_split, row, there, values, sink, ROWS, V_0, V_1
    )
    if WITNESSED:
        highest = highest_of(checksums, splits, checksums_split)
        total = tl.where(tl.sum(highest) == 0.0, total, float("nan"))
        if tl.program_id(0) == 0:
            tl.store(checksum + tl.arange(0, 2), highest)
    settled(total, origin, sum_0, sum_1, out, lse, row, there, values, V_0, V_1)


# --- what ranks compare ---


@triton.jit
def _digest(bits, count, WIDE: tl.constexpr):
    """Each bit pattern weighed by an odd number of its own, modulo 2^64: as `agree.digest` does with a row of them."""
    total = tl.zeros([WIDE], tl.int64)
    for start in range(0, count, WIDE):
        place = start + tl.arange(0, WIDE).to(tl.int64)
        weight = (place + 1) * -7046029254386353131
        weight = (weight ^ (weight >> 29)) * -4658895280553007687
        number = tl.load(bits + place, mask=place < count, other=0).to(tl.int64)
        if bits.dtype.element_ty == tl.int64:
            number = number ^ (number >> 32)
        total += number * (weight ^ (weight >> 32) | 1)
    return tl.sum(total)


@program()
def checksum_program(bits, count, more, more_count, state, number, checksum, MODULUS: tl.constexpr, WIDE: tl.constexpr):
    """A call's number, the cache's length and the bits of two tensors as one number, and less that number."""
    rest = (_digest(bits, count, WIDE) + _digest(more, more_count, WIDE) + number + tl.load(state)) % MODULUS
    rest = tl.where(rest < 0, rest + MODULUS, rest).to(tl.float32)
    tl.store(checksum + tl.arange(0, 2), tl.where(tl.arange(0, 2) == 0, rest, -rest))
