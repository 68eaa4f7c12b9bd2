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

    >>> twice = LateBound[[int], int]()
    >>> twice.bind(lambda x: 2 * x)
    >>> twice(4)
    8
    """

    def bind(self, function: Callable[P, R]) -> None:
        """Call this function from now on."""
        self._function = function

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Call the function that was bound."""
        return self._function(*args, **kwargs)
