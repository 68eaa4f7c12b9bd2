"""One case for each mistake: what a user does, and the error that all ranks raise.

Cases stand in files of `cases`, by what is called. `docs/mistakes.md` shows them. To write it anew:

    python -m tests.mistakes.table
"""

import warnings
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

from torch.distributed.device_mesh import DeviceMesh

from attnmesh import errors

FOLDER = Path(__file__).parent / "cases"
PAGE = Path(__file__).parents[2] / "docs" / "mistakes.md"
HEADS = {
    "batch": "Batches: `hf.shard_batch`",
    "call": "Calls of a model with a shard",
    "loss": "Losses of your own",
    "trainer": "Trainers: `hf.on_mesh`, `hf.prepare`",
    "generate": "Generation: `hf.generate`",
    "attention": "Attention and decoding: `am.attention`, `am.shard`, `am.decode`",
}
"""Heading of each file of cases on the page, in order."""

BEGIN, END = "<!-- rows -->\n", "<!-- end of rows -->\n"


class Mistake(NamedTuple):
    """What a user does, and the error that it raises on each rank."""

    what: str
    """What the user does, as the page says it: "shifts logits[:, :-1] on each shard"."""
    act: Callable[[DeviceMesh], Any]
    """Do it on this rank of the mesh."""
    error: type[Exception]
    """The class of the error, or of the warning."""
    says: str
    """A part of the message, which names the user's cause."""
    fix: str
    """A part of the fix that the message gives."""
    ranks: int = 2


def cases_of(file: str) -> list[Mistake]:
    """Return the cases of a file."""
    cases: list[Mistake] = import_module(f"tests.mistakes.cases.{file}").CASES
    return cases


def raised(mistake: Mistake, mesh: DeviceMesh) -> tuple[str, str]:
    """Return the class and the message of the error that the mistake raises on this rank; "" for none."""
    with warnings.catch_warnings(), patch.object(errors, "_warned", set()):
        warnings.simplefilter("ignore")
        if issubclass(mistake.error, Warning):
            warnings.simplefilter("error", mistake.error)
        try:
            mistake.act(mesh)
        except Exception as error:
            return type(error).__name__, str(error)
    return "", ""


def table() -> str:
    """Return the tables of the page."""
    parts = []
    for file in HEADS:
        lines = [f"## {HEADS[file]}", "", "| you | attnmesh says | fix |", "|---|---|---|"]
        cells = ([row.what, f"`{row.error.__name__}`: {row.says}", row.fix] for row in cases_of(file))
        lines += [f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in cells]
        parts.append("\n".join(lines) + "\n")
    return "\n" + "\n".join(parts) + "\n"


def with_table(page: str) -> str:
    """Return the text of the page with the tables of the present rows."""
    before, after = page.split(BEGIN)[0], page.split(END)[1]
    return before + BEGIN + table() + END + after


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text()))
