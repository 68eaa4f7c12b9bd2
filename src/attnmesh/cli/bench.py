"""The commands `attnmesh bench ...`."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Annotated, Any

import typer
from rich.table import Table

from attnmesh.cli import bench_decode as decode_bench
from attnmesh.cli import bench_kernel as kernel_bench
from attnmesh.cli import bench_prefill as prefill_bench
from attnmesh.cli import proofs
from attnmesh.cli.bench_command import Bench, bench_command
from attnmesh.cli.netns import ranks_of, world_of
from attnmesh.cli.output import HostsOption, machine, pairs, titled
from attnmesh.cli.timing import Comparison

bench = typer.Typer(help="Measure attnmesh beside its rivals and the machine's limits.", no_args_is_help=True)

KERNEL_EXPLAINED = """\
Times are medians with quartiles of calls that take turns in one process, after a warm-up round. A decode step reads
every key and value once and multiplies each with its queries. Its limit is the longer of both, at the rates of a
maximum over 512 MB and of a matrix product in float32, which take turns with the step. Extra memory is the growth of
the highest resident size during a call."""


@bench_command(bench, "attnmesh bench kernel", "One device's kernels beside SDPA and the read rate.", KERNEL_EXPLAINED)
def bench_kernel(run: Bench) -> list[Table]:
    """One device's kernels beside PyTorch's SDPA and the rate at which memory is read (5 minutes, 2 GB on 2 cores)."""
    device = proofs.devices()[-1]
    run.step("measuring decode steps beside their limits, then prefill and masks")
    add = run.table("rows")
    for row in kernel_bench.rows(device):
        add(row)
    run.step("measuring memory")
    add = run.table("memory")
    for memory in kernel_bench.memory(device):
        add(memory)
    return [pairs("this machine", machine()), rows_table(run.tables["rows"]), _memory_table(run.tables["memory"])]


PREFILL_EXPLAINED = """\
Times are those of forward and backward of one call, milliseconds: median [quartiles] of rounds in which all contenders
take turns, each as long as its slowest rank. "beside ring" is the speedup over our own ring with the same kernel. A
shape is heads x queries x keys. Elements are those of q, k, v, out and their gradients that the busiest rank received,
counted at the exchange. Where the schedule, or the formula for the full mask, predicts others, these stand below. With
--hosts, "bytes alone" is the time of the exchanges over the busiest direction of the busiest link, a lower bound.
Memory is the largest growth of a rank's resident size in a call, in ranks that free memory at once. The formula is
attnmesh.planner.candidate.peak_activations, for the backward pass alone."""


@bench_command(
    bench, "attnmesh bench prefill", "Shapes and exchanges of the mesh beside published packages.", PREFILL_EXPLAINED
)
def bench_prefill(
    run: Bench,
    ranks: Annotated[int, typer.Option(min=2, help="Ranks to start on this machine, of one thread each.")] = 4,
    length: Annotated[int, typer.Option(min=64, help="Tokens of the whole sequence.")] = 4096,
    hosts: HostsOption = None,
    case: Annotated[str, typer.Option(help='Only cases with this in their names, as "causal, 8/8".')] = "",
    shape: Annotated[
        list[str] | None, typer.Option(help="Only such shapes and the ring, as 1x4x4; may be repeated.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=2, help="Times that each is timed.")] = 7,
) -> list[Table]:
    """Every shape, placement and exchange, forward and backward, beside published packages (minutes)."""
    world = world_of(ranks, hosts)
    run.step(f"measuring times on {world}{' ranks' * (hosts is None)}")
    wanted = prefill_bench.Selection(case, tuple(shape or ()), rounds)
    prefill_bench.rows(world, length, wanted, run.table("rows"))
    add = run.table("memory")
    if hosts is None and not case:
        run.step(f"measuring memory on {ranks} ranks")
        prefill_bench.memory(ranks, length, add)
    memories = [_peak_table(run.tables["memory"])] if run.tables["memory"] else []
    return [pairs("this machine", machine()), *by_case(_prefill_table, run.tables["rows"]), *memories]


def _prefill_table(case: str, rows: Iterable[prefill_bench.Row]) -> Table:
    table = titled(f"{case}, forward + backward", "shape, exchange")
    for name in ("ms", "beside\nring", "elements", "bytes\nalone, ms"):
        table.add_column(name, justify="right")
    for row in rows:
        times = "" if row.timing is None else row.timing.in_two_lines
        off = "" if row.counted == row.predicted else f"\n({row.predicted:,} predicted)"
        beside, elements, limit = ("" if x is None else f"{x:,}" for x in (row.beside_ring, row.counted, row.limit_ms))
        name = row.contender if row.note is None else f"{row.contender}: {row.note}"
        table.add_row(name, times, beside, elements + off, limit)
    return table


def _peak_table(memories: Iterable[prefill_bench.Memory]) -> Table:
    table = titled("peak extra memory per rank, MB", "case", "shape, exchange")
    for name in ("measured", "by the formula"):
        table.add_column(name, justify="right")
    for memory in memories:
        table.add_row(memory.case, memory.contender, f"{memory.measured:.1f}", f"{memory.foretold:.1f}")
    return table


DECODE_EXPLAINED = """\
Times are medians with quartiles of calls in a row, in milliseconds on rank 0; contenders take turns. The limit of a
step is the local attention, timed on all ranks at once, and as many bare exchanges of the same bytes as the tree has.
The ring passes keys and values on while it attends. Published code without grouped heads gets repeated heads. Memory is
that of the Tree Attention paper: keys, values and what a step allocates, on the fullest rank."""


@bench_command(
    bench, "attnmesh bench decode", "Merges across ranks and whole steps beside other patterns.", DECODE_EXPLAINED
)
def bench_decode(
    run: Bench,
    ranks: Annotated[int, typer.Option(min=2, help="Ranks to start on this machine: 2, 4, 8, ...")] = 8,
    hosts: HostsOption = None,
) -> list[Table]:
    """Decoding: merges, whole steps, long contexts, beside published code and the limit (minutes)."""
    world = world_of(ranks, hosts)
    count = ranks_of(world)
    if count & (count - 1):
        raise typer.BadParameter("a power of two, as the same bits on any number of ranks are measured too")
    add = run.table("rows")
    for name, part in decode_bench.parts(world).items():
        run.step(f"measuring {name} on {count} ranks")
        part(add)
    add = run.table("memory")
    if hosts is None:
        run.step(f"measuring memory on {ranks} ranks")
        decode_bench.memory(ranks, add)
    tables = by_case(partial(_decode_table, count), run.tables["rows"])
    memories = titled("keys, values and what a step allocates, per rank", "case", "contender", "MB")
    for memory in run.tables["memory"]:
        memories.add_row(memory.case, memory.contender, f"{memory.megabytes:.1f}")
    return [pairs("this machine", machine()), *tables, *[memories] * bool(memories.rows)]


def _decode_table(ranks: int, case: str, rows: Iterable[decode_bench.Row]) -> Table:
    table = titled(f"{case}, {ranks} ranks, one call", "contender")
    for name in ("ms", "times ours"):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(row.contender, str(row.timing), "" if row.times_ours is None else f"{row.times_ours}")
    return table


def by_case(make: Callable[[str, list[Any]], Table], rows: Iterable[Any], field: str = "case") -> list[Table]:
    """Return a table for each case, in the order of the rows, made from the case and its rows."""
    cases: dict[str, list[Any]] = {}
    for row in rows:
        cases.setdefault(getattr(row, field), []).append(row)
    return [make(case, own) for case, own in cases.items()]


def rows_table(rows: Iterable[Comparison], title: str = "kernel bench, milliseconds: median [quartiles]") -> Table:
    """Return the table of comparisons with rivals."""
    table = titled(title, "case, and its rival")
    for name in ("rival", "attnmesh", "times faster\n(goal)", "share of\nthe limit"):
        table.add_column(name, justify="right")
    for row in rows:
        goal = "" if row.goal is None else f"\n({row.goal}{'' if row.met else ', missed'})"
        share = "" if row.share_of_limit is None else f"{row.share_of_limit:.2f}"
        times = row.theirs.in_two_lines, row.ours.in_two_lines
        table.add_row(f"{row.case}; {row.rival}", *times, f"{row.ratio:.2f}{goal}", share)
    return table


def _memory_table(memories: Iterable[kernel_bench.Memory]) -> Table:
    table = titled("peak extra memory, MB, float32, 8 heads of 64", "case")
    for memory in memories:
        if not table.rows:
            for length in memory.lengths:
                table.add_column(f"{length:,} tokens", justify="right")
        table.add_row(memory.case, *("unknown" if peak is None else f"{peak:.0f}" for peak in memory.megabytes))
    return table
