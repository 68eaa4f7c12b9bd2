"""A processor of transformers, pictures and texts for it, and a template of chats with images."""

from typing import Any

import numpy as np
from PIL import Image
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.llava.processing_llava import LlavaProcessor

TEMPLATE = (
    "{% for message in messages %}{% for part in message.content %}"
    "{{ '<image>' if part.type == 'image' else part.text }} {% endfor %}{% endfor %}w79"
)


def processor(side: str) -> LlavaProcessor:
    """Return the processor of LLaVA for images of 16 tokens, with padding on a side."""
    words = {"<pad>": 0, "<image>": 90, **{f"w{number}": number for number in range(1, 80)}}
    tokens = Tokenizer(WordLevel(words, unk_token="<pad>"))
    tokens.pre_tokenizer = WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tokens, pad_token="<pad>", additional_special_tokens=["<image>"], padding_side=side
    )
    sides = {"size": {"shortest_edge": 32}, "crop_size": {"height": 32, "width": 32}}
    options = {"patch_size": 8, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    return LlavaProcessor(CLIPImageProcessorPil(**sides), tokenizer, image_token="<image>", **options)


def pictures() -> list[Image.Image]:
    """Return three images of different sizes."""
    generator = np.random.default_rng(0)
    sizes = ((24, 40), (17, 19), (64, 33))
    return [Image.fromarray(generator.integers(0, 255, (*size, 3), dtype=np.uint8)) for size in sizes]


TEXTS = ("w3 <image> w4 w5 <image> w6 w7 w8", "w9 w10 w11 <image> w12 w13")


def processed(side: str = "left") -> Any:
    """Return what the processor of LLaVA makes of two texts and three images."""
    batch = processor(side)(text=[*TEXTS], images=pictures(), padding=True, return_tensors="pt")
    return {**batch, "pixel_values": batch["pixel_values"].double()}
