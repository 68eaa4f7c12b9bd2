"""Training with images: a model merges whole sequences, and its text model gets this rank's tokens of them.

Every rank runs the tower on all images. Gradients reach the features of this rank's image tokens, so the gradients of
the tower are averaged over ranks as all others are.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial as partial_of
from typing import Any
from weakref import WeakSet

import torch
from torch import nn
from transformers import PreTrainedModel

from attnmesh.errors import KernelError
from attnmesh.hf.images.image_merge import SET_HERE, cut_argument, text_arguments
from attnmesh.hf.layer_mask import USE_SDPA, RecognisedMask
from attnmesh.hf.shard_tensors import ShardMask, ShardPositions, WholeIds, WholeMask
from attnmesh.hf.sharded_sequence import ShardedSequence

CUTTING: WeakSet[nn.Module] = WeakSet()
"""Text models with the hook that cuts whole sequences with images. The mask says which sequences these are."""


def prepare_text_model(running: Sequence[nn.Module]) -> None:
    """Let the text model of the outermost model in `running` cut its arguments to this rank's tokens."""
    model = next((module for module in running if isinstance(module, PreTrainedModel)), None)
    if model is None:
        return  # a wrapper moves the batch
    decoder: Any = model.get_decoder()
    name = type(model).__name__
    if not isinstance(decoder, nn.Module) or decoder in running:
        expected = "a model that merges images into the embeddings of its text model"
        raise KernelError("train images", expected, name, f"leave token_type_ids and images out, or {USE_SDPA}")
    if decoder not in CUTTING:
        CUTTING.add(decoder)
        decoder.register_forward_pre_hook(partial_of(_cut, name), with_kwargs=True, prepend=True)


def _cut(name: str, decoder: nn.Module, args: tuple[Any, ...], arguments: dict[str, Any]) -> Any:
    """Return the arguments of this rank's tokens, if the mask is of a whole sequence with images."""
    mask, positions = arguments.get("attention_mask"), arguments.get("position_ids")
    if (sequence := _sequence_to_cut(mask)) is None:
        return None
    text_inputs = text_arguments(
        "train images", name, decoder, arguments if not args else {**arguments, "positional arguments": args}
    )
    sequence.forward_pass.begin()
    sequence.forward_pass.has_positions = True
    if isinstance(ids := text_inputs.get("input_ids"), WholeIds):
        text_inputs["input_ids"] = ids.plain()
    index = sequence.positions().to(next(x for x in text_inputs.values() if isinstance(x, torch.Tensor)).device)
    positions = torch.arange(sequence.length, device=index.device)[None] if positions is None else positions
    shard_inputs = {key: cut_argument(key, value, index, text_inputs) for key, value in text_inputs.items()}
    shard_inputs["position_ids"] = ShardPositions.of(
        positions[..., index], sequence=sequence, last=int(positions.max())
    )
    shard_inputs["attention_mask"] = _cut_mask(mask, index)
    passed_on = {key: value for key, value in arguments.items() if key in SET_HERE and key != "cache_position"}
    return (), {**passed_on, **shard_inputs}


def _sequence_to_cut(mask: Any) -> ShardedSequence | None:
    """Return the sequence of a mask that is to be cut into shards; None for all other masks."""
    if isinstance(mask, dict):
        return next(
            (sequence for kind_mask in mask.values() if (sequence := _sequence_to_cut(kind_mask)) is not None), None
        )
    if isinstance(mask, WholeMask):
        return mask.sequence
    is_whole = isinstance(mask, RecognisedMask) and mask.sequence is not None and mask.q_length == mask.sequence.length
    return mask.sequence if is_whole and not mask.sequence.cached else None


def _cut_mask(mask: Any, index: torch.Tensor) -> Any:
    """Return the part of a mask, or of the masks of several kinds of layers, for the tokens of these indices."""
    if isinstance(mask, dict):
        return {kind: _cut_mask(kind_mask, index) for kind, kind_mask in mask.items()}
    if isinstance(mask, RecognisedMask):
        return replace(mask, q_length=len(index))
    return ShardMask.of(mask.plain()[:, index], sequence=mask.sequence) if isinstance(mask, WholeMask) else mask
