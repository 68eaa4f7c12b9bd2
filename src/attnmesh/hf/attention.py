"""The attention function that transformers calls in every layer: of training, of a sharded prefill, of a new token."""

from typing import Any, NamedTuple

from torch import Tensor, nn

from attnmesh.agree import agree
from attnmesh.attention import asks, attention
from attnmesh.cache import KVCache
from attnmesh.errors import InputError, KernelError, MaskError, ShapeError
from attnmesh.hf.batch import Shards
from attnmesh.hf.cache import Fresh
from attnmesh.hf.mask import Seen
from attnmesh.layout import Zigzag
from attnmesh.mask import Mask, Window
from attnmesh.mesh import Mesh
from attnmesh.shards import shard, unshard

SUBJECT = "attnmesh in transformers"

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
"""What models hand on to attention and attention need not know. All else is refused by name, unless it is None."""


class Asked(NamedTuple):
    """A layer's attention but for its tensors of tokens."""

    mask: Mask
    scale: float | None
    sinks: Tensor | None


def attention_function(
    module: nn.Module,
    query: Tensor,
    key: Tensor | Fresh,
    value: Tensor | Fresh,
    attention_mask: Seen | Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    **more: Any,
) -> tuple[Tensor, None]:
    """The output (batch, length, heads, dim), and no weights. Without a cache and without shards a call is local."""
    shards = attention_mask.shards if isinstance(attention_mask, Seen) else None
    try:
        _check(module, dropout, more)
        seen = _seen(attention_mask, sliding_window or None)  # some say 0 for none
        if isinstance(key, Fresh):
            _check_caching(more)
        else:
            _check_no_cache(query, key, seen, bool(more.get("use_cache")) and shards is None)
            _check_router(module, more, shards)
    except InputError as error:
        if isinstance(key, Fresh):
            checked = key.layer.cache.checked
            by_all = None if shards is None else shards.on_top or asks(checked, query.device)
            key.layer.refuse(error, key, query.shape[2] if shards is None else shards.length, asked=by_all)
        elif shards is not None and asks(None, query.device):
            agree(Mesh.of(shards.mesh), error)
        raise
    asked = Asked(seen.mask, scaling, s_aux)
    if isinstance(key, Fresh):
        out = _new(query, key, asked, seen) if seen.shards is None else _prefilled(query, key, asked, seen.shards)
    else:
        assert isinstance(value, Tensor)
        whole = Shards(None, Zigzag(), query.shape[2], (len(query), query.shape[2]))
        out = _trained(query, key, value, asked, seen.shards or whole)
    return out.transpose(1, 2), None


def _trained(q: Tensor, k: Tensor, v: Tensor, asked: Asked, shards: Shards, **options: Any) -> Tensor:
    """Attention among the tokens of all ranks."""
    mask = asked.mask & shards.documents
    where: dict[str, Any] = {"mesh": shards.mesh, "layout": shards.layout}
    where |= {"length": shards.length, "key_length": shards.length}
    return attention(q, k, v, mask=mask, scale=asked.scale, sinks=asked.sinks, **where, **options)


def _prefilled(q: Tensor, fresh: Fresh, asked: Asked, shards: Shards) -> Tensor:
    """Each rank's own tokens of a prompt: their keys stay on the rank that made them."""
    cache, here = fresh.layer.cache, Mesh.of(shards.mesh)
    positions = shards.start + shards.layout.positions(shards.length, here.shape.ranks, here.shard)
    kv = fresh.layer.room(fresh, shards.length)
    if not shards.on_top:
        how = {"exchange": cache.exchange, "kernel": cache.kernel, "checked": cache.checked}
        out = _trained(q, fresh.k, fresh.v, asked, shards, **how)
        kv.append_shard(fresh.k, fresh.v, positions)
        return out
    kv.append_shard(fresh.k, fresh.v, positions, real=shards.real)
    everyone = unshard(q, shards.mesh, layout=shards.layout, length=shards.length)
    return shard(cache.attend(everyone, kv, *asked), shards.mesh, layout=shards.layout)


def _new(q: Tensor, fresh: Fresh, asked: Asked, seen: Seen) -> Tensor:
    """Tokens that are the same on every rank: each keeps the keys that are dealt to it."""
    kv, more = fresh.layer.room(fresh, q.shape[2]), q.shape[2]
    try:
        _check_padding(kv, seen.real, more)
    except InputError as error:
        fresh.layer.refuse(error, fresh, 0)
    kv.append(fresh.k, fresh.v, real=None if seen.real is None else seen.real[:, -more:])
    return fresh.layer.cache.attend(q, kv, *asked)


def _seen(given: Seen | Tensor | None, window: int | None) -> Seen:
    """The mask that `mask_function` made, if it is the one the layer means."""
    if not isinstance(given, Seen):
        fix = "pass a 2D attention_mask of padding, or none"
        said = "no mask at all" if given is None else f"a mask of shape {list(getattr(given, 'shape', []))}"
        raise MaskError(f"{SUBJECT}: attention_mask", "one made by transformers for attnmesh", said, fix)
    if window is not None and given.mask != Window(window - 1):
        said = f"{given.mask} for a layer with sliding_window={window}"
        raise MaskError(f"{SUBJECT}: sliding_window", f"{Window(window - 1)}", said, "use a released model's code")
    return given


def _check(module: nn.Module, dropout: float, more: dict[str, Any]) -> None:
    """What is no exact causal attention is refused by name."""
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


def _check_caching(more: dict[str, Any]) -> None:
    if more.get("use_cache") is False:
        fix = "leave past_key_values out, or use_cache"
        raise KernelError(f"{SUBJECT}: use_cache", "a cache that is used", "use_cache=False with a ShardedCache", fix)


def _check_router(module: nn.Module, more: dict[str, Any], shards: Shards | None) -> None:
    """What experts' routers are told to balance is the whole batch, of which a rank has only its own tokens."""
    asked = more.get("output_router_logits") or getattr(getattr(module, "config", None), "output_router_logits", False)
    if asked and shards is not None and Mesh.of(shards.mesh).shape.ranks > 1:
        fix = "set config.output_router_logits = False"
        raise KernelError(f"{SUBJECT}: output_router_logits", "no loss of routers on shards", "one", fix)


def _check_no_cache(q: Tensor, k: Tensor, seen: Seen, caching: bool) -> None:
    if caching or k.shape[2] != q.shape[2]:
        given = f"another cache ({q.shape[2]} queries on {k.shape[2]} keys)"
        fix = "pass past_key_values=attnmesh.hf.ShardedCache(model.config, mesh), or use_cache=False"
        raise KernelError(f"{SUBJECT}: past_key_values", "a ShardedCache", given, fix)
    if seen.real is not None:
        fix = "generate with a ShardedCache, or train on attnmesh.hf.shard_batch"
        raise MaskError(f"{SUBJECT}: attention_mask", "no padding without a cache", "padding", fix)


def _check_padding(kv: KVCache, real: Tensor | None, more: int) -> None:
    """The attention mask tells of all tokens so far, and what was padding has to stay it."""
    fix = "pass the attention_mask of all tokens, those of the cache first"
    if real is not None and real.shape[1] != kv.length + more:
        expected, given = f"one of {kv.length} tokens in the cache and {more} new", f"one of {real.shape[1]}"
        raise ShapeError(f"{SUBJECT}: attention_mask", expected, given, fix)
    if kv.padding is None and (real is None or bool(real[:, :-more].all())):
        return
    known = None if kv.padding is None else kv.padding.real[:, : kv.length]
    if real is None or known is None or not bool((real[:, :-more] == known).all()):
        raise MaskError(f"{SUBJECT}: attention_mask", "the padding that the cache has", "another", fix)
