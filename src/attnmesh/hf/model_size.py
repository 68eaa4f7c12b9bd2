"""Sizes of a language model for the planner, from its configuration: heads, layers, widths and bytes of weights."""

from functools import cache
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from attnmesh.core.mask import Mask, Window
from attnmesh.hf.latent import latent_widths
from attnmesh.hf.models import NAME, OTHER_LAYERS, RECURRENT_LAYERS, cached_layers, has_windows
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
    config, skeleton = config.get_text_config(decoder=True), _skeleton(config, dtype)
    whole, windows = _attention_layers(config)
    latent, kind = latent_widths(config), dict(workload)
    heads, dims = _heads(config, wide=bool(whole)), {}
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
        small = Workload(*_heads(config), layers=windows, **{**common, "mask": mask})
        kept = small.kept_bytes
    return Model(work, config.hidden_size, config.num_hidden_layers, _weights(skeleton), kept)


def other_layers(config: PreTrainedConfig) -> dict[str, int]:
    """Return the layers that the workload of a model leaves out: those with windows, and recurrent ones."""
    config = config.get_text_config(decoder=True)
    whole, windows = _attention_layers(config)
    kinds = getattr(config, "layer_types", None) or []
    found = {"with windows": windows if whole else 0, "recurrent": sum(kind in RECURRENT_LAYERS for kind in kinds)}
    return {name: count for name, count in found.items() if count}


def _attention_layers(config: PreTrainedConfig) -> tuple[int, int]:
    """Return the layers that keep keys of all tokens, and those that keep keys of a window or chunk."""
    kinds = list(getattr(config, "layer_types", None) or [])[: cached_layers(config)]
    kinds = [kind for kind in kinds if kind not in OTHER_LAYERS and (kind == "hybrid" or kind not in RECURRENT_LAYERS)]
    if not getattr(config, "layer_types", None):
        layers = cached_layers(config)
        return (0, layers) if has_windows(config) else (layers, 0)
    windows = sum(kind in ("sliding_attention", "chunked_attention") for kind in kinds)
    return len(kinds) - windows, windows


def _window(config: PreTrainedConfig) -> int:
    return int(getattr(config, "sliding_window", None) or config.attention_chunk_size)


def _heads(config: PreTrainedConfig, wide: bool = False) -> tuple[int, int, int]:
    """Return query heads, key heads and columns; with `wide` those of layers that see all tokens, where they differ."""

    def one(name: str, other: str) -> int | None:
        given = (
            getattr(config, f"global_{name}" if name == "head_dim" else f"num_global_{name}", None) if wide else None
        )
        return given or getattr(config, other, None)

    q_heads = config.num_attention_heads
    head_dim = one("head_dim", "head_dim") or config.hidden_size // q_heads
    return q_heads, one("key_value_heads", "num_key_value_heads") or q_heads, head_dim


def _skeleton(config: PreTrainedConfig, dtype: str) -> PreTrainedModel:
    """Return the model without its weights."""
    with torch.device("meta"):
        made: PreTrainedModel = AutoModelForCausalLM.from_config(
            config, dtype=getattr(torch, dtype), attn_implementation=NAME
        )
    return made


def _weights(skeleton: PreTrainedModel) -> Any:
    @cache
    def weights(ranks: int, is_shared: bool) -> int:
        return rank_weights(skeleton, ranks, "heads" if is_shared else "replicated")

    return weights
