"""The command `attnmesh plan`: options to a workload and a cluster, all plans priced, the best as a table."""

import json
import os
import re
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from attnmesh.cli.mesh_option import KvOption, storage_of
from attnmesh.cli.output import AsJson, Status, Verbose, console, numbered, pairs, printable
from attnmesh.cli.plan_model import ModelOption, check_alone, model_of, print_record, print_serving, warn_of_length
from attnmesh.cli.plan_page import check_file, write_report
from attnmesh.cli.plan_training import LoraOption, check_lora, print_training
from attnmesh.cli.plan_workload import (
    LengthOption,
    RecurrentOption,
    WorkloadOption,
    enabling_code,
    length_of,
    preset_of,
    recurrent_of,
    recurrent_record,
    source_of,
)
from attnmesh.core.mask import Causal, Full, Mask, Window
from attnmesh.core.partial import DTYPES
from attnmesh.errors import ArgumentError, ClusterError, ShapeError
from attnmesh.planner.cluster import PRESETS, Cluster
from attnmesh.planner.plan import STAGES, Plan, by
from attnmesh.planner.plan import plan as plans_for
from attnmesh.planner.units import in_bytes, in_seconds
from attnmesh.planner.workload import PHASES, Workload

ReportFile = Annotated[
    Path | None,
    typer.Option(help="Also write an interactive page to this .html: sizes can be changed.", dir_okay=False),
]
HeadsOption = Annotated[
    str | None, typer.Option(help="Query heads / key heads, as 32/8; or one number for both. Or pass --model.")
]
HeadDimOption = Annotated[int | None, typer.Option(min=1, help="Columns of a query and of a key; 128 by default.")]
LayersOption = Annotated[int | None, typer.Option(min=1, help="Attention layers, one after the other; 1 by default.")]
LatentOption = Annotated[
    str | None, typer.Option(help="Latent attention: columns that are projected / rotated, as 512/64.")
]
QLenOption = Annotated[int | None, typer.Option(min=1, help="New tokens per sequence in a decode step; 1 by default.")]


def plan(
    context: typer.Context,
    cluster: Annotated[
        str,
        typer.Option(
            help="A preset, as dgx-h100:16 or dgx-h100:16x4 (hosts x ranks); or a file of attnmesh probe. "
            f"Hosts x ranks of a name alone: {', '.join(f'{n} {p.hosts}x{p.ranks}' for n, p in PRESETS.items())}."
        ),
    ],
    length: LengthOption = None,
    model: ModelOption = None,
    workload: WorkloadOption = None,
    heads: HeadsOption = None,
    head_dim: HeadDimOption = None,
    value_dim: Annotated[int | None, typer.Option(min=1, help="Columns of a value, if not --head-dim.")] = None,
    latent: LatentOption = None,
    training: Annotated[bool, typer.Option("--training", help="Forward and backward (the default).")] = False,
    prefill: Annotated[bool, typer.Option("--prefill", help="Forward only.")] = False,
    lora: LoraOption = 0,
    decode: Annotated[bool, typer.Option("--decode", help="One step, with --length cached tokens.")] = False,
    layers: LayersOption = None,
    recurrent: RecurrentOption = None,
    batch: Annotated[int, typer.Option(min=1, help="Sequences at once.")] = 1,
    q_len: QLenOption = None,
    dtype: Annotated[str, typer.Option(help=f"One of {', '.join(DTYPES)}.")] = "bfloat16",
    kv: KvOption = "auto",
    window: Annotated[
        int | None, typer.Option(min=0, help="A token sees itself and this many before it; all before it by default.")
    ] = None,
    full: Annotated[bool, typer.Option("--full", help="No mask: all tokens see all tokens.")] = False,
    top: Annotated[int, typer.Option(min=1, help="Rows of the table.")] = 10,
    report: ReportFile = None,
    as_json: AsJson = False,
    verbose: Verbose = False,
) -> None:
    """Predict the time of every way to run attention on a cluster: the fastest first, with its reasons."""
    machines = cluster_of(cluster)
    common: dict[str, Any] = {"batch": batch, "q_len": q_len, "dtype": dtype, "storage": storage_of(kv)}
    common["phase"] = _phase(training, prefill, decode, default="training" if workload is None else "prefill")
    sizes: dict[str, Any] = {"--heads": heads, "--head-dim": head_dim, "--value-dim": value_dim, "--latent": latent}
    sizes |= {"--layers": layers, "--recurrent": recurrent, "--window": window, "--full": full}
    if workload is None:
        common["length"] = length_of(length)
    check_lora(lora, is_trained=model is not None and training)
    if model is not None and workload is None and (decode or training):
        check_alone(sizes)
        _print_model(context.params, machines, common)
        return
    work = _workload(model, sizes, common) if workload is None else preset_of(workload, length, model, sizes, common)
    if report is not None:
        check_file(report)
    with Status("pricing") as status:
        plans = plans_for(work, machines, progress=lambda done, of: status.update(f"priced {done:,} of {of:,} plans"))
        if report is not None:
            write_report(report, work, machines, status.update)
    shown = distinct(plans)[:top]
    if as_json:
        print_record(context.params, machines, _record(work, shown) | source_of(workload, work.length))
    else:
        _print(workload, shown, report, verbose)


def _print_model(given: dict[str, Any], machines: Cluster, common: dict[str, Any]) -> None:
    """Print the ways to run a whole model in decoding, or in training."""
    decodes = common["phase"] == "decode"
    check_alone({"--report": given["report"]}, f"no picture of a model in {'decoding' if decodes else 'training'}")
    (print_serving if decodes else print_training)(given, machines, common)


# --- options ---


def _workload(model: str | None, sizes: dict[str, Any], common: dict[str, Any]) -> Workload:
    """Return the attention of a model, or that of the options."""
    if model is not None:
        check_alone(sizes)
        found, config = model_of(model, common)
        warn_of_length(config, found.workload.length)
        return found.workload
    q_heads, kv_heads = heads_of(sizes["--heads"])
    latent = sizes["--latent"]
    more = {"head_dim": 128 if sizes["--head-dim"] is None else sizes["--head-dim"], "value_dim": sizes["--value-dim"]}
    return Workload(
        q_heads,
        kv_heads,
        **more,
        layers=1 if sizes["--layers"] is None else sizes["--layers"],
        mask=_mask(sizes["--window"], sizes["--full"]),
        latent=None if latent is None else _numbers("--latent", "projected / rotated columns", "512/64", latent),
        recurrent=tuple(recurrent_of(text) for text in sizes["--recurrent"] or ()),
        **common,
    )


def cluster_of(text: str) -> Cluster:
    """Return the cluster of `--cluster`: a preset or a file, and optionally hosts and ranks per host.

    >>> cluster_of("dgx-h100:2x4").world
    8
    """
    name, _, size = (text, "", "") if os.path.isfile(text) else text.partition(":")
    hosts, ranks = _size(text, size) if size or text.endswith(":") else (None, None)
    if not os.path.isfile(name) and not name.endswith(".json"):
        return Cluster.preset(name, hosts, ranks)
    found = _measured(Path(name))
    for what, given, count in (("hosts", hosts, found.hosts), ("ranks a host", ranks, found.ranks)):
        if count == 1 and given not in (None, 1):  # there was no link to measure
            fix = f"measure with attnmesh probe on more {what}"
            expected = f"1 of {what}, as in the measurement"
            raise ClusterError(f"--cluster {name}", expected, f"{given} {what}", fix)
    return found.sized(hosts or found.hosts, ranks or found.ranks)


def _size(text: str, size: str) -> tuple[int, int | None]:
    match = re.fullmatch(r"([0-9]{1,15})(?:x([0-9]{1,15}))?", size)
    if match is None:
        fix = "write dgx-h100:16 for 16 hosts, dgx-h100:16x4 for 4 ranks on each"
        raise ClusterError("--cluster", "NAME, NAME:HOSTS or NAME:HOSTSxRANKS", repr(text), fix)
    hosts, ranks = match.groups()
    return int(hosts), None if ranks is None else int(ranks)


def _measured(file: Path) -> Cluster:
    fix = "write one with attnmesh probe --out"
    try:
        record = json.loads(file.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise ClusterError("--cluster", "a JSON file that probe wrote", f"{file}: {error}", fix) from None
    if not isinstance(record, dict) or "cluster" not in record:
        raise ClusterError("--cluster", 'a JSON object with a "cluster"', f"{file} without one", fix)
    try:
        return Cluster.of_record(record["cluster"])
    except ClusterError as error:
        _, expected, given, fix = error.args
        raise ClusterError(f"--cluster {file}", expected, given, fix) from None


def heads_of(text: str | None) -> tuple[int, int]:
    """Return the query heads and key heads of `--heads`.

    >>> heads_of("32/8"), heads_of("16")
    ((32, 8), (16, 16))
    """
    if text is None:
        raise ArgumentError("attnmesh plan", "--heads or --model", "neither", "write --heads 32/8, or --model NAME")
    if re.fullmatch("[0-9]{1,15}", text):
        return int(text), int(text)
    return _numbers("--heads", "query heads / key heads", "32/8, or 32 for 32/32", text)


def _numbers(option: str, expected: str, example: str, text: str) -> tuple[int, int]:
    """Return the two numbers of an option."""
    match = re.fullmatch("([0-9]{1,15})/([0-9]{1,15})", text)
    if match is None:
        raise ShapeError(option, expected, repr(text), f"write {example}")
    return int(match[1]), int(match[2])


def _phase(*wanted: bool, default: str) -> str:
    phases = [phase for phase, given in zip(PHASES, wanted, strict=True) if given]
    if len(phases) > 1:
        given = " and ".join(f"--{phase}" for phase in phases)
        raise ArgumentError("attnmesh plan", "one phase", given, "plan for each in a command of its own")
    return phases[0] if phases else default


def _mask(window: int | None, full: bool) -> Mask:
    if full and window is not None:
        raise ArgumentError("attnmesh plan", "one mask", f"--full and --window {window}", "leave one out")
    return Full() if full else Causal() if window is None else Window(window)


# --- output ---


def distinct(plans: Sequence[Plan]) -> list[Plan]:
    """Return the best placement on hosts of each shape and exchange."""
    best: dict[object, Plan] = {}
    for one in plans:
        best.setdefault((one.shape, one.exchange), one)
    return list(best.values())


def code_of(plan: Plan) -> str:
    """Return the lines of Python that run a plan.

    >>> import attnmesh as am
    >>> print(code_of(am.plan(am.Workload(8, 8, 128, 65536, phase="decode"), am.Cluster.preset("a100x4", 1))[0]))
      mesh = am.init_mesh((1, 1, 4))
      out = am.decode(q, cache, merge="direct")
    """
    mesh = f"  mesh = am.init_mesh({tuple(plan.shape)})"
    how = f'"{plan.exchange}"' + ("" if plan.workload.selected is None else ", selected=am.Selection(indices)")
    if plan.workload.phase == "decode":
        return f"{mesh}\n  out = am.decode(q, cache, merge={how})"
    if plan.workload.latent is not None and plan.workload.phase == "prefill":
        return f'{mesh}\n  cache = hf.ShardedCache(model.config, mesh, exchange="{plan.exchange}")'
    return f"{mesh}\n  out = am.attention(q, k, v, mesh=mesh, layout=am.{plan.layout}, exchange={how})"


def _print(workload: str | None, shown: Sequence[Plan], report: Path | None, verbose: bool) -> None:
    best, machines = shown[0], shown[0].cluster
    for name, value in source_of(workload, best.workload.length).items():
        console.print(f"{name}: {value}", highlight=False, markup=False)
    console.print(_table(shown))
    console.print(best.explain(), highlight=False, markup=False)
    code = code_of(best) if workload is None else enabling_code(best)
    console.print(f"In Python:\n{code}", highlight=False, markup=False)
    if verbose:
        times = {STAGES[name]: in_seconds(seconds) for name, seconds in best.parts if seconds}
        console.print(pairs(f"{best.name}: {in_seconds(best.seconds)}", times))
        console.print(pairs(f"sources of the constants of {machines.name}", dict(machines.sources)))
    if report is not None:
        console.print(f"Written: {printable(str(report))}", highlight=False, markup=False)


def _table(shown: Sequence[Plan]) -> Table:
    work, machines = shown[0].workload, shown[0].cluster
    words = {
        "heads x\nqueries x\nkeys": [by(one.shape) for one in shown],
        "known as": [one.known_as for one in shown],
        "exchange": [one.exchange for one in shown],
        "layout": [type(one.layout).__name__.lower() for one in shown],
    }
    figures = {
        "tile\na host": [by(one.tile) for one in shown],
        "time": [in_seconds(one.seconds) for one in shown],
        "between\nhosts": [in_bytes(one.bytes.between) for one in shown],
        "inside\nhosts": [in_bytes(one.bytes.inside) for one in shown],
        "memory\na rank": [in_bytes(one.memory) for one in shown],
    }
    if 1 in (machines.hosts, machines.ranks):  # one class of links only
        del figures["tile\na host"], figures["between\nhosts" if machines.hosts == 1 else "inside\nhosts"]
    return numbered(f"{work.title}; {machines.title}", words | figures, words, CAPTION)


CAPTION = """\
Fastest first; for each shape and exchange only the best placement on hosts. Bytes are the sum over all ranks. Memory is
that of attention: weights are not counted. --model with --decode or --training counts them."""


def _record(work: Workload, shown: Sequence[Plan]) -> dict[str, Any]:
    return {
        "workload": asdict(work) | {"mask": repr(work.mask)},
        "plans": [_plan_record(one) for one in shown],
        "explanation": shown[0].explain(),
    }


def _plan_record(one: Plan) -> dict[str, Any]:
    return {
        "shape": list(one.shape),
        "tile": list(one.tile),
        "exchange": one.exchange,
        "layout": repr(one.layout),
        "known_as": one.known_as,
        "seconds": one.seconds,
        "bytes": {"inside": one.bytes.inside, "between": one.bytes.between},
        "memory": one.memory,
        "parts": dict(one.parts),
        "recurrent": recurrent_record(one.recurrent) if one.workload.recurrent else None,
    }
