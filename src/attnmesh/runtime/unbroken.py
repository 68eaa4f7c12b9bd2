"""Changes of several steps that no error or Ctrl-C leaves half made."""

from collections.abc import Callable, Sequence


def unbroken(steps: Sequence[Callable[[], object]]) -> None:
    """Do the steps in order. Each step must give the same result if it is done twice.

    If an error or Ctrl-C breaks off a step, this step is done again, then the later ones, and the error is raised.

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
    count = 0
    try:
        while count < len(steps):
            steps[count]()
            count += 1
    except BaseException:
        for step in steps[count:]:
            step()
        raise
