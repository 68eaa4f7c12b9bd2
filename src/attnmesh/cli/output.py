"""How the command shows things: tables, one JSON object, and the machine beside its figures."""

import json
import os
import platform
import shutil
import subprocess
from collections.abc import Callable
from errno import EACCES
from importlib.metadata import packages_distributions, version
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.markup import escape
from rich.status import Status
from rich.table import Table

import attnmesh
from attnmesh.errors import ArgumentError


def writable(option: str, file: Path | None) -> Path | None:
    """A path that cannot be written is better known before than after."""
    try:
        if file is not None:
            file.touch()
            if not os.access(file, os.W_OK):  # its owner can touch it all the same
                raise PermissionError(EACCES, os.strerror(EACCES))
    except OSError as error:
        fix = "make the folder first, or name another"
        raise ArgumentError(option, "a file that can be written", f"{file} ({error.strerror})", fix) from None
    return file


def _writable_out(file: Path | None) -> Path | None:
    return writable("--out", file)


AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output and nothing else.")]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Say how each figure comes about, and where errors do.")]
OutFile = Annotated[
    Path | None,
    typer.Option("--out", help="Also write the JSON to this file.", dir_okay=False, callback=_writable_out),
]

HostsOption = Annotated[
    str | None,
    typer.Option("--hosts", help="In place of --ranks: hosts made on this machine, as 8x2@250mbit (Linux, root)."),
]

console = Console(emoji=False)
progress = Console(stderr=True, emoji=False)


def telling(status: Status) -> Callable[[str], None]:
    """Shows what is done now as it stands: a name in it may have brackets, which are no markup."""
    return lambda text: status.update(escape(printable(text)))


def printable(text: str) -> str:
    """On one line, and nothing that a terminal would obey or cannot show.

    >>> print(printable("new\\nline, \\x1b[31mred"))
    new\\nline, \\x1b[31mred
    """
    return "".join(sign if sign.isprintable() else repr(sign)[1:-1] for sign in text)


def machine() -> dict[str, Any]:
    """What a figure needs beside it to mean something."""
    gpu = {}
    if torch.cuda.is_available():
        triton = packages_distributions().get("triton")
        names = {"gpu": torch.cuda.get_device_name(), "driver": _driver()}
        gpu = {
            **names,
            "cuda": torch.version.cuda,
            "triton": triton and version(triton[0]),
            "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        }
    return {
        "attnmesh": attnmesh.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cpu": f"{_processor()}, {torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}",
        **gpu,
    }


def _driver() -> str | None:
    """As NVIDIA's own tool tells."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    asked = [tool, "--query-gpu=driver_version", "--format=csv,noheader"]
    lines = subprocess.run(asked, capture_output=True, text=True, check=False).stdout.splitlines()
    return lines[0] if lines else None


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def pairs(title: str, values: dict[str, Any]) -> Table:
    """A table of names and values."""
    rows = titled(title, "", "")
    rows.show_header = False
    for name, value in values.items():
        rows.add_row(*map(escape, (name, str(value))))
    return rows


def titled(title: str, *columns: str) -> Table:
    """A table with its title on the left."""
    return Table(*columns, title=escape(title), title_justify="left", title_style="bold")


def published(report: dict[str, Any], as_json: bool, out: Path | None) -> bool:
    """Write the report to the file asked for, if any; whether it was all that was asked for on standard output."""
    if out is not None:
        out.write_text(json.dumps(report, indent=2) + "\n")
    if as_json:
        print_json(report)
    return as_json


def print_json(value: dict[str, Any]) -> None:
    """One object on standard output."""
    typer.echo(json.dumps(value, indent=2))
