"""Zaya, whose projections have convolutions of queries and keys, and delay a part of the values by a token."""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from attnmesh.hf.family import ATTENTION_FIELDS, EXPERT_FIELDS, RECURRENT, RECURRENT_STATES, Family, Recurrence
from attnmesh.hf.recurrent.chain import Chain, current_chain
from attnmesh.hf.recurrent.prefill_states import PrefillStates, broadcast_last


def compress(layer: Any, hidden_states: Tensor, conv_mask: Tensor | None = None, **_: Any) -> tuple[Tensor, ...]:
    """Return the queries, keys and values of `ZayaCCAProjection`."""
    if conv_mask is not None:
        hidden_states = hidden_states * conv_mask[:, :, None].to(hidden_states.dtype)
    chain = current_chain.get()
    shape = (*hidden_states.shape[:2], -1, layer.head_dim)
    projected = (layer.q_proj(hidden_states), layer.k_proj(hidden_states))
    groups = layer.num_key_value_groups
    q, k = (x.view(shape) for x in projected)
    mean = (q + k.repeat_interleave(groups, 2)) * 0.5
    means = mean, mean.unflatten(2, (-1, groups)).mean(3)

    def mix(x: Tensor) -> Tensor:
        mixed: Tensor = layer.conv_qk_grouped(layer.conv_qk_depthwise(x))
        return mixed

    mixed = chain.convolve(torch.cat(projected, -1).mT, layer.conv_kernel_size, mix).mT
    parts = mixed.split([x.shape[-1] for x in projected], -1)
    blank = layer.v_proj_delayed(hidden_states.new_zeros(1, 1, layer.hidden_size))
    delayed = chain.convolve((layer.v_proj_delayed(hidden_states) - blank).mT, 1, lambda x: x[:, :, :-1]).mT + blank
    values = torch.cat([layer.v_proj_current(hidden_states), delayed], -1).view(shape)
    queries, keys = (part.reshape(shape) + mean for part, mean in zip(parts, means, strict=True))
    return queries, keys, values


class CompressedStates(PrefillStates):
    """States of `ZayaCCAProjection`: as many tokens as its convolutions read, and the projection of the last token."""

    def entering(self) -> list[Tensor] | None:
        """Return the cached states, each after a token that nobody reads; None if there are none."""
        conv = self.cache.get_conv_state(self.layer.layer_idx, state_idx=0)
        last = self.cache.get_recurrent_state(self.layer.layer_idx, state_idx=0)
        if conv is None:
            return None
        blank = self.layer.v_proj_delayed(last.new_zeros(1, self.layer.hidden_size))
        return [pad(conv, (1, 0)), pad((last - blank)[..., None], (1, 0))]

    def store(self, chain: Chain) -> None:
        """Store the states after the last part in the cache of every rank."""
        conv, last = (broadcast_last(x[..., 1:], chain) for x in chain.leaving)
        blank = self.layer.v_proj_delayed(last.new_zeros(1, self.layer.hidden_size))
        self.cache.update_conv_state(conv, self.layer.layer_idx)
        self.cache.update_recurrent_state(last[..., 0] + blank, self.layer.layer_idx)


COMPRESSED = Recurrence(
    functions={"repeat_kv": None},
    reads=(
        *("q_proj", "k_proj", "v_proj_current", "v_proj_delayed", "conv_qk_depthwise", "conv_qk_grouped"),
        *("conv_kernel_size", "num_key_value_groups", "head_dim", "hidden_size"),
    ),
    outputs=3,
    forward=compress,
    states=CompressedStates,
)

FAMILIES = (
    Family(
        "zaya",
        f"{ATTENTION_FIELDS} {EXPERT_FIELDS} head_dim rope_parameters sliding_window",
        sources={"ZayaCCAProjection.forward": "2f5b003c1caa"},
        uses=(RECURRENT_STATES,),
        layers=RECURRENT,
        recurrences={"ZayaCCAProjection": COMPRESSED},
    ),
)
