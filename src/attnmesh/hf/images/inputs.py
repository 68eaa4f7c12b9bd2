"""Inputs that describe images: their names, and fingerprints by which a cache knows the images of its prefix."""

from collections.abc import Mapping
from hashlib import blake2b
from inspect import signature
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from attnmesh.errors import ArgumentError, ShapeError
from attnmesh.hf.family import family_of_class

FRAME_SECONDS = ("second_per_grid_ts", "video_second_per_grid")
"""Seconds between the frames of each video, which positions are computed from."""

TOKEN_TYPES = {"token_type_ids", "mm_token_type_ids", "moe_mm_token_type_ids"}
"""Names of inputs with the type of each token; 0 for text."""

IMAGE_INPUTS = {
    *("pixel_values", "pixel_mask", "pixel_attention_mask", "pixel_values_local", "pixel_values_images"),
    *("high_res_pixel_values", "pixel_values_videos", "video_compression_mask", *FRAME_SECONDS),
    *("image_sizes", "image_sizes_videos", "image_grid_thw", "image_grid_hw", "video_grid_thw", "spatial_shapes"),
    *("image_position_ids", "video_position_ids", "image_merge_sizes", "video_merge_sizes", "num_frames_per_video"),
    *("image_token_pooling", "image_grids", "image_num_crops", "video_token_pooling", "video_grids", "tile_fine_mask"),
    *("num_local_patches", "patches_grid", "batch_num_images", "vision_aspect_ratio", "target_sizes"),
    *("target_sizes_videos", "downsample_mode", "image_patches", "image_patches_indices"),
    *("aspect_ratio_ids", "aspect_ratio_mask", "cross_attention_mask", *TOKEN_TYPES),
}
"""Names of inputs that processors of transformers return for images and videos."""

OWN_PROCESSOR = "pass what the model's own processor returns"
"""Fix in errors about inputs for images that a model does not take."""

IMAGE_MARK = -2
"""Image token `id` stands as `IMAGE_MARK - id` among the tokens of a cache. -1 stands for padding."""


class ImageTokens(NamedTuple):
    """Places of the image tokens in a prompt, and digests of the images."""

    is_image: Tensor
    """(batch, length), True for tokens with features of images."""
    fingerprints: dict[str, Tensor]
    """Digests of each input, in the order of images or tokens."""

    def mark(self, ids: Tensor) -> Tensor:
        """Return token ids of the prompt and of what follows it, with marks for image tokens."""
        columns = slice(self.is_image.shape[1])
        marked = ids.clone()
        is_image = self.is_image.repeat_interleave(len(ids) // len(self.is_image), 0)[:, : ids.shape[1]]
        marked[:, columns] = ids[:, columns].where(~is_image, IMAGE_MARK - ids[:, columns])
        return marked


def image_inputs(model: Any) -> set[str]:
    """Return the names of the inputs for images that the model takes; none if it takes no images."""
    names = signature(model.forward).parameters if hasattr(model, "forward") else ()
    image_names = IMAGE_INPUTS & {*names}
    return image_names if any("pixel" in name or "patches" in name for name in image_names) else set()


def without_absent(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options without the inputs for images that are None, as processors return them."""
    return {name: value for name, value in options.items() if value is not None or name not in IMAGE_INPUTS}


def split_images(model: Any, options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the inputs for images, and all other options."""
    names = image_inputs(model)
    images = {name: value for name, value in options.items() if name in names}
    return none_if_all_text(images, model), {name: value for name, value in options.items() if name not in names}


def check_cross_mask(subject: str, ids: Tensor, images: Mapping[str, Any]) -> None:
    """Raise unless a mask of cross-attention has a row for each token, and a column for each tile of each image."""
    mask, pixels = images.get("cross_attention_mask"), images.get("pixel_values")
    if mask is None:
        return
    if pixels is None:
        raise ArgumentError(subject, "pixel_values beside cross_attention_mask", "none", OWN_PROCESSOR)
    shape = *ids.shape, *torch.as_tensor(pixels).shape[1:3]
    if torch.as_tensor(mask).shape != shape:
        expected = f"cross_attention_mask of shape {shape}"
        raise ShapeError(subject, expected, f"{tuple(torch.as_tensor(mask).shape)}", OWN_PROCESSOR)


def are_all_text(images: Mapping[str, Any]) -> bool:
    """Return whether inputs for images are types of tokens alone, all 0."""
    return images.keys() <= TOKEN_TYPES and not any(torch.as_tensor(types).any() for types in images.values())


def none_if_all_text(images: Mapping[str, Any], model: Any) -> dict[str, Any]:
    """Return inputs for images; none if they tell the model no more than that all tokens are text."""
    if not images:
        return {}
    config: Any = type(model.config)
    return {} if are_all_text(images) and not family_of_class(config).prefix_types else {**images}


def without_last_text(images: Mapping[str, Any]) -> dict[str, Any]:
    """Return inputs for the images of one prompt without the types of the text after all images.

    A later turn has more of this text, and the same images.

    >>> without_last_text({"token_type_ids": torch.tensor([[0, 1, 1, 0, 0]])})
    {'token_type_ids': tensor([0, 1, 1])}
    """
    types = {name: x.flatten() for name, x in images.items() if name in TOKEN_TYPES and isinstance(x, Tensor)}
    cut = {name: x[: int(x.nonzero().max()) + 1 if x.any() else 0] for name, x in types.items()}
    return {**images, **cut}


def images_for_model(images: Mapping[str, Any], model: Any) -> dict[str, Any]:
    """Return inputs for images on the model's device, pixels in its dtype."""
    return {
        name: x.to(model.device, model.dtype if x.is_floating_point() and name not in FRAME_SECONDS else None)
        if isinstance(x, Tensor)
        else x
        for name, x in images.items()
    }


def fingerprints_of(ids: Tensor, images: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return a digest of each row of each input. Rows are tokens, images, their tiles or their patches."""
    return {name: _digests(value, ids) for name, value in sorted(images.items())}


def _digests(value: Any, ids: Tensor) -> Tensor:
    if not isinstance(value, Tensor):
        value = torch.frombuffer(bytearray(repr(value).encode()), dtype=torch.uint8)[None]
    if value.shape[:2] == ids.shape:
        value = value.transpose(0, 1)
    return _digests_of_rows(value.flatten(0, 1) if value.ndim == 5 else value)


def _digests_of_rows(x: Tensor) -> Tensor:
    """Return two int64 values for each row. Nobody finds another row with the same: clients cannot guess at images."""
    rows = x.detach().cpu()[:, None].flatten(1).clone(memory_format=torch.contiguous_format).view(torch.uint8).numpy()
    header = f"{x.dtype} {[*x.shape[1:]]} ".encode()
    digests = b"".join(blake2b(header + row.tobytes(), digest_size=16).digest() for row in rows)
    return torch.tensor(memoryview(digests).cast("q"), dtype=torch.int64, device="cpu").view(-1, 2)


class PositionShift(NamedTuple):
    """The shift of a text's positions by the images before it."""

    text_start: int
    """The first token after all images."""
    shift: int
    """Difference that is added to the place of a token after all images, to get its position."""


NO_SHIFT = PositionShift(0, 0)
"""The shift of a text without images."""


def shift_of(ids: Tensor | None, config: PreTrainedConfig) -> PositionShift | None:
    """Return the `shift` of a cache that was restored with these tokens: that of text, or None after images."""
    has_images = config.get_text_config(decoder=True) is not config  # there may be some
    return None if has_images and (ids is None or bool((ids <= IMAGE_MARK).any())) else NO_SHIFT


def shared_with_images(
    ids: Tensor, cached_images: Mapping[str, Tensor] | None, image_tokens: ImageTokens | None, shared: int
) -> int:
    """Return how many of `shared` tokens have the same images in a prompt and a cache: all, or those before the first.

    These `ids` of the cache are equal to those of the prompt, but the images of equal tokens may differ. The k-th
    image token has the k-th feature. So the images of a prefix are the same if the `cached_images` are the first
    images of the prompt, or the prompt's the first of the cache.
    """
    is_image = ids <= IMAGE_MARK
    image_token_count = int(is_image[:, :shared].sum())
    if not image_token_count:
        return shared
    assert image_tokens is not None  # or no token of the prompt would have a mark
    is_whole = image_token_count in (int(is_image.sum()), int(image_tokens.is_image.sum()))
    if (
        cached_images is not None
        and is_whole
        and _are_first(cached_images, image_tokens.fingerprints, exactly=len(ids) > 1)
    ):
        return shared
    return min(shared, int(is_image.any(0).long().argmax()))


def _are_first(cached: Mapping[str, Tensor], prompt: Mapping[str, Tensor], *, exactly: bool) -> bool:
    """Return whether the rows of one side are the first ones of the other. The rows of a batch must be equal."""
    if cached.keys() != prompt.keys():
        return False
    counts = {name: min(len(cached[name]), len(prompt[name])) for name in cached}
    is_equal = all(torch.equal(cached[name][:count], prompt[name][:count]) for name, count in counts.items())
    return is_equal and (not exactly or all(len(cached[name]) == len(prompt[name]) for name in cached))
