"""Output of the command: tables, JSON, progress and errors."""

import json
import shlex
import threading
import time
from collections.abc import Container, Iterable
from typing import Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from attnmesh.cli.launch import LaunchError
from attnmesh.errors import InputError, RankFailure
from attnmesh_command.messages import is_first_rank, printable

INTERVAL = 8.0
"""Seconds between two lines of progress where standard error is no terminal."""


console, progress = Console(emoji=False), Console(stderr=True, emoji=False)
"""Standard output; and standard error, for progress and messages."""


EXTRAS = {"matplotlib": "plot", "starlette": "serve", "uvicorn": "serve", "h11": "serve", "prometheus_client": "serve"}
"""Extras of packages that are missing; those of others are in hf."""


class Status:
    """The step that a command is at: a spinner on a terminal, elsewhere a line every `INTERVAL` seconds.

    Under torchrun the first rank alone shows it.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.start = time.monotonic()
        self.spinner = progress.status(escape(printable(text))) if progress.is_terminal else None
        self.stopped = threading.Event()

    def __enter__(self) -> "Status":
        if not is_first_rank():
            self.stop()
        elif self.spinner is None:
            threading.Thread(target=self._print_lines, daemon=True).start()
        else:
            self.spinner.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def update(self, text: str) -> None:
        """Show another step."""
        self.text = text
        if self.spinner is not None:
            self.spinner.update(escape(printable(text)))

    def stop(self) -> None:
        """Show no more steps."""
        self.stopped.set()
        if self.spinner is not None:
            self.spinner.stop()

    def _print_lines(self) -> None:
        while not self.stopped.wait(INTERVAL):
            seconds = time.monotonic() - self.start
            print_message(escape(f"{printable(self.text)} ({seconds:.0f} s)"))


def print_message(text: str) -> None:
    """Print one line of markup on standard error, however long it is."""
    progress.print(text, highlight=False, soft_wrap=True)


def print_error(error: Exception) -> int:
    """Print an error as one line and return the exit code; raise it again if no user can mend it."""
    if isinstance(error, ModuleNotFoundError):
        extra = EXTRAS.get((error.name or "").split(".")[0], "hf")
        text = f"this needs {error.name}: pip install 'attnmesh\\[{extra}]'"
    elif isinstance(error, (ValueError, LaunchError, RankFailure, OSError)):
        if isinstance(error, InputError) and not is_first_rank():
            return 1  # all ranks of torchrun raise it, one prints it
        text = escape(_brief(error))
    else:
        raise error
    print_message(f"[bold red]error:[/] {text}")
    return 1


def _brief(error: BaseException) -> str:
    text = str(error).strip() or type(error).__name__
    lines = [text] if isinstance(error, InputError) else text.splitlines()
    return printable(lines[0] if len(lines) == 1 else f"{lines[0]} {lines[-1]} (-v shows more)")


def pairs(title: str, values: dict[str, Any]) -> Table:
    """Return a table of names and values."""
    rows = titled(title, "", "")
    rows.show_header = False
    for name, value in values.items():
        rows.add_row(*map(escape, (name, str(value))))
    return rows


def titled(title: str, *columns: str, figures: Iterable[str] = ()) -> Table:
    """Return an empty table with its title on the left, of columns and then of columns of figures."""
    right = (Column(name, justify="right") for name in figures)
    return Table(*columns, *right, title=escape(title), title_justify="left", title_style="bold")


def numbered(title: str, columns: dict[str, list[str]], left_columns: Container[str], caption: str) -> Table:
    """Return a table of numbered rows that fits 80 characters. Columns are figures, but for those on the left."""
    table = titled(title, "")
    table.box, table.show_edge, table.padding = SIMPLE_HEAD, False, (0, 0, 0, 0)  # an edge of this box is a blank line
    table.caption, table.caption_justify = caption, "left"
    for name in columns:
        table.add_column(name, justify="left" if name in left_columns else "right", no_wrap=name != "known as")
    for number, cells in enumerate(zip(*columns.values(), strict=True), 1):
        table.add_row(str(number), *cells)
    return table


def print_json(value: dict[str, Any]) -> None:
    """Print one object on standard output."""
    typer.echo(json.dumps(value, indent=2))


def command_line(command: str, options: dict[str, Any]) -> str:
    """Return the command line that gives these options, but for those of output.

    >>> command_line("python -m benchmarks decode", {"ranks": 8, "hosts": None, "alone": True})
    'python -m benchmarks decode --ranks 8 --alone'
    """
    words = command.split()
    for name, value in options.items():
        if name in ("as_json", "verbose", "out") or (name == "ranks" and options.get("hosts")):
            continue
        for argument in value if isinstance(value, (list, tuple)) else [value]:
            if argument is not False and argument not in (None, ""):
                words += [f"--{name.replace('_', '-')}", *([] if argument is True else [str(argument)])]
    return shlex.join(words)
