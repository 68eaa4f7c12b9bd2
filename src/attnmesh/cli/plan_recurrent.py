"""The option `--recurrent` of `attnmesh plan`: text to recurrent layers and back, and their figures as JSON."""

import re
from typing import Annotated, Any

import typer

from attnmesh.errors import ShapeError
from attnmesh.planner.recurrent_cost import RecurrentCost
from attnmesh.planner.workload import TRANSITIONS, Recurrent

RecurrentOption = Annotated[
    list[str] | None,
    typer.Option(
        help="Recurrent layers: heads x rows x columns of a state, then :matrix, :diagonal or :scalar, :layers=N and "
        ":conv=CHANNELSxWIDTH, as 32x128x128:matrix:layers=36:conv=8192x4. Give it once for each kind."
    ),
]

COUNT = "([0-9]{1,15})"


def recurrent_of(text: str) -> Recurrent:
    """Return the recurrent layers of one `--recurrent`.

    >>> recurrent_of("32x128x128:scalar:layers=36")
    Recurrent(heads=32, key_dim=128, value_dim=128, layers=36, transition='scalar', conv_channels=0, conv_width=1)
    """
    sizes, *settings = text.split(":")
    found = re.fullmatch(f"{COUNT}x{COUNT}x{COUNT}", sizes)
    if found is None:
        raise ShapeError("--recurrent", "HEADSxROWSxCOLUMNS of a state", repr(text), "write 32x128x128:matrix")
    options: dict[str, Any] = {}
    for setting in settings:
        if setting in TRANSITIONS:
            one: dict[str, Any] = {"transition": setting}
        elif match := re.fullmatch(f"layers={COUNT}", setting):
            one = {"layers": int(match[1])}
        elif match := re.fullmatch(f"conv={COUNT}x{COUNT}", setting):
            one = {"conv_channels": int(match[1]), "conv_width": int(match[2])}
        else:
            expected = f"{', '.join(TRANSITIONS)}, layers=N or conv=CHANNELSxWIDTH after each colon"
            raise ShapeError("--recurrent", expected, repr(setting), "write 32x128x128:matrix:layers=36:conv=8192x4")
        if options.keys() & one.keys():
            fix = "leave one out, or give another kind a --recurrent of its own"
            raise ShapeError("--recurrent", "each setting once", repr(text), fix)
        options |= one
    return Recurrent(*map(int, found.groups()), **options)


def recurrent_text(kind: Recurrent) -> str:
    """Return the text of `--recurrent` for these layers.

    >>> recurrent_text(recurrent_of("32x128x128:conv=8192x4"))
    '32x128x128:matrix:layers=1:conv=8192x4'
    """
    conv = f":conv={kind.conv_channels}x{kind.conv_width}" if kind.conv_channels else ""
    return f"{kind.heads}x{kind.key_dim}x{kind.value_dim}:{kind.transition}:layers={kind.layers}{conv}"


def recurrent_record(cost: RecurrentCost) -> dict[str, Any]:
    """Return the figures of all recurrent layers as a JSON object."""
    exchanges = {
        name: {"seconds": one.seconds, "bytes": {"inside": one.inside, "between": one.between}}
        for name, one in (("scan", cost.scan), ("halo", cost.halo))
    }
    return {**exchanges, "memory": cost.memory}
