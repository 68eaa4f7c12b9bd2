"""Turns: widths follow the shares of ranks, and each token is dealt once."""

import pytest
import torch

from attnmesh.core.turns import MAX_SHARE_ERROR, Turn, turns, widths_of

pytestmark = pytest.mark.quick


@pytest.mark.parametrize("shares", [(1e7, 1, 1.5), (2.0**32, 1, 1.37), (64e9, 3.3e3, 1e4, 2.2e3)])
def test_turns_of_extreme_shares_are_found_at_once(shares: tuple[float, ...]) -> None:
    widths = widths_of(shares, 16)
    assert all(
        abs(n / sum(widths) - x / sum(shares)) <= 1.01 * MAX_SHARE_ERROR * x / sum(shares)
        for n, x in zip(widths, shares, strict=True)
    )


def test_shares_that_are_multiples_but_for_rounding_are_exact() -> None:
    assert widths_of((0.1, 0.2), 16) == (11, 22)


def test_few_tokens_of_a_wide_turn_take_no_memory_for_the_others() -> None:
    assert Turn(0, 2**40, 2**40 + 1).positions(3).tolist() == [0, 1, 2]


@pytest.mark.parametrize(("shares", "block"), [((3, 1), 16), ((1, 1, 1), 4), ((0.3, 70, 2), 16), ((1e4, 1), 1)])
def test_turns_deal_each_token_once_and_keep_the_ratios(shares: tuple[float, ...], block: int) -> None:
    widths = widths_of(shares, block)
    found, length = turns(widths), 2 * sum(widths) + 7
    positions = [turn.positions(length) for turn in found]
    assert torch.cat(positions).sort().values.equal(torch.arange(length))
    for turn, mine, share in zip(found, positions, shares, strict=True):
        assert mine.equal(turn.holds(torch.arange(length)).nonzero().flatten())
        assert turn.slot(mine).equal(torch.arange(len(mine)))
        assert turn.count(length) == len(mine)
        assert turn.width / turn.period == pytest.approx(share / sum(shares), rel=1.1 * MAX_SHARE_ERROR)
