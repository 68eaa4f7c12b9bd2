"""Attention function registered with transformers, which calls it in every layer.

A call is one of four: training on shards, sharded prefill, decoding, or ordinary attention on one device. What is
special in a model is asked of the record of its family.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from attnmesh.core.scaling import Scores
from attnmesh.core.selection import Selection
from attnmesh.hf.attend_layer import LayerArguments, attend_cached, attend_new
from attnmesh.hf.cache.layer import PendingKV
from attnmesh.hf.families.family import Family, family_of_layer
from attnmesh.hf.images.cross import attends_to_images
from attnmesh.hf.images.towers import attend_in_tower, in_tower
from attnmesh.hf.latent_states import LatentStates
from attnmesh.hf.layer_checks import check_same_weights, checked_mask
from attnmesh.hf.layer_mask import MaskSpec
from attnmesh.hf.models import SUBJECT
from attnmesh.hf.shards import Shards
from attnmesh.hf.traced_mask import TracedMask, attend_traced
from attnmesh.hf.transformers_names import sdpa_attention
from attnmesh.kernels.traced import autocast, without_autocast

ARGUMENTS = ("s_aux", "softcap", "position_bias")
"""Further arguments of layers that change their attention, as transformers names them."""


def attention_function(
    module: nn.Module,
    query: Tensor,
    key: Tensor | PendingKV,
    value: Tensor | PendingKV,
    attention_mask: MaskSpec | TracedMask | Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Return the output, (batch, length, heads, dim), and None for the weights."""
    if in_tower(getattr(module, "config", None)):
        options |= {"scaling": scaling, "dropout": dropout}
        return attend_in_tower(module, query, key, value, attention_mask, **options)  # type: ignore[no-any-return]
    if attends_to_images(module):  # this rank's tokens to all features: the mask has a row for each of these tokens
        images = {"is_causal": False, "scaling": scaling, "dropout": dropout}
        return sdpa_attention(module, query, key, value, attention_mask, **images)  # type: ignore[no-any-return]
    if isinstance(key, LatentStates) and isinstance(value, LatentStates):
        key = value = PendingKV(key.plain(), value.plain(), key.layer, key.latents)
    if isinstance(attention_mask, TracedMask) and isinstance(key, PendingKV):
        attention_mask = attention_mask.spec()
    family = family_of_layer(module)
    arguments = {name: options.pop(name) for name in (*ARGUMENTS, family.selection_argument) if name in options}
    if isinstance(attention_mask, TracedMask) or family.adds_bias is None or not family.adds_bias(module):
        options["position_bias"] = arguments.get("position_bias")  # which is refused
    spec = checked_mask(module, query, key, attention_mask, dropout, sliding_window, options)
    selected = spec.selected if isinstance(spec, MaskSpec) else None
    if (selection := arguments.get(family.selection_argument)) is not None:
        selected = family.read_selection(module, selection, spec)
    k, v = (key.k, key.v) if isinstance(key, PendingKV) else (key, value)
    q, k, v = autocast(query, k, v)  # type: ignore[arg-type] # ropes leave q and k in float32, v is bfloat16
    sinks, softcap = arguments.get("s_aux"), arguments.get("softcap")
    if isinstance(spec, TracedMask):
        with without_autocast(q):
            visible = spec.visible if selected is None else spec.visible & _picked(selected, q.shape[1], k.shape[2])
            out = attend_traced(q, k, v, visible, Scores(scaling, softcap).scaling(SUBJECT, q.shape[-1]), sinks)
        return out.transpose(1, 2).contiguous(), None
    bias = arguments.get("position_bias")
    if family.near_bias is not None:
        bias = family.near_bias(module, bias, spec.shards)
    if spec.shards is not None:
        if not spec.shards.cached:
            check_same_weights(module, spec.shards, query.device)
        q, bias = _tempered(family, module, spec.shards, q, bias)
    layer_arguments = LayerArguments(spec.mask, Scores(scaling, softcap, bias), sinks, selected)
    with without_autocast(q):
        if isinstance(key, PendingKV):
            stores_keys = not getattr(module, "is_kv_shared_layer", False)  # else an earlier layer has stored the keys
            if k is not key.k or v is not key.v or key.latents is not None:  # else autocast has cast nothing
                latents = None if key.latents is None else key.latents.to(k.dtype)
                key = replace(key, k=k, v=v, latents=latents)
            out = attend_cached(q, key, layer_arguments, spec, stores_keys)
        else:
            out = attend_new(q, k, v, layer_arguments, spec)
    return out.transpose(1, 2).contiguous(), None


def _tempered(
    family: Family, module: nn.Module, shards: Shards, q: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Return queries and their bias with the temperature of their positions, which layers count as in a run."""
    ratio = None if family.temperature is None else family.temperature(module, shards)
    if ratio is None:
        return q, bias
    ratio = ratio.to(q.device, q.dtype)[:, None]
    return q * ratio, None if bias is None else bias * ratio


def _picked(selected: Selection, heads: int, keys: int) -> Tensor:
    """Return which keys each query selects, (batch, 1 or heads, queries, keys)."""
    indices = selected.indices
    positions = selected.positions(indices, slice(0, indices.shape[-1] * selected.block))
    unpicked = indices.new_zeros(*indices.shape[:3], keys + 1, dtype=torch.bool)
    picked = unpicked.scatter(-1, positions.where((positions >= 0) & (positions < keys), keys), True)[..., :-1]
    return picked if selected.heads == 1 else picked.repeat_interleave(heads // selected.heads, 1)
