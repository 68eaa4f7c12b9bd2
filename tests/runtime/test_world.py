"""State of a process that belongs to its world: caches that are cleared with it, and what outlives it."""

import gc
import weakref
from typing import Any

from attnmesh.runtime.world import World, cached_from_code


class Group:
    """Stands for a process group."""


def test_a_cached_function_is_called_once_until_its_world_is_closed() -> None:
    world = World()
    calls = []

    @world.cached()
    def doubled(number: int) -> int:
        calls.append(number)
        return 2 * number

    assert [doubled(2), doubled(2), doubled(3)] == [4, 4, 6]
    assert calls == [2, 3]
    world.close()
    assert doubled(2) == 4
    assert calls == [2, 3, 2]


def test_a_full_cache_forgets_what_was_used_least_recently() -> None:
    world = World()
    calls = []

    @world.cached(2)
    def found(number: int) -> int:
        calls.append(number)
        return number

    for number in (1, 2, 1, 3, 1, 2):
        found(number)
    assert calls == [1, 2, 3, 2]


def test_a_closed_world_holds_no_group() -> None:
    """A group that is in a cycle is released too, for its threads have to end before Python does."""
    world = World()

    @world.cached()
    def made(name: str) -> Any:
        group: Any = Group()
        group.itself = group
        return group

    kept = weakref.ref(made("keys"))
    gc.collect()
    assert kept() is not None
    world.close()
    assert kept() is None


def test_the_deadline_outlives_a_world_and_its_failure_does_not() -> None:
    world = World()
    world.deadline, world.has_failed = 30.0, True
    world.close()
    assert (world.deadline, world.has_failed) == (30.0, False)


def test_what_others_keep_of_a_world_is_released_each_time_that_it_is_closed() -> None:
    world, messages = World(), [1]
    world.on_close(messages.clear)
    for _ in range(2):
        world.close()
        assert messages == []
        messages.append(2)


def test_each_process_has_a_random_number_of_its_own() -> None:
    one, other = World(), World()
    assert one.random_id == one.random_id != other.random_id
    assert 0 <= one.random_id < 2**62


def test_what_a_code_stands_for_is_made_once() -> None:
    world = World()
    calls = []

    @world.cached()
    def make(names: str, numbers: tuple[int, ...]) -> tuple[str, int]:
        calls.append(numbers)
        return names, sum(numbers)

    for numbers in ([1, 2], (1, 2)):
        assert cached_from_code(make, "ring", numbers) == ("ring", 3)
    assert calls == [(1, 2)]


class TracedSize(int):
    """Stands for a SymInt, which has no hash."""

    __hash__ = None  # type: ignore[assignment]


def test_sizes_that_a_compiler_traces_are_not_kept() -> None:
    world = World()
    calls = []

    @world.cached()
    def make(names: str, numbers: tuple[int, ...]) -> int:
        calls.append(numbers)
        return sum(numbers)

    for _ in range(2):
        assert cached_from_code(make, "ring", [1, TracedSize(7)]) == 8
    assert len(calls) == 2
