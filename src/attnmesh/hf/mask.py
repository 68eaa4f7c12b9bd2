"""The mask function of transformers for attnmesh: a mask of positions, and which tokens are real.

transformers describes a mask by a function of indices and a table of padding, and passes what is made of them to each
layer as its `attention_mask`. Here that is a `MaskSpec`. A mask that is neither causal nor a causal window raises.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function

from attnmesh.core.mask import Causal, Full, Mask, Window
from attnmesh.errors import MaskError
from attnmesh.hf.models import check_layers
from attnmesh.hf.opaque import Opaque
from attnmesh.hf.shards import ShardMask, Shards


@dataclass(frozen=True)
class MaskSpec(Opaque):
    """The keys that the tokens of a forward pass attend to."""

    mask: Mask
    q_length: int
    q_offset: int
    """The position of the first query."""
    kv_offset: int
    """The position of the first key."""
    real: Tensor | None = None
    """(batch, keys), False for padding; None if there is none. It may end before the room of a static cache does."""
    shards: Shards | None = None
    """Whose tokens they are, if not all ranks have the same."""
    covered: int | None = None
    """Keys that the mask of padding covers; None if all up to the last query, or without such a mask."""

    ndim = 4
    """The dims of a mask that is ready: transformers passes such a mask on."""

    def contiguous(self) -> "MaskSpec":
        """Return itself: a mask of positions has no memory to lay out."""
        return self

    def __getitem__(self, key: Any) -> "MaskSpec":
        """Return the mask of the last queries, as models ask for it that keep only the logits of these."""
        whole = slice(None)
        rows = key[2] if isinstance(key, tuple) and len(key) == 4 and (*key[:2], key[3]) == (whole,) * 3 else None
        first, stop, step = rows.indices(self.q_length) if isinstance(rows, slice) else (0, 0, 0)
        if (stop, step) != (self.q_length, 1) or (first and self.shards is not None):
            self._refuse("getitem")
        return replace(self, q_offset=self.q_offset + first, q_length=self.q_length - first)


Function = Callable[..., Tensor]
"""(batch, head, query, key) indices -> whether the query sees the key, as transformers writes masks."""


def mask_function(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Function = causal_mask_function,
    attention_mask: Tensor | MaskSpec | None = None,
    local_size: int | None = None,
    use_vmap: bool = False,
    config: PreTrainedConfig | None = None,
    **_: Any,
) -> MaskSpec:
    """Return the mask of one kind of layer. transformers calls it once for each kind in a forward pass."""
    if isinstance(attention_mask, MaskSpec):
        return attention_mask  # `generate` makes it before the model runs, for a static cache
    shards = attention_mask.shards if isinstance(attention_mask, ShardMask) else None
    if shards is not None and config is not None:
        check_layers(config)
    padding = None if shards is not None else _padding(attention_mask, kv_length, kv_offset)
    q_offset, kv_offset = int(q_offset), int(kv_offset)  # a static cache keeps them in tensors
    covered = attention_mask.shape[-1] if isinstance(attention_mask, Tensor) and shards is None else None
    covered = covered if covered is not None and covered < q_offset + q_length else None
    where = (q_length, q_offset, kv_offset, padding, shards, covered)
    if use_vmap:
        fix = "use a model of text whose mask is causal"
        raise MaskError("attention mask", "a causal mask or a sliding window", "a mask function of its own", fix)
    if local_size == 0 or (local_size is None and mask_function is causal_mask_function):  # a window of 0 is none
        return MaskSpec(Causal(), *where)
    if local_size is None and mask_function is bidirectional_mask_function:
        return MaskSpec(Full(), *where)  # made for cross-attention, also where there is none
    queries = _probes(q_offset, q_length, local_size)
    keys = torch.cat((_probes(kv_offset, kv_length, local_size), queries - (local_size or 0)))
    keys = keys.clamp(min=kv_offset).unique()
    if local_size is not None and _same(mask_function, Window(local_size - 1), queries, keys):
        return MaskSpec(Window(local_size - 1), *where)
    if local_size is None:
        given = "one of packed sequences, whose positions start again, or of blocks"
        fix = "pass packed sequences through attnmesh.hf.shard_batch, also on one device"
    else:
        given, fix = f"chunks of {local_size} tokens, or another mask of that size", "use a model with sliding windows"
    raise MaskError("attention mask", "a causal mask or a sliding window", given, fix)


def _padding(given: Tensor | None, kv_length: int, kv_offset: int) -> Tensor | None:
    """Return which of the keys are real, as far as the mask goes; None if all of them are."""
    if given is None:
        return None
    if given.ndim != 2:
        fix = "pass a 2D attention_mask of padding, or none"
        raise MaskError("attention mask", "a 2D mask of padding", f"one of shape {tuple(given.shape)}", fix)
    real = given.bool()[:, kv_offset : kv_offset + kv_length]
    return None if bool(real.all()) else real


def _probes(first: int, count: int, size: int | None) -> Tensor:
    """Return some of the positions: both ends, evenly between, and around multiples of the size."""
    spread = torch.linspace(0, count - 1, 17).long() + first
    edges = (torch.arange(1, 4)[:, None] * (size or 1) + torch.arange(-1, 2)).flatten()
    probes: Tensor = torch.cat((spread, edges[(edges >= first) & (edges < first + count)])).unique()
    return probes


def _same(function: Function, mask: Mask, queries: Tensor, keys: Tensor) -> bool:
    """Return whether a function of indices says of these pairs what the mask says."""
    zero = torch.zeros((), dtype=torch.long)
    try:
        said = function(zero, zero, queries[:, None], keys[None])
    except (IndexError, RuntimeError):  # one that looks the positions up in a table of the batch
        return False
    return torch.equal(said.cpu(), mask.visible(queries, keys))
