"""Rules of recurrent layers by heads: each rank runs the stock rule over the whole sequence for its share of the heads.

Query and key heads go with the value heads that they serve, and the groups of Mamba-2 with their heads.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from attnmesh.hf.recurrent.chain import HeadChain
from attnmesh.hf.recurrent.rules import RULES, Stock


def run_by_heads(name: str, stock: Stock, chain: HeadChain, *args: Any, **kwargs: Any) -> Any:
    """Return what the stock rule returns for this rank's tokens, without a last state."""
    rule = RULES[name]
    rule.check_rows(kwargs)
    outputs = HEAD_RULES[name](stock, chain, *args, **{**kwargs, rule.returns_state: False})
    outputs = outputs[0] if rule.always_pair else outputs
    return rule.returned(chain.scatter(outputs), None, False)


def _delta_rule(
    stock: Stock, chain: HeadChain, query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, **options: Any
) -> Any:
    chain.check_divided({"key heads": key.shape[2], "value heads": value.shape[2]})
    query, key, value, g, beta = chain.gather(query, key, value, g, beta)
    return stock(query, key, value, g=g, beta=beta, **options)


def _mamba2(
    stock: Stock,
    chain: HeadChain,
    hidden_states: Tensor,
    dt: Tensor,
    rates: Tensor,
    writes: Tensor,
    reads: Tensor,
    **options: Any,
) -> Any:
    chain.check_divided({"heads": hidden_states.shape[2], "groups": writes.shape[2]})
    hidden_states, dt, writes, reads = chain.gather(hidden_states, dt, writes, reads)
    for per_head in (each for each in ("D", "dt_bias") if options.get(each) is not None):
        options[per_head] = chain.own_heads(options[per_head])
    return stock(hidden_states, dt, chain.own_heads(rates), writes, reads, **options)


HEAD_RULES: dict[str, Callable[..., Any]] = {
    "torch_chunk_gated_delta_rule": _delta_rule,
    "torch_recurrent_gated_delta_rule": _delta_rule,
    "chunk_kimi_delta_attention": _delta_rule,
    "recurrent_kimi_delta_attention": _delta_rule,
    "mamba2_chunk_scan": _mamba2,
}
"""Rules with heads by the name of transformers' function. Called with the stock rule, the chain and its arguments."""
