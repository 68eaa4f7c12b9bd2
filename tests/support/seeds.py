"""Seeds of random problems: the first always, all of them where there is time."""

from collections.abc import Collection
from typing import Any

import pytest


def seeds(few: int | Collection[int], many: int) -> list[Any]:
    """The numbers below `many`, of which all but the first, or all but the chosen, are long."""
    chosen = range(few) if isinstance(few, int) else few
    return [pytest.param(seed, marks=[] if seed in chosen else pytest.mark.long) for seed in range(many)]


def batches(few: int, many: int, size: int) -> list[Any]:
    """The same numbers, `size` at a time: a world of ranks is called once for all of a batch."""
    starts = [*range(0, few, size), *range(few, many, size)]
    ends = [*starts[1:], many]
    return [
        pytest.param(range(start, end), id=f"{start}-{end - 1}", marks=[pytest.mark.long] if start >= few else [])
        for start, end in zip(starts, ends, strict=True)
    ]
