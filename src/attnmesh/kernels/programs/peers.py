"""One launch in which every rank of a host puts its message into all others' memory and merges what they put into its.

A rank's memory has flags, a row for each rank with one for each tile of rows, and behind them two sets of boxes, a box
for each rank:

        [ flags of rank 0 | of rank 1 | ... ][ boxes, even steps: from 0 | from 1 | ... ][ odd steps: from 0 | ... ]

A flag is the number of the last step whose tile is in the box, as each rank counts them on its device. Who is a step
ahead writes into the other set. Nobody is two ahead: that takes a message of all others, who send it when they have
read the last.
"""

import triton
import triton.language as tl

from attnmesh.kernels.programs.tiles import highest_of, joined, program, read, settled, write


@triton.jit
def _box(memory, flags, parity, ranks, room, rank):
    """The numbers in the box of a rank."""
    return memory + flags * ranks + (parity * ranks + rank) * room


@program()
def one_shot_program(
    message, memories, counter, out, lse, checksum,
    rank, ranks, flags, room, rows, values, patience,
    ROWS: tl.constexpr, V_0: tl.constexpr, V_1: tl.constexpr,
    PUT: tl.constexpr, TAKE: tl.constexpr,
):  # fmt: skip
    """Messages are (checksum, lse, out) in float32; all ranks' tiles are alike.

    A rank that hears nothing for so many looks as `patience` answers with NaN, as it does where checksums disagree.
    Only where ranks take turns, in tests, is what a rank PUTs and what it TAKEs not one launch.
    """
    tile = tl.program_id(0)
    row = tile.to(tl.int64) * ROWS + tl.arange(0, ROWS)
    there, number = row < rows, tl.arange(0, 2)
    own = tl.load(memories + rank).to(tl.pointer_type(tl.float32))
    own_flags = tl.load(memories + rank).to(tl.pointer_type(tl.int32))
    step = tl.load(counter)
    if PUT:
        its_checksum = tl.load(message + number)
        its_lse = tl.load(message + 2 + row, mask=there, other=0.0)
        out_0, out_1 = read(message + 2 + rows, row * values, there, values, V_0, V_1)
        for peer in range(ranks):
            box = _box(tl.load(memories + peer).to(tl.pointer_type(tl.float32)), flags, step & 1, ranks, room, rank)
            tl.store(box + number, its_checksum)
            tl.store(box + 2 + row, its_lse, mask=there)
            write(box + 2 + rows, row * values, there, values, out_0, out_1, V_0, V_1)
        tl.debug_barrier()  # all of the tile is written before anyone is told so
        for peer in range(ranks):
            its_flags = tl.load(memories + peer).to(tl.pointer_type(tl.int32))
            tl.atomic_xchg(its_flags + rank * flags + tile, step, sem="release", scope="sys")
    if TAKE:
        left = tl.where((rows > 0) | (tile == 0), patience, 0)  # of no rows one tile tells
        for peer in range(ranks):
            flag = own_flags + peer * flags + tile
            while (tl.atomic_add(flag, 0, sem="acquire", scope="sys") - step < 0) & (left > 0):
                left -= 1
        tl.debug_barrier()
        boxes = _box(own, flags, step & 1, ranks, room, 0)
        sink = tl.full([ROWS], -float("inf"), tl.float32)
        total, origin, sum_0, sum_1 = joined(
            boxes + 2 + rows, boxes + 2, ranks, room, room, row, there, values, sink, ROWS, V_0, V_1
        )
        highest = highest_of(boxes, ranks, room)
        total = tl.where((tl.sum(highest) == 0.0) & (left > 0), total, float("nan"))
        if tile == 0:
            tl.store(checksum + number, highest)
        settled(total, origin, sum_0, sum_1, out, lse, row, there, values, V_0, V_1)
