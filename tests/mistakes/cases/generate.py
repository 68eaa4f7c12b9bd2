"""Mistakes in generation on a mesh."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from transformers import DynamicCache

import attnmesh as am
import attnmesh.hf as hf
from attnmesh import errors
from tests.mistakes.table import Mistake
from tests.support.models import families
from tests.support.models.families import prompt

IDS = prompt(12)


def row(
    what: str, error: type[Exception], says: str, fix: str, ids: Callable[[], Any] = lambda: IDS, **options: Any
) -> Mistake:
    """Return a row of a call of `generate`."""
    attention = options.pop("attention", "attnmesh")

    def act(mesh: DeviceMesh) -> Any:
        return hf.generate(families.model("llama", attention), ids(), mesh=mesh, max_new_tokens=2, **options)

    return Mistake(what, act, error, says, fix)


def in_training(mesh: DeviceMesh) -> Any:
    model = families.model("llama", "attnmesh").train()
    model.gradient_checkpointing_enable()
    return hf.generate(model, IDS, mesh=mesh, max_new_tokens=2)


CASES = [
    row(
        "generate with a model that was loaded without `attn_implementation`",
        errors.KernelError,
        "generate: expected a model with attn_implementation 'attnmesh', given 'sdpa'",
        'call model.set_attn_implementation("attnmesh")',
        attention="sdpa",
    ),
    row(
        "give each rank a prompt of its own",
        errors.MeshError,
        "generate: expected the same call on every rank",
        "call it alike on all ranks of the mesh, with the same inputs",
        lambda: prompt(12, seed=dist.get_rank()),
    ),
    row(
        "pad a prompt on the right",
        errors.MaskError,
        "generate attention_mask: expected no padding at the end of a sequence",
        "set the tokenizer's padding_side to 'left'",
        attention_mask=(torch.arange(12) < 9)[None].long(),
    ),
    row(
        "pass text",
        errors.DtypeError,
        "generate input_ids: expected int64 token ids (batch, length), given str",
        'pass tokenizer(text, return_tensors="pt")["input_ids"]',
        lambda: "Once upon a time",
    ),
    row(
        "pass `output_attentions=True` to generate",
        errors.ArgumentError,
        "generate: expected options that work on a mesh, given output_attentions=True",
        "leave it out: no rank has all attention weights",
        output_attentions=True,
        return_dict_in_generate=True,
    ),
    row(
        "pass an option that does not exist",
        errors.ArgumentError,
        "generate: expected options of transformers' generation, given temprature=0.5",
        "write temperature=",
        temprature=0.5,
    ),
    row(
        "stop by the clock with `max_time=`",
        errors.ArgumentError,
        "generate: expected options that work on a mesh, given max_time=1.0",
        "pass max_new_tokens: the clocks of ranks differ",
        max_time=1.0,
    ),
    row(
        "pass a `DynamicCache` of transformers",
        errors.ArgumentError,
        "generate: expected options that work on a mesh, given past_key_values=DynamicCache",
        "pass a ShardedCache as cache=",
        past_key_values=DynamicCache(),
    ),
    Mistake(
        "cut a prompt before `hf.generate`",
        lambda mesh: hf.generate(
            families.model("llama", "attnmesh"), am.shard(IDS, mesh, layout=am.Zigzag(), dim=1), mesh=mesh
        ),
        errors.MeshError,
        "generate: expected the same call on every rank",
        "with the same inputs",
    ),
    Mistake(
        "generate in training with gradient checkpointing",
        in_training,
        errors.KernelError,
        "generate: expected a model that uses its cache, given one in training with gradient checkpointing",
        "call model.eval()",
    ),
    Mistake(
        "generate without `mesh=` on several ranks",
        lambda mesh: hf.generate(families.model("llama", "attnmesh"), IDS, max_new_tokens=2),
        UserWarning,
        "generate: no mesh= in a process group of 2 ranks",
        "Pass mesh= or a cache to shard them over the ranks",
    ),
]
