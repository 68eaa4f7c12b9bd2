"""Families with layers of Mamba-2, whose states decay by a number for each head."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from attnmesh.hf.family import (
    ATTENTION_FIELDS,
    LAYERS_WITHOUT_CACHE,
    RECURRENT,
    RECURRENT_STATES,
    Family,
    Pins,
    Recurrence,
)
from attnmesh.hf.recurrent.chain import HeadChain
from attnmesh.hf.recurrent.convolution import CONVOLUTION, CONVOLUTION_SOURCE
from attnmesh.hf.recurrent.rules import Rule, StateLink, Stock, step_sizes
from attnmesh.kernels.traced import without_autocast
from attnmesh.recurrent.scan import AffineMap


def chunk_scan_link(
    stock: Stock, hidden_states: Tensor, dt: Tensor, rates: Tensor, writes: Tensor, reads: Tensor, **options: Any
) -> StateLink:
    """Link of Mamba-2, its A a scalar per head. States are (state size, head size); outputs are the stock rule's.

    Decays are summed from the end of the shard, where they are close to one, so long shards keep their precision.
    """
    dt_options = options.get("dt_bias"), bool(options.get("dt_softplus"))
    sizes = torch.clamp(step_sizes(dt, *dt_options), *options.get("dt_limit", (0.0, float("inf")))).float()
    decay = sizes * rates.float()
    later_decay = decay.flip(1).cumsum(1).flip(1) - decay
    linear = decay.sum(1).exp()
    weighted = hidden_states.float() * (sizes * later_decay.exp())[..., None]
    grouped = weighted.unflatten(2, (writes.shape[2], -1))
    with without_autocast(grouped):
        bias = torch.einsum("btgk,btghv->bghkv", writes.float(), grouped).flatten(1, 2)

    def finish(entering: Tensor) -> tuple[Tensor, Tensor]:
        states = {"initial_states": entering.transpose(-1, -2), "return_final_states": True}
        outputs, leaving = stock(hidden_states, dt, rates, writes, reads, **options, **states)
        return outputs, leaving.transpose(-1, -2)

    return StateLink(AffineMap(linear, bias), finish)


def chunk_scan_by_heads(
    stock: Stock,
    chain: HeadChain,
    hidden_states: Tensor,
    dt: Tensor,
    rates: Tensor,
    writes: Tensor,
    reads: Tensor,
    **options: Any,
) -> Any:
    """Return what the rule of Mamba-2 returns for all tokens of this rank's heads. Groups go with their heads."""
    chain.check_divided({"heads": hidden_states.shape[2], "groups": writes.shape[2]})
    hidden_states, dt, writes, reads = chain.gather(hidden_states, dt, writes, reads)
    for per_head in (name for name in ("D", "dt_bias") if options.get(name) is not None):
        options[per_head] = chain.own_heads(options[per_head])
    return stock(hidden_states, dt, chain.own_heads(rates), writes, reads, **options)


def _swap(state: Tensor) -> Tensor:
    return state.transpose(-1, -2)


CHUNK_SCAN = Rule(
    chunk_scan_link,
    returns_state="return_final_states",
    initial_state="initial_states",
    always_pair=False,
    to_stock=_swap,
    from_stock=_swap,
    by_heads=chunk_scan_by_heads,
    parameters=(
        *("hidden_states", "dt", "A", "B", "C", "chunk_size", "D", "dt_bias", "initial_states", "dt_softplus"),
        *("dt_limit", "return_final_states"),
    ),
)
_MIXER = Recurrence(
    functions={**CONVOLUTION, "mamba2_chunk_scan": CHUNK_SCAN, "mamba2_split_conv1d_scan_combined": None},
    unchanged=("mamba2_selective_state_update",),
)


def _family(kind: str, layer: str, fields: str, *, digest: str = "f6180930d4ad", uses: tuple[Pins, ...] = ()) -> Family:
    return Family(
        kind,
        fields,
        sources={f"{layer}.forward": digest, **CONVOLUTION_SOURCE, "mamba2_chunk_scan": "83003590f903"},
        uses=(RECURRENT_STATES, *uses),
        layers=RECURRENT,
        recurrences={layer: _MIXER},
    )


_BESIDE = f"{ATTENTION_FIELDS} intermediate_size"
_HYBRID = f"{_BESIDE} rope_parameters time_step_limit"
_EXPERTS = "num_experts_per_tok num_local_experts output_router_logits"
_Z_LOSS = "z_loss_coefficient"

FAMILIES = (
    _family("mamba2", "Mamba2Mixer", "head_dim layer_types num_hidden_layers time_step_limit"),
    replace(_family("bamba", "BambaMixer", _HYBRID), stores={"BambaForCausalLM": _Z_LOSS}, logits_loss=_Z_LOSS),
    _family("falcon_h1", "FalconH1Mixer", _HYBRID, digest="99340ca4d3d4"),
    _family("granitemoehybrid", "GraniteMoeHybridMambaLayer", f"{_HYBRID} {_EXPERTS}"),
    _family(
        "nemotron_h",
        "NemotronHMamba2Mixer",
        f"{_BESIDE} {_EXPERTS} head_dim moe_intermediate_size n_routed_experts sliding_window time_step_limit",
        uses=(LAYERS_WITHOUT_CACHE,),
    ),
    _family("zamba2", "Zamba2MambaMixer", f"{_BESIDE} head_dim rope_parameters"),
)
