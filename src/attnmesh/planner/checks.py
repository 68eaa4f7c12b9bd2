"""Checks of the counts that the planner takes."""

from typing import Any

from attnmesh.errors import ClusterError, checked_count

MAX_COUNT = 10**15
"""Largest count that a workload takes, of tokens, heads, layers or anything else."""


def bounded_count(subject: str, given: Any, least: int = 1) -> int:
    """Return a count. Raise unless it is an integer from `least` to `MAX_COUNT`."""
    fix = "pass a positive integer" if least else "pass 0 or a positive integer"
    count = checked_count(subject, given, fix, least=least, error=ClusterError)
    if count > MAX_COUNT:
        raise ClusterError(subject, f"no more than {MAX_COUNT:.0e}", "a larger number", "check the unit")
    return count
