"""Wait for gloo's threads before Python exits: a thread that still releases tensors would abort the process.

To release a Python object a thread needs the GIL. Python below 3.14 ends a thread that requests the GIL at exit with
`pthread_exit`, which in glibc unwinds the stack through destructors: "terminate called without an active exception".
"""

import time
from contextlib import suppress
from pathlib import Path

TASKS = Path("/proc/self/task")
"""Linux's list of the threads of this process. Other systems have neither this list nor glibc."""

THREAD_PREFIX = "pt_gloo"
"""Prefix of the names of gloo's threads."""

THREAD_POLL_SECONDS = 0.01
"""Seconds between two polls: twice the time that a Python thread keeps the GIL when others request it."""

SHUTDOWN_SECONDS = 10.0
"""Seconds after which busy threads are no longer waited for: a process that may abort is better than one that hangs."""


def wait_until_idle(seconds: float = SHUTDOWN_SECONDS) -> bool:
    """Return True once all gloo threads are idle, or False after a timeout.

    They are idle if each sleeps at two consecutive polls and has not run in between. All then slept at the same time,
    while this thread slept too and did not hold the GIL. A thread whose collective waits for other ranks is idle.
    """
    end = time.monotonic() + seconds
    before = _threads()
    while before:
        time.sleep(THREAD_POLL_SECONDS)
        now = _threads()
        if now == before and None not in now.values():
            return True
        if time.monotonic() > end:
            return False
        before = now
    return True


def _threads() -> dict[str, str | None]:
    """Return the context switches of each gloo thread, or None for a thread that does not sleep."""
    by_thread: dict[str, str | None] = {}
    for task in TASKS.glob("*/status"):
        with suppress(OSError):  # the thread has just ended
            text = task.read_text("utf-8", "replace")  # a name of 15 bytes may end within a character
            status = dict(line.split(":\t", 1) for line in text.splitlines() if ":\t" in line)
            if status["Name"].startswith(THREAD_PREFIX):
                asleep = status["State"].startswith("S")
                switches = f"{status['voluntary_ctxt_switches']} {status['nonvoluntary_ctxt_switches']}"
                by_thread[task.parent.name] = switches if asleep else None
    return by_thread
