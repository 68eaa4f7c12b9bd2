"""The tree of a merge across ranks, as a value: who sends to whom, round by round, worked out without a device.

Two halves, each of which has merged within itself so that all its ranks hold the same, exchange what they hold:

        0   1   2   3   4   5   6
        |-A-|   |-B-|   |-C-|   |     round 1: everyone hears one other rank
        |---A∪B-----|   |--C∪6--|     round 2: 6, alone so far, is heard by 4 and by 5
        |---------all-----------|     round 3: ceil(log2 7)

So every rank hears one message a round, merges it with its own, and after `ceil(log2 p)` rounds, for any p, all hold
the same bits, since merging two partials does not depend on which comes first. Hosts are units of the tree: inside each
first, then between them.
"""

from collections.abc import Sequence
from typing import NamedTuple


class Round(NamedTuple):
    """One exchange of one rank: to whom it sends what it holds, and from whom it hears."""

    send: tuple[int, ...]
    hear: int


def tree(hosts: Sequence[Sequence[int]]) -> dict[int, list[Round]]:
    """For each rank its rounds; `hosts` lists the ranks of each host, in the order in which they are merged.

    >>> tree([[0, 1, 2]])
    {0: [Round(send=(1,), hear=1), Round(send=(2,), hear=2)], 1: [Round(send=(0,), hear=0), Round(send=(), hear=2)], \
2: [Round(send=(0, 1), hear=0)]}
    """
    rounds: dict[int, list[Round]] = {rank: [] for host in hosts for rank in host}
    _climb([_climb([[rank] for rank in host], rounds) for host in hosts], rounds)
    return rounds


def by_residue(ranks: int) -> list[int]:
    """Ranks in the order in which halves are evens and odds, their halves the residues modulo 4, and so on.

    >>> by_residue(8)
    [0, 4, 2, 6, 1, 5, 3, 7]
    """
    order = [0]
    while len(order) < ranks:
        order = [2 * rank for rank in order] + [2 * rank + 1 for rank in order]
    return order


def _climb(units: list[list[int]], rounds: dict[int, list[Round]]) -> list[int]:
    """Merge units, within each of which all ranks hold the same, until all ranks of all units do."""
    if len(units) == 1:
        return units[0]
    middle = (len(units) + 1) // 2
    halves = _climb(units[:middle], rounds), _climb(units[middle:], rounds)
    for mine, theirs in (halves, halves[::-1]):
        for place, rank in enumerate(mine):
            heard_by = [other for i, other in enumerate(theirs) if i % len(mine) == place]
            rounds[rank].append(Round(tuple(heard_by), theirs[place % len(theirs)]))
    return halves[0] + halves[1]
