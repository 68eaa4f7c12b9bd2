"""Inkling, whose attention has a bias by distance: for each query a row of distances here, of all keys in the model.

Its keys, values and outputs have short convolutions, and its queries a temperature that grows with their positions.
"""

from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from attnmesh.errors import KernelError
from attnmesh.hf.families.short_convolutions import SHORT_CONVOLUTION
from attnmesh.hf.family import (
    ATTENTION_FIELDS,
    RECURRENT,
    RECURRENT_STATES,
    Family,
)
from attnmesh.hf.models import ATTN_IMPLEMENTATION, SUBJECT
from attnmesh.hf.recurrent.convolution import CONVOLUTION_SOURCE
from attnmesh.hf.sharded_sequence import ShardedSequence
from attnmesh.hf.transformers_names import stock_of, subclass

BIAS_ARGUMENTS = ("self", "relative_states", "query_positions", "key_positions")
"""Arguments of `InklingRelativeLogits`, whose biases depend on the distance alone."""


def is_relative(module: Any) -> bool:
    """Return whether a module is an `InklingRelativeLogits` with `BIAS_ARGUMENTS`."""
    bases = (base for base in type(module).__mro__ if base.__name__ == "InklingRelativeLogits")
    stock = next((base for base in bases if base.__module__.startswith("transformers.models.inkling.modeling")), None)
    forward = getattr(stock, "forward", None)
    return forward is not None and (*signature(forward).parameters,) == BIAS_ARGUMENTS


def adds_bias(layer: Any) -> bool:
    """Return whether a layer of attention adds the bias of an `InklingRelativeLogits`."""
    return is_relative(getattr(layer, "rel_logits_proj", None))


class NearLogits:
    """First base of a subclass of `InklingRelativeLogits`, which returns the stock bias to other attention."""

    config: Any
    """Configuration of the model, which names its attention."""

    def forward(self, relative_states: Tensor, query_positions: Tensor, key_positions: Tensor) -> Tensor:
        """Return the bias of each query and distance, (batch, heads, queries, distances)."""
        layer: Any = self
        if layer.config._attn_implementation != ATTN_IMPLEMENTATION:
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
        module.__class__ = stock_of(module)
        del module.config


def near_bias(module: Any, bias: Tensor | None, sequence: ShardedSequence | None) -> Tensor | None:
    """Return the bias of each query and distance, from what the relative positions of a layer returned.

    In a model that is not prepared they return the bias of each query and key. The queries are at the last keys.
    """
    if bias is None or isinstance(module.rel_logits_proj, NearLogits):
        return bias
    if sequence is not None:
        fix = "call hf.generate, or the model with what hf.shard_batch returns"
        raise KernelError(f"{SUBJECT} position_bias", "a model prepared for a mesh", "another one", fix)
    queries = bias.shape[3] - bias.shape[2] + torch.arange(bias.shape[2], device=bias.device)
    keys = queries[:, None] - torch.arange(module.rel_extent, device=bias.device)
    return bias.gather(-1, keys.clamp(0, bias.shape[3] - 1).expand(*bias.shape[:2], -1, -1))


def temperature(layer: Any, sequence: ShardedSequence) -> Tensor | None:
    """Return the scale of queries at their positions, divided by the scale at consecutive positions, (tokens,)."""
    if not adds_bias(layer) or layer.is_sliding or (floor := layer.config.log_scaling_n_floor) is None:
        return None

    def scale(positions: Tensor) -> Any:
        growth = torch.log(((positions + 1.0) / floor).clamp(min=1.0))
        return (1.0 + layer.config.log_scaling_alpha * growth).double()  # from float32, as in the stock layer

    positions = sequence.positions()
    ratio: Tensor = scale(positions) / scale(sequence.start + torch.arange(len(positions), device="cpu"))
    return ratio


_INKLING_FIELDS = (
    f"{ATTENTION_FIELDS} head_dim intermediate_size moe_intermediate_size n_routed_experts num_experts_per_tok "
    "num_local_experts number_of_conv_states sliding_window swa_head_dim"
)

FAMILIES = (
    Family(
        "inkling_text",
        _INKLING_FIELDS,
        stores={
            "InklingAttention": "is_sliding rel_extent rel_logits_proj",
            "InklingShortConvolution": "conv_idx layer_idx",
        },
        sources={
            "InklingShortConvolution.forward": "2f807341f371",
            **CONVOLUTION_SOURCE,
            "InklingAttention.forward": "60a46e528d12",
            "InklingRelativeLogits.forward": "039be86e7587",
        },
        uses=(RECURRENT_STATES,),
        layers=RECURRENT,
        window_prefix="swa_",
        recurrences={"InklingShortConvolution": SHORT_CONVOLUTION},
        counts_tokens=lambda config: config.model_type == "inkling_text",
        temperature=temperature,
        adds_bias=adds_bias,
        near_bias=near_bias,
        prepare=prepare_relative,
        restore=restore_relative,
    ),
    Family(
        "inkling2_text", _INKLING_FIELDS, window_prefix="swa_", refused="convolutions whose weights differ by token"
    ),
)
