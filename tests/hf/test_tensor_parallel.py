"""Generation with heads sharded by transformers' tensor parallelism, and the context by attnmesh."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

import attnmesh.hf as hf
from tests.support import families
from tests.support.families import STOCK, prompt
from tests.support.pool import Pool

FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "gemma3", "gemma2")


def generate(model: Any, call: Any) -> list[Any]:
    """Return tokens of one prompt and of a padded batch."""
    ids, mask = prompt(50, batch=2, seed=2), torch.ones(2, 50, dtype=torch.long)
    mask[0, :9] = 0
    options: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False}
    padded = call(model, ids.masked_fill(mask == 0, 0), attention_mask=mask, **options)
    return [call(model, prompt(70), **options).tolist(), padded.tolist()]


def on_ranks(family: str, folder: str) -> list[Any]:
    whole = init_device_mesh("cpu", (2, 2), mesh_dim_names=("keys", "tp"))
    kind = DistributedConfig(tp_size=2, dp_replicate_size=2)
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="attnmesh", distributed_config=kind).eval()
    heads = model.model.layers[0].self_attn.k_proj.weight.to_local().shape[0] // model.config.head_dim
    call = lambda model, ids, **options: hf.generate(model, ids, mesh=whole["keys"], **options)  # noqa: E731
    return [heads, *generate(model, call)]


LONG = ("qwen2", "mistral", "gemma2")


@pytest.mark.parametrize("family", [pytest.param(x, marks=pytest.mark.long if x in LONG else []) for x in FAMILIES])
def test_tokens_are_those_of_one_process(family: str, pool: Pool, tmp_path: Path) -> None:
    stock = families.model(family, STOCK[family])
    stock.save_pretrained(tmp_path)
    expected = generate(stock, lambda model, ids, **options: model.generate(ids, **options))
    for heads, *tokens in pool.run(4, on_ranks, family, str(tmp_path)):
        assert heads == 1  # of two key heads
        assert tokens == expected
