"""Sizes of a language model for the planner, from its configuration: heads, layers, widths and bytes of weights."""

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from attnmesh.core.mask import Window
from attnmesh.errors import ModelError
from attnmesh.hf.cache.layer import SHORT_WINDOW
from attnmesh.hf.family import family_of
from attnmesh.hf.latent_states import latent_widths
from attnmesh.hf.load import as_model_error
from attnmesh.hf.models import (
    ATTN_IMPLEMENTATION,
    indexed_layer_indices,
    is_compressed,
    layers_of,
    num_cached_layers,
    window_of,
)
from attnmesh.hf.shared_sizes import active_parameters, sizes_of_experts, sizes_of_shared
from attnmesh.hf.tensor_parallel import rank_weights
from attnmesh.hf.transformers_names import Conv1D
from attnmesh.planner.selected import Selected
from attnmesh.planner.serving import ModelSizes
from attnmesh.planner.training import TrainingSizes
from attnmesh.planner.workload import Workload


def model_size(config: PreTrainedConfig, dtype: str = "bfloat16", **workload: Any) -> ModelSizes:
    """Return the sizes of a model. Its workload is attention of the layers that see most tokens.

    Args:
        config: The model's configuration.
        dtype: The dtype of weights and keys.
        workload: More arguments of `Workload`, `length` and `phase` among them.

    >>> from transformers import LlamaConfig
    >>> sizes = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    >>> model = model_size(LlamaConfig(vocab_size=100, intermediate_size=128, **sizes), length=1000, phase="decode")
    >>> model.workload.title, model.rank_weight_bytes(1, False), model.rank_weight_bytes(2, False)
    ('decode, 1,000 tokens, 4/2 heads of 16, bfloat16, causal, 2 layers', 173696, 87168)
    """
    config = config.get_text_config(decoder=True)
    attends = config.is_heterogeneous or hasattr(config, "num_attention_heads")
    full_layers, window_layers = _num_attention_layers(config) if attends else (0, 0)
    if full_layers + window_layers == 0:
        given = f"{config.model_type} without any"
        raise ModelError("plan model", "layers of attention", given, "use a model whose layers attend")
    if is_compressed(config):
        given, fix = f"{config.model_type}, which compresses them", "write --heads 64/1 with entries as the --length"
        raise ModelError("plan model", "layers that keep keys of tokens", given, fix)
    skeleton = _skeleton(config, dtype)
    workload["dtype"] = dtype
    windowed_work = _workload_of_windows(config, window_layers, workload) if window_layers else None
    attention_work = _workload_of_full_layers(config, full_layers, workload) if full_layers else windowed_work
    assert attention_work is not None
    window_bytes = windowed_work.kept_bytes if full_layers and windowed_work else 0
    experts = sizes_of_experts(skeleton)
    return ModelSizes(
        workload=attention_work,
        hidden_size=config.hidden_size,
        layers=config.num_hidden_layers,
        rank_weight_bytes=cache(
            lambda ranks, is_joint: rank_weights(skeleton, ranks, "heads" if is_joint else "replicated")
        ),
        window_bytes=window_bytes,
        active_parameters=active_parameters(skeleton, experts),
        shared=sizes_of_shared(skeleton),
        experts=experts,
    )


def training_size(config: PreTrainedConfig, lora: int = 0, **workload: Any) -> TrainingSizes:
    """Return the sizes of a model that is trained, or of one with an adapter of rank `lora` on all linear layers.

    >>> from transformers import LlamaConfig
    >>> sizes = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    >>> config = LlamaConfig(vocab_size=100, intermediate_size=128, **sizes)
    >>> training_size(config, length=1000, phase="training").model_parameters
    86848
    >>> training_size(config, 8, length=1000, phase="training").adapter_parameters
    16384
    """
    model = model_size(config, **workload)
    config = config.get_text_config(decoder=True)
    experts = getattr(config, "num_experts_per_tok", None) or 1
    widths = (getattr(config, name, None) for name in ("moe_intermediate_size", "intermediate_size"))
    if lora > config.hidden_size:
        fix = "take a smaller one, such as 16"
        raise ModelError("lora", f"a rank up to the model's width, {config.hidden_size}", f"{lora:,}", fix)
    return TrainingSizes(
        workload=model.workload,
        layers=model.layers,
        hidden_size=model.hidden_size,
        intermediate_size=experts * next(filter(None, widths), 4 * config.hidden_size),
        vocab_size=config.vocab_size,
        model_parameters=model.rank_weight_bytes(1, False) // model.workload.itemsize,
        adapter_parameters=_adapter_parameters(config, lora) if lora else 0,
        tied=config.tie_word_embeddings,
    )


def _adapter_parameters(config: PreTrainedConfig, lora_rank: int) -> int:
    """Return the numbers of an adapter on all linear layers but the output head: "all-linear" of peft."""
    skeleton = _skeleton(config, "bfloat16")
    head = skeleton.get_output_embeddings()
    layers = [layer for layer in skeleton.modules() if isinstance(layer, (nn.Linear, Conv1D)) and layer is not head]
    return lora_rank * sum(sum(layer.weight.shape) for layer in layers)


def other_layer_counts(config: PreTrainedConfig) -> dict[str, int]:
    """Return the layers that the workload of a model leaves out: those with windows, and recurrent ones."""
    config = config.get_text_config(decoder=True)
    full_layers, window_layers = _num_attention_layers(config)
    recurrent = sum(layer.recurrent for layer in layers_of(config))
    counts = {"with windows": window_layers if full_layers else 0, "recurrent": recurrent}
    return {name: count for name, count in counts.items() if count}


def _num_attention_layers(config: PreTrainedConfig) -> tuple[int, int]:
    """Return the layers that keep keys of all tokens, and those that keep keys of a window or chunk."""
    layers = [layer for layer in layers_of(config)[: num_cached_layers(config)] if layer.attends]
    windows = sum(layer.windowed for layer in layers)
    return len(layers) - windows, windows


def _workload_of_full_layers(config: PreTrainedConfig, layers: int, arguments: Mapping[str, Any]) -> Workload:
    """Return the workload of the layers that see all tokens."""
    workload = Workload(**{**arguments, **_widths(config, windowed=False), "layers": layers})
    return replace(workload, selected=_selected_keys(config, workload.kv_heads))


def _workload_of_windows(config: PreTrainedConfig, layers: int, arguments: Mapping[str, Any]) -> Workload:
    """Return the workload of the layers with windows, of which short ones are not stored in 8 bits."""
    workload = Workload(**{**arguments, **_widths(config, windowed=True), "layers": layers})
    window = window_of(config) or int(config.attention_chunk_size)
    storage = workload.storage if window > SHORT_WINDOW else None
    return replace(workload, mask=Window(min(window, workload.length) - 1), storage=storage)


def _widths(config: PreTrainedConfig, *, windowed: bool) -> dict[str, Any]:
    """Return heads and columns, as a workload names them, of the first layer that has a window, or that has none."""
    layers = config.per_layer_config if config.is_heterogeneous else None
    indices = [index for index, layer in enumerate(layers_of(config)) if layer.windowed == windowed]
    layer_config = layers[indices[0]] if layers and indices else config
    prefix = family_of(config).window_prefix if windowed else ""
    latent = latent_widths(config, indices[0] if indices else 0)
    q_heads = getattr(layer_config, f"{prefix}num_attention_heads")
    if latent is not None:
        heads = {"q_heads": q_heads, "kv_heads": q_heads, "head_dim": layer_config.qk_nope_head_dim + latent[1]}
        return {**heads, "value_dim": layer_config.v_head_dim, "latent": latent}
    kv_heads, dim = (getattr(layer_config, f"{prefix}{name}", None) for name in ("num_key_value_heads", "head_dim"))
    return {"q_heads": q_heads, "kv_heads": kv_heads or q_heads, "head_dim": dim or config.hidden_size // q_heads}


def _selected_keys(config: PreTrainedConfig, kv_heads: int) -> Selected | None:
    """Return what the layers with indexers select, or None without such layers."""
    layers = sum(layer.indexed for layer in layers_of(config))
    size = family_of(config).planned_selection
    if not layers:
        return None
    given, fix = f"{config.model_type} with an indexer", "pass its sizes to am.Workload, with selected="
    if size is None:
        raise ModelError("plan model", "a known indexer", given, fix)
    return size(config, {"layers": layers, "indexers": len(indexed_layer_indices(config))}, kv_heads)


def _skeleton(config: PreTrainedConfig, dtype: str) -> PreTrainedModel:
    """Return the model without its weights. The configuration stays as it is: transformers writes the dtype into it."""
    options = {"dtype": getattr(torch, dtype), "attn_implementation": ATTN_IMPLEMENTATION}
    config = deepcopy(config)
    with torch.device("meta"), as_model_error("plan model", "a configuration", config.model_type, "use another model"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, **options)
    return model
