"""Mistakes in the call of a model with what `hf.shard_batch` returned, or without it."""

from collections.abc import Callable
from typing import Any

import peft
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    BambaConfig,
    OPTConfig,
    PreTrainedConfig,
    RwkvConfig,
)

import attnmesh as am
import attnmesh.hf as hf
from attnmesh import errors
from tests.mistakes.table import Mistake
from tests.support.models import families
from tests.support.models.families import prompt

IDS = prompt(12, batch=2)
BATCH = {"input_ids": IDS, "labels": IDS}
FORWARD = "forward all that hf.shard_batch returns to the model"
TARGETS = "attnmesh.hf shift_labels: expected those of shard_batch, given others, which may be unshifted"
POSITIONS = "attnmesh.hf position_ids: expected those of shard_batch, given"

Part = dict[str, Any]


def call(
    what: str,
    error: type[Exception],
    says: str,
    fix: str,
    change: Callable[[Part], Part] = lambda part: part,
    make: Callable[[], Any] | None = None,
) -> Mistake:
    """Return a row of a model, a tiny Llama unless `make` is given, that is called with a changed part of a batch."""

    def act(mesh: DeviceMesh) -> Any:
        model = families.model("llama", "attnmesh", num_hidden_layers=1) if make is None else make()
        return model(**change(hf.shard_batch(BATCH, mesh)))

    return Mistake(what, act, error, says, fix)


def without(*names: str) -> Callable[[Part], Part]:
    return lambda part: {name: x for name, x in part.items() if name not in names}


def embedded(part: Part) -> Part:
    model = families.model("llama", "attnmesh", num_hidden_layers=1)
    return {"inputs_embeds": model.get_input_embeddings()(part["input_ids"])}


def with_prompt(part: Part) -> Part:
    embeddings = embedded(part)["inputs_embeds"]
    return {"inputs_embeds": torch.cat((embeddings[:, :3].detach(), embeddings), 1)}


def rows_of(part: Part) -> Part:
    return {name: x[:1] for name, x in part.items() if isinstance(x, Tensor) and x.ndim == 2}


def labels_beside(mesh: DeviceMesh) -> Any:
    part = hf.shard_batch({"input_ids": IDS}, mesh)
    return families.model("llama", "attnmesh")(labels=part["input_ids"], **part)


def cut_labels(mesh: DeviceMesh, labels: Tensor) -> Any:
    return families.model("llama", "attnmesh")(**{**hf.shard_batch(BATCH, mesh), "shift_labels": labels})


def of_two_calls(mesh: DeviceMesh) -> Any:
    part, other = hf.shard_batch(BATCH, mesh), hf.shard_batch(BATCH, mesh, am.Contiguous())
    return families.model("llama", "attnmesh")(**{**part, "input_ids": other["input_ids"]})


def own_count(mesh: DeviceMesh) -> Any:
    part = hf.shard_batch(BATCH, mesh)
    count = int((part["shift_labels"] != -100).sum())
    return families.model("llama", "attnmesh")(**{**part, "num_items_in_batch": count})


def by_hand(mesh: DeviceMesh) -> Any:
    ids, positions = (am.shard(x, mesh, layout=am.Zigzag(), dim=1) for x in (IDS, torch.arange(12)[None]))
    return families.model("llama", "attnmesh")(ids, position_ids=positions)


def changed_weights(name: str) -> Callable[[], Any]:
    """Return what makes a model with a weight of this name that differs between ranks."""

    def make() -> Any:
        model = families.model("llama", "attnmesh")
        with torch.no_grad():
            model.get_submodule(name).weight.mul_(1 + dist.get_rank())
        return model

    return make


def own_weights() -> Any:
    torch.manual_seed(dist.get_rank())
    return AutoModelForCausalLM.from_config(families.CONFIGS["llama"], attn_implementation="attnmesh")


def of_classes() -> Any:
    torch.manual_seed(0)
    config = type(families.CONFIGS["llama"])(**families.SIZES)
    return AutoModelForSequenceClassification.from_config(config, attn_implementation="attnmesh")


def recurrent() -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(
        RwkvConfig(vocab_size=97, hidden_size=16, num_hidden_layers=2, attention_hidden_size=16)
    )


def with_types(mesh: DeviceMesh) -> Any:
    types = torch.ones(2, 12, dtype=torch.long)
    return families.model("llama", "attnmesh")(**hf.shard_batch({"input_ids": IDS, "token_type_ids": types}, mesh))


def frozen() -> Any:
    model = families.model("llama", "attnmesh")
    model.model.layers[0].requires_grad_(dist.get_rank() == 0)
    return model


def joined(mesh: DeviceMesh) -> Any:
    first, second = (hf.shard_batch({"input_ids": prompt(12, seed=seed)}, mesh) for seed in (1, 2))
    return {name: torch.cat((first[name], second[name])) for name in ("input_ids", "attention_mask")}


def stock_generate(mesh: DeviceMesh) -> Any:
    part = hf.shard_batch({"input_ids": IDS}, mesh)
    return families.model("llama", "attnmesh").generate(**part, max_new_tokens=2)


def evaluated_alone(mesh: DeviceMesh) -> Any:
    with torch.set_grad_enabled(mesh.get_rank() == 0):
        return families.model("llama", "attnmesh")(**hf.shard_batch(BATCH, mesh))


def dropping() -> nn.Module:
    return families.model("llama", "attnmesh", attention_dropout=0.1).train()


def adapted(config: peft.PeftConfig) -> Callable[[], Any]:
    return lambda: peft.get_peft_model(families.model("llama", "attnmesh", num_hidden_layers=1), config)


def training(config: PreTrainedConfig) -> Callable[[], Any]:
    return lambda: AutoModelForCausalLM.from_config(config, attn_implementation="attnmesh").train()


SKIPPING = OPTConfig(
    vocab_size=97,
    hidden_size=16,
    ffn_dim=16,
    num_hidden_layers=2,
    num_attention_heads=2,
    word_embed_proj_dim=16,
    layerdrop=0.3,
)
PENALISED = BambaConfig(
    **{name: families.SIZES[name] for name in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")},
    num_attention_heads=4,
    num_key_value_heads=2,
    attn_layer_indices=[1],
    mamba_n_heads=4,
    mamba_d_head=24,
    mamba_n_groups=1,
    mamba_d_state=8,
    z_loss_coefficient=0.5,
)

CASES = [
    call(
        "wrap a model in a module that forwards `input_ids` alone",
        errors.ArgumentError,
        f"{POSITIONS} none",
        FORWARD,
        lambda part: {"input_ids": part["input_ids"]},
    ),
    call(
        "embed `input_ids` in a wrapper that forwards the embeddings alone",
        errors.ArgumentError,
        f"{POSITIONS} none or others",
        FORWARD,
        embedded,
    ),
    call(
        "put embeddings of a prompt before those of a shard",
        errors.MaskError,
        "attnmesh.hf attention_mask: expected those of shard_batch, given another one, or none, for 9 tokens where 6",
        FORWARD,
        with_prompt,
    ),
    call("drop `position_ids`", errors.ArgumentError, f"{POSITIONS} none", FORWARD, without("position_ids")),
    call(
        "pass `position_ids` of the shard's own count",
        errors.ArgumentError,
        f"{POSITIONS} others, which have no place on the mesh",
        FORWARD,
        lambda part: {**part, "position_ids": torch.arange(6)[None]},
    ),
    call(
        "assign whole `position_ids` after `shard_batch`",
        errors.ArgumentError,
        f"{POSITIONS} others, which have no place on the mesh",
        FORWARD,
        lambda part: {**part, "position_ids": torch.arange(12)[None]},
    ),
    call(
        "replace `attention_mask` by one of the shard's own padding",
        errors.MaskError,
        "attnmesh.hf attention_mask: expected those of shard_batch, given another one",
        FORWARD,
        lambda part: {**part, "attention_mask": torch.arange(6).expand(2, -1).lt(4).long()},
    ),
    call(
        "slice rows of what `shard_batch` returned",
        errors.ArgumentError,
        "attnmesh.hf attention_mask: expected all rows of the batch, given some rows",
        "call hf.shard_batch with these rows alone",
        rows_of,
    ),
    Mistake(
        "pass `labels=` to the model, and `input_ids` alone to `shard_batch`",
        labels_beside,
        errors.ArgumentError,
        "attnmesh.hf labels: expected those of shard_batch, given others, which the model would shift inside of this",
        "pass the labels of the whole batch to hf.shard_batch, beside input_ids",
    ),
    Mistake(
        "put a shard of the labels in place of `shift_labels`",
        lambda mesh: cut_labels(mesh, am.shard(IDS, mesh, layout=am.Zigzag(), dim=1)),
        errors.ArgumentError,
        TARGETS,
        "pass the labels of the whole batch to hf.shard_batch",
    ),
    call(
        "put the shard's `input_ids` in place of `shift_labels`",
        errors.ArgumentError,
        TARGETS,
        "pass the labels of the whole batch to hf.shard_batch",
        lambda part: {**part, "shift_labels": part["input_ids"]},
    ),
    Mistake(
        "put whole labels in place of `shift_labels`",
        lambda mesh: cut_labels(mesh, IDS),
        errors.ArgumentError,
        TARGETS,
        "pass the labels of the whole batch to hf.shard_batch",
    ),
    Mistake(
        "join what two calls of `shard_batch` with other layouts returned",
        of_two_calls,
        errors.ArgumentError,
        "attnmesh.hf arguments: expected those of shard_batch, given those of several calls",
        FORWARD,
    ),
    Mistake(
        "pass the number of one rank's labels as the model's `num_items_in_batch`",
        own_count,
        errors.KernelError,
        "attnmesh.hf num_items_in_batch: expected the count of the batch, given the labels of one rank",
        "divide their sum by the batch's num_items_in_batch",
    ),
    call(
        "drop `shift_labels`",
        errors.ArgumentError,
        "attnmesh.hf shift_labels: expected those of shard_batch, given none beside its labels",
        FORWARD,
        without("shift_labels"),
    ),
    call(
        "pass `use_cache=True` beside a shard",
        errors.ArgumentError,
        "attnmesh.hf use_cache: expected use_cache=False, as shard_batch returns it, given True",
        "leave use_cache out",
        lambda part: {**part, "use_cache": True},
    ),
    call(
        "pass `output_attentions=True`",
        errors.KernelError,
        "attnmesh.hf output_attentions: expected outputs without attention weights, given True",
        'call model.set_attn_implementation("eager")',
        lambda part: {**part, "output_attentions": True},
    ),
    Mistake(
        "cut `input_ids` and `position_ids` by hand",
        by_hand,
        errors.LayoutError,
        "attnmesh.hf position_ids: expected positions of a whole sequence, given those of a chunk",
        "pass the whole batch to hf.shard_batch(batch, mesh)",
    ),
    Mistake(
        "call the model with a batch of one's own on several ranks, without `shard_batch`",
        lambda mesh: families.model("llama", "attnmesh")(IDS),
        UserWarning,
        "attnmesh.hf: a model ran without a mesh in a process group of 2 ranks",
        "To share sequences, call hf.generate with mesh=, hf.on_mesh, or the model with hf.shard_batch(batch, mesh)",
    ),
    call(
        "load the model without `attn_implementation`",
        errors.KernelError,
        "attnmesh.hf: expected a model with attn_implementation 'attnmesh', given 'sdpa'",
        'call model.set_attn_implementation("attnmesh")',
        make=lambda: families.model("llama", "sdpa"),
    ),
    call(
        "initialise other weights on each rank",
        errors.MeshError,
        "attnmesh.hf weights: expected the same call on every rank",
        "the same weights",
        make=own_weights,
    ),
    call(
        "change a weight of an MLP on one rank",
        errors.MeshError,
        "model.layers.1.mlp.up_proj.weight",
        "the same weights",
        make=changed_weights("model.layers.1.mlp.up_proj"),
    ),
    call(
        "train with dropout in attention",
        errors.KernelError,
        "attnmesh.hf dropout: expected attention without dropout, given dropout=0.1",
        "load the model with attention_dropout=0",
        make=dropping,
    ),
    call(
        "pass `logits_to_keep=1` beside a shard",
        errors.ArgumentError,
        "attnmesh.hf logits_to_keep: expected logits of all tokens of a shard, given 1",
        "leave it out: the last token of a shard is seldom that of the sequence",
        lambda part: {**part, "logits_to_keep": 1},
    ),
    call(
        "freeze a layer on one rank",
        errors.MeshError,
        "model.layers.0.self_attn.q_proj.weight.requires_grad",
        "the same weights",
        make=frozen,
    ),
    Mistake(
        "join two batches after `shard_batch`",
        joined,
        errors.KernelError,
        "attnmesh.hf attention_mask: expected that of shard_batch as it is, given a call of cat outside of the model",
        "change the batch before hf.shard_batch",
    ),
    Mistake(
        "pass a shard to `model.generate`",
        stock_generate,
        errors.KernelError,
        "attnmesh.hf attention_mask: expected that of shard_batch as it is, given a call of",
        "to generate, call hf.generate with the whole prompt and mesh=",
    ),
    Mistake(
        "call a model under `no_grad` on one rank, with gradients on another",
        evaluated_alone,
        errors.MeshError,
        "attention: expected the same call on every rank",
        "call it alike on all ranks of the mesh",
    ),
    call(
        "balance routers on each shard",
        errors.KernelError,
        "attnmesh.hf output_router_logits: expected no router loss on shards, given True",
        "set config.output_router_logits = False, or train with hf.on_mesh",
        make=lambda: families.model("gpt-oss", "attnmesh", output_router_logits=True),
    ),
    call(
        "pass a shard to a model of classes",
        errors.KernelError,
        "attnmesh.hf: expected a model with outputs of tokens, given LlamaForSequenceClassification",
        "call hf.on_mesh or hf.prepare, which return whole outputs",
        without("labels", "shift_labels", "num_items_in_batch"),
        of_classes,
    ),
    call(
        "train a recurrent model that is not in the list",
        errors.KernelError,
        "attnmesh.hf: expected a model whose layers all call attnmesh for attention, given one in which no layer does",
        "use a family like Llama",
        make=recurrent,
    ),
    Mistake(
        "pass `token_type_ids` to a model of text",
        with_types,
        errors.KernelError,
        "train images: expected a model that merges images",
        "leave token_type_ids and images out",
    ),
    call(
        "train with layers that are skipped at random",
        errors.KernelError,
        "attnmesh.hf layerdrop: expected a model that skips no layers in training, given 0.3",
        "load the model with layerdrop=0",
        make=training(SKIPPING),
    ),
    call(
        "train Bamba with a penalty on its logits",
        errors.KernelError,
        "attnmesh.hf z_loss_coefficient: expected a loss of the labels alone, given 0.5, the weight of a mean over",
        "load the model with z_loss_coefficient=0",
        make=training(PENALISED),
    ),
    call(
        "train PEFT's prefixes or prompts",
        errors.KernelError,
        "attnmesh.hf: expected adapters without virtual tokens, given PrefixTuningConfig",
        "use adapters that change weights, such as LoRA",
        make=adapted(peft.PrefixTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM")),
    ),
    call(
        "train PEFT's `ShadowConfig`",
        errors.KernelError,
        "attnmesh.hf: expected adapters without attention of their own, given ShadowConfig",
        "use adapters that change weights, such as LoRA",
        make=adapted(peft.ShadowConfig(r=2, task_type="CAUSAL_LM")),
    ),
    call(
        "train an adapter that begins at some tokens (aLoRA)",
        errors.KernelError,
        "attnmesh.hf: expected adapters of all tokens, given LoraConfig(alora_invocation_tokens=[7, 8])",
        "leave alora_invocation_tokens out: LoRA then adapts all tokens",
        make=adapted(
            peft.LoraConfig(r=2, target_modules=["q_proj"], alora_invocation_tokens=[7, 8], task_type="CAUSAL_LM")
        ),
    ),
]
