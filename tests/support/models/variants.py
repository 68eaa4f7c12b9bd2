"""Variants of model types: configurations of released models that differ from the type's defaults."""

from typing import Any

from tests.support.models.tiny_models import Case

BASE = {"rope_theta": 10000.0}

LONG = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [1.0, 2.0, 4.0, 8.0], **BASE}
"""Longrope, which changes at `original_max_position_embeddings` tokens. Checks go from 37 tokens to 49."""

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, **BASE}

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **BASE}

MIXED = {**LONG, "short_mscale": 1.0, "long_mscale": 1.2}

WINDOWS = ["sliding_attention", "full_attention", "sliding_attention"]


def _rope(rope: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {**BASE, **rope}, **more}


def _long(switch: int, **more: Any) -> dict[str, Any]:
    """Return a longrope that changes at `switch` tokens."""
    rope = {**LONG, "original_max_position_embeddings": switch}
    return {"rope_parameters": rope, "original_max_position_embeddings": switch, **more}


CHANGES: dict[str, dict[str, dict[str, Any]]] = {
    "llama": {
        "linear": _rope({"rope_type": "linear", "factor": 4.0}),
        "dynamic": _rope({"rope_type": "dynamic", "factor": 4.0}),
        "dynamic-crossed": _rope({"rope_type": "dynamic", "factor": 4.0}, max_position_embeddings=24),
        "dynamic-crossed-later": _rope({"rope_type": "dynamic", "factor": 4.0}, max_position_embeddings=41),
        "yarn": _rope(YARN),
        "longrope": _long(128),
        "longrope-crossed": _long(24),
        "longrope-crossed-later": _long(41),
        "llama3": _rope({**LLAMA3, "original_max_position_embeddings": 64}),
        "tied": {"tie_word_embeddings": True},
        "biases": {"attention_bias": True, "mlp_bias": True},
        "one-key-head": {"num_key_value_heads": 1},
        "all-key-heads": {"num_key_value_heads": 4},
        "wide-heads": {"head_dim": 16},
    },
    "mistral": {"no-window": {"sliding_window": None}},
    "ministral3": {
        "scaled": {
            "max_position_embeddings": 512,
            "rope_parameters": {**YARN, "original_max_position_embeddings": 16, "llama_4_scaling_beta": 0.5},
        }
    },
    "qwen2": {"windows": {"use_sliding_window": True, "layer_types": WINDOWS}},
    "qwen3": {
        "windows": {"use_sliding_window": True, "layer_types": WINDOWS},
        "yarn": _rope(YARN),
    },
    "qwen2_moe": {"full": {"sliding_window": None, "layer_types": ["full_attention"] * 3}},
    "qwen3_moe": {"windows": {"use_sliding_window": True, "mlp_only_layers": [1]}},
    "mixtral": {
        "no-window": {"sliding_window": None},
        "router-loss": {"output_router_logits": True},
    },
    "gemma": {"untied": {"tie_word_embeddings": False}},
    "gemma2": {
        "no-cap": {"attn_logit_softcapping": None},
        "low-cap": {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    },
    "gemma3_text": {"both-ways": {"use_bidirectional_attention": True}},
    "gemma3n_text": {"own-keys": {"num_kv_shared_layers": 0}},
    "gemma4_text": {
        "own-keys": {"num_kv_shared_layers": 0},
        "keys-as-values": {"num_kv_shared_layers": 0, "attention_k_eq_v": True, "num_global_key_value_heads": 1},
        "experts": {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32},
    },
    "gpt_oss": {
        "default-rope": _rope({"rope_type": "default"}),
        "full": {"layer_types": ["full_attention"] * 3},
    },
    "mimo_v2_flash": {"sinks": {"add_swa_attention_sink_bias": True, "add_full_attention_sink_bias": True}},
    "laguna": {"windows": {"layer_types": WINDOWS, "num_attention_heads_per_layer": [4, 8, 4]}},
    "mellum": {"windows": {"layer_types": WINDOWS}},
    "phi3": {
        "no-window": {"sliding_window": None},
        "longrope": _long(128, sliding_window=None),
        "longrope-crossed": _long(24, sliding_window=None),
        "longrope-crossed-later": _long(41, sliding_window=None),
        "partial": _rope({"rope_type": "default", "partial_rotary_factor": 0.5}),
    },
    "phimoe": {"longrope-crossed-later": _rope({**MIXED, "original_max_position_embeddings": 41}, sliding_window=None)},
    "phi": {"normed": {"qk_layernorm": True}},
    "starcoder2": {"no-window": {"sliding_window": None}},
    "stablelm": {
        "parallel": {"use_parallel_residual": True},
        "normed": {"qk_layernorm": True, "use_qkv_bias": True},
    },
    "cohere": {"normed": {"use_qk_norm": True}},
    "granite": {
        "multiplied": {"attention_multiplier": 0.3, "residual_multiplier": 0.5, "embedding_multiplier": 3.0},
    },
    "olmo": {"clipped": {"clip_qkv": 0.5}},
    "falcon": {
        "alibi": {"alibi": True},
        "new": {"new_decoder_architecture": True, "num_kv_heads": 2},
        "not-parallel": {"parallel_attn": False, "multi_query": False, "num_kv_heads": 4},
    },
    "gpt_neox": {"not-parallel": {"use_parallel_residual": False}},
    "gpt_bigcode": {"many-key-heads": {"multi_query": False}},
    "gpt2": {
        "untied": {"tie_word_embeddings": False},
        "scaled-by-layer": {"scale_attn_by_inverse_layer_idx": True, "reorder_and_upcast_attn": True},
    },
    "opt": {"post-norm": {"do_layer_norm_before": False, "word_embed_proj_dim": 16}},
    "deepseek_v2": {"no-query-rank": {"q_lora_rank": None}},
    "deepseek_v3": {
        "yarn": _rope({**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}),
        "not-interleaved": {"q_lora_rank": None, "rope_interleave": False},
    },
    "zamba2": {"rope": {"use_mem_rope": True, "use_shared_attention_adapter": True, "num_key_value_heads": 4}},
    "falcon_h1": {
        "multiplied": {"key_multiplier": 0.5, "attention_in_multiplier": 2.0, "attention_out_multiplier": 0.5}
    },
    "inkling_text": {
        "scaled": {"log_scaling_n_floor": 4, "rel_extent": 7, "layer_types": ["hybrid", "hybrid_sliding"]}
    },
    "zaya": {"sliding": {"layer_types": ["hybrid", "hybrid_sliding", "hybrid"], "sliding_window": 16}},
    "minimax_m3_vl_text": {"no-local-blocks": {"index_local_blocks": 0, "index_topk_blocks": 3}},
    "glm_moe_dsa": {
        "shared": {
            "num_hidden_layers": 3,
            "indexer_types": ["full", "shared", "full"],
            "mlp_layer_types": ["dense", "sparse", "sparse"],
        },
    },
    "mpt": {"clipped": {"attn_config": {"clip_qkv": 0.5}}},
}
"""Changes to the configuration, by type and by the variant's name."""

VARIANTS = [Case(f"{kind}+{name}", kind, changes) for kind, named in CHANGES.items() for name, changes in named.items()]
