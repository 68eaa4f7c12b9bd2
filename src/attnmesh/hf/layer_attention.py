"""Attention function registered with transformers, which calls it in every layer.

A call is one of four: training on shards, sharded prefill, decoding, or ordinary attention on one device.
"""

from dataclasses import replace
from functools import partial
from math import lcm
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from attnmesh.cache.cache import KVCache
from attnmesh.core.logits import Logits, check_scale, with_distance_bias
from attnmesh.core.mask import Mask
from attnmesh.core.selection import Selection
from attnmesh.core.visible import Visible
from attnmesh.decoding.decode_shard import decode_shard
from attnmesh.errors import InputError, MaskError, require
from attnmesh.hf.cache.layer import PendingKV, store_shard
from attnmesh.hf.images.cross import attends_to_images
from attnmesh.hf.images.towers import attend_in_tower, in_tower
from attnmesh.hf.latent_states import LatentStates
from attnmesh.hf.layer_checks import check_cached_padding, check_same_weights, checked_mask
from attnmesh.hf.layer_mask import ONE_PROMPT, SAME_PLACES, MaskSpec, check_covers
from attnmesh.hf.models import SUBJECT
from attnmesh.hf.relative import near_bias
from attnmesh.hf.shards import Shards
from attnmesh.hf.sparse.key_blocks import selected_blocks
from attnmesh.hf.traced_mask import TracedMask, attend_traced
from attnmesh.hf.transformers_names import is_relative, sdpa_attention
from attnmesh.kernels.local_op import run_attend
from attnmesh.kernels.traced import autocast, without_autocast
from attnmesh.mesh.axes import Mesh
from attnmesh.mesh_attention.attention import attend_shards, attention
from attnmesh.mesh_attention.call import Call, Options


class LayerCall(NamedTuple):
    """Arguments of a layer's attention besides queries, keys and values."""

    mask: Mask
    scale: float | None
    sinks: Tensor | None
    softcap: float | None
    selected: Selection | None
    distance_bias: Tensor | None = None


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
    s_aux: Tensor | None = None,
    softcap: float | None = None,
    indices: Tensor | None = None,
    block_indices: Any = None,
    position_bias: Tensor | None = None,
    **more: Any,
) -> tuple[Tensor, None]:
    """Return the output, (batch, length, heads, dim), and None for the weights."""
    if in_tower(getattr(module, "config", None)):
        more |= {"scaling": scaling, "dropout": dropout, "softcap": softcap}
        return attend_in_tower(module, query, key, value, attention_mask, **more)  # type: ignore[no-any-return]
    if attends_to_images(module):  # this rank's tokens to all features: the mask has a row for each of these tokens
        images = {"is_causal": False, "scaling": scaling, "dropout": dropout}
        return sdpa_attention(module, query, key, value, attention_mask, **images)  # type: ignore[no-any-return]
    if isinstance(key, LatentStates) and isinstance(value, LatentStates):
        key = value = PendingKV(key.plain(), value.plain(), key.layer, key.latents)
    if isinstance(attention_mask, TracedMask) and isinstance(key, PendingKV):
        attention_mask = attention_mask.spec()
    traced = isinstance(attention_mask, TracedMask)
    if traced or not is_relative(getattr(module, "rel_logits_proj", None)):
        more["position_bias"] = position_bias  # which is refused
    spec = checked_mask(module, query, key, attention_mask, dropout, sliding_window, more)
    selected = spec.selected if isinstance(spec, MaskSpec) else None
    if indices is not None:
        selected = Selection(indices[:, None])
    elif block_indices is not None:
        selected = selected_blocks(module, block_indices, spec)
    k, v = (key.k, key.v) if isinstance(key, PendingKV) else (key, value)
    q, k, v = autocast(query, k, v)  # type: ignore[arg-type] # ropes leave q and k in float32, v is bfloat16
    if isinstance(spec, TracedMask):
        with without_autocast(q):
            visible = spec.visible if selected is None else spec.visible & _picked(selected, q.shape[1], k.shape[2])
            out = attend_traced(q, k, v, visible, Logits.of(SUBJECT, scaling, softcap, q.shape[-1]), s_aux)
        return out.transpose(1, 2).contiguous(), None
    if spec.shards is not None and not spec.shards.cached:
        check_same_weights(module, spec.shards, query.device)
    layer = LayerCall(spec.mask, scaling, s_aux, softcap, selected, near_bias(module, position_bias, spec.shards))
    if spec.shards is not None and (ratio := _ratio_by_position(module, spec.shards, q)) is not None:
        bias = layer.distance_bias
        q, layer = q * ratio, layer._replace(distance_bias=None if bias is None else bias * ratio)
    with without_autocast(q):
        if isinstance(key, PendingKV):
            is_new = not getattr(module, "is_kv_shared_layer", False)  # else an earlier layer has stored the keys
            latents = None if key.latents is None else key.latents.to(k.dtype)
            out = _attend_cached(q, replace(key, k=k, v=v, latents=latents), layer, spec, is_new)
        else:
            out = _attend_new(q, k, v, layer, spec)
    return out.transpose(1, 2).contiguous(), None


def _attend_new(q: Tensor, k: Tensor, v: Tensor, layer: LayerCall, spec: MaskSpec) -> Tensor:
    """Return attention without a `ShardedCache`, a sequence at a time if their masks differ."""
    if not spec.rows:
        shards = spec.shards
        return _attend_local(q, k, v, layer, spec) if shards is None else _attend_shards(q, k, v, layer, shards)
    outs = []
    for number, mask in enumerate(spec.rows):
        row = slice(number, number + 1)
        padding, left = (None if x is None else x[row] for x in (spec.token_mask, spec.left_padding))
        one = replace(spec, mask=mask, rows=(), token_mask=padding, left_padding=left)
        outs.append(_attend_new(q[row], k[row], v[row], layer._replace(mask=mask), one))
    return torch.cat(outs)


def _picked(selected: Selection, heads: int, keys: int) -> Tensor:
    """Return which keys each query selects, (batch, 1 or heads, queries, keys)."""
    indices = selected.indices
    found = selected.positions(indices, slice(0, indices.shape[-1] * selected.block))
    none = indices.new_zeros(*indices.shape[:3], keys + 1, dtype=torch.bool)
    picked = none.scatter(-1, found.where((found >= 0) & (found < keys), keys), True)[..., :-1]
    return picked if selected.heads == 1 else picked.repeat_interleave(heads // selected.heads, 1)


def _attend_cached(q: Tensor, pending: PendingKV, layer: LayerCall, spec: MaskSpec, is_new: bool) -> Tensor:
    """Return attention with a `ShardedCache`, which stores new keys and values."""
    given = "sequences with images in other places"
    require(not spec.rows, MaskError, "attention mask", SAME_PLACES, given, ONE_PROMPT)
    if spec.discarded:
        return q.new_zeros(len(q), q.shape[1] // pending.layer.cache.shares, q.shape[2], pending.v.shape[3])
    if spec.shards is not None:
        return _prefill(q, pending, layer, spec.shards, is_new)
    kv = _store(pending, layer.mask, spec, q.shape[2]) if is_new else pending.layer.cached
    if kv.sizes.storage is not None and kv.length == pending.k.shape[2] and spec.token_mask is None:
        # As in a sharded prefill, the first tokens attend each other before their keys are rounded.
        out = _attend_local(q, pending.k, pending.v, layer, spec)
        for axis in (kv.mesh.heads, kv.tokens) if pending.layer.cache.shares > 1 else ():
            out = out[:, axis.share_of(out.shape[1])]
        return out
    return _attend_stored(q, pending, kv, layer, None)


def _attend_stored(q: Tensor, pending: PendingKV, kv: KVCache, layer: LayerCall, shards: Shards | None) -> Tensor:
    """Return attention of the last tokens, or of this rank's share of them, over all that are cached.

    Queries of latents are absorbed.
    """
    latents, cache, further = pending.projected_latents, pending.layer.cache, pending.layer.further
    if latents is not None:
        layer = layer._replace(scale=check_scale(SUBJECT, layer.scale, q.shape[-1]))
        q = latents.projection.absorb(q)
    if shards is None:
        out: Tensor = cache.attend(q, kv, partial=further(q, layer.scale), **layer._asdict())
    else:
        how = {"kernel": cache.kernel, "further": partial(further, scale=layer.scale), **layer._asdict()}
        out = decode_shard(q, kv, shards.layout, shards.length, **how)
    return out if latents is None else latents.projection.project(out)


def _ratio_by_position(module: nn.Module, shards: Shards, q: Tensor) -> Tensor | None:
    """Return what queries lack of the temperature of their positions, (tokens, 1); None for layers without one.

    Llama 4 and Inkling count a shard's tokens as if they were a run.
    """
    layer: Any = module
    positions = shards.positions()
    if getattr(module, "attn_temperature_tuning", False) and not getattr(module, "use_rope", True):
        positions = positions - shards.documents.bounds(positions)[0]  # in each token's document

        def temperature(positions: Tensor) -> Any:
            return torch.log1p(torch.floor((positions + 1.0) / layer.floor_scale)) * layer.attn_scale + 1.0
    elif is_relative(getattr(module, "rel_logits_proj", None)) and not layer.is_sliding:
        if (floor := layer.config.log_scaling_n_floor) is None:
            return None

        def temperature(positions: Tensor) -> Any:
            return 1.0 + layer.config.log_scaling_alpha * torch.log(((positions + 1.0) / floor).clamp(min=1.0))
    else:
        return None
    applied = shards.start + torch.arange(q.shape[2])
    ratio: Tensor = temperature(positions).double() / temperature(applied).double()  # of numbers in float32, as stock
    return ratio.to(q.device, q.dtype)[:, None]


_attend_outside_graphs = torch.compiler.disable(attention)
"""`attention` for selected keys. On several ranks it is refused inside a graph."""


def _attend_shards(q: Tensor, k: Tensor, v: Tensor, layer: LayerCall, shards: Shards) -> Tensor:
    """Return attention of this rank's tokens to the tokens of all ranks, with gradients."""
    kind, length = layer._replace(mask=shards.mask_of(layer.mask))._asdict(), shards.length
    attend: Any = attention if layer.selected is None else _attend_outside_graphs
    out: Tensor = attend(q, k, v, mesh=shards.mesh, layout=shards.layout, length=length, key_length=length, **kind)
    return out


def _prefill(q: Tensor, pending: PendingKV, layer: LayerCall, shards: Shards, is_new: bool) -> Tensor:
    """Return attention of this rank's tokens of a prompt. Each rank stores the keys that it computed."""
    cache = pending.layer.cache
    kv = pending.layer.reserve(pending, shards.length, layer.mask) if is_new else pending.layer.cached
    if not shards.has_prefix:
        how = cache.exchange, cache.kernel, layer.scale, layer.softcap, shards.length, shards.length, None
        options = Options(shards.mask_of(layer.mask), shards.layout, shards.layout, *how)
        call = Call(q, pending.k, pending.v, layer.sinks, None, options, layer.selected, layer.distance_bias)
        further = pending.layer.further(q, layer.scale)
        out = attend_shards(call, Mesh.of(shards.mesh), cache.checked, pending.projected_latents, further)
    if is_new:
        store_shard(kv, *pending.stored, shards)
    return _attend_stored(q, pending, kv, layer, shards) if shards.has_prefix else out


def _store(pending: PendingKV, mask: Mask, spec: MaskSpec, new: int) -> KVCache:
    """Store tokens that all ranks compute, each rank those of its blocks. Return the layer's cache."""
    kv = pending.layer.reserve(pending, new, mask)
    try:
        check_cached_padding(kv, spec.token_mask, new, mask)
    except InputError as error:
        pending.layer.raise_agreed(error, pending, 0)
    kv.append(*pending.stored, token_mask=None if spec.token_mask is None else spec.token_mask[:, -new:])
    return kv


def _attend_local(q: Tensor, k: Tensor, v: Tensor, layer: LayerCall, spec: MaskSpec) -> Tensor:
    """Return attention on one device, with keys of a transformers cache and padding if there are any."""
    check_covers(spec.covered, spec.kv_offset + k.shape[2])
    queries = torch.arange(q.shape[2]) + spec.q_offset
    keys = torch.arange(k.shape[2]) + spec.kv_offset
    first = spec.left_padding if layer.mask.chunks else None  # chunks begin at a sequence's first token
    if spec.token_mask is None and (first is None or not bool(first.any())):
        return _attend(q, k, v, layer, queries, keys)
    token_mask = torch.ones(len(q), 0, dtype=torch.bool) if spec.token_mask is None else spec.token_mask
    token_mask = pad(token_mask, (0, k.shape[2] - token_mask.shape[1]), value=spec.token_mask is None)
    rows = []
    for number, tokens in enumerate(token_mask):  # padding differs between sequences
        kept = tokens.nonzero().flatten()
        row = slice(number, number + 1)
        selected = layer.selected and replace(layer.selected, indices=layer.selected.indices[row])
        bias = None if layer.distance_bias is None else layer.distance_bias[row]
        own = layer._replace(selected=selected, distance_bias=bias)
        shift = 0 if first is None else -int(first[number]) % lcm(*layer.mask.chunks)
        positions = queries + shift, keys[kept.cpu()] + shift
        rows.append(_attend(q[row], k[row, :, kept], v[row, :, kept], own, *positions))
    return torch.cat(rows)


def _attend(q: Tensor, k: Tensor, v: Tensor, layer: LayerCall, queries: Tensor, keys: Tensor) -> Tensor:
    """Return attention of queries to keys at these positions."""
    logits = Logits.of(SUBJECT, layer.scale, layer.softcap, q.shape[-1])
    q = with_distance_bias(q, layer.distance_bias)
    visible = Visible(layer.mask, queries, keys, selected=layer.selected)
    return run_attend(q, k, v, visible, logits, "auto", layer.sinks).out
