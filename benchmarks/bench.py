"""The skeleton of a bench: its shared options, progress, one JSON object that grows by rows, and tables."""

import inspect
import json
import os
import shutil
from collections.abc import Callable, Iterable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from attnmesh.cli.launch import Send
from attnmesh.cli.output import Status, command_line, console, print_json
from attnmesh.errors import ArgumentError
from attnmesh.runtime.machine import machine
from attnmesh_command.shared_options import AsJson, OutFile, Verbose

Measure = Callable[..., Iterable[Table | str]]
"""Function that measures a bench, by its `Bench` and its options, and returns tables and lines to print."""

HostsOption = Annotated[
    str | None,
    typer.Option("--hosts", help="In place of --ranks: hosts made on this machine, as 8x2@250mbit (Linux, root)."),
]


def counts_of(option: str, given: str) -> tuple[int, ...]:
    """Return the numbers of an option such as `--clients 1,2,4`.

    >>> counts_of("--clients", "1,16")
    (1, 16)
    """
    numbers = given.split(",")
    if not all(part.isascii() and part.isdigit() and 0 < int(part) < 10**6 for part in numbers):
        raise ArgumentError(option, "whole numbers above 0, as 1,2,4", repr(given), "separate them by commas")
    return tuple(map(int, numbers))


def write_json(file: Path, record: dict[str, Any]) -> None:
    """Replace a regular file in one step, so that readers find the old or the new text; write to others directly."""
    text = json.dumps(record, indent=2) + "\n"
    if file.is_symlink() or not (file.is_file() and os.access(file.parent, os.W_OK)):
        file.write_text(text)
        return
    temporary = file.with_name(f".attnmesh-{os.getpid()}.json")
    temporary.write_text(text)
    shutil.copymode(file, temporary)
    os.replace(temporary, file)


def published(report: dict[str, Any], as_json: bool, out: Path | None) -> bool:
    """Write a report to the file, if any, and print it with `as_json`. Return `as_json`."""
    if out is not None:
        write_json(out, report)
    if as_json:
        print_json(report)
    return as_json


class Report:
    """One JSON object of a bench, written as its rows are measured.

    The file is rewritten after each row: it is valid at any moment, and `"complete"` is false until the end. Standard
    output gets the text of the same object as it grows; an interrupt closes its brackets.
    """

    def __init__(self, command: str, as_json: bool, out: Path | None) -> None:
        self.record: dict[str, Any] = {"command": command, "machine": machine()}
        self.as_json, self.out, self.printed = as_json, out, ""

    def add(self, table: str, *rows: Any) -> None:
        """Add rows, which are dataclasses or have a `record()`, to the last table or to a new one."""
        records = [row.record() if hasattr(row, "record") else asdict(row) for row in rows]
        self.set(**{table: [*self.record.get(table, []), *records]})

    def set(self, **facts: Any) -> None:
        """Set values of the object: new ones, or the last one with more in it."""
        self.record |= facts
        self._write({**self.record, "complete": False})
        # The object grows at its end, so its text without closing brackets begins with the text printed before.
        self._print(json.dumps(self.record, indent=2).rstrip("]}\n "))

    def close(self, complete: bool) -> None:
        """Write the object whole."""
        self.record["complete"] = complete
        self._write(self.record)
        self._print(json.dumps(self.record, indent=2) + "\n")

    def _write(self, record: dict[str, Any]) -> None:
        if self.out is not None:
            write_json(self.out, record)

    def _print(self, text: str) -> None:
        if self.as_json:
            typer.echo(text.removeprefix(self.printed), nl=False)
            self.printed = text


class Bench:
    """One run of a bench: rows are written to the report, and shown as progress, when they are measured."""

    def __init__(self, command: str, as_json: bool, out: Any) -> None:
        self.report, self.status = Report(command, as_json, out), Status("starting")
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


def bench_command(app: typer.Typer, name: str, short_help: str, explained: str) -> Callable[[Measure], Measure]:
    """Register a function as the bench `name`, with the options `--json`, `--verbose` and `--out` beside its own.

    `explained` is printed after the tables with `--verbose`.
    """

    def register(measure: Measure) -> Measure:
        def run(*, as_json: bool, verbose: bool, out: Any, **options: Any) -> None:
            with Bench(command_line(f"python -m benchmarks {name}", options), as_json, out) as bench:
                tables = measure(bench, **options)
            if not as_json:
                for table in tables:
                    console.print(table)
                if verbose:
                    console.print(explained)
            raise typer.Exit(bench.code)

        _, *own_parameters = inspect.signature(measure).parameters.values()
        parameters = [*own_parameters, *inspect.signature(_shared).parameters.values()]
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        run.__doc__ = measure.__doc__
        app.command(name=name, short_help=short_help)(run)
        return measure

    return register
