"""Options of several subcommands, and the files that they name."""

import os
from errno import EACCES
from math import isfinite
from pathlib import Path
from typing import Annotated

import typer

from attnmesh_command.choices import (
    DTYPE_NAMES,
    MAX_DEADLINE,
    MAX_LOCAL_RANKS,
    MERGE_CHOICES,
    STORAGE_NAMES,
    TREES,
    WEIGHTS,
)
from attnmesh_command.messages import OptionError, check_named, check_option, under_torchrun
from attnmesh_command.option_texts import TP, axes_of


def writable(option: str, file: Path) -> Path:
    """Return the path, or raise before anything is measured if it cannot be written."""
    try:
        file.touch()
        if not os.access(file, os.W_OK):  # the owner of a read-only file can touch it
            raise PermissionError(EACCES, os.strerror(EACCES))
    except OSError as error:
        fix = "make the folder first, or name another"
        raise OptionError(option, "a file that can be written", f"{file} ({error.strerror})", fix) from None
    return file


def _writable_out(file: Path | None) -> Path | None:
    return file and writable("--out", file)


AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Explain each figure; show warnings and tracebacks.")]
OutFile = Annotated[
    Path | None,
    typer.Option("--out", help="Also write the JSON to this file.", dir_okay=False, callback=_writable_out),
]
KvOption = Annotated[
    str,
    typer.Option("--kv", help=f"How keys and values are stored: auto, as the model's, or {', '.join(STORAGE_NAMES)}."),
]
Model = Annotated[
    str,
    typer.Option(help="A folder, a GGUF file, a name on the hub, or smollm2, a small model of a Python package."),
]
Revision = Annotated[
    str | None, typer.Option(help="Branch, tag or commit of a model on the hub; its main branch by default.")
]
Ranks = Annotated[
    int | None,
    typer.Option(min=1, help="Ranks to start on this machine; those of --mesh by default, under torchrun its own."),
]
MeshOption = Annotated[
    str,
    typer.Option(
        help="Ranks along named axes: heads, queries, keys, and tp for ranks that split weights; as queries=2,keys=2 "
        "or tp=2,keys=4. tp=keys=8: the same ranks do both."
    ),
]
Shares = Annotated[
    str | None,
    typer.Option(
        help="Ratios of the tokens of each rank, as 3,1, for ranks of unequal speed or memory; auto to measure them. "
        "All ranks are along the keys axis, unless --mesh says more."
    ),
]
Merge = Annotated[str, typer.Option(help=f"How ranks merge: {', '.join(MERGE_CHOICES)}.")]
WeightsOption = Annotated[
    str,
    typer.Option(
        "--weights",
        help="shared: ranks of a host compute each layer together; whole: each computes all; auto: as is faster.",
    ),
]
Reproducible = Annotated[bool, typer.Option("--reproducible", help="The same bits on 1, 2, 4, 8, ... ranks.")]
Deadline = Annotated[float | None, typer.Option(help="Seconds of silence after which a rank counts as failed.")]
Dtype = Annotated[str, typer.Option(help=f"auto, or one of {', '.join(DTYPE_NAMES)}.")]


def check_kv(kv: str) -> None:
    """Raise on a storage that there is not."""
    check_named("--kv", kv, ("auto", *STORAGE_NAMES))


def check_weights(weights: str, mesh: str) -> None:
    """Raise on a way to compute layers that there is not, or beside ranks that share weights by tp."""
    check_named("--weights", weights, WEIGHTS)
    tp = weights == "shared" and any(name.startswith(TP) for name in axes_of(mesh))
    check_option(not tp, "--weights shared", "a mesh without tp, which shares weights itself", mesh, "leave one out")


def check_ranks(ranks: int) -> None:
    """Raise if one machine cannot run so many ranks."""
    expected, fix = f"1 to {MAX_LOCAL_RANKS:,} ranks on this machine", "ask for what one machine can run"
    check_option(1 <= ranks <= MAX_LOCAL_RANKS, "--ranks", expected, f"{ranks:,}", fix)


def check_caches(dtype: str, merge: str, reproducible: bool, kv: str, mesh: str, shares: str | None) -> None:
    """Raise on options of caches that there are not, or that do not go together."""
    given, fix = f"--shares {shares}", "leave one of them out"
    even = shares is None or (shares != "auto" and len({*(named_shares(shares) or ())}) == 1)
    check_option(not reproducible or even, "--reproducible", "even shares", given, fix)
    check_named("--dtype", dtype, ("auto", *DTYPE_NAMES))
    check_named("--merge", merge, MERGE_CHOICES)
    check_kv(kv)
    axes = axes_of(mesh)
    check_reproducible_option(reproducible, axes.get("queries", 1) * axes.get("keys", axes.get("tp=keys", 1)), merge)


def check_reproducible_option(reproducible: bool, ranks: int, merge: str) -> None:
    """Raise unless the bits can be the same on any number of ranks along queries and keys, where that is wanted."""
    fits = not reproducible or (not ranks & (ranks - 1) and merge in TREES)
    expected = "1, 2, 4, 8, ... ranks along queries and keys, and a tree"
    fewer = 1 << ranks.bit_length() - 1
    fix = f"give these axes {fewer} or {2 * fewer} ranks, with --merge auto, or leave --reproducible out"
    check_option(fits, "--reproducible", expected, f"{ranks} ranks and merge {merge!r}", fix)


def named_shares(text: str | None) -> tuple[float, ...] | str | None:
    """Return the ratios that are named, "auto", or None without any.

    >>> named_shares("3,1"), named_shares("auto"), named_shares(None)
    ((3.0, 1.0), 'auto', None)
    """
    if text is None or text == "auto":
        return text
    try:
        ratios = tuple(map(float, text.split(",")))
    except ValueError:
        ratios = ()
    fits = bool(ratios) and all(isfinite(share) and share > 0 for share in ratios)
    check_option(fits, "--shares", "auto, or a number above 0 for each rank", repr(text), "write one as 3,1")
    return ratios


def mesh_of_shares(mesh: str, shares: str | None, ranks: int | None) -> str:
    """Return the mesh that goes with `--shares`: a keys axis, unless one is named. Raise on other numbers of ranks."""
    ratios = named_shares(shares)
    if ratios is None:
        return mesh
    if mesh == "auto":
        started = int(os.environ["WORLD_SIZE"]) if under_torchrun() else None
        mesh = f"keys={ranks or started or (1 if isinstance(ratios, str) else len(ratios))}"
    axes = axes_of(mesh)
    holding = axes.get("queries", 1) * axes.get("keys", axes.get("tp=keys", 1))
    fits = isinstance(ratios, str) or len(ratios) == holding
    fix = "name one for each rank along queries and keys"
    check_option(fits, "--shares", f"{holding} of them, for {mesh}", repr(shares), fix)
    return mesh


def check_deadline(seconds: float | None) -> None:
    """Raise on a deadline that is no time."""
    fits = seconds is None or 0 < seconds < MAX_DEADLINE
    check_option(
        fits, "--deadline", f"more than 0 seconds, less than {MAX_DEADLINE:.0e}", seconds, "pass seconds, as 30"
    )
