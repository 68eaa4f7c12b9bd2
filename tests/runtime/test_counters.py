"""Counters of what is received: while a block runs, in its thread alone."""

from threading import Thread

import pytest
import torch

from attnmesh.runtime.counters import (
    ReceivedTraffic,
    count_messages,
    count_traffic,
    current_traffic,
    timed_merge,
)

pytestmark = pytest.mark.quick

RECEIVED = torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 3), torch.zeros(5, dtype=torch.int64)


def test_vectors_scalars_and_bytes_are_counted() -> None:
    with count_traffic() as traffic:
        traffic.add(RECEIVED)
        count_messages(count=3, size=100)
    assert (traffic.vectors, traffic.scalars) == (24, 6)
    assert traffic.bytes == 24 * 4 + 6 * 4 + 5 * 8 + 300


def test_nothing_is_counted_outside_nor_for_another_thread() -> None:
    def receive() -> None:
        count_messages(count=3, size=100)
        with timed_merge():
            pass

    with count_traffic() as traffic:
        other = Thread(target=receive)
        other.start()
        other.join()
    receive()
    assert (traffic.bytes, traffic.merges) == (0, [])
    assert current_traffic.get() is None


def counts_of_a_block_that_raises() -> ReceivedTraffic:
    """Return what was counted until a block raised."""
    try:
        with count_traffic() as traffic:
            count_messages(1, 10)
            raise KeyError
    except KeyError:
        return traffic


def test_an_inner_block_counts_for_itself_also_when_it_raises() -> None:
    with count_traffic() as outer:
        inner = counts_of_a_block_that_raises()
        with timed_merge():
            count_messages(1, 20)
    assert (inner.bytes, outer.bytes) == (10, 20)
    assert len(outer.merges) == 1
    assert outer.merges[0] >= 0.0
