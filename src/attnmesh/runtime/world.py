"""State of this process that belongs to its process groups, in one object: caches, peers, the deadline."""

import atexit
import gc
from collections.abc import Callable, Sequence
from functools import cached_property, lru_cache
from secrets import randbits
from typing import NamedTuple, ParamSpec, TypeVar, cast

from attnmesh.runtime.shutdown import wait_until_idle

P = ParamSpec("P")
R = TypeVar("R")


class RankProcess(NamedTuple):
    """The number of a rank's host, and a random number of its process that no other job has."""

    host: int
    random_id: int


class World:
    """The world of ranks that this process is in. A process that outlives it closes it and enters the next one."""

    def __init__(self) -> None:
        self.deadline: float | None = None
        """Seconds that an exchange may take, in this world and later ones; None for the process groups' timeouts."""
        self.has_failed = False
        """True once an exchange of this world has failed."""
        self.processes: dict[int, RankProcess] = {}
        """Processes of ranks whose host is known."""
        self._releases: list[Callable[[], None]] = []

    @cached_property
    def random_id(self) -> int:
        """Random number of this process, drawn at first use: a process forked after the import draws its own."""
        return randbits(62)

    def cached(self, maxsize: int | None = None) -> Callable[[Callable[P, R]], Callable[P, R]]:
        """Return a decorator like `lru_cache`, whose cache is cleared when the world is closed."""

        def decorate(find: Callable[P, R]) -> Callable[P, R]:
            cached = lru_cache(maxsize)(find)
            self.on_close(cached.cache_clear)
            return cast(Callable[P, R], cached)

        return decorate

    def on_close(self, release: Callable[[], None]) -> None:
        """Call this as well whenever the world is closed."""
        self._releases.append(release)

    def clear_caches(self) -> None:
        """Release all meshes and their process groups."""
        for release in self._releases:
            release()
        gc.collect()  # a sharded model is part of a reference cycle, and holds its groups

    def close(self) -> None:
        """Release everything that belongs to the process groups of this world."""
        self.clear_caches()
        self.has_failed = False
        self.processes.clear()


WORLD = World()
"""The world of this process."""

cached_per_world = WORLD.cached
"""Decorates a function whose results belong to process groups: they are dropped when the world is closed."""


def collective_once(find: Callable[P, R]) -> Callable[P, R]:
    """Return the function with its results cached.

    Collective: all ranks make the first call with the same arguments at once, and exchange messages in it. The cache
    has no bound. Otherwise rank A could drop a result that rank B still has. A would then call alone, and wait for
    messages that B never sends. A memo with a bound (`cached_per_world(1024)`) may hold what calls such functions: made
    anew, a result sends nothing, as they keep theirs.
    """
    return WORLD.cached()(find)


def cached_from_code(make: Callable[[str, tuple[int, ...]], R], names: str, numbers: Sequence[int]) -> R:
    """Return what a cached `make` makes of the code of an operator; uncached where a compiler traces sizes."""
    traced = not set(map(type, numbers)) <= {int}  # SymInts, which have no hash
    return getattr(make, "__wrapped__", make)(names, tuple(numbers)) if traced else make(names, tuple(numbers))


@atexit.register
def end() -> None:
    """Release the groups before Python ends: that ends their threads, which have to be idle."""
    wait_until_idle()
    WORLD.close()
