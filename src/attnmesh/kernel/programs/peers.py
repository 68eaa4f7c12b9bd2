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

from attnmesh.kernel.programs.tiles import program, read, write, zeros


@triton.jit
def _box(memory, flags, parity, ranks, room, rank):
    """The numbers in the box of a rank."""
    return memory + flags * ranks + (parity * ranks + rank) * room


@program()
def one_shot_program(
    message, memories, counter, out, lse, witness,
    rank, ranks, flags, room, rows, values, patience,
    ROWS: tl.constexpr, V_0: tl.constexpr, V_1: tl.constexpr,
    PUT: tl.constexpr, TAKE: tl.constexpr,
):  # fmt: skip
    """Messages are (witness, lse, out) in float32; all ranks' tiles are alike.

    A rank that hears nothing for so many looks as `patience` answers with NaN, as it does where witnesses disagree.
    Only where ranks take turns, in tests, is what a rank PUTs and what it TAKEs not one launch.
    """
    tile = tl.program_id(0)
    row = tile.to(tl.int64) * ROWS + tl.arange(0, ROWS)
    there, number = row < rows, tl.arange(0, 2)
    own = tl.load(memories + rank).to(tl.pointer_type(tl.float32))
    own_flags = tl.load(memories + rank).to(tl.pointer_type(tl.int32))
    step = tl.load(counter)
    if PUT:
        its_witness = tl.load(message + number)
        its_lse = tl.load(message + 2 + row, mask=there, other=0.0)
        out_0, out_1 = read(message + 2 + rows, row * values, there, values, V_0, V_1)
        for peer in range(ranks):
            box = _box(tl.load(memories + peer).to(tl.pointer_type(tl.float32)), flags, step % 2, ranks, room, rank)
            tl.store(box + number, its_witness)
            tl.store(box + 2 + row, its_lse, mask=there)
            write(box + 2 + rows, row * values, there, values, out_0, out_1, V_0, V_1)
        tl.debug_barrier()  # all of the tile is written before anyone is told so
        for peer in range(ranks):
            its_flags = tl.load(memories + peer).to(tl.pointer_type(tl.int32))
            tl.atomic_xchg(its_flags + rank * flags + tile, step, sem="release", scope="sys")
    if TAKE:
        left = patience
        for peer in range(ranks):
            flag = own_flags + peer * flags + tile
            while (tl.atomic_add(flag, 0, sem="acquire", scope="sys") < step) & (left > 0):
                left -= 1
        tl.debug_barrier()
        peak = tl.full([ROWS], -float("inf"), tl.float32)
        highest = tl.full([2], -float("inf"), tl.float32)
        for peer in range(ranks):
            box = _box(own, flags, step % 2, ranks, room, peer)
            peak = tl.maximum(peak, tl.load(box + 2 + row, mask=there, other=-float("inf")))
            highest = tl.maximum(highest, tl.load(box + number))
        origin = tl.where(peak == -float("inf"), 0.0, peak)
        total = tl.zeros([ROWS], tl.float32)
        sum_0, sum_1 = zeros(ROWS, V_0, V_1)
        for peer in range(ranks):
            box = _box(own, flags, step % 2, ranks, room, peer)
            weight = tl.exp(tl.load(box + 2 + row, mask=there, other=-float("inf")) - origin)
            total += weight
            out_0, out_1 = read(box + 2 + rows, row * values, there, values, V_0, V_1)
            sum_0 += weight[:, None] * out_0
            if V_1 > 0:
                sum_1 += weight[:, None] * out_1
        nothing = total == 0.0
        total = tl.where(nothing, 1.0, total)
        total = tl.where((tl.sum(highest) == 0.0) & (left > 0), total, float("nan"))
        if tile == 0:
            tl.store(witness + number, highest)
        write(out, row * values, there, values, sum_0 / total[:, None], sum_1 / total[:, None], V_0, V_1)
        tl.store(lse + row, tl.where(nothing, -float("inf"), origin + tl.log(total)), mask=there)
