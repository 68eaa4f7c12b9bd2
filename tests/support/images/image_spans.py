"""Tiny models in which the tokens of an image see each other, and prompts as their processors make them."""

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoModelForImageTextToText,
    Gemma2Config,
    Gemma3Config,
    GemmaConfig,
    PaliGemmaConfig,
    PreTrainedModel,
    SiglipVisionConfig,
)

from tests.support.models.families import prompt
from tests.support.models.tiny_models import randomise

GEMMA_TEXT = {
    "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 96, "sliding_window": 8,
    "layer_types": ["sliding_attention", "full_attention"],
}  # fmt: skip

VISION = {
    "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 32,
    "patch_size": 4,
}  # fmt: skip
"""Images of 64 patches, which are 16 tokens of Gemma 3: twice its window."""

PALIGEMMA_TEXT = {name: value for name, value in GEMMA_TEXT.items() if name not in ("sliding_window", "layer_types")}

KINDS = ("gemma3", "paligemma")


@lru_cache
def model_of(kind: str, attention: str) -> PreTrainedModel:
    """A tiny model of text and images."""
    config: Any
    if kind == "gemma3":
        names = {"image_token_index": 90, "boi_token_index": 91, "eoi_token_index": 92, "mm_tokens_per_image": 16}
        config = Gemma3Config(text_config=GEMMA_TEXT, vision_config=VISION, **names)
    else:
        text = GemmaConfig(**PALIGEMMA_TEXT)
        parts = {"text_config": text, "vision_config": SiglipVisionConfig(**VISION)}
        config = PaliGemmaConfig(**parts, image_token_index=90, projection_dim=32)
    return _built(config, attention)


def paligemma2(attention: str, window: int) -> PreTrainedModel:
    """A tiny PaliGemma 2, whose text model has a layer with a window."""
    parts: Any = {"text_config": Gemma2Config(**GEMMA_TEXT | {"sliding_window": window})}
    vision = SiglipVisionConfig(**VISION)
    return _built(PaliGemmaConfig(**parts, vision_config=vision, image_token_index=90, projection_dim=32), attention)


def _built(config: Any, attention: str) -> PreTrainedModel:
    """Return a model in float64, with random weights."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = AutoModelForImageTextToText.from_config(config, attn_implementation=attention)
    randomise(model.double())
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    model.generation_config.suppress_tokens = [90]
    return model.eval()


def inputs(kind: str, *texts: int, seed: int = 0, rows: int = 1) -> dict[str, Tensor]:
    """What a processor returns for images between texts of these numbers of tokens."""
    count = 16 if kind == "gemma3" else 64
    text = [prompt(tokens, batch=rows, seed=at) % 80 + 5 for at, tokens in enumerate(texts)]
    image = torch.full((rows, count), 90)
    ids = torch.cat([part for words in text for part in (words, image)][:-1], 1)
    images = rows * (len(texts) - 1)
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randn(10, 3, 32, 32, dtype=torch.float64, generator=generator)[:images]
    types = (ids == 90).long() if kind == "gemma3" else torch.zeros_like(ids)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": pixels, "token_type_ids": types}
