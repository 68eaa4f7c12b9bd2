"""The commands `python -m benchmarks model`, `faults` and `plan`."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.table import Table

from attnmesh.cli.bench import rows_table
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
from benchmarks import faults as faults_bench
from benchmarks import model as model_bench
from benchmarks import plan as plan_bench

app = typer.Typer(
    name="benchmarks",
    help="Measure the planner, recovery from faults, and whole models.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


@app.command(name="model", short_help="A whole model: stock on one process, and its context over ranks.")
def bench_model(
    ranks: Annotated[int, typer.Option(min=2, help="Ranks to start on this machine.")] = 4,
    hosts: HostsOption = None,
    model: Annotated[str, typer.Option(help="A folder, a GGUF file, a name on the hub, or smollm2.")] = "smollm2",
    prompt: Annotated[str, typer.Option(help="What to say; after the file's text, if both are given.")] = "",
    prompt_file: Annotated[Path | None, typer.Option(help="A file of text to begin with.", dir_okay=False)] = None,
    mesh: Annotated[str, typer.Option(help='Ranks along heads x queries x keys, as "1x2x2".')] = "auto",
    max_new_tokens: Annotated[int, typer.Option(min=8, help="Tokens to time.")] = 24,
    as_json: AsJson = False,
    verbose: Verbose = False,
    out: OutFile = None,
) -> None:
    """One process with stock transformers beside ranks by tree, three all-reduces and ring: the same tokens?"""
    from attnmesh.cli.generate import prepare

    with progress.status("reading the prompt") as status:
        world = world_of(ranks, hosts)
        count = ranks_of(world)
        asked = prepare(model, prompt, prompt_file, False, max_new_tokens, count, mesh, status)
        status.update(f"{len(asked.ids):,} tokens on one process, then on {count} ranks by tree, all-reduces and ring")
        request = model_bench.Request(asked.place, asked.ids, max_new_tokens, asked.shape, asked.heads)
        rows = model_bench.rows(request, torch.get_num_threads(), world)
    same = all(row.tokens == rows[0].tokens for row in rows)
    command = f"python -m benchmarks model {as_asked(world)} --max-new-tokens {max_new_tokens}"
    report = {"command": command, "machine": machine(), "prompt_tokens": len(asked.ids), "same_tokens": same}
    if not published({**report, "rows": [asdict(row) for row in rows]}, as_json, out):
        console.print(_model_table(rows, len(asked.ids), verbose))
        console.print("All say the same tokens." if same else "[bold red]They do not say the same tokens.")
    raise typer.Exit(0 if same else 1)


def _model_table(rows: "list[model_bench.Row]", prompt_tokens: int, verbose: bool) -> Table:
    title = f"{prompt_tokens:,} tokens of context, on {torch.get_num_threads()} threads in all"
    table = titled(title, "decoding", "ms a token")
    for name in ("keys and values MB a rank", "all memory MB a rank", "prefill s"):
        table.add_column(name, justify="right")
    for row in rows:
        figures = (f"{row.cache_megabytes:.1f}", f"{row.resident_megabytes:.0f}", f"{row.prefill_seconds:.1f}")
        table.add_row(row.contender, str(row.timing), *figures)
    if verbose:
        table.caption = MODEL_EXPLAINED
    return table


MODEL_EXPLAINED = """\
Milliseconds of a token are medians with quartiles, of the whole model, as rank 0 sees them. All contenders on ranks go
on from one prefilled cache. Memory is of the largest process; weights that ranks share are counted in each."""


@app.command(name="faults", short_help="What it costs to be ready for faults, and to go on after one.")
def bench_faults(
    ranks: Annotated[int, typer.Option(min=2, help="Ranks to start on this machine.")] = 4,
    model: Annotated[str, typer.Option(help="A folder, a GGUF file, a name on the hub, or smollm2.")] = "smollm2",
    tokens: Annotated[int, typer.Option(min=64, max=1_000_000, help="Of the prompt.")] = 8000,
    max_new_tokens: Annotated[int, typer.Option(min=8, help="Tokens to time.")] = 192,
    rounds: Annotated[int, typer.Option(min=2, help="Times that each is timed.")] = 3,
    as_json: AsJson = False,
    verbose: Verbose = False,
    out: OutFile = None,
) -> None:
    """Steps that are checked, writing while it is saved, and recovery from copies, beside doing without (minutes)."""
    from attnmesh.cli.generate import prepare

    with progress.status("reading the model") as status:
        world = ranks_of(world_of(ranks, None))
        asked = prepare(model, " a" * tokens, None, True, max_new_tokens, world, "auto", status)
        ids = asked.ids[:tokens]
        status.update(f"{len(ids):,} tokens on {ranks} ranks: a prefill, then steps, savings and recoveries")
        request = faults_bench.Request(asked.place, ids, max_new_tokens, asked.shape, asked.heads, rounds)
        rows = faults_bench.rows(request, torch.get_num_threads())
    words = f"--tokens {tokens} --max-new-tokens {max_new_tokens} --rounds {rounds}"
    report = {"command": f"python -m benchmarks faults --ranks {ranks} {words}", "machine": machine()}
    if published({**report, "rows": [row.record() for row in rows]}, as_json, out):
        return
    console.print(rows_table(rows, f"{ranks} ranks, milliseconds: median [quartiles]"))
    if verbose:
        console.print(FAULTS_EXPLAINED)


FAULTS_EXPLAINED = """\
A ratio of 0.95 is a cost of 5 %. Saving is all of it: the first writes the keys of the whole prompt, the others what is
new, and what waits for the disk at the end counts. Recovery is that of all layers, one rank having come anew."""


@app.command(name="plan", short_help="What the planner says beside what is measured.")
def bench_plan(
    hosts: Annotated[
        list[str] | None, typer.Option(help="Hosts made on this machine, as 4x2@250mbit; may be repeated.")
    ] = None,
    ranks: Annotated[int, typer.Option(min=2, help="Without --hosts: ranks to start on this machine.")] = 4,
    length: Annotated[int, typer.Option(min=64, help="Tokens in training and prefill; 16 times more are kept.")] = 2048,
    most: Annotated[int, typer.Option(min=1, help="Best plans to measure, beside those that have names.")] = 4,
    rounds: Annotated[int, typer.Option(min=2, help="Times that each is timed.")] = 3,
    as_json: AsJson = False,
    verbose: Verbose = False,
    out: OutFile = None,
) -> None:
    """Measure each world's constants, plan 9 workloads with them, and run the plans: regret, seconds and bytes."""
    worlds = [world_of(ranks, text) for text in hosts] if hosts else [world_of(ranks, None)]
    with progress.status("starting") as status:
        reports = [plan_bench.report(world, length, most, rounds, status.update) for world in worlds]
    options = f"--length {length} --most {most} --rounds {rounds}"
    command = f"python -m benchmarks plan {' '.join(map(as_asked, worlds))} {options}"
    summary = plan_bench.summary(reports)
    tables = [{**asdict(one), "cluster": one.cluster.record()} for one in reports]
    report = {"command": command, "machine": machine(), "summary": summary, "worlds": tables}
    if published(report, as_json, out):
        return
    for one in reports:
        console.print(_plan_table(one))
    console.print(pairs("in short", summary))
    if verbose:
        console.print(PLAN_EXPLAINED)


PLAN_EXPLAINED = """\
Seconds are foretold from constants that were measured at the beginning of the same run; bytes from the plan alone. Each
plan is timed in turns with the others, between two barriers; a short step many times in a row. The picked plan has a
star; regret is how much longer it takes than the best one measured. Bytes are those of all hosts by the counters of
their interfaces, without the headers of packets, beside those foretold and 147 that gloo adds to each message."""


def _plan_table(report: plan_bench.Report) -> Table:
    table = titled(f"on {report.world}", "workload", "plan")
    for name in ("foretold ms", "ms", "beside best", "bytes between hosts", "foretold, off"):
        table.add_column(name, justify="right")
    for row in report.rows:
        crossed = row.between
        bytes_ = () if crossed is None else (f"{crossed.payload:,}", f"{crossed.off:+.1%}")
        name = f"{'* ' if row.picked else '  '}{row.plan}"
        table.add_row(row.workload, name, f"{row.predicted_ms:.1f}", str(row.timing), f"{row.beside_best}", *bytes_)
    return table
