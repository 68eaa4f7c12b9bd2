"""Attention function registered with transformers, which calls it in every layer.

A call is one of four: training on shards, sharded prefill, decoding, or ordinary attention on one device.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from attnmesh.attention.attention import attention
from attnmesh.attention.sharding import shard, unshard
from attnmesh.core.checks import autocast
from attnmesh.core.logits import Logits
from attnmesh.core.mask import Mask
from attnmesh.errors import InputError
from attnmesh.hf.cache_layer import PendingKV
from attnmesh.hf.checks import check_cached_padding, check_local_mask, check_same_weights, checked_mask
from attnmesh.hf.mask import MaskSpec
from attnmesh.hf.models import SUBJECT
from attnmesh.hf.shards import Shards
from attnmesh.kernels.attend import attend_op
from attnmesh.mesh.axes import Mesh


class LayerCall(NamedTuple):
    """Arguments of a layer's attention besides queries, keys and values."""

    mask: Mask
    scale: float | None
    sinks: Tensor | None
    softcap: float | None


def attention_function(
    module: nn.Module,
    query: Tensor,
    key: Tensor | PendingKV,
    value: Tensor | PendingKV,
    attention_mask: MaskSpec | Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    softcap: float | None = None,
    **more: Any,
) -> tuple[Tensor, None]:
    """Return the output, (batch, length, heads, dim), and None for the weights."""
    spec = checked_mask(module, query, key, attention_mask, dropout, sliding_window, more)
    if spec.shards is not None and not spec.shards.cached:
        check_same_weights(module, spec.shards, query.device)
    layer = LayerCall(spec.mask, scaling, s_aux, softcap)
    k, v = (key.k, key.v) if isinstance(key, PendingKV) else (key, value)
    q, k, v = autocast(query, k, v)  # type: ignore[arg-type] # ropes leave q and k in float32, v is bfloat16
    with torch.autocast(q.device.type, enabled=False):
        if isinstance(key, PendingKV):
            pending = PendingKV(k, v, key.layer)
            out = _decode(q, pending, layer, spec) if spec.shards is None else _prefill(q, pending, layer, spec.shards)
        elif spec.shards is None:
            out = _attend_local(q, k, v, layer, spec)
        else:
            out = _attend_shards(q, k, v, layer, spec.shards)
    return out.transpose(1, 2).contiguous(), None


def _attend_shards(q: Tensor, k: Tensor, v: Tensor, layer: LayerCall, shards: Shards, **options: Any) -> Tensor:
    """Return attention of this rank's tokens to the tokens of all ranks."""
    sequence: dict[str, Any] = {"mesh": shards.mesh, "layout": shards.layout}
    sequence |= {"length": shards.length, "key_length": shards.length}
    mask = layer.mask & shards.documents
    kind: dict[str, Any] = {"scale": layer.scale, "softcap": layer.softcap, "sinks": layer.sinks}
    return attention(q, k, v, mask=mask, **kind, **sequence, **options)


def _prefill(q: Tensor, pending: PendingKV, layer: LayerCall, shards: Shards) -> Tensor:
    """Return attention of this rank's tokens of a prompt. Each rank stores the keys that it computed."""
    cache, place = pending.layer.cache, Mesh.of(shards.mesh)
    positions = shards.start + shards.layout.positions(shards.length, place.shape.ranks, place.shard)
    kv = pending.layer.reserve(pending, shards.length)
    if not shards.has_prefix:
        options = {"exchange": cache.exchange, "kernel": cache.kernel, "checked": cache.checked}
        out = _attend_shards(q, pending.k, pending.v, layer, shards, **options)
        kv.append_shard(pending.k, pending.v, positions)
        return out
    kv.append_shard(pending.k, pending.v, positions, token_mask=shards.token_mask)
    all_queries = unshard(q, shards.mesh, layout=shards.layout, length=shards.length)
    return shard(cache.attend(all_queries, kv, *layer), shards.mesh, layout=shards.layout)


def _decode(q: Tensor, pending: PendingKV, layer: LayerCall, spec: MaskSpec) -> Tensor:
    """Return attention of tokens that all ranks compute. Each rank stores the keys of its blocks."""
    new = q.shape[2]
    kv = pending.layer.reserve(pending, new)
    try:
        check_cached_padding(kv, spec.token_mask, new)
    except InputError as error:
        pending.layer.raise_agreed(error, pending, 0)
    kv.append(pending.k, pending.v, token_mask=None if spec.token_mask is None else spec.token_mask[:, -new:])
    out: Tensor = pending.layer.cache.attend(q, kv, *layer)
    return out


def _attend_local(q: Tensor, k: Tensor, v: Tensor, layer: LayerCall, spec: MaskSpec) -> Tensor:
    """Return attention on one device, with keys of a transformers cache and padding if there are any."""
    check_local_mask(spec, k.shape[2])
    queries = torch.arange(q.shape[2]) + spec.q_offset
    keys = torch.arange(k.shape[2]) + spec.kv_offset
    if spec.token_mask is None:
        return _attend(q, k, v, layer, queries, keys)
    token_mask = pad(spec.token_mask, (0, k.shape[2] - spec.token_mask.shape[1]))
    rows = []
    for number, tokens in enumerate(token_mask):  # padding differs between sequences
        kept = tokens.nonzero().flatten()
        row = slice(number, number + 1)
        rows.append(_attend(q[row], k[row, :, kept], v[row, :, kept], layer, queries, keys[kept.cpu()]))
    return torch.cat(rows)


def _attend(q: Tensor, k: Tensor, v: Tensor, layer: LayerCall, queries: Tensor, keys: Tensor) -> Tensor:
    """Return attention of queries to keys at these positions."""
    logits = Logits.of(SUBJECT, layer.scale, layer.softcap, q)
    out: Tensor = attend_op(q, k, v, layer.sinks, queries, keys, None, layer.mask.encode(), logits, "auto")[0]
    return out
