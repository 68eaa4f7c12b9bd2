"""Messages between the front and rank 0: each is the same after JSON."""

import json
from typing import Any, get_args

import pytest

from attnmesh.serve import rank_messages
from attnmesh.serve.rank_messages import MESSAGES, message_code, message_of

pytestmark = pytest.mark.quick

SENT: list[Any] = [
    rank_messages.NewPrompt(3, [1, 2], {}),
    rank_messages.ForgetPrompt(3),
    rank_messages.SubmitRequest(7, 3, {"temperature": 0.5, "stop_ids": [2]}, None),
    rank_messages.SubmitRequest(7, 3, {}, [4, 5]),
    rank_messages.CancelRequest(7),
    rank_messages.CloseEngine(),
    rank_messages.EngineReady({"max_model_len": 4096}),
    rank_messages.EngineFigures({"steps": 2.0, "seconds": [0.5, 1.5]}),
    rank_messages.RequestAccepted(7),
    rank_messages.AnswerBegun(7, cached_tokens=16),
    rank_messages.TokenDrawn(7, 42, -0.5, [[42, -0.5], [1, -2.0]]),  # type: ignore[list-item]
    rank_messages.TokenDrawn(7, 42, None, []),
    rank_messages.AnswerEnded(7, "stop"),
    rank_messages.RequestRefused(7, 400, "n: expected 1", "code"),
]


@pytest.mark.parametrize("message", SENT, ids=lambda one: type(one).__name__)
def test_a_message_is_the_same_after_json(message: Any) -> None:
    again = message_of(json.loads(json.dumps(message_code(message))))
    assert type(again) is type(message)
    assert again == message


def test_each_message_is_tried_and_has_a_name_of_its_own() -> None:
    kinds = {*get_args(rank_messages.ToRank), *get_args(rank_messages.ToFront)}
    assert {type(message) for message in SENT} == kinds == {*MESSAGES.values()}
    assert len(MESSAGES) == len(kinds)
