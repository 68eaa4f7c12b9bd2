"""One row for each mistake: what a user does, and the error that all ranks raise.

Rows stand in files by what is called: `attention.py`, `models.py`, `trainers.py`. `docs/mistakes.md` shows them all.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from torch.distributed.device_mesh import DeviceMesh


class Mistake(NamedTuple):
    """What a user does, and the error that it raises on each rank."""

    what: str
    """What the user does, as the page says it: "shifts logits[:, :-1] on each shard"."""
    act: Callable[[DeviceMesh], Any]
    """Do it on this rank of the mesh."""
    error: type[Exception]
    says: str
    """A part of the message, which names the user's cause."""
    fix: str
    """A part of the fix that the message gives."""
    ranks: int = 2


def raised(mistake: Mistake, mesh: DeviceMesh) -> tuple[str, str]:
    """Return the class and the message of the error that the mistake raises on this rank; "" for none."""
    try:
        mistake.act(mesh)
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""
