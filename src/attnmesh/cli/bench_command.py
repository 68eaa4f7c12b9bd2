"""The skeleton of a bench command: its shared options, progress, rows as they are measured, and tables."""

import inspect
import shlex
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import typer
from rich.table import Table

from attnmesh.cli.launch import Send
from attnmesh.cli.output import AsJson, OutFile, Report, Verbose, console, progress

Measure = Callable[..., Iterable[Table | str]]
"""Measures a bench, given its `Bench` and its options, and returns tables and lines to print."""


class Bench:
    """One run of a bench: rows are written to the report, and shown as progress, when they are measured."""

    def __init__(self, command: str, as_json: bool, out: Any) -> None:
        self.report, self.status = Report(command, as_json, out), progress.status("starting")
        self.tables: dict[str, list[Any]] = {}
        self.code = 0
        """Exit code of the command."""

    def __enter__(self) -> "Bench":
        self.status.__enter__()
        return self

    def __exit__(self, error: object, *_: object) -> None:
        self.status.stop()
        if error is None or self.tables:
            self.report.close(complete=error is None)

    def step(self, text: str) -> None:
        """Show what is measured next."""
        self.status.update(text)

    def table(self, name: str) -> Send:
        """Begin a table and return the function that adds a row to it."""
        self.report.add(name)
        return partial(self._add, name, self.tables.setdefault(name, []))

    def _add(self, name: str, rows: list[Any], row: Any) -> None:
        rows.append(row)
        self.report.add(name, row)
        last = getattr(row, "case", None) or getattr(row, "contender", "")
        self.step(f"{name}: {len(rows)} measured{f', the last {last}' if last else ''}")


def _shared(as_json: AsJson = False, verbose: Verbose = False, out: OutFile = None) -> None:
    """Hold the options that all benches share."""


def bench_command(app: typer.Typer, command: str, short_help: str, explained: str) -> Callable[[Measure], Measure]:
    """Register a function as the bench `command`, with the options `--json`, `--verbose` and `--out` beside its own.

    `explained` is printed after the tables with `--verbose`.
    """

    def register(measure: Measure) -> Measure:
        def run(*, as_json: bool, verbose: bool, out: Any, **options: Any) -> None:
            with Bench(typed(command, options), as_json, out) as bench:
                tables = measure(bench, **options)
            if not as_json:
                for table in tables:
                    console.print(table)
                if verbose:
                    console.print(explained)
            raise typer.Exit(bench.code)

        _, *own = inspect.signature(measure).parameters.values()
        parameters = [*own, *inspect.signature(_shared).parameters.values()]
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        run.__doc__ = measure.__doc__
        app.command(name=command.split()[-1], short_help=short_help)(run)
        return measure

    return register


def typed(command: str, options: dict[str, Any]) -> str:
    """Return the command line that gives these options.

    >>> typed("attnmesh bench decode", {"ranks": 8, "hosts": None, "alone": True})
    'attnmesh bench decode --ranks 8 --alone'
    """
    words = command.split()
    for name, value in options.items():
        if name == "ranks" and options.get("hosts"):
            continue
        for each in value if isinstance(value, list) else [value]:
            if each is not False and each not in (None, ""):
                words += [f"--{name.replace('_', '-')}", *([] if each is True else [str(each)])]
    return shlex.join(words)
