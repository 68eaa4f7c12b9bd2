"""Tasks: the bands of their steps, and the exchanges that may be under way at once."""

import torch

from attnmesh.core.band import Band
from tests.support.truth.tasks import ALONE, LENGTH, MASK, Rank


def test_heads_in_one_group_leave_no_two_exchanges_under_way() -> None:
    for exchange, one_at_a_time in (("bulk", True), ("pipelined", False)):
        task = Rank(ALONE, exchange).task
        channels = task.along_heads.channel, task.kv_channel, task.query_channel
        assert [channel.one_at_a_time for channel in channels] == [one_at_a_time] * 3


def test_a_task_has_the_band_of_each_step() -> None:
    task = Rank(ALONE, "bulk").task
    (step,) = task.steps_of(task.groups[0])
    expected = Band.of(MASK, torch.arange(LENGTH), LENGTH)
    assert isinstance(step.visible_keys, Band)
    assert torch.equal(step.visible_keys.visible(LENGTH), expected.visible(LENGTH))
