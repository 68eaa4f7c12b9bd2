"""`attnmesh plan --model --training`: how many ranks share a sequence, and how many tokens then fit."""

from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from typing import Any

from attnmesh.cli.output import Status, console, numbered
from attnmesh.cli.plan_model import config_of, print_record
from attnmesh.errors import ClusterError
from attnmesh.mesh.cluster import Cluster
from attnmesh.planner.plan import by
from attnmesh.planner.training import WEIGHT_BYTES, Method, TrainedModel
from attnmesh.planner.training import training as ways_to_train
from attnmesh.planner.units import in_bytes, in_seconds
from attnmesh_command.plan_options import PlanOptions


def print_training(options: PlanOptions, machines: Cluster, workload: dict[str, Any]) -> None:
    """Print the ways to share a model's sequences. Raise if the tokens fit in none."""
    from attnmesh.hf.model_size import training_size

    model = training_size(config_of(options.model or ""), options.lora, **workload)
    loss = options.loss or ("fused" if find_spec("trl") else "full")
    method = Method(loss, options.offload, options.ddp or bool(options.rollout), options.rollout)
    price = partial(ways_to_train, cluster=machines, method=method)
    with Status("pricing"):
        found = price(model)
    best = found[0]
    length = model.workload.length
    if best.tokens < length:
        longest = replace(model.workload, length=max(1, max(one.tokens for one in found)))
        most = max(one.tokens for one in price(replace(model, workload=longest)))
        expected = f"at most {most:,} tokens of a sequence"
        asked = f"{length:,}, beside {in_bytes(best.states)} of weights and optimizer on each rank"
        fix = FEWER if most else "leave --ddp and --rollout out" if method.ddp else "take more hosts"
        raise ClusterError("plan for training", expected, asked, fix)
    if options.as_json:
        ways = [one._asdict() | {"plan": by(one.plan.shape), "memory": one.memory} for one in found]
        sizes = {"parameters": model.parameters, "trained": model.trained, "checkpoint": model.checkpoint_bytes}
        print_record(options, machines, sizes | method._asdict() | {"ways": ways})
        return
    inputs = "inputs on\nthe host" if options.offload else "inputs of\nlayers"
    columns = {
        "data x\ncontext": [f"{one.data} x {one.context}" for one in found],
        "weights,\noptimizer": [in_bytes(one.states) for one in found],
        inputs: [in_bytes(one.host or one.inputs) for one in found],
        "one\nlayer": [in_bytes(one.layer) for one in found],
        "logits": [in_bytes(one.logits) for one in found],
        "keys of\nrollouts": [in_bytes(one.completions) for one in found],
        "memory\na rank": [f"{in_bytes(one.memory)}{'!' * (one.tokens < length)}" for one in found],
        "tokens\nthat fit": [f"{one.tokens:,}" if one.tokens else "none" for one in found],
        "attention": [in_seconds(one.plan.seconds) for one in found],
    }
    if not method.rollout:
        del columns["keys of\nrollouts"]
    held = f"{ADAPTER if model.adapter else ALL_TRAINED},\n{ON_EACH if method.ddp else SHARDED}"
    caption = f"{held}\n{FUSED if loss == 'fused' else FULL}\n{CAPTION}"
    console.print(numbered(f"{model.workload.title}; {machines.title}", columns, ["data x\ncontext"], caption))
    shared = f"{best.context} ranks share a sequence, as {by(best.plan.shape)} (heads x queries x keys)"
    shared = shared if best.context > 1 else "Each rank has sequences of its own"
    lines = [f"{shared}.", f"Sequences at once: {best.data}.", _trained(model)]
    lines += [EXPLAINED] * options.verbose
    console.print("\n".join(lines), highlight=False, markup=False)


def _trained(model: TrainedModel) -> str:
    """Return the weights that are trained, and what is saved of them."""
    kind = "adapter" if model.adapter else "model"
    counts = f"{model.adapter:,} of {model.parameters:,}" if model.adapter else f"all {model.parameters:,}"
    sizes = in_bytes(model.checkpoint_bytes), in_bytes(model.trained * WEIGHT_BYTES)
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
