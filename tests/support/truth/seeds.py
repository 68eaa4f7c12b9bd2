"""Some problems of many: the first or each value once always, all of them where there is time."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import product
from typing import Any, TypeVar

import pytest

T = TypeVar("T")


def in_turn(choices: Iterable[T], number: int) -> T:
    """Return the choice of a number: the choices take turns."""
    every = list(choices)
    return every[number % len(every)]


def seeds(few: int | Collection[int], many: int) -> list[Any]:
    """The numbers below `many`, of which all but the first, or all but the chosen, are long."""
    chosen = range(few) if isinstance(few, int) else few
    return [pytest.param(seed, marks=[] if seed in chosen else pytest.mark.long) for seed in range(many)]


def some(values: Sequence[Any], *short: Any) -> list[Any]:
    """Return each value, of which all but some are long."""
    return [
        pytest.param(value, id="x".join(map(str, value)) if isinstance(value, tuple) else str(value), marks=marks)
        for value in values
        for marks in ([[]] if value in short else [pytest.mark.long])
    ]


def batches(few: Collection[int], many: int, size: int = 12) -> list[Any]:
    """The numbers below `many`, `size` at a time, the few first: a world of ranks is called once for all of a batch."""
    rest = [number for number in range(many) if number not in few]
    return [
        pytest.param(
            numbers := each[start : start + size],
            id=f"{numbers[0]}-{numbers[-1]}",
            marks=[pytest.mark.long] if each is rest else [],
        )
        for each in ([*few], rest)
        for start in range(0, len(each), size)
    ]


def batches_by_ranks(per_world: Mapping[int, tuple[Collection[int], int]]) -> list[Any]:
    """Return the number of ranks with each batch of 12 of its problems, of which some few are not long."""
    return [
        pytest.param(ranks, *batch.values, id=f"{ranks}-{batch.id}", marks=batch.marks)
        for ranks, (few, many) in per_world.items()
        for batch in batches(few, many)
    ]


def pairs(one: Sequence[Any], other: Sequence[Any], count: int | None = None) -> list[Any]:
    """Return each pair, of which as many as the longer list has, or `count`, in turn through both, are not long."""
    count = count or max(len(one), len(other))
    chosen = {(number % len(one), number % len(other)) for number in range(count)}
    return [
        pytest.param(first, second, id=f"{first}-{second}", marks=[] if (i, j) in chosen else pytest.mark.long)
        for (i, first), (j, second) in product(enumerate(one), enumerate(other))
    ]


def rotated(*lists: Sequence[Any], every: int) -> list[Any]:
    """Return each combination of the lists' values, of which one in `every` is not long, so that all values take turns.

    If one list has `every` values, the values of the other lists meet in all combinations, each at one of its values.
    """
    combinations = product(*(tuple(enumerate(values)) for values in lists))
    return [
        pytest.param(
            *(value for _, value in combination),
            id="-".join(str(getattr(value, "__name__", value)) for _, value in combination),
            marks=pytest.mark.long if sum(number for number, _ in combination) % every else [],
        )
        for combination in combinations
    ]
