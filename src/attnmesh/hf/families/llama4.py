"""Llama 4, whose queries have a temperature that grows with their positions, in layers without a rope."""

from typing import Any

import torch
from torch import Tensor

from attnmesh.hf.family import ATTENTION_FIELDS, Family
from attnmesh.hf.sharded_sequence import ShardedSequence


def temperature(layer: Any, sequence: ShardedSequence) -> Tensor | None:
    """Return the scale of queries at their positions, divided by the scale at consecutive positions, (tokens,)."""
    if not getattr(layer, "attn_temperature_tuning", False) or getattr(layer, "use_rope", True):
        return None

    def scale(positions: Tensor) -> Any:
        growth = torch.log1p(torch.floor((positions.float() + 1.0) / layer.floor_scale))
        return (growth * layer.attn_scale + 1.0).double()  # from float32, as in the stock layer

    indices = sequence.positions()
    positions = indices - sequence.documents.bounds(indices)[0]  # in each token's document
    ratio: Tensor = scale(positions) / scale(sequence.start + torch.arange(len(indices), device="cpu"))
    return ratio


FAMILIES = (
    Family(
        "llama4_text",
        f"{ATTENTION_FIELDS} attention_chunk_size attn_temperature_tuning head_dim intermediate_size "
        "num_experts_per_tok num_local_experts output_router_logits rope_parameters",
        stores={"Llama4TextAttention": "attn_scale attn_temperature_tuning floor_scale use_rope"},
        sources={"Llama4TextAttention.forward": "3785af3f6590"},
        counts_tokens=lambda config: getattr(config, "attn_temperature_tuning", False),
        temperature=temperature,
    ),
)
