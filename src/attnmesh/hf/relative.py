"""Bias by distance in Inkling's attention: a row of distances for each query, where the model has one of all keys."""

from typing import Any

import torch
from torch import Tensor, nn

from attnmesh.errors import KernelError, require
from attnmesh.hf.models import NAME, SUBJECT
from attnmesh.hf.shards import Shards
from attnmesh.hf.transformers_names import is_relative, subclass


class NearLogits:
    """First base of a subclass of `InklingRelativeLogits`, which returns the stock bias to other attention."""

    config: Any
    """Configuration of the model, which names its attention."""

    def forward(self, relative_states: Tensor, query_positions: Tensor, key_positions: Tensor) -> Tensor:
        """Return the bias of each query and distance, (batch, heads, queries, distances)."""
        layer: Any = self
        if layer.config._attn_implementation != NAME:
            stock: Any = super()
            dense: Tensor = stock.forward(relative_states, query_positions, key_positions)
            return dense
        near: Tensor = relative_states @ layer.proj
        return near.transpose(1, 2)


def prepare_relative(model: nn.Module) -> None:
    """Make the relative positions of a model return biases by distance, unless they do."""
    for module in model.modules():
        relative: Any = getattr(module, "rel_logits_proj", None)
        if is_relative(relative) and not isinstance(relative, NearLogits):
            stock: type = type(relative)
            relative.__class__ = subclass(stock, NearLogits)
            relative.config = module.config


def restore_relative(module: Any) -> None:
    """Give a module its own class back, if `prepare_relative` changed it."""
    if isinstance(module, NearLogits):
        module.__class__ = type(module).__mro__[2]
        del module.config


def near_bias(module: Any, bias: Tensor | None, shards: Shards | None) -> Tensor | None:
    """Return the bias of each query and distance, from what the relative positions of a layer returned.

    Those of a model that is not prepared return it for each query and key. The queries are the last keys.
    """
    if bias is None or isinstance(module.rel_logits_proj, NearLogits):
        return bias
    given, fix = "another one", "call hf.generate, or the model with what hf.shard_batch returns"
    require(shards is None, KernelError, f"{SUBJECT} position_bias", "a model prepared for a mesh", given, fix)
    queries = bias.shape[3] - bias.shape[2] + torch.arange(bias.shape[2], device=bias.device)
    keys = queries[:, None] - torch.arange(module.rel_extent, device=bias.device)
    return bias.gather(-1, keys.clamp(0, bias.shape[3] - 1).expand(*bias.shape[:2], -1, -1))
