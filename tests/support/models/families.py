"""Small language models of many families, with the same random weights wherever they are made."""

from itertools import cycle
from typing import Any

import pytest
import torch
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    Gemma4TextConfig,
    GptOssConfig,
    Llama4TextConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    VaultGemmaConfig,
)
from transformers.masking_utils import sdpa_mask

from attnmesh.mesh.shapes import Shape
from tests.support.truth.dense import dense

SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 2048,
    "initializer_range": 0.4,  # or all tokens but one would be equally unlikely
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
    "tie_word_embeddings": False,
}

MIXED = ["sliding_attention", "full_attention"]

CAPPED: dict[str, Any] = {"sliding_window": 16, "layer_types": MIXED, "query_pre_attn_scalar": 8}

CONFIGS: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**SIZES),
    "qwen2": Qwen2Config(**SIZES),
    "qwen3": Qwen3Config(**SIZES),
    "mistral": MistralConfig(**SIZES, sliding_window=24),
    "gemma3": Gemma3TextConfig(**SIZES, sliding_window=16, layer_types=MIXED, query_pre_attn_scalar=8),
    "gpt-oss": GptOssConfig(
        **{**SIZES, "max_position_embeddings": 131072},
        sliding_window=20,
        layer_types=MIXED,
        num_local_experts=4,
        num_experts_per_tok=2,
    ),
    "gemma2": Gemma2Config(**SIZES, **CAPPED),
    "gemma2-low-cap": Gemma2Config(**SIZES, **CAPPED, attn_logit_softcapping=1.0, final_logit_softcapping=9.0),
    "vaultgemma": VaultGemmaConfig(**SIZES, **CAPPED, attn_logit_softcapping=3.0),
    "gemma4": Gemma4TextConfig(
        **{**SIZES, "num_hidden_layers": 4},
        sliding_window=16,
        layer_types=MIXED * 2,  # layers that share, and several of a kind
        num_kv_shared_layers=2,
        global_head_dim=16,
        hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=97,
    ),
    "llama4": Llama4TextConfig(
        **SIZES,
        intermediate_size_mlp=64,
        num_local_experts=2,
        attention_chunk_size=24,
        layer_types=["chunked_attention", "full_attention"],
        no_rope_layers=[1, 0],
        floor_scale=32,  # temperatures that differ between tokens
    ),
}


def model(family: str, attention: str, dtype: torch.dtype = torch.float32, **changes: Any) -> PreTrainedModel:
    """A model of the family, for evaluation."""
    config = type(CONFIGS[family])(**{**CONFIGS[family].to_dict(), **changes})
    with torch.random.fork_rng():
        torch.manual_seed(1)
        kind: dict[str, str] = {"attn_implementation": attention}
        if family == "gpt-oss":
            kind["experts_implementation"] = "eager"  # the grouped one has no float64
        made = AutoModelForCausalLM.from_config(config, **kind)
        for name, weights in made.named_parameters():
            if name.endswith("sinks"):
                torch.nn.init.normal_(weights)
    return made.to(dtype).eval()


def small_llama(attention: str = "attnmesh") -> PreTrainedModel:
    """Return a Llama of one layer, for evaluation."""
    return model("llama", attention, num_hidden_layers=1)


STOCK = dict.fromkeys(CONFIGS, "sdpa") | {"gpt-oss": "eager"}
STOCK |= dict.fromkeys(("gemma2", "gemma2-low-cap", "vaultgemma"), "dense-capped")
"""Attention of the expected results: sinks are not for sdpa, and the eager softmax of soft caps is in float32."""


def dense_capped(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor,
    *,
    scaling: float,
    softcap: float | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Attention by its formula, under a boolean mask."""
    return dense(query, key, value, attention_mask, scaling, softcap=softcap)[0].transpose(1, 2).contiguous(), None


def dense_mask(*arguments: Any, **options: Any) -> torch.Tensor:
    """The boolean mask of sdpa, never left out."""
    mask: torch.Tensor = sdpa_mask(*arguments, **options | {"allow_is_causal_skip": False})
    return mask


AttentionInterface.register("dense-capped", dense_capped)
AttentionMaskInterface.register("dense-capped", dense_mask)

SHAPES = [Shape(1, 1, 1), Shape(1, 2, 1), Shape(1, 1, 3), Shape(1, 2, 2), Shape(2, 1, 2)]

SAMPLED = dict(zip(CONFIGS, cycle([*SHAPES, *SHAPES[3:], *SHAPES[3:], *SHAPES[1:3]]), strict=False))
"""Each family's mesh in `make test`: each mesh has a family, and windows and sinks are on several ranks."""

FEW = ("llama", "qwen3", "gemma3", "gpt-oss", "gemma2-low-cap", "gemma4", "llama4")
"""Families of `make test` where a test takes long: each feature once."""


def families_on_meshes(*, long: bool = True) -> list[Any]:
    """Parameters of a test: each family on its mesh; with `long`, all on all where there is time."""
    return [
        pytest.param(
            family,
            shape,
            id=f"{family}-{'x'.join(map(str, shape))}",
            marks=[] if shape == SAMPLED[family] else pytest.mark.long,
        )
        for family in CONFIGS
        for shape in SHAPES
        if long or shape == SAMPLED[family]
    ]


def prompt(length: int, batch: int = 1, seed: int = 0) -> torch.Tensor:
    """Token ids, none of which is padding."""
    return torch.randint(2, 97, (batch, length), generator=torch.Generator().manual_seed(seed))


Batch = dict[str, Any]


def plain_batch() -> Batch:
    """Return two sequences to learn, whole."""
    ids = prompt(61, batch=2)
    return {"input_ids": ids, "labels": ids}
