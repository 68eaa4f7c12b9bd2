"""Rates: what stands for a rate that is not given, and a rank that has more of its host's cores."""

import pytest

from attnmesh.cost.rates import Device, Link

pytestmark = pytest.mark.quick


def test_what_is_not_given_is_the_number_before() -> None:
    assert (Link(3.0, 1e9, 1e9).merge_latency, Link(3.0, 1e9, 1e9).collective_step) == (3.0, 3.0)
    short = Link(3.0, 1e9, 1e9, short=2.0)
    assert (short.merge_latency, short.collective_step) == (2.0, 2.0)
    assert Link(3.0, 1e9, 1e9, short=2.0, step=0.0).collective_step == 0.0


def test_a_rank_of_all_cores_has_the_speed_that_it_has_alone() -> None:
    """Of four ranks that share cores, each is 4 times as fast while the others rest."""
    shared = Device(1e9, 2e9, 3e9, 1e12, copy_rate=4e9, call=8e-6, run=1e-6, alone=4.0, wait=1e-3)
    half = shared.of_cores(2)
    assert (half.forward_rate, half.backward_rate, half.memory_rate, half.copy_rate) == (2e9, 4e9, 6e9, 8e9)
    assert (half.alone, half.wait, half.call) == (2.0, 1e-3, 4e-6)
    whole = shared.of_cores(4)
    assert (whole.alone, whole.wait, whole.call) == (1.0, 0.0, 2e-6)
    assert half.of_cores(2) == whole
    assert (whole.memory, whole.run) == (shared.memory, shared.run)
