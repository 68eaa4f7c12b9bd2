"""Errors that attnmesh raises, and the checks that values make of themselves.

Each message has one form: `subject: expected X, given Y. Fix: Z.` Every error except `RankFailure` is a `ValueError`.
All of them can be pickled, so that one rank can send its error to the others.
"""

import operator
import sys
import warnings
from collections.abc import Collection, Sequence
from numbers import Number
from types import NoneType

import torch
from torch import Tensor


class InputError(ValueError):
    """Base class of all errors that attnmesh raises but `RankFailure`: what was expected, what was given, and a fix.

    Args:
        subject: The function at fault, and its argument if it is one, such as "attend q".
        expected: What would be accepted.
        given: What was passed, or found.
        fix: What to change, which starts with a verb.

    >>> raise ShapeError("q", "4 dims", "3 dims", "add the batch with q[None]")
    Traceback (most recent call last):
    attnmesh.errors.ShapeError: q: expected 4 dims, given 3 dims. Fix: add the batch with q[None].
    """

    def __init__(self, subject: str, expected: str, given: str, fix: str) -> None:
        if torch.compiler.is_compiling():
            _leave_graph(f"{subject}: expected {expected}, given {given}. Fix: {fix}.")
        super().__init__(subject, expected, given, fix)

    def __str__(self) -> str:
        subject, expected, given, fix = self.args
        given = f":\n{given}\n" if given.startswith("    ") else f" {given}. "  # indented: a table of values per rank
        return f"{subject}: expected {expected}, given{given}Fix: {fix}."


def _leave_graph(text: str) -> None:
    """Let PyTorch leave the graph, where the error is raised then, or raise its own with this text if it may not.

    A text with symbols, as of dynamic shapes, is no constant, which a message has to be: PyTorch leaves at `strip`.
    """
    torch._dynamo.graph_break(msg=text.strip())


class ShapeError(InputError):
    """Raised when dims, lengths, widths or head counts disagree."""


class DtypeError(InputError):
    """Raised when a dtype is not supported, or when dtypes disagree."""


class DeviceError(InputError):
    """Raised when tensors are on different devices."""


class MaskError(InputError):
    """Raised when a mask is not valid, or does not fit the length."""


class LayoutError(InputError):
    """Raised when a layout, or positions, do not fit the tokens given."""


class MeshError(InputError):
    """Raised when a mesh does not fit the call, or when the ranks' calls differ."""


class KernelError(InputError):
    """Raised when what a call asks for is not supported: by a kernel, a cache, a model or a trainer."""


class ArgumentError(InputError, TypeError):
    """Raised when an argument does not exist, is missing, or has a value that the function does not take.

    Also a `TypeError`, as for any Python function.
    """


class UnforeseenError(InputError):
    """Raised on the other ranks when one rank fails unexpectedly, for example out of memory."""


class ModelError(InputError):
    """Raised when a model is missing, does not generate text, or does not accept the prompt."""


class Busy(InputError):
    """Raised when the queue of an engine is full. Submit again later."""


class TooLong(InputError):
    """Raised when a prompt and its answer can never fit an engine."""


class GrammarError(InputError):
    """Raised when a grammar is not possible, or takes too much work."""


class StoreError(InputError):
    """Raised when files are damaged, or are not those of a cache."""


class VersionError(InputError, ImportError):
    """Raised when an installed package lacks what attnmesh uses of it; also an `ImportError`."""


class ClusterError(InputError):
    """Raised when hosts, links or devices are not possible, or a workload does not fit them."""


class RankFailure(RuntimeError):
    """Raised on every surviving rank when ranks are dead, stopped or disconnected. Start the ranks again.

    Args:
        ranks: World ranks that are missing. Empty if they are unknown.
        step: The operation that failed, such as "gathering keys".
        axis: The mesh axis along which the ranks communicated.
        why: The error of the backend, or the timeout.

    >>> raise RankFailure([3], "gathering keys", "queries", "Connection closed by peer")
    Traceback (most recent call last):
    attnmesh.errors.RankFailure: rank 3 is lost along the queries axis, gathering keys: Connection closed by peer
    """

    def __init__(self, ranks: Sequence[int], step: str, axis: str, why: str) -> None:
        super().__init__(tuple(ranks), step, axis, why)

    @property
    def ranks(self) -> tuple[int, ...]:
        """World ranks that are missing. Empty if they are unknown."""
        ranks: tuple[int, ...] = self.args[0]
        return ranks

    @property
    def step(self) -> str:
        """The operation that failed."""
        return str(self.args[1])

    @property
    def axis(self) -> str:
        """The mesh axis along which the ranks communicated."""
        return str(self.args[2])

    def __str__(self) -> str:
        ranks, step, axis, why = self.args
        lost = f"ranks {', '.join(map(str, ranks))} are" if len(ranks) > 1 else "some rank is"
        lost = f"rank {ranks[0]} is" if len(ranks) == 1 else lost
        return f"{lost} lost along the {axis} axis, {step}: {why}"


def short(value: object) -> str:
    """Return a value as text for an error: a number or string itself, else its type, and the shape of a tensor."""
    if isinstance(value, Tensor):
        return f"a tensor {tuple(value.shape)}"
    return repr(value)[:40] if isinstance(value, (Number, str, NoneType)) else type(value).__name__


def type_and_shape(value: object) -> str:
    """Return dtype and shape of a tensor as text for an error, and the type of another value."""
    return f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__


def check_count(subject: str, value: int, fix: str, *, least: int = 1, error: type[InputError] = ShapeError) -> None:
    """Raise unless value is a whole number of at least `least`, of any integer type."""
    try:
        count = value if isinstance(value, int) else operator.index(value)
    except TypeError:
        count = least - 1
    if isinstance(value, bool) or count < least:
        raise error(subject, f"a whole number, {least} or more", repr(value), fix)


def checked_count(subject: str, value: int, fix: str, *, least: int = 1, error: type[InputError] = ShapeError) -> int:
    """Return value as an int of Python, or raise as `check_count` does."""
    check_count(subject, value, fix, least=least, error=error)
    return value if isinstance(value, int) else operator.index(value)


def check_int(subject: str, number: int, least: int, fix: str) -> None:
    """Raise unless the number is an int of Python of at least `least`: JSON has no other integers."""
    if type(number) is not int or number < least:
        raise ShapeError(subject, f"a whole number, {least} or more", repr(number), fix)


def check_choice(
    subject: str,
    value: str,
    choices: Collection[str],
    fix: str = 'leave it at "auto"',
    error: type[InputError] = KernelError,
) -> None:
    """Raise unless value is one of the choices. Where "auto" is not among them, the caller passes another fix."""
    if not isinstance(value, str) or value not in choices:
        raise error(subject, f"one of {', '.join(choices)}", repr(value), fix)


_warned: set[str] = set()


def warn_once(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn once per process. The warning points at the first caller outside of attnmesh."""
    if message not in _warned:
        warnings.warn(message, category, stacklevel=_depth_of_caller())
        _warned.add(message)  # not reached where warnings are errors: then each call raises


def _depth_of_caller() -> int:
    """Return how many frames above `warn_once` the first one outside of attnmesh is, as `stacklevel` counts."""
    frame = sys._getframe(1)
    depth = 1
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).split(".")[0] == "attnmesh":
        frame = frame.f_back
        depth = depth + 1
    return depth
