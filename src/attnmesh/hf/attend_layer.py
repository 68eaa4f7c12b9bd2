"""Attention of one layer by where its keys are: in shards, in a cache of shards, or on this device."""

from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from attnmesh.cache.cache import KVCache
from attnmesh.core.mask import Mask
from attnmesh.core.scaling import Scores, check_scale
from attnmesh.core.selection import Selection, Visible
from attnmesh.decoding.decode_shard import decode_shard
from attnmesh.errors import InputError, MaskError
from attnmesh.hf.cache.layer import PendingKV, store_shard
from attnmesh.hf.layer_mask import ONE_PROMPT, SAME_PLACES, MaskSpec, check_cached_padding, check_covers
from attnmesh.hf.models import SUBJECT
from attnmesh.hf.shards import Shards
from attnmesh.kernels.local_op import attend_locally
from attnmesh.mesh_attention.attention import attention
from attnmesh.mesh_attention.attention_arguments import AttentionArguments, AttentionOptions
from attnmesh.mesh_attention.prompt import attend_prompt


class LayerArguments(NamedTuple):
    """Arguments of a layer's attention besides queries, keys and values."""

    mask: Mask
    scores: Scores
    sinks: Tensor | None
    selected: Selection | None

    @property
    def options(self) -> dict[str, Any]:
        """The arguments of a public function, by name."""
        return {"mask": self.mask, "sinks": self.sinks, "selected": self.selected, **self.scores._asdict()}


def attend_without_cache(q: Tensor, k: Tensor, v: Tensor, arguments: LayerArguments, spec: MaskSpec) -> Tensor:
    """Attend without a `ShardedCache`: in shards, or locally.

    Sequences are attended one at a time if their masks differ.
    """
    if not spec.row_masks:
        shards = spec.shards
        return _attend_local(q, k, v, arguments, spec) if shards is None else _attend_shards(q, k, v, arguments, shards)
    outs = []
    for number, mask in enumerate(spec.row_masks):
        row = slice(number, number + 1)
        padding, left_padding = (None if x is None else x[row] for x in (spec.token_mask, spec.left_padding))
        row_spec = replace(spec, mask=mask, row_masks=(), token_mask=padding, left_padding=left_padding)
        outs.append(attend_without_cache(q[row], k[row], v[row], arguments._replace(mask=mask), row_spec))
    return torch.cat(outs)


@torch.compiler.disable  # type: ignore[untyped-decorator] # it waits for ranks
def attend_cached(
    q: Tensor, pending: PendingKV, arguments: LayerArguments, spec: MaskSpec, stores_keys: bool
) -> Tensor:
    """Return attention with a `ShardedCache`, which stores new keys and values."""
    if spec.row_masks:
        raise MaskError("attention mask", SAME_PLACES, "sequences with images in other places", ONE_PROMPT)
    if spec.discarded:
        return q.new_zeros(len(q), q.shape[1] // pending.layer.cache.head_ranks, q.shape[2], pending.v.shape[3])
    if spec.shards is not None:
        return _prefill(q, pending, arguments, spec.shards, stores_keys)
    kv = _store(pending, arguments.mask, spec, q.shape[2]) if stores_keys else pending.layer.cached
    if kv.config.storage is not None and pending.layer.is_first(pending) and spec.token_mask is None:
        # As in a sharded prefill, the first tokens attend each other before their keys are rounded.
        out = _attend_local(q, pending.k, pending.v, arguments, spec)
        for axis in (kv.mesh.heads, kv.token_axis) if pending.layer.cache.head_ranks > 1 else ():
            out = out[:, axis.slice_of(out.shape[1])]
        return out
    return _attend_stored(q, pending, kv, arguments, None)


def _attend_stored(
    q: Tensor, pending: PendingKV, kv: KVCache, arguments: LayerArguments, shards: Shards | None
) -> Tensor:
    """Return attention of the last tokens, or of this rank's share of them, over all that are cached.

    Queries of latents are absorbed.
    """
    latents, cache, attend_other_keys = pending.projected_latents, pending.layer.cache, pending.layer.attend_other_keys
    if latents is not None:
        scale = check_scale(SUBJECT, arguments.scores.scale, q.shape[-1])
        arguments = arguments._replace(scores=arguments.scores._replace(scale=scale))
        q = latents.projection.absorb(q)
    mask, scores, sinks, selected = arguments
    if shards is None:
        other_partial = attend_other_keys(q, scores.scale)
        out: Tensor = cache.attend(q, kv, partial=other_partial, **arguments.options)
    else:
        visible = Visible(mask, selected=selected)
        attend_others = partial(attend_other_keys, scale=scores.scale)
        out = decode_shard(
            shards.queries(q), kv, visible, scores, sinks=sinks, kernel=cache.kernel, attend_other_keys=attend_others
        )
    return out if latents is None else latents.projection.project(out)


_attend_outside_graphs = torch.compiler.disable(attention)
"""`attention` for selected keys. On several ranks it is refused inside a graph."""


def _attend_shards(q: Tensor, k: Tensor, v: Tensor, arguments: LayerArguments, shards: Shards) -> Tensor:
    """Return attention of this rank's tokens to the tokens of all ranks, with gradients."""
    options, length = arguments._replace(mask=shards.mask_of(arguments.mask)).options, shards.length
    options["key_lengths"] = shards.forward_pass.key_lengths
    attend: Any = attention if arguments.selected is None else _attend_outside_graphs
    out: Tensor = attend(q, k, v, mesh=shards.mesh, layout=shards.layout, length=length, key_length=length, **options)
    return out


def _prefill(q: Tensor, pending: PendingKV, arguments: LayerArguments, shards: Shards, stores_keys: bool) -> Tensor:
    """Return attention of this rank's tokens of a prompt. Each rank stores the keys that it computed."""
    cache = pending.layer.cache
    kv = pending.layer.reserve(pending, shards.length, arguments.mask) if stores_keys else pending.layer.cached
    if not shards.has_prefix:
        scale, softcap, bias = arguments.scores
        options = AttentionOptions(
            mask=shards.mask_of(arguments.mask),
            layout=shards.layout,
            key_layout=shards.layout,
            exchange=cache.exchange,
            kernel=cache.kernel,
            scale=scale,
            softcap=softcap,
            length=shards.length,
            key_length=shards.length,
            unsupported=None,
        )
        of_prompt = AttentionArguments(
            q,
            pending.k,
            pending.v,
            arguments.sinks,
            key_lengths=None,
            options=options,
            selected=arguments.selected,
            distance_bias=bias,
        )
        other_partial = pending.layer.attend_other_keys(q, scale)
        out = attend_prompt(of_prompt, shards.mesh, cache.checked, pending.projected_latents, other_partial)
    if stores_keys:
        store_shard(kv, *pending.stored, shards)
    return _attend_stored(q, pending, kv, arguments, shards) if shards.has_prefix else out


def _store(pending: PendingKV, mask: Mask, spec: MaskSpec, new: int) -> KVCache:
    """Store tokens that all ranks compute, each rank those of its blocks. Return the layer's cache."""
    kv = pending.layer.reserve(pending, new, mask)
    try:
        check_cached_padding(kv, spec.token_mask, new, mask)
    except InputError as error:
        pending.layer.raise_agreed(error, pending, 0)
    kv.append(*pending.stored, token_mask=None if spec.token_mask is None else spec.token_mask[:, -new:])
    return kv


def _attend_local(q: Tensor, k: Tensor, v: Tensor, arguments: LayerArguments, spec: MaskSpec) -> Tensor:
    """Give tokens their positions, drop padding, and attend.

    Keys may be those of a transformers cache. With padding sequences are attended one at a time.
    """
    check_covers(spec.covered, spec.kv_offset + k.shape[2])
    queries = torch.arange(q.shape[2], device="cpu") + spec.q_offset
    keys = torch.arange(k.shape[2], device="cpu") + spec.kv_offset
    first = spec.left_padding if arguments.mask.period > 1 else None  # chunks begin at a sequence's first token
    if spec.token_mask is None and (first is None or not bool(first.any())):
        return _attend_at(q, k, v, arguments, queries, keys)
    token_mask = torch.ones(len(q), 0, dtype=torch.bool, device="cpu") if spec.token_mask is None else spec.token_mask
    token_mask = pad(token_mask, (0, k.shape[2] - token_mask.shape[1]), value=spec.token_mask is None)
    rows = []
    for number, tokens in enumerate(token_mask):  # padding differs between sequences
        real = tokens.nonzero().flatten()
        row = slice(number, number + 1)
        selected = arguments.selected and replace(arguments.selected, indices=arguments.selected.indices[row])
        row_arguments = arguments._replace(selected=selected, scores=arguments.scores.of_sequences(row))
        shift = 0 if first is None else -int(first[number]) % arguments.mask.period
        positions = queries + shift, keys[real.cpu()] + shift
        rows.append(_attend_at(q[row], k[row, :, real], v[row, :, real], row_arguments, *positions))
    return torch.cat(rows)


def _attend_at(q: Tensor, k: Tensor, v: Tensor, arguments: LayerArguments, queries: Tensor, keys: Tensor) -> Tensor:
    """Add the layer's scale and bias, and attend at positions."""
    scaling = arguments.scores.scaling(SUBJECT, q.shape[-1])
    visible = Visible(arguments.mask, queries, keys, selected=arguments.selected)
    return attend_locally(arguments.scores.widened(q), k, v, visible, scaling, "auto", arguments.sinks).out
