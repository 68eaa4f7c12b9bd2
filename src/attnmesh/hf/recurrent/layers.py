"""Recurrent layers of transformers whose recurrence is no function that could be replaced, on shards."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import conv1d, pad

from attnmesh.hf.recurrent.chain import current_chain, split
from attnmesh.hf.recurrent.rules import ShardOfStates, joined, lightning_link, rg_lru_link


def run_links(
    links: Sequence[ShardOfStates], dim: int, convert: Callable[[Tensor], Tensor] = lambda state: state
) -> tuple[Tensor, Tensor]:
    """Return the outputs of this rank's tokens, along `dim`, and the state after them. Each piece has a link.

    `convert` is that of `Chain.enter`.
    """
    link = joined(links, dim)
    return link.finish(current_chain.get().enter(link.map, convert))


def _in_pieces(dim: int, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield the tokens of each piece of this rank's part."""
    return zip(*(split(x, current_chain.get().pieces, dim) for x in tensors), strict=True)


def lightning(layer: Any, hidden_states: Tensor, **_: Any) -> tuple[Tensor, Tensor]:
    """Return the output and the state of `MiniMaxLightningAttention`."""
    heads = layer.act_fn(layer.qkv_proj(hidden_states)).unflatten(-1, (layer.num_attention_heads, -1)).transpose(1, 2)
    q, k, v = heads.split(layer.head_dim, -1)
    out, state = run_links([lightning_link(q, k, v, layer.slope_rate) for q, k, v in _in_pieces(2, q, k, v)], 2)
    out = layer.norm(out.transpose(1, 2).flatten(2))
    return layer.out_proj(torch.sigmoid(layer.output_gate(hidden_states)) * out), state


def compressed(layer: Any, hidden_states: Tensor, conv_mask: Tensor | None = None, **_: Any) -> tuple[Tensor, ...]:
    """Return the queries, keys and values of `ZayaCCAProjection`."""
    if conv_mask is not None:
        hidden_states = hidden_states * conv_mask[:, :, None].to(hidden_states.dtype)
    chain, shape = current_chain.get(), (*hidden_states.shape[:2], -1, layer.head_dim)
    projected, groups = (layer.q_proj(hidden_states), layer.k_proj(hidden_states)), layer.num_key_value_groups
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


class ShardedRglru:
    """First base of a subclass of `RecurrentGemmaRglru`, whose state goes across ranks on shards."""

    def _rnn_scan(self, hidden_states: Tensor, recurrent_gate: Tensor, reset: Tensor, *args: Any, **kwargs: Any) -> Any:
        if current_chain.get(None) is None:
            return super()._rnn_scan(hidden_states, recurrent_gate, reset, *args, **kwargs)  # type: ignore[misc]
        return run_links([rg_lru_link(*x) for x in _in_pieces(1, hidden_states, recurrent_gate, reset)], 1)[0], None


class ShardedConv1d(nn.Conv1d):
    """A causal convolution of one channel each, which takes a halo on shards."""

    def forward(self, input: Tensor) -> Tensor:
        """Return the convolution, padded on both sides as `nn.Conv1d` pads."""
        chain, size = current_chain.get(None), self.kernel_size[0] - 1
        if chain is None:
            return super().forward(input)
        return chain.convolve(
            input, size, lambda x: conv1d(pad(x, (0, size)), self.weight, self.bias, groups=self.groups)
        )
