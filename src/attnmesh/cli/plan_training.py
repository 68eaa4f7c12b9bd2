"""`attnmesh plan --model --training`: how many ranks share a sequence, and how many tokens then fit."""

from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from typing import Any

from attnmesh.cli.output import Status, console, numbered
from attnmesh.cli.plan_model import config_of, print_record
from attnmesh.errors import ClusterError
from attnmesh.mesh.cluster import Cluster
from attnmesh.planner.plan import shape_text
from attnmesh.planner.training import WEIGHT_BYTES, Method, TrainedModel
from attnmesh.planner.training import training as ways_to_train
from attnmesh.planner.units import bytes_text, seconds_text
from attnmesh_command.plan_options import PlanOptions


def print_training(options: PlanOptions, machines: Cluster, workload: dict[str, Any]) -> None:
    """Print the ways to share a model's sequences. Raise if the tokens fit in none."""
    from attnmesh.hf.model_size import training_size

    model = training_size(config_of(options.model or ""), options.lora, **workload)
    loss = options.loss or ("fused" if find_spec("trl") else "full")
    method = Method(loss, options.offload, options.ddp or bool(options.rollout), options.rollout)
    price = partial(ways_to_train, cluster=machines, method=method)
    with Status("pricing"):
        ways = price(model)
    best = ways[0]
    length = model.workload.length
    if best.tokens < length:
        longest = replace(model.workload, length=max(1, max(way.tokens for way in ways)))
        most_tokens = max(way.tokens for way in price(replace(model, workload=longest)))
        expected = f"at most {most_tokens:,} tokens of a sequence"
        given = f"{length:,}, beside {bytes_text(best.states)} of weights and optimizer on each rank"
        fix = FEWER if most_tokens else "leave --ddp and --rollout out" if method.ddp else "take more hosts"
        raise ClusterError("plan for training", expected, given, fix)
    if options.as_json:
        records = [way._asdict() | {"plan": shape_text(way.plan.shape), "memory": way.memory} for way in ways]
        sizes = {"parameters": model.parameters, "trained": model.trained, "checkpoint": model.checkpoint_bytes}
        print_record(options, machines, sizes | method._asdict() | {"ways": records})
        return
    inputs = "inputs on\nthe host" if options.offload else "inputs of\nlayers"
    columns = {
        "data x\ncontext": [f"{way.data} x {way.context}" for way in ways],
        "weights,\noptimizer": [bytes_text(way.states) for way in ways],
        inputs: [bytes_text(way.host or way.inputs) for way in ways],
        "one\nlayer": [bytes_text(way.layer) for way in ways],
        "logits": [bytes_text(way.logits) for way in ways],
        "keys of\nrollouts": [bytes_text(way.completions) for way in ways],
        "memory\na rank": [f"{bytes_text(way.memory)}{'!' * (way.tokens < length)}" for way in ways],
        "tokens\nthat fit": [f"{way.tokens:,}" if way.tokens else "none" for way in ways],
        "attention": [seconds_text(way.plan.seconds) for way in ways],
    }
    if not method.rollout:
        del columns["keys of\nrollouts"]
    states_text = f"{ADAPTER if model.adapter else ALL_TRAINED},\n{ON_EACH if method.ddp else SHARDED}"
    caption = f"{states_text}\n{FUSED if loss == 'fused' else FULL}\n{CAPTION}"
    console.print(numbered(f"{model.workload.title}; {machines.title}", columns, ["data x\ncontext"], caption))
    shared = f"{best.context} ranks share a sequence, as {shape_text(best.plan.shape)} (heads x queries x keys)"
    shared = shared if best.context > 1 else "Each rank has sequences of its own"
    lines = [f"{shared}.", f"Sequences at once: {best.data}.", _trained(model)]
    lines += [EXPLAINED] * options.verbose
    console.print("\n".join(lines), highlight=False, markup=False)


def _trained(model: TrainedModel) -> str:
    """Return the weights that are trained, and what is saved of them."""
    kind = "adapter" if model.adapter else "model"
    counts = f"{model.adapter:,} of {model.parameters:,}" if model.adapter else f"all {model.parameters:,}"
    sizes = bytes_text(model.checkpoint_bytes), bytes_text(model.trained * WEIGHT_BYTES)
    return f"Trained: {counts} parameters.\nSaved: checkpoints of {sizes[0]}, the {kind} alone of {sizes[1]}."


EXPLAINED = """\
The first figure has DDP's buckets for gradients. Inputs of layers are what gradient checkpointing keeps, in float32
with DDP. One layer is what is computed again for its backward pass, attention included. Logits have gradients beside
them. Memory is that of the moment that takes most, and has its gradients, the weights that autocast casts or FSDP2
gathers, and what FSDP2 sends: the loss, its gradient, that of the head, the backward pass of the last layer or of the
first one, the gradient of the embedding, or a rollout. With --json each has its bytes.
Attention is the forward and the backward pass of all layers, without the forward pass that checkpointing repeats."""
"""Explanations of the columns, which `-v` shows."""

FEWER = "take fewer tokens, fewer completions of --rollout, or more hosts"

ALL_TRAINED = "Weights, gradients and AdamW in float32"

ADAPTER = "Weights, and gradients and AdamW of the adapter, in float32"

ON_EACH, SHARDED = "whole on each rank (DDP).", "sharded over all ranks (FSDP2)."

FUSED = """\
The loss is computed tile by tile, as in TRL's trainers; of others it is
--loss full. A tile stands beside the head and its gradient in one piece."""

FULL = "The loss is computed from the logits of all tokens; --loss fused is TRL's."

CAPTION = """\
Gradient checkpointing. Memory is an upper bound; ! marks what does not
fit. Attention is that of one sequence. What fits comes first, then what
takes all ranks the least time."""
