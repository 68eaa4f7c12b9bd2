"""Tiny models whose layers select keys by an indexer."""

from functools import lru_cache

import torch
from transformers import PreTrainedModel

from tests.support.models.tiny_models import Case, build

SHARED = {"num_hidden_layers": 4, "indexer_types": ["full", "shared", "full", "shared"]}
"""Layers that select what an earlier layer has selected."""

WIDTHS = {"swa_kv_lora_rank": 24, "swa_head_dim": 14, "swa_num_attention_heads": 2, "swa_num_key_value_heads": 2}
"""Latents and heads of layers with windows, unlike those of the others, as in the released model."""

BLOCKS = {
    "layer_types": ["full_attention", *["minimax_m3_sparse"] * 2],
    "index_block_size": 4,
    "index_topk_blocks": 3,
    "index_local_blocks": 2,
}

COMPRESSED = {
    "layer_types": ["sliding_attention", *["compressed_sparse_attention", "heavily_compressed_attention"] * 2],
    "mlp_layer_types": ["hash_moe", *["moe"] * 4],
}

CASES = {
    "axk2": Case("axk2", "axk2"),
    "deepseek_v32": Case("deepseek_v32", "deepseek_v32"),
    "deepseek_v4": Case("deepseek_v4", "deepseek_v4", COMPRESSED),
    "dots3": Case("dots3_note_text", "dots3_note_text", WIDTHS),
    "glm": Case("glm_moe_dsa", "glm_moe_dsa", {**SHARED, "mlp_layer_types": ["dense", *["sparse"] * 3]}),
    "hy_v4": Case("hy_v4", "hy_v4", {**SHARED, "mlp_layer_types": ["dense", *["sparse"] * 3]}),
    "minimax_m3": Case("minimax_m3_vl_text", "minimax_m3_vl_text", BLOCKS),
    "qwen4": Case("qwen4_exp_text", "qwen4_exp_text"),
    "ties": Case("deepseek_v32+ties", "deepseek_v32", {"index_n_heads": 2}),
}
"""Indexers of 64 heads, whose scores never tie. With 2 heads many are 0, and the lowest index has to win."""


@lru_cache(maxsize=4)
def model(name: str, attention: str, dtype: torch.dtype) -> PreTrainedModel:
    return build(CASES[name], attention, dtype)
