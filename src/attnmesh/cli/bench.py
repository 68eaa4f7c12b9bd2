"""The commands `attnmesh bench ...`."""

import shlex
from collections.abc import Iterable
from dataclasses import asdict
from typing import Annotated

import typer
from rich.table import Table

from attnmesh.cli import bench_decode as decode_bench
from attnmesh.cli import bench_kernel as kernel_bench
from attnmesh.cli import bench_prefill as prefill_bench
from attnmesh.cli import check
from attnmesh.cli.bench_row import Row
from attnmesh.cli.netns import as_asked, ranks_of, world_of
from attnmesh.cli.output import (
    AsJson,
    HostsOption,
    OutFile,
    Verbose,
    console,
    machine,
    pairs,
    progress,
    published,
    titled,
)

bench = typer.Typer(help="Measure attnmesh beside its rivals and the machine's limits.", no_args_is_help=True)


@bench.command(name="kernel", short_help="One device's kernels beside SDPA and the read rate.")
def bench_kernel(as_json: AsJson = False, verbose: Verbose = False, out: OutFile = None) -> None:
    """One device's kernels beside PyTorch's SDPA and the rate at which memory is read (3 minutes, 2 GB on 2 cores)."""
    device = check.devices()[-1]
    with progress.status("measuring the rate at which memory is read") as status:
        rows = []
        for row in kernel_bench.rows(device):
            status.update(f"measured {row.case}")
            rows.append(row)
        status.update("measuring memory")
        memories = list(kernel_bench.memory(device))
    report = {
        "command": "attnmesh bench kernel",
        "machine": machine(),
        "rows": [row.record() for row in rows],
        "memory": [asdict(memory) for memory in memories],
    }
    if published(report, as_json, out):
        return
    console.print(pairs("this machine", machine()))
    console.print(rows_table(rows))
    console.print(_memory_table(memories))
    if verbose:
        console.print(BENCH_EXPLAINED)


@bench.command(name="prefill", short_help="Shapes and exchanges of the mesh beside published packages.")
def bench_prefill(
    ranks: Annotated[int, typer.Option(min=2, help="Ranks to start on this machine, of one thread each.")] = 4,
    length: Annotated[int, typer.Option(min=64, help="Tokens of the whole sequence.")] = 4096,
    hosts: HostsOption = None,
    case: Annotated[str, typer.Option(help='Only cases with this in their names, as "causal, 8/8".')] = "",
    shape: Annotated[
        list[str] | None, typer.Option(help="Only such shapes and the ring, as 1x4x4; may be repeated.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=2, help="Times that each is timed.")] = 7,
    as_json: AsJson = False,
    verbose: Verbose = False,
    out: OutFile = None,
) -> None:
    """Every shape, placement and exchange, forward and backward, beside published packages (minutes)."""
    world = world_of(ranks, hosts)
    with progress.status(f"measuring times on {world}{' ranks' * (hosts is None)}") as status:
        rows = prefill_bench.rows(world, length, prefill_bench.Wanted(case, tuple(shape or ()), rounds))
        status.update(f"measuring memory on {ranks} ranks")
        memories = prefill_bench.memory(ranks, length) if hosts is None and not case else []
    chosen = [("--case", case)] * bool(case) + [("--shape", name) for name in shape or ()]
    words = "".join(f" {option} {shlex.quote(value)}" for option, value in chosen)
    command = f"attnmesh bench prefill {as_asked(world)} --length {length}{words} --rounds {rounds}"
    tables = {name: [asdict(row) for row in table] for name, table in (("rows", rows), ("memory", memories))}
    report = {"command": command, "machine": machine(), **tables}
    if published(report, as_json, out):
        return
    console.print(pairs("this machine", machine()))
    console.print(_prefill_table(rows))
    if memories:
        console.print(_held_table(memories))
    if verbose:
        console.print(PREFILL_EXPLAINED)


PREFILL_EXPLAINED = """\
Forward and backward of one call, milliseconds: median [quartiles] of rounds in which all contenders take turns, each
as long as its slowest rank. "beside ring" is how many times faster than our own ring on the same kernel. Elements are
those of q, k, v, out and their gradients that the busiest rank received: counted at the exchange, and foretold by the
schedule, or by the formula for the full mask. On hosts, bytes alone are those of each exchange, one after the other,
over the busiest link in its busier direction: nothing can be faster. Memory is the most by which a rank's resident
size grew in a call, in ranks of their own that give freed memory back at once; the formula is that of
attnmesh.planner.memory.peak_activations, for the backward pass alone."""


def _prefill_table(rows: list[prefill_bench.Row]) -> Table:
    table = titled("prefill bench, forward + backward", "case", "heads x queries x keys, exchange")
    for name in ("ms", "beside ring", "elements counted", "foretold", "bytes alone, ms"):
        table.add_column(name, justify="right")
    for row in rows:
        if row.timing is None:
            table.add_row(row.case, row.contender, row.note)
            continue
        figures = ["" if x is None else f"{x:,}" for x in (row.beside_ring, row.counted, row.predicted, row.limit_ms)]
        table.add_row(row.case, row.contender, f"{row.timing}{'; ' + row.note if row.note else ''}", *figures)
    return table


def _held_table(memories: Iterable[prefill_bench.Memory]) -> Table:
    table = titled("peak extra memory of a rank, MB", "case", "heads x queries x keys, exchange")
    for name in ("measured", "by the formula"):
        table.add_column(name, justify="right")
    for memory in memories:
        table.add_row(memory.case, memory.contender, f"{memory.measured:.1f}", f"{memory.foretold:.1f}")
    return table


@bench.command(name="decode", short_help="Merges across ranks and whole steps beside other patterns.")
def bench_decode(
    ranks: Annotated[int, typer.Option(min=2, help="Ranks to start on this machine: 2, 4, 8, ...")] = 8,
    hosts: HostsOption = None,
    as_json: AsJson = False,
    verbose: Verbose = False,
    out: OutFile = None,
) -> None:
    """Decoding: merges, whole steps, long contexts, beside published code and the limit (minutes)."""
    world = world_of(ranks, hosts)
    count = ranks_of(world)
    if count & (count - 1):
        raise typer.BadParameter("a power of two, as the same bits on any number of ranks are measured too")
    with progress.status("starting") as status:
        rows = []
        for name, part in decode_bench.parts(world).items():
            status.update(f"measuring {name} on {count} ranks")
            rows += part()
        status.update(f"measuring memory on {ranks} ranks")
        memories = decode_bench.memory(ranks) if hosts is None else []
    tables = {name: [asdict(row) for row in table] for name, table in (("rows", rows), ("memory", memories))}
    report = {"command": f"attnmesh bench decode {as_asked(world)}", "machine": machine(), **tables}
    if published(report, as_json, out):
        return
    console.print(pairs("this machine", machine()))
    table = titled(f"decode bench on {count} ranks, one call", "case", "contender")
    for name in ("ms", "times ours"):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(row.case, row.contender, str(row.timing), "" if row.times_ours is None else f"{row.times_ours}")
    console.print(table)
    if memories:
        table = titled("a rank's keys, values and all that a step holds beside them", "case", "contender", "MB")
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


def rows_table(rows: Iterable[Row], title: str = "kernel bench, milliseconds: median [quartiles]") -> Table:
    """Return the table of rows beside their rivals."""
    table = titled(title, "case", "rival")
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
    table = titled("peak extra memory, MB, float32, 8 heads of 64", "case")
    for memory in memories:
        if not table.rows:
            for length in memory.lengths:
                table.add_column(f"{length:,} tokens", justify="right")
        table.add_row(memory.case, *("not told here" if peak is None else f"{peak:.0f}" for peak in memory.megabytes))
    return table
