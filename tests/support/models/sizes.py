"""Small values for the fields of transformers' configurations, by name, and overrides by model type."""

from typing import Any

VOCABULARY = 97

LAYERS = 3

BY_VALUE: dict[int, str] = {
    VOCABULARY: "vocab_size vocab_size_per_layer_input unpadded_vocab_size audio_vocab_size",
    32: """
        hidden_size d_model n_embd embedding_dim embedding_size word_embed_proj_dim emb_dim input_embedding_size
        output_embedding_size lru_width attention_hidden_size cross_attention_hidden_size hidden_size_global
        downsample_hidden_size ple_embed_dim router_hidden_size intermediate_size moe_intermediate_size ffn_dim
        encoder_ffn_dim decoder_ffn_dim d_inner shared_expert_intermediate_size shared_experts_intermediate_size
        dense_intermediate_size dff prefix_dense_intermediate_size expert_ffn_hidden_size ffn_hidden_size
        intermediate_size_mlp moe_shared_expert_intermediate_size feed_forward_size n_inner dim_ff
        mlp_intermediate_size shared_intermediate_size""",
    16: """
        sliding_window sliding_window_size window_size local_attention attention_window_size attention_chunk_size
        keep_window_size index_block_size kv_lora_rank q_lora_rank o_lora_rank hc_lowrank pronunciation_embed_dim
        shape_embed_dim num_buckets position_bias_num_buckets rel_extent log_scaling_n_floor floor_scale""",
    8: """
        head_dim attention_head_size dim_head kv_channels d_head swa_head_dim global_head_dim query_pre_attn_scalar
        v_head_dim swa_v_head_dim qk_nope_head_dim linear_key_head_dim linear_head_dim index_head_dim indexer_head_dim
        index_topk mamba_d_state state_size ssm_state_size mamba_chunk_size chunk_size mamba_d_head mamba_head_dim
        mamba_headdim mamba_n_heads mamba_num_heads hidden_size_per_layer_input laurel_rank d_rel adapter_rank
        gated_norm_rank block_size pronunciation_vocab_size shape_vocab_size""",
    4: """
        num_attention_heads n_head n_heads num_heads attention_heads encoder_attention_heads decoder_attention_heads
        num_encoder_attention_heads num_decoder_attention_heads swa_num_attention_heads linear_num_value_heads
        linear_num_heads num_experts n_routed_experts num_local_experts moe_num_experts qk_rope_head_dim rotary_dim
        number_of_conv_states mamba_dt_rank time_step_rank mamba_d_conv linear_conv_kernel_dim conv_kernel
        short_conv_kernel_size""",
    2: """
        num_key_value_heads num_kv_heads swa_num_key_value_heads num_global_key_value_heads linear_num_key_heads
        n_groups num_experts_per_tok moe_topk moe_k num_experts_per_token top_k_experts index_n_heads indexer_n_heads
        indexer_kv_heads index_topk_blocks expand mamba_expand num_query_groups n_group num_expert_group hc_mult
        hc_count""",
    1: """
        topk_group n_shared_experts num_shared_experts mamba_n_groups first_k_dense_replace num_dense_layers
        num_kv_shared_layers""",
    0: """
        num_nextn_predict_layers num_mtp_layers router_jitter_noise input_jitter_noise layerdrop encoder_layerdrop
        decoder_layerdrop""",
    LAYERS: """
        num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers num_encoder_layers
        num_decoder_layers num_blocks""",
    512: """
        max_position_embeddings n_positions n_ctx max_seq_len model_max_length max_target_positions context_length""",
}
"""Names of fields by their value. Windows have 16 tokens, fewer than the 37 of a prompt."""

DEPTHS = BY_VALUE[LAYERS].split()
"""Names of the number of layers."""

SMALL: dict[str, Any] = {
    **{name: value for value, names in BY_VALUE.items() for name in names.split()},
    **dict.fromkeys(("output_router_logits", "output_hidden_states", "output_attentions", "use_prompt"), False),
    **dict.fromkeys(("logit_scale", "logits_mup_width_multiplier"), 1.0),
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None, "is_decoder": True, "initializer_range": 0.02,
}  # fmt: skip

LATENT = {"num_key_value_heads": 4}
"""Multi-head latent attention has as many key heads as query heads."""

INDEXED = {**LATENT, "index_n_heads": 64}
"""With 64 indexer heads no score is 0. With few heads many are, and `topk` on a CPU takes any of these."""

ATTENDING = ["linear_attention", "full_attention", "linear_attention"]
CONVOLVING = ["conv", "full_attention", "conv"]
SHARED_BLOCKS = ["linear_attention", "hybrid", "linear_attention", "hybrid"]
ALTERNATING = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
ROPE = {"rope_type": "default", "rope_theta": 10000.0}

DOTS3_NOTE = {
    "num_hidden_layers": 4, "num_key_value_heads": 4, "swa_num_attention_heads": 4, "swa_num_key_value_heads": 4,
    "swa_q_lora_rank": 16, "swa_kv_lora_rank": 16, "head_dim": 12, "swa_head_dim": 12, "swa_qk_nope_head_dim": 8,
    "swa_v_head_dim": 8, "n_group": 1, "topk_group": 1, "index_n_heads": 64,
}  # fmt: skip

EXPERTS = {"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": 32}

SHARING = {"layer_types": ALTERNATING, "num_kv_shared_layers": 2}
"""The last layer of each kind shares the keys of an earlier one."""

OVERRIDES: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("axk1", "bailing_hybrid", "deepseek_v2", "deepseek_v3"), LATENT),
    **dict.fromkeys(("glm4_moe_lite", "kimi_linear", "minicpm3", "youtu"), LATENT),
    **dict.fromkeys(("axk2", "deepseek_v32", "glm_moe_dsa", "hy_v4"), INDEXED),
    "bamba": {"attn_layer_indices": [1]},
    "blt": {"encoder_hash_byte_group_vocab": 50, "local_attention_window_len": 16},
    "cohere_compass_text": {
        "layer_types": ALTERNATING,
        "rope_parameters": {"sliding_attention": ROPE, "full_attention": None},
    },
    "dbrx": {"attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0}, "ffn_config": EXPERTS},
    "deepseek_v4": {
        "layer_types": ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"],
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
        "index_n_heads": 64,
        "index_topk": 3,
    },
    "dots3_note_audio_encoder": {"adapter_input_size": 32, "adapter_out_dim": 32},
    "dots3_note_text": DOTS3_NOTE,
    "dots3_note_vision_encoder": {"adapter_in_dim": 32, "adapter_out_dim": 32},
    "falcon_h1": {"mamba_d_ssm": 64},
    "gemma3n_text": {**SHARING, "activation_sparsity_pattern": [0.5, 0.5, 0.0, 0.0]},
    "gemma4_text": {**SHARING, "global_head_dim": 16},
    "gemma4_unified_text": {**SHARING, "global_head_dim": 16},
    "gpt_neo": {"num_layers": 2, "attention_types": [[["global", "local"], 1]]},
    "granitemoehybrid": {"layer_types": ATTENDING},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "laguna": {"num_attention_heads_per_layer": [4, 8, 4]},
    "lfm2": {"layer_types": CONVOLVING},
    "lfm2_moe": {"layer_types": CONVOLVING},
    "longcat_flash": {"num_key_value_heads": 4, "head_dim": 4, "zero_expert_num": 2, "num_layers": 2},
    "mamba2": {"num_heads": 8},
    "minicpm3": {**LATENT, "dim_model_base": 32},
    "minimax_m3_vl_text": {"layer_types": ["full_attention", *["minimax_m3_sparse"] * 2], "index_block_size": 4},
    "qwen4_exp_text": {"indexer_kv_heads": 1, "indexer_budget": 8, "indexer_compress_ratio": 4, "indexer_n_heads": 64},
    "reformer": {"axial_pos_embds": False},
    "xlm": {"causal": True},
    "xlnet": {"attn_type": "uni"},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"layers_block_type": SHARED_BLOCKS, "attention_hidden_size": 64},
    "zamba2": {"layers_block_type": SHARED_BLOCKS},
    "zaya": {"num_experts_per_tok": 1},
}
"""Values that do not follow from the field's name, by model type."""
