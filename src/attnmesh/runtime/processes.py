"""Processes of this host, by their number and their start: a number is used again once its process has ended."""

import os
from pathlib import Path
from typing import NamedTuple


class RunningProcess(NamedTuple):
    """A process, by its number and the clock ticks from the start of the host to its own; 0 for one that has ended."""

    pid: int
    start: int

    @staticmethod
    def of(pid: int | None = None) -> "RunningProcess":
        """Return the process of that number, this one by default. A zombie has ended."""
        pid = os.getpid() if pid is None else pid
        try:
            state, *fields = Path(f"/proc/{pid}/stat").read_bytes().rsplit(b")", 1)[1].split()
        except OSError:
            return RunningProcess(pid, 0)
        return RunningProcess(pid, 0 if state in b"ZX" else int(fields[18]))  # field 22 of proc(5)

    @staticmethod
    def parse(text: str) -> "RunningProcess":
        """Return the process that `str` wrote."""
        pid, start = text.split("-")
        return RunningProcess(int(pid), int(start))

    def __str__(self) -> str:
        return f"{self.pid}-{self.start}"

    def is_alive(self) -> bool:
        """Return whether the process runs, and is no later one of the same number.

        >>> RunningProcess.of().is_alive(), RunningProcess(os.getpid(), start=1).is_alive()
        (True, False)
        """
        return self.start != 0 and RunningProcess.of(self.pid) == self
