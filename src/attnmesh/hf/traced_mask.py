"""Attention of a model that PyTorch traces or transforms: PyTorch's own operations under transformers' mask.

A trace has no values, and attnmesh's kernels read positions and padding to find the keys that a query sees. So a traced
model gets the mask as a tensor of (queries, keys), as with "sdpa": `torch.compile` and `torch.export` take one graph.
transformers compiles steps with a static cache by itself, and makes their masks before it.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from attnmesh.core.partial import sum_dtype
from attnmesh.core.scaling import Scaling
from attnmesh.core.selection import Selection
from attnmesh.hf.models import Opaque
from attnmesh.hf.sharded_sequence import ShardedSequence
from attnmesh.hf.sparse.scores import IndexMask
from attnmesh.hf.transformers_names import is_tracing
from attnmesh.kernels.traced import is_traced


class LayerMask(Opaque):
    """Mask of one kind of layer in one forward pass, which transformers passes on unread."""

    ndim = 4
    """Dims of a finished mask: transformers passes a 4D mask on as it is."""

    sequence: ShardedSequence | None = None
    """Tokens of this rank; None if every rank has all tokens."""

    def __getitem__(self, key: Any) -> Any:
        """Return `mask[:, 0]`, which hides keys from the scores of an indexer."""
        full_slice = slice(None)
        if key not in ((full_slice, 0), (full_slice, 0, full_slice, full_slice)):
            self.raise_read("getitem")
        return IndexMask(self)

    def recognised(self) -> Any:
        """Return the mask as a `RecognisedMask`."""
        raise NotImplementedError

    def allow_selection(self) -> None:
        """Let a model read the dtype, which it does before it joins the mask with a selection."""
        vars(self)["dtype"] = torch.bool

    def __and__(self, selected: Any) -> Any:
        """Return the mask in which queries see what is selected, of the keys that they saw."""
        if not isinstance(selected, Selection):
            self.raise_read("and")
        return replace(self.recognised(), selected=selected)

    def contiguous(self) -> Self:
        """Return itself: it has no memory layout, or transformers has made it contiguous."""
        return self


@dataclass(frozen=True)
class TracedMask(LayerMask):
    """Mask as a tensor."""

    visible: Tensor
    """(batch, 1, queries, keys), True where a query sees a key."""
    describe: Callable[[], Any]
    """Return the `RecognisedMask` of the same mask."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the tensor, by which transformers counts keys without a cache."""
        return self.visible.shape

    def __getitem__(self, key: Any) -> Any:
        """Return `mask[:, 0]`, in a trace as a tensor."""
        index_mask = super().__getitem__(key)
        return self.visible[:, 0] if is_traced() else index_mask

    def recognised(self) -> Any:
        """Return the mask as a `RecognisedMask`."""
        return self.describe()

    def seen(self, keys: int) -> Tensor:
        """Return which keys each query sees, (1 or batch, queries, keys)."""
        return self.visible[:, 0]


def in_trace(arguments: dict[str, Any]) -> bool:
    """Return True while PyTorch traces or transforms the model."""
    return is_traced() or is_tracing(arguments.get("attention_mask"))


def needs_tensor(arguments: dict[str, Any]) -> bool:
    """Return True if layers get their mask as a tensor: in a trace, or before transformers traces a static step."""
    in_static_step = arguments["q_length"] == 1 and not arguments.get("allow_is_causal_skip", True)
    return in_static_step or isinstance(arguments.get("q_offset"), Tensor) or in_trace(arguments)


def attend_traced(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scaling: Scaling, sinks: Tensor | None) -> Tensor:
    """Return attention of q to k where it is visible. A query that sees no key has output 0."""
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    has_rules = torch.compiler.is_compiling() or not is_traced()  # none for forward gradients or gradients twice
    if sinks is None and not scaling.capped and has_rules:
        return scaled_dot_product_attention(q, k, v, visible, scale=scaling.scale)
    dtype = sum_dtype(q.dtype)
    products = scaling.cap((q.to(dtype) * scaling.scale) @ k.to(dtype).transpose(-1, -2))
    sees_none = ~visible.any(-1, keepdim=True)
    products = products.masked_fill(~(visible | sees_none), -torch.inf)  # a row of -inf would have NaN as gradients
    if sinks is not None:
        products = torch.cat((products, sinks.to(dtype)[:, None, None].expand(*products.shape[:-1], 1)), -1)
    weights = products.softmax(-1)[..., : k.shape[2]].masked_fill(sees_none, 0.0)
    return (weights @ v.to(dtype)).to(q.dtype)
