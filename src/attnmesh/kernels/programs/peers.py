"""A merge across the ranks of a host in one launch: each rank writes its message into the memory of all ranks.

A rank's memory has flags, one per sending rank and tile of rows, and then two sets of boxes, one box per sending rank:

        [ flags of rank 0 | of rank 1 | ... ][ boxes, even steps: from 0 | from 1 | ... ][ odd steps: from 0 | ... ]

A flag is the number of the last step whose tile is in the box. Each rank counts steps on its device. Two sets of boxes
are enough. Rank A, done with step 4, writes its message of step 5 into the odd set while rank B still reads the even
set. A writes step 6 into the even set only after it has received B's message of step 5, and B sends this message after
it has read all messages of step 4.
"""

import triton
import triton.language as tl

from attnmesh.kernels.programs.tiles import max_checksum, merge_rows, program, read, store_rows, write


@triton.jit
def _box(memory, flags, parity, ranks, box_size, rank):
    """Return a pointer to the box of a rank."""
    return memory + flags * ranks + (parity * ranks + rank) * box_size


@program()
def one_shot_program(
    message, memories, counter, out, lse, checksum,
    rank, ranks, flags, box_size, rows, value_width, max_polls,
    ROWS: tl.constexpr, V_0: tl.constexpr, V_1: tl.constexpr,
    SEND: tl.constexpr, RECEIVE: tl.constexpr,
):  # fmt: skip
    """Send a message (checksum, lse, out) in float32 to all ranks, and store the merge of all received messages.

    The result is NaN if a message does not arrive within `max_polls` polls, or if checksums disagree. SEND and RECEIVE
    are separate launches in tests only, where one process plays all ranks.
    """
    tile = tl.program_id(0)
    row = tile.to(tl.int64) * ROWS + tl.arange(0, ROWS)
    valid = row < rows
    index = tl.arange(0, 2)
    memory = tl.load(memories + rank).to(tl.pointer_type(tl.float32))
    own_flags = tl.load(memories + rank).to(tl.pointer_type(tl.int32))
    step = tl.load(counter)
    if SEND:
        own_checksum = tl.load(message + index)
        own_lse = tl.load(message + 2 + row, mask=valid, other=0.0)
        out_0, out_1 = read(message + 2 + rows, row * value_width, valid, value_width, V_0, V_1)
        for peer in range(ranks):
            box = _box(tl.load(memories + peer).to(tl.pointer_type(tl.float32)), flags, step & 1, ranks, box_size, rank)
            tl.store(box + index, own_checksum)
            tl.store(box + 2 + row, own_lse, mask=valid)
            write(box + 2 + rows, row * value_width, valid, value_width, out_0, out_1, V_0, V_1)
        tl.debug_barrier()  # the whole tile is written before the flag
        for peer in range(ranks):
            peer_flags = tl.load(memories + peer).to(tl.pointer_type(tl.int32))
            tl.atomic_xchg(peer_flags + rank * flags + tile, step, sem="release", scope="sys")
    if RECEIVE:
        polls = tl.where((rows > 0) | (tile == 0), max_polls, 0)  # without rows only tile 0 sends
        for peer in range(ranks):
            flag = own_flags + peer * flags + tile
            while (tl.atomic_add(flag, 0, sem="acquire", scope="sys") - step < 0) & (polls > 0):
                polls -= 1
        tl.debug_barrier()
        boxes = _box(memory, flags, step & 1, ranks, box_size, 0)
        sink = tl.full([ROWS], -float("inf"), tl.float32)
        total, origin, sum_0, sum_1 = merge_rows(
            boxes + 2 + rows, boxes + 2, ranks, box_size, box_size, row, valid, value_width, sink, ROWS, V_0, V_1
        )
        highest = max_checksum(boxes, ranks, box_size)
        total = tl.where((tl.sum(highest) == 0.0) & (polls > 0), total, float("nan"))
        if tile == 0:
            tl.store(checksum + index, highest)
        store_rows(total, origin, sum_0, sum_1, out, lse, row, valid, value_width, V_0, V_1)
