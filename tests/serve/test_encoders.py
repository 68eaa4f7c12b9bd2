"""The bound of characters a token: a text that fits is never refused by it; and the threads that encode."""

import asyncio
import gc
import threading
from typing import Any
from weakref import ref

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE, Unigram, WordPiece
from transformers import PreTrainedTokenizerFast

from attnmesh.serve.encoders import PromptEncoders, characters_a_token

SIGNS = sorted(pre_tokenizers.ByteLevel.alphabet())
WORDS = ["Ġ" * 2, "Ġ" * 4, "Ġ" * 8, "th", "the"]
MERGES = [("Ġ", "Ġ"), ("Ġ" * 2, "Ġ" * 2), ("Ġ" * 4, "Ġ" * 4), ("t", "h"), ("th", "e")]
LEVEL = {sign: i for i, sign in enumerate([*SIGNS, *WORDS])}
FALLBACK = {name: i for i, name in enumerate([*(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁▁", "a", "▁a"])}


def made(model: Any, normalizer: Any = None, pre_tokenizer: Any = None, *added: AddedToken) -> Any:
    tokenizer = Tokenizer(model)
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    if pre_tokenizer is not None:
        tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([*added])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False)
SPLIT = pre_tokenizers.Split(Regex(r"\s+|\w+"), "isolated")
SPACES = normalizers.Replace(" ", "▁")
BOUNDED: dict[str, tuple[Any, int]] = {
    "bytes": (made(BPE(LEVEL, MERGES), None, BYTES), 8),
    "a special token": (made(BPE(LEVEL, MERGES), None, BYTES, AddedToken("<|end_of_text|>", special=True)), 15),
    "composed characters": (
        made(
            BPE(LEVEL, MERGES),
            normalizers.NFC(),
            pre_tokenizers.Sequence([SPLIT, pre_tokenizers.ByteLevel(False, True, False)]),
        ),
        32,
    ),
    "byte fallback": (made(BPE(FALLBACK, [("▁", "▁"), ("▁", "a")], byte_fallback=True), SPACES), 6),
}
UNBOUNDED: dict[str, Any] = {
    "spaces beside a token": made(BPE(LEVEL, MERGES), None, BYTES, AddedToken("<end>", lstrip=True, special=True)),
    "spaces are dropped": made(
        BPE(LEVEL, MERGES), None, pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), BYTES])
    ),
    "a pattern is dropped": made(
        BPE(LEVEL, MERGES), None, pre_tokenizers.Sequence([pre_tokenizers.Split(" ", "removed"), BYTES])
    ),
    "a text is made shorter": made(BPE(LEVEL, MERGES), normalizers.Replace("  ", " "), BYTES),
    "a pattern is replaced": made(BPE(LEVEL, MERGES), normalizers.Replace(Regex(" +"), " "), BYTES),
    "accents are dropped": made(
        BPE(LEVEL, MERGES), normalizers.Sequence([normalizers.NFD(), normalizers.StripAccents()]), BYTES
    ),
    "unknown characters are dropped": made(BPE({"a": 0}, [])),
    "a byte is missing": made(BPE({sign: i for i, sign in enumerate(SIGNS[1:])}, []), None, BYTES),
    "words": made(WordPiece({"[UNK]": 0}, unk_token="[UNK]")),
    "unigrams": made(Unigram([("<unk>", 0.0), ("a", -1.0)], unk_id=0, byte_fallback=False)),
    "another kind": object(),
}
TEXTS = st.text("the  \t\na漢é😀\u03b1\u0313\u0300\u0345<|end_of_text|>", max_size=60) | st.integers(0, 60).map(
    lambda n: " " * n
)


@pytest.mark.parametrize("name", BOUNDED)
@settings(max_examples=50)
@given(TEXTS)
def test_a_token_has_no_more_characters_than_the_bound(name: str, text: str) -> None:
    tokenizer, characters = BOUNDED[name]
    assert characters_a_token(tokenizer) == characters
    assert len(tokenizer(text)["input_ids"]) * characters >= len(text)


@pytest.mark.parametrize("name", UNBOUNDED)
def test_no_bound_is_taken_where_characters_may_be_dropped(name: str) -> None:
    assert characters_a_token(UNBOUNDED[name]) is None


class Fields(dict[str, Any]):
    """Fields of a request, which may be referred to weakly."""


def test_a_prompt_whose_client_has_gone_is_kept_by_no_queue() -> None:
    """Else clients that come and go while a long prompt is encoded fill the memory."""
    begun, open_gate = threading.Event(), threading.Event()

    def encode(_: Any, fields: Any, __: Any) -> int:
        begun.set()
        assert open_gate.wait(60)
        return len(fields)

    async def run() -> Any:
        encoders = PromptEncoders(BOUNDED["bytes"][0])
        first = asyncio.create_task(encoders.run(encode, Fields(), True, 100))
        assert await asyncio.to_thread(begun.wait, 60)
        fields = Fields(prompt="a")
        left = ref(fields)
        second = asyncio.create_task(encoders.run(encode, fields, True, 100))
        await asyncio.sleep(0)
        second.cancel()
        await asyncio.gather(second, return_exceptions=True)
        del fields, second
        gc.collect()
        kept = left()
        open_gate.set()
        assert await first == 0
        encoders.close()
        return kept

    assert asyncio.run(run()) is None
