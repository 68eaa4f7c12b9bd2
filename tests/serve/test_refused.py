"""Refusals have OpenAI's types, and texts that a response can hold."""

import pytest

from attnmesh.serve.refused import Refused

pytestmark = pytest.mark.quick


@pytest.mark.parametrize(
    ("status", "kind", "headers"),
    [
        (400, "invalid_request_error", {}),
        (401, "authentication_error", {"www-authenticate": "Bearer"}),
        (404, "not_found_error", {}),
        (413, "invalid_request_error", {}),
        (429, "rate_limit_error", {"retry-after": "2"}),
        (500, "server_error", {}),
        (503, "server_error", {"retry-after": "2"}),
    ],
)
def test_a_status_has_its_type_and_headers(status: int, kind: str, headers: dict[str, str]) -> None:
    refused = Refused(status, "n: expected 1", "n", "code")
    assert refused.headers == headers
    assert refused.body == {"error": {"message": "n: expected 1", "type": kind, "param": "n", "code": "code"}}


def test_half_a_character_becomes_a_question_mark() -> None:
    refused = Refused(400, "\ud800: expected é", "a\ud800")
    assert (str(refused), refused.param) == ("?: expected é", "a?")
    assert Refused(400, "no field").param is None
