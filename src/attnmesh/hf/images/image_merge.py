"""The merge of text and images: a model runs up to its text model, which then runs on shards of the merged embeddings.

A model checks that there are as many image tokens as features, and finds positions from whole sequences. So every rank
calls it with all tokens and all images, and stops where the text model begins.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from attnmesh.errors import InputError, KernelError, MaskError, ShapeError
from attnmesh.hf.images.inputs import IMAGE_INPUTS, ImageTokens, PositionShift, check_cross_mask, fingerprints_of
from attnmesh.hf.images.spans import Span
from attnmesh.hf.layer_mask import ONE_PROMPT, SAME_PLACES, USE_SDPA, RecognisedMask
from attnmesh.hf.sharded_sequence import ShardedSequence

PER_TOKEN_INPUTS = {
    *("inputs_embeds", "per_layer_inputs", "visual_pos_masks", "vision_mask", "image_mask"),
    *("mm_token_type_ids", "moe_mm_token_type_ids", "token_type_ids"),
}
"""Arguments of text models with one value per token, along dim 1."""

VISUAL = ("visual_pos_masks", "vision_mask")
"""Arguments of text models that are True for image tokens."""

PER_IMAGE_TOKEN = {"deepstack_visual_embeds", "deepstack_features"}
"""Arguments of text models with features that layers add, a list or dict by layer of (image tokens, width)."""

FEATURES = "cross_attention_states"
"""Argument of text models with features of all images, to which every token may attend."""

PER_QUERY = {"cross_attention_mask", "full_text_row_masked_out_mask"}
"""Arguments beside `FEATURES`, with rows of tokens along dim 2."""

SET_HERE = {
    *("attention_mask", "position_ids", "past_key_values", "use_cache", "return_dict", "logits_to_keep"),
    *("output_attentions", "output_hidden_states", "output_router_logits", "cache_position", "num_items_in_batch"),
    *("labels", "shift_labels"),
}
"""Arguments of text models that are set for a shard, and arguments that change no hidden state."""

SUBJECT = "generate images"


class _Reached(Exception):
    """Raised where the text model begins, with its arguments."""


@dataclass(frozen=True)
class MergedPrompt:
    """A prompt whose images are merged into its embeddings: the arguments of a text model, for the whole sequence."""

    decoder: nn.Module
    arguments: dict[str, Any]
    positions: Tensor | None
    """(batch, length) or (dims, batch, length); None if the text model counts tokens."""
    image_tokens: ImageTokens
    masks: dict[str, RecognisedMask]
    """Mask of each kind of layer, if some have spans; "" for all layers."""
    spans: list[Span]
    decoding: dict[str, Any]
    """Inputs for images that decoding takes too: they say which images new tokens see."""

    @property
    def reaches_end(self) -> bool:
        """Return whether the last token is in a span: earlier tokens see it."""
        return bool(self.spans) and self.spans[-1][1] == self.image_tokens.is_image.shape[1]

    @property
    def shift(self) -> PositionShift | None:
        """The `shift` of a cache after this prompt; None for several sequences, and where new tokens see images."""
        if len(self.image_tokens.is_image) > 1 or FEATURES in self.arguments:
            return None
        length = self.image_tokens.is_image.shape[1]
        last = length - 1 if self.positions is None else int(self.positions[..., -1].max())
        places = self.image_tokens.is_image.nonzero()
        return PositionShift(int(places[-1, 1]) + 1 if len(places) else 0, last + 1 - length)

    def mask(self, tokens: int, first: int, sequence: ShardedSequence | None) -> Any:
        """Return the masks of some tokens from `first` on: of all ranks', or of this rank's share of `sequence`."""
        masks = {
            kind: replace(mask, q_length=tokens, q_offset=first, sequence=sequence, token_mask=None, left_padding=None)
            for kind, mask in self.masks.items()
        }
        return masks.get("", masks)

    def run(self, index: Tensor, **options: Any) -> None:
        """Run the text model on the tokens of these indices."""
        part = {name: cut_argument(name, value, index, self.arguments) for name, value in self.arguments.items()}
        self.decoder(**part, use_cache=True, **options)


def merge_images(
    model: PreTrainedModel, ids: Tensor, attention_mask: Tensor | None, images: Mapping[str, Any], left: int
) -> MergedPrompt:
    """Return the prompt with its images merged.

    Raises if the images do not fit the prompt, if the model does not merge them into its embeddings, or if one of the
    `left` last tokens, which are left to decoding, is an image token.
    """
    decoder: Any = model.get_decoder()
    attention_mask = torch.ones_like(ids) if attention_mask is None else attention_mask
    check_cross_mask(SUBJECT, ids, images)
    arguments = _reach(model, decoder, {"input_ids": ids, "attention_mask": attention_mask, **images})
    _go_on_from_last(model, arguments.get("position_ids"))
    text_inputs = text_arguments(SUBJECT, type(model).__name__, decoder, arguments)
    if FEATURES in text_inputs:
        is_image = torch.ones_like(ids, dtype=torch.bool)
        cross_inputs = {name: x for name, x in images.items() if name in PER_QUERY}
        image_tokens = ImageTokens(is_image, fingerprints_of(ids, images))
        return MergedPrompt(decoder, text_inputs, arguments.get("position_ids"), image_tokens, {}, [], cross_inputs)
    embeds = text_inputs["inputs_embeds"]
    is_image = (embeds != model.get_input_embeddings()(ids).to(embeds.dtype)).any(-1) & attention_mask.bool()
    if bool(is_image[:, -left:].any()):
        expected = f"{left} tokens of text at the end of a prompt"
        raise ShapeError(SUBJECT, expected, "an image token", "add text after the image")
    masks = _masks_with_spans(arguments.get("attention_mask"))
    spans = [*next((mask.mask.span_pairs for mask in masks.values() if mask.mask.span_pairs), ())]
    for start, stop in spans:
        is_image[:, start:stop] = True
    fingerprints = fingerprints_of(ids, {**images, "spans": torch.tensor(spans, device="cpu").view(-1, 2)})
    return MergedPrompt(
        decoder, text_inputs, arguments.get("position_ids"), ImageTokens(is_image, fingerprints), masks, spans, {}
    )


def _go_on_from_last(model: PreTrainedModel, positions: Tensor | None) -> None:
    """Let the position of the last token decide where generation goes on, as without a cache.

    The model keeps the highest position instead, which a video may have before a short text.
    """
    if positions is None or positions.ndim < 3:
        return
    lag = positions[..., -1].amax(0) - positions.amax((0, 2))
    for module in model.modules():
        if (deltas := vars(module).get("rope_deltas")) is not None:
            vars(module)["rope_deltas"] = deltas + lag[:, None]


def text_arguments(subject: str, name: str, decoder: nn.Module, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a text model that have values per token. Raise if the model passes it others."""
    ignored = SET_HERE | (IMAGE_INPUTS - signature(decoder.forward).parameters.keys())
    text_inputs = {key: value for key, value in arguments.items() if key not in ignored and value is not None}
    crossed = {FEATURES, "input_ids", *PER_QUERY} if FEATURES in text_inputs else set()
    placed = PER_IMAGE_TOKEN if text_inputs.keys() & {*VISUAL} else set()  # the tokens of other features are unknown
    unknown = sorted(text_inputs.keys() - PER_TOKEN_INPUTS - placed - crossed)
    reason = f"takes {', '.join(unknown)}" if unknown else "is not called"
    fits = not unknown and ("inputs_embeds" in text_inputs or bool(crossed))
    if not fits:
        expected = "a model that merges images into the embeddings of its text model"
        raise KernelError(subject, expected, f"{name}, whose text model {reason}", USE_SDPA)
    return text_inputs


def _masks_with_spans(attention_mask: Any) -> dict[str, RecognisedMask]:
    """Return the masks that a model passes to its text model, if some have spans."""
    masks = attention_mask if isinstance(attention_mask, dict) else {"": attention_mask}
    specs = {kind: mask for kind, mask in masks.items() if isinstance(mask, RecognisedMask)}
    if any(mask.row_masks for mask in specs.values()):
        raise MaskError("attention mask", SAME_PLACES, "sequences with images in other places", ONE_PROMPT)
    return specs if any(mask.has_spans for mask in specs.values()) else {}


def _reach(model: PreTrainedModel, decoder: nn.Module, arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments with which the model calls its text model."""

    def stop(_: nn.Module, positional: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        raise _Reached(keywords if not positional else {**keywords, "positional arguments": positional})

    handle = decoder.register_forward_pre_hook(stop, with_kwargs=True)
    try:
        with torch.no_grad():
            model(**arguments, use_cache=True)
    except _Reached as reached:
        text_inputs: dict[str, Any] = reached.args[0]
        return text_inputs
    except InputError:
        raise
    except (ValueError, RuntimeError, LookupError, TypeError, AttributeError, StopIteration) as error:
        given, fix = f"{type(error).__name__}: {error}", "pass all that the model's own processor returns"
        raise ShapeError(SUBJECT, "images that fit the prompt and the model", " ".join(given.split()), fix) from error
    finally:
        handle.remove()
    return {}


def cut_argument(name: str, value: Any, index: Tensor, arguments: Mapping[str, Any]) -> Any:
    """Return the part of an argument that belongs to tokens: its values, or the features of its image tokens."""
    if name == FEATURES:
        return value
    if name in PER_QUERY:
        return value[:, :, index]
    if name in PER_TOKEN_INPUTS or name == "input_ids":
        return value[:, index]
    visual: Tensor = next(arguments[mask] for mask in VISUAL if mask in arguments)
    rows = (visual.flatten().long().cumsum(0) - 1).view_as(visual)[:, index][visual[:, index]]
    if isinstance(value, dict):
        return {layer: features[rows] for layer, features in value.items()}
    return [features[rows] for features in value]
