"""Families with layers of Mamba, whose states decay by a number for each channel and state."""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu

from attnmesh.hf.family import ATTENTION_FIELDS, RECURRENT, RECURRENT_STATES, Family, Recurrence
from attnmesh.hf.recurrent.convolution import CONVOLUTION, CONVOLUTION_SOURCE
from attnmesh.hf.recurrent.prefill_states import PrefillStates
from attnmesh.hf.recurrent.rules import Rule, StateLink, Stock, step_sizes, steps_of
from attnmesh.kernels.traced import without_autocast
from attnmesh.recurrent.scan import AffineMap

LOWEST = -87.0
"""Logarithm of the smallest decay that outputs are corrected with: just above the denormals of float32.

CPUs take 50 times longer for denormal results.
"""


def selective_link(
    stock: Stock, hidden_states: Tensor, dt: Tensor, rates: Tensor, writes: Tensor, reads: Tensor, **options: Any
) -> StateLink:
    """Link of Mamba, its A diagonal. Its heads are channels, of (state size, 1).

    The stock rule begins at zero. The entering state adds C_t . (exp(A (dt_1 + ... + dt_t)) S), gated by z.
    """
    outputs, last = stock(hidden_states, dt, rates, writes, reads, **options, return_last_state=True)
    shift, z = options.get("delta_bias"), options.get("z")
    steps = step_sizes(dt, None if shift is None else shift[:, None], bool(options.get("delta_softplus")))
    elapsed = steps.float().cumsum(-1)
    rates = rates.float()
    linear = (rates * elapsed[..., -1:]).exp()
    bias = last.float().unsqueeze(-1)

    def finish(entering: Tensor) -> tuple[Tensor, Tensor]:
        state = entering.squeeze(-1)[:, :, None]
        corrections = []
        for t in steps_of(outputs, outputs.shape[-1], "selective"):
            states = (rates[None, :, None] * elapsed[:, :, t, None]).clamp(min=LOWEST).exp() * state
            with without_autocast(states):
                corrections.append(torch.einsum("bdtk,bkt->bdt", states, reads[:, :, t].float()))
        correction = torch.cat(corrections, dim=-1) * (1 if z is None else silu(z.float()))
        return (outputs + correction).to(outputs.dtype), linear.unsqueeze(-1) * entering + bias

    return StateLink(AffineMap(linear, bias), finish)


class StatesOfHeads(PrefillStates):
    """States of Zamba, which are read one head after another."""

    def read(self, state: Tensor) -> list[Tensor]:
        """Return the state of each head."""
        return [*state.unbind(1)]


SELECTIVE_SCAN = Rule(
    selective_link,
    returns_state="return_last_state",
    initial_state=None,
    always_pair=False,
    to_stock=lambda state: state.squeeze(-1),
    from_stock=lambda state: state.unsqueeze(-1),
    parameters=(
        *("hidden_states", "dt", "A", "B", "C", "D", "z", "delta_bias", "delta_softplus", "return_last_state"),
        *("use_mambapy", "use_associative_scan"),
    ),
    dim=2,
)
_FUNCTIONS = {**CONVOLUTION, "mamba_selective_scan": SELECTIVE_SCAN}
_UNCHANGED = ("mamba_selective_state_update",)
_PLAIN = Recurrence(functions=_FUNCTIONS, unchanged=_UNCHANGED)
_FUSED = Recurrence(functions={**_FUNCTIONS, "mamba_inner_fn": None}, unchanged=_UNCHANGED)
_OF_HEADS = Recurrence(functions=_FUNCTIONS, unchanged=_UNCHANGED, states=StatesOfHeads)


def _family(kind: str, layer: str, fields: str, *, digest: str, scan: str = "e095cfd16bc3", **options: Any) -> Family:
    return Family(
        kind,
        fields,
        sources={f"{layer}.forward": digest, **CONVOLUTION_SOURCE, "mamba_selective_scan": scan},
        uses=(RECURRENT_STATES,),
        layers=RECURRENT,
        begins_at_zero=True,
        **options,
    )


_ALONE = "intermediate_size layer_types num_hidden_layers"
_BESIDE = f"{ATTENTION_FIELDS} intermediate_size"

FAMILIES = (
    _family("mamba", "MambaMixer", _ALONE, digest="280166732b90", recurrences={"MambaMixer": _FUSED}),
    _family(
        "falcon_mamba",
        "FalconMambaMixer",
        _ALONE,
        digest="781e9c23667d",
        recurrences={"FalconMambaMixer": _FUSED},
    ),
    _family(
        "jamba",
        "JambaMambaMixer",
        f"{_BESIDE} num_experts num_experts_per_tok num_local_experts output_router_logits",
        digest="ba941b60bdba",
        recurrences={"JambaMambaMixer": _PLAIN},
    ),
    _family(
        "zamba",
        "ZambaMambaMixer",
        f"{_BESIDE} head_dim",
        digest="6cc2e1fe444a",
        scan="2e1476a2d28c",
        stores={"ZambaMambaMixer": "n_mamba_heads"},  # each head has a state
        recurrences={"ZambaMambaMixer": _OF_HEADS},
    ),
)
