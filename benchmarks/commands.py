"""The table of benches: `python -m benchmarks kernel`, `decode`, `prefill`, `model` and others.

Each imports what it measures when it is run.
"""

import os
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import torch
import typer
from rich.table import Table

from attnmesh.cli.generate_prompt import PromptOptions, find_model, prepare_prompt
from attnmesh.cli.mesh_option import MeshOptions
from attnmesh.cli.output import Status, console, pairs, titled
from attnmesh.cli.plan_command import named_cluster
from attnmesh.cli.probe_command import PROBE_EXPLAINED, described, measured
from attnmesh.cli.proofs import devices
from attnmesh.errors import ArgumentError, MeshError
from attnmesh.planner.workload import Workload
from attnmesh.runtime.machine import machine
from attnmesh_command import SETTINGS
from attnmesh_command.messages import printable
from attnmesh_command.option_texts import heads_of, length_of
from attnmesh_command.shared_options import writable
from benchmarks import tables
from benchmarks.bench import Bench, HostsOption, bench_command, counts_of
from benchmarks.netns import Hosts, ranks_of, run_on_hosts, world_of
from benchmarks.tables import by_case, rows_table

if TYPE_CHECKING:
    from benchmarks.plan import Report

app = typer.Typer(
    name="benchmarks",
    help="Measure attnmesh beside its rivals and the machine's limits.",
    add_completion=False,
    **SETTINGS,
)

KERNEL_EXPLAINED = """\
Times are medians with quartiles of calls that take turns in one process, after a warm-up round. A decode step reads
every key and value once and multiplies each with its queries. Its limit is the longer of both, at the rates of a
maximum over 512 MB and of a matrix product in float32, which take turns with the step. Extra memory is the growth of
the highest resident size during a call."""


@bench_command(app, "kernel", "One device's kernels beside SDPA and the read rate.", KERNEL_EXPLAINED)
def bench_kernel(run: Bench) -> list[Table]:
    """One device's kernels beside PyTorch's SDPA and the rate at which memory is read (5 minutes, 2 GB on 2 cores)."""
    from benchmarks import kernel as kernel_bench

    device = devices()[-1]
    run.step("measuring decode steps beside their limits, then prefill and masks")
    add = run.table("rows")
    for row in kernel_bench.rows(device):
        add(row)
    run.step("measuring memory")
    add = run.table("memory")
    for memory in kernel_bench.memory(device):
        add(memory)
    return [pairs("this machine", machine()), rows_table(run.tables["rows"]), tables.memory_table(run.tables["memory"])]


CALLS_EXPLAINED = """\
Calls of 64 tokens, 8 query heads on 2 key heads of 64 columns, float32, on two ranks of gloo. Times are medians with
quartiles of 20 calls in a row, on rank 0; contenders take turns in one run. The last column is the time of a call over
that of one all-gather of its keys and values, the least that any exchange costs."""


@bench_command(app, "calls", "Small calls on two ranks beside one all-gather of their keys.", CALLS_EXPLAINED)
def bench_calls(
    run: Bench,
    rounds: Annotated[int, typer.Option(min=2, help="Times that each is timed.")] = 31,
) -> list[Table]:
    """Small calls of attention, forward and backward, on each axis of a mesh of two ranks (1 minute)."""
    from benchmarks import calls as calls_bench

    run.step("measuring small calls on 2 ranks")
    calls_bench.rows(rounds, run.table("rows"))
    return [pairs("this machine", machine()), tables.calls_table(run.tables["rows"])]


PREFILL_EXPLAINED = """\
Times are those of forward and backward of one call, milliseconds: median [quartiles] of rounds in which all contenders
take turns, each as long as its slowest rank. "beside ring" is the speedup over our own ring with the same kernel. A
shape is heads x queries x keys. Elements are those of q, k, v, out and their gradients that the busiest rank received,
counted at the exchange. Where the schedule, or the formula for the full mask, predicts others, these stand below. With
--hosts, "bytes alone" is the time of the exchanges over the busiest direction of the busiest link, a lower bound.
Memory is the largest growth of a rank's resident size in a call, in ranks that free memory at once. The formula is
attnmesh.cost.exchange_cost.peak_activations, for the backward pass alone."""


@bench_command(app, "prefill", "Shapes and exchanges of the mesh beside published packages.", PREFILL_EXPLAINED)
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
    from benchmarks import prefill as prefill_bench

    world = world_of(ranks, hosts)
    run.step(f"measuring times on {world}{' ranks' * (hosts is None)}")
    selection = prefill_bench.Selection(case, tuple(shape or ()), rounds)
    prefill_bench.rows(world, length, selection, run.table("rows"))
    add = run.table("memory")
    if hosts is None and not case:
        run.step(f"measuring memory on {ranks} ranks")
        prefill_bench.memory(ranks, length, add)
    memories = [tables.peak_table(run.tables["memory"])] if run.tables["memory"] else []
    return [pairs("this machine", machine()), *by_case(tables.prefill_table, run.tables["rows"]), *memories]


PACKED_EXPLAINED = """\
Documents are drawn by the shares of lengths in each file. "Busiest of mean" are query-key pairs of the busiest rank,
over the mean, the worst of all batches. "Tokens received" are those of q, out, k and v that the busiest rank receives,
over all tokens, the mean of the batches. "Beside least" is the largest ratio to the least of any layout listed whose
busiest rank has under 1.1 of the mean. Times are those of the slowest rank, forward and backward, 8 heads of 64;
contenders take turns. "Beside packed 2D" is its time over that of Packed on the 2D mesh."""


@bench_command(app, "packed", "Layouts of packed documents, counted and timed.", PACKED_EXPLAINED)
def bench_packed(
    run: Bench,
    lengths: Annotated[
        list[Path] | None, typer.Option(help="Files of shares of documents by length; three corpora by default.")
    ] = None,
    batches: Annotated[int, typer.Option(min=1, help="Batches of each corpus and mesh that are counted.")] = 4,
    timed: Annotated[bool, typer.Option(help="Also time a batch of each on ranks.")] = True,
    ranks: Annotated[int, typer.Option(min=2, help="Ranks to start on this machine, of one thread each.")] = 8,
    hosts: HostsOption = None,
    tokens: Annotated[int, typer.Option(min=16, help="Tokens of a rank in timed batches.")] = 512,
    rounds: Annotated[int, typer.Option(min=2, help="Times that each is timed.")] = 5,
) -> list[Table]:
    """Layouts of packed batches: balance, traffic, and times beside each other (minutes)."""
    from benchmarks import packed as packed_bench

    files, world = packed_bench.corpora(lengths), world_of(ranks, hosts)
    run.step("counting layouts on meshes of 8, 16 and 64 ranks")
    packed_bench.counts(files, batches, run.table("counts"))
    tables_ = by_case(tables.counts_table, run.tables["counts"])
    if timed:
        run.step(f"timing layouts on {world}{' ranks' * (hosts is None)}")
        packed_bench.rows(packed_bench.Request(files, tokens, rounds), world, run.table("rows"))
        tables_ += by_case(tables.packed_table, run.tables["rows"])
    return [pairs("this machine", machine()), *tables_]


DECODE_EXPLAINED = """\
Times are medians with quartiles of calls in a row, in milliseconds on rank 0; contenders take turns. The limit of a
step is the local attention, timed on all ranks at once, and as many bare exchanges of the same bytes as the tree has.
The ring passes keys and values on while it attends. Published code without grouped heads gets repeated heads. Memory is
that of the Tree Attention paper: keys, values and what a step allocates, on the fullest rank."""


@bench_command(app, "decode", "Merges across ranks and whole steps beside other patterns.", DECODE_EXPLAINED)
def bench_decode(
    run: Bench,
    ranks: Annotated[int, typer.Option(min=2, help="Ranks to start on this machine: 2, 4, 8, ...")] = 8,
    hosts: HostsOption = None,
) -> list[Table]:
    """Decoding: merges, whole steps, long contexts, beside published code and the limit (minutes)."""
    from benchmarks import decode as decode_bench

    world = world_of(ranks, hosts)
    count = ranks_of(world)
    if count & (count - 1):
        raise typer.BadParameter("a power of two, as the same bits on any number of ranks are measured too")
    add = run.table("rows")
    for name, measure in decode_bench.parts(world).items():
        run.step(f"measuring {name} on {count} ranks")
        measure(add)
    add = run.table("memory")
    if hosts is None:
        run.step(f"measuring memory on {ranks} ranks")
        decode_bench.memory(ranks, add)
    timing_tables = by_case(partial(tables.decode_table, count), run.tables["rows"])
    memories = titled("keys, values and what a step allocates, per rank", "case", "contender", "MB")
    for memory in run.tables["memory"]:
        memories.add_row(memory.case, memory.contender, f"{memory.megabytes:.1f}")
    return [pairs("this machine", machine()), *timing_tables, *[memories] * bool(memories.rows)]


MODEL_EXPLAINED = """\
Times are those of one token of the whole model on rank 0, medians with quartiles. All contenders on ranks continue one
prefilled cache. Foretold is what the planner says, from constants that are measured on the same ranks. Weights are a
rank's share of the pages that ranks map. All memory is that of the largest process, with the pages that others map
too."""


@bench_command(app, "model", "A whole model: stock on one process, and its context over ranks.", MODEL_EXPLAINED)
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
    chunk: Annotated[int | None, typer.Option(min=1, help="Also read the prompt in chunks of so many tokens.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Turns of one process and of the ranks.")] = 1,
) -> list[Table | str]:
    """One process with stock transformers beside ranks by tree, three all-reduces and ring: the same tokens?"""
    from benchmarks import model as model_bench

    run.step("reading the prompt")
    world = world_of(ranks, hosts)
    count = ranks_of(world)
    model_on_mesh, prompt_tokens = prepare_prompt(
        model, PromptOptions(prompt, prompt_file), max_new_tokens, count, MeshOptions(mesh), run.status
    )
    if model_on_mesh.mesh.tp > 1 or model_on_mesh.mesh.is_joint:
        raise MeshError("--mesh", "axes of attention, without tp", str(mesh), "use attnmesh generate for tp")
    run.step(f"{len(prompt_tokens.ids):,} tokens on one process, then on {count} ranks by several merges")
    run.report.set(prompt_tokens=len(prompt_tokens.ids))
    sizes = model_on_mesh.mesh.shape, model_on_mesh.heads, chunk
    request = model_bench.Request(model_on_mesh.path, prompt_tokens.ids, max_new_tokens, *sizes)
    cluster = model_bench.rows(request, torch.get_num_threads(), world, run.table("rows"), rounds, alone=alone)
    run.report.set(cluster=cluster.record())
    rows = run.tables["rows"]
    same = all(row.tokens == rows[0].tokens for row in rows)
    run.report.set(same_tokens=same)
    run.code = 0 if same else 1
    verdict = "All contenders return the same tokens." if same else "[bold red]The contenders return different tokens."
    return [tables.model_table(rows, len(prompt_tokens.ids)), verdict]


STORAGE_EXPLAINED = """\
The model computes in float32. Its context is read once, before keys and values are rounded; the tokens after it attend
the stored ones. The perplexity is theirs. Of 20 needles, each stands once at each depth, from the first token to the
last; an answer is right if each of its tokens is the likeliest. Grains are rounded in stock transformers, with scales
in float32; storage= is that of the cache, with scales in bfloat16."""


@bench_command(app, "storage", "A language model on a cache of 8 bits, by storage and grain.", STORAGE_EXPLAINED)
def bench_storage(
    run: Bench,
    model: Annotated[str, typer.Option(help="A folder, a name on the hub, or smollm2.")] = "smollm2",
    context: Annotated[int, typer.Option(min=1000, help="Tokens of the context.")] = 7000,
    after: Annotated[int, typer.Option(min=16, help="Tokens of the text after it.")] = 1000,
) -> list[Table]:
    """Perplexity of a continuation, and needles in its context, by how keys and values are stored (10 minutes)."""
    from attnmesh.hf.load import locate
    from benchmarks import storage as storage_bench

    run.step("reading the contexts")
    storage_bench.rows(storage_bench.Request(locate(model), context, after), run.table("rows"))
    return [pairs("this machine", machine()), tables.storage_table(run.tables["rows"])]


FOLDER_EXPLAINED = """\
A cache of one layer, 32 query heads on 8 key heads of 128 columns, bfloat16, in files of a folder. Reading is one
stream of plain reads of the same files, with no page of them in memory, in turns with steps. The process is in a
control group with the memory of --memory, pages of files included, where it may make one. Writing is one write of the
rows of keys and one of values; appends and writes are in time of the processor. Different numbers are those of the
output that are not those of a cache in memory."""


@bench_command(app, "folder", "A cache in a folder that exceeds memory, beside its disk.", FOLDER_EXPLAINED)
def bench_folder(
    run: Bench,
    gigabytes: Annotated[float, typer.Option(min=0.05, help="Size of the cache.")] = 4.0,
    memory: Annotated[float, typer.Option(min=0.5, help="Gigabytes that a process may use (Linux, root).")] = 1.0,
    folder: Annotated[Path | None, typer.Option(help="A folder on the disk; a temporary one by default.")] = None,
    rounds: Annotated[int, typer.Option(min=2, help="Times that each is timed.")] = 5,
) -> list[Table]:
    """Steps over a cache larger than memory beside reading it, and appends beside writing (2 minutes)."""
    from benchmarks import folder as folder_bench

    run.step("filling the folder")
    sizes = int(gigabytes * 1e9), int(memory * 1e9)
    folder_bench.rows(sizes, folder, rounds, run.table("rows"))
    return [pairs("this machine", machine()), tables.folder_table(run.tables["rows"])]


ROLLOUTS_EXPLAINED = """\
Memory is resident memory of the rank that takes most: before a step of GRPO, and what the step adds at its peak, which
are activations and caches. Ranks free memory at once. A rollout is drawn as TRL asks for it, a row for each completion:
transformers computes a prompt for each, attnmesh once. Times have the prompt."""


@bench_command(app, "rollouts", "Memory of a step of GRPO, and the rate of completions.", ROLLOUTS_EXPLAINED)
def bench_rollouts(
    run: Bench,
    ranks: Annotated[int, typer.Option(min=2, help="Ranks that train.")] = 4,
    tokens: Annotated[int, typer.Option(min=0, help="Tokens of a completion in training; 0: none is trained.")] = 4096,
    contexts: Annotated[str, typer.Option(help="Tokens of prompts, separated by commas.")] = "256,2048",
    completions: Annotated[int, typer.Option(min=1, help="Completions of a prompt.")] = 8,
    new: Annotated[int, typer.Option(min=0, help="Tokens of a completion that is timed; 0: none is.")] = 128,
    rounds: Annotated[int, typer.Option(min=2, help="Times that each is timed.")] = 3,
) -> list[Table]:
    """Memory of training on long completions, and completions on 2 ranks beside transformers (10 minutes, 2 cores)."""
    from benchmarks import rollouts as rollouts_bench

    request = rollouts_bench.Request(tokens, counts_of("--contexts", contexts), completions, new, (ranks, 2), rounds)
    report_tables = []
    if new:
        run.step("drawing completions")
        rollouts_bench.speed(request, run.table("rows"))
        report_tables.append(tables.rollouts_table(run.tables["rows"]))
    if tokens:
        run.step(f"training on completions of {tokens:,} tokens")
        rollouts_bench.memory(request, run.table("memory"))
        report_tables.append(tables.steps_table(run.tables["memory"]))
    return [pairs("this machine", machine()), *report_tables]


def pages() -> str:
    """Return the text of the documentation, which prompts are cut from."""
    return " ".join(file.read_text() for file in sorted(Path("docs").glob("*.md")))


ROWS_EXPLAINED = """\
A step together gives each request one token. Alone, hf.generate gives them their tokens one after the other. Both
continue copies of the same caches, in turns. CPU is that of rank 0."""


@bench_command(app, "rows", "Requests decoded together, beside one after the other.", ROWS_EXPLAINED)
def bench_rows(
    run: Bench,
    ranks: Annotated[int, typer.Option(min=1, help="Ranks to start on this machine.")] = 2,
    model: Annotated[str, typer.Option(help="A folder, a GGUF file, a name on the hub, or smollm2.")] = "smollm2",
    tokens: Annotated[int, typer.Option(min=64, max=100_000, help="Tokens of the longest prompt, about.")] = 576,
    requests: Annotated[str, typer.Option(help="Numbers of requests.")] = "1,2,4,8",
    rounds: Annotated[int, typer.Option(min=1, help="Turns that are timed.")] = 4,
) -> list[Table | str]:
    """Steps of several requests of unequal lengths, and each by hf.generate: the same tokens, and how many a second?"""
    from benchmarks import rows as rows_bench

    run.step("reading the model")
    model_on_mesh, prompt_tokens = prepare_prompt(
        model, PromptOptions(pages()[: 12 * tokens], raw=True), 64, ranks, MeshOptions(), run.status
    )
    counts = counts_of("--requests", requests)
    run.step(f"{requests} requests on {ranks} ranks")
    sizes = prompt_tokens.ids[: 4 * tokens // 3], model_on_mesh.mesh.shape, model_on_mesh.heads
    request = rows_bench.Request(model_on_mesh.path, *sizes, counts, rounds)
    rows_bench.rows(request, torch.get_num_threads(), run.table("rows"))
    rows = run.tables["rows"]
    same = all(row.same_tokens for row in rows)
    run.report.set(same_tokens=same)
    run.code = 0 if same else 1
    verdict = "Both ways return the same tokens." if same else "[bold red]The ways return different tokens."
    return [tables.requests_table(rows, ranks), verdict]


MASKS_EXPLAINED = """\
One request at a time, greedy, on one process. A mask is the work of its thread after a token: to follow the token in
the grammar, and to find the tokens that may come next. It runs beside the model's step that computes the next logits.
"First" is the time to make a grammar and its first mask. A gap is the time between two tokens of the answer."""


@bench_command(app, "masks", "Masks of grammars beside steps of a model.", MASKS_EXPLAINED)
def bench_masks(
    run: Bench,
    model: Annotated[str, typer.Option(help="A folder, a GGUF file, a name on the hub, or smollm2.")] = "smollm2",
    tokens: Annotated[int, typer.Option(min=8, help="Tokens of each answer at most.")] = 32,
    rounds: Annotated[int, typer.Option(min=2, help="Answers of each case.")] = 3,
) -> list[Table]:
    """What share of a step does a mask take, and do answers come slower with one? (1 minute)."""
    from benchmarks import masks as masks_bench

    run.step("reading the model")
    add = run.table("rows")
    for row in masks_bench.rows(model, tokens, rounds):
        add(row)
    return [pairs("this machine", machine()), tables.masks_table(run.tables["rows"])]


SPECULATE_EXPLAINED = """\
Both engines run on the same ranks in turns, with prompts that are new in each turn; the first turn is not counted.
Tokens a second are those of all clients while each has a stream, medians of the turns; the ratio is the median of
theirs. Copies begin with the first lines of a source file that the prompt has. Stories are drawn at a temperature of
0.8, and copy nothing. Weights are float32. With --draft the layers that are added to the model change nothing, so that
nearly all guesses of the small one stand."""


@bench_command(app, "speculate", "Answers with guesses that are checked, and without.", SPECULATE_EXPLAINED)
def bench_speculate(
    run: Bench,
    ranks: Annotated[int, typer.Option(min=1, help="Ranks to start on this machine.")] = 2,
    model: Annotated[str, typer.Option(help="A folder, a GGUF file, a name on the hub, or smollm2.")] = "smollm2",
    clients: Annotated[str, typer.Option(help="Numbers of clients.")] = "1,8",
    new: Annotated[int, typer.Option(min=8, help="Tokens of an answer.")] = 96,
    rounds: Annotated[int, typer.Option(min=1, help="Turns that are timed.")] = 3,
    speculate: Annotated[str, typer.Option(help="Option of attnmesh serve.")] = "ngram",
    draft: Annotated[
        int, typer.Option(min=0, help="Guess by the model itself for one of so many times its layers.")
    ] = 0,
) -> list[Table | str]:
    """How many tokens a second do guesses give to answers that copy, and what do they take of others? (6 minutes)."""
    from benchmarks import speculate as speculate_bench

    run.step("reading the model")
    model_on_mesh = find_model(model, ranks, MeshOptions(), run.status)
    counts = counts_of("--clients", clients)
    request = speculate_bench.Request(
        model_on_mesh.path, model_on_mesh.mesh.shape, model_on_mesh.heads, counts, new, rounds, speculate, draft
    )
    speculate_bench.rows(request, torch.get_num_threads(), run.table("rows"))
    rows = run.tables["rows"]
    same = all(row.same_texts == 1 for row in rows)
    run.report.set(same_texts=same)
    run.code = 0 if same else 1
    verdict = "Both engines give the same texts." if same else "[bold red]The engines give different texts."
    return [pairs("this machine", machine()), tables.speculate_table(rows, ranks), verdict]


UNEQUAL_EXPLAINED = """\
Times are those of a step on rank 0, medians with quartiles; even shares and "auto" take turns. Rank 1 is in a control
group of Linux, and each rank has a core of its own. Rates are measured between the steps, while both ranks read. The
bound is the bytes of the cache at the sum of both rates. Memory is limited by the address space of each process."""


@bench_command(app, "unequal", "Ranks of unequal cores or memory, with even shares and others.", UNEQUAL_EXPLAINED)
def bench_unequal(
    run: Bench,
    tokens: Annotated[int, typer.Option(min=1024, help="Tokens of the cache, of 4 kB each.")] = 131_072,
    part: Annotated[float, typer.Option(min=0.01, max=1, help="Part of a core that rank 1 has.")] = 0.25,
    rounds: Annotated[int, typer.Option(min=2, help="Turns that are timed.")] = 8,
) -> list[Table]:
    """Decode steps on two ranks, one with a part of a core, then with a third of the memory (1 minute, root, Linux)."""
    from benchmarks import unequal as unequal_bench

    run.step("measuring steps on 2 unequal ranks")
    unequal_bench.rows(tokens, part, rounds, run.table("rows"))
    return [pairs("this machine", machine()), tables.unequal_table(run.tables["rows"])]


SERVE_EXPLAINED = """\
Tokens a second are those of all clients while each has a stream. A first token comes after the prompt, which other
prompts may precede. The memory is that of all processes of a server; pages that they share are counted once. Each
server has all cores of the machine; transformers' has float32, SDPA, and as many pages as the clients need."""


@bench_command(app, "serve", "Streams of several clients, beside transformers' server.", SERVE_EXPLAINED)
def bench_serve(
    run: Bench,
    ranks: Annotated[int, typer.Option(min=1, help="Ranks of attnmesh's server.")] = 2,
    model: Annotated[str, typer.Option(help="A folder, a name on the hub, or smollm2.")] = "smollm2",
    contexts: Annotated[str, typer.Option(help="Tokens of a prompt, about.")] = "384,4000",
    clients: Annotated[str, typer.Option(help="Numbers of clients.")] = "1,2,4,8,16",
    new: Annotated[int, typer.Option(min=2, help="Tokens of an answer, at most.")] = 256,
    rounds: Annotated[int, typer.Option(min=1, help="Starts of each server.")] = 3,
) -> list[Table]:
    """Tokens a second, first tokens and gaps of clients, from attnmesh serve and transformers serve (30 minutes)."""
    from attnmesh.hf.load import locate
    from benchmarks import serve as serve_bench

    counts = counts_of("--contexts", contexts), counts_of("--clients", clients)
    request = serve_bench.Request(locate(model), pages(), *counts, new, ranks, rounds)
    serve_bench.rows(request, run.table("rows"), run.step)
    return [pairs("this machine", machine()), *by_case(tables.served_table, run.tables["rows"], "context")]


PREFIXES_EXPLAINED = """\
All processes of the first server are killed once it has stored its prompts. The second one finds them in the folder.
Gaps are those of another client, who reads an answer while the prompt is computed, or loaded."""


@bench_command(app, "prefixes", "First tokens of prompts that a server has stored.", PREFIXES_EXPLAINED)
def bench_prefixes(
    run: Bench,
    ranks: Annotated[str, typer.Option(help="Ranks of the first server, and of the second.")] = "4,3",
    model: Annotated[str, typer.Option(help="A folder, a name on the hub, or smollm2.")] = "smollm2",
    letters: Annotated[int, typer.Option(min=1000, help="Letters of a prompt.")] = 19_000,
    max_gap: Annotated[float, typer.Option(min=0.001, help="Seconds of a step, as of attnmesh serve.")] = 0.5,
) -> list[Table]:
    """First tokens of new prompts and of stored ones, after all ranks were killed (5 minutes)."""
    from attnmesh.hf.load import locate
    from benchmarks import prefixes as prefixes_bench

    before, *after = counts_of("--ranks", ranks)
    if len(after) != 1:
        raise ArgumentError("--ranks", "two numbers, as 4,3", repr(ranks), "name both servers' ranks")
    request = prefixes_bench.Request(locate(model), pages(), letters, (before, after[0]), max_gap)
    prefixes_bench.rows(request, run.table("rows"), run.step)
    return [pairs("this machine", machine()), tables.prefixes_table(run.tables["rows"])]


FAULTS_EXPLAINED = """\
A ratio of 0.95 is a cost of 5 %. Saving includes all writes: the first has the keys of the whole prompt, the others the
new tokens, and the wait for the disk at the end counts. Recovery is that of all layers, with one new rank."""


@bench_command(app, "faults", "The cost of checks and checkpoints, and of recovery from a fault.", FAULTS_EXPLAINED)
def bench_faults(
    run: Bench,
    ranks: Annotated[int, typer.Option(min=2, help="Ranks to start on this machine.")] = 4,
    model: Annotated[str, typer.Option(help="A folder, a GGUF file, a name on the hub, or smollm2.")] = "smollm2",
    tokens: Annotated[int, typer.Option(min=64, max=1_000_000, help="Tokens of the prompt.")] = 8000,
    max_new_tokens: Annotated[int, typer.Option(min=8, help="Tokens to time.")] = 192,
    rounds: Annotated[int, typer.Option(min=2, help="Times that each is timed.")] = 3,
) -> list[Table]:
    """Checked steps, writing with checkpoints, and recovery from copies, each beside doing without (minutes)."""
    from benchmarks import faults as faults_bench

    run.step("reading the model")
    world = ranks_of(world_of(ranks, None))
    model_on_mesh, prompt_tokens = prepare_prompt(
        model, PromptOptions(" a" * tokens, raw=True), max_new_tokens, world, MeshOptions(), run.status
    )
    ids = prompt_tokens.ids[:tokens]
    run.step(f"{len(ids):,} tokens on {ranks} ranks: a prefill, then steps, checkpoints and recoveries")
    request = faults_bench.Request(
        model_on_mesh.path, ids, max_new_tokens, model_on_mesh.mesh.shape, model_on_mesh.heads, rounds
    )
    faults_bench.rows(request, torch.get_num_threads(), run.table("rows"))
    return [rows_table(run.tables["rows"], f"{ranks} ranks, milliseconds: median [quartiles]")]


@bench_command(app, "probe", "Links and devices of hosts made on this machine.", PROBE_EXPLAINED)
def bench_probe(
    run: Bench, hosts: Annotated[str, typer.Option(help="Hosts made on this machine, as 8x2@250mbit (Linux, root).")]
) -> list[Table]:
    """Measure hosts made on this machine, as attnmesh probe measures true ones, for attnmesh plan --cluster FILE."""
    world = Hosts.parse(hosts)
    run.step(f"measuring {world}")
    cluster = run_on_hosts(world, measured)[0]
    run.report.set(cluster=cluster.record())
    return [pairs(f"{cluster.hosts} hosts of {cluster.ranks} ranks", described(cluster))]


PLAN_EXPLAINED = """\
Seconds are predicted from constants that were measured at the beginning of the same run; bytes from the plan alone.
Plans are timed in turns, between two barriers; a short step is repeated. The picked plan has a star. Regret is its time
over that of the best plan. Bytes are those of all hosts by the counters of their interfaces, without packet headers,
beside the predicted bytes and 147 that gloo adds to each message."""


@bench_command(app, "plan", "Predictions of the planner beside measurements.", PLAN_EXPLAINED)
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
    from benchmarks import plan as plan_bench

    worlds = [world_of(ranks, text) for text in hosts] if hosts else [world_of(ranks, None)]
    reports: list[Report] = []

    def show(report: "Report") -> None:
        """Write the reports, of which the last has one more row."""
        records = [{**asdict(one), "cluster": one.cluster.record()} for one in (*reports, report)]
        run.report.set(worlds=records)
        run.step(f"{report.world}: {len(report.rows)} plans measured")

    for world in worlds:
        reports.append(plan_bench.report(world, length, most, rounds, show))
    summary = plan_bench.summary(reports)
    run.report.set(summary=summary)
    plan_tables = [
        table for one in reports for table in by_case(partial(tables.plan_table, one.world), one.rows, "workload")
    ]
    return [*plan_tables, pairs("in short", summary)]


LATENT_EXPLAINED = """\
A step projects one new token, attends over the cache and projects the output. Stock transformers is timed twice. Cached
bytes are those of all ranks together."""


@bench_command(app, "latent", "A layer with latent attention, stock and over ranks.", LATENT_EXPLAINED)
def bench_latent(
    run: Bench,
    ranks: Annotated[int, typer.Option(min=2, help="Ranks to start on this machine.")] = 2,
    tokens: Annotated[int, typer.Option(min=64, help="Cached tokens. 32,768 in float32 need 12 GB.")] = 32768,
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "float32",
    steps: Annotated[int, typer.Option(min=2, help="Steps to time.")] = 11,
) -> list[Table]:
    """One decode step of a layer of DeepSeek-V3's shape: stock transformers, then latents attended in place."""
    from benchmarks import latent as latent_bench

    ranks = ranks_of(world_of(ranks, None))
    run.step(f"{tokens:,} tokens, stock and on {ranks} ranks")
    request = latent_bench.Request(tokens, dtype, steps)
    latent_bench.rows(request, ranks, torch.get_num_threads(), run.table("rows"))
    return [tables.latent_table(request, run.tables["rows"])]


SELECTED_EXPLAINED = """\
A step scores all tokens, selects the best and attends them. Projections are left out, and narrow in the layer of
transformers, whose length is halved until it fits the memory. Times are medians with quartiles of steps, each as
long as its slowest rank. Ranks share the threads. Bytes are those that the busiest rank receives, and extra memory
is the growth of the highest resident size of a rank during a step."""


@bench_command(app, "selected", "A decode step that selects its tokens, over ranks.", SELECTED_EXPLAINED)
def bench_selected(
    run: Bench,
    ranks: Annotated[list[int] | None, typer.Option(min=1, help="Ranks; 1, 2 and 4 by default; repeatable.")] = None,
    tokens: Annotated[
        list[int] | None, typer.Option(min=64, help="Cached tokens; 8,192 and 131,072 by default; repeatable.")
    ] = None,
    selected: Annotated[int, typer.Option(min=1, help="Tokens that a query attends.")] = 2048,
    steps: Annotated[int, typer.Option(min=2, help="Steps to time.")] = 11,
) -> list[Table]:
    """One decode step of DeepSeek-V3.2's shape: indexer, merge of candidates, selected latents, merge (4 minutes)."""
    from benchmarks import selected as selected_bench

    counts, lengths = [ranks_of(world_of(count, None)) for count in ranks or (1, 2, 4)], tokens or [8192, 131072]
    run.step(f"{', '.join(f'{n:,}' for n in lengths)} tokens on {', '.join(map(str, counts))} ranks")
    request = selected_bench.Request(selected, steps)
    selected_bench.rows(request, lengths, counts, torch.get_num_threads(), run.table("rows"))
    return [tables.selected_table(run.tables["rows"])]


RECURRENT_EXPLAINED = """\
Times are medians with quartiles of calls that take turns, each as long as its slowest rank; ranks have one thread. The
processor time is that of the busiest rank. Messages are the bytes that the busiest rank receives, at the link's rate.
The limit is an even share of the time of one rank with all tokens, and the messages: it takes a core per rank. "beside
shares" is the time over that of all ranks' shares at once without exchange, and the messages."""


@bench_command(app, "recurrent", "A Gated DeltaNet layer over ranks: scan and heads.", RECURRENT_EXPLAINED)
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
    from benchmarks import recurrent as recurrent_bench

    world = world_of(ranks, hosts)
    run.step(f"{length:,} tokens on one rank, then on {ranks_of(world)}")
    request = recurrent_bench.Request(length, key_heads, head_dim, rounds)
    recurrent_bench.rows(request, world, run.table("rows"))
    run.report.set(load=[round(load, 2) for load in os.getloadavg()], cores=os.cpu_count())
    return by_case(partial(tables.recurrent_table, request), run.tables["rows"])


DIFFUSION_EXPLAINED = """\
Times are those of one attention layer, forward, in milliseconds: medians with quartiles of rounds in which all
contenders take turns, each as long as its slowest rank. A shape is heads x queries x keys. "beside ring" is the speedup
over our own ring, and "of bytes" that speedup over the one that bytes allow. With --hosts, "bytes alone" is the time of
the exchanges over the busiest direction of the busiest link, a lower bound. Errors are those of some outputs beside
float64."""


@bench_command(app, "diffusion", "Attention of video and image transformers over ranks.", DIFFUSION_EXPLAINED)
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
    from benchmarks import diffusion as diffusion_bench

    world = world_of(ranks, hosts)
    names = tuple(workload or ("wan-14b-720p", "hunyuanvideo-720p", "flux-1024"))
    run.step(f"{', '.join(names)} on {world}{' ranks' * (hosts is None)}")
    diffusion_bench.rows(diffusion_bench.Request(names, scale, length, rounds), world, run.table("rows"))
    run.report.set(load=[round(load, 2) for load in os.getloadavg()], cores=os.cpu_count())
    return by_case(tables.diffusion_table, run.tables["rows"])


@app.command(short_help="Draw the predicted time and bytes of published schemes.")
def plot(
    file: Annotated[Path, typer.Option("--plot", help="The .png or .svg to draw.", dir_okay=False)],
    cluster: Annotated[str, typer.Option(help="As that of attnmesh plan.")],
    length: Annotated[str, typer.Option(help="Tokens, as 128k or 5M.")],
    heads: Annotated[str, typer.Option(help="Query heads / key heads, as 32/8.")],
    head_dim: Annotated[int, typer.Option(min=1, help="Columns of a query and of a key.")] = 128,
    phase: Annotated[str, typer.Option(help="training, prefill or decode.")] = "training",
) -> None:
    """Draw what attnmesh plan predicts: time by devices and by tokens, a curve for each published scheme, and bytes."""
    from benchmarks.plan_figure import check_picture, write_plot

    machines, work = named_cluster(cluster), Workload(*heads_of(heads), head_dim, length_of(length), phase=phase)
    check_picture(file)
    with Status("pricing") as status:
        write_plot(writable("--plot", file), work, machines, status.update)
    console.print(f"Written: {printable(str(file))}", highlight=False, markup=False)


GPU_EXPLAINED = """\
Times are medians with quartiles of calls that take turns, by CUDA events, as CUDA graphs where a call can be captured.
The L2 cache is emptied before each call. The limit is half the time of a copy of the same keys and values."""


@bench_command(app, "gpu-kernels", "Decoding and prefill on one GPU beside rivals.", GPU_EXPLAINED)
def bench_gpu_kernels(run: Bench) -> list[Table]:
    """Decoding and prefill on one GPU beside SDPA, FlexAttention, flash-attn, FlashInfer and the read rate."""
    from benchmarks import gpu_kernels

    if not torch.cuda.is_available():
        fix = "use python -m benchmarks kernel on a machine without one"
        raise ArgumentError("benchmarks gpu-kernels", "a GPU that PyTorch sees", "none", fix)
    add = run.table("rows")
    for row in gpu_kernels.rows(torch.device("cuda", torch.cuda.current_device())):
        add(row)
    return [pairs("this machine", machine()), rows_table(run.tables["rows"])]
