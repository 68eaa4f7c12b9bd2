"""The command line: a thin layer that calls the library and prints what it returns, as tables or as one JSON object."""

import json
import platform
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

import attnmesh
from attnmesh import proof
from attnmesh.bench import decode as decode_bench
from attnmesh.bench import kernel as kernel_bench
from attnmesh.bench import prefill as prefill_bench

app = typer.Typer(
    name="attnmesh",
    help="Exact attention across a mesh of devices.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
bench = typer.Typer(help="Measure attnmesh beside its rivals and the machine's limits.", no_args_is_help=True)
app.add_typer(bench, name="bench")

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output and nothing else.")]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Say how each figure comes about.")]
OutFile = Annotated[Path | None, typer.Option("--out", help="Also write the JSON to this file.", dir_okay=False)]

console = Console()
progress = Console(stderr=True)


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
        _print_json({"machine": _machine(), "energy_law_error": law, "proofs": records, "sound": sound})
    else:
        console.print(_pairs("this installation", _machine()))
        console.print(_proof_table(results))
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
    table = _table("kernels, in the order in which they are picked", "kernel", "device", "dtype")
    for name in ("out error", "gradient error", "allowed"):
        table.add_column(name, justify="right")
    table.add_column("verdict")
    for r in results:
        if r.absent is None:
            errors = [f"{x:.1e}" for x in (r.out_error, r.gradient_error, r.allowed) if x is not None]
            table.add_row(r.kernel, r.device, r.dtype, *errors, "exact" if r.holds else "[bold red]WRONG")
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


@bench.command(name="kernel", short_help="One device's kernels beside SDPA and the read rate.")
def bench_kernel(as_json: AsJson = False, verbose: Verbose = False, out: OutFile = None) -> None:
    """One device's kernels beside PyTorch's SDPA and the rate at which memory is read (3 minutes, 2 GB on 2 cores)."""
    device = proof.devices()[-1]
    if out is not None:
        out.touch()  # a path that cannot be written is better known before than after
    with progress.status("measuring the rate at which memory is read") as status:
        rows = []
        for row in kernel_bench.rows(device):
            status.update(f"measured {row.case}")
            rows.append(row)
        status.update("measuring memory")
        memories = list(kernel_bench.memory(device))
    report = {
        "command": "attnmesh bench kernel",
        "machine": _machine(),
        "rows": [row.record() for row in rows],
        "memory": [asdict(memory) for memory in memories],
    }
    if _published(report, as_json, out):
        return
    console.print(_pairs("this machine", _machine()))
    console.print(_bench_table(rows))
    console.print(_memory_table(memories))
    if verbose:
        console.print(BENCH_EXPLAINED)


@bench.command(name="prefill", short_help="Shapes and exchanges of the mesh beside published packages.")
def bench_prefill(
    ranks: Annotated[int, typer.Option(min=2, help="Ranks to start on this machine, of one thread each.")] = 4,
    length: Annotated[int, typer.Option(min=64, help="Tokens of the whole sequence.")] = 4096,
    as_json: AsJson = False,
    verbose: Verbose = False,
    out: OutFile = None,
) -> None:
    """Every shape and exchange on local ranks, forward and backward, beside published packages (minutes)."""
    if out is not None:
        out.touch()
    with progress.status(f"measuring times on {ranks} ranks") as status:
        rows = prefill_bench.rows(ranks, length)
        status.update(f"measuring memory on {ranks} ranks")
        memories = prefill_bench.memory(ranks, length)
    command = f"attnmesh bench prefill --ranks {ranks} --length {length}"
    tables = {name: [asdict(row) for row in table] for name, table in (("rows", rows), ("memory", memories))}
    report = {"command": command, "machine": _machine(), **tables}
    if _published(report, as_json, out):
        return
    console.print(_pairs("this machine", _machine()))
    console.print(_prefill_table(rows))
    console.print(_held_table(memories))
    if verbose:
        console.print(PREFILL_EXPLAINED)


PREFILL_EXPLAINED = """\
Forward and backward of one call, milliseconds: median [quartiles] of rounds in which all contenders take turns, each as
long as its slowest rank. "beside ring" is how many times faster than our own ring on the same kernel. Elements are
those of q, k, v, out and their gradients that the busiest rank received: counted at the exchange, and foretold by the
schedule, or by the formula for the full mask. Memory is the most by which a rank's resident size grew in a call, in
ranks of their own that give freed memory back at once; the formula is that of attnmesh.cost.held, for the backward
pass alone."""


def _prefill_table(rows: list[prefill_bench.Row]) -> Table:
    table = _table("prefill bench, forward + backward", "case", "heads x queries x keys, exchange")
    for name in ("ms", "beside ring", "elements counted", "foretold"):
        table.add_column(name, justify="right")
    for row in rows:
        if row.timing is None:
            table.add_row(row.case, row.contender, row.note)
            continue
        figures = ["" if x is None else f"{x:,}" for x in (row.beside_ring, row.counted, row.predicted)]
        table.add_row(row.case, row.contender, f"{row.timing}{'; ' + row.note if row.note else ''}", *figures)
    return table


def _held_table(memories: Iterable[prefill_bench.Memory]) -> Table:
    table = _table("peak extra memory of a rank, MB", "case", "heads x queries x keys, exchange")
    for name in ("measured", "by the formula"):
        table.add_column(name, justify="right")
    for memory in memories:
        table.add_row(memory.case, memory.contender, f"{memory.measured:.1f}", f"{memory.foretold:.1f}")
    return table


@bench.command(name="decode", short_help="Merges across ranks and whole steps beside other patterns.")
def bench_decode(
    ranks: Annotated[int, typer.Option(min=2, help="Ranks to start on this machine: 2, 4, 8, ...")] = 8,
    as_json: AsJson = False,
    verbose: Verbose = False,
    out: OutFile = None,
) -> None:
    """Decoding on local ranks: merges, whole steps, long contexts, beside published code and the limit (minutes)."""
    if ranks & (ranks - 1):
        raise typer.BadParameter("a power of two, as the same bits on any number of ranks are measured too")
    if out is not None:
        out.touch()
    with progress.status("starting") as status:
        rows = []
        for name, part in decode_bench.parts(ranks).items():
            status.update(f"measuring {name} on {ranks} ranks")
            rows += part()
        status.update(f"measuring memory on {ranks} ranks")
        memories = decode_bench.memory(ranks)
    tables = {name: [asdict(row) for row in table] for name, table in (("rows", rows), ("memory", memories))}
    report = {"command": f"attnmesh bench decode --ranks {ranks}", "machine": _machine(), **tables}
    if _published(report, as_json, out):
        return
    console.print(_pairs("this machine", _machine()))
    table = _table(f"decode bench on {ranks} ranks, one call", "case", "contender")
    for name in ("ms", "times ours"):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(row.case, row.contender, str(row.timing), "" if row.times_ours is None else f"{row.times_ours}")
    console.print(table)
    table = _table("a rank's keys, values and all that a step holds beside them", "case", "contender", "MB")
    for memory in memories:
        table.add_row(memory.case, memory.contender, f"{memory.megabytes:.1f}")
    console.print(table)
    if verbose:
        console.print(DECODE_EXPLAINED)


DECODE_EXPLAINED = """\
Milliseconds are medians with quartiles of calls in a row, contenders in turns, as rank 0 sees them. The limit of a step
is the local attention, as all ranks do it at once, and as many bare exchanges as the tree has, of the same bytes. The
ring passes keys and values on while it attends; published code without grouped heads gets them spread. Memory is in
the sense of the Tree Attention paper: keys and values and what a step holds beside them, on the fullest rank."""


BENCH_EXPLAINED = """\
Milliseconds are medians with quartiles of calls that take turns in one process, after a round to warm up. The read rate
is that of a maximum over 512 MB; a decode step has to read every key and value once and cannot be faster. The bare
products are keys times queries and weights times values, with no softmax between them and, in bfloat16, with logits
rounded to bfloat16: no attention, but what PyTorch's products leave of the read rate. Extra memory is the highest
resident size during a call beyond that before it."""


def _bench_table(rows: Iterable[kernel_bench.Row]) -> Table:
    table = _table("kernel bench, milliseconds: median [quartiles]", "case", "rival")
    for name in ("rival ms", "attnmesh ms", "times faster", "goal", "GB/s", "of read rate"):
        table.add_column(name, justify="right")
    for row in rows:
        goal = "" if row.goal is None else f"{row.goal}{'' if row.met else ' missed'}"
        figures = [str(row.theirs), str(row.ours), f"{row.ratio:.2f}", goal]
        if row.gigabytes_a_second is not None:
            figures += [f"{row.gigabytes_a_second:.1f}", f"{row.share_of_read_rate:.2f}"]
        table.add_row(row.case, row.rival, *figures)
    return table


def _memory_table(memories: Iterable[kernel_bench.Memory]) -> Table:
    table = _table("peak extra memory, MB, float32, 8 heads of 64", "case")
    for memory in memories:
        if not table.rows:
            for length in memory.lengths:
                table.add_column(f"{length:,} tokens", justify="right")
        table.add_row(memory.case, *("not told here" if peak is None else f"{peak:.0f}" for peak in memory.megabytes))
    return table


def _machine() -> dict[str, Any]:
    """What a figure needs beside it to mean something."""
    gpu = {"gpu": torch.cuda.get_device_name(), "cuda": torch.version.cuda} if torch.cuda.is_available() else {}
    return {
        "attnmesh": attnmesh.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cpu": f"{_processor()}, {torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}",
        **gpu,
    }


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def _pairs(title: str, values: dict[str, Any]) -> Table:
    table = _table(title, "", "")
    table.show_header = False
    for name, value in values.items():
        table.add_row(name, str(value))
    return table


def _table(title: str, *columns: str) -> Table:
    return Table(*columns, title=title, title_justify="left", title_style="bold")


def _published(report: dict[str, Any], as_json: bool, out: Path | None) -> bool:
    """Write the report to the file asked for, if any; whether it was all that was asked for on standard output."""
    if out is not None:
        out.write_text(json.dumps(report, indent=2) + "\n")
    if as_json:
        _print_json(report)
    return as_json


def _print_json(value: dict[str, Any]) -> None:
    typer.echo(json.dumps(value, indent=2))
