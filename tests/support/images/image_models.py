"""Tiny random models of text and images, and prompts with two small images for them.

The numbers of image tokens are those of the features that a model computes. `IMAGE_OVERRIDES` has what does not follow
from the names of fields.
"""

from inspect import signature
from typing import Any

import torch
import transformers
from transformers import AutoModelForImageTextToText, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

from attnmesh.hf.images.towers import in_tower
from tests.support.images.image_inputs import OWN, SIDE, random_pixels, squares
from tests.support.models.checks import prompt
from tests.support.models.tiny_models import Case, build

IMAGE = 90
"""The image token."""

GRIDS = torch.tensor([[1, 4, 6], [1, 2, 4]])
"""Patches of two images along time, height and width."""

VISION: dict[str, Any] = {
    "image_size": SIDE, "patch_size": 8, "num_channels": 3, "in_channels": 3, "in_chans": 3, "depth": 2,
    "num_hidden_layers": 2, "num_heads": 4, "spatial_merge_size": 2, "temporal_patch_size": 2, "out_hidden_size": 32,
    "fullatt_block_indexes": [1], "deepstack_visual_indexes": [0], "num_position_embeddings": 64,
    "text_hidden_size": 32, "num_patches": 16, "embed_dim": 32,
}  # fmt: skip
"""Fields of configurations of towers, where they exist."""

TOKENS = {
    "image_token_id": IMAGE, "image_token_index": IMAGE, "video_token_id": 91, "video_token_index": 91,
    "vision_start_token_id": 92, "vision_end_token_id": 93, "image_start_token_id": 92, "image_end_token_id": 93,
    "video_start_token_id": 94, "video_end_token_id": 95, "boi_token_id": 92, "eoi_token_id": 93,
    "image_patch_id": IMAGE, "boi_token_index": 92, "eoi_token_index": 93, "image_seq_length": 16,
}  # fmt: skip

KINDS = ("mm_token_type_ids", "token_type_ids", "moe_mm_token_type_ids")

ROPE = {"rope_type": "default", "rope_theta": 10000.0}
MROPE = {"text_config": {"rope_parameters": {**ROPE, "mrope_section": [2, 1, 1]}}}
ANYRES = {"image_grid_pinpoints": [[SIDE, 2 * SIDE]]}
WORDS = {"<image>": IMAGE, **{f"IMGIMG{name}Z": 60 + at for at, name in enumerate("ABCDEFGH")}}
CODES = {
    "num_embeddings": 8,
    "embed_dim": 8,
    "base_channels": 32,
    "channel_multiplier": [1, 1, 1, 1],
    "latent_channels": 8,
}
TINY_CODES = {"base_channels": 32, "channel_multiplier": [1, 1, 1], "embed_dim": 4, "latent_channels": 4}
EMU_WORDS = {"<image>": IMAGE, "<|extra_200|>": 89, **{f"<|visual token {at:06}|>": 60 + at for at in range(8)}}
SAM = {"image_size": SIDE, "patch_size": 4, "output_channels": 32, "num_hidden_layers": 2, "global_attn_indexes": [1]}
POOLED = {"mm_tokens_per_image": 4}

IMAGE_OVERRIDES: dict[str, dict[str, Any]] = {
    "aria": {"projector_patch_to_query_dict": {16: 4}},
    "chameleon": {"vocabulary_map": WORDS, "vq_config": {**CODES, "resolution": SIDE}},
    "deepseek_ocr2": {
        "text_config": {"mlp_layer_types": ["dense", "sparse", "sparse"]},
        "vision_config": {"sam_config": {**SAM, "downsample_channels": [32, 32]}},
    },
    "deepseek_vl_hybrid": {"high_res_vision_config": {**SAM, "scale": 1}},
    "dots3_note": {"vision_config": {"mlp_layer_types": ["dense", "sparse"], "per_layer_config": {}}},
    "emu3": {"vocabulary_map": {**EMU_WORDS}, "vq_config": {"codebook_size": 8, "hidden_size": 32, **TINY_CODES}},
    "ernie4_5_vl_moe": {"text_config": {
        "moe_intermediate_size": [32, 32], "rope_parameters": {**ROPE, "mrope_section": [1, 1, 2]},
    }},
    "florence2": {"vision_config": {
        "depths": [1, 1], "patch_size": [7, 3], "patch_stride": [4, 2], "patch_padding": [3, 1],
        "patch_prenorm": [False, True], "embed_dim": [32, 32], "num_heads": [4, 4], "num_groups": [4, 4],
    }},
    "fuyu": {"patch_size": 8, "image_size": SIDE},
    "gemma3": POOLED,
    "gemma4": {"text_config": {"use_bidirectional_attention": "vision"}, "vision_config": {
        "model_type": "gemma4_vision", "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 8, "patch_size": 8, "pooling_kernel_size": 2,
        "position_embedding_size": 64,
    }},
    "glm46v": MROPE, "glm4v": MROPE, "glm_ocr": MROPE, "glmga": MROPE,
    "gemma4_unified": {"vision_config": {
        "model_type": "gemma4_unified_vision", "patch_size": 4, "pooling_kernel_size": 2, "mm_embed_dim": 32,
        "mm_posemb_size": 16, "output_proj_dims": 32,
    }},
    "glm5_next": {"text_config": {"num_key_value_heads": 4, "index_kpool": 4, "qk_rope_head_dim": 0}},
    "glm4v_moe": {"text_config": {"rope_parameters": {**ROPE, "mrope_section": [1, 1, 0]}}},
    "granite_docling": {"vision_config": {"out_hidden_size": 32}},
    "hunyuan_vl": {**MROPE, "vision_config": {"temporal_patch_size": 1}},
    "janus": {
        "vision_config": {"projection_dim": 32, "num_image_tokens": 16}, "vq_config": {**CODES, "projection_dim": 32},
    },
    "kimi_k25": {"vision_config": {"merge_kernel_size": (2, 2)}, "projection_hidden_size": 32},
    "llama4": {"vision_config": {
        "vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32, "intermediate_size": 128,
    }},
    "llava_next": ANYRES, "llava_next_video": ANYRES, "llava_onevision": ANYRES,
    "granite4_vision": {**ANYRES, "deepstack_layer_map": [[-2, 0]], "downsample_rate": "1/2", "vision_config": {
        "hidden_size": 64,
    }, "qformer_config": {"hidden_size": 64, "encoder_hidden_size": 64}},
    "mistral_large4": {"text_config": {"num_key_value_heads": 4}},
    "mllama": {"text_config": {"cross_attention_layers": [1]}, "vision_config": {
        "intermediate_layers_indices": [0], "vision_output_dim": 64, "num_global_layers": 1,
    }},
    "molmo2": {
        "vision_config": {"image_size": [SIDE, SIDE], "num_position_embeddings": 16},
        "adapter_config": {"vision_feature_layer": [-1, -2]}, "video_token_id": IMAGE,
    },
    "muse_spark": {
        "vision_config": {"merge_size": 2, "patch_temporal": 2}, "out_hidden_size": 128, "projector_hidden_size": 32,
        "audio_config": {
            "num_hidden_layers": 2, "patch_sizes": [16, 6], "hidden_sizes": [32, 32], "depths": [1, 1],
            "out_hidden_size": 32,
        },
    },
    "nemotron_h_omni": {
        "vision_config": {"video_temporal_patch_size": 2, "patch_dim": 192, "video_patch_dim": 384, "max_img_size": 64},
        "vision_hidden_size": 32,
    },
    "unlimited_ocr": {"vision_config": {"sam_config": {**SAM, "downsample_channels": [32, 32]}}},
    "muse_glimmer": {
        "vision_config": {"merge_size": 2, "patch_temporal": 2}, "out_hidden_size": 128, "projector_hidden_size": 32,
    },
    "paddleocr_vl": MROPE,
    "paligemma": {"projection_dim": 32},
    "qwen2_5_omni_thinker": {**MROPE, "vision_start_token_id": 92},
    "qwen2_5_vl": MROPE,
    "qwen2_vl": {**MROPE, "vision_config": {"hidden_size": 32}},
    "qwen3_omni_moe_thinker": {
        "text_config": {"sliding_window": None}, "vision_start_token_id": 92, "position_id_per_seconds": 25,
    },
    "shieldgemma2": POOLED,
    "vipllava": {"vision_feature_layers": [-1, -2]},
}  # fmt: skip
"""Values that do not follow from the field's name, by model type."""

AS_IMAGES = ("kimi_k25", "paddleocr_vl")
"""Types that take a patch as an image."""


def image_types() -> list[str]:
    """Return the model types of `AutoModelForImageTextToText`."""
    return list(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)


def image_arguments(kind: str) -> list[str]:
    """Return the names of the arguments of a type's model."""
    model: Any = getattr(transformers, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES[kind], None)
    return [] if model is None else [*signature(model.forward).parameters]


def image_case(kind: str) -> Case:
    """Return a type with the changes that make its towers tiny."""
    default, own = CONFIG_MAPPING[kind](), IMAGE_OVERRIDES.get(kind, {})
    changes = {**_fields(TOKENS, default), **own}
    for name in default.sub_configs:
        part = getattr(default, name, None)
        if part is not None:
            changes[name] = {**_fields(VISION if in_tower(part) else {}, part), **own.get(name, {})}
            if "mrope_section" in (getattr(part, "rope_parameters", None) or {}):
                changes[name]["rope_parameters"] = {**part.rope_parameters, "mrope_section": [2, 1, 1]}
    return Case(kind, kind, changes)


def _fields(values: dict[str, Any], part: Any) -> dict[str, Any]:
    """Return the values of fields that a configuration has; as pairs, where its own are pairs."""
    found = {name: (value, getattr(part, name)) for name, value in values.items() if hasattr(part, name)}
    pairs = {name for name, (value, own) in found.items() if isinstance(own, (list, tuple)) and type(value) is int}
    return {name: (value, value) if name in pairs else value for name, (value, _) in found.items()}


def build_images(case: Case, attention: str, dtype: torch.dtype) -> PreTrainedModel:
    """Return the case's model of text and images."""
    return build(case, attention, dtype, AutoModelForImageTextToText)


def image_batch(model: Any, dtype: torch.dtype) -> dict[str, Any]:
    """Return a prompt with two images, as a processor would."""
    names, kind = signature(model.forward).parameters, model.config.model_type
    if kind == "mllama":
        return _crossed(dtype)
    batch = _grids(model, dtype) if "image_grid_thw" in names and kind not in OWN else squares(kind, dtype)
    given = {name: value for name, value in batch.items() if name in names}
    counts = _counts(model, given)
    text = [prompt(count, seed=count)[0] % 80 + 3 for count in (5, 4, 19)]
    images = [torch.full((count,), IMAGE) for count in counts]
    ids = torch.cat((text[0], images[0], text[1], images[1], text[2]))[None]
    image = IMAGE if kind != "paligemma" else -1  # whose prompt is one span of kind 0
    kinds = {name: (ids == image).long() for name in KINDS if name in names}
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), **given, **kinds}


def _crossed(dtype: torch.dtype) -> dict[str, Any]:
    """Return text that sees an image of four tiles, and then one of two tiles, too, through cross-attention."""
    ids = prompt(30)[0] % 80 + 3
    ids[[5, 11]] = IMAGE
    places = torch.arange(30)[:, None]
    first, second = (places >= 5).expand(-1, 4), (places >= 11) & (torch.arange(4) < 2)
    tiles = torch.tensor([[[1, 1, 1, 1], [1, 1, 0, 0]]])
    return {
        "input_ids": ids[None],
        "attention_mask": torch.ones(1, 30, dtype=torch.long),
        "pixel_values": random_pixels(1, 2, 4, 3, SIDE, SIDE, dtype=dtype),
        "aspect_ratio_ids": torch.tensor([[6, 2]]),
        "aspect_ratio_mask": tiles,
        "cross_attention_mask": torch.stack((first, second), 1)[None].long(),
    }


def _grids(model: Any, dtype: torch.dtype) -> dict[str, Any]:
    """Return patches of two images of different sizes."""
    count, (channels, width, side) = int(GRIDS.prod(1).sum()), patch_width(model)
    shape = (count, channels, side, side) if model.config.model_type in AS_IMAGES else (count, width)
    merges = torch.tensor([2, 2])
    return {"pixel_values": random_pixels(*shape, dtype=dtype), "image_grid_thw": GRIDS, "image_merge_sizes": merges}


def patch_width(model: Any) -> tuple[int, int, int]:
    """Return the channels of a patch, its values, and the pixels along its side."""
    vision = model.config.vision_config
    channels, side = getattr(vision, "in_channels", None) or getattr(vision, "num_channels", 3), vision.patch_size
    frames = getattr(vision, "temporal_patch_size", getattr(vision, "patch_temporal", 1))
    return channels, channels * frames * side**2, side


def _counts(model: Any, images: dict[str, Any]) -> list[int]:
    """Return the number of features of each of two images."""
    with torch.no_grad():
        holder = model if hasattr(model, "get_image_features") else model.model
        features = holder.get_image_features(**images, return_dict=True)
    pooled = getattr(features, "pooler_output", features)
    deep = getattr(features, "deepstack_features", None)
    features = pooled if pooled is not None else features.last_hidden_state if deep is None else deep[0][1]
    if isinstance(features, (list, tuple)) and len(features) == 2:
        return [x.numel() // x.shape[-1] for x in features]
    features = features[0] if isinstance(features, (list, tuple)) else features
    return [features.numel() // features.shape[-1] // 2] * 2
