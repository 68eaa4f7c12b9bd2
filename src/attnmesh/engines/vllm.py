"""Merges of vLLM's decode context parallelism, with the signatures of vllm 0.33.0, vllm/v1/attention/ops/dcp.py.

`functools.partial(attnmesh.engines.combine, cp_group=group)` follows the protocol `DCPCombine` of the same file.
"""

from typing import Any

from torch import Tensor

from attnmesh.engines.combine import combine


def cp_lse_ag_out_rs(
    cp_attn_out: Tensor,
    cp_attn_lse: Tensor,
    cp_group: Any,
    ctx: Any = None,
    return_lse: bool = False,
    is_lse_base_on_e: bool = True,
    seq_lens: Tensor | None = None,
    query_start_loc: Tensor | None = None,
) -> Any:
    """Return this rank's heads of the merge. See `combine`; `ctx` is not used."""
    options: dict[str, Any] = {
        "is_lse_base_on_e": is_lse_base_on_e,
        "seq_lens": seq_lens,
        "query_start_loc": query_start_loc,
    }
    return combine(cp_attn_out, cp_attn_lse, cp_group=cp_group, return_lse=return_lse, **options)


def cp_lse_ag_out_ar(
    cp_attn_out: Tensor,
    cp_attn_lse: Tensor,
    cp_group: Any,
    ctx: Any = None,
    return_lse: bool = False,
    is_lse_base_on_e: bool = True,
    seq_lens: Tensor | None = None,
    query_start_loc: Tensor | None = None,
) -> Any:
    """Return all heads of the merge on every rank. See `combine`; `ctx` is not used."""
    options: dict[str, Any] = {
        "is_lse_base_on_e": is_lse_base_on_e,
        "seq_lens": seq_lens,
        "query_start_loc": query_start_loc,
    }
    return combine(cp_attn_out, cp_attn_lse, cp_group=cp_group, return_lse=return_lse, output="replicated", **options)
