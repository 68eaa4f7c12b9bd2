"""What attnmesh raises when it is asked for something it cannot do exactly.

Every message says what was expected, what was given and how to fix it. All but a lost rank are `ValueError`s, and
picklable, so that one rank can tell another what went wrong.
"""


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
        return f"{subject}: expected {expected}, given {given}. Fix: {fix}."


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


class ModelError(InputError):
    """A model that is not there, or is none that generates text, or a prompt that it cannot take."""


class StoreError(InputError):
    """Files that are not those of a cache, or are damaged."""


class ClusterError(InputError):
    """Hosts, links or devices that cannot be, or a workload that does not fit them."""


class RankFailure(RuntimeError):
    """A rank that others wait for is gone."""
