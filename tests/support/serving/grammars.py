"""Grammars that requests ask for, the tokens that they allow, and texts that follow them."""

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from random import Random
from typing import Any

import jsonschema

from attnmesh.hf.serving.grammar_masks import Grammar, GrammarState, GrammarTokens
from attnmesh.serve.answer_parts import find_formats
from attnmesh.serve.grammars import Grammars
from attnmesh.serve.rank_requests import read_grammar
from attnmesh.serve.request_fields import CHAT, read_fields
from tests.support.serving.fake_engine import byte_tokenizer
from tests.support.serving.served import chat

END, BYTES = 256, byte_tokenizer()

SIGNS = {id: BYTES.decode([id]) for id in range(256)} | {END: "END"}

WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "enum": ["Bern", "Zürich </x>"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 14},
        "units": {"type": "array", "items": {"enum": ["C", "F"]}, "minItems": 1, "maxItems": 3},
    },
    "required": ["city", "days"],
}


def tool(name: str = "weather", **fields: Any) -> dict[str, Any]:
    """Return a tool as a request names it."""
    return {"type": "function", "function": {"name": name, "parameters": WEATHER} | fields}


def is_valid(text: str, schema: Any) -> bool:
    jsonschema.Draft202012Validator(schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER).validate(
        json.loads(text)
    )
    return True


NO_LINES = {BYTES("\n")["input_ids"][0]: -100}
"""A bias against new lines, whose indents make answers of random weights long."""


def allowed(state: GrammarState) -> set[str]:
    """Return the tokens that may come next, "END" for the end."""
    return {SIGNS[id] for id in state.mask().allowed.nonzero().flatten().tolist()}


def ids_of(text: str) -> list[int]:
    """Return the tokens of a text, which are its bytes."""
    return list(BYTES(text)["input_ids"])


def grammar_of(made: Grammars, prompt_end: str = "", **fields: Any) -> Grammar:
    """Return the grammar of a chat, as ranks read it."""
    found = asyncio.run(made.of(read_fields(chat(**fields), CHAT), prompt_end))
    assert found is not None
    return read_grammar(json.loads(json.dumps(found)))


@contextmanager
def grammars_of(tokenizer: Any, name: str = "auto") -> Iterator[tuple[Grammars, GrammarTokens]]:
    """Make grammars of a tokenizer while the block runs."""
    made = Grammars(tokenizer, find_formats(tokenizer, name))
    made.start()
    assert made._grammar_tokens is not None
    yield made, made._grammar_tokens.result()
    made._grammar_tokens.result().close()
    made.close()


def walk(grammar_tokens: GrammarTokens, grammar: Grammar, tokenizer: Any, draw: Random) -> str:
    """Return the text of random tokens that a grammar allows, without a thought."""
    end, ids = tokenizer.eos_token_id, list[int]()
    state = grammar_tokens.begin(replace(grammar, thought_begin=()), [end])
    while not (mask := state.mask()).is_whole:
        id = draw.choice(mask.allowed.nonzero().flatten().tolist())
        if id == end:
            break
        ids.append(id)
        state.advance(id)
    return str(tokenizer.decode(ids))
