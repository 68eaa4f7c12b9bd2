"""Tensor parallelism for generation: the ranks of a mesh of one axis share the heads and the weights of a model.

Weights are sharded by the model's own plan in transformers. Two things are added to it. Where there are fewer key heads
than ranks, each rank keeps the key head of its query heads. With `output="heads"` the ranks that share the weights are
also those that share the keys: each rank computes queries and keys of all heads, attends to its keys, and gets the sums
of its share of the heads, from which it computes its part of the output projection.
"""

import re
from typing import Any, NamedTuple

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import PreTrainedConfig, PreTrainedModel

from attnmesh.comm.merges import OUTPUTS
from attnmesh.errors import KernelError, MeshError, ModelError, ShapeError, check_choice, short
from attnmesh.guard.agreement import Agreement
from attnmesh.hf.latent_states import latent_widths
from attnmesh.hf.models import check_can_generate, indexed_layer_indices, unwrap
from attnmesh.hf.shared_weights import restore_shared
from attnmesh.hf.transformers_names import TENSOR_PARALLEL, apply_tensor_parallelism
from attnmesh.mesh.shapes import share_evenly
from attnmesh.setup.init_mesh import world_mesh

AXIS = "tp"
"""Name of the axis of tensor parallelism in a mesh of several axes."""

SUBJECT = "tensor_parallel"

SHARDING = ("colwise", "rowwise", "packed_", "embedding_")
"""Beginnings of the names of transformers' styles that give each rank a share of a weight."""

KEY_PROJECTIONS = ("k_proj", "v_proj")


def tensor_parallel(model: Any, mesh: DeviceMesh | None, *, output: str = "replicated") -> Any:
    """Shard the weights of a model over the ranks of a mesh, for generation. Other ranks of the world keep copies.

    Every rank of the world calls it, with its own mesh.

        whole = init_device_mesh("cuda", (4, 2), mesh_dim_names=("keys", "tp"))
        model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="attnmesh")
        model = hf.tensor_parallel(model, whole["tp"])
        tokens = hf.generate(model, ids, mesh=whole["keys"])

    Args:
        model: A causal language model with `attn_implementation="attnmesh"` and whole weights, equal on all ranks.
        mesh: A mesh of one axis, named "tp" if it is a part of a larger one; None for one device.
        output: "replicated" where other ranks share the keys. "heads" where the same ranks do: pass
            `ShardedCache(model.config, mesh, output="heads")` to `generate`.

    Returns:
        The model, changed in place.

    Raises:
        InputError: The ranks do not divide the heads, the model has no plan, or its weights are sharded already.

    >>> from transformers import AutoModelForCausalLM, LlamaConfig
    >>> sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    >>> model = AutoModelForCausalLM.from_config(LlamaConfig(vocab_size=97, **sizes), attn_implementation="attnmesh")
    >>> tensor_parallel(model, None) is model
    True
    """
    inner = unwrap(model)
    with Agreement(world_mesh(), "tensor_parallel", {"output": output}):
        _check_heads(inner, mesh, output)
    if mesh is None or mesh.size() == 1:
        return model
    restore_shared(inner)  # its layers would go on with the whole weights
    plan, cut = _plan_for(inner, mesh.size(), output)
    for attention in cut:
        _keep_own_key_heads(attention, mesh)
    tied = _tied_head(inner)
    apply_tensor_parallelism(inner, mesh, plan)
    if tied is not None:
        inner.get_output_embeddings().weight = inner.get_input_embeddings().weight
    return model


def rank_weights(model: PreTrainedModel, ranks: int, output: str = "replicated") -> int:
    """Return the bytes of weights on the first of `ranks` ranks that share them. Weights may be on the meta device."""
    plan, cut = _plan_for(model, ranks, output) if ranks > 1 else ({}, [])
    key_parts = {f"{attention.name}.{part}": attention.kv_heads for attention in cut for part in KEY_PROJECTIONS}
    total = 0
    for name, weight in model.named_parameters():
        style = plan.get(name, "")
        split = style.startswith(SHARDING) and not ("row" in style and name.endswith("bias"))
        parts = ranks if split else key_parts.get(name.rpartition(".")[0], 1)
        total += -(-weight.numel() // parts) * weight.element_size()
    return total


class _Attention(NamedTuple):
    """An attention module with a projection of its own for queries."""

    name: str
    module: Any
    q_heads: int
    kv_heads: int
    """Key heads; 0 in a layer that reads the keys of another."""
    is_gated: bool
    """True if the output is multiplied by gates of all heads, which come from `q_proj`."""
    is_sharded: bool
    """True if the model's plan gives each rank a share of the query heads."""


def _attentions(model: PreTrainedModel, rules: dict[str, str]) -> list[_Attention]:
    """Return the attention modules of a model."""
    attentions = []
    config = model.config.get_text_config(decoder=True)
    for name, module in model.named_modules():
        q, k, o = (getattr(module, part, None) for part in ("q_proj", "k_proj", "o_proj"))
        if isinstance(q, nn.Linear) and isinstance(o, nn.Linear) and (k is None or isinstance(k, nn.Linear)):
            dim: int = getattr(module, "head_dim", None) or config.hidden_size // config.num_attention_heads
            q_heads = config.num_attention_heads
            kv_heads = 0 if k is None else k.out_features // dim
            is_gated, is_sharded = q.out_features != q_heads * dim, rules.get(f"{name}.q_proj") == "colwise"
            attentions.append(_Attention(name, module, q_heads, kv_heads, is_gated, is_sharded))
    return attentions


def _check_heads(model: Any, device_mesh: DeviceMesh | None, output: str) -> None:
    """Raise unless the model's heads can be shared by the ranks of the mesh."""
    check_choice(f"{SUBJECT} output", output, OUTPUTS, 'use "replicated"')
    if device_mesh is not None and not (isinstance(device_mesh, DeviceMesh) and device_mesh.ndim == 1):
        given = f"{device_mesh.ndim} axes" if isinstance(device_mesh, DeviceMesh) else short(device_mesh)
        raise MeshError(f"{SUBJECT} mesh", "a DeviceMesh of one axis, or None", given, 'slice one axis, as whole["tp"]')
    check_can_generate(model)
    if any(isinstance(weight, DTensor) for weight in model.parameters()):
        raise ModelError(SUBJECT, "whole weights", "sharded ones", "load the model without sharding it")
    if getattr(model, "hf_quantizer", None) is not None:
        raise ModelError(SUBJECT, "weights of floats", "quantized ones", "load the model in bfloat16")
    config = model.config.get_text_config(decoder=True)
    ranks = 1 if device_mesh is None else device_mesh.size()
    if ranks == 1:
        return
    TENSOR_PARALLEL.check()
    if not model.tp_plan:
        fix = "leave tensor parallelism out: give all ranks to the keys axis"
        raise KernelError(SUBJECT, "a model with a plan", f"{config.model_type} without one", fix)
    plan = _plan_of(model)
    name = f"{config.model_type}"
    attentions = _attentions(model, plan)
    if output == "heads":
        is_plain = (
            attentions and latent_widths(config) is None and not any(attention.is_gated for attention in attentions)
        )
        fits = bool(is_plain) and not indexed_layer_indices(config)
        if not fits:
            expected = "layers with q_proj, k_proj and o_proj, without gates or latents or indexers"
            raise KernelError(f"{SUBJECT} output", expected, name, 'pass output="replicated"')
    _check_latents(config, plan, ranks)
    for attention in attentions:
        kv_heads = ranks if output == "heads" else attention.kv_heads or ranks
        fits = attention.q_heads % ranks == 0 and share_evenly(kv_heads, ranks)
        is_whole = fits or (output == "replicated" and not attention.is_sharded)
        if not is_whole:
            heads = f"{attention.q_heads} query and {attention.kv_heads} key heads"
            given = f"{heads} on {ranks} ranks, in {attention.name}"
            raise ShapeError(SUBJECT, "whole heads on every rank", given, "use a number that divides the heads")


def _check_latents(config: PreTrainedConfig, plan: dict[str, str], ranks: int) -> None:
    """Raise unless a plan that shards the projections of latents gives every rank whole heads."""
    if not any(name.endswith("kv_b_proj") and style == "colwise" for name, style in plan.items()):
        return
    if config.is_heterogeneous:
        given, fix = f"{config.model_type}, whose layers differ", "leave it out: give all ranks to the keys axis"
        raise KernelError(SUBJECT, "latents of one width in all layers", given, fix)
    if config.num_attention_heads % ranks:
        given = f"{config.num_attention_heads} heads on {ranks} ranks"
        raise ShapeError(SUBJECT, "whole heads on every rank", given, "use a number that divides the heads")


def _plan_of(model: PreTrainedModel) -> dict[str, str]:
    """Return the style of each part that the model's own plan shards, parameters before their module."""
    TENSOR_PARALLEL.check()
    plan = {}
    for name, module in model.named_modules():
        rule = model.tp_plan.get(_without_numbers(name))
        for weight, _ in module.named_parameters(name, recurse=False):
            plan[weight] = model.tp_plan.get(_without_numbers(weight), rule)
        plan[name] = rule
    return {name: style for name, style in plan.items() if style is not None}


def _without_numbers(name: str) -> str:
    """Return a name with a star for each number of a layer, as plans have it."""
    return re.sub(r"(^|\.)[0-9]+(?=\.|$)", r"\1*", name)


def _plan_for(model: PreTrainedModel, ranks: int, output: str) -> tuple[dict[str, str], list[_Attention]]:
    """Return the style of each part that is sharded, and the layers in which each rank keeps one key head."""
    plan = _plan_of(model)
    cut = []
    for attention in _attentions(model, plan):
        if output == "heads":
            plan = _all_heads(plan, attention)
        elif attention.is_sharded and attention.kv_heads % ranks:
            cut.append(attention)
            names = tuple(f"{attention.name}.{name}" for name in KEY_PROJECTIONS)
            plan = {name: style for name, style in plan.items() if not name.startswith(names)}
    tied = _tied_head(model)
    if tied is not None:
        embedding, head = tied
        unsharded = f"{head}.weight" if plan.get(embedding) == "embedding_rowwise" else head
        plan = {name: style for name, style in plan.items() if not name.startswith(unsharded)}
    return plan, cut


def _all_heads(plan: dict[str, str], attention: _Attention) -> dict[str, str]:
    """Return a plan in which a layer projects queries and keys of all heads, and outputs of a share of the heads."""
    prefix = f"{attention.name}."
    plan = {name: style for name, style in plan.items() if name != f"{prefix}sinks"}
    gathered = {name: "colwise_gather_output" for name in plan if name.startswith(prefix) and plan[name] == "colwise"}
    parameters = [name for name, _ in attention.module.named_parameters() if name.startswith("o_proj.")]
    return plan | gathered | {f"{prefix}{name}": "rowwise" for name in (*parameters, "o_proj")}


def _tied_head(model: PreTrainedModel) -> tuple[str, str] | None:
    """Return the names of the embedding and the head if they have the same weights."""
    embedding = model.get_input_embeddings()
    head = model.get_output_embeddings()
    if head is None or head.weight is not embedding.weight:
        return None
    names = {module: name for name, module in model.named_modules()}
    return names[embedding], names[head]


def _keep_own_key_heads(attention: _Attention, device_mesh: DeviceMesh) -> None:
    """Cut the projections of keys and values down to the head that this rank's query heads see."""
    head = device_mesh.get_local_rank() * attention.kv_heads // device_mesh.size()
    for projection in (getattr(attention.module, name, None) for name in KEY_PROJECTIONS):
        if not isinstance(projection, nn.Linear):
            continue
        projection.out_features //= attention.kv_heads
        for name, weight in list(projection.named_parameters()):
            own_rows = weight.detach().unflatten(0, (attention.kv_heads, -1))[head].clone()
            setattr(projection, name, nn.Parameter(own_rows, requires_grad=weight.requires_grad))


def tp_mesh(model: PreTrainedModel) -> DeviceMesh | None:
    """Return the mesh of the ranks that split this model's weights by tensor parallelism, by whomever it was set up."""
    for weight in model.parameters():
        if isinstance(weight, DTensor):
            names = weight.device_mesh.mesh_dim_names or ()
            if AXIS in names:
                return weight.device_mesh[AXIS]
            if weight.device_mesh.ndim == 1 and not isinstance(model, FSDPModule):
                return weight.device_mesh
    return None
