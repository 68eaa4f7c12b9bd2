"""Options of guesses, which are refused by name."""

from typing import Any

import pytest
import torch

from attnmesh.errors import InputError
from attnmesh.hf.serving.engine import Engine
from tests.support.models.tiny_models import Case, build


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        (
            "qwen3_next",
            {},
            "expected a model whose caches take tokens back, given one with recurrent layers",
        ),
        ("llama", {"reproducible": True}, "Engine speculate: expected no reproducible=True beside it"),
        ("llama", {"speculate": "ngram:65"}, "Engine speculate: expected ngram, or ngram:N with N from 1 to 64"),
        ("llama", {"speculate": "tree"}, "expected ngram, or ngram:N with N from 1 to 64, given 'tree'"),
        ("llama", {"speculate": 8}, "expected ngram, or ngram:N with N from 1 to 64, given 8"),
    ],
)
def test_what_cannot_guess_is_refused_by_name(name: str, options: dict[str, Any], expected: str) -> None:
    model = build(Case(name, name), "attnmesh", torch.float32)
    with pytest.raises(InputError, match=expected):
        Engine(model, None, **{"speculate": "ngram", **options})
