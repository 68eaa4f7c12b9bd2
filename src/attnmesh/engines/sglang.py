"""Plug-in of SGLang: its merges of decode context parallelism become merges of attnmesh.

Installing attnmesh registers the entry point. It acts in a server that is started with ATTNMESH_SGLANG=1. Signatures
are those of sglang 0.5.23.
"""

import os
from importlib import import_module
from typing import Any

from torch import Tensor

from attnmesh.engines.combine import combine

MERGE_MODULE = "sglang.srt.layers.dcp.comm"
"""Module of SGLang with the functions that the plug-in replaces."""

HOOK_MODULE = "sglang.srt.plugins.hook_registry"
"""Module of SGLang where the plug-in registers them."""


def load_plugin() -> None:
    """Register the merges with SGLang's hooks if ATTNMESH_SGLANG is 1. SGLang calls it before the engine starts."""
    if os.environ.get("ATTNMESH_SGLANG") != "1":
        return
    hooks = import_module(HOOK_MODULE)
    for merge in (cp_lse_ag_out_rs_mha, cp_lse_ag_out_rs_mla, dcp_a2a_lse_reduce):
        hooks.HookRegistry.register(f"{MERGE_MODULE}.{merge.__name__}", merge, hooks.HookType.REPLACE)


def cp_lse_ag_out_rs_mha(cp_attn_out: Tensor, cp_attn_lse: Tensor, cp_group: Any, return_lse: bool = False) -> Any:
    """Return this rank's heads of the merge, of natural logarithms. See `combine`."""
    return combine(cp_attn_out, cp_attn_lse, cp_group=cp_group, return_lse=return_lse)


def cp_lse_ag_out_rs_mla(
    cp_attn_out: Tensor, cp_attn_lse: Tensor, cp_group: Any, ctx: Any = None, is_lse_base_on_e: bool = False
) -> Any:
    """Return this rank's heads of the merge, of logarithms in base 2 by default. `ctx` is not used."""
    return combine(cp_attn_out, cp_attn_lse, cp_group=cp_group, is_lse_base_on_e=is_lse_base_on_e)


def dcp_a2a_lse_reduce(
    cp_attn_out: Tensor,
    cp_attn_lse: Tensor,
    cp_group: Any,
    is_lse_base_on_e: bool = True,
    cuda_graph_buffers: dict[str, Any] | None = None,
    comm_backend: str = "a2a",
) -> Any:
    """Return this rank's heads of the merge. `cuda_graph_buffers` and `comm_backend` are not used."""
    return combine(cp_attn_out, cp_attn_lse, cp_group=cp_group, is_lse_base_on_e=is_lse_base_on_e)
