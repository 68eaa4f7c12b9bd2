"""MiniMax, whose lightning attention decays by a number for each head. Its cache of states is its own."""

from typing import Any

import torch
from torch import Tensor

from attnmesh.hf.family import ATTENTION_FIELDS, RECURRENT, RECURRENT_STATES, Family, Recurrence
from attnmesh.hf.recurrent.rules import StateLink, in_pieces, run_links, steps_of
from attnmesh.kernels.traced import without_autocast
from attnmesh.recurrent.scan import AffineMap


def lightning_link(query: Tensor, key: Tensor, value: Tensor, slope_rate: Tensor) -> StateLink:
    """Return the link of MiniMax's lightning attention, its A a scalar per head.

    Tensors are (batch, heads, tokens, dim), after the activation and the padding mask, and before the layer's norm.
    `slope_rate`, (heads, 1, 1), is the decay per token and head. Outputs have the dtype of the values.
    """
    dtype = torch.promote_types(value.dtype, torch.float32)
    q, k, v, slope = (x.to(dtype) for x in (query, key, value, slope_rate))
    tokens = value.shape[2]
    position = torch.arange(tokens, dtype=dtype, device=value.device)[:, None]
    linear = torch.exp(-slope * tokens).view(1, -1).expand(value.shape[0], -1)
    with without_autocast(v):
        bias = (k * torch.exp(-slope * (tokens - 1 - position))).mT @ v

    def finish(entering: Tensor) -> tuple[Tensor, Tensor]:
        state = entering.to(dtype)
        outputs = []
        with without_autocast(entering):
            for t in steps_of(value, tokens, "lightning"):
                index = position[: t.stop - t.start]
                decay = torch.exp(-slope * (index - index.T).clamp(min=0)).tril()
                local_outputs = (q[:, :, t] @ k[:, :, t].mT * decay) @ v[:, :, t]
                outputs.append(local_outputs + q[:, :, t] * torch.exp(-slope * (index + 1)) @ state)
                added = (k[:, :, t] * torch.exp(-slope * (len(index) - 1 - index))).mT @ v[:, :, t]
                state = torch.exp(-slope * len(index)) * state + added
        return torch.cat(outputs, dim=2).to(value.dtype), state

    return StateLink(AffineMap(linear, bias), finish)


def lightning(layer: Any, hidden_states: Tensor, **_: Any) -> tuple[Tensor, Tensor]:
    """Return the output and the state of `MiniMaxLightningAttention`."""
    heads = layer.act_fn(layer.qkv_proj(hidden_states)).unflatten(-1, (layer.num_attention_heads, -1)).transpose(1, 2)
    q, k, v = heads.split(layer.head_dim, -1)
    out, state = run_links([lightning_link(q, k, v, layer.slope_rate) for q, k, v in in_pieces(2, q, k, v)], 2)
    out = layer.norm(out.transpose(1, 2).flatten(2))
    return layer.out_proj(torch.sigmoid(layer.output_gate(hidden_states)) * out), state


LIGHTNING = Recurrence(
    reads=(
        *("qkv_proj", "act_fn", "num_attention_heads", "head_dim", "slope_rate", "norm", "output_gate", "out_proj"),
        *("query_decay", "key_decay", "diagonal_decay"),
    ),
    forward=lightning,
)

FAMILIES = (
    Family(
        "minimax",
        f"{ATTENTION_FIELDS} head_dim intermediate_size num_experts num_experts_per_tok num_local_experts "
        "output_router_logits rope_parameters sliding_window",
        sources={"MiniMaxLightningAttention.forward": "063cbf8fe954"},
        uses=(RECURRENT_STATES,),
        layers=RECURRENT,
        recurrences={"MiniMaxLightningAttention": LIGHTNING},
        hides_states=True,
    ),
)
