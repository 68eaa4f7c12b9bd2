"""Changes of several steps are made as a whole, wherever an error breaks them off."""

from collections.abc import Callable

import pytest

from attnmesh.runtime.unbroken import unbroken

pytestmark = pytest.mark.quick


class Interrupted:
    """Three steps that set numbers; the step `at` is broken off the first time, before or after it has set its own."""

    def __init__(self, at: int | None, after: bool, error: type[BaseException]) -> None:
        self.numbers = [0, 0, 0]
        self.breaks = [at] if at is not None else []
        self.after, self.error = after, error

    def step(self, index: int) -> Callable[[], None]:
        def act() -> None:
            broken = index in self.breaks
            self.breaks = [] if broken else self.breaks
            if not broken or self.after:
                self.numbers[index] = index + 1
            if broken:
                raise self.error

        return act


def test_steps_are_done_once_and_in_order() -> None:
    done: list[int] = []
    unbroken([lambda: done.append(0), lambda: done.append(1), lambda: done.append(2)])
    unbroken([])
    assert done == [0, 1, 2]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("at", range(3))
def test_an_error_in_any_step_leaves_all_done_and_is_raised(at: int, after: bool, error: type[BaseException]) -> None:
    change = Interrupted(at, after, error)
    with pytest.raises(error):
        unbroken([change.step(index) for index in range(3)])
    assert change.numbers == [1, 2, 3]
