"""The option `--model` of `attnmesh plan`: sizes from a configuration, and how weights and keys share the memory."""

import shlex
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table

from attnmesh.cli.mesh_option import MeshChoice
from attnmesh.cli.output import console, print_json, progress, titled
from attnmesh.errors import ArgumentError, ClusterError
from attnmesh.planner.cluster import Cluster
from attnmesh.planner.plan import in_bytes, in_seconds
from attnmesh.planner.serving import Model, Serving, serving

ModelOption = Annotated[
    str | None,
    typer.Option(
        help="Heads, layers and widths of this model: a folder, a config.json, a name on the hub. With --decode also "
        "its weights, and how many tokens fit beside them."
    ),
]


def check_alone(given: dict[str, Any], expected: str = "sizes of the model alone", beside: str = "--model") -> None:
    """Raise if options are given that do not go with a model, or with the option `beside`."""
    for option, value in given.items():
        if value not in (None, []) and value is not False:  # `--window 0` is given
            raise ArgumentError(option, expected, repr(value), f"leave {option} or {beside} out")


def model_of(name: str, workload: dict[str, Any]) -> tuple[Model, dict[str, int]]:
    """Return the sizes of a model, and its layers that they leave out."""
    from transformers.utils import logging

    from attnmesh.hf.load import locate, open_config
    from attnmesh.hf.model_size import model_size, other_layers

    logging.set_verbosity_error()
    config = open_config(locate(name))
    return model_size(config, **workload), other_layers(config)


def print_serving(cluster: str, name: str, machines: Cluster, workload: dict[str, Any], *, as_json: bool) -> None:
    """Print the ways to share a model's weights and keys. Raise if the tokens fit in none."""
    model, left_out = model_of(name, workload)
    with progress.status("pricing"):
        found = serving(model, machines)
    _check_fits(found, model, machines)
    if not as_json:
        console.print(_table(found, model, machines))
        console.print(_text(name, found, model, left_out), highlight=False, markup=False)
        return
    work, counts = model.workload, {"batch": model.workload.batch, "q-len": model.workload.q_len}
    command = f"attnmesh plan --cluster {shlex.quote(cluster)} --model {shlex.quote(name)} --decode"
    command += f" --length {work.length} --dtype {work.dtype}"
    command += "".join(f" --{option} {count}" for option, count in counts.items() if count not in (None, 1))
    sizes = {"weights": model.weights(1, False), "windows": model.windows, "left_out": left_out}
    ways = [_record(one) for one in found]
    print_json({"command": command, "cluster": machines.record(), **sizes, "ways": ways})


def _mesh(one: Serving) -> str:
    """Return the text of `--mesh` for a way to share weights and keys."""
    return str(MeshChoice(one.plan.shape, 1 if one.is_shared else one.tp, one.is_shared, ""))


def _check_fits(found: Sequence[Serving], model: Model, cluster: Cluster) -> None:
    """Raise unless the tokens fit in one way at least."""
    most, length = max(one.tokens for one in found), model.workload.length
    if most < length:
        least = min(one.weights for one in found)
        given = (
            f"{length:,}, beside {in_bytes(least)} of weights or more on each rank of {in_bytes(cluster.device.memory)}"
        )
        fix = "take fewer tokens, or more hosts" if most else "take more hosts"
        if 2 * least > model.weights(1, False):
            fix = "take devices with more memory: the model's plan in transformers does not share its weights"
        raise ClusterError("plan for decode", f"at most {most:,} tokens of each sequence", given, fix)


def _table(found: Sequence[Serving], model: Model, cluster: Cluster) -> Table:
    """Return the ways to share weights and keys as a table."""
    table = titled(f"{model.workload.title}; {cluster.title}", "")
    table.box, table.padding = SIMPLE_HEAD, (0, 0, 0, 0)
    table.add_column("mesh", no_wrap=True)
    for name in ("weights\na rank", "keys\na rank", "tokens\nthat fit", "attention", "a token"):
        table.add_column(name, justify="right", no_wrap=True)
    for number, one in enumerate(found, 1):
        fits = f"{one.tokens:,}" if one.tokens else "none"
        times = in_seconds(one.plan.seconds), in_seconds(one.seconds)
        table.add_row(str(number), _mesh(one), in_bytes(one.weights), in_bytes(one.keys), fits, *times)
    table.caption, table.caption_justify = CAPTION, "left"
    return table


CAPTION = """\
tp: ranks that share the weights; heads, keys: ranks that share the keys; tp=keys: the same ranks share both.
A token: attention, reading the weights once, and the all-reduces of tp. Activations are not counted."""


def _text(name: str, found: Sequence[Serving], model: Model, left_out: dict[str, int]) -> str:
    """Return the best way in words, and the command that runs it."""
    best, work = found[0], model.workload
    token = in_bytes(work.kept_bytes / work.kept / work.batch)
    lines = [
        f"{in_bytes(model.weights(1, False))} of weights; a token of a sequence has {token} of keys and values.",
        f"{_mesh(best)}: a rank holds {in_bytes(best.weights)} of weights and {in_bytes(best.keys)} of keys; "
        f"{best.tokens:,} tokens of each sequence fit.",
    ]
    if windowed := left_out.get("with windows"):
        kept = in_bytes(model.windows)
        lines.append(f"Left out is the time of {windowed} layers with windows, which keep {kept} of keys on all ranks.")
    if recurrent := left_out.get("recurrent"):
        lines.append(f"Left out are {recurrent} recurrent layers, whose states do not grow with the length.")
    most = max(found, key=lambda one: one.tokens)
    if most.tokens > best.tokens:
        lines.append(f"Most tokens fit with {_mesh(most)}: {most.tokens:,}.")
    if not name.endswith(".json"):
        lines.append(f"attnmesh generate --model {name} --mesh {_mesh(best)}")
    return "\n".join(lines)


def _record(one: Serving) -> dict[str, Any]:
    """Return one way as JSON."""
    return {
        "mesh": _mesh(one),
        "tp": one.tp,
        "shared": one.is_shared,
        "shape": list(one.plan.shape),
        "weights": one.weights,
        "keys": one.keys,
        "tokens": one.tokens,
        "attention_seconds": one.plan.seconds,
        "seconds": one.seconds,
    }
