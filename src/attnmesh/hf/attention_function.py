"""Attention function registered with transformers, which calls it in every layer.

    a layer                     attends
    of a tower                  with "sdpa", whole on each rank
    of text to images           with "sdpa", this rank's tokens to all features
    in a trace                  by PyTorch's operations, under a mask that is a tensor
    any other                   at positions: on shards, over a cache of shards, or on one device

What is special in a model is asked of the record of its family.
"""

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from attnmesh.core.scaling import Scores
from attnmesh.core.selection import Selection
from attnmesh.hf.attend_by_place import Weighting, attend_with_cache, attend_without_cache
from attnmesh.hf.cache.layer import PendingKV
from attnmesh.hf.family import Family, family_of_layer
from attnmesh.hf.images.cross import attends_to_images
from attnmesh.hf.images.towers import attend_in_tower, in_tower
from attnmesh.hf.latent_states import LatentStates
from attnmesh.hf.layer_checks import check_traced, compare_weights, mask_of_call
from attnmesh.hf.layer_mask import RecognisedMask
from attnmesh.hf.models import SUBJECT
from attnmesh.hf.traced_mask import TracedMask, attend_traced
from attnmesh.hf.transformers_names import sdpa_attention
from attnmesh.kernels.traced import cast_for_autocast, without_autocast


class PassedOptions(NamedTuple):
    """Options as a layer of transformers passes them, beside queries, keys, values and their mask."""

    family: Family
    """The family of the layer's model."""
    scaling: float | None
    softcap: float | None
    bias: Tensor | None
    sinks: Tensor | None
    selection: Any
    """Keys that the layer's indexer has selected; None for all."""
    dropout: float
    window: int | None
    others: dict[str, Any]
    """Arguments that must change nothing."""


def attention_function(
    module: nn.Module,
    query: Tensor,
    key: Tensor | PendingKV,
    value: Tensor | PendingKV,
    attention_mask: RecognisedMask | TracedMask | Tensor | None,
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
    family = family_of_layer(module)
    passed = PassedOptions(
        family=family,
        scaling=scaling,
        softcap=options.pop("softcap", None),
        bias=options.pop("position_bias", None),
        sinks=options.pop("s_aux", None),
        selection=options.pop(family.selection_argument, None),
        dropout=dropout,
        window=sliding_window,
        others=options,
    )
    if isinstance(key, LatentStates) and isinstance(value, LatentStates):
        key = value = PendingKV(key.plain(), value.plain(), key.layer, key.latents)
    if isinstance(attention_mask, TracedMask) and not isinstance(key, PendingKV):
        out = _attend_traced(module, (query, key, value), attention_mask, passed)
    else:
        out = _attend_at_positions(module, query, (key, value), attention_mask, passed)
    return out.transpose(1, 2).contiguous(), None


def _attend_traced(module: nn.Module, tensors: Any, mask: TracedMask, options: PassedOptions) -> Tensor:
    """Return attention of queries, keys and values under a mask that is a tensor, as traces have it."""
    check_traced(module, mask, options.dropout, {**options.others, "position_bias": options.bias})
    visible = mask.visible
    q, k, v = cast_for_autocast(*tensors)
    if options.selection is not None:
        selected = options.family.read_selection(module, options.selection, mask)
        visible = visible & _seen_keys(selected, q.shape[1], k.shape[2])
    scaling = Scores(options.scaling, options.softcap).scaling(SUBJECT, q.shape[-1])
    with without_autocast(q):
        return attend_traced(q, k, v, visible, scaling, options.sinks)


def _attend_at_positions(
    module: nn.Module,
    query: Tensor,
    keys_and_values: Any,
    mask: RecognisedMask | TracedMask | Tensor | None,
    options: PassedOptions,
) -> Tensor:
    """Return attention under a mask of positions: on shards, over a cache of shards, or on one device."""
    family = options.family
    key, value = keys_and_values
    bias, others = options.bias, options.others
    described = mask.recognised() if isinstance(mask, TracedMask) else mask
    if family.adds_bias is None or not family.adds_bias(module):
        others = {**others, "position_bias": bias}  # refused as any unknown argument
    layer_mask = mask_of_call(module, query, key, described, options.dropout, options.window, others)
    selected = layer_mask.selected
    if options.selection is not None:
        selected = family.read_selection(module, options.selection, layer_mask)
    k, v = (key.k, key.v) if isinstance(key, PendingKV) else (key, value)
    q, k, v = cast_for_autocast(query, k, v)  # ropes leave q and k in float32, v is bfloat16
    if family.near_bias is not None:
        bias = family.near_bias(module, bias, layer_mask.sequence)
    if layer_mask.sequence is not None:
        if not layer_mask.sequence.cached:
            compare_weights(module, layer_mask.sequence, query.device)
        if family.temperature is not None:
            q, bias = _scale_by_positions(family.temperature(module, layer_mask.sequence), q, bias)
    weighting = Weighting(layer_mask.mask, Scores(options.scaling, options.softcap, bias), options.sinks, selected)
    with without_autocast(q):
        if not isinstance(key, PendingKV):
            return attend_without_cache(q, k, v, weighting, layer_mask)
        appends_keys = not getattr(module, "is_kv_shared_layer", False)  # a shared layer reads stored ones
        if k is not key.k or v is not key.v or key.latents is not None:  # autocast has cast
            latents = None if key.latents is None else key.latents.to(k.dtype)
            key = replace(key, k=k, v=v, latents=latents)
        out: Tensor = attend_with_cache(q, key, weighting, layer_mask, appends_keys)
    return out


def _scale_by_positions(ratio: Tensor | None, q: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Multiply queries and their bias by a factor for each query, see `Family.temperature`."""
    if ratio is None:
        return q, bias
    ratio = ratio.to(q.device, q.dtype)[:, None]
    return q * ratio, None if bias is None else bias * ratio


def _seen_keys(selected: Selection, heads: int, keys: int) -> Tensor:
    """Return which keys each query selects, (batch, 1 or heads, queries, keys)."""
    indices = selected.indices
    positions = selected.positions(indices, slice(0, indices.shape[-1] * selected.block))
    unpicked = indices.new_zeros(*indices.shape[:3], keys + 1, dtype=torch.bool)
    picked = unpicked.scatter(-1, positions.where((positions >= 0) & (positions < keys), keys), True)[..., :-1]
    return picked if selected.heads == 1 else picked.repeat_interleave(heads // selected.heads, 1)
