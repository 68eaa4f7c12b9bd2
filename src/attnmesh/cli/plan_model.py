"""The option `--model` of `attnmesh plan`: sizes from a configuration, and how weights and keys share the memory."""

from collections.abc import Sequence
from typing import Annotated, Any

import typer
from rich.table import Table

from attnmesh.cli.mesh_option import MeshChoice
from attnmesh.cli.output import Status, command_line, console, numbered, print_json
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


def print_serving(given: dict[str, Any], machines: Cluster, workload: dict[str, Any]) -> None:
    """Print the ways to share a model's weights and keys. Raise if the tokens fit in none."""
    name = given["model"]
    model, left_out = model_of(name, workload)
    with Status("pricing"):
        found = serving(model, machines)
    _check_fits(found, model, machines)
    if not given["as_json"]:
        console.print(_table(found, model, machines))
        console.print(_text(name, found, model, left_out), highlight=False, markup=False)
        return
    command = command_line("attnmesh plan", given)
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
        weights = f"{in_bytes(least)} of weights or more on each rank of {in_bytes(cluster.device.memory)}"
        fix = "take fewer tokens, or more hosts" if most else "take more hosts"
        if 2 * least > model.weights(1, False):
            fix = "take devices with more memory: the model's plan in transformers does not share its weights"
        raise ClusterError(
            "plan for decode", f"at most {most:,} tokens of each sequence", f"{length:,}, beside {weights}", fix
        )


def _table(found: Sequence[Serving], model: Model, cluster: Cluster) -> Table:
    """Return the ways to share weights and keys as a table."""
    columns = {
        "mesh": [_mesh(one) for one in found],
        "weights\na rank": [in_bytes(one.weights) for one in found],
        "keys\na rank": [in_bytes(one.keys) for one in found],
        "tokens\nthat fit": [f"{one.tokens:,}" if one.tokens else "none" for one in found],
        "attention": [in_seconds(one.plan.seconds) for one in found],
        "a token": [in_seconds(one.seconds) for one in found],
    }
    return numbered(f"{model.workload.title}; {cluster.title}", columns, ["mesh"], CAPTION)


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
