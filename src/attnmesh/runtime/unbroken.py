"""Changes of several steps that no error or Ctrl-C leaves half made."""

from collections.abc import Callable, Sequence

Step = Callable[[], "Sequence[Step] | None"]
"""A part of a change. It gives the same result if it is done twice. Steps that it returns are done next."""


def unbroken(steps: Sequence[Step]) -> None:
    """Do the steps in order.

    If an error or Ctrl-C breaks off a step, this step is done again, then the later ones, and the error is raised. What
    a step writes depends on nothing that it writes: an earlier step copies it to other memory.

    >>> done = []
    >>> def broken():
    ...     done.append("broken")
    ...     if len(done) == 1:
    ...         raise KeyboardInterrupt
    >>> try:
    ...     unbroken([broken, lambda: done.append("after")])
    ... except KeyboardInterrupt:
    ...     done
    ['broken', 'broken', 'after']
    """
    left = [*steps]
    try:
        _finish(left)
    except BaseException:
        _finish(left)
        raise


def _finish(left: list[Step]) -> None:
    """Do the steps that are left. Each is replaced by those that it returns, once it is done."""
    while left:
        left[:1] = left[0]() or ()
