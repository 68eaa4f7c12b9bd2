"""How many tokens each rank holds: shares, as ratios for unequal ranks, and copies of the shards of others."""

from collections.abc import Sequence
from math import gcd, isfinite
from numbers import Real

from attnmesh.errors import KernelError, ShapeError

MAX_RATIO = 2**32
"""Most times that one share may be of another: a round of tokens has to be counted."""

MAX_EQUAL_RATIO = 1.15
"""Ratio of read rates up to which ranks are taken for equal: measurements vary as much."""

MEMORY_SHARE_OF_KEYS = 0.75
"""Part of a rank's free memory that a cache may take. Weights, activations and other caches need the rest."""


def checked_shares(subject: str, shares: object, ranks: int, *, auto: bool = True) -> tuple[float, ...] | None:
    """Return the shares as a tuple; None for even shares and for "auto". Raise as `check_shares` does."""
    check_shares(subject, shares, ranks, auto=auto)
    return tuple(shares) if isinstance(shares, (tuple, list)) else None


def check_shares(subject: str, shares: object, ranks: int, *, auto: bool = True) -> None:
    """Raise unless shares are even, as None, or measured, as "auto", or each rank has a positive one."""
    if shares is None or (auto and isinstance(shares, str) and shares == "auto"):
        return
    subject, given = f"{subject} shares", repr(shares)
    numbers = tuple(shares) if isinstance(shares, (tuple, list)) else ()
    if len(numbers) != ranks or not all(isinstance(x, Real) and not isinstance(x, bool) for x in numbers):
        expected = f"{ranks} positive numbers, one a rank that tokens are sharded over"
        fix = 'pass ratios, as (3, 1), or "auto" to measure them' if auto else "pass ratios, as (3, 1)"
        raise ShapeError(subject, expected, given, fix)
    if not all(isfinite(x) and x > 0 for x in numbers):
        raise ShapeError(subject, "numbers above 0", given, "leave a rank without tokens out of the mesh")
    if max(numbers) > MAX_RATIO * min(numbers):
        expected = f"numbers of which none is {MAX_RATIO} times another"
        raise ShapeError(subject, expected, given, "leave the rank of the least one out")


def check_even_shares(subject: str, shares: object, *, even: bool) -> None:
    """Raise unless each rank holds every n-th block, so that its blocks are one subtree of the tree over blocks."""
    if not even:
        fix = "leave shares= out, or reproducible=True"
        raise KernelError(subject, "even shares, whose blocks are subtrees of one tree", f"shares={shares}", fix)


def check_copies(subject: str, copies: object, ranks: int) -> None:
    """Raise unless each of `copies` copies fits on a rank of its own."""
    if isinstance(copies, bool) or not isinstance(copies, int) or not 1 <= copies <= ranks:
        fix = f"pass copies={ranks}, or use more ranks along queries and keys"
        raise ShapeError(
            f"{subject} copies", f"1 to {ranks}, the ranks that tokens are sharded over", repr(copies), fix
        )


def recommended_shares(rates: Sequence[float], memory: Sequence[float] = (), needed: float = 0.0) -> tuple[int, ...]:
    """Return the shares with which a step is fastest: as the read rates, within what ranks have memory for.

    Args:
        rates: Bytes/s that each rank reads.
        memory: Free bytes of each rank.
        needed: Bytes of the whole cache; 0 if they are not known, or no rank's memory bounds its share.

    >>> recommended_shares((4e9, 1e9)), recommended_shares((4e9, 4.1e9))
    ((4, 1), (1, 1))
    >>> recommended_shares((4e9, 1e9), (40e9, 200e9), 100e9)
    (3, 7)
    """
    open_rates = dict(enumerate(_alike(rates)))
    limits = {rank: MEMORY_SHARE_OF_KEYS * free / needed for rank, free in enumerate(memory)} if needed else {}
    if sum(limits.values()) < 1:
        limits = {}
    shares = dict[int, float]()
    remaining = 1.0
    while True:
        rate_sum = sum(open_rates.values())
        full = [
            rank for rank, rate in open_rates.items() if rank in limits and remaining * rate / rate_sum > limits[rank]
        ]
        if not full:
            break
        for rank in full:
            shares[rank] = limits[rank]
            remaining -= shares[rank]
            del open_rates[rank]
    shares |= {rank: remaining * rate / rate_sum for rank, rate in open_rates.items()}
    parts_of_1000 = [max(1, round(1000 * shares[rank])) for rank in range(len(rates))]
    common = gcd(*parts_of_1000)
    return tuple(part // common for part in parts_of_1000)


def _alike(rates: Sequence[float]) -> Sequence[float]:
    """Return the rates, or equal ones if they differ by no more than measurements do."""
    return rates if max(rates) > MAX_EQUAL_RATIO * min(rates) else [1.0] * len(rates)
