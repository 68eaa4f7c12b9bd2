"""Python ends once gloo's threads have come to rest: one that is still at work would abort the process, results or not.

A thread of gloo says that a collective is done, and lets go of its tensors after that. What is Python's among them it
can let go of only with Python's lock. Whoever asks for the lock once Python ends is made to leave by `pthread_exit`,
which unwinds the thread's stack; destructors stand on it that nothing may leave in this way, and C++ gives up:
"terminate called without an active exception". It takes no more than a thread that gets no processor for a moment:

        rank     all_reduce ...... is done | prints its results | Python ends ................. SIGABRT
        gloo     it is done, says the thread | ...... waits for a processor ...... | lets go |

That is PyTorch's, with attnmesh or without. It holds for Python below 3.14, which has such threads wait for ever, and
for glibc, whose `pthread_exit` unwinds: so it is enough to look where Linux tells of threads.
"""

import time
from contextlib import suppress
from pathlib import Path

TASKS = Path("/proc/self/task")
"""Where Linux tells of this process's threads."""

NAME = "pt_gloo"
"""What the names of threads begin with that run collectives of gloo."""

LOOK = 0.01
"""Seconds between two looks: twice what a thread of Python keeps the lock for if others ask for it."""

PATIENCE = 10.0
"""Seconds that threads have to come to rest: they are not waited for in vain if something keeps them busy."""


def come_to_rest(seconds: float = PATIENCE) -> bool:
    """Wait for gloo's threads, no longer than so many seconds, and say whether all are at rest.

    They are if each sleeps at two looks and has not run between: then all slept at the same time, while this thread
    did too and had let go of Python's lock. Who sleeps so waits for nothing in this process but new work. A collective
    that waits for other ranks is not waited for: they may never come.
    """
    end = time.monotonic() + seconds
    before = _threads()
    while before:
        time.sleep(LOOK)
        now = _threads()
        if now == before and None not in now.values():
            return True
        if time.monotonic() > end:
            return False
        before = now
    return True


def _threads() -> dict[str, str | None]:
    """How often each of gloo's threads has gone to sleep or has been interrupted; None for one that does not sleep."""
    found: dict[str, str | None] = {}
    for task in TASKS.glob("*/status"):
        with suppress(OSError):  # it has just ended
            about = dict(line.split(":\t", 1) for line in task.read_text().splitlines() if ":\t" in line)
            if about["Name"].startswith(NAME):
                asleep = about["State"].startswith("S")
                turns = f"{about['voluntary_ctxt_switches']} {about['nonvoluntary_ctxt_switches']}"
                found[task.parent.name] = turns if asleep else None
    return found
