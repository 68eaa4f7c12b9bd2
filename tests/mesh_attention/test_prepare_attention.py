"""What is settled before attention on a mesh: calls are compared unless `checked` is False, and sizes are checked."""

from contextlib import AbstractContextManager
from typing import NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import attnmesh as am
from attnmesh import errors
from attnmesh.comm import gather
from attnmesh.mesh.shapes import AXES, Shape
from tests.support.ranks.odd_rank import outcome
from tests.support.ranks.pool import Pool, on_each_rank
from tests.support.truth.mesh_problems import named_mesh
from tests.support.truth.tolerances import FLOAT32_SUMS, assert_near

WIDTH = 16


@on_each_rank
def attend_on_three_heads() -> None:
    am.attention(*torch.randn(3, 1, 2, 5, 4), mesh=named_mesh(Shape(3, 1, 1), AXES), layout=am.Contiguous())


def test_fewer_key_heads_than_ranks_of_the_heads_axis_are_refused(pool: Pool) -> None:
    answers = pool.ask(3, attend_on_three_heads)
    assert len({str(answer) for answer in answers}) == 1
    expected = (
        "one key head a rank of the heads axis, given 2 key heads and a heads axis of 3. Fix: shorten it to at most"
    )
    with pytest.raises(errors.ShapeError, match=expected):
        raise answers[0]


def counted_exchanges() -> AbstractContextManager[mock.Mock]:
    """Return what counts the exchanges of a `with`, in which ranks compare."""
    return mock.patch("attnmesh.guard.agreement.all_gather_ints", wraps=gather.all_gather_ints)


class Compared(NamedTuple):
    """Attention twice, and how often ranks compared; then the outcomes with a mask and with sinks of one rank's own."""

    outs_are_equal: bool
    comparisons: int
    outcome_of_unlike_masks: str
    outcome_of_unlike_sinks: str


@on_each_rank
def attend_and_count_comparisons(checked: bool | None, length: int | None) -> Compared:
    mesh = named_mesh(Shape(1, 2, 1), AXES)
    x = torch.ones(1, 2, 5 - dist.get_rank(), WIDTH)
    options = {"mesh": mesh, "layout": am.Zigzag(), "length": length, "checked": checked}
    with counted_exchanges() as exchanges:
        outs = [am.attention(x, x, x, **options) for _ in range(2)]
        same = torch.equal(*outs)
        count = exchanges.call_count
        mask = am.Window(dist.get_rank() + 1)
        unlike = outcome(lambda: am.attention(x, x, x, mask=mask, **options))
        sinks = torch.zeros(2) if dist.get_rank() else None
        with_sinks = outcome(lambda: am.attention(x, x, x, sinks=sinks, **options))
    return Compared(same, count, unlike, with_sinks)


@pytest.mark.parametrize(("checked", "length"), [(None, 9), (None, None), (True, 9), (False, None)])
def test_attention_compares_each_call(pool: Pool, checked: bool | None, length: int | None) -> None:
    one, other = pool.run(2, attend_and_count_comparisons, checked, length)
    assert one == other
    assert one.outs_are_equal
    assert one.comparisons == 2
    assert "ranks  mask\n    0      " in one.outcome_of_unlike_masks
    assert "ranks  sinks\n    0      -\n    1      [2]" in one.outcome_of_unlike_sinks


@on_each_rank
def check_uncompared() -> None:
    mesh = named_mesh(Shape(1, 2, 1), AXES)
    x = torch.ones(1, 2, 5 - dist.get_rank(), WIDTH)
    with mock.patch("attnmesh.guard.agreement.all_gather_ints", side_effect=AssertionError("they ask")):
        out = am.attention(x, x, x, mesh=mesh, layout=am.Zigzag(), length=9, checked=False)
    assert_near(out, am.attention(x, x, x, mesh=mesh, layout=am.Zigzag()))


@on_each_rank
def attend_over_uncounted_keys() -> str:
    """Without counting, keys of another sequence than the queries need `key_length`."""
    mesh = named_mesh(Shape(1, 2, 1), AXES)
    q, k = torch.ones(1, 2, 4, WIDTH), torch.ones(1, 2, 6, WIDTH)
    options = {"mesh": mesh, "mask": am.Full(), "layout": am.Contiguous(), "length": 8, "checked": False}
    return outcome(lambda: am.attention(q, k, k, **options))


def test_shards_that_are_not_counted_have_the_sizes_of_their_layout(pool: Pool) -> None:
    expected = "attention: expected a shard of 4 queries of 8 and 4 keys of 8, given 4 queries and 6 keys."
    assert all(expected in answer for answer in pool.run(2, attend_over_uncounted_keys))


@on_each_rank
def check_known_calls_of_other_lengths() -> None:
    """Rank 0 has 4 of 8 tokens, then 4 of 7, and so on: its own tensors have one shape, and their call is known."""
    mesh, layout = named_mesh(Shape(1, 2, 1), AXES), am.Contiguous()
    for length in (8, 7, 8, 7):
        q, k, v = torch.randn(3, 1, 2, length, WIDTH, generator=torch.Generator().manual_seed(length)).unbind()
        shards = [am.shard(x, mesh, layout=layout) for x in (q, k, v)]
        out = am.attention(*shards, mask=am.Full(), mesh=mesh, layout=layout)
        expected = am.attend(q, k, v).out
        assert_near(out, am.shard(expected, mesh, layout=layout), FLOAT32_SUMS)


def test_a_known_call_is_prepared_anew_if_another_rank_has_other_tokens(pool: Pool) -> None:
    pool.run(2, check_known_calls_of_other_lengths)


def test_unchecked_attention_compares_nothing(pool: Pool) -> None:
    pool.run(2, check_uncompared)
