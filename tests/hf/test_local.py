"""A model loaded with attnmesh works in ordinary code on one process, as stock transformers does."""

from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from torch import Tensor
from transformers import DynamicCache, PreTrainedTokenizerFast, pipeline

import attnmesh.hf  # noqa: F401
from attnmesh import errors
from tests.support import families
from tests.support.families import CONFIGS, STOCK, prompt

PAIR = ("attnmesh", "stock")


def pair(family: str, dtype: torch.dtype = torch.float32) -> list[Any]:
    return [families.model(family, "attnmesh", dtype), families.model(family, STOCK[family], dtype)]


def padded(length: int = 40) -> dict[str, Tensor]:
    """Three sequences with padding on the left."""
    ids, mask = prompt(length, batch=3), torch.ones(3, length, dtype=torch.long)
    for row, count in enumerate((0, 7, 29)):
        ids[row, :count], mask[row, :count] = 0, 0
    return {"input_ids": ids, "attention_mask": mask}


@pytest.mark.parametrize("family", CONFIGS)
def test_a_forward_pass_makes_a_cache_of_its_own(family: str) -> None:
    ours, stock = pair(family)
    with torch.no_grad():
        for model in (ours, stock):
            assert isinstance(model(prompt(30)).past_key_values, DynamicCache)
        first, more = prompt(33), prompt(5, seed=3)
        given, expected = (_in_turns(model, first, more) for model in (ours, stock))
    assert torch.allclose(given, expected, atol=2e-4)


def _in_turns(model: Any, first: Tensor, more: Tensor) -> Tensor:
    """Logits of tokens that follow those of a cache."""
    cache = model(first).past_key_values
    return model(more, past_key_values=cache).logits


@pytest.mark.parametrize("family", CONFIGS)
def test_padding_on_the_left_is_seen_by_nobody(family: str) -> None:
    batch = padded()
    (given, ours), (expected, stock) = (_gradients(model, batch) for model in pair(family, torch.float64))
    real = batch["attention_mask"].bool()
    assert torch.allclose(given[real], expected[real], atol=1e-5)
    for name, gradient in stock.items():
        assert (ours[name] - gradient).abs().max() <= 1e-5 * max(1, float(gradient.abs().max())), name


def _gradients(model: Any, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    made = model(**batch, labels=labels, use_cache=False)
    made.loss.backward()
    return made.logits.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


CALLS: dict[str, dict[str, Any]] = {
    "dynamic": {},
    "static": {"cache_implementation": "static"},
    "no cache": {"use_cache": False},
    "beams": {"num_beams": 3},
    "chunks": {"prefill_chunk_size": 13},
    "looked up": {"prompt_lookup_num_tokens": 3},
}


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("name", CALLS)
def test_the_models_own_generate_gives_stocks_tokens(family: str, name: str) -> None:
    batch = {"input_ids": prompt(40)} if name in ("looked up", "chunks") else padded()
    options = {"max_new_tokens": 9, "do_sample": False, "disable_compile": True, **CALLS[name]}
    given, expected = (model.generate(**batch, **options) for model in pair(family))
    assert given.tolist() == expected.tolist()


def test_a_mask_of_new_tokens_alone_is_refused() -> None:
    ours = families.model("llama", "attnmesh")
    with torch.no_grad():
        cache = ours(prompt(30)).past_key_values
        with pytest.raises(errors.ShapeError, match="attention_mask: expected one of all 35 tokens, given one of 5"):
            ours(prompt(5), past_key_values=cache, attention_mask=torch.ones(1, 5, dtype=torch.long))


def test_a_pipeline_writes_stocks_text() -> None:
    words = {f"w{n}": n for n in range(97)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="w2"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="w0", padding_side="left")
    said = []
    for model in pair("qwen3"):
        write = pipeline("text-generation", model=model, tokenizer=fast, device="cpu")
        said.append(write(["w5 w6 w7 w8", "w9 w10"], max_new_tokens=8, do_sample=False, batch_size=2))
    assert said[0] == said[1]
