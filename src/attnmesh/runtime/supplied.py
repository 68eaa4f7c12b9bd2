"""Functions that a room further down supplies: a value offers a method whose work belongs there."""

from collections.abc import Callable
from typing import Generic, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


class Supplied(Generic[P, R]):
    """A function that a room further down supplies when it is imported.

    `Cluster.measure` exchanges messages, and `KVCache.save` and `load` use files. Users find them at the value.
    The value's room may not import the one that does the work, so it declares what it needs.
    `setup` and `store` supply it, which `import attnmesh` imports.

    >>> twice = Supplied[[int], int]()
    >>> twice.supply(lambda x: 2 * x)
    >>> twice(4)
    8
    """

    def supply(self, function: Callable[P, R]) -> None:
        """Call this function from now on."""
        self._function = function

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Call the function that was supplied."""
        return self._function(*args, **kwargs)
