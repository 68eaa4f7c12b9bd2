"""The commands `python -m benchmarks model`, `faults`, `plan`, `latent`, `recurrent`, `diffusion` and `gpu-kernels`."""

import os
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.table import Table

from attnmesh.cli.bench import by_case, rows_table
from attnmesh.cli.bench_command import Bench, bench_command
from attnmesh.cli.generate_prompt import Prompt, prepare
from attnmesh.cli.netns import ranks_of, world_of
from attnmesh.cli.output import HostsOption, machine, pairs, titled
from attnmesh.core.checks import require
from attnmesh.errors import ArgumentError, MeshError
from attnmesh_command import SETTINGS
from benchmarks import diffusion as diffusion_bench
from benchmarks import faults as faults_bench
from benchmarks import gpu_kernels
from benchmarks import latent as latent_bench
from benchmarks import model as model_bench
from benchmarks import plan as plan_bench
from benchmarks import recurrent as recurrent_bench

app = typer.Typer(
    name="benchmarks",
    help="Measure the planner, recovery from faults, whole models, latent and recurrent layers, and kernels on a GPU.",
    add_completion=False,
    **SETTINGS,
)

MODEL_EXPLAINED = """\
Times are those of one token of the whole model on rank 0, medians with quartiles. All contenders on ranks continue one
prefilled cache. Memory is that of the largest process; weights that ranks share are counted in each."""


@bench_command(
    app,
    "python -m benchmarks model",
    "A whole model: stock on one process, and its context over ranks.",
    MODEL_EXPLAINED,
)
def bench_model(
    run: Bench,
    ranks: Annotated[int, typer.Option(min=2, help="Ranks to start on this machine.")] = 4,
    hosts: HostsOption = None,
    model: Annotated[str, typer.Option(help="A folder, a GGUF file, a name on the hub, or smollm2.")] = "smollm2",
    prompt: Annotated[str, typer.Option(help="What to say; after the file's text, if both are given.")] = "",
    prompt_file: Annotated[Path | None, typer.Option(help="A file of text to begin with.", dir_okay=False)] = None,
    mesh: Annotated[str, typer.Option(help="Ranks along heads, queries and keys, as queries=2,keys=2.")] = "auto",
    max_new_tokens: Annotated[int, typer.Option(min=8, help="Tokens to time.")] = 24,
    alone: Annotated[
        bool, typer.Option("--alone", help="Also attnmesh on one process, and stock transformers on one thread.")
    ] = False,
) -> list[Table | str]:
    """One process with stock transformers beside ranks by tree, three all-reduces and ring: the same tokens?"""
    run.step("reading the prompt")
    world = world_of(ranks, hosts)
    count = ranks_of(world)
    prepared = prepare(model, Prompt(prompt, prompt_file), max_new_tokens, count, mesh, run.status)
    fits = prepared.mesh.tp == 1 and not prepared.mesh.is_shared
    require(fits, MeshError, "--mesh", "axes of attention, without tp", mesh, "use attnmesh generate for tp")
    run.step(f"{len(prepared.ids):,} tokens on one process, then on {count} ranks by tree, all-reduces and ring")
    run.report.set(prompt_tokens=len(prepared.ids))
    request = model_bench.Request(prepared.place, prepared.ids, max_new_tokens, prepared.mesh.shape, prepared.heads)
    model_bench.rows(request, torch.get_num_threads(), world, run.table("rows"), alone=alone)
    rows: list[model_bench.Row] = run.tables["rows"]
    same = all(row.tokens == rows[0].tokens for row in rows)
    run.report.set(same_tokens=same)
    run.code = 0 if same else 1
    verdict = "All contenders return the same tokens." if same else "[bold red]The contenders return different tokens."
    return [_model_table(rows, len(prepared.ids)), verdict]


def _model_table(rows: "list[model_bench.Row]", prompt_tokens: int) -> Table:
    title = f"{prompt_tokens:,} tokens of context, on {torch.get_num_threads()} threads in all"
    table = titled(title, "decoding", "ms per token")
    for name in ("keys and values,\nMB per rank", "all memory,\nMB per rank", "prefill s"):
        table.add_column(name, justify="right")
    for row in rows:
        figures = (f"{row.cache_megabytes:.1f}", f"{row.resident_megabytes:.0f}", f"{row.prefill_seconds:.1f}")
        table.add_row(row.contender, row.timing.in_two_lines, *figures)
    return table


FAULTS_EXPLAINED = """\
A ratio of 0.95 is a cost of 5 %. Saving includes all writes: the first has the keys of the whole prompt, the others the
new tokens, and the wait for the disk at the end counts. Recovery is that of all layers, with one new rank."""


@bench_command(
    app,
    "python -m benchmarks faults",
    "The cost of checks and checkpoints, and of recovery from a fault.",
    FAULTS_EXPLAINED,
)
def bench_faults(
    run: Bench,
    ranks: Annotated[int, typer.Option(min=2, help="Ranks to start on this machine.")] = 4,
    model: Annotated[str, typer.Option(help="A folder, a GGUF file, a name on the hub, or smollm2.")] = "smollm2",
    tokens: Annotated[int, typer.Option(min=64, max=1_000_000, help="Tokens of the prompt.")] = 8000,
    max_new_tokens: Annotated[int, typer.Option(min=8, help="Tokens to time.")] = 192,
    rounds: Annotated[int, typer.Option(min=2, help="Times that each is timed.")] = 3,
) -> list[Table]:
    """Checked steps, writing with checkpoints, and recovery from copies, each beside doing without (minutes)."""
    run.step("reading the model")
    world = ranks_of(world_of(ranks, None))
    prepared = prepare(model, Prompt(" a" * tokens, raw=True), max_new_tokens, world, "auto", run.status)
    ids = prepared.ids[:tokens]
    run.step(f"{len(ids):,} tokens on {ranks} ranks: a prefill, then steps, checkpoints and recoveries")
    request = faults_bench.Request(prepared.place, ids, max_new_tokens, prepared.mesh.shape, prepared.heads, rounds)
    faults_bench.rows(request, torch.get_num_threads(), run.table("rows"))
    return [rows_table(run.tables["rows"], f"{ranks} ranks, milliseconds: median [quartiles]")]


PLAN_EXPLAINED = """\
Seconds are predicted from constants that were measured at the beginning of the same run; bytes from the plan alone.
Plans are timed in turns, between two barriers; a short step is repeated. The picked plan has a star. Regret is its time
over that of the best plan. Bytes are those of all hosts by the counters of their interfaces, without packet headers,
beside the predicted bytes and 147 that gloo adds to each message."""


@bench_command(app, "python -m benchmarks plan", "Predictions of the planner beside measurements.", PLAN_EXPLAINED)
def bench_plan(
    run: Bench,
    hosts: Annotated[
        list[str] | None, typer.Option(help="Hosts made on this machine, as 4x2@250mbit; may be repeated.")
    ] = None,
    ranks: Annotated[int, typer.Option(min=2, help="Without --hosts: ranks to start on this machine.")] = 4,
    length: Annotated[
        int, typer.Option(min=64, help="Tokens in training and prefill; decoding has 16 times more.")
    ] = 2048,
    most: Annotated[int, typer.Option(min=1, help="Best plans to measure, beside those of published schemes.")] = 4,
    rounds: Annotated[int, typer.Option(min=2, help="Times that each is timed.")] = 3,
) -> list[Table]:
    """Measure each world's constants, plan 9 workloads with them, and run the plans: regret, seconds and bytes."""
    worlds = [world_of(ranks, text) for text in hosts] if hosts else [world_of(ranks, None)]
    reports: list[plan_bench.Report] = []

    def show(report: plan_bench.Report) -> None:
        """Write the reports, of which the last has one more row."""
        records = [{**asdict(one), "cluster": one.cluster.record()} for one in (*reports, report)]
        run.report.set(worlds=records)
        run.step(f"{report.world}: {len(report.rows)} plans measured")

    for world in worlds:
        reports.append(plan_bench.report(world, length, most, rounds, show))
    summary = plan_bench.summary(reports)
    run.report.set(summary=summary)
    tables = [table for one in reports for table in by_case(partial(_plan_table, one.world), one.rows, "workload")]
    return [*tables, pairs("in short", summary)]


def _plan_table(world: str, workload: str, rows: "list[plan_bench.Ran]") -> Table:
    table = titled(f"{workload}, on {world}", "plan")
    for name in ("predicted\nms", "ms", "beside\nbest", "bytes\nbetween hosts", "predicted,\noff"):
        table.add_column(name, justify="right")
    for row in rows:
        crossed = row.between
        bytes_ = () if crossed is None else (f"{crossed.payload:,}", f"{crossed.off:+.1%}")
        name = f"{'* ' if row.picked else '  '}{row.plan}"
        table.add_row(name, f"{row.predicted_ms:.1f}", row.timing.in_two_lines, f"{row.beside_best}", *bytes_)
    return table


LATENT_EXPLAINED = """\
A step projects one new token, attends over the cache and projects the output. Stock transformers is timed twice. Cached
bytes are those of all ranks together."""


@bench_command(
    app, "python -m benchmarks latent", "A layer with latent attention, stock and over ranks.", LATENT_EXPLAINED
)
def bench_latent(
    run: Bench,
    ranks: Annotated[int, typer.Option(min=2, help="Ranks to start on this machine.")] = 2,
    tokens: Annotated[int, typer.Option(min=64, help="Cached tokens. 32,768 in float32 need 12 GB.")] = 32768,
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "float32",
    steps: Annotated[int, typer.Option(min=2, help="Steps to time.")] = 11,
) -> list[Table]:
    """One decode step of a layer of DeepSeek-V3's shape: stock transformers, then latents attended in place."""
    ranks = ranks_of(world_of(ranks, None))
    run.step(f"{tokens:,} tokens, stock and on {ranks} ranks")
    request = latent_bench.Request(tokens, dtype, steps)
    latent_bench.rows(request, ranks, torch.get_num_threads(), run.table("rows"))
    return [_latent_table(request, run.tables["rows"])]


def _latent_table(request: latent_bench.Request, rows: list[latent_bench.Row]) -> Table:
    threads = torch.get_num_threads()
    table = titled(f"128 heads, {request.tokens:,} tokens, {request.dtype}, {threads} threads in all", "decoding")
    for name in ("ms per step", "beside\n1 rank", "cached\nMB", "rows\nexpanded"):
        table.add_column(name, justify="right")
    for row in rows:
        ratio = f"{row.timing.median / rows[0].timing.median:.2f}"
        table.add_row(row.contender, str(row.timing), ratio, f"{row.cached_megabytes:.1f}", f"{row.expanded_rows:,}")
    return table


RECURRENT_EXPLAINED = """\
Times are medians with quartiles of calls that take turns, each as long as its slowest rank; ranks have one thread. The
processor time is that of the busiest rank. Messages are the bytes that the busiest rank receives, at the link's rate.
The limit is an even share of the time of one rank with all tokens, and the messages: it takes a core per rank. "beside
shares" is the time over that of all ranks' shares at once without exchange, and the messages."""


@bench_command(
    app, "python -m benchmarks recurrent", "A Gated DeltaNet layer over ranks: scan and heads.", RECURRENT_EXPLAINED
)
def bench_recurrent(
    run: Bench,
    ranks: Annotated[int, typer.Option(min=2, help="Ranks to start on this machine, of one thread each.")] = 4,
    hosts: HostsOption = None,
    length: Annotated[int, typer.Option(min=64, help="Tokens of the whole sequence.")] = 8192,
    key_heads: Annotated[int, typer.Option(min=2, help="Key heads; value heads are twice as many.")] = 8,
    head_dim: Annotated[int, typer.Option(min=4, help="Width of a head.")] = 128,
    rounds: Annotated[int, typer.Option(min=2, help="Times that each is timed.")] = 5,
) -> list[Table]:
    """One rank with all tokens beside ranks that exchange states by a scan, or tokens of their heads."""
    world = world_of(ranks, hosts)
    run.step(f"{length:,} tokens on one rank, then on {ranks_of(world)}")
    request = recurrent_bench.Request(length, key_heads, head_dim, rounds)
    recurrent_bench.rows(request, world, run.table("rows"))
    run.report.set(load=[round(load, 2) for load in os.getloadavg()], cores=os.cpu_count())
    return by_case(partial(_recurrent_table, request), run.tables["rows"])


def _recurrent_table(request: "recurrent_bench.Request", case: str, rows: "list[recurrent_bench.Row]") -> Table:
    heads = f"{request.key_heads}/{2 * request.key_heads} heads of {request.head_dim}"
    table = titled(f"{case}: {heads}, {request.tokens:,} tokens, float32, {os.cpu_count()} cores", "contender")
    for name in ("ms", "cpu ms", "MB\nreceived", "messages\nms", "limit\nms", "beside\nshares"):
        table.add_column(name, justify="right")
    for row in rows:
        figures = (row.messages_ms, row.limit_ms, row.beside_shares)
        cells = ("" if x is None else f"{x:,}" for x in figures)
        times = (row.timing.in_two_lines, f"{row.cpu_ms:,}")
        table.add_row(row.contender, *times, f"{row.received / 1e6:.1f}", *cells)
    return table


DIFFUSION_EXPLAINED = """\
Times are those of one attention layer, forward, in milliseconds: medians with quartiles of rounds in which all
contenders take turns, each as long as its slowest rank. A shape is heads x queries x keys. "beside ring" is the speedup
over our own ring, and "of bytes" that speedup over the one that bytes allow. With --hosts, "bytes alone" is the time of
the exchanges over the busiest direction of the busiest link, a lower bound. Errors are those of some outputs beside
float64."""


@bench_command(
    app, "python -m benchmarks diffusion", "Attention of video and image transformers over ranks.", DIFFUSION_EXPLAINED
)
def bench_diffusion(
    run: Bench,
    ranks: Annotated[int, typer.Option(min=2, help="Ranks to start on this machine, of one thread each.")] = 4,
    hosts: HostsOption = None,
    workload: Annotated[
        list[str] | None, typer.Option(help="A workload of attnmesh plan; three by default; may be repeated.")
    ] = None,
    scale: Annotated[int, typer.Option(min=1, help="Divide the tokens of a workload by this.")] = 16,
    length: Annotated[int | None, typer.Option(min=16, help="Tokens, instead of those of the workload.")] = None,
    rounds: Annotated[int, typer.Option(min=2, help="Times that each is timed.")] = 5,
) -> list[Table]:
    """Two dimensions, Ulysses, ring and USP beside diffusers' own Ulysses, at the sizes of real models (minutes)."""
    world = world_of(ranks, hosts)
    names = tuple(workload or ("wan-14b-720p", "hunyuanvideo-720p", "flux-1024"))
    run.step(f"{', '.join(names)} on {world}{' ranks' * (hosts is None)}")
    diffusion_bench.rows(diffusion_bench.Request(names, scale, length, rounds), world, run.table("rows"))
    run.report.set(load=[round(load, 2) for load in os.getloadavg()], cores=os.cpu_count())
    return by_case(_diffusion_table, run.tables["rows"])


def _diffusion_table(case: str, rows: "list[diffusion_bench.Row]") -> Table:
    table = titled(f"{case}, one layer, forward, float32, {os.cpu_count()} cores", "scheme, shape")
    for name in ("ms", "beside\nring", "of\nbytes", "MB\nreceived", "bytes\nalone, ms", "error"):
        table.add_column(name, justify="right")
    for row in rows:
        received = None if row.received is None else round(row.received / 1e6, 1)
        figures = ["" if x is None else f"{x:,}" for x in (row.beside_ring, row.of_bytes, received, row.limit_ms)]
        error = "" if row.error is None else f"{row.error:.0e}"
        times = "" if row.timing is None else row.timing.in_two_lines
        table.add_row(row.contender, row.note or times, *figures, error)
    return table


GPU_EXPLAINED = """\
Times are medians with quartiles of calls that take turns, by CUDA events, as CUDA graphs where a call can be captured.
The L2 cache is emptied before each call. The read rate is that of a maximum over the same keys and values."""


@bench_command(app, "python -m benchmarks gpu-kernels", "Decoding and prefill on one GPU beside rivals.", GPU_EXPLAINED)
def bench_gpu_kernels(run: Bench) -> list[Table]:
    """Decoding and prefill on one GPU beside SDPA, FlexAttention, flash-attn, FlashInfer and the read rate."""
    if not torch.cuda.is_available():
        fix = "use attnmesh bench kernel on a machine without one"
        raise ArgumentError("benchmarks gpu-kernels", "a GPU that PyTorch sees", "none", fix)
    add = run.table("rows")
    for row in gpu_kernels.rows(torch.device("cuda", torch.cuda.current_device())):
        add(row)
    return [pairs("this machine", machine()), rows_table(run.tables["rows"])]
