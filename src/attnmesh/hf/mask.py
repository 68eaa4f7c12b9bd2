"""Mask function registered with transformers: returns a `MaskSpec`, which every layer gets as its `attention_mask`.

transformers describes a mask by a function of indices and a 2D table of padding. `mask_function` recognises causal
masks and causal sliding windows from the function's values, and raises on any other mask.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function

from attnmesh.core.checks import require
from attnmesh.core.mask import Causal, Full, Mask, Window
from attnmesh.errors import MaskError
from attnmesh.hf.models import Opaque, check_layers
from attnmesh.hf.shards import ShardMask, Shards


@dataclass(frozen=True)
class MaskSpec(Opaque):
    """Mask and padding of one kind of layer in one forward pass."""

    mask: Mask
    q_length: int
    q_offset: int
    """Position of the first query."""
    kv_offset: int
    """Position of the first key."""
    token_mask: Tensor | None = None
    """(batch, keys), False for padding; None without padding. It may be shorter than a static cache."""
    shards: Shards | None = None
    """Tokens of this rank; None if every rank has all tokens."""
    covered: int | None = None
    """Keys that the given `attention_mask` covers, if fewer than there are; else None."""

    ndim = 4
    """Dims of a finished mask: transformers passes a 4D mask on as it is."""

    def contiguous(self) -> "MaskSpec":
        """Return itself, because it has no memory layout."""
        return self

    def __getitem__(self, key: Any) -> "MaskSpec":
        """Return the mask of the last queries: `mask[:, :, -n:, :]`, for models that keep few logits."""
        whole = slice(None)
        rows = key[2] if isinstance(key, tuple) and len(key) == 4 and (*key[:2], key[3]) == (whole,) * 3 else None
        first, stop, step = rows.indices(self.q_length) if isinstance(rows, slice) else (0, 0, 0)
        if (stop, step) != (self.q_length, 1) or (first and self.shards is not None):
            self._raise_read("getitem")
        return replace(self, q_offset=self.q_offset + first, q_length=self.q_length - first)


IndexFunction = Callable[..., Tensor]
"""(batch, head, query, key) indices -> True where the query attends to the key, as transformers defines masks."""


def mask_function(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: IndexFunction = causal_mask_function,
    attention_mask: Tensor | MaskSpec | None = None,
    local_size: int | None = None,
    use_vmap: bool = False,
    config: PreTrainedConfig | None = None,
    **_: Any,
) -> MaskSpec:
    """Return the `MaskSpec` of one kind of layer. transformers calls it once per kind and forward pass."""
    if isinstance(attention_mask, MaskSpec):
        return attention_mask  # with a static cache, `generate` makes the mask before the model runs
    q_offset, kv_offset = int(q_offset), int(kv_offset)  # a static cache passes tensors
    shards = attention_mask.shards if isinstance(attention_mask, ShardMask) else None
    token_mask = covered = None
    if shards is None:
        token_mask = _token_mask(attention_mask, kv_length, kv_offset)
        width = attention_mask.shape[-1] if isinstance(attention_mask, Tensor) else None
        covered = width if width is not None and width < q_offset + q_length else None
    elif config is not None:
        check_layers(config)
    expected, fix = "a causal mask or a sliding window", "use a text model with a causal mask"
    require(not use_vmap, MaskError, "attention mask", expected, "a custom mask function", fix)
    mask = _recognise(mask_function, local_size, (q_offset, q_length), (kv_offset, kv_length))
    return MaskSpec(mask, q_length, q_offset, kv_offset, token_mask, shards, covered)


def _recognise(
    function: IndexFunction, local_size: int | None, query_range: tuple[int, int], key_range: tuple[int, int]
) -> Mask:
    """Return the mask that a function of indices computes, by its values at some positions. Raise on other masks.

    Each range is an offset and a length.
    """
    if local_size == 0 or (local_size is None and function is causal_mask_function):  # size 0 means no window
        return Causal()
    if local_size is None and function is bidirectional_mask_function:
        return Full()  # transformers also makes it for cross-attention that is never called
    if local_size is not None and _equals_window(function, local_size, query_range, key_range):
        return Window(local_size - 1)
    if local_size is None:
        given = "packed sequences (positions that restart) or a block mask"
        fix = "pass packed sequences through attnmesh.hf.shard_batch, also on one device"
    else:
        given, fix = f"chunks of {local_size} tokens, or another mask of that size", "use a model with sliding windows"
    raise MaskError("attention mask", "a causal mask or a sliding window", given, fix)


def _token_mask(attention_mask: Tensor | None, kv_length: int, kv_offset: int) -> Tensor | None:
    """Return the part of a 2D mask that covers the keys, as bools; None without padding."""
    if attention_mask is None:
        return None
    if attention_mask.ndim != 2:
        fix = "pass a 2D attention_mask of padding, or none"
        raise MaskError("attention mask", "a 2D mask of padding", f"one of shape {tuple(attention_mask.shape)}", fix)
    token_mask = attention_mask.bool()[:, kv_offset : kv_offset + kv_length]
    return None if bool(token_mask.all()) else token_mask


def _equals_window(
    function: IndexFunction, size: int, query_range: tuple[int, int], key_range: tuple[int, int]
) -> bool:
    """Return True if a function of indices is the causal window of this size, at some positions of each range."""
    queries = _sample_positions(*query_range, size)
    keys = torch.cat((_sample_positions(*key_range, size), queries - size)).clamp(min=key_range[0]).unique()
    zero = torch.zeros((), dtype=torch.long)
    try:
        visible = function(zero, zero, queries[:, None], keys[None])
    except (IndexError, RuntimeError):  # a function that looks positions up in a table of the batch
        return False
    return torch.equal(visible.cpu(), Window(size - 1).visible(queries, keys))


def _sample_positions(first: int, count: int, size: int) -> Tensor:
    """Return some positions: both ends, evenly between, and next to multiples of the window size."""
    spread = torch.linspace(0, count - 1, 17).long() + first
    edges = (torch.arange(1, 4)[:, None] * size + torch.arange(-1, 2)).flatten()
    positions: Tensor = torch.cat((spread, edges[(edges >= first) & (edges < first + count)])).unique()
    return positions
