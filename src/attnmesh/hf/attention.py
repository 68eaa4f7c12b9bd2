"""The attention function that transformers calls in every layer: training, sharded prefill, new tokens, one device."""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from attnmesh.attention.attention import asks, attention
from attnmesh.attention.sharding import shard, unshard
from attnmesh.comm.consensus import agree
from attnmesh.core.checks import autocast, check_scale
from attnmesh.core.mask import Causal, Full, Mask, Window
from attnmesh.decode.cache import KVCache
from attnmesh.errors import InputError, KernelError, MaskError, ShapeError
from attnmesh.hf.cache import PendingKV
from attnmesh.hf.mask import MaskSpec
from attnmesh.hf.models import check_layers
from attnmesh.hf.shards import SUBJECT, ItemCount, Shards
from attnmesh.kernels.attend import attend_op
from attnmesh.mesh.axes import Mesh

HARMLESS = (
    "cache_position",
    "is_causal",
    "labels",
    "logits_to_keep",
    "num_items_in_batch",
    "output_hidden_states",
    "output_router_logits",
    "position_embeddings",
    "position_ids",
    "return_dict",
    "shift_labels",
    "use_cache",
)
"""Arguments that models pass on to attention and that do not change it. Any other raises, unless it is None."""


class LayerCall(NamedTuple):
    """A layer's attention but for its tensors of tokens."""

    mask: Mask
    scale: float | None
    sinks: Tensor | None


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
    **more: Any,
) -> tuple[Tensor, None]:
    """Return the output (batch, length, heads, dim), and no weights. Without a cache and shards a call is local."""
    shards = attention_mask.shards if isinstance(attention_mask, MaskSpec) else None
    pending = key if isinstance(key, PendingKV) else None
    try:
        _check(module, dropout, more)
        spec = _mask_spec(attention_mask, sliding_window or None)  # some models pass 0 for no window
        if shards is not None:
            _check_sharded(module, query, key, more, shards)
        if pending is not None:
            _check_follows(pending, query.shape[2], more)
            _check_window(pending, spec)
    except InputError as error:
        _refuse(error, query, pending, shards)
    layer = LayerCall(spec.mask, scaling, s_aux)
    query, key, value = _autocast(query, key, value)
    with torch.autocast(query.device.type, enabled=False):
        out = _attention(query, key, value, layer, spec)
    return out.transpose(1, 2).contiguous(), None


def _attention(q: Tensor, k: Tensor | PendingKV, v: Tensor | PendingKV, layer: LayerCall, spec: MaskSpec) -> Tensor:
    """Return the output, by where the keys are and whose tokens the queries are."""
    if isinstance(k, PendingKV):
        return _decoded(q, k, layer, spec) if spec.shards is None else _prefilled(q, k, layer, spec.shards)
    assert isinstance(v, Tensor)
    return _local(q, k, v, layer, spec) if spec.shards is None else _trained(q, k, v, layer, spec.shards)


def _refuse(error: InputError, query: Tensor, pending: PendingKV | None, shards: Shards | None) -> None:
    """Raise the error on all ranks, if they compare their calls at this point."""
    if pending is not None:
        checked = pending.layer.cache.checked
        by_all = None if shards is None else shards.has_prefix or asks(checked, query.device)
        pending.layer.refuse(error, pending, query.shape[2] if shards is None else shards.length, asked=by_all)
    elif shards is not None and asks(None, query.device):
        agree(Mesh.of(shards.mesh), error)
    raise error


def _autocast(q: Tensor, k: Tensor | PendingKV, v: Tensor | PendingKV) -> tuple[Any, Any, Any]:
    """Return q, k and v of one dtype under autocast: ropes leave q and k in float32, and v is bfloat16."""
    if isinstance(k, PendingKV):
        q, keys, values = autocast(q, k.k, k.v)
        pending = PendingKV(keys, values, k.layer)
        return q, pending, pending
    return autocast(q, k, v)  # type: ignore[arg-type,return-value]


def _trained(q: Tensor, k: Tensor, v: Tensor, layer: LayerCall, shards: Shards, **options: Any) -> Tensor:
    """Return attention among the tokens of all ranks."""
    mask = layer.mask & shards.documents
    where: dict[str, Any] = {"mesh": shards.mesh, "layout": shards.layout}
    where |= {"length": shards.length, "key_length": shards.length}
    return attention(q, k, v, mask=mask, scale=layer.scale, sinks=layer.sinks, **where, **options)


def _local(q: Tensor, k: Tensor, v: Tensor, layer: LayerCall, spec: MaskSpec) -> Tensor:
    """Return attention on one device, as in any model: over a cache of transformers, or with padding."""
    if spec.covered is not None:
        expected, fix = f"one of all {spec.kv_offset + k.shape[2]} tokens", "put those of the cache first"
        raise ShapeError(f"{SUBJECT}: attention_mask", expected, f"one of {spec.covered}", fix)
    queries = torch.arange(q.shape[2]) + spec.q_offset
    keys = torch.arange(k.shape[2]) + spec.kv_offset
    if spec.real is None:
        return _attended(q, k, v, layer, queries, keys)
    real = pad(spec.real, (0, k.shape[2] - spec.real.shape[1]))
    rows = []
    for row, own in enumerate(real):  # each sequence has padding of its own
        where = own.nonzero().flatten()
        one = slice(row, row + 1)
        rows.append(_attended(q[one], k[one, :, where], v[one, :, where], layer, queries, keys[where.cpu()]))
    return torch.cat(rows)


def _attended(q: Tensor, k: Tensor, v: Tensor, layer: LayerCall, queries: Tensor, keys: Tensor) -> Tensor:
    scale = check_scale(SUBJECT, layer.scale, q)
    out: Tensor = attend_op(q, k, v, layer.sinks, queries, keys, layer.mask.encode(), scale, "auto")[0]
    return out


def _prefilled(q: Tensor, pending: PendingKV, layer: LayerCall, shards: Shards) -> Tensor:
    """Return attention of each rank's own tokens of a prompt. Their keys stay on the rank that made them."""
    cache, here = pending.layer.cache, Mesh.of(shards.mesh)
    positions = shards.start + shards.layout.positions(shards.length, here.shape.ranks, here.shard)
    kv = pending.layer.room(pending, shards.length)
    if not shards.has_prefix:
        how = {"exchange": cache.exchange, "kernel": cache.kernel, "checked": cache.checked}
        out = _trained(q, pending.k, pending.v, layer, shards, **how)
        kv.append_shard(pending.k, pending.v, positions)
        return out
    kv.append_shard(pending.k, pending.v, positions, token_mask=shards.real)
    everyone = unshard(q, shards.mesh, layout=shards.layout, length=shards.length)
    return shard(cache.attend(everyone, kv, *layer), shards.mesh, layout=shards.layout)


def _decoded(q: Tensor, pending: PendingKV, layer: LayerCall, spec: MaskSpec) -> Tensor:
    """Return attention of tokens that are the same on every rank. Each rank keeps the keys that are dealt to it."""
    kv, more = pending.layer.room(pending, q.shape[2]), q.shape[2]
    try:
        _check_padding(kv, spec.real, more)
    except InputError as error:
        pending.layer.refuse(error, pending, 0)
    kv.append(pending.k, pending.v, token_mask=None if spec.real is None else spec.real[:, -more:])
    return pending.layer.cache.attend(q, kv, *layer)


def _mask_spec(given: MaskSpec | Tensor | None, window: int | None) -> MaskSpec:
    """Return the mask that `mask_function` made, if it is the one that the layer means."""
    if not isinstance(given, MaskSpec):
        fix = "pass a 2D attention_mask of padding, or none"
        said = "no mask at all" if given is None else f"a mask of shape {list(getattr(given, 'shape', []))}"
        raise MaskError(f"{SUBJECT}: attention_mask", "one made by transformers for attnmesh", said, fix)
    if given.mask == Full():
        fix = "use a causal language model"
        raise MaskError(f"{SUBJECT}: attention_mask", "a causal mask or a sliding window", "a mask of both ways", fix)
    if window is not None and given.mask != Window(window - 1):
        said = f"{given.mask} for a layer with sliding_window={window}"
        raise MaskError(f"{SUBJECT}: sliding_window", f"{Window(window - 1)}", said, "use a released model's code")
    return given


def _check(module: nn.Module, dropout: float, more: dict[str, Any]) -> None:
    """Raise for anything but exact causal attention."""
    if dropout:
        fix = "set config.attention_dropout = 0"
        raise KernelError(f"{SUBJECT}: dropout", "attention without dropout", f"dropout={dropout}", fix)
    if not getattr(module, "is_causal", True) or more.get("is_causal") is False:
        fix = "use a causal language model"
        raise MaskError(f"{SUBJECT}: is_causal", "causal attention", f"a {type(module).__name__} that is not", fix)
    for name, given in more.items():
        if name not in HARMLESS and given is not None and given is not False:
            expected = "exact softmax attention under a causal mask or a sliding window"
            fix = "use a model without it" if name == "softcap" else "leave it out"
            raise KernelError(f"{SUBJECT}: {name}", expected, f"{name}={_short(given)}", fix)


def _short(given: object) -> str:
    return f"a tensor {tuple(given.shape)}" if isinstance(given, Tensor) else repr(given)[:40]


def _check_sharded(module: nn.Module, q: Tensor, key: Tensor | PendingKV, more: dict[str, Any], shards: Shards) -> None:
    """Raise unless a layer is right on shards."""
    config = getattr(module, "config", None)
    if config is not None:
        check_layers(config)
    shards.check_layer(type(module).__name__, getattr(config, "num_hidden_layers", 1))
    count = more.get("num_items_in_batch")
    shards.uses.count = None if isinstance(count, ItemCount) else count
    if not isinstance(key, PendingKV) and key.shape[2] != q.shape[2]:
        given = f"another cache ({q.shape[2]} queries on {key.shape[2]} keys)"
        fix = "pass past_key_values=attnmesh.hf.ShardedCache(model.config, mesh), or use_cache=False"
        raise KernelError(f"{SUBJECT}: past_key_values", "a ShardedCache", given, fix)
    asked = more.get("output_router_logits") or getattr(config, "output_router_logits", False)
    if asked and shards.ranks > 1 and not isinstance(key, PendingKV):  # routers balance the tokens of one rank alone
        fix = "set config.output_router_logits = False"
        raise KernelError(f"{SUBJECT}: output_router_logits", "no loss of routers on shards", "one", fix)


def _check_follows(pending: PendingKV, count: int, more: dict[str, Any]) -> None:
    """Raise where a prompt comes again to a cache that is not used. use_cache=False alone may be a layer's default."""
    kv, positions = pending.layer.kv, more.get("position_ids")
    if more.get("use_cache") is not False or kv is None or not kv.length or not isinstance(positions, Tensor):
        return
    if positions.shape[-1] == count and not int(positions.flatten()[0]):
        fix = "leave past_key_values out, or use_cache"
        raise KernelError(f"{SUBJECT}: use_cache", "a cache that is used", "use_cache=False with a ShardedCache", fix)


def _check_window(pending: PendingKV, spec: MaskSpec) -> None:
    """Raise where a cache of transformers would forget tokens that the mask lets a layer see."""
    config = pending.layer.cache.config
    window = getattr(config, "sliding_window", None)
    if window and not getattr(config, "layer_types", None) and spec.mask == Causal():
        given = f"a causal mask in {config.model_type}, whose caches keep {window} tokens"
        fix = "set config.sliding_window = None"
        raise MaskError(f"{SUBJECT}: sliding_window", f"{Window(window - 1)}", given, fix)


def _check_padding(kv: KVCache, real: Tensor | None, more: int) -> None:
    """Raise unless the attention mask covers all tokens so far, and what was padding stays it."""
    fix = "pass the attention_mask of all tokens, those of the cache first"
    if real is not None and real.shape[1] != kv.length + more:
        expected, given = f"one of {kv.length} tokens in the cache and {more} new", f"one of {real.shape[1]}"
        raise ShapeError(f"{SUBJECT}: attention_mask", expected, given, fix)
    if kv.padding is None and (real is None or bool(real[:, :-more].all())):
        return
    known = None if kv.padding is None else kv.padding.token_mask[:, : kv.length]
    if real is None or known is None or not bool((real[:, :-more] == known).all()):
        raise MaskError(f"{SUBJECT}: attention_mask", "the padding that the cache has", "another", fix)
