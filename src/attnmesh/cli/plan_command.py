"""The command `attnmesh plan`: options to a workload and a cluster, all plans priced, the best as a table."""

import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.table import Table

from attnmesh.cli.output import Status, console, numbered, pairs
from attnmesh.cli.plan_model import model_of, print_record, print_serving, warn_of_length
from attnmesh.cli.plan_page import write_report
from attnmesh.cli.plan_training import print_training
from attnmesh.core.mask import Causal, Full, Mask, Window
from attnmesh.cost.cluster import Cluster
from attnmesh.cost.machine_constants import this_machine
from attnmesh.errors import ClusterError
from attnmesh.planner.plan import STAGES, Plan, shape_text
from attnmesh.planner.plan import plan as plans_for
from attnmesh.planner.recurrent import Recurrent
from attnmesh.planner.units import bytes_text, seconds_text
from attnmesh.planner.workload import Workload
from attnmesh.planner.workload_presets import WORKLOADS, workload_preset
from attnmesh_command.messages import printable
from attnmesh_command.option_texts import (
    cluster_size_of,
    heads_of,
    latent_of,
    length_of,
    read_cluster,
    recurrent_of,
)
from attnmesh_command.plan_options import PlanOptions


def plan(options: PlanOptions) -> None:
    """Predict the time of every way to run attention on a cluster, the fastest first."""
    cluster = named_cluster(options.cluster)
    workload_options: dict[str, Any] = {"batch": options.batch, "q_len": options.q_len, "dtype": options.dtype}
    workload_options |= {"phase": options.phase, "storage": None if options.kv == "auto" else options.kv}
    if options.length is not None:
        workload_options["length"] = length_of(options.length)
    if options.is_whole_model:
        (print_serving if options.decode else print_training)(options, cluster, workload_options)
        return
    work = _workload(options, workload_options)
    with Status("pricing") as status:
        plans = plans_for(work, cluster, progress=lambda done, of: status.update(f"priced {done:,} of {of:,} plans"))
        if options.report is not None:
            write_report(options.report, work, cluster, status.update)
    top_plans = best_placements(plans)[: options.top]
    if options.as_json:
        print_record(options, cluster, _plans_record(work, top_plans) | _preset_record(options.workload, work.length))
    else:
        _print(options.workload, top_plans, options.report, options.verbose)


# --- options ---


def _workload(options: PlanOptions, workload_options: dict[str, Any]) -> Workload:
    """Return the attention of a preset, of a model, or that of the options."""
    if options.workload is not None:
        return workload_preset(options.workload, **workload_options)
    if options.model is not None:
        sizes, config = model_of(options.model, workload_options)
        warn_of_length(config, sizes.workload.length)
        return sizes.workload
    q_heads, kv_heads = heads_of(options.heads or "")
    return Workload(
        q_heads,
        kv_heads,
        head_dim=128 if options.head_dim is None else options.head_dim,
        value_dim=options.value_dim,
        layers=1 if options.layers is None else options.layers,
        mask=_mask(options.window, options.full),
        latent=None if options.latent is None else latent_of(options.latent),
        recurrent=tuple(Recurrent(**recurrent_of(text)) for text in options.recurrent or ()),
        **workload_options,
    )


def named_cluster(text: str) -> Cluster:
    """Return the cluster of `--cluster`: a preset, a file or this machine, and optionally hosts and ranks per host.

    >>> named_cluster("dgx-h100:2x4").world
    8
    """
    name, hosts, ranks = cluster_size_of(text)
    if name == "local" and not os.path.isfile(name):
        return this_machine(ranks or 1, hosts=hosts or 1)
    if not os.path.isfile(name):
        return Cluster.preset(name, hosts, ranks)
    measured = _read_measured(name)
    for unit, option, count in (("hosts", hosts, measured.hosts), ("ranks a host", ranks, measured.ranks)):
        if count == 1 and option not in (None, 1):  # there was no link to measure
            fix = f"measure with attnmesh probe on more {unit}"
            expected = f"1 of {unit}, as in the measurement"
            raise ClusterError(f"--cluster {name}", expected, f"{option} {unit}", fix)
    return measured.sized(hosts or measured.hosts, ranks or measured.ranks)


def _read_measured(file: str) -> Cluster:
    try:
        return Cluster.of_record(read_cluster(file))
    except ClusterError as error:
        _, expected, given, fix = error.args
        raise ClusterError(f"--cluster {file}", expected, given, fix) from None


def _mask(window: int | None, full: bool) -> Mask:
    return Full() if full else Causal() if window is None else Window(window)


# --- output ---


def best_placements(plans: Sequence[Plan]) -> list[Plan]:
    """Return the best placement on hosts of each shape, exchange and shares."""
    first_plans: dict[object, Plan] = {}
    for plan in plans:
        first_plans.setdefault((plan.shape, plan.exchange, plan.shares), plan)
    return list(first_plans.values())


def code_to_run(plan: Plan) -> str:
    """Return the lines of Python that run a plan.

    >>> import attnmesh as am
    >>> print(code_to_run(am.plan(am.Workload(8, 8, 128, 65536, phase="decode"), am.Cluster.preset("a100x4", 1))[0]))
      mesh = am.init_mesh((1, 1, 4))
      out = am.decode(q, cache, merge="direct")
    """
    mesh = f"  mesh = am.init_mesh({tuple(plan.shape)})"
    exchange = f'"{plan.exchange}"' + ("" if plan.workload.selected is None else ", selected=am.Selection(indices)")
    if plan.workload.phase == "decode":
        cache_line = "" if plan.shares is None else f"\n  cache = am.KVCache(mesh, ..., shares={plan.shares})"
        return f"{mesh}{cache_line}\n  out = am.decode(q, cache, merge={exchange})"
    if plan.workload.latent is not None and plan.workload.phase == "prefill":
        return f'{mesh}\n  cache = hf.ShardedCache(model.config, mesh, exchange="{plan.exchange}")'
    return f"{mesh}\n  out = am.attention(q, k, v, mesh=mesh, layout=am.{plan.layout}, exchange={exchange})"


def enabling_code(plan: Plan) -> str:
    """Return the lines of Python that put a model of diffusers on the mesh of a plan."""
    mesh = f"am.init_mesh({tuple(plan.shape)})"
    return f'  attnmesh.diffusers.enable(pipeline.transformer, {mesh}, exchange="{plan.exchange}")'


def _print(workload: str | None, plans: Sequence[Plan], report: Path | None, verbose: bool) -> None:
    best = plans[0]
    cluster = plans[0].cluster
    for name, value in _preset_record(workload, best.workload.length).items():
        console.print(f"{name}: {value}", highlight=False, markup=False)
    console.print(_plans_table(plans))
    console.print(best.explain(), highlight=False, markup=False)
    code = code_to_run(best) if workload is None else enabling_code(best)
    console.print(f"In Python:\n{code}", highlight=False, markup=False, soft_wrap=True)
    if verbose:
        times = {STAGES[name]: seconds_text(seconds) for name, seconds in best.parts if seconds}
        console.print(pairs(f"{best.name}: {seconds_text(best.seconds)}", times))
        console.print(pairs(f"sources of the constants of {cluster.name}", dict(cluster.sources)))
    if report is not None:
        console.print(f"Written: {printable(str(report))}", highlight=False, markup=False)


def _plans_table(plans: Sequence[Plan]) -> Table:
    work, cluster = plans[0].workload, plans[0].cluster
    words = {
        "heads x\nqueries x\nkeys": [shape_text(plan.shape) for plan in plans],
        "known as": [plan.known_as for plan in plans],
        "exchange": [plan.exchange for plan in plans],
        "layout": [_layout(plan) for plan in plans],
    }
    figures = {
        "tile\na host": [shape_text(plan.tile) for plan in plans],
        "time": [seconds_text(plan.seconds) for plan in plans],
        "between\nhosts": [bytes_text(plan.bytes.between) for plan in plans],
        "inside\nhosts": [bytes_text(plan.bytes.inside) for plan in plans],
        "memory\na rank": [bytes_text(plan.memory) for plan in plans],
    }
    if 1 in (cluster.hosts, cluster.ranks):  # one class of links only
        del figures["tile\na host"], figures["between\nhosts" if cluster.hosts == 1 else "inside\nhosts"]
    return numbered(f"{work.title}; {cluster.title}", words | figures, words, PLAN_CAPTION)


def _layout(plan: Plan) -> str:
    """Return the name of a layout, with the shares of unequal ranks."""
    shares = () if plan.shares is None else (f"{share}" for share in plan.shares)
    return f"{type(plan.layout).__name__.lower()} {':'.join(shares)}".rstrip()


PLAN_CAPTION = """\
Fastest first; of each shape and exchange the best placement on hosts.
Bytes are the sum over all ranks. Memory is that of attention, without
weights: --model with --decode or --training counts them."""


def _preset_record(name: str | None, length: int) -> dict[str, str]:
    """Return the name of a preset, how its tokens come about, and its source; nothing without a preset."""
    return {} if name is None else {"preset": name, **WORKLOADS[name].record(length)}


def _plans_record(work: Workload, plans: Sequence[Plan]) -> dict[str, Any]:
    return {
        "workload": asdict(work) | {"mask": repr(work.mask)},
        "plans": [_plan_record(plan) for plan in plans],
        "explanation": plans[0].explain(),
    }


def _plan_record(plan: Plan) -> dict[str, Any]:
    return {
        "shape": list(plan.shape),
        "tile": list(plan.tile),
        "exchange": plan.exchange,
        "layout": repr(plan.layout),
        "known_as": plan.known_as,
        "seconds": plan.seconds,
        "bytes": {"inside": plan.bytes.inside, "between": plan.bytes.between},
        "memory": plan.memory,
        "parts": dict(plan.parts),
        "recurrent": plan.recurrent.record() if plan.workload.recurrent else None,
    }
