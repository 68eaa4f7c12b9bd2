"""Search for garbage after 20,000 new objects, not 700: a twentieth of the time of tests, and a fifth of some.

Imported first of all, by each process that imports much.
"""

import gc

gc.set_threshold(20_000, 10, 10)


def keep_what_is_left() -> None:
    """Let no search for garbage look at what is there now: it would take seconds, and some tests ask for one."""
    gc.collect()
    gc.freeze()
