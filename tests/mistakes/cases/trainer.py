"""Mistakes with trainers and accelerators on a mesh."""

from importlib import import_module
from typing import Any

import peft
import torch
from datasets import Dataset
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import Trainer, TrainingArguments

import attnmesh.hf as hf
from attnmesh import Zigzag, errors
from tests.mistakes.table import Mistake
from tests.support.models import families
from tests.support.models.families import prompt
from tests.support.training.trainers import collate, examples, launched, settings, tokenizer

IDS = prompt(12, batch=2)
ALORA = peft.LoraConfig(r=2, target_modules=["q_proj"], alora_invocation_tokens=[7, 8], task_type="CAUSAL_LM")


class Wrapped(nn.Module):
    """A head on a model."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = families.model("llama", "attnmesh")


def served(package: str, name: str, note: str) -> Mistake:
    """Return a row of a trainer that is not served."""
    return Mistake(
        f"put `{name}` on a mesh{note}",
        lambda mesh: hf.on_mesh(getattr(import_module(package), name), mesh),
        errors.KernelError,
        f"OnlineDPOTrainer, GKDTrainer, or a subclass of one of them, given trl.experimental.{name}",
        "train with one of these, or in a loop of your own with hf.shard_batch",
    )


def train(mesh: DeviceMesh, attention: str = "attnmesh", **options: Any) -> Any:
    """Train a tiny Llama for a step."""
    with launched():
        given = settings(TrainingArguments, "/nonexistent", max_steps=1, **options)
        rows = {"train_dataset": examples(4), "data_collator": collate}
        trainer: Any = hf.on_mesh(Trainer, mesh)
        return trainer(model=families.model("llama", attention), args=given, **rows).train()


def drawn(mesh: DeviceMesh, reward: Any = len, **options: Any) -> Any:
    """Make a trainer that draws completions."""
    from trl import GRPOConfig, GRPOTrainer

    with launched():
        steps = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 1, "num_generations": 2}
        given = settings(GRPOConfig, "/nonexistent", **steps | options)
        rows: Any = {"train_dataset": Dataset.from_list([{"prompt": "w5 w6"}]), "processing_class": tokenizer()}
        rows["reward_processing_classes"] = [tokenizer()]
        trainer: Any = hf.on_mesh(GRPOTrainer, mesh)
        return trainer(model=families.model("llama", "attnmesh"), args=given, reward_funcs=reward, **rows)


def called(mesh: DeviceMesh, model: Any, **arguments: Any) -> Any:
    """Call a model as a trainer on this mesh does."""
    trainer: Any = hf.on_mesh(Trainer, mesh)
    sharder = trainer._make_sharder(None)
    with sharder.active(True, model):
        return model(**arguments)


def presharded(mesh: DeviceMesh) -> Any:
    part = hf.shard_batch({"input_ids": IDS, "labels": IDS}, mesh)
    return called(mesh, families.model("llama", "attnmesh"), **part)


def prepared(mesh: DeviceMesh) -> Any:
    from accelerate import Accelerator

    with launched():
        return hf.prepare(Accelerator(cpu=True), Wrapped(), mesh)


def prepared_with(mesh: DeviceMesh, config: peft.PeftConfig) -> Any:
    from accelerate import Accelerator

    with launched():
        model = peft.get_peft_model(families.model("llama", "attnmesh"), config)
        return hf.prepare(Accelerator(cpu=True), model, mesh)


def prepared_twice(mesh: DeviceMesh) -> Any:
    from accelerate import Accelerator

    with launched():
        accelerator = Accelerator(cpu=True)
        for layout in ("auto", Zigzag()):
            hf.prepare(accelerator, families.model("llama", "attnmesh"), mesh, layout)


def gathered(mesh: DeviceMesh) -> Any:
    from accelerate import Accelerator

    with launched():
        accelerator = Accelerator(cpu=True)
        hf.prepare(accelerator, families.model("llama", "attnmesh"), mesh)
        return accelerator.gather_for_metrics(["a", "b"])


def parallel(mesh: DeviceMesh) -> Any:
    from accelerate import ParallelismConfig

    return train(mesh, parallelism_config=ParallelismConfig(cp_size=2))


CASES = [
    served("trl.experimental.async_grpo", "AsyncGRPOTrainer", ", an experimental one that draws completions"),
    served("trl.experimental.gold", "GOLDTrainer", ", an experimental subclass of a trainer that is served"),
    Mistake(
        "draw completions of `GRPOTrainer` by vLLM",
        lambda mesh: drawn(mesh, use_vllm=True),
        errors.KernelError,
        "on_mesh use_vllm: expected a trainer without it",
        "leave it out: hf.generate draws completions on the mesh",
    ),
    Mistake(
        "pass a model as a reward to `GRPOTrainer`",
        lambda mesh: drawn(mesh, families.model("llama", "attnmesh")),
        errors.KernelError,
        "on_mesh reward_funcs: expected functions, given LlamaForCausalLM",
        "call the model in a function, which the first rank of a mesh runs",
    ),
    Mistake(
        "cut the completions of a prompt between steps of `GRPOTrainer`",
        lambda mesh: drawn(mesh, num_generations=4),
        errors.ShapeError,
        "on_mesh per_device_train_batch_size: expected a multiple of the 4 generations of a prompt, given 2",
        "raise per_device_train_batch_size, which is per mesh",
    ),
    Mistake(
        "put a module on a mesh that is no trainer",
        lambda mesh: hf.on_mesh(nn.Linear, mesh),
        errors.ArgumentError,
        "on_mesh trainer_class: expected a subclass of transformers.Trainer",
        "pass transformers.Trainer or a subclass of it",
    ),
    Mistake(
        "put a trainer on a mesh twice",
        lambda mesh: hf.on_mesh(hf.on_mesh(Trainer, mesh), mesh),
        errors.ArgumentError,
        "on_mesh trainer_class: expected a trainer without a mesh",
        "call on_mesh once",
    ),
    Mistake(
        "train a model that was loaded without `attn_implementation`",
        lambda mesh: train(mesh, "sdpa"),
        errors.KernelError,
        "on_mesh: expected a model with attn_implementation 'attnmesh', given 'sdpa'",
        'call model.set_attn_implementation("attnmesh")',
    ),
    Mistake(
        "call `shard_batch` before a trainer on a mesh",
        presharded,
        errors.ArgumentError,
        "shard_batch input_ids: expected the whole batch, given what shard_batch has returned",
        "hf.on_mesh and hf.prepare call it themselves",
    ),
    Mistake(
        "pass embeddings to a model of a trainer on a mesh",
        lambda mesh: called(mesh, families.model("llama", "attnmesh"), inputs_embeds=torch.zeros(2, 12, 48)),
        errors.ArgumentError,
        "attnmesh.hf on_mesh inputs_embeds: expected text and images",
        "shard it yourself and call the model with shard_batch",
    ),
    Mistake(
        "pass a module around a model to `hf.prepare`",
        prepared,
        errors.KernelError,
        "on_mesh: expected a model of transformers, or one in PEFT, DDP or a compiler, given Wrapped",
        "pass the model inside, or call it with hf.shard_batch(batch, mesh)",
    ),
    Mistake(
        "prepare two models by one accelerator with two layouts",
        prepared_twice,
        errors.ArgumentError,
        "prepare: expected the mesh, layout and exchange of the accelerator's first model, given others",
        "pass the same ones for each model",
    ),
    Mistake(
        "gather strings by the accelerator of `hf.prepare`",
        gathered,
        errors.KernelError,
        "gather_for_metrics: expected tensors, given list",
        "gather tensors",
    ),
    Mistake(
        "train with `torch_compile=True`",
        lambda mesh: train(mesh, torch_compile=True),
        errors.KernelError,
        "on_mesh torch_compile: expected a model that is not compiled, given True",
        "leave it out",
    ),
    Mistake(
        "train with accelerate's own context parallelism",
        parallel,
        errors.KernelError,
        "on_mesh: expected no ParallelismConfig(cp_size=) beside a mesh, given 2",
        "leave it out: attnmesh shards the sequence",
    ),
    Mistake(
        'pass `shape="1x2x1"`',
        lambda mesh: hf.on_mesh(Trainer, mesh, shape="1x2x1"),
        errors.ArgumentError,
        "on_mesh shape: expected None or \"auto\", given '1x2x1'",
        'pass shape="auto", or a mesh of that shape',
    ),
    Mistake(
        "prepare an adapter that begins at some tokens (aLoRA)",
        lambda mesh: prepared_with(mesh, ALORA),
        errors.KernelError,
        "on_mesh: expected adapters of all tokens, given LoraConfig(alora_invocation_tokens=[7, 8])",
        "leave alora_invocation_tokens out: LoRA then adapts all tokens",
    ),
    Mistake(
        "prepare PEFT's prefixes or prompts",
        lambda mesh: prepared_with(mesh, peft.PrefixTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM")),
        errors.KernelError,
        "on_mesh: expected adapters without virtual tokens, given PrefixTuningConfig",
        "use adapters that change weights, such as LoRA",
    ),
]
