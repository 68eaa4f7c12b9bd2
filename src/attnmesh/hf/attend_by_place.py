"""Attention of a layer by the place of its keys: in shards, in a cache of shards, or on this device."""

from dataclasses import replace
from functools import partial as partial_of
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from attnmesh.core.mask import Mask
from attnmesh.core.scaling import Scores, checked_scale
from attnmesh.core.selection import Selection, Visible
from attnmesh.decoding.decode_shard import decode_shard
from attnmesh.errors import InputError, MaskError
from attnmesh.hf.cache.layer import PendingKV, append_sequence
from attnmesh.hf.cache.layer_protocols import StepCache
from attnmesh.hf.layer_mask import ONE_PROMPT, SAME_PLACES, RecognisedMask, check_cached_padding, check_covers
from attnmesh.hf.models import SUBJECT
from attnmesh.hf.sharded_sequence import ShardedSequence
from attnmesh.kernels.local_op import attend_locally
from attnmesh.mesh_attention.attention import attention
from attnmesh.mesh_attention.attention_arguments import AttentionArguments, AttentionOptions
from attnmesh.mesh_attention.prompt import attend_prompt


class Weighting(NamedTuple):
    """Mask, scores, sinks and selection of a layer: all that weighs its keys, beside queries and keys."""

    mask: Mask
    scores: Scores
    sinks: Tensor | None
    selected: Selection | None

    @property
    def options(self) -> dict[str, Any]:
        """The arguments of a public function, by name."""
        return {"mask": self.mask, "sinks": self.sinks, "selected": self.selected, **self.scores._asdict()}


def attend_without_cache(q: Tensor, k: Tensor, v: Tensor, weighting: Weighting, layer_mask: RecognisedMask) -> Tensor:
    """Attend without a `ShardedCache`: in shards, or locally.

    Sequences are attended one at a time if their masks differ.
    """
    if not layer_mask.row_masks:
        if layer_mask.sequence is None:
            return _attend_local(q, k, v, weighting, layer_mask)
        return _attend_shards(q, k, v, weighting, layer_mask.sequence)
    outs = []
    for number, mask in enumerate(layer_mask.row_masks):
        row = slice(number, number + 1)
        masks = layer_mask.token_mask, layer_mask.left_padding
        padding, left_padding = (None if x is None else x[row] for x in masks)
        row_mask = replace(layer_mask, mask=mask, row_masks=(), token_mask=padding, left_padding=left_padding)
        outs.append(attend_without_cache(q[row], k[row], v[row], weighting._replace(mask=mask), row_mask))
    return torch.cat(outs)


@torch.compiler.disable  # type: ignore[untyped-decorator] # it waits for ranks
def attend_with_cache(
    q: Tensor, pending: PendingKV, weighting: Weighting, layer_mask: RecognisedMask, appends_keys: bool
) -> Tensor:
    """Attend with a `ShardedCache`, which stores new keys and values."""
    if layer_mask.row_masks:
        raise MaskError("attention mask", SAME_PLACES, "sequences with images in other places", ONE_PROMPT)
    new_count, layer = q.shape[2], pending.layer
    if layer_mask.sequence is not None:
        if not appends_keys:  # nobody reads the output: layers that cache no keys are the last ones
            return q.new_zeros(len(q), q.shape[1] // layer.sharded_cache.head_ranks, new_count, pending.v.shape[3])
        return _prefill(q, pending, weighting, layer_mask.sequence)
    step_cache = _append_step(pending, weighting.mask, layer_mask, new_count) if appends_keys else layer.step_cache
    if step_cache.config.storage is not None and layer.is_first(pending) and layer_mask.token_mask is None:
        # As in a sharded prefill, the first tokens attend each other before their keys are rounded.
        out = _attend_local(q, pending.k, pending.v, weighting, layer_mask)
        kv_cache = layer.kv_cache
        for axis in (kv_cache.rank_mesh.heads, kv_cache.token_axis) if layer.sharded_cache.head_ranks > 1 else ():
            out = out[:, axis.slice_of(out.shape[1])]
        return out
    return _attend_cached(q, pending, weighting, None)


def _attend_cached(q: Tensor, pending: PendingKV, weighting: Weighting, sequence: ShardedSequence | None) -> Tensor:
    """Return attention of the last tokens over all cached ones. With a `sequence`, `q` is of this rank's share.

    Over latents queries are absorbed: multiplied by the projection of the keys.
    """
    latents, layer = pending.projected_latents, pending.layer
    if latents is not None:
        scale = checked_scale(SUBJECT, weighting.scores.scale, q.shape[-1])
        weighting = weighting._replace(scores=weighting.scores._replace(scale=scale))
        q = latents.projection.absorb(q)
    if sequence is None:
        other_partial = layer.attend_other_keys(q, weighting.scores.scale)
        out = layer.attend(q, partial=other_partial, **weighting.options)
    else:
        out = decode_shard(
            sequence.queries(q),
            layer.kv_cache,
            Visible(weighting.mask, selected=weighting.selected),
            weighting.scores,
            sinks=weighting.sinks,
            kernel=layer.sharded_cache.settings.kernel,
            attend_other_keys=partial_of(layer.attend_other_keys, scale=weighting.scores.scale),
        )
    return out if latents is None else latents.projection.project(out)


_attend_outside_graphs = torch.compiler.disable(attention)
"""`attention` for selected keys, which several ranks cannot attend inside a graph."""


def _attend_shards(q: Tensor, k: Tensor, v: Tensor, weighting: Weighting, sequence: ShardedSequence) -> Tensor:
    """Return attention of this rank's tokens to the tokens of all ranks, with gradients."""
    options, length = weighting._replace(mask=sequence.mask_of(weighting.mask)).options, sequence.length
    options["key_lengths"] = sequence.forward_pass.key_lengths
    attend: Any = attention if weighting.selected is None else _attend_outside_graphs
    out: Tensor = attend(
        q, k, v, mesh=sequence.mesh, layout=sequence.layout, length=length, key_length=length, **options
    )
    return out


def _prefill(q: Tensor, pending: PendingKV, weighting: Weighting, sequence: ShardedSequence) -> Tensor:
    """Return attention of this rank's tokens of a prompt. Each rank stores the keys that it computed."""
    layer = pending.layer
    settings = layer.sharded_cache.settings
    kv_cache = layer.reserve(pending, sequence.length, weighting.mask)
    if not sequence.has_prefix:
        scale, softcap, bias = weighting.scores
        options = AttentionOptions(
            mask=sequence.mask_of(weighting.mask),
            layout=sequence.layout,
            key_layout=sequence.layout,
            exchange=settings.exchange,
            kernel=settings.kernel,
            scale=scale,
            softcap=softcap,
            length=sequence.length,
            key_length=sequence.length,
            unsupported=None,
        )
        arguments = AttentionArguments(
            q,
            pending.k,
            pending.v,
            weighting.sinks,
            key_lengths=None,
            options=options,
            selected=weighting.selected,
            distance_bias=bias,
        )
        other_partial = layer.attend_other_keys(q, scale)
        out = attend_prompt(arguments, sequence.mesh, settings.checked, pending.projected_latents, other_partial)
    append_sequence(kv_cache, *pending.tensors_to_append, sequence)
    return _attend_cached(q, pending, weighting, sequence) if sequence.has_prefix else out


def _append_step(pending: PendingKV, mask: Mask, layer_mask: RecognisedMask, new_count: int) -> StepCache:
    """Store tokens that all ranks compute, each rank those of its blocks. Return what holds them."""
    kv_cache = pending.layer.reserve_step(pending, new_count, mask)
    try:
        check_cached_padding(kv_cache, layer_mask.token_mask, new_count, mask)
    except InputError as error:
        pending.layer.raise_agreed(error, pending, 0)
    token_mask = None if layer_mask.token_mask is None else layer_mask.token_mask[:, -new_count:]
    kv_cache.append(*pending.tensors_to_append, token_mask=token_mask)
    return kv_cache


def _attend_local(q: Tensor, k: Tensor, v: Tensor, weighting: Weighting, layer_mask: RecognisedMask) -> Tensor:
    """Give tokens their positions, drop padding, and attend.

    Keys may be those of a transformers cache. With padding sequences are attended one at a time.
    """
    check_covers(layer_mask.covered, layer_mask.kv_offset + k.shape[2])
    queries = torch.arange(q.shape[2], device="cpu") + layer_mask.q_offset
    keys = torch.arange(k.shape[2], device="cpu") + layer_mask.kv_offset
    first = layer_mask.left_padding if weighting.mask.period > 1 else None  # chunks begin at a sequence's first token
    if layer_mask.token_mask is None and (first is None or not bool(first.any())):
        return _attend_with_positions(q, k, v, weighting, queries, keys)
    token_mask, is_whole = layer_mask.token_mask, layer_mask.token_mask is None
    token_mask = torch.ones(len(q), 0, dtype=torch.bool, device="cpu") if token_mask is None else token_mask
    token_mask = pad(token_mask, (0, k.shape[2] - token_mask.shape[1]), value=is_whole)
    rows = []
    for number, row_mask in enumerate(token_mask):  # padding differs between sequences
        real = row_mask.nonzero().flatten()
        row = slice(number, number + 1)
        selected = weighting.selected and replace(weighting.selected, indices=weighting.selected.indices[row])
        row_weighting = weighting._replace(selected=selected, scores=weighting.scores.select_sequences(row))
        shift = 0 if first is None else -int(first[number]) % weighting.mask.period
        positions = queries + shift, keys[real.cpu()] + shift
        rows.append(_attend_with_positions(q[row], k[row, :, real], v[row, :, real], row_weighting, *positions))
    return torch.cat(rows)


def _attend_with_positions(
    q: Tensor, k: Tensor, v: Tensor, weighting: Weighting, queries: Tensor, keys: Tensor
) -> Tensor:
    """Add the layer's scale and bias, and attend at positions."""
    scaling = weighting.scores.scaling(SUBJECT, q.shape[-1])
    visible = Visible(weighting.mask, queries, keys, selected=weighting.selected)
    return attend_locally(weighting.scores.widened(q), k, v, visible, scaling, "auto", weighting.sinks).out
