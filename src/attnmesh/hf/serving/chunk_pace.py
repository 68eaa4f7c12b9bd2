"""The tokens of a prompt's next chunk, by the seconds that tokens and steps of rows have taken."""

from dataclasses import dataclass

from attnmesh.runtime.world import WORLD

LONGEST_CHUNK = 2048
"""Tokens of a chunk at most: a longer chunk takes more memory."""

FIRST_CHUNK = 256
"""Tokens of a chunk without rows beside it, while its speed is not known."""

FIRST_CHUNK_BESIDE_ROWS = 64
"""Tokens of a chunk beside rows that decode, while the speed of either is not known."""

CHUNK_SECONDS = 10.0
"""Seconds of a chunk at most, and at most a quarter of the deadline. Requests join and are cancelled between chunks."""

STORE_SHARE = 0.5
"""Share of the spare seconds for copies of blocks. A chunk of a prompt gets the others."""

PACE_EMA_WEIGHT = 0.3
"""Weight of the last time or rate in a moving average: a larger one follows changes sooner, and errors too."""


@dataclass
class ChunkPace:
    """Moving averages of times, and the size of chunks by them. `max_gap` is the argument of `Engine`."""

    max_gap: float | None
    row_seconds: float = 0.0
    """Seconds of a step of rows; 0 before the first."""
    token_seconds: float = 0.0
    """Seconds of a token of a prompt; 0 before the first chunk."""

    def add_rows(self, seconds: float) -> None:
        """Take the time of a step of rows."""
        self.row_seconds = _mean(self.row_seconds, seconds)

    def add_chunk(self, tokens: int, seconds: float) -> None:
        """Take the time of a chunk. A chunk of one token or two is left out: its time is mostly that of the call."""
        if tokens > 2:
            self.token_seconds = _mean(self.token_seconds, seconds / tokens)

    @property
    def spare_seconds(self) -> float:
        """Seconds that may be added to a step of rows."""
        return self.row_seconds if self.max_gap is None else max(self.max_gap - self.row_seconds, 0.0)

    @property
    def store_seconds(self) -> float:
        """Seconds of the spare ones for which blocks may be copied beside a step of rows."""
        return STORE_SHARE * self.spare_seconds

    def tokens(self, rows: int, waiting: int, *, store_is_busy: bool) -> int:
        """Return the tokens of the next chunk, beside a step of `rows` rows.

        `waiting` counts the requests without a first token. Each of them adds two steps of rows to the chunk's time,
        unless `max_gap` is given. A busy store gets `STORE_SHARE` of the time that `max_gap` leaves.
        """
        longest = min(CHUNK_SECONDS, WORLD.deadline / 4 if WORLD.deadline else CHUNK_SECONDS)
        if not rows:
            return min(LONGEST_CHUNK, max(1, int(longest / self.token_seconds))) if self.token_seconds else FIRST_CHUNK
        if not self.token_seconds or not self.row_seconds:
            return FIRST_CHUNK_BESIDE_ROWS
        chunk_share = 1 - STORE_SHARE if store_is_busy else 1
        gap = 2 * self.row_seconds * waiting if self.max_gap is None else chunk_share * self.spare_seconds
        return max(1, min(LONGEST_CHUNK, int(min(gap, longest) / self.token_seconds)))


def _mean(before: float, seconds: float) -> float:
    return (1 - PACE_EMA_WEIGHT) * before + PACE_EMA_WEIGHT * seconds if before else seconds
