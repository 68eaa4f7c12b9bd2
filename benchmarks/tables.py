"""Tables of the benches, from their rows: each fits a terminal of 80 columns."""

import os
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from rich.table import Table

from attnmesh.cli.output import titled
from benchmarks.timing import Comparison

if TYPE_CHECKING:
    from benchmarks import (
        calls,
        decode,
        diffusion,
        folder,
        kernel,
        latent,
        masks,
        model,
        packed,
        plan,
        prefill,
        prefixes,
        recurrent,
        rollouts,
        selected,
        speculate,
        storage,
        unequal,
    )
    from benchmarks import rows as requests
    from benchmarks import serve as served


def by_case(make: Callable[[Any, list[Any]], Table], rows: Iterable[Any], field: str = "case") -> list[Table]:
    """Return a table for each case, in the order of the rows, made from the case and its rows."""
    cases: dict[str, list[Any]] = {}
    for row in rows:
        cases.setdefault(getattr(row, field), []).append(row)
    return [make(case, own) for case, own in cases.items()]


def rows_table(rows: Iterable[Comparison], title: str = "kernel bench, milliseconds: median [quartiles]") -> Table:
    """Return the table of comparisons with rivals."""
    columns = ("rival", "attnmesh", "times faster\n(goal)", "share of\nthe limit")
    table = titled(title, "case, and its rival", figures=columns)
    table.columns[0].overflow = "fold"
    for row in rows:
        goal = "" if row.goal is None else f"\n({row.goal}{'' if row.met else ', missed'})"
        share = "" if row.share_of_limit is None else f"{row.share_of_limit:.2f}"
        times = row.theirs.in_two_lines, row.ours.in_two_lines
        table.add_row(f"{row.case}; {row.rival}", *times, f"{row.ratio:.2f}{goal}", share)
    return table


def calls_table(rows: "Iterable[calls.Row]") -> Table:
    """Return the times of small calls, and how many all-gathers take as long."""
    table = titled("small calls, milliseconds: median [quartiles]", "call", figures=("ms", "all-gathers\n(goal)"))
    for row in rows:
        goal = "" if row.goal is None else f"\n(at most {row.goal:.0f}{'' if row.gathers <= row.goal else ', missed'})"
        table.add_row(row.case, row.timing.in_two_lines, f"{row.gathers:.2f}{goal}")
    return table


def prefill_table(case: str, rows: "Iterable[prefill.Row]") -> Table:
    """Return the times, elements and bytes of one case of prefill."""
    columns = ("ms", "beside\nring", "elements", "bytes\nalone, ms")
    table = titled(f"{case}, forward + backward", "shape, exchange", figures=columns)
    for row in rows:
        times = "" if row.timing is None else row.timing.in_two_lines
        off = "" if row.counted == row.predicted else f"\n({row.predicted:,} predicted)"
        beside, elements, limit = ("" if x is None else f"{x:,}" for x in (row.beside_ring, row.counted, row.limit_ms))
        name = row.contender if row.note is None else f"{row.contender}: {row.note}"
        table.add_row(name, times, beside, elements + off, limit)
    return table


def peak_table(memories: "Iterable[prefill.Memory]") -> Table:
    """Return the memory of shapes and exchanges, beside the formula."""
    columns = ("measured", "by the formula")
    table = titled("peak extra memory per rank, MB", "case", "shape, exchange", figures=columns)
    for memory in memories:
        table.add_row(memory.case, memory.contender, f"{memory.measured:.1f}", f"{memory.foretold:.1f}")
    return table


def decode_table(ranks: int, case: str, rows: "Iterable[decode.Row]") -> Table:
    """Return the times of one case of decoding."""
    columns = ("ms", "times ours")
    table = titled(f"{case}, {ranks} ranks, one call", "contender", figures=columns)
    for row in rows:
        table.add_row(row.contender, str(row.timing), "" if row.times_ours is None else f"{row.times_ours}")
    return table


def memory_table(memories: "Iterable[kernel.Memory]") -> Table:
    """Return the memory of masked calls at each length."""
    table = titled("peak extra memory, MB, float32, 8 heads of 64", "case")
    for memory in memories:
        if not table.rows:
            for length in memory.lengths:
                table.add_column(f"{length:,} tokens", justify="right")
        table.add_row(memory.case, *("unknown" if peak is None else f"{peak:.0f}" for peak in memory.megabytes))
    return table


def model_table(rows: "list[model.Row]", prompt_tokens: int) -> Table:
    """Return the times and memory of a whole model."""
    title = f"{prompt_tokens:,} tokens of context, on {torch.get_num_threads()} threads in all"
    columns = ("ms fore-\ntold", "keys,\nMB", "weights,\nMB", "all,\nMB", "prefill\ns")
    table = titled(title + "; memory of a rank", "decoding", "ms per token", figures=columns)
    for row in rows:
        price = "" if row.foretold_ms is None else f"{row.foretold_ms:.0f}"
        sizes = row.cache_megabytes, row.weight_megabytes, row.resident_megabytes
        figures = (f"{sizes[0]:.1f}", f"{sizes[1]:.0f}", f"{sizes[2]:.0f}", f"{row.prefill_seconds:.1f}")
        table.add_row(row.contender, row.timing.in_two_lines, price, *figures)
    return table


def requests_table(rows: "list[requests.Row]", ranks: int) -> Table:
    """Return the tokens a second of requests together, and one after the other."""
    figures = (
        "step ms,\ntogether",
        "token ms,\nalone",
        "tokens/s\ntogether",
        "tokens/s\nalone",
        "ratio",
        "CPU\nratio",
    )
    title = f"{ranks} ranks, {torch.get_num_threads()} threads in all"
    table = titled(title, "requests", figures=figures)
    for row in rows:
        (together, alone), (together_cpu, alone_cpu) = row.rates, row.cpu
        rates = (f"{together:.1f}", f"{alone:.1f}", f"{together / alone:.2f}", f"{alone_cpu / together_cpu:.2f}")
        table.add_row(str(row.requests), row.together.in_two_lines, row.alone.in_two_lines, *rates)
    return table


def masks_table(rows: "list[masks.MaskRow]") -> Table:
    """Return the times of masks, and the gaps of answers with grammars and without."""
    figures = ("first\nms", "mask\nms", "of a step\n%", "gap\nms", "gap without\nms")
    table = titled("masks of grammars", "grammar", figures=figures)
    for row in rows:
        times = row.first.in_two_lines, row.mask.in_two_lines, f"{100 * row.share:.1f}"
        table.add_row(row.case, *times, row.gap.in_two_lines, row.step.in_two_lines)
    return table


def speculate_table(rows: "list[speculate.Row]", ranks: int) -> Table:
    """Return the tokens a second of answers without guesses and with them."""
    figures = (
        "tokens/s\nwithout",
        "tokens/s\nwith",
        "ratio",
        "guesses,\nper 100",
        "that stood,\nper 100",
        "same\ntexts",
    )
    table = titled(f"{ranks} ranks, {torch.get_num_threads()} threads in all", "answers", figures=figures)
    for row in rows:
        name, rates = (
            f"{row.case}, {row.clients} at once",
            (f"{row.plain:.1f}", f"{row.guessed:.1f}", f"{row.ratio:.2f}"),
        )
        table.add_row(name, *rates, f"{row.drafted}", f"{row.accepted}", f"{row.same_texts:.0%}")
    return table


def served_table(context: int, rows: "list[served.Row]") -> Table:
    """Return what clients saw of each server."""
    figures = ("tokens/s", "first\ntoken ms", "gap ms\n(longest)", "MB", "same\ntexts")
    table = titled(f"prompts of {context:,} tokens, about", "clients, server", figures=figures)
    for row in rows:
        gap = str(row.gap).replace(" [", f" ({row.longest_gap:,.0f})\n[")
        times = (row.first.in_two_lines, gap)
        name = f"{row.clients} at once,\n{row.server}"
        table.add_row(name, f"{row.tokens_a_second:.1f}", *times, f"{row.megabytes:,.0f}", f"{row.same_texts:.0%}")
    return table


def prefixes_table(rows: "list[prefixes.PrefixRow]") -> Table:
    """Return what clients saw of prompts that were computed, and of stored ones."""
    figures = ("ranks", "tokens", "stored", "first\ntoken s", "longest\ngap ms", "same\ntext")
    table = titled("a prompt, and a client beside it", "prompt", figures=figures)
    for row in rows:
        counts = f"{row.ranks}", f"{row.prompt:,}", f"{row.cached:,}"
        table.add_row(
            row.case, *counts, f"{row.first:.2f}", f"{row.longest_gap:,.0f}", "yes" if row.same_text else "no"
        )
    return table


def plan_table(world: str, workload: str, rows: "list[plan.Ran]") -> Table:
    """Return the plans of one workload, predicted and measured."""
    columns = ("predicted\nms", "ms", "beside\nbest", "bytes\nbetween hosts", "predicted,\noff")
    table = titled(f"{workload}, on {world}", "plan", figures=columns)
    for row in rows:
        crossed = row.between
        bytes_ = () if crossed is None else (f"{crossed.payload:,}", f"{crossed.off:+.1%}")
        name = f"{'* ' if row.picked else '  '}{row.plan}"
        table.add_row(name, f"{row.predicted_ms:.1f}", row.timing.in_two_lines, f"{row.beside_best}", *bytes_)
    return table


def latent_table(request: "latent.Request", rows: "list[latent.Row]") -> Table:
    """Return the times and memory of a layer with latent attention."""
    threads = torch.get_num_threads()
    figures = ("ms per step", "beside\n1 rank", "cached\nMB", "rows\nexpanded")
    table = titled(
        f"128 heads, {request.tokens:,} tokens, {request.dtype}, {threads} threads in all", "decoding", figures=figures
    )
    for row in rows:
        ratio = f"{row.timing.median / rows[0].timing.median:.2f}"
        table.add_row(row.contender, str(row.timing), ratio, f"{row.cached_megabytes:.1f}", f"{row.expanded_rows:,}")
    return table


def selected_table(rows: "list[selected.Row]") -> Table:
    """Return the times, bytes and memory of steps that select their tokens."""
    figures = ("tokens", "ms per step", "of it\nselecting", "KB\nreceived", "extra\nMB")
    title = f"128 heads, latents of 512 + 64, indexer of 64 x 128, float32, {torch.get_num_threads()} threads in all"
    table = titled(title, "decoding", figures=figures)
    for row in rows:
        extra = "" if row.extra_megabytes is None else f"{row.extra_megabytes:.1f}"
        cells = (f"{row.tokens:,}", row.timing.in_two_lines, f"{row.selecting:.1f}", f"{row.kilobytes:.1f}", extra)
        table.add_row(row.contender, *cells)
    return table


def unequal_table(rows: "list[unequal.Row]") -> Table:
    """Return the steps of unequal ranks by their shares."""
    table = titled("steps on 2 unequal ranks, milliseconds", "ranks", figures=("shares", "tokens", "step", "of bound"))
    for row in rows:
        tokens, step = (
            "\n".join(f"{count:,}" for count in row.tokens),
            "" if row.step is None else row.step.in_two_lines,
        )
        beside = "does not fit" if row.step is None else "" if row.beside is None else f"{row.beside:.2f}"
        table.add_row(row.case, row.shares, tokens, step, beside)
    return table


def storage_table(rows: "list[storage.Row]") -> Table:
    """Return the perplexity and the needles of ways to store keys and values."""
    figures = ("bits", "perplexity", "beside\nbfloat16", "needles\nby depth", "same\nanswers")
    table = titled("a cache by its storage, and by what shares a scale", "stored as", figures=figures)
    for row in rows:
        needles = "" if row.found is None else " ".join(map(str, row.found))
        same_answers = "" if row.same_answers is None else f"{row.same_answers}"
        cells = f"{row.bits:.2f}", f"{row.perplexity:.4f}", f"{row.beside:+.2f} %", needles, same_answers
        table.add_row(row.contender, *cells)
    return table


def folder_table(rows: "list[folder.Row]") -> Table:
    """Return the times of a cache in a folder beside those of its disk."""
    columns = ("disk", "attnmesh", "times\n(goal)", "in memory", "different\nnumbers")
    table = titled("a cache in a folder, milliseconds: median [quartiles]", "case", figures=columns)
    for row in rows:
        ratio = f"{row.ratio:.2f}\n(at most {row.goal}{'' if row.ratio <= row.goal else ', missed'})"
        different = "" if row.different is None else f"{row.different}"
        times, in_memory = (row.plain.in_two_lines, row.ours.in_two_lines), row.in_memory
        table.add_row(row.case, *times, ratio, "" if in_memory is None else in_memory.in_two_lines, different)
    return table


def rollouts_table(rows: "list[rollouts.Speed]") -> Table:
    """Return the rates of completions beside those of the first contender."""
    table = titled("completions of one prompt", "contender", figures=("prompt", "seconds", "tokens/s", "times\n(goal)"))
    baseline = {row.context: row.rate for row in reversed(rows)}
    for row in rows:
        times, timing = row.rate / baseline[row.context], row.timing
        seconds = f"{timing.median / 1e3:.1f}\n[{timing.low / 1e3:.1f}, {timing.high / 1e3:.1f}]"
        table.add_row(row.contender, f"{row.context:,}", seconds, f"{row.rate:,.0f}", f"{times:.2f} ({row.goal})")
    return table


def steps_table(rows: "list[rollouts.Memory]") -> Table:
    """Return the memory of steps of GRPO beside that on one process."""
    columns = ("MB before", "MB of the step", "share\n(goal)", "seconds")
    table = titled("a step of GRPO, the rank that takes most", "ranks", figures=columns)
    for row in rows:
        share = f"{row.step / rows[0].step:.3f} ({row.goal})"
        table.add_row(f"{row.ranks}", f"{row.before:,.0f}", f"{row.step:,.0f}", share, f"{row.seconds:,.0f}")
    return table


def recurrent_table(request: "recurrent.Request", case: str, rows: "list[recurrent.Row]") -> Table:
    """Return the times and messages of one case of a recurrent layer."""
    heads = f"{request.key_heads}/{2 * request.key_heads} heads of {request.head_dim}"
    title = f"{case}: {heads}, {request.tokens:,} tokens, float32, {os.cpu_count()} cores"
    columns = ("ms", "cpu ms", "MB\nreceived", "messages\nms", "limit\nms", "beside\nshares")
    table = titled(title, "contender", figures=columns)
    for row in rows:
        figures = (row.messages_ms, row.limit_ms, row.beside_shares)
        cells = ("" if x is None else f"{x:,}" for x in figures)
        times = (row.timing.in_two_lines, f"{row.cpu_ms:,}")
        table.add_row(row.contender, *times, f"{row.received / 1e6:.1f}", *cells)
    return table


def diffusion_table(case: str, rows: "list[diffusion.Row]") -> Table:
    """Return the times and bytes of one workload of diffusion."""
    columns = ("ms", "beside\nring", "of\nbytes", "MB\nreceived", "bytes\nalone, ms", "error")
    table = titled(f"{case}, one layer, forward, float32, {os.cpu_count()} cores", "scheme, shape", figures=columns)
    for row in rows:
        received = None if row.received is None else round(row.received / 1e6, 1)
        figures = ["" if x is None else f"{x:,}" for x in (row.beside_ring, row.of_bytes, received, row.limit_ms)]
        error = "" if row.error is None else f"{row.error:.0e}"
        times = "" if row.timing is None else row.timing.in_two_lines
        table.add_row(row.contender, row.note or times, *figures, error)
    return table


def counts_table(case: str, rows: "list[packed.Count]") -> Table:
    """Return the balance and the tokens received of layouts on batches of one corpus."""
    columns = ("busiest\nof mean", "tokens\nreceived", "beside\nleast", "made in\nms")
    table = titled(f"packed batches of {case}, {rows[0].tokens:,} tokens a rank", "mesh", "layout", figures=columns)
    for row in rows:
        cells = ("" if x is None else f"{x}" for x in (row.beside_least, row.made_ms))
        table.add_row(row.shape, row.layout, f"{row.imbalance:.2f}", f"{row.received:.2f}", *cells)
    return table


def packed_table(case: str, rows: "list[packed.Row]") -> Table:
    """Return the times of layouts on one packed batch."""
    table = titled(
        f"a packed batch of {case}, forward + backward", "layout, shape", figures=("ms", "beside\npacked 2D")
    )
    for row in rows:
        beside = "" if row.beside_packed is None else f"{row.beside_packed:.2f}"
        name = row.contender if row.note is None else f"{row.contender}: {row.note}"
        table.add_row(name, "" if row.timing is None else row.timing.in_two_lines, beside)
    return table
