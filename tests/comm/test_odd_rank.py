"""One rank does something else than the others: all raise the same error, or all get NaN, and nobody waits."""

from typing import Any

import pytest

import attnmesh as am
from tests.support.interpreted import interpreting
from tests.support.odd_rank import BEFORE, attention_outcomes, check, decoding_outcomes, merge_outcomes
from tests.support.pool import Pool

STEPS: list[tuple[tuple[int, int, int], dict[str, Any]]] = [
    ((1, 1, 3), {"merge": "tree"}),
    ((1, 1, 3), {"merge": "direct"}),
    ((2, 1, 2), {"merge": "tree"}),
]
"""Meshes and options of steps: along a tree, directly, and with a heads axis."""


def _decode(kernel: str, *arguments: Any) -> dict[str, Any]:
    am.set_deadline(60)
    with interpreting(kernel):
        return decoding_outcomes("cpu", *arguments)


@pytest.mark.parametrize("before", BEFORE)
@pytest.mark.parametrize(("shape", "options"), STEPS)
@pytest.mark.parametrize("kernel", ["auto", "triton"])
def test_steps(kernel: str, shape: tuple[int, int, int], options: dict[str, Any], before: int, pool: Pool) -> None:
    """With Triton's interpreter ranks follow the policy of GPUs."""
    ranks = shape[0] * shape[1] * shape[2]
    check(pool.run(ranks, _decode, kernel, shape, before, options), before, compares_all=kernel == "auto")


def _attend(*arguments: Any) -> dict[str, Any]:
    am.set_deadline(60)
    return attention_outcomes("cpu", *arguments)


@pytest.mark.parametrize("before", BEFORE)
@pytest.mark.parametrize("shape", [(1, 3, 1), (1, 1, 3), (2, 2, 1)])
def test_attention(shape: tuple[int, int, int], before: int, pool: Pool) -> None:
    check(pool.run(shape[0] * shape[1] * shape[2], _attend, shape, before), before, compares_all=True)


def _merge(kernel: str, *arguments: Any) -> dict[str, Any]:
    am.set_deadline(60)
    with interpreting(kernel):
        return merge_outcomes("cpu", 3, *arguments)


@pytest.mark.parametrize("before", BEFORE)
@pytest.mark.parametrize("how", ["tree", "direct"])
@pytest.mark.parametrize("kernel", ["auto", "triton"])
def test_merges(kernel: str, how: str, before: int, pool: Pool) -> None:
    check(pool.run(3, _merge, kernel, before, how), before, compares_all=kernel == "auto")
