"""Trials of merges: which of them is fastest along an axis, as the ranks measure it once."""

from statistics import median
from time import perf_counter
from typing import Protocol

import torch

from attnmesh.comm.merges import Merge, MergeTransport, merges_of_auto
from attnmesh.comm.message import MessageForm
from attnmesh.comm.topology import dist_all_gather_ints
from attnmesh.runtime.counters import current_traffic
from attnmesh.runtime.world import collective_once

TRIAL_BATCHES = (1, 8)
"""Batches of 32 heads of 128, in float32, whose merges are timed before "auto" chooses one."""

TRIALS = 5
"""Times that each merge is timed, of which the first is not counted."""

TRIAL_CALLS = 5
"""Calls in a row that are timed together, where all ranks share a host; one call otherwise."""


class TimedTransport(MergeTransport[MessageForm], Protocol):
    """A transport whose merges are timed."""

    def merges_all_heads(self, form: MessageForm) -> bool:
        """Return whether one native call merges all heads of all ranks."""


@collective_once
def agreed_fastest_merge(transport: TimedTransport) -> Merge:
    """Return the fastest merge of a transport, alike on all ranks, by trials. Collective at its first call.

    Messages of all sizes merge in the same way: a rank that sends poison does not know the size of the others'
    messages. The merge chosen loses least, at the size where it loses most, against the fastest merge of that size.
    Ranks that do not all share a host time short messages only, one call in each turn.
    """
    forms = [MessageForm((batch, 32, 1, 128), torch.float32, torch.float32) for batch in TRIAL_BATCHES]
    in_one_host = transport.merges_all_heads(forms[0])
    losses = []
    for form in forms if in_one_host else forms[:1]:
        own = _time_merges(transport, form, TRIAL_CALLS if in_one_host else 1)
        slowest = [max(column) for column in zip(*dist_all_gather_ints(own, [transport.axis]), strict=True)]
        losses.append([count / min(slowest) for count in slowest])
    most = dict(zip(merges_of_auto(), map(max, zip(*losses, strict=True)), strict=True))
    return min(most, key=lambda merge: most[merge])


def _time_merges(transport: TimedTransport, form: MessageForm, calls: int) -> list[int]:
    """Return this rank's median nanoseconds of each native merge. Merges take turns of `calls` calls."""
    nanoseconds: dict[Merge, list[float]] = {merge: [] for merge in merges_of_auto()}
    token = current_traffic.set(None)
    try:
        for _ in range(TRIALS):
            for merge, times in nanoseconds.items():
                start = perf_counter()
                for _ in range(calls):
                    merge.run(transport, torch.zeros(form.size, dtype=torch.uint8, device="cpu"), form, False)
                times.append(1e9 * (perf_counter() - start) / calls)
    finally:
        current_traffic.reset(token)
    return [int(median(times[1:])) for times in nanoseconds.values()]
