"""Text after an image: vision-language models keep the shift of positions of their last image."""

from logging import getLogger
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import attnmesh.hf as hf
from attnmesh.core.digest import cpu_weights, digest
from attnmesh.hf.images import towers
from attnmesh.hf.images.inputs import fingerprints_of
from attnmesh.mesh.shapes import AXES, Shape
from tests.support.images.image_prompts import IMAGES, OPTIONS, logits, vision_model
from tests.support.models import families
from tests.support.models.families import prompt
from tests.support.ranks.pool import Pool, on_each_rank
from tests.support.truth.mesh_problems import named_mesh
from tests.support.truth.tolerances import FLOAT64_MODEL, worst

GRID = torch.tensor([[1, 8, 4]])

SHIFTED = ("cosmos3_omni", "hunyuan_vl", "minicpmv4_7", "qwen3_5")
"""Types whose shift is set by hand: their images differ, and what they leave does not."""


def read_image_of(model: PreTrainedModel) -> Tensor:
    """Return the logits of a model after an image of 32 patches, which are 8 tokens."""
    ids = torch.tensor([[5, 92, *[90] * 8, 93, 6, 7]])
    pixels = torch.randn(32, 3 * 2 * 4 * 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    kinds = (ids == 90).int()
    with torch.no_grad():
        result: Tensor = model(input_ids=ids, pixel_values=pixels, image_grid_thw=GRID, mm_token_type_ids=kinds).logits
    return result


def stock_logits(kind: str) -> Tensor:
    """The logits after the text, of stock transformers that has seen no image."""
    return logits(vision_model(kind, "sdpa").generate(prompt(40), **OPTIONS))


@pytest.mark.parametrize("kind", SHIFTED)
def test_a_shift_of_positions_is_not_for_the_next_text(kind: str) -> None:
    model = vision_model(kind, "attnmesh")
    model.model.rope_deltas = torch.tensor([[-5]])
    found = logits(hf.generate(model, prompt(40), mesh=None, **OPTIONS))
    assert float((found - stock_logits(kind)).abs().max()) < 2e-5  # some types compute norms or routers in float32


@on_each_rank
def measure_errors_of_text_after_an_image(kind: str) -> list[float]:
    """Return on a rank how far the logits are off: generated at once, and after a prefill."""
    model, mesh, expected = vision_model(kind, "attnmesh"), named_mesh(Shape(1, 1, 2), AXES), stock_logits(kind)
    errors = []
    for prefilled in (False, True):
        read_image_of(model)
        assert int(model.model.rope_deltas) < 0
        cache = hf.ShardedCache(model.config, mesh)
        if prefilled:
            hf.prefill(model, prompt(40), cache)
        found = logits(hf.generate(model, prompt(40), cache=cache, **OPTIONS))
        errors.append(float((found - expected).abs().max()))
    return errors


@pytest.mark.parametrize("kind", IMAGES)
def test_text_after_an_image_is_continued_as_without_it(kind: str, pool: Pool) -> None:
    for errors in pool.run(2, measure_errors_of_text_after_an_image, kind):
        assert worst(errors) < FLOAT64_MODEL


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "llama"])
def test_inputs_for_images_that_are_none_are_not_given(kind: str) -> None:
    model = vision_model(kind, "attnmesh") if kind in IMAGES else families.model(kind, "attnmesh")
    none = dict.fromkeys(("pixel_values", "pixel_values_videos", "video_grid_thw", "mm_token_type_ids"))
    options = {"mesh": None, "max_new_tokens": 4, "do_sample": False}
    assert hf.generate(model, prompt(40), **none, **options).equal(hf.generate(model, prompt(40), **options))
    cache = hf.ShardedCache(model.config)
    hf.prefill(model, prompt(40), cache, **none)
    assert cache.get_seq_length() == 39


PARTS = {"text_config": "attnmesh", "vision_config": "sdpa"}


@pytest.mark.parametrize("setting", ["attnmesh", {**PARTS, "": "attnmesh"}, PARTS], ids=["one", "dict", "parts"])
@pytest.mark.parametrize("kind", IMAGES)
def test_the_text_model_is_on_the_mesh_and_the_tower_is_not(kind: str, setting: Any) -> None:
    towers.SAID.clear()
    model = vision_model(kind, "sdpa")
    expected = read_image_of(model)
    model.set_attn_implementation(setting)
    said = list[str]()
    try:
        with patch.object(getLogger(towers.__name__), "warning", lambda text, name: said.append(text % name)):
            found = read_image_of(model)
    finally:
        model.set_attn_implementation("sdpa")
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-9)  # float64; all but attention is the same code
    assert len(said) == (setting == "attnmesh")
    assert all('"sdpa"' in line for line in said)


def forged(row: Tensor) -> Tensor:
    """Return other values whose sum by the public weights of a digest is the same."""
    first, second = (int(weight) for weight in cpu_weights()[:2])
    a, b = row.tolist()
    for other in range(a + 1, a + 100):
        wanted = (b + (a - other) * first * pow(second, -1, 2**64)) % 2**64
        if wanted < 2**63:  # as a value and its high half, folded, are
            high, low = wanted >> 32, wanted & 0xFFFFFFFF
            return torch.tensor([other, high << 32 | (low ^ high)])
    raise AssertionError


def test_images_of_a_prefix_cannot_be_forged() -> None:
    size = torch.tensor([640, 480])
    other = forged(size)
    assert int(digest(size)) == int(digest(other))
    assert not size.equal(other)
    ids = torch.zeros(1, 3, dtype=torch.long)
    found = [fingerprints_of(ids, {"image_sizes": torch.stack([size, x])})["image_sizes"] for x in (size, other)]
    assert found[0][0].equal(found[1][0])
    assert not found[0][1].equal(found[1][1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int64, torch.bool])
def test_a_fingerprint_has_a_row_for_each_image(dtype: torch.dtype) -> None:
    ids = torch.zeros(1, 5, dtype=torch.long)
    pixels = torch.arange(2 * 3 * 4).view(2, 3, 4).to(dtype)
    rows = fingerprints_of(
        ids, {"pixel_values": pixels, "none": pixels[:0], "sizes": torch.tensor([1.0, 2.0]), "n": [7]}
    )
    assert [len(rows[name]) for name in ("pixel_values", "none", "sizes", "n")] == [2, 0, 2, 1]
    alone = fingerprints_of(ids, {"pixel_values": pixels[:1]})["pixel_values"]
    assert alone.equal(rows["pixel_values"][:1])
    assert not fingerprints_of(ids, {"pixel_values": pixels[:1].view(1, 4, 3)})["pixel_values"].equal(alone)
