"""What attnmesh raises when it is asked for something it cannot do exactly.

Every message says what was expected, what was given and how to fix it. All but a lost rank are `ValueError`s, and
picklable, so that one rank can tell another what went wrong.
"""

from collections.abc import Sequence


class InputError(ValueError):
    """Something given to attnmesh contradicts itself or the rest.

    >>> raise ShapeError("q", "4 dims", "3 dims", "add the batch with q[None]")
    Traceback (most recent call last):
    attnmesh.errors.ShapeError: q: expected 4 dims, given 3 dims. Fix: add the batch with q[None].
    """

    def __init__(self, subject: str, expected: str, given: str, fix: str) -> None:
        super().__init__(subject, expected, given, fix)

    def __str__(self) -> str:
        subject, expected, given, fix = self.args
        given = f":\n{given}\n" if given.startswith("    ") else f" {given}. "  # a table of who gave what
        return f"{subject}: expected {expected}, given{given}Fix: {fix}."


class ShapeError(InputError):
    """Dims, lengths, widths or head counts that disagree."""


class DtypeError(InputError):
    """A dtype that is not supported, or dtypes that disagree."""


class DeviceError(InputError):
    """Tensors that live on different devices."""


class MaskError(InputError):
    """A mask that means nothing, or not for this length."""


class LayoutError(InputError):
    """A layout, or positions, that do not describe the tokens given."""


class MeshError(InputError):
    """A mesh that does not fit what is asked of it, or ranks that disagree."""


class KernelError(InputError):
    """A kernel that is unknown, or cannot serve what was asked of it."""


class ArgumentError(InputError, TypeError):
    """An argument that no function here has; a `TypeError` too, as to every function of Python."""


class UnforeseenError(InputError):
    """What no check foresaw, as that there is no memory: others raise this where one rank raises what it met."""


class ModelError(InputError):
    """A model that is not there, or is none that generates text, or a prompt that it cannot take."""


class StoreError(InputError):
    """Files that are not those of a cache, or are damaged."""


class ClusterError(InputError):
    """Hosts, links or devices that cannot be, or a workload that does not fit them."""


class RankFailure(RuntimeError):
    """Ranks that others wait for are dead, stopped or cut off; every survivor raises it, and can only start anew.

    >>> raise RankFailure([3], "gathering keys", "queries", "Connection closed by peer")
    Traceback (most recent call last):
    attnmesh.errors.RankFailure: rank 3 is lost along the queries axis, gathering keys: Connection closed by peer
    """

    def __init__(self, ranks: Sequence[int], step: str, axis: str, why: str) -> None:
        super().__init__(tuple(ranks), step, axis, why)

    @property
    def ranks(self) -> tuple[int, ...]:
        """Those that are missing, as the world numbers them; none where nobody can tell."""
        ranks: tuple[int, ...] = self.args[0]
        return ranks

    @property
    def step(self) -> str:
        """What was being done."""
        return str(self.args[1])

    @property
    def axis(self) -> str:
        """The axis of the mesh along which it was done."""
        return str(self.args[2])

    def __str__(self) -> str:
        ranks, step, axis, why = self.args
        who = {0: "some rank is", 1: f"rank {ranks[0] if ranks else ''} is"}.get(len(ranks))
        who = who or f"ranks {', '.join(map(str, ranks))} are"
        return f"{who} lost along the {axis} axis, {step}: {why}"
