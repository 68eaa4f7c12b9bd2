"""Late-bound functions, so that a method of a value can call a room further down."""

from collections.abc import Callable
from typing import Generic, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


class LateBound(Generic[P, R]):
    """A function that a room further down binds when it is imported.

    `Cluster.measure` exchanges messages; `KVCache.save` and `load`, and a cache in a folder, use files. Users find
    these methods at the value, whose room may not import the room that does the work. So the value's room declares a
    late-bound function, and the other room binds it: `setup` or `store`, which `import attnmesh` imports.

    Args:
        module: The module whose import binds the function.

    >>> twice = LateBound[[int], int]("numbers.twice")
    >>> twice(4)
    Traceback (most recent call last):
    RuntimeError: the import of numbers.twice binds this function, and it has not run yet
    >>> twice.bind(lambda x: 2 * x)
    >>> twice(4)
    8
    """

    def __init__(self, module: str) -> None:
        self.module = module
        self._function: Callable[P, R] | None = None

    def bind(self, function: Callable[P, R]) -> None:
        """Call this function from now on."""
        self._function = function

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Call the function that was bound."""
        if self._function is None:
            raise RuntimeError(f"the import of {self.module} binds this function, and it has not run yet")
        return self._function(*args, **kwargs)
