"""JetMoE, which repeats its key heads before attention."""

from attnmesh.hf.family import Family

FAMILIES = (
    Family(
        "jetmoe",
        "head_dim intermediate_size max_position_embeddings num_attention_heads num_experts_per_tok num_hidden_layers "
        "num_key_value_heads num_local_experts output_router_logits rope_parameters",
        repeats_keys=True,
    ),
)
