"""Rules of recurrent layers by heads: each rank runs the stock rule over the whole sequence for its share of the heads.

Query and key heads go with the value heads that they serve, and the groups of Mamba-2 with their heads.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from attnmesh.hf.recurrent.chain import HeadChain

Stock = Callable[..., Any]
"""A rule of transformers: one function for all tokens of a layer."""


def delta_by_heads(
    stock: Stock, chain: HeadChain, query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, **options: Any
) -> Any:
    """Return what a delta rule returns for all tokens of this rank's heads."""
    chain.check_divided({"key heads": key.shape[2], "value heads": value.shape[2]})
    query, key, value, g, beta = chain.gather(query, key, value, g, beta)
    return stock(query, key, value, g=g, beta=beta, **options)


def mamba2_by_heads(
    stock: Stock,
    chain: HeadChain,
    hidden_states: Tensor,
    dt: Tensor,
    rates: Tensor,
    writes: Tensor,
    reads: Tensor,
    **options: Any,
) -> Any:
    """Return what the rule of Mamba-2 returns for all tokens of this rank's heads."""
    chain.check_divided({"heads": hidden_states.shape[2], "groups": writes.shape[2]})
    hidden_states, dt, writes, reads = chain.gather(hidden_states, dt, writes, reads)
    for per_head in (each for each in ("D", "dt_bias") if options.get(each) is not None):
        options[per_head] = chain.own_heads(options[per_head])
    return stock(hidden_states, dt, chain.own_heads(rates), writes, reads, **options)
