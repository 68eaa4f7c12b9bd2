"""Named ranges in a profile: attention, exchanges and merges. Without a profiler, no function of Python is called."""

from collections.abc import Callable
from typing import ParamSpec, TypeVar

from torch._C._autograd import _profiler_enabled
from torch.profiler import record_function

is_profiled: Callable[[], bool] = _profiler_enabled
"""Returns True in a thread that a profiler observes, without a call of Python."""

ATTENTION_RANGE, EXCHANGE_RANGE, MERGE_RANGE = "attnmesh: attention", "attnmesh: exchange", "attnmesh: merge"

Arguments = ParamSpec("Arguments")
Value = TypeVar("Value")


def profiled_as(name: str, function: Callable[Arguments, Value]) -> Callable[Arguments, Value]:
    """Return the function with its calls as ranges of this name.

    Callers ask `is_profiled` first: a function that asked it for them would add a call of Python to each step.

    >>> from torch.profiler import profile
    >>> with profile() as found:
    ...     _ = profiled_as("attnmesh: merge", max)(1, 2) if is_profiled() else None
    >>> [event.name for event in found.events()]
    ['attnmesh: merge']
    """

    def ranged(*args: Arguments.args, **options: Arguments.kwargs) -> Value:
        with record_function(name):
            return function(*args, **options)

    return ranged
