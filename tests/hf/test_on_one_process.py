"""A model with attnmesh attention works in ordinary code on one process, as with stock attention."""

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
from tests.support.models import families
from tests.support.models.families import CONFIGS, STOCK, prompt
from tests.support.truth.seeds import rotated
from tests.support.truth.tolerances import FLOAT32_MODEL, FLOAT64_MODEL
from tools.generation import tokenizer


def pair(family: str, dtype: torch.dtype = torch.float32) -> list[Any]:
    return [families.model(family, "attnmesh", dtype), families.model(family, STOCK[family], dtype)]


def padded_batch(length: int = 40) -> dict[str, Tensor]:
    """Return three sequences with padding on the left."""
    ids, mask = prompt(length, batch=3), torch.ones(3, length, dtype=torch.long)
    for row, count in enumerate((0, 7, 29)):
        ids[row, :count], mask[row, :count] = 0, 0
    return {"input_ids": ids, "attention_mask": mask}


@pytest.mark.parametrize("family", CONFIGS)
def test_a_forward_pass_makes_a_stock_cache(family: str) -> None:
    ours, stock = pair(family)
    with torch.no_grad():
        for model in (ours, stock):
            assert isinstance(model(prompt(30)).past_key_values, DynamicCache)
        first, more = prompt(33), prompt(5, seed=3)
        given, expected = (_logits_after_cache(model, first, more) for model in (ours, stock))
    assert torch.allclose(given, expected, atol=2 * FLOAT32_MODEL)


def _logits_after_cache(model: Any, first: Tensor, more: Tensor) -> Tensor:
    """Return the logits of tokens that follow cached tokens."""
    cache = model(first).past_key_values
    return model(more, past_key_values=cache).logits


@pytest.mark.parametrize("family", CONFIGS)
def test_padding_on_the_left_has_no_effect(family: str) -> None:
    batch = padded_batch()
    (given, ours), (expected, stock) = (_gradients(model, batch) for model in pair(family, torch.float64))
    real = batch["attention_mask"].bool()
    assert torch.allclose(given[real], expected[real], atol=FLOAT64_MODEL)
    for name, gradient in stock.items():
        assert (ours[name] - gradient).abs().max() <= FLOAT64_MODEL * max(1, float(gradient.abs().max())), name


def _gradients(model: Any, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    output = model(**batch, labels=labels, use_cache=False)
    output.loss.backward()
    return output.logits.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


CALLS: dict[str, dict[str, Any]] = {
    "dynamic": {},
    "static": {"cache_implementation": "static"},
    "no cache": {"use_cache": False},
    "beams": {"num_beams": 3},
    "chunks": {"prefill_chunk_size": 13},
    "looked up": {"prompt_lookup_num_tokens": 3},
}


@pytest.mark.parametrize(("family", "name"), rotated([*CONFIGS], [*CALLS], every=5))
def test_model_generate_gives_stock_tokens(family: str, name: str) -> None:
    batch = {"input_ids": prompt(40)} if name in ("looked up", "chunks") else padded_batch()
    options = {"max_new_tokens": 9, "do_sample": False, "disable_compile": True, **CALLS[name]}
    given, expected = (model.generate(**batch, **options) for model in pair(family))
    assert given.tolist() == expected.tolist()


def test_stop_strings_and_their_tokenizer_give_stock_tokens() -> None:
    used = tokenizer()
    options = {"tokenizer": used, "stop_strings": [*map(used.decode, range(2, 60))], "max_new_tokens": 20}
    given, expected = (model.generate(prompt(40), **options) for model in pair("llama"))
    assert given.tolist() == expected.tolist()
    assert expected.shape[1] < 60


def test_a_mask_without_cached_tokens_is_refused() -> None:
    ours = families.model("llama", "attnmesh")
    with torch.no_grad():
        cache = ours(prompt(30)).past_key_values
        with pytest.raises(errors.ShapeError, match="attention_mask: expected one of all 35 tokens, given one of 5"):
            ours(prompt(5), past_key_values=cache, attention_mask=torch.ones(1, 5, dtype=torch.long))


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3", "llama4"])
def test_packed_positions_are_refused_for_what_they_are(family: str) -> None:
    """Also in a model of windows, whose own masks are no reason."""
    model, positions = families.model(family, "attnmesh"), torch.arange(30)[None] % 17
    given = "given packed sequences, whose positions restart. Fix: pass them through attnmesh.hf.shard_batch"
    with pytest.raises(errors.MaskError, match=given):
        model(input_ids=prompt(30), position_ids=positions, use_cache=False)


def test_a_pipeline_gives_stock_text() -> None:
    words = {f"w{n}": n for n in range(97)}
    made = Tokenizer(WordLevel(words, unk_token="w2"))
    made.pre_tokenizer = WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=made, pad_token="w0", padding_side="left")
    texts = []
    for model in pair("qwen3"):
        write = pipeline("text-generation", model=model, tokenizer=fast, device="cpu")
        texts.append(write(["w5 w6 w7 w8", "w9 w10"], max_new_tokens=8, do_sample=False, batch_size=2))
    assert texts[0] == texts[1]
