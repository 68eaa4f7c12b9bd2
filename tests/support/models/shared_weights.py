"""Models whose weights ranks share, however small, and the calls of their layers."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

import attnmesh as am
import attnmesh.hf as hf
from attnmesh.comm.host_linear import HostLinear
from attnmesh.hf import shared_weights
from tests.support.models import families
from tests.support.models.families import STOCK, prompt

SIZES = {"num_attention_heads": 6, "hidden_size": 96}


@contextmanager
def counted_calls() -> Iterator[list[int]]:
    """Share small weights too, and note the layers of each call."""
    run, least, calls = HostLinear.run, shared_weights.LEAST_LAYER_BYTES, list[int]()

    def noted(call: HostLinear, x: Tensor) -> Any:
        calls.append(len(call.sizes))
        return run(call, x)

    HostLinear.run, shared_weights.LEAST_LAYER_BYTES = noted, 0  # type: ignore[method-assign]
    try:
        yield calls
    finally:
        HostLinear.run, shared_weights.LEAST_LAYER_BYTES = run, least  # type: ignore[method-assign]


def saved_stock(folder: Path, length: int, new: int) -> list[list[int]]:
    """Save a model of stock transformers. Return a prompt with the tokens that it gives after it."""
    stock = families.model("llama", STOCK["llama"], **SIZES)
    stock.save_pretrained(folder)
    tokens: list[list[int]] = stock.generate(prompt(length), max_new_tokens=new, do_sample=False).tolist()
    return tokens


def load(folder: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation="attnmesh").eval()


def mesh_of(ranks: int) -> Any:
    return am.init_mesh((1, 1, ranks)) if ranks > 1 else None


def step_of(model: Any) -> Tensor:
    with torch.no_grad():
        logits: Tensor = model(prompt(1), past_key_values=hf.ShardedCache(model.config, None)).logits
    return logits
