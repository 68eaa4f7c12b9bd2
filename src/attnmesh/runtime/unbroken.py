"""Changes of several actions that no error or Ctrl-C leaves half made."""

from collections.abc import Callable, Sequence

Action = Callable[[], "Sequence[Action] | None"]
"""A part of a change. It gives the same result if it is done twice. Actions that it returns are done next."""


def unbroken(actions: Sequence[Action]) -> None:
    """Do the actions in order.

    If an error or Ctrl-C breaks off an action, it is done again, then the later ones, and the error is raised. What
    an action writes depends on nothing that it writes: an earlier one copies it to other memory.

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
    left = [*actions]
    try:
        _finish(left)
    except BaseException:
        _finish(left)
        raise


def _finish(left: list[Action]) -> None:
    """Do the actions that are left. Each is replaced by those that it returns, once it is done."""
    while left:
        left[:1] = left[0]() or ()
