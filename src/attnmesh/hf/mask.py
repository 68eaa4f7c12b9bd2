"""What transformers' masks come to here: a mask of positions, and which tokens are real.

transformers describes a mask by a function of indices and a table of padding, and hands what is made of them to each
layer as its `attention_mask`. Here that is a `Seen`. What is neither causal nor a causal window is refused by name.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.masking_utils import causal_mask_function

from attnmesh.errors import MaskError
from attnmesh.hf.batch import Shards
from attnmesh.hf.opaque import Opaque
from attnmesh.mask import Causal, Mask, Window


@dataclass(frozen=True)
class Seen(Opaque):
    """What the tokens of a forward pass see."""

    mask: Mask
    real: Tensor | None = None
    """(batch, tokens so far), False for padding; None if there is none."""
    shards: Shards | None = None
    """Whose tokens they are, if not all ranks have the same."""


Function = Callable[..., Tensor]
"""(batch, head, query, key) indices -> whether the query sees the key, as transformers writes masks."""


def mask_function(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Function = causal_mask_function,
    attention_mask: Tensor | Shards | None = None,
    local_size: int | None = None,
    use_vmap: bool = False,
    **_: Any,
) -> Seen:
    """As transformers calls it, once for each kind of layer in a forward pass."""
    shards = attention_mask if isinstance(attention_mask, Shards) else None
    real = attention_mask.bool() if isinstance(attention_mask, Tensor) and not bool(attention_mask.all()) else None
    if use_vmap:
        fix = "use a model of text whose mask is causal"
        raise MaskError("attention mask", "a causal mask or a sliding window", "a mask function of its own", fix)
    if local_size is None and mask_function is causal_mask_function:
        return Seen(Causal(), real, shards)
    queries = _probes(q_offset, q_length, local_size)
    keys = torch.cat((_probes(kv_offset, kv_length, local_size), queries - (local_size or 0)))
    keys = keys.clamp(min=kv_offset).unique()
    if local_size is not None and _same(mask_function, Window(local_size - 1), queries, keys):
        return Seen(Window(local_size - 1), real, shards)
    if local_size is None:
        given = "one of packed sequences, whose positions start again, or of blocks"
        fix = "pass packed sequences through attnmesh.hf.shard_batch, also on one device"
    else:
        given, fix = f"chunks of {local_size} tokens, or another mask of that size", "use a model with sliding windows"
    raise MaskError("attention mask", "a causal mask or a sliding window", given, fix)


def _probes(first: int, count: int, size: int | None) -> Tensor:
    """Some of the positions: both ends, evenly between, and around multiples of the size."""
    spread = torch.linspace(0, count - 1, 17).long() + first
    edges = (torch.arange(1, 4)[:, None] * (size or 1) + torch.arange(-1, 2)).flatten()
    probes: Tensor = torch.cat((spread, edges[(edges >= first) & (edges < first + count)])).unique()
    return probes


def _same(function: Function, mask: Mask, queries: Tensor, keys: Tensor) -> bool:
    """Whether a function of indices says of these pairs what the mask says."""
    zero = torch.zeros((), dtype=torch.long)
    try:
        said = function(zero, zero, queries[:, None], keys[None])
    except (IndexError, RuntimeError):  # one that looks the positions up in a table of the batch
        return False
    return torch.equal(said.cpu(), mask.visible(queries, keys))
