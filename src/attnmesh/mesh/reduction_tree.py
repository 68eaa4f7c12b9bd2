"""The tree of a merge across ranks: the messages of each round, computed without a device.

In each round two halves exchange their partials. Within a half all ranks already have the same partial:

        0   1   2   3   4   5   6
        |-A-|   |-B-|   |-C-|   |     round 1: each pair exchanges; 6 has no peer
        |---A∪B-----|   |--C∪6--|     round 2: 6 sends to 4 and to 5
        |---------all-----------|     round 3: ceil(log2 7)

Every rank receives one message per round and merges it into its partial. After `ceil(log2 p)` rounds, for any p, all
ranks have the same bits, since a merge of two partials does not depend on their order. Ranks merge inside each host
first, then between hosts.
"""

from collections.abc import Sequence
from typing import NamedTuple


class Round(NamedTuple):
    """One exchange of one rank: the ranks to which it sends its partial, and the rank from which it receives."""

    send: tuple[int, ...]
    recv: int


def reduction_rounds(hosts: Sequence[Sequence[int]]) -> dict[int, list[Round]]:
    """Return the rounds of each rank; `hosts` lists the ranks of each host, in merge order.

    >>> reduction_rounds([[0, 1, 2]])
    {0: [Round(send=(1,), recv=1), Round(send=(2,), recv=2)], 1: [Round(send=(0,), recv=0), Round(send=(), recv=2)], \
2: [Round(send=(0, 1), recv=0)]}
    """
    rounds: dict[int, list[Round]] = {rank: [] for host in hosts for rank in host}
    _merge_units([_merge_units([[rank] for rank in host], rounds) for host in hosts], rounds)
    return rounds


def bit_reversed(ranks: int) -> list[int]:
    """Return the ranks in bit-reversed order: the halves are evens and odds, their halves residues modulo 4, and so on.

    >>> bit_reversed(8)
    [0, 4, 2, 6, 1, 5, 3, 7]
    """
    order = [0]
    while len(order) < ranks:
        order = [2 * rank for rank in order] + [2 * rank + 1 for rank in order]
    return order


def _merge_units(units: list[list[int]], rounds: dict[int, list[Round]]) -> list[int]:
    """Append the rounds that merge units, and return all their ranks. Within a unit ranks have the same partial."""
    if len(units) == 1:
        return units[0]
    middle = (len(units) + 1) // 2
    halves = _merge_units(units[:middle], rounds), _merge_units(units[middle:], rounds)
    for half, other in (halves, halves[::-1]):
        for index, rank in enumerate(half):
            send = tuple(peer for i, peer in enumerate(other) if i % len(half) == index)
            rounds[rank].append(Round(send, other[index % len(other)]))
    return halves[0] + halves[1]
