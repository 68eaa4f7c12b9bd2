"""Prompts with two small images and a video for tiny random models that take videos."""

from inspect import signature
from typing import Any

import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

from tests.support.images.image_inputs import SIDE, places, random_pixels, squares
from tests.support.images.image_models import AS_IMAGES, IMAGE, KINDS, image_batch, patch_width
from tests.support.models.checks import prompt

VIDEO = 91
"""The video token."""

FRAMES = torch.tensor([[2, 4, 4]])
"""Patches of a video along time, height and width."""

TIMED = (
    *("cohere_compass", "cosmos3_edge", "cosmos3_omni", "glm46v", "glm4v", "glm4v_moe", "glm_ocr", "glmga"),
    *("gemma4", "gemma4_unified", "molmo2", "qwen3_5", "qwen3_5_moe", "qwen3_vl", "qwen3_vl_moe", "qwen4_exp"),
)
"""Types whose processors put a timestamp, which is text, before the tokens of each frame."""

ALONE = ("glm46v", "glm4v", "glm4v_moe", "glm_ocr", "glmga", "molmo2")
"""Types whose frames have image tokens, so that stock transformers takes no images beside a video."""


POOLED = ("kimi_k25",)
"""Types that pool the frames of a video, which stock transformers then counts as if they were all there."""


def takes_videos(kind: str) -> bool:
    """Return whether models of the type take videos, apart from frames as images."""
    model = getattr(transformers, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES[kind])
    return "pixel_values_videos" in signature(model.forward).parameters


def video_batch(model: Any, dtype: torch.dtype) -> dict[str, Any]:
    """Return a prompt with two images and a video, as a processor would."""
    kind, names = model.config.model_type, signature(model.forward).parameters
    batch = image_batch(model, dtype)
    if kind in ALONE:
        batch = {name: batch[name][:, :5] for name in ("input_ids", "attention_mask", *KINDS) if name in batch}
    given = _patches(model, dtype) if "video_grid_thw" in names else _frames(kind, dtype)
    given = {name: value for name, value in given.items() if name in names}
    frames, token = int(FRAMES[0, 0]) if kind in TIMED else 1, IMAGE if kind in ALONE else VIDEO
    tokens = torch.full((1, _count(model, given) // frames), token)
    texts = (prompt(3 + 4 * number, seed=20 + number) % 80 + 3 for number in range(frames))
    added = torch.cat([part for text in texts for part in (tokens, text)] + [prompt(11, seed=30) % 80 + 3], 1)
    number = 1 if kind == "molmo2" else 2  # whose processor gives frames the type of images
    types = {name: torch.cat((batch[name], number * (added == token).long()), 1) for name in KINDS if name in batch}
    whole = torch.cat((batch["input_ids"], added), 1)
    return {**batch, "input_ids": whole, "attention_mask": torch.ones_like(whole), **given, **types}


def _patches(model: Any, dtype: torch.dtype) -> dict[str, Any]:
    """Return patches of frames."""
    grid = FRAMES if model.config.model_type not in POOLED else torch.tensor([[1, 4, 4]] * 2)
    count, (channels, width, side) = int(grid.prod(1).sum()), patch_width(model)
    shape = (count, channels, side, side) if model.config.model_type in AS_IMAGES else (count, width)
    return {
        "pixel_values_videos": random_pixels(*shape, dtype=dtype, seed=1),
        "video_grid_thw": grid,
        "video_merge_sizes": torch.tensor([2]),
        "second_per_grid_ts": torch.tensor([1.5]),
        "video_second_per_grid": torch.tensor([1.5]),
    }


def _frames(kind: str, dtype: torch.dtype) -> dict[str, Any]:
    """Return two frames of one size."""
    if kind.startswith("minicpm"):
        sizes = torch.tensor([[4, 4], [4, 4]])
        return {
            "pixel_values_videos": random_pixels(1, 3, 8, 8 * 32, dtype=dtype, seed=1),
            "target_sizes_videos": sizes,
        }
    if kind == "molmo2":
        images = squares(kind, dtype)
        pixels, pooled = images["pixel_values"], images["image_token_pooling"]
        return {"pixel_values_videos": pixels, "video_token_pooling": pooled, "video_grids": torch.tensor([[2, 2, 2]])}
    if kind == "nemotron_h_omni":
        return {"pixel_values_videos": random_pixels(2, 3, SIDE, SIDE, dtype=dtype, seed=1)}
    if kind.startswith("gemma4"):
        pixels = random_pixels(2, 16, 192, dtype=dtype, seed=1).sigmoid()
        return {
            "pixel_values_videos": pixels,
            "video_position_ids": places(2),
            "num_frames_per_video": torch.tensor([2]),
        }
    return {"pixel_values_videos": random_pixels(1, 2, 3, SIDE, SIDE, dtype=dtype, seed=1)}


def _count(model: Any, videos: dict[str, Any]) -> int:
    """Return the number of features of a video."""
    with torch.no_grad():
        holder = model if hasattr(model, "get_video_features") else model.model
        more = {name: x for name, x in videos.items() if "second" not in name}
        features = holder.get_video_features(**more, return_dict=True)
    pooled = getattr(features, "pooler_output", features)
    features = features.last_hidden_state if pooled is None else pooled
    features = features if isinstance(features, (list, tuple)) else [features]
    return sum(x.numel() // x.shape[-1] for x in features)
