"""Values by kind of call, kept so that what was settled for a kind is not settled again."""

from collections.abc import Hashable
from typing import Any, TypeVar

V = TypeVar("V")


class Kinds(dict[Hashable, V]):
    """Values of up to `most` kinds. Beyond them all are settled anew.

    >>> kinds = Kinds[str](most=2)
    >>> kinds.keep("one", "first"), kinds.find("one"), kinds.find([])
    ('first', 'first', None)
    """

    def __init__(self, most: int = 1024) -> None:
        self.most = most

    def find(self, kind: Any) -> V | None:
        """Return the value of a kind; None if there is none, or an option in it has no hash."""
        try:
            return self.get(kind)
        except TypeError:
            return None

    def keep(self, kind: Hashable, value: V) -> V:
        """Keep a value, and return it."""
        if len(self) >= self.most:
            self.clear()
        self[kind] = value
        return value
