"""The option `--model` of `attnmesh plan`: sizes from a configuration, and what a rank holds of weights and keys."""

import shlex
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.table import Table

from attnmesh.cli.mesh_option import MeshChoice
from attnmesh.cli.output import Status, command_line, console, numbered, print_json, print_message
from attnmesh.cost.cluster import Cluster
from attnmesh.errors import ClusterError
from attnmesh.planner.serving import ModelSizes, ServingPlan, choose_plan, over_hosts, serving_plans, why_not_shared
from attnmesh.planner.units import bytes_text, seconds_text
from attnmesh_command.plan_options import PlanOptions


def print_record(options: PlanOptions, cluster: Cluster, figures: dict[str, Any]) -> None:
    """Print the command, the cluster and the figures of a plan as JSON."""
    print_json({"command": command_line("attnmesh plan", asdict(options)), "cluster": cluster.record(), **figures})


def config_of(name: str) -> Any:
    """Return the configuration of a model."""
    from transformers.utils import logging

    from attnmesh.hf.load import locate, open_config

    logging.set_verbosity_error()
    return open_config(locate(name))


def model_of(name: str, workload_options: dict[str, Any]) -> tuple[ModelSizes, Any]:
    """Return the sizes of a model, and its configuration."""
    from attnmesh.hf.model_size import model_size

    config = config_of(name)
    return model_size(config, **workload_options), config


def warn_of_length(config: Any, length: int) -> None:
    """Warn if a model has fewer positions than there are tokens."""
    max_context = getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)
    if max_context is not None and length > max_context:
        given = f"{length:,} tokens are more than the model's {max_context:,} positions"
        fix = "plan for fewer, or scale the rope in config.json and raise max_position_embeddings there"
        print_message(f"[bold yellow]warning:[/] {given}, and generate refuses them. Fix: {fix}.")


def print_serving(options: PlanOptions, cluster: Cluster, workload_options: dict[str, Any]) -> None:
    """Print the ways to spread a model's weights and keys. Raise if the tokens fit in none."""
    from attnmesh.hf.model_size import other_layer_counts

    name = options.model or ""
    model, config = model_of(name, workload_options)
    left_out = other_layer_counts(config)
    with Status("pricing"):
        plans = serving_plans(model, cluster)
    _check_fits(plans, model, cluster)
    warn_of_length(config, model.workload.length)
    if not options.as_json:
        console.print(_plans_table(plans, model, cluster))
        console.print(_text(plans, model, cluster, left_out), highlight=False, markup=False)
        console.print(_commands(name, plans[0], cluster), highlight=False, markup=False, soft_wrap=True)
        return
    sizes = {"weights": model.rank_weight_bytes(1, False), "windows": model.window_bytes, "left_out": left_out}
    print_record(options, cluster, sizes | {"ways": [_plan_record(plan) for plan in plans]})


def _mesh(plan: ServingPlan) -> str:
    """Return the text of `--mesh` for a way to spread weights and keys."""
    return str(MeshChoice(plan.shape, 1 if plan.sharding.is_joint else plan.sharding.tp, plan.sharding.is_joint, ""))


def _check_fits(plans: Sequence[ServingPlan], model: ModelSizes, cluster: Cluster) -> None:
    """Raise unless the tokens fit in one way at least."""
    most_tokens = max(plan.tokens for plan in plans)
    length = model.workload.length
    if most_tokens < length:
        least_weights = min(plan.weight_bytes for plan in plans)
        weights = f"{bytes_text(least_weights)} of weights or more on each rank of {bytes_text(cluster.device.memory)}"
        is_split = model.rank_weight_bytes(2, False) < model.rank_weight_bytes(1, False)
        fix = "take fewer tokens, or more hosts" if most_tokens else "take more hosts"
        if not most_tokens and not is_split:
            fix = "take devices with more memory: the model's plan in transformers does not split its weights"
        raise ClusterError(
            "plan for decode", f"at most {most_tokens:,} tokens of each sequence", f"{length:,}, beside {weights}", fix
        )


def _plans_table(plans: Sequence[ServingPlan], model: ModelSizes, cluster: Cluster) -> Table:
    """Return the ways to spread weights and keys as a table."""
    layers = {
        "layers": [_layer_mode(plan) for plan in plans],
        "weights\nread": [bytes_text(plan.read_bytes) for plan in plans],
    }
    columns = {
        "mesh": [_mesh(plan) for plan in plans],
        **(layers if cluster.on_cpus else {"weights\na rank": [bytes_text(plan.weight_bytes) for plan in plans]}),
        "keys\na rank": [bytes_text(plan.key_bytes) for plan in plans],
        "tokens\nthat fit": [f"{plan.tokens:,}" if plan.tokens else "none" for plan in plans],
        "first\ntoken": [
            seconds_text(plan.first_token_seconds) if plan.fits and plan.first_token_seconds else "-" for plan in plans
        ],
        "attention": [seconds_text(plan.attention_plan.seconds) if plan.fits else "-" for plan in plans],
        "a token": [seconds_text(plan.seconds) if plan.fits else "does not fit" for plan in plans],
    }
    caption = MODEL_CAPTION + ON_CPUS * cluster.on_cpus
    return numbered(f"{model.workload.title}; {cluster.title}", columns, ["mesh", "layers"], caption)


MODEL_CAPTION = """\
tp: ranks that split the weights; heads, queries, keys: ranks that divide the keys;
tp=keys: the same ranks do both.
First token: products with the weights at attention's rate, attention, and the all-reduces of tp.
A token: attention, reading the weights once, and the all-reduces of tp. Activations are not counted.
Times are predictions."""

ON_CPUS = """
Layers: shared, each rank computes a part of each layer; whole, each computes all.
Weights read: by a rank for a token. On CPUs its small calls and exchanges count."""


def _layer_mode(plan: ServingPlan) -> str:
    """Return who computes the layers of a step."""
    return "shared" if plan.sharding.layers_shared else "by tp" if plan.sharding.tp > 1 else "whole"


def _sharing_sentence(plans: Sequence[ServingPlan], model: ModelSizes, cluster: Cluster) -> str:
    """Return in a sentence what shared layers save, or why ranks share none."""
    if why := why_not_shared(model, cluster):
        away = over_hosts(model, cluster)
        whole = seconds_text(choose_plan(plans, cluster.world).seconds)
        sockets = (
            "" if away is None else f" By sockets a token would take {seconds_text(away.seconds)}, and not {whole}."
        )
        return f"The ranks do not share layers: {why}.{sockets}"
    joined, apart = (choose_plan(plans, cluster.world, layers_shared=wanted) for wanted in (True, False))
    sizes, times = (
        [show(getattr(plan, name)) for plan in (joined, apart)]
        for show, name in ((bytes_text, "read_bytes"), (seconds_text, "seconds"))
    )
    return (
        f"Where the ranks share layers, each reads {sizes[0]} of weights for a token, and not {sizes[1]}: "
        f"a token takes {times[0]}, and not {times[1]}."
    )


def _text(plans: Sequence[ServingPlan], model: ModelSizes, cluster: Cluster, left_out: dict[str, int]) -> str:
    """Return the best plan in words."""
    best = plans[0]
    work = model.workload
    token, index = (bytes_text(size / work.kept / work.batch) for size in (work.kept_bytes, work.index_bytes))
    index_text = f" and {index} of index keys" if work.selected is not None else ""
    lines = [
        f"{bytes_text(model.rank_weight_bytes(1, False))} of weights; a token of a sequence has {token} of keys and "
        f"values{index_text}.",
        f"Recommended is {_mesh(best)}: of the ways that fit, a token takes least time. A rank holds "
        f"{bytes_text(best.weight_bytes)} of weights and {bytes_text(best.key_bytes)} of keys.",
    ]
    if cluster.on_cpus and cluster.world > 1:
        lines.append(_sharing_sentence(plans, model, cluster))
    if windowed := left_out.get("with windows"):
        window_keys = bytes_text(model.window_bytes)
        lines.append(
            f"Left out is the time of {windowed} layers with windows, which keep {window_keys} of keys on all ranks."
        )
    if recurrent := left_out.get("recurrent"):
        lines.append(f"Left out are {recurrent} recurrent layers, whose states do not grow with the length.")
    longest_plan = max(plans, key=lambda plan: plan.tokens)
    if longest_plan.tokens > best.tokens:
        lines.append(f"Most tokens fit with {_mesh(longest_plan)}: {longest_plan.tokens:,}.")
    return "\n".join(lines)


def _commands(name: str, best: ServingPlan, cluster: Cluster) -> str:
    """Return the commands that generate and serve in the best plan."""
    where = "" if cluster.hosts == 1 else " on each host, where HEAD is the first one"
    generate, serve = (_launch_command(command, name, best, cluster) for command in ("generate", "serve"))
    door = " --host 0.0.0.0" if cluster.hosts > 1 else ""  # else this host alone reaches it
    return (
        f"Type{where}:\n{generate} \\\n    --prompt-file FILE --max-new-tokens 500\nOr serve requests:\n{serve}{door}"
    )


def _launch_command(command: str, name: str, plan: ServingPlan, cluster: Cluster) -> str:
    """Return a command that runs a way; on several hosts, the one to type on each."""
    kv_option = "" if plan.attention_plan.workload.storage is None else f" --kv {plan.attention_plan.workload.storage}"
    start = "attnmesh"
    if plan.ranks > cluster.ranks:
        ranks = f"--nnodes {cluster.hosts} --nproc-per-node {cluster.ranks}"
        restarts = " --max-restarts 3" if command == "serve" else ""
        start = f"torchrun {ranks} --rdzv-backend c10d --rdzv-endpoint HEAD:29500{restarts} \\\n    -m attnmesh"
    model = "MODEL" if name.endswith(".json") else shlex.quote(name)
    mesh = f" --mesh {_mesh(plan)}" if plan.ranks > 1 else ""
    shares = "" if plan.attention_plan.shares is None else f" --shares {','.join(map(str, plan.attention_plan.shares))}"
    return f"{start} {command} --model {model}{mesh}{shares}{kv_option}"


def _plan_record(plan: ServingPlan) -> dict[str, Any]:
    """Return one way as JSON."""
    return {
        "mesh": _mesh(plan),
        "tp": plan.sharding.tp,
        "shared": plan.sharding.is_joint,
        "shape": list(plan.shape),
        "sharing": plan.layer_ranks,
        "weights": plan.weight_bytes,
        "weights_read": plan.read_bytes,
        "keys": plan.key_bytes,
        "tokens": plan.tokens,
        "attention_seconds": plan.attention_plan.seconds,
        "seconds": plan.seconds,
        "parts": dict(plan.parts),
        "first_token_seconds": plan.first_token_seconds,
        "fits": plan.fits,
    }
