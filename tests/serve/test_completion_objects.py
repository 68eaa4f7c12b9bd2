"""Objects of answers: a whole one is that of its stream, and each token has its text, bytes and place."""

import asyncio
import json
from typing import Any

import pytest

from attnmesh.serve.completion_objects import CompletionObjects, encode_json
from attnmesh.serve.spelling import Spelling
from attnmesh.serve.text import Piece, SentToken, Text
from tests.support.serving.fake_engine import byte_tokenizer, sentencepiece_tokenizer


@pytest.mark.parametrize("is_chat", [True, False])
def test_a_whole_choice_is_that_of_its_stream(is_chat: bool) -> None:
    answers = CompletionObjects(Spelling(byte_tokenizer()), "m", is_chat, 1)
    tokens = [SentToken(id, -1.0, ((id, -1.0),)) for id in byte_tokenizer()("Hello")["input_ids"]]
    at_once = answers.choice(0, Piece("Hello", tuple(enumerate(tokens))), "stop")
    parts = [
        answers.choice(0, Piece(sign, ((place, token),)), None)
        for place, (sign, token) in enumerate(zip("Hello", tokens, strict=True))
    ]
    parts.append(answers.choice(0, Piece(""), "stop"))
    assert answers.join(parts) == answers.join([at_once])
    shown = answers.join(parts)
    assert (shown["message"]["content"] if is_chat else shown["text"]) == "Hello"
    assert shown["finish_reason"] == "stop"


def test_long_json_lets_others_run() -> None:
    value = {
        "choices": [{"logprobs": {"content": [{"token": "x", "top": [{"a": 1.5}] * 20}] * 4000}}],
        "none": [],
        "é": {},
    }

    async def write() -> tuple[bytes, int]:
        turns, done = 0, asyncio.create_task(encode_json(value))
        while not done.done():
            turns += 1
            await asyncio.sleep(0)
        return await done, turns

    data, turns = asyncio.run(write())
    assert json.loads(data) == value
    assert data == json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()
    assert turns > len(data) / (1 << 17)


PIECES = sentencepiece_tokenizer()


def placed(*signs: str) -> list[SentToken]:
    """Return tokens, each drawn at -0.1 beside two likely ones."""
    ids = [PIECES.convert_tokens_to_ids(sign) for sign in signs]
    word, bare = (PIECES.convert_tokens_to_ids(sign) for sign in ("▁Paris", "Paris"))
    return [SentToken(id, -0.1, ((id, -0.1), (word, -4.0), (bare, -5.0))) for id in ids]


def completed(tokens: list[SentToken], is_chat: bool = False, top: int = 3) -> dict[str, Any]:
    """Return the choice of an answer after "The capital is"."""
    spelling = Spelling(PIECES)
    answers = CompletionObjects(spelling, "m", is_chat, top)
    text = Text(spelling, (), PIECES("The capital is")["input_ids"])
    found = [*map(text.add, tokens), text.end()]
    return answers.join([answers.choice(0, piece, "stop") for piece in found])


def test_tokens_that_differ_by_a_space_have_log_probabilities_of_their_own() -> None:
    shown = completed(placed("▁Paris"))["logprobs"]
    assert (shown["tokens"], shown["token_logprobs"]) == ([" Paris"], [-0.1])
    assert shown["top_logprobs"] == [{" Paris": -0.1, "Paris": -5.0}]
    assert completed(placed("."), top=0)["logprobs"]["top_logprobs"] == [{".": -0.1}]
    (said,) = completed(placed("▁Paris"), is_chat=True)["logprobs"]["content"]
    assert [one["token"] for one in said["top_logprobs"]] == [" Paris", " Paris", "Paris"]


def test_a_character_of_several_tokens_has_their_bytes_and_one_place() -> None:
    tokens = placed("a", "<0xF0>", "<0x9F>", "<0x98>", "<0x80>", ".", "<pad>")
    choice = completed(tokens)
    shown = choice["logprobs"]
    assert choice["text"] == "a😀."
    assert shown["text_offset"] == [0, 1, 1, 1, 1, 2, 3]
    assert shown["tokens"] == ["a", r"bytes:\xf0", r"bytes:\x9f", r"bytes:\x98", r"bytes:\x80", ".", "<pad>"]
    assert len({*shown["top_logprobs"][1]}) == 3
    content = completed(tokens, is_chat=True)["logprobs"]["content"]
    assert content[-1]["bytes"] is None
    assert b"".join(bytes(one["bytes"]) for one in content[:-1]).decode() == "a😀."
    assert content[1]["token"] == r"\xf0"


def test_a_last_token_without_text_has_its_log_probability() -> None:
    for last in ("<pad>", "<0xF0>"):
        assert len(completed(placed("a", last))["logprobs"]["tokens"]) == 2
