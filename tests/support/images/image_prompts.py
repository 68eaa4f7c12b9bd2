"""Tiny models of Qwen with images, prompts as its processor makes them, and what is generated from these."""

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForImageTextToText, PreTrainedModel

import attnmesh.hf as hf
from attnmesh.mesh.shapes import AXES, Shape
from tests.support.models.families import prompt
from tests.support.models.tiny_models import Case, randomise, tiny_config
from tests.support.ranks.pool import on_each_rank
from tests.support.truth.mesh_problems import named_mesh

ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
TEXT = {"rope_parameters": ROPE, "head_dim": 8, "num_attention_heads": 4}
VISION = {"patch_size": 4, "temporal_patch_size": 2, "spatial_merge_size": 2, "depth": 2, "out_hidden_size": 32}
IMAGES = {"qwen2_5_vl": {"fullatt_block_indexes": [1]}, "qwen3_vl": {"deepstack_visual_indexes": [0]}}
TOKENS = {"image_token_id": 90, "video_token_id": 91, "vision_start_token_id": 92, "vision_end_token_id": 93}


@lru_cache
def vision_model(kind: str, attention: str) -> PreTrainedModel:
    """A tiny model of text and images."""
    changes: dict[str, Any] = {"text_config": TEXT}
    if kind in IMAGES:
        changes |= {**TOKENS, "vision_config": {**VISION, **IMAGES[kind]}}
    with torch.random.fork_rng():
        torch.manual_seed(1)
        config = tiny_config(Case(kind, kind, changes))
        made = AutoModelForImageTextToText.from_config(config, attn_implementation=attention)
    randomise(made.double())
    made.generation_config.eos_token_id, made.generation_config.pad_token_id = None, 0
    return made.eval()


def logits(output: Any) -> Tensor:
    return torch.stack(output.logits)


OPTIONS: dict[str, Any] = {
    "max_new_tokens": 4,
    "do_sample": False,
    "return_dict_in_generate": True,
    "output_logits": True,
}

SIZES = {"wide": (1, 4, 8), "high": (1, 6, 4), "large": (1, 8, 6)}
"""Images by name, as patches along time, height and width. Four patches are a token."""

Part = str | int
"""Number of tokens of a text, or the name of an image."""

FIRST: tuple[Part, ...] = (5, "wide", 9, "high", 26)

SECOND: tuple[Part, ...] = (*FIRST, 3, "large", 17)

SHAPES = (Shape(1, 1, 1), Shape(1, 1, 2), Shape(1, 3, 1))


@lru_cache
def pixels(name: str, seed: int = 0) -> Tensor:
    """Random patches of an image."""
    generator = torch.Generator().manual_seed(len(name) + 100 * seed)
    return torch.randn(torch.tensor(SIZES[name]).prod(), 96, dtype=torch.float64, generator=generator)


def inputs(*rows: tuple[Part, ...], seed: int = 0) -> dict[str, Tensor]:
    """What a processor of Qwen returns for sequences of text and images, padded on the left."""
    sequences = []
    images = []
    for number, row in enumerate(rows):
        parts = []
        for place, part in enumerate(row):
            if isinstance(part, int):
                parts.append(prompt(part, seed=10 * number + place)[0] % 80 + 5)
            else:
                tokens = int(torch.tensor(SIZES[part]).prod()) // 4
                parts.append(torch.tensor([92, *[90] * tokens, 93]))
                images.append(part)
        sequences.append(torch.cat(parts))
    length = max(map(len, sequences))
    padded = [torch.cat((torch.zeros(length - len(ids), dtype=torch.long), ids)) for ids in sequences]
    mask = [torch.arange(length) >= length - len(ids) for ids in sequences]
    ids = torch.stack(padded)
    return {
        "input_ids": ids,
        "attention_mask": torch.stack(mask).long(),
        "pixel_values": torch.cat([pixels(name, seed) for name in images]),
        "image_grid_thw": torch.tensor([SIZES[name] for name in images]),
        "mm_token_type_ids": (ids == 90).int(),
    }


def stock(kind: str, batch: dict[str, Tensor], **options: Any) -> Tensor:
    """The logits of stock transformers."""
    return logits(vision_model(kind, "sdpa").generate(**batch, **{**OPTIONS, **options}))


def max_error(found: Any, expected: Tensor) -> float:
    """Return the largest error of the logits of an output."""
    return float((logits(found) - expected).abs().max())


def answer(kind: str, shape: Shape, batch: dict[str, Tensor], options: dict[str, Any]) -> Any:
    """Return on a rank what a model generates, from blocks so small that all ranks have some."""
    model = vision_model(kind, "attnmesh")
    cache = hf.ShardedCache(model.config, named_mesh(shape, AXES), block=4)
    return hf.generate(model, **batch, cache=cache, **{**OPTIONS, **options})


@on_each_rank
def compute_answer_logits(*arguments: Any) -> Tensor:
    return logits(answer(*arguments))
