"""`attnmesh plan --model --training`: how many ranks share a sequence, and how many tokens then fit."""

from dataclasses import replace
from functools import partial as partial_of
from importlib.util import find_spec
from typing import Any

from attnmesh.cli.output import Status, console, numbered
from attnmesh.cli.plan_model import config_of, print_record
from attnmesh.cost.cluster import Cluster
from attnmesh.errors import ClusterError
from attnmesh.planner.plan import shape_text
from attnmesh.planner.training import WEIGHT_BYTES, TrainerOptions, TrainingPlan, TrainingSizes, training_plans
from attnmesh.planner.units import bytes_text, seconds_text
from attnmesh_command.plan_options import PlanOptions


def print_training(options: PlanOptions, cluster: Cluster, workload_options: dict[str, Any]) -> None:
    """Print the ways to share a model's sequences. Raise if the tokens fit in none."""
    from attnmesh.hf.model_size import training_size

    model = training_size(config_of(options.model or ""), options.lora, **workload_options)
    loss = options.loss or ("fused" if find_spec("trl") else "full")
    trainer = TrainerOptions(loss, options.offload, options.ddp or bool(options.rollout), options.rollout)
    price = partial_of(training_plans, cluster=cluster, trainer=trainer)
    with Status("pricing"):
        ways = price(model)
    best = ways[0]
    length = model.workload.length
    if best.tokens < length:
        longest_workload = replace(model.workload, length=max(1, max(way.tokens for way in ways)))
        most_tokens = max(way.tokens for way in price(replace(model, workload=longest_workload)))
        expected = f"at most {most_tokens:,} tokens of a sequence"
        given = (
            f"{length:,}, beside {bytes_text(best.weight_and_optimizer_bytes)} of weights and optimizer on each rank"
        )
        fix = FEWER if most_tokens else "leave --ddp and --rollout out" if trainer.ddp else "take more hosts"
        raise ClusterError("plan for training", expected, given, fix)
    if options.as_json:
        sizes = {
            "parameters": model.model_parameters,
            "trained": model.trained_parameters,
            "checkpoint": model.checkpoint_bytes,
        }
        print_record(options, cluster, sizes | trainer._asdict() | {"ways": [_plan_record(way) for way in ways]})
        return
    inputs = "inputs on\nthe host" if options.offload else "inputs of\nlayers"
    columns = {
        "data x\ncontext": [f"{way.data} x {way.context}" for way in ways],
        "weights,\noptimizer": [bytes_text(way.weight_and_optimizer_bytes) for way in ways],
        inputs: [bytes_text(way.offloaded_bytes or way.input_bytes) for way in ways],
        "one\nlayer": [bytes_text(way.layer_bytes) for way in ways],
        "logits": [bytes_text(way.logit_bytes) for way in ways],
        "keys of\nrollouts": [bytes_text(way.completion_bytes) for way in ways],
        "memory\na rank": [f"{bytes_text(way.memory)}{'!' * (way.tokens < length)}" for way in ways],
        "tokens\nthat fit": [f"{way.tokens:,}" if way.tokens else "none" for way in ways],
        "attention": [seconds_text(way.attention_plan.seconds) for way in ways],
    }
    if not trainer.rollout:
        del columns["keys of\nrollouts"]
    states_text = f"{ADAPTER if model.adapter_parameters else ALL_TRAINED},\n{ON_EACH if trainer.ddp else SHARDED}"
    caption = f"{states_text}\n{FUSED if loss == 'fused' else FULL_LOSS}\n{TRAINING_CAPTION}"
    console.print(numbered(f"{model.workload.title}; {cluster.title}", columns, ["data x\ncontext"], caption))
    shared = (
        f"{best.context} ranks share a sequence, as {shape_text(best.attention_plan.shape)} (heads x queries x keys)"
    )
    shared = shared if best.context > 1 else "Each rank has sequences of its own"
    lines = [f"{shared}.", f"Sequences at once: {best.data}.", _weights_sentence(model)]
    lines += [TRAINING_COLUMNS] * options.verbose
    console.print("\n".join(lines), highlight=False, markup=False)


def _plan_record(plan: TrainingPlan) -> dict[str, Any]:
    """Return one way as JSON."""
    return {
        "data": plan.data,
        "context": plan.context,
        "plan": shape_text(plan.attention_plan.shape),
        "states": plan.weight_and_optimizer_bytes,
        "gradients": plan.gradient_bytes,
        "inputs": plan.input_bytes,
        "layer": plan.layer_bytes,
        "logits": plan.logit_bytes,
        "host": plan.offloaded_bytes,
        "completions": plan.completion_bytes,
        "tokens": plan.tokens,
        "moments": {moment.name: moment.memory for moment in plan.moments},
        "memory": plan.memory,
    }


def _weights_sentence(model: TrainingSizes) -> str:
    """Return the weights that are trained, and what is saved of them."""
    kind = "adapter" if model.adapter_parameters else "model"
    counts = (
        f"{model.adapter_parameters:,} of {model.model_parameters:,}"
        if model.adapter_parameters
        else f"all {model.model_parameters:,}"
    )
    sizes = bytes_text(model.checkpoint_bytes), bytes_text(model.trained_parameters * WEIGHT_BYTES)
    return f"Trained: {counts} parameters.\nSaved: checkpoints of {sizes[0]}, the {kind} alone of {sizes[1]}."


TRAINING_COLUMNS = """\
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

FULL_LOSS = "The loss is computed from the logits of all tokens; --loss fused is TRL's."

TRAINING_CAPTION = """\
Gradient checkpointing. Memory is an upper bound; ! marks what does not
fit. Attention is that of one sequence. What fits comes first, then what
takes all ranks the least time."""
