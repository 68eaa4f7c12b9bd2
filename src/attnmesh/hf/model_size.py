"""Sizes of a language model for the planner, from its configuration: heads, layers, widths and bytes of weights."""

from functools import cache
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from attnmesh.core.mask import Mask, Window
from attnmesh.errors import ModelError, require
from attnmesh.hf.latent import latent_widths
from attnmesh.hf.load import as_model_error
from attnmesh.hf.models import (
    HYBRID_LAYERS,
    NAME,
    OTHER_LAYERS,
    RECURRENT_LAYERS,
    WINDOWED_LAYERS,
    cached_layers,
    layer_kinds,
)
from attnmesh.hf.tensor_parallel import rank_weights
from attnmesh.planner.serving import Model
from attnmesh.planner.workload import Workload


def model_size(config: PreTrainedConfig, dtype: str = "bfloat16", **workload: Any) -> Model:
    """Return the sizes of a model. Its workload is attention of the layers that see most tokens.

    Args:
        config: The model's configuration.
        dtype: The dtype of weights and keys.
        workload: More arguments of `Workload`, `length` and `phase` among them.

    >>> from transformers import LlamaConfig
    >>> sizes = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    >>> model = model_size(LlamaConfig(vocab_size=100, intermediate_size=128, **sizes), length=1000, phase="decode")
    >>> model.workload.title, model.weights(1, False), model.weights(2, False)
    ('decode, 1,000 tokens, 4/2 heads of 16, bfloat16, causal, 2 layers', 173696, 87168)
    """
    config = config.get_text_config(decoder=True)
    whole, windows = _attention_layers(config) if hasattr(config, "num_attention_heads") else (0, 0)
    given, fix = f"{config.model_type} without any", "use a model whose layers attend"
    require(whole + windows > 0, ModelError, "plan model", "layers of attention", given, fix)
    skeleton = _skeleton(config, dtype)
    latent, kind = latent_widths(config), dict(workload)
    heads, dims = _heads(config, windowed=not whole), {}
    if latent is not None:
        dims = {"value_dim": config.v_head_dim, "latent": latent}
        heads = config.num_attention_heads, config.num_attention_heads, config.qk_nope_head_dim + latent[1]
    elif not whole:
        kind["mask"] = Window(min(_window(config), workload["length"]) - 1)
    common = {"dtype": dtype, **dims, **kind}
    work = Workload(*heads, layers=whole or windows, **common)
    kept = 0
    if whole and windows:
        mask: Mask = Window(min(_window(config), work.length) - 1)
        small = Workload(*_heads(config, windowed=True), layers=windows, **{**common, "mask": mask})
        kept = small.kept_bytes
    return Model(work, config.hidden_size, config.num_hidden_layers, _weights(skeleton), kept)


def other_layers(config: PreTrainedConfig) -> dict[str, int]:
    """Return the layers that the workload of a model leaves out: those with windows, and recurrent ones."""
    config = config.get_text_config(decoder=True)
    whole, windows = _attention_layers(config)
    recurrent = sum(kind in RECURRENT_LAYERS for kind in layer_kinds(config))
    found = {"with windows": windows if whole else 0, "recurrent": recurrent}
    return {name: count for name, count in found.items() if count}


def _attention_layers(config: PreTrainedConfig) -> tuple[int, int]:
    """Return the layers that keep keys of all tokens, and those that keep keys of a window or chunk."""
    kinds = layer_kinds(config)[: cached_layers(config)]
    kinds = [
        kind for kind in kinds if kind not in OTHER_LAYERS and (kind in HYBRID_LAYERS or kind not in RECURRENT_LAYERS)
    ]
    windows = sum(kind in WINDOWED_LAYERS for kind in kinds)
    return len(kinds) - windows, windows


def _window(config: PreTrainedConfig) -> int:
    return int(getattr(config, "sliding_window", None) or config.attention_chunk_size)


def _heads(config: PreTrainedConfig, *, windowed: bool) -> tuple[int, int, int]:
    """Return query heads, key heads and columns of the first layer that has a window, or that has none."""
    layers = getattr(config, "per_layer_config", None)  # of models whose layers differ
    numbers = [number for number, kind in enumerate(layer_kinds(config)) if (kind in WINDOWED_LAYERS) == windowed]
    one = layers[numbers[0]] if layers and numbers else config
    q_heads = one.num_attention_heads
    kv_heads, dim = getattr(one, "num_key_value_heads", None), getattr(one, "head_dim", None)
    return q_heads, kv_heads or q_heads, dim or config.hidden_size // q_heads


def _skeleton(config: PreTrainedConfig, dtype: str) -> PreTrainedModel:
    """Return the model without its weights."""
    kind = {"dtype": getattr(torch, dtype), "attn_implementation": NAME}
    with torch.device("meta"), as_model_error("plan model", "a configuration", config.model_type, "use another model"):
        made: PreTrainedModel = AutoModelForCausalLM.from_config(config, **kind)
    return made


def _weights(skeleton: PreTrainedModel) -> Any:
    @cache
    def weights(ranks: int, is_shared: bool) -> int:
        return rank_weights(skeleton, ranks, "heads" if is_shared else "replicated")

    return weights
