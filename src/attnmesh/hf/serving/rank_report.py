"""The report of each rank to rank 0 in a step."""

from collections.abc import Sequence
from typing import NamedTuple


class RankReport(NamedTuple):
    """The state of one rank after its last step."""

    nbytes: int = 0
    """Bytes of the rank's caches."""
    blocks_written: int = 0
    """Blocks of prefixes for which this rank is done: it has written its file, or has none to write."""
    write_error: int = 0
    """Number of the system's error (`errno`) that ended writing; 0 for none."""
    blocks_read: int = 0
    """Blocks that this rank has copied to the cache that is being loaded."""
    is_damaged: bool = False
    """True if the block after these could not be copied."""

    def to_code(self) -> list[int]:
        """Return the report as integers.

        >>> RankReport.from_code(RankReport(7, is_damaged=True).to_code()).is_damaged
        True
        """
        return [*map(int, self)]

    @staticmethod
    def from_code(code: Sequence[int]) -> "RankReport":
        """Return the report that `to_code` wrote."""
        nbytes, written, error, read, is_damaged = code
        return RankReport(nbytes, written, error, read, bool(is_damaged))
