"""What is compared in `attnmesh bench kernel`."""

from dataclasses import asdict, dataclass
from typing import Any

from attnmesh.cli.timing import Timing


@dataclass(frozen=True)
class Row:
    """One comparison: ours beside a rival, and the ratio that is asked of it, if any."""

    case: str
    rival: str
    theirs: Timing
    ours: Timing
    goal: float | None
    gigabytes_a_second: float | None = None
    share_of_read_rate: float | None = None

    @property
    def ratio(self) -> float:
        """How many times faster ours is."""
        return self.theirs.median / self.ours.median

    def record(self) -> dict[str, Any]:
        """The row as JSON."""
        return {**asdict(self), "ratio": round(self.ratio, 3), "met": self.met}

    @property
    def met(self) -> bool | None:
        """Whether the goal is reached, if one is set."""
        return None if self.goal is None else self.ratio >= self.goal
