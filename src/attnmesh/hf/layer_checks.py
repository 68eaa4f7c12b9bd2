"""Checks of a layer's attention call: exact causal attention with a mask and a cache of attnmesh, or an error."""

from dataclasses import replace
from typing import Any, NoReturn
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn

from attnmesh.core.digest import DIGEST_VALUES, fingerprints
from attnmesh.core.mask import FAR, Causal, Full, Window
from attnmesh.errors import (
    ArgumentError,
    InputError,
    KernelError,
    LayoutError,
    MaskError,
    short,
    warn_once,
)
from attnmesh.guard.agreement import Agreement, may_compare
from attnmesh.hf.cache.compressed_layer import check_entries
from attnmesh.hf.cache.layer import PendingKV
from attnmesh.hf.layer_mask import RecognisedMask
from attnmesh.hf.models import SUBJECT, is_recurrent, num_mixing_calls
from attnmesh.hf.shard_tensors import ShardPositions
from attnmesh.hf.sharded_sequence import FORWARD_ALL, OF_SHARD_BATCH, ShardedSequence
from attnmesh.hf.traced_mask import TracedMask
from attnmesh.hf.training.labels import ItemCount
from attnmesh.mesh.axes import RankMesh
from attnmesh.runtime.tensors import is_dtensor
from attnmesh.runtime.world import cached_per_world

NO_EFFECT = {
    *("cache_position", "is_causal", "labels", "logits_to_keep", "num_items_in_batch", "output_hidden_states"),
    *("output_router_logits", "position_embeddings", "position_ids", "return_dict", "shift_labels", "use_cache"),
    *("tokenizer", "assistant_tokenizer"),  # `generate` passes them on
}
"""Arguments that models pass on to attention and that do not change it. Any other raises, unless None or False."""


def check_traced(module: nn.Module, mask: TracedMask, dropout: float, arguments: dict[str, Any]) -> None:
    """Raise unless a call in a trace is exact, and of whole sequences: a trace has no shards."""
    _check_no_shard(arguments)
    _check_exact(module, mask, dropout, arguments)
    check_entries(module, None, None, None)


def mask_of_call(
    module: nn.Module,
    query: Tensor,
    key: Tensor | PendingKV,
    mask: RecognisedMask | Tensor | None,
    dropout: float,
    sliding_window: int | None,
    arguments: dict[str, Any],
) -> RecognisedMask:
    """Check and count a layer's call, and return its mask. A failed check raises on all ranks if they compare calls."""
    sequence = mask.sequence if isinstance(mask, RecognisedMask) else None
    pending = key if isinstance(key, PendingKV) else None
    try:
        _check_exact(module, mask, dropout, arguments)
        layer_mask = _checked_mask(mask, sliding_window or None)  # some models pass 0 for no window
        check_entries(module, pending, sequence, layer_mask.token_mask if sequence is None else sequence.token_mask)
        if pending is not None:
            _check_cache(pending, layer_mask, query.shape[2], arguments)
        elif sequence is not None:
            _check_shards(module, query, key, arguments, sequence)
        else:
            _check_no_shard(arguments)
            _check_alone(layer_mask, arguments.get("position_ids"))
        if sequence is not None:
            _count_layer(module, arguments, sequence)
        if pending is not None:
            pending.layer.set_projection(module, pending)
    except InputError as error:
        _raise_agreed(error, query, pending, sequence)
    return layer_mask


def _raise_agreed(
    error: InputError, query: Tensor, pending: PendingKV | None, sequence: ShardedSequence | None
) -> NoReturn:
    """Raise the error on all ranks if they compare their calls at this point, and otherwise on this rank alone."""
    if pending is not None:
        checked = pending.layer.sharded_cache.settings.checked
        is_compared = None if sequence is None else sequence.has_prefix or checked is not False
        tokens = query.shape[2] if sequence is None else sequence.length
        pending.layer.raise_agreed(error, pending, tokens, is_compared=is_compared)
    is_compared = sequence is not None and may_compare(query.device)
    mesh = RankMesh.of(None if sequence is None else sequence.mesh)
    Agreement(mesh, SUBJECT, is_compared=is_compared).raise_on_all(error)


def _check_exact(module: nn.Module, mask: Any, dropout: float, arguments: dict[str, Any]) -> None:
    """Raise for anything but exact attention of a causal layer.

    A layer that is not causal passes in two cases: a mask with spans says which later tokens its queries see, or the
    call has one query, after which there are no tokens.
    """
    mask_decides = isinstance(mask, RecognisedMask) and mask.sequence is None and mask.q_length == 1
    mask_decides = mask_decides or (isinstance(mask, RecognisedMask) and mask.has_spans)
    if not mask_decides and (not getattr(module, "is_causal", True) or arguments.get("is_causal") is False):
        given = f"{type(module).__name__}, which is not causal"
        raise MaskError(f"{SUBJECT} is_causal", "causal attention", given, "use a causal language model")
    if dropout:
        fix = "call model.eval() to generate; to train, load the model with attention_dropout=0 (GPT-2: attn_pdrop=0)"
        raise KernelError(f"{SUBJECT} dropout", "attention without dropout", f"dropout={dropout}", fix)
    if arguments.get("output_attentions"):
        expected, fix = "outputs without attention weights", 'call model.set_attn_implementation("eager")'
        raise KernelError(f"{SUBJECT} output_attentions", expected, "True", f"{fix}, on one device")
    for name, value in arguments.items():
        if name not in NO_EFFECT and value is not None and value is not False:
            expected = "exact softmax attention under a mask of positions"
            raise KernelError(f"{SUBJECT} {name}", expected, f"{name}={short(value)}", "leave it out")


def _check_no_shard(arguments: dict[str, Any]) -> None:
    """Raise if a layer that got no shards has the positions of a shard."""
    if isinstance(arguments.get("position_ids"), ShardPositions):
        given = "another, beside its position_ids"
        raise ArgumentError(f"{SUBJECT} attention_mask", OF_SHARD_BATCH, given, FORWARD_ALL)


def _check_alone(layer_mask: RecognisedMask, positions: Any) -> None:
    """Warn once, among several ranks, that a model attends to this rank's tokens alone. Raise if they are a chunk.

    A chunk that was cut by hand begins after tokens that no cache has, or leaves tokens out. Positions that restart
    tell of no chunk: packed sequences and padding have them.
    """
    is_alone = not dist.is_initialized() or dist.get_world_size() == 1
    if layer_mask.q_length == 1 or is_alone or vars(layer_mask).get("is_known"):
        return
    vars(layer_mask)["is_known"] = True  # one mask serves all layers of its kind
    if isinstance(positions, Tensor) and positions.ndim == 2 and positions.shape[1] == layer_mask.q_length:
        indices = torch.arange(layer_mask.q_length, device=positions.device)
        left_padding = None if layer_mask.q_offset else layer_mask.left_padding
        padding = 0 if left_padding is None else left_padding.to(positions.device)[:, None]
        is_real = indices >= padding
        begins_late = (positions > layer_mask.q_offset) & (indices == padding)
        is_chunk = begins_late.any() | ((positions.diff() > 1) & is_real[..., 1:]).any()
        if bool(is_chunk):
            subject, expected = f"{SUBJECT} position_ids", "positions of a whole sequence"
            given = "those of a chunk, in a model that got no mesh"
            fix = "pass the whole batch to hf.shard_batch(batch, mesh), which cuts it; mesh=None if these are meant"
            raise LayoutError(subject, expected, given, fix)
    if not layer_mask.q_offset:
        cause = f"a model ran without a mesh in a process group of {dist.get_world_size()} ranks"
        advice = "so each rank attended to its own tokens only. To share sequences, call hf.generate with mesh=, "
        advice += "hf.on_mesh, or the model with hf.shard_batch(batch, mesh); with mesh=None if this is meant"
        warn_once(f"{SUBJECT}: {cause}, {advice}.")


def _checked_mask(layer_mask: RecognisedMask | Tensor | None, window: int | None) -> RecognisedMask:
    """Return the mask. Raise unless `mask_function` made it, and for the layer's sliding window."""
    subject = f"{SUBJECT} attention_mask"
    if not isinstance(layer_mask, RecognisedMask):
        given = "no mask" if layer_mask is None else f"a mask of shape {list(getattr(layer_mask, 'shape', []))}"
        fix = "pass a 2D attention_mask of padding, or none"
        raise MaskError(subject, "one made by transformers for attnmesh", given, fix)
    if layer_mask.mask == Full():
        expected, fix = "a causal mask, a sliding window or chunks", "use a causal language model"
        raise MaskError(subject, expected, "a bidirectional mask", fix)
    if window is not None and layer_mask.has_spans:
        masks = (layer_mask.mask, *layer_mask.row_masks)
        windowed = [mask & Window(window - 1, FAR) for mask in masks if mask.max_causal_keys in (FAR, window)]
        if len(windowed) == 1 + len(layer_mask.row_masks):
            return replace(layer_mask, mask=windowed[0], row_masks=tuple(windowed[1:]))
    if window is not None and layer_mask.mask == Causal() and layer_mask.last < window:
        return replace(layer_mask, mask=Window(window - 1))  # the tokens see as much by both
    if window is not None and layer_mask.mask != Window(window - 1):
        given = f"{layer_mask.mask} for a layer with sliding_window={window}"
        fix = "use the layers of a release of transformers, unchanged"
        raise MaskError(f"{SUBJECT} sliding_window", f"{Window(window - 1)}", given, fix)
    return layer_mask


def _check_shards(
    module: nn.Module, q: Tensor, key: Tensor | PendingKV, arguments: dict[str, Any], sequence: ShardedSequence
) -> None:
    """Raise unless a layer without a cache of shards is exact on shards."""
    if key.shape[2] != q.shape[2]:
        given = f"another cache ({q.shape[2]} queries on {key.shape[2]} keys)"
        fix = "pass past_key_values=attnmesh.hf.ShardedCache(model.config, mesh), or use_cache=False"
        raise KernelError(f"{SUBJECT} past_key_values", "a ShardedCache", given, fix)
    config = getattr(module, "config", None)
    router_loss = arguments.get("output_router_logits") or getattr(config, "output_router_logits", False)
    # The loss would balance the tokens of this rank alone.
    if router_loss and sequence.ranks > 1 and not sequence.forward_pass.gathers_routers:
        fix = "set config.output_router_logits = False, or train with hf.on_mesh"
        raise KernelError(f"{SUBJECT} output_router_logits", "no router loss on shards", "True", fix)


def _count_layer(module: nn.Module, arguments: dict[str, Any], sequence: ShardedSequence) -> None:
    """Count a layer's call on shards, and note the model's `num_items_in_batch`."""
    config, record = getattr(module, "config", None), sequence.forward_pass
    is_known = config is None or record.layers > 1  # each look at a configuration takes long
    layers = record.layers if is_known else num_mixing_calls(config)
    recurrent = config is not None and not record.positions_read and is_recurrent(config)
    sequence.count_layer(type(module).__name__, layers, recurrent=recurrent)
    count = arguments.get("num_items_in_batch")
    record.item_count = None if isinstance(count, ItemCount) else count


def _check_cache(pending: PendingKV, layer_mask: RecognisedMask, tokens: int, arguments: dict[str, Any]) -> None:
    """Raise unless the new tokens follow the cached ones, and see no more than the model's stock cache keeps.

    use_cache=False raises only with positions that begin at 0 again: otherwise it may be a default.
    """
    positions = arguments.get("position_ids")
    if arguments.get("use_cache") is False and pending.layer.get_seq_length() and isinstance(positions, Tensor):
        begins_at_0 = positions.shape[-1] == tokens and int(positions.flatten()[0]) == 0
        if begins_at_0 and not _begins_in_padding(positions, layer_mask):
            subject, fix = f"{SUBJECT} use_cache", "leave out past_key_values, or use_cache"
            raise KernelError(subject, "use_cache=True with a ShardedCache", "use_cache=False", fix)
    sharded_cache = pending.layer.sharded_cache
    window = sharded_cache.stock_window
    if window and layer_mask.mask == Causal():
        given = f"a causal mask in {sharded_cache.config.model_type}, whose stock cache keeps {window} tokens"
        fix = "set model.config.sliding_window = None"
        raise MaskError(f"{SUBJECT} sliding_window", f"{Window(window - 1)}", given, fix)


def _begins_in_padding(positions: Tensor, layer_mask: RecognisedMask) -> bool:
    """Return whether new tokens that follow the cached ones begin with padding of position 0 in the first sequence."""
    if isinstance(positions, ShardPositions):  # those of `ChunkedPrefill`, which counts from the cached tokens
        return True
    token_mask = layer_mask.token_mask
    return token_mask is not None and not bool(token_mask[0, layer_mask.q_offset :][:1].all())


@cached_per_world(64)
def _compared(mesh: RankMesh) -> WeakSet[nn.Module]:
    """Return the modules that `compare_weights` has compared on this mesh."""
    return WeakSet()


def compare_weights(module: nn.Module, sequence: ShardedSequence, device: torch.device) -> None:
    """Raise on all ranks if they train a module with different weights.

    Collective once for each module: ranks compare the first values of each weight. Weights that a wrapper has sharded,
    in one dim or as DTensors, differ between ranks and are left out.
    """
    mesh = RankMesh.of(sequence.mesh)
    if mesh.ranks == 1 or not may_compare(device) or module in _compared(mesh):
        return
    weights = {name: x for name, x in module.named_parameters() if x.ndim > 1 and not _is_part(x)}
    heads = {name: x.detach().flatten()[:DIGEST_VALUES] for name, x in weights.items()}
    trained = {f"{name}.requires_grad": x.requires_grad for name, x in weights.items()}
    fields = {"module": type(module).__name__, **fingerprints(heads), **trained}
    Agreement(mesh, f"{SUBJECT} weights", fields).compare()
    _compared(mesh).update({module, *(part for part in module.modules() if not any(map(_is_part, part.parameters())))})


def _is_part(parameter: Tensor) -> bool:
    """Return whether this rank has a part of a parameter, or none of its values."""
    return is_dtensor(parameter) or parameter.is_meta
