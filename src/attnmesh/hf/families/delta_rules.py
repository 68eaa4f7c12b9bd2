"""Families with layers of a delta rule: gated, with one decay a head (Qwen3-Next, Qwen3.5, OLMo-hybrid), or KDA's.

KDA has a decay for each column of a key (Kimi-Linear, Bailing-hybrid).
"""

from functools import partial as partial_of
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from attnmesh.hf.family import (
    ATTENTION_FIELDS,
    EXPERT_FIELDS,
    LATENT_FIELDS,
    RECURRENT,
    RECURRENT_STATES,
    Family,
    Recurrence,
)
from attnmesh.hf.recurrent.chain import HeadChain
from attnmesh.hf.recurrent.convolution import CONVOLUTION, CONVOLUTION_SOURCE
from attnmesh.hf.recurrent.rules import Rule, StateLink, Stock, steps_of
from attnmesh.kernels.traced import without_autocast
from attnmesh.recurrent.scan import AffineMap


def delta_link(
    stock: Stock, query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, *, rule: str, **options: Any
) -> StateLink:
    """Link of a delta rule, its A a matrix: the stock rule over values [v | 0] from the state [0 | I].

    The columns of a state never mix, so the last state is [B | A], and the outputs are [from zero | of the identity].
    Kernels of flash-linear-attention refuse float32 queries; without them, outputs are rounded once, at the end.
    """
    batch, tokens, heads, columns = value.shape
    rows = key.shape[-1]
    exact = query if find_spec("fla") else query.float()
    identity = torch.eye(rows, dtype=torch.float32, device=value.device).expand(batch, heads, rows, rows)
    state = pad(identity, (columns, 0))
    value = pad(value, (0, rows))
    parts = []
    for t in steps_of(query, tokens, rule):
        inputs = exact[:, t], key[:, t], value[:, t], g[:, t], beta[:, t]
        part, state = stock(
            *inputs[:3], g=inputs[3], beta=inputs[4], **options, initial_state=state, output_final_state=True
        )
        parts.append(part.transpose(1, 2).split((columns, rows), dim=-1))
    bias, linear = (x.contiguous() for x in state.split((columns, rows), dim=-1))

    def finish(entering: Tensor) -> tuple[Tensor, Tensor]:
        with without_autocast(entering):
            outputs = [(zero + (unit.float() @ entering)).to(query.dtype).transpose(1, 2) for zero, unit in parts]
            return torch.cat(outputs, dim=1), linear @ entering + bias

    return StateLink(AffineMap(linear, bias), finish)


def delta_by_heads(
    stock: Stock, chain: HeadChain, query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, **options: Any
) -> Any:
    """Return what a delta rule returns for all tokens of this rank's heads. A key head goes with its value heads."""
    chain.check_divided({"key heads": key.shape[2], "value heads": value.shape[2]})
    query, key, value, g, beta = chain.gather(query, key, value, g, beta)
    return stock(query, key, value, g=g, beta=beta, **options)


_INPUTS = ("query", "key", "value", "g", "beta")
_STATES = ("initial_state", "output_final_state", "use_qk_l2norm_in_kernel")
_RULE = partial_of(
    Rule, returns_state="output_final_state", initial_state="initial_state", always_pair=True, by_heads=delta_by_heads
)


def _recurrence(rule: str, *, chunked: str, stepwise: str) -> Recurrence:
    """Return the parts of layers with a rule. `chunked` computes chunks of tokens, `stepwise` one after another."""
    link = partial_of(delta_link, rule=rule)
    functions: dict[str, Any] = {
        **CONVOLUTION,
        chunked: _RULE(link, parameters=(*_INPUTS, "chunk_size", *_STATES)),
        stepwise: _RULE(link, parameters=(*_INPUTS, *_STATES)),
    }
    return Recurrence(functions=functions)


GATED_DELTA = _recurrence(
    "gated_delta", chunked="torch_chunk_gated_delta_rule", stepwise="torch_recurrent_gated_delta_rule"
)
GATED_DELTA_SOURCES = {
    **CONVOLUTION_SOURCE,
    "torch_chunk_gated_delta_rule": "678be0074dc4",
    "torch_recurrent_gated_delta_rule": "dfa1d9ab9926",
}
_KIMI_DELTA = _recurrence("kimi_delta", chunked="chunk_kimi_delta_attention", stepwise="recurrent_kimi_delta_attention")
_KIMI_DELTA_SOURCES = {
    **CONVOLUTION_SOURCE,
    "chunk_kimi_delta_attention": "ef9dc6a2a860",
    "recurrent_kimi_delta_attention": "114ba938b0e9",
}


def _family(kind: str, layer: str, fields: str, *, digest: str, is_gated: bool = True) -> Family:
    return Family(
        kind,
        fields,
        sources={f"{layer}.forward": digest, **(GATED_DELTA_SOURCES if is_gated else _KIMI_DELTA_SOURCES)},
        uses=(RECURRENT_STATES,),
        layers=RECURRENT,
        recurrences={layer: GATED_DELTA if is_gated else _KIMI_DELTA},
    )


_ROPE_FIELDS = f"{ATTENTION_FIELDS} rope_parameters"
_DENSE = f"{_ROPE_FIELDS} intermediate_size"
_SPARSE = f"{_ROPE_FIELDS} {EXPERT_FIELDS} head_dim"

FAMILIES = (
    _family("olmo_hybrid", "OlmoHybridGatedDeltaNet", _DENSE, digest="18248f3c6a87"),
    _family("qwen3_next", "Qwen3NextGatedDeltaNet", f"{_SPARSE} intermediate_size", digest="83f018dc37b9"),
    _family("qwen3_5_text", "Qwen3_5GatedDeltaNet", f"{_DENSE} head_dim", digest="3bb52a268f55"),
    _family("qwen3_5_moe_text", "Qwen3_5MoeGatedDeltaNet", _SPARSE, digest="3bb52a268f55"),
    _family("kimi_linear", "KimiLinearDeltaAttention", LATENT_FIELDS, digest="ff04e389f4ff", is_gated=False),
    _family(
        "bailing_hybrid",
        "BailingHybridDeltaAttention",
        f"{LATENT_FIELDS} rope_parameters",
        digest="2dd3fced1fac",
        is_gated=False,
    ),
)
