"""The command line: a thin layer that calls the library and prints what it returns, as tables or as one JSON object."""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict
from typing import Annotated

import typer
from rich.table import Table

import attnmesh
from attnmesh.cli import check as proof
from attnmesh.cli.bench import bench
from attnmesh.cli.generate import generate
from attnmesh.cli.output import AsJson, Verbose, console, machine, pairs, print_json, progress, titled
from attnmesh.cli.plan import plan
from attnmesh.cli.probe import probe

app = typer.Typer(
    name="attnmesh",
    help="Exact attention across a mesh of devices.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
app.add_typer(bench, name="bench")
app.command(short_help="Generate text with a model whose context is spread over ranks.")(generate)
app.command(short_help="Measure the links and devices of a world of ranks.")(probe)
app.command(short_help="The best shape of mesh for a workload on a cluster, before it is run.")(plan)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(attnmesh.__version__)
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None:
    """Exact attention across a mesh of devices."""


@app.command(short_help="What this installation can do, each kernel proved.")
def check(as_json: AsJson = False, verbose: Verbose = False) -> None:
    """Tell what this installation can do, and prove each kernel against attention in float64."""
    with progress.status("the reference against the energy's gradient") as status:
        law = proof.law_error()
        results = []
        for result in proof.proofs():
            status.update(f"proving kernel {result.kernel} in {result.dtype} on {result.device}")
            results.append(result)
    sound = law < proof.LAW and all(result.holds for result in results)
    if as_json:
        records = [{**asdict(result), "holds": result.holds} for result in results]
        taken = [asdict(choice) for choice in proof.choices()]
        print_json({"machine": machine(), "energy_law_error": law, "proofs": records, "choices": taken, "sound": sound})
    else:
        console.print(pairs("this installation", machine()))
        console.print(_proof_table(results))
        console.print(_choice_table())
        for absence in _absences(results):
            console.print(absence)
        console.print(
            f"The reference in float64 equals the energy's gradient, and the gradients of that, to {law:.1e}."
        )
        if verbose:
            console.print(CHECK_EXPLAINED)
        console.print(
            "All kernels here are exact, to the rounding of their dtype."
            if sound
            else "[bold red]A kernel here is wrong: do not use it."
        )
    raise typer.Exit(0 if sound else 1)


CHECK_EXPLAINED = """\
Each kernel is run forward and backward on 300 tokens and on 3 queries at the end of 300 keys, 6 query heads on 2 key
heads, values of another width, under no mask, a causal mask, a window, and packed documents. Errors are the largest
difference from the reference in float64, relative to its largest value. kernel="auto" takes the first that serves."""


def _proof_table(results: list[proof.Proof]) -> Table:
    table = titled("kernels, in the order in which they are picked", "kernel", "device", "dtype")
    for name in ("out error", "gradient error", "allowed"):
        table.add_column(name, justify="right")
    table.add_column("verdict")
    for r in results:
        if r.absent is None:
            errors = [f"{x:.1e}" for x in (r.out_error, r.gradient_error, r.allowed) if x is not None]
            table.add_row(r.kernel, r.device, r.dtype, *errors, "exact" if r.holds else "[bold red]WRONG")
    return table


def _choice_table() -> Table:
    table = titled('what kernel="auto" takes', "device", "dtype", "plain blocks", "masked blocks", "decoding")
    for choice in proof.choices():
        table.add_row(*asdict(choice).values())
    return table


def _absences(results: list[proof.Proof]) -> Iterator[str]:
    """Which kernels are not here, and why."""
    dtypes: dict[tuple[str, str, str], list[str]] = defaultdict(list)
    for result in results:
        if result.absent is not None:
            dtypes[result.kernel, result.device, result.absent].append(result.dtype)
    for (kernel, device, reason), names in dtypes.items():
        which = "" if len(names) == len(proof.DTYPES) else f" in {', '.join(names)}"
        yield f"Kernel {kernel} does not serve {device} tensors{which}: {reason}."
