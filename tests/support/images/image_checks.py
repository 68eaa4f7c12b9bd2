"""Checks of images that run on a rank: generation and training, with attnmesh or with stock transformers."""

from functools import lru_cache
from inspect import signature
from typing import Any

import torch
from transformers import PreTrainedModel

import attnmesh.hf as hf
from attnmesh.mesh.shapes import AXES, Shape
from tests.support.images.image_inputs import SIDE
from tests.support.images.image_models import IMAGE, build_images, image_batch, image_case
from tests.support.images.video_models import VIDEO, video_batch
from tests.support.models.checks import Result, check_finite, guarded, precisely, prompt, train_once
from tests.support.models.tiny_models import Case
from tests.support.ranks.pool import on_each_rank
from tests.support.truth.mesh_problems import named_mesh

BESIDE = ("bbox", "decoder_input_ids", "flattened_patches", "qformer_input_ids", "state")
"""Inputs that some models need beside images and text."""

OPTIONS = {"max_new_tokens": 6, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}


@lru_cache(maxsize=3)
def model_of(kind: str, attention: str | None, dtype: torch.dtype) -> PreTrainedModel:
    """Return the tiny model of a type with an attention."""
    return build_images(image_case(kind), attention, dtype)


def _batch(case: Case, videos: bool, dtype: torch.dtype) -> dict[str, Any]:
    """Return a prompt with two images, and a video if `videos`."""
    return (video_batch if videos else image_batch)(model_of(case.kind, None, dtype), dtype)


def _result(batch: dict[str, Any], output: Any, dtype: torch.dtype) -> Result:
    tokens = output.sequences[:, batch["input_ids"].shape[1] :]
    return Result(dtype, tokens, torch.stack(output.logits, 1).double())


@on_each_rank
@guarded
def generate_from_images_by_stock(case: Case, videos: bool, dtype: torch.dtype) -> Result:
    """Return what stock transformers generates, if the images or the video matter."""
    model, batch = model_of(case.kind, None, dtype), _batch(case, videos, dtype)
    pixels = "pixel_values_videos" if videos else "pixel_values"
    with precisely(model, dtype):
        result, other = (
            _result(batch, model.generate(**{**batch, **more}, **OPTIONS), dtype)
            for more in ({}, {pixels: 1.5 - batch[pixels]})
        )
    assert result.logits is not None
    assert other.logits is not None
    if torch.equal(result.logits[:, 0], other.logits[:, 0]):
        raise ArithmeticError(f"{pixels} do not matter")
    return result


@on_each_rank
@guarded
def generate_from_images_by_attnmesh(case: Case, videos: bool, dtype: torch.dtype, shape: Shape | None) -> Result:
    """Return what attnmesh generates on this rank, from blocks so small that all ranks have some."""
    model = model_of(case.kind, "attnmesh", dtype)
    batch = _batch(case, videos, dtype)
    mesh = None if shape is None else named_mesh(shape, AXES)
    with precisely(model, dtype):
        cache = hf.ShardedCache(model.config, mesh, block=4)
        return _result(batch, hf.generate(model, **batch, cache=cache, **OPTIONS), dtype)


@on_each_rank
@guarded
def generate_unless_refused(case: Case, dtype: torch.dtype, shape: Shape | None) -> Result:
    """Generate on this rank from a prompt and an image that need not fit: some models are refused in any case."""
    mesh, image = None if shape is None else named_mesh(shape, AXES), torch.zeros(1, 3, SIDE, SIDE, dtype=dtype)
    hf.generate(model_of(case.kind, "attnmesh", dtype), prompt(), pixel_values=image, mesh=mesh, **OPTIONS)
    return Result(dtype)


def _training_batch(case: Case, videos: bool, dtype: torch.dtype) -> dict[str, Any]:
    """Return a prompt with two images, and a video if `videos`, whose text is learned, but for its first tokens."""
    batch = _batch(case, videos, dtype)
    ids = batch["input_ids"]
    labels = ids.masked_fill((ids == IMAGE) | (ids == VIDEO), -100)
    labels[:, :3] = -100
    return {**batch, "labels": labels}


@on_each_rank
@guarded
def train_on_images_by_stock(case: Case, videos: bool, dtype: torch.dtype) -> Result:
    """Return the loss and gradients of stock transformers, if gradients reach what computes features of images."""
    model: Any = model_of(case.kind, None, dtype)
    result = check_finite(train_once(model, {**_training_batch(case, videos, dtype), "use_cache": False}, dtype))
    if hasattr(model.config, "vocabulary_map"):
        return result  # images are tokens, which have no gradient
    parts = [part for part in (model.get_decoder(), model.get_output_embeddings()) if part is not None]
    text = {id(x) for part in parts for x in part.parameters()}
    towers = [name for name, x in model.named_parameters() if id(x) not in text]
    if not any(bool(result.gradients[name].any()) for name in towers if name in result.gradients):
        raise ArithmeticError("no gradient reaches the tower")
    return result


@on_each_rank
@guarded
def train_on_images_by_attnmesh(case: Case, videos: bool, dtype: torch.dtype, shape: Shape) -> Result:
    """Return the loss and gradients of attnmesh on this rank's shard."""
    batch = hf.shard_batch(_training_batch(case, videos, dtype), named_mesh(shape, AXES))
    return train_once(model_of(case.kind, "attnmesh", dtype), batch, dtype)


@on_each_rank
@guarded
def train_unless_refused(case: Case, dtype: torch.dtype, shape: Shape) -> Result:
    """Train on this rank with an image that need not fit: some models are refused in any case, or what they need is."""
    model: Any = model_of(case.kind, "attnmesh", dtype)
    batch = {"input_ids": prompt(), "labels": prompt(), "pixel_values": torch.zeros(1, 3, SIDE, SIDE, dtype=dtype)}
    batch |= {name: prompt() for name in signature(model.forward).parameters if name in BESIDE}
    return train_once(model, hf.shard_batch(batch, named_mesh(shape, AXES)), dtype)
