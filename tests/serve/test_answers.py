import asyncio
import json
from typing import Any

import pytest

from attnmesh.serve.answers import Answers, encoded
from attnmesh.serve.text import Piece, Token
from tests.support.fake_engine import byte_tokenizer


class Texts:
    """A tokenizer whose texts count how often they are measured."""

    measured = 0

    def decode(self, ids: list[int], **options: Any) -> str:
        return Measured("x" * len(ids))


class Measured(str):
    def __len__(self) -> int:
        Texts.measured += 1
        return super().__len__()


@pytest.mark.parametrize("count", [100, 400])
def test_offsets_are_found_in_time_that_grows_with_the_tokens(count: int) -> None:
    Texts.measured = 0
    answers = Answers(Texts(), "m", False, 0)
    piece = Piece("x" * count, tuple(Token(0, -1.0) for _ in range(count)))
    choice = answers.choice(0, piece, 5, None)
    assert choice["logprobs"]["text_offset"] == [*range(5, 5 + count)]
    assert Texts.measured <= 2 * count


@pytest.mark.parametrize("is_chat", [True, False])
def test_a_whole_choice_is_that_of_its_stream(is_chat: bool) -> None:
    answers = Answers(byte_tokenizer(), "m", is_chat, 1)
    tokens = [Token(id, -1.0, ((id, -1.0),)) for id in byte_tokenizer()("Hello")["input_ids"]]
    at_once = answers.choice(0, Piece("Hello", tuple(tokens)), 0, "stop")
    parts = [
        answers.choice(0, Piece(sign, (token,)), place, None)
        for place, (sign, token) in enumerate(zip("Hello", tokens, strict=True))
    ]
    parts.append(answers.choice(0, Piece(""), 5, "stop"))
    assert answers.joined(parts) == answers.joined([at_once])
    shown = answers.joined(parts)
    assert (shown["message"]["content"] if is_chat else shown["text"]) == "Hello"
    assert shown["finish_reason"] == "stop"


def test_long_json_lets_others_run() -> None:
    value = {
        "choices": [{"logprobs": {"content": [{"token": "x", "top": [{"a": 1.5}] * 20}] * 4000}}],
        "none": [],
        "é": {},
    }

    async def write() -> tuple[bytes, int]:
        turns, done = 0, asyncio.create_task(encoded(value))
        while not done.done():
            turns += 1
            await asyncio.sleep(0)
        return await done, turns

    data, turns = asyncio.run(write())
    assert json.loads(data) == value
    assert data == json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()
    assert turns > len(data) / (1 << 17)
