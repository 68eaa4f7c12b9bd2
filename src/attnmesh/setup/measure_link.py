"""Rates of the links between ranks, and how long a merge waits where ranks share cores."""

import statistics
from collections.abc import Sequence
from functools import partial as partial_of

import torch
import torch.distributed as dist

from attnmesh.comm.rank_merge import RequestedMerge
from attnmesh.comm.topology import agreed_host_mailboxes, agreed_subgroup, dist_all_gather_ints
from attnmesh.core.partial import Partial
from attnmesh.cost.rates import NO_LINK, Link
from attnmesh.guard.agreement import agree_on_merges
from attnmesh.setup.measured_ranks import IN_A_ROW, REPETITIONS, MeasuredRanks

MERGE_BYTES = 16384
"""Bytes of a short message, as of a merge of 32 heads of 128 columns in float32."""

WORK = 512
"""Rows and columns of a product that is about as much work as a layer of a small model."""

LEAST_ALONE = 1.5
"""Least `Device.alone` of ranks that share cores. Ranks with cores of their own may be slower too, by memory."""

LONG_MESSAGE_SECONDS = 0.12
"""Seconds that one long message should take at most."""


def measure_link(world: MeasuredRanks, *, between: bool) -> Link:
    """Return the rates of the links inside hosts or between them, if there are any."""
    _, index = world.host_and_index
    lines = world.lines(between=between)
    most_ranks = max(map(len, world.hosts))
    line = world.line(between=between)
    if max(map(len, lines)) < 2:
        return NO_LINK
    latency = world.short(lambda: _send_round(world, line, MERGE_BYTES))
    several = min(15, len(line) - 1)
    many = world.short(lambda: _send_round(world, line, MERGE_BYTES, several))
    bytes_ = 1 << 18
    once = world.median(lambda: _send_round(world, line, bytes_), 2)
    bytes_ = int(min(1 << 24, max(1 << 18, bytes_ * LONG_MESSAGE_SECONDS / once)))
    together = world.median(lambda: _send_round(world, line, bytes_), 3)
    alone = world.median(lambda: _send_round(world, line if index == 0 or not between else [], bytes_), 3)
    host_rate = most_ranks * bytes_ / max(together - latency, 1e-9)
    short_latency = latency if between else world.short(lambda: _send_round_in_host(world, line))
    rank_rate = bytes_ / max((alone if between else together) - latency, 1e-9)
    message = max(0.0, (many - latency) / max(1, several - 1))
    step = _step(world, lines, short_latency)
    return Link(latency, rank_rate, max(host_rate, rank_rate), short=short_latency, step=step, message=message)


def measure_wait(world: MeasuredRanks, alone: float) -> float:
    """Return the seconds that a merge takes longer between pieces of work than alone, where ranks share cores.

    Each round times work and merge together, work alone, and merge alone, since other programs change a machine's speed
    from round to round. The result is the mean over ranks, which begin a merge one by one and end it together.
    """
    if world.axis.size == 1 or world.device.type != "cpu" or alone < LEAST_ALONE:
        return 0.0
    factor = torch.randn(WORK, WORK, dtype=torch.float32, device="cpu")
    out = factor.new_zeros(1, 1, 1, MERGE_BYTES // factor.itemsize)
    agree_on_merges(world.axis)
    tree = RequestedMerge(world.axis, "tree", "replicated")

    def merge() -> None:
        tree.run(Partial(out, out[..., 0]), factor.new_zeros(2))

    def work_and_merge() -> None:
        work()
        merge()

    work = partial_of(torch.mm, factor, factor)
    waits = []
    for _ in range(2 * REPETITIONS + 1):
        together, *apart = [world.seconds(call, IN_A_ROW) for call in (work_and_merge, work, merge)]
        waits.append((together - sum(apart)) / IN_A_ROW)
    wait = statistics.median(waits[1:])
    waits = [numbers[0] for numbers in dist_all_gather_ints([int(wait * 1e9)], [world.axis])]
    return max(0.0, statistics.mean(waits) / 1e9)


def _step(world: MeasuredRanks, lines: list[list[int]], first_step: float) -> float:
    """Return the seconds of each step of a collective, whose first step takes at least as long as a message."""
    mine = next(line for line in lines if world.axis.index in line)
    number = torch.zeros(1, 4, dtype=torch.int64, device=world.device)
    group = agreed_subgroup(world.axis, tuple(mine))
    numbers = [torch.empty_like(number) for _ in mine]
    took = world.short(lambda: dist.all_gather(numbers, number, group=group))
    further = (took - first_step) / max(1, len(mine) - 2)
    return further if len(mine) > 2 and 0 < further <= first_step else took / (len(mine) - 1)


def _send_round(world: MeasuredRanks, line: Sequence[int], size: int, peers: int = 1) -> None:
    """Send to the next ranks of a line that begins with this rank, and receive from the last."""
    message = torch.empty(size, dtype=torch.uint8, device=world.device)
    group = world.axis.group
    other_ranks = line[1:]
    posts = [
        dist.P2POp(dist.irecv, torch.empty_like(message), group=group, group_peer=peer) for peer in other_ranks[-peers:]
    ]
    posts += [dist.P2POp(dist.isend, message, group=group, group_peer=peer) for peer in other_ranks[:peers]]
    for work in dist.batch_isend_irecv(posts) if posts else []:
        work.wait()


def _send_round_in_host(world: MeasuredRanks, line: Sequence[int]) -> None:
    """Send and receive a short message inside a host, as a merge does."""
    mailboxes = agreed_host_mailboxes(world.axis) if world.device.type == "cpu" else None
    message = torch.empty(MERGE_BYTES, dtype=torch.uint8, device=world.device)
    if mailboxes is None or len(line) < 2:
        _send_round(world, line, MERGE_BYTES)
        return
    mailboxes.send(line[1], message)
    mailboxes.recv(line[-1], message.clone())
