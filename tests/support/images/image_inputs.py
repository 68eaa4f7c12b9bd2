"""Pixels of two small images, and what comes with them, for types of models without a grid."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

SIDE = 32
"""Pixels along a side of an image that has no grid."""

NESTED = ("idefics2", "idefics3", "smolvlm", "granite_docling")
"""Types that take images as (batch, images, channels, height, width)."""

TILED = ("llava_next", "llava_next_video", "llava_onevision", "granite4_vision")
"""Types that cut an image of two squares into tiles: itself, and its halves."""

Inputs = dict[str, Any]


def random_pixels(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Return random values of this shape."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def squares(kind: str, dtype: torch.dtype) -> Inputs:
    """Return pixels of two images of one size."""
    own = next((made for name, made in OWN.items() if kind.startswith(name)), None)
    if own is not None:
        return own(dtype)
    if kind in TILED:
        pixels, sizes = random_pixels(2, 3, 3, SIDE, SIDE, dtype=dtype), [[SIDE, 2 * SIDE]] * 2
    else:
        pixels, sizes = random_pixels(2, 3, SIDE, SIDE, dtype=dtype), [[SIDE, SIDE]] * 2
    if kind in NESTED:
        pixels = pixels[None]
    return {"pixel_values": pixels} | ({} if kind in ("llava", "vipllava") else {"image_sizes": torch.tensor(sizes)})


def places(images: int) -> Tensor:
    """Return the places of 16 patches of images, (images, patches, 2)."""
    return torch.cartesian_prod(torch.arange(4), torch.arange(4)).flip(1)[None].repeat(images, 1, 1)


def _deepseek_hybrid(dtype: torch.dtype) -> Inputs:
    pixels = random_pixels(2, 3, SIDE, SIDE, dtype=dtype)
    return {"pixel_values": pixels, "high_res_pixel_values": pixels}


def _fuyu(dtype: torch.dtype) -> Inputs:
    return {"pixel_values": random_pixels(2, 16, 192, dtype=dtype)}


def _gemma4(dtype: torch.dtype) -> Inputs:
    return {"pixel_values": random_pixels(2, 16, 192, dtype=dtype).sigmoid(), "image_position_ids": places(2)}


def _granite_docling(dtype: torch.dtype) -> Inputs:
    pixels = random_pixels(1, 2, 3, SIDE, SIDE, dtype=dtype)
    return {"pixel_values": pixels, "pixel_attention_mask": torch.ones(1, 2, dtype=torch.bool)}


def _inkling(dtype: torch.dtype) -> Inputs:
    return {"pixel_values": random_pixels(8, 16, 16, 3, dtype=dtype), "image_grid_thw": torch.tensor([[1, 2, 2]] * 2)}


def _lfm2(dtype: torch.dtype) -> Inputs:
    shapes, mask = torch.tensor([[4, 6], [4, 4]]), torch.ones(2, 24, dtype=torch.long)
    mask[1, 16:] = 0
    pixels = random_pixels(2, 24, 192, dtype=dtype)
    return {"pixel_values": pixels, "spatial_shapes": shapes, "pixel_attention_mask": mask}


def _minicpm(dtype: torch.dtype) -> Inputs:
    return {"pixel_values": random_pixels(1, 3, 8, 8 * 32, dtype=dtype), "target_sizes": torch.tensor([[4, 4], [4, 4]])}


def _molmo(dtype: torch.dtype) -> Inputs:
    pooled = torch.arange(32).view(2, 2, 2, 2, 2).transpose(2, 3).reshape(8, 4)
    grids = torch.tensor([[2, 2, 0, 0]] * 2)
    return {
        "pixel_values": random_pixels(2, 16, 192, dtype=dtype),
        "image_token_pooling": pooled,
        "image_grids": grids,
        "image_num_crops": torch.ones(2, dtype=torch.long),
    }


def _nemotron(dtype: torch.dtype) -> Inputs:
    return {"pixel_values": random_pixels(32, 192, dtype=dtype), "image_grid_hw": torch.tensor([[4, 4], [4, 4]])}


OWN: dict[str, Callable[[torch.dtype], Inputs]] = {
    "deepseek_vl_hybrid": _deepseek_hybrid,
    "fuyu": _fuyu,
    "gemma4": _gemma4,
    "granite_docling": _granite_docling,
    "inkling2": _inkling,
    "lfm2_vl": _lfm2,
    "minicpm": _minicpm,
    "molmo2": _molmo,
    "nemotron_h_omni": _nemotron,
}
"""Inputs of types whose names begin so."""
