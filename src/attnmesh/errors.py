"""Errors that attnmesh raises.

Each message has one form: `subject: expected X, given Y. Fix: Z.` Every error except `RankFailure` is a `ValueError`.
All of them can be pickled, so that one rank can send its error to the others.
"""

from collections.abc import Sequence


class InputError(ValueError):
    """Base class of the errors for arguments that contradict themselves or each other.

    Args:
        subject: The function and argument at fault, such as "attend q".
        expected: The values that are accepted.
        given: The value that was passed.
        fix: A change to the call, which starts with a verb.

    >>> raise ShapeError("q", "4 dims", "3 dims", "add the batch with q[None]")
    Traceback (most recent call last):
    attnmesh.errors.ShapeError: q: expected 4 dims, given 3 dims. Fix: add the batch with q[None].
    """

    def __init__(self, subject: str, expected: str, given: str, fix: str) -> None:
        super().__init__(subject, expected, given, fix)

    def __str__(self) -> str:
        subject, expected, given, fix = self.args
        given = f":\n{given}\n" if given.startswith("    ") else f" {given}. "  # indented: a table of values per rank
        return f"{subject}: expected {expected}, given{given}Fix: {fix}."


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
    """Raised when a kernel is unknown or does not support the call."""


class ArgumentError(InputError, TypeError):
    """Raised when a function has no such argument; also a `TypeError`, as for any Python function."""


class UnforeseenError(InputError):
    """Raised on the other ranks when one rank fails unexpectedly, for example out of memory."""


class ModelError(InputError):
    """Raised when a model is missing, does not generate text, or does not accept the prompt."""


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
