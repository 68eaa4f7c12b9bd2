"""Names that this room uses of transformers and accelerate beside their stable interfaces, with the versions tested.

Importing this file checks the names that every model needs. What a family needs beside them is in its record, see
`families`. `RECURRENT` is checked layer by layer, when a layer first runs on shards; `TENSOR_PARALLEL`, `TRAINER` and
`ACCELERATE` when they are first used.
"""

from collections.abc import Container
from functools import cache
from inspect import signature, unwrap
from sys import modules
from typing import Any, NamedTuple

from attnmesh.runtime.upstream import Upstream

VERSIONS = ("5.23", "5.24")
"""First version of transformers that is tested, and first that is not.

Before 5.23 there is no `DummyLayer`, tensor parallelism fails, and Gemma 4 does not say which layers share keys. From
5.24 on recurrent layers take their cache by another name.
"""

TRANSFORMERS = Upstream(
    "transformers",
    *VERSIONS,
    (
        "transformers:AttentionInterface.register",
        "transformers:AttentionMaskInterface.register",
        "transformers:PreTrainedConfig.base_config_key",
        "transformers:PreTrainedConfig.get_text_config",
        "transformers:PreTrainedConfig._attn_implementation",
        "transformers:PreTrainedConfig.is_heterogeneous",
        "transformers:PreTrainedConfig.per_layer_config",
        "transformers:PreTrainedModel.is_activation_checkpointing",
        "transformers:PreTrainedModel.is_backend_compatible",
    ),
)
APPLY_TENSOR_PARALLELISM = "transformers.distributed.tensor_parallel:apply_tensor_parallelism"
TENSOR_PARALLEL = Upstream(
    "transformers", *VERSIONS, ("transformers:PreTrainedModel.tp_plan", APPLY_TENSOR_PARALLELISM)
)
"""What `tensor_parallel` needs."""

TRAINER = Upstream(
    "transformers",
    *VERSIONS,
    (
        "transformers:Trainer.create_accelerator_and_postprocess",
        "transformers:Trainer.floating_point_ops",
        "transformers:Trainer.get_total_train_batch_size",
        "transformers:Trainer.prediction_step",
        "transformers:Trainer.training_step",
    ),
)
"""Methods of the trainer that `on_mesh` overrides."""

ACCELERATE = Upstream(
    "accelerate",
    "1.15",
    "1.16",
    (
        "accelerate:Accelerator.gather",
        "accelerate:Accelerator.gather_for_metrics",
        "accelerate:Accelerator.num_processes",
        "accelerate:Accelerator.prepare_model",
        "accelerate:Accelerator.prepare_scheduler",
        "accelerate:Accelerator.process_index",
        "accelerate:Accelerator.reduce",
    ),
)
"""Methods of the accelerator that `prepare` overrides. Version 1.12 resumes adapters with FSDP2 wrongly."""

TRL = Upstream("trl", "1.16", "1.17")
"""Before 1.16 models of an `SFTTrainer` return counts beside their loss, or need a GPU."""

PEFT = Upstream("peft", "0.20", "0.22", ("peft:PeftModel.get_base_model", "peft:PeftConfig.is_prompt_learning"))
"""transformers 5.23 refuses older versions."""

TRANSFORMERS.check()
CacheLayerMixin: Any = TRANSFORMERS.find("transformers.cache_utils:CacheLayerMixin")
Conv1D: Any = TRANSFORMERS.find("transformers.pytorch_utils:Conv1D")
DummyLayer: Any = TRANSFORMERS.find_if_used("transformers.cache_utils:DummyLayer")
LinearAttentionLayer: Any = TRANSFORMERS.find_if_used("transformers.cache_utils:LinearAttentionLayer")
apply_tensor_parallelism: Any = TRANSFORMERS.find_if_used(APPLY_TENSOR_PARALLELISM)
bidirectional_mask_function: Any = TRANSFORMERS.find("transformers.masking_utils:bidirectional_mask_function")
causal_mask_function: Any = TRANSFORMERS.find("transformers.masking_utils:causal_mask_function")
is_tracing: Any = TRANSFORMERS.find("transformers.utils.import_utils:is_tracing")
sdpa_attention: Any = TRANSFORMERS.find("transformers.integrations.sdpa_attention:sdpa_attention_forward")
sdpa_mask: Any = TRANSFORMERS.find("transformers.masking_utils:sdpa_mask")


def check_trainer(trainer: type) -> None:
    """Raise unless a class of trainers has the methods that are overridden, and its package is tested."""
    TRAINER.check()
    if any(each.__module__.split(".")[0] == "trl" for each in trainer.__mro__):
        TRL.check()


def code_of(kind: str) -> str:
    """Return the module of transformers with the code of a model type."""
    name = kind.removesuffix("_text")
    return f"transformers.models.{name}.modeling_{name}"


@cache
def subclass(stock: type, base: type, **fields: Any) -> Any:
    """Return a subclass of a class of transformers that has another first base. `__mro__[2]` is the class itself."""
    return type(stock.__name__, (base, stock), {"__module__": stock.__module__, **fields})


def cache_argument(parameters: Container[str]) -> str:
    """Return the name of the cache among the parameters of a model's forward pass."""
    return "cache_params" if "cache_params" in parameters else "past_key_values"


def is_indexer(module: Any) -> bool:
    """Return whether a module scores keys that its cache returns: its `forward` calls `update_indexer`."""
    if type(module).__name__ in INDEXERS:
        return False
    forward = unwrap(type(module).forward)
    code = getattr(forward, "__code__", None)
    return code is not None and "update_indexer" in code.co_names


def rope_of(module: Any) -> Any:
    """Return the function that rotates queries and keys, of the code that a module is of."""
    return modules[type(module).__module__].apply_rotary_pos_emb


COMPRESSES = ("self", "hidden_states", "q_residual", "position_ids", "past_key_values", "layer_idx")
STORES = ("store_compression_weights", "update_compressor_states")

INDEXERS = {
    "DeepseekV4CSACompressor": (COMPRESSES, (*STORES, "update_overlap_state", "indexer", "new_full")),
    "DeepseekV4HCACompressor": (COMPRESSES, STORES),
    "DeepseekV4IndexerScorer": (("self", "q", "compressed_kv", "hidden_states"), ("weights_proj", "relu")),
    "MiniMaxM3VLIndexer": (
        ("self", "hidden_states", "position_embeddings", "past_key_values", "position_ids"),
        (
            *("q_proj", "k_proj", "q_norm", "k_norm", "head_dim", "block_size", "topk_blocks", "local_blocks"),
            *("apply_rotary_pos_emb", "update_index"),
        ),
    ),
    "Qwen4ExpTextQSAIndexer": (
        ("self", "hidden_states", "position_embeddings", "attention_mask", "past_key_values"),
        (
            *("index_qk_proj", "index_n_heads", "index_kv_heads", "q_layernorm", "k_layernorm", "compress_ratio"),
            *("block_topk", "token_budget", "apply_rotary_pos_emb", "update_indexer"),
        ),
    ),
}
"""Classes of indexers and compressors that run as subclasses: the arguments of `forward`, and names that it reads."""


def is_known_indexer(module: Any) -> bool:
    """Return whether a module is such an indexer, as attnmesh knows it. Another one is refused when it is called."""
    kind, known = type(module), INDEXERS.get(type(module).__name__)
    if known is None or not kind.__module__.startswith("transformers"):
        return False
    arguments, names = known
    return {*names} <= {*kind.forward.__code__.co_names} and (*signature(kind.forward).parameters,) == arguments


RELATIVE = ("self", "relative_states", "query_positions", "key_positions")
"""Arguments of `InklingRelativeLogits`, whose biases depend on the distance alone."""


def is_relative(module: Any) -> bool:
    """Return whether a module adds Inkling's bias by distance to logits, as attnmesh knows it."""
    known = (each for each in type(module).__mro__ if each.__name__ == "InklingRelativeLogits")
    stock = next((each for each in known if each.__module__.startswith("transformers.models.inkling.modeling")), None)
    forward = getattr(stock, "forward", None)
    return forward is not None and (*signature(forward).parameters,) == RELATIVE


class RecurrentKind(NamedTuple):
    """Names that a class of recurrent layers must have to run on shards. All of them are replaced there."""

    functions: tuple[str, ...] = ()
    """Functions that its `forward` calls."""
    reads: tuple[str, ...] = ()
    """Attributes that its `forward` reads."""
    convolution: str | None = None
    """Name of its causal `nn.Conv1d`, if `forward` calls that instead of a function."""
    outputs: int = 1
    """Tensors of one value per token that it returns first."""


CONVOLUTION = "causal_conv1d_fn"
SHORT_CONVOLUTION = RecurrentKind((CONVOLUTION,))
MAMBA1 = RecurrentKind((CONVOLUTION, "mamba_selective_scan"))
FUSED_MAMBA1 = RecurrentKind((*MAMBA1.functions, "mamba_inner_fn"))
MAMBA2 = RecurrentKind((CONVOLUTION, "mamba2_chunk_scan", "mamba2_split_conv1d_scan_combined"))
GATED_DELTA = RecurrentKind((CONVOLUTION, "torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"))
KIMI_DELTA = RecurrentKind((CONVOLUTION, "chunk_kimi_delta_attention", "recurrent_kimi_delta_attention"))
RGLRU = RecurrentKind(reads=("_rnn_scan",))
LIGHTNING = RecurrentKind(
    reads=(
        *("qkv_proj", "act_fn", "num_attention_heads", "head_dim", "slope_rate", "norm", "output_gate", "out_proj"),
        *("query_decay", "key_decay", "diagonal_decay"),
    )
)
COMPRESSED = RecurrentKind(
    ("repeat_kv",),
    (
        *("q_proj", "k_proj", "v_proj_current", "v_proj_delayed", "conv_qk_depthwise", "conv_qk_grouped"),
        *("conv_kernel_size", "num_key_value_groups", "head_dim", "hidden_size"),
    ),
    outputs=3,
)

RECURRENT: dict[str, RecurrentKind] = {
    "BailingHybridDeltaAttention": KIMI_DELTA,
    "BambaMixer": MAMBA2,
    "FalconH1Mixer": MAMBA2,
    "FalconMambaMixer": FUSED_MAMBA1,
    "GraniteMoeHybridMambaLayer": MAMBA2,
    "InklingShortConvolution": SHORT_CONVOLUTION,
    "JambaMambaMixer": MAMBA1,
    "KimiLinearDeltaAttention": KIMI_DELTA,
    "Lfm2MoeShortConv": SHORT_CONVOLUTION,
    "Lfm2ShortConv": SHORT_CONVOLUTION,
    "Lfm3ShortConv": SHORT_CONVOLUTION,
    "Mamba2Mixer": MAMBA2,
    "MambaMixer": FUSED_MAMBA1,
    "MiniMaxLightningAttention": LIGHTNING,
    "NemotronHMamba2Mixer": MAMBA2,
    "OlmoHybridGatedDeltaNet": GATED_DELTA,
    "Qwen3NextGatedDeltaNet": GATED_DELTA,
    "Qwen3_5GatedDeltaNet": GATED_DELTA,
    "Qwen3_5MoeGatedDeltaNet": GATED_DELTA,
    "Qwen4ExpTextGatedDeltaNet": GATED_DELTA,
    "RecurrentGemmaRecurrentBlock": RecurrentKind(reads=("rg_lru",), convolution="conv_1d"),
    "RecurrentGemmaRglru": RGLRU,
    "Zamba2MambaMixer": MAMBA2,
    "ZambaMambaMixer": MAMBA1,
    "ZayaCCAProjection": COMPRESSED,
}
"""Classes of recurrent layers, by name. The modules of transformers are loaded by the models that have them."""

DELTA_INPUTS = ("query", "key", "value", "g", "beta")
DELTA_STATES = ("initial_state", "output_final_state", "use_qk_l2norm_in_kernel")

PARAMETERS: dict[str, tuple[str, ...]] = {
    "causal_conv1d_fn": ("hidden_states", "weight", "bias", "activation"),
    "mamba_selective_scan": (
        *("hidden_states", "dt", "A", "B", "C", "D", "z", "delta_bias", "delta_softplus", "return_last_state"),
        *("use_mambapy", "use_associative_scan"),
    ),
    "mamba2_chunk_scan": (
        *("hidden_states", "dt", "A", "B", "C", "chunk_size", "D", "dt_bias", "initial_states", "dt_softplus"),
        *("dt_limit", "return_final_states"),
    ),
    **dict.fromkeys(
        ("torch_chunk_gated_delta_rule", "chunk_kimi_delta_attention"), (*DELTA_INPUTS, "chunk_size", *DELTA_STATES)
    ),
    **dict.fromkeys(
        ("torch_recurrent_gated_delta_rule", "recurrent_kimi_delta_attention"), (*DELTA_INPUTS, *DELTA_STATES)
    ),
}
"""Parameters of the functions that are replaced by other code, before their `**kwargs`."""

UNCHANGED = (
    *("apply_mask_to_padding_states", "causal_conv1d_update"),
    *("mamba_selective_state_update", "mamba2_selective_state_update"),
)
"""Functions that a recurrent layer may call as they are: none of them mixes the tokens of a shard."""

MASKS = ("attention_mask", "conv_mask")
"""Names of the padding among the arguments of recurrent layers."""

PER_TOKEN = ("hidden_states", "input_states", "position_ids", *MASKS)
"""Arguments of recurrent layers with one value per token, along dim 1."""

CACHES = ("cache_params", "past_key_values")
"""Names of the cache among the arguments of recurrent layers."""

ARGUMENTS = ("self", "activations", *PER_TOKEN, *CACHES, "position_embeddings", "use_cache", "kwargs")
"""All arguments of recurrent layers."""
