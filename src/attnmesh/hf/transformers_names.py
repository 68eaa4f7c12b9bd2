"""Names that this room uses of transformers and accelerate beside their stable interfaces, with the versions tested.

Importing this file checks the names that every model needs. What a family needs beside them is in its record, see
`families`. `TENSOR_PARALLEL`, `TRAINER` and `ACCELERATE` are checked when they are first used.
"""

from collections.abc import Container
from functools import cache
from sys import modules
from typing import Any

from attnmesh.runtime.upstream import Upstream

TESTED_VERSIONS = ("5.23", "5.24")
"""First version of transformers that is tested, and first that is not.

Before 5.23 there is no `DummyLayer`, tensor parallelism fails, and Gemma 4 does not say which layers share keys. From
5.24 on recurrent layers take their cache by another name.
"""

TRANSFORMERS = Upstream(
    "transformers",
    *TESTED_VERSIONS,
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
    "transformers", *TESTED_VERSIONS, ("transformers:PreTrainedModel.tp_plan", APPLY_TENSOR_PARALLELISM)
)
"""Names that `tensor_parallel` needs."""

TRAINER = Upstream(
    "transformers",
    *TESTED_VERSIONS,
    (
        "transformers:Trainer._load_rng_state",
        "transformers:Trainer.create_accelerator_and_postprocess",
        "transformers:Trainer.floating_point_ops",
        "transformers:Trainer.get_train_dataloader",
        "transformers:Trainer.get_total_train_batch_size",
        "transformers:Trainer.prediction_step",
        "transformers:Trainer.training_step",
        "transformers.integrations.neftune:neftune_post_forward_hook",
    ),
)
"""Methods of the trainer that `on_mesh` overrides, and the hook of noise that is scaled on shards."""

ACCELERATE = Upstream(
    "accelerate",
    "1.15",
    "1.16",
    (
        "accelerate:Accelerator.gather",
        "accelerate:Accelerator.gather_for_metrics",
        "accelerate:Accelerator.load_state",
        "accelerate:Accelerator.num_processes",
        "accelerate:Accelerator.prepare_model",
        "accelerate:Accelerator.prepare_scheduler",
        "accelerate:Accelerator.process_index",
        "accelerate:Accelerator.reduce",
        "accelerate.utils:gather",
        "accelerate.utils:gather_object",
    ),
)
"""Methods of the accelerator that `prepare` overrides. Version 1.12 resumes adapters with FSDP2 wrongly."""

TRL = Upstream("trl", "1.16", "1.17", tuple(f"trl:{kind}Trainer._precompute_ref_logps" for kind in ("DPO", "KTO")))
"""Methods that `on_mesh` overrides. Before 1.16 models of an `SFTTrainer` return counts beside their loss."""

DRAWING = ("_generate_and_score_completions", "_generate_single_turn")
REWARDING = (*DRAWING, "_calculate_rewards", "_compute_loss", "_get_per_token_logps_and_entropies")
DISTILLING = (*DRAWING, "_get_last_hidden_state", "compute_loss", "get_train_dataloader")
DIVERGENCE = "trl.trainer.distillation_trainer:_chunked_divergence_loss"
ROLLOUTS = Upstream(
    *(TRL.package, TRL.floor, TRL.ceiling),
    (
        *(f"trl:{kind}Trainer.{name}" for kind in ("GRPO", "RLOO") for name in REWARDING),
        *(f"trl:DistillationTrainer.{name}" for name in DISTILLING),
        *(f"trl.trainer.{kind}_trainer:gather" for kind in ("grpo", "rloo")),
        *(f"trl.trainer.{kind}_trainer:gather_object" for kind in ("grpo", "rloo", "distillation")),
        DIVERGENCE,
    ),
)
"""Methods of trainers that draw completions, which `on_mesh` overrides, and functions that it replaces meanwhile."""

COMPARING = ("_generate", "_calculate_rewards_from_functions", "_forward")
ONLINE_DPO = Upstream(
    *(TRL.package, TRL.floor, TRL.ceiling),
    tuple(f"trl.experimental.online_dpo:OnlineDPOTrainer.{name}" for name in COMPARING),
)
"""Methods of an experimental trainer, whose import warns, that `on_mesh` overrides or calls."""

LEARNING = ("generate_on_policy_outputs", "generalized_jsd_loss", "compute_loss")
GKD = Upstream(
    *(TRL.package, TRL.floor, TRL.ceiling),
    tuple(f"trl.experimental.gkd:GKDTrainer.{name}" for name in LEARNING),
)
"""Methods of another experimental trainer that `on_mesh` overrides or calls."""

PEFT = Upstream(
    "peft",
    "0.20",
    "0.22",
    (
        "peft:LoraConfig.alora_invocation_tokens",
        "peft:PeftConfig.is_prompt_learning",
        "peft:PeftConfig.peft_type",
        "peft:PeftModel.get_base_model",
    ),
)
"""Names that unwrapping a model with adapters needs. transformers 5.23 refuses older versions."""

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
    if any(kind.__module__.split(".")[0] == "trl" for kind in trainer.__mro__):
        TRL.check()


@cache
def subclass(stock: type, base: type, **fields: Any) -> Any:
    """Return a subclass of a class of transformers that has another first base. See `stock_of`."""
    return type(stock.__name__, (base, stock), {"__module__": stock.__module__, **fields})


def stock_of(module: Any) -> Any:
    """Return the class of transformers that a module had before `subclass` replaced it."""
    return type(module).__bases__[1]


def cache_argument(parameters: Container[str]) -> str:
    """Return the name of the cache among the parameters of a model's forward pass."""
    return "cache_params" if "cache_params" in parameters else "past_key_values"


def rope_of(module: Any) -> Any:
    """Return the function that rotates queries and keys, from the file of a module's class."""
    return modules[type(module).__module__].apply_rotary_pos_emb
