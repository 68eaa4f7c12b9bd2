"""Requests that ask for grammars: answers hold to their formats and schemas, and what no grammar serves is refused.

Models have random weights, so that nothing but the grammar makes an answer valid.
"""

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from attnmesh.hf.serving.engine import Engine
from attnmesh.hf.serving.grammar_masks import Grammar, GrammarTokens
from attnmesh.serve import grammars
from attnmesh.serve.answer_parts import AnswerFormats
from attnmesh.serve.grammars import MAX_PROPERTIES, AskedGrammar, Grammars
from attnmesh.serve.rank_requests import serve_rank_0
from attnmesh.serve.refused import Refused
from attnmesh.serve.request_fields import CHAT, read_fields
from attnmesh.serve.tool_formats import FORMATS_BY_NAME
from attnmesh.serve.tool_grammars import Rules
from tests.support.models import families
from tests.support.serving.fake_engine import HERMES, ThreadWorld, byte_tokenizer
from tests.support.serving.grammars import BYTES, NO_LINES, WEATHER, grammar_of, grammars_of, ids_of, is_valid, tool
from tests.support.serving.served import NAME, Served, chat, served


def json_schema(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "f", "schema": schema, "strict": True}}


class Tiny(ThreadWorld):
    """A world of one rank with `hf.Engine` and random weights."""

    def __init__(self, tokenizer: Any, **changes: Any) -> None:
        super().__init__()
        self.tokenizer, sizes = tokenizer, {"vocab_size": len(tokenizer), "initializer_range": 0.1, **changes}
        self.model = families.model("llama", "attnmesh", **sizes)
        self.engine: Any = None

    def run(self, address: str) -> None:
        ends, grammars = [self.tokenizer.eos_token_id], GrammarTokens(self.tokenizer)
        self.engine = Engine(self.model, None, max_rows=8, tokens_end=ends, grammars=grammars)
        serve_rank_0(self.engine, address, {"max_model_len": 2048})


@pytest.fixture(scope="module")
def running() -> Iterator[Served]:
    tokenizer = byte_tokenizer(HERMES.replace("</think>", ""))  # random weights would end no thought
    with served(Tiny(tokenizer), tokenizer=tokenizer, max_requests=40) as one:
        yield one


def ask(client: openai.OpenAI, **fields: Any) -> Any:
    fields = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1000, "seed": 4} | fields
    fields["logit_bias"] = {str(id): bias for id, bias in NO_LINES.items()} | fields.get("logit_bias", {})
    return client.chat.completions.create(model=NAME, **fields)


OPTIONS: list[dict[str, Any]] = [
    {},
    {"temperature": 0},
    {"n": 3, "logprobs": True, "top_logprobs": 2},
    {"frequency_penalty": 1.5, "presence_penalty": -1, "logit_bias": {str(ids_of("x")[0]): 100, "256": 100}},
    {"extra_body": {"min_p": 0.2, "repetition_penalty": 1.2, "top_k": 9}, "top_p": 0.7},
]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: ",".join(options) or "plain")
def test_content_follows_its_format(client: openai.OpenAI, options: dict[str, Any]) -> None:
    schema = WEATHER | {"additionalProperties": False}
    whole = ask(client, response_format=json_schema(schema), **options).choices
    for one in whole:
        assert one.finish_reason == "stop", one.message.content
        assert is_valid(one.message.content, schema)
    texts = ["" for _ in whole]
    for chunk in ask(client, response_format=json_schema(schema), stream=True, **options):
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert texts == [one.message.content for one in whole]
    for one in whole if "logprobs" in options else ():
        written = b"".join(bytes(token.bytes) for token in one.logprobs.content)
        assert written.decode() == one.message.content


def test_calls_are_made_and_hold_to_their_schema(client: openai.OpenAI) -> None:
    named = {"type": "function", "function": {"name": "weather"}}
    for fields in ({"tool_choice": "required"}, {"tool_choice": named}, {"tool_choice": "required", "stop": ["}"]}):
        choice = ask(client, tools=[tool(strict=True)], parallel_tool_calls=False, **fields).choices[0]
        if "stop" in fields:
            assert (choice.message.tool_calls, choice.finish_reason) == (None, "stop")
            continue
        (call,) = choice.message.tool_calls
        assert (call.function.name, choice.finish_reason) == ("weather", "tool_calls")
        assert is_valid(call.function.arguments, WEATHER)


def test_an_answer_that_is_cut_short_is_no_call(client: openai.OpenAI) -> None:
    choice = ask(client, tools=[tool()], tool_choice="required", max_tokens=30).choices[0]
    assert (choice.finish_reason, choice.message.tool_calls) == ("length", None)


RECURSIVE = {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}

WIDE = {"type": "object", "properties": {f"p{i}": {} for i in range(MAX_PROPERTIES + 1)}}

NAMES = [f"p{i}" for i in range(MAX_PROPERTIES + 1)]

NOT = {"type": "object", "not": {}}
OTHER_TOOL = {"type": "function", "function": {"name": "g"}}

BAD_SCHEMAS: dict[str, tuple[Any, str]] = {
    "recursion without end": (RECURSIVE, ""),
    "itself": ({"$ref": "#"}, ""),
    "nothing fits": ({"type": "integer", "minimum": 3, "maximum": 1}, ""),
    "wide": (WIDE, ""),
    "names that must be": ({"type": "object", "required": NAMES}, ""),
    "names that must be, apart": ({"allOf": [{"type": "object", "required": [name]} for name in NAMES]}, ""),
    "members of a constant": ({"const": [dict.fromkeys(NAMES, 1)]}, ""),
    "members of choices": ({"enum": [{name: 1} for name in NAMES]}, ""),
    "long": ({"enum": ["x" * 200_000]}, ""),
    "look-around": ({"pattern": "(?=x)y"}, ""),
    "a pattern that is none": ({"type": "string", "pattern": "("}, ""),
    "another place": ({"$ref": "http://x/y"}, ".$ref"),
    "no type": ({"type": "text"}, ".type"),
}
"""Schemas of contents, and the keyword that is named."""

BAD: dict[str, tuple[dict[str, Any], str]] = {
    "kind": ({"response_format": {"type": "xml"}}, "response_format"),
    "no schema": ({"response_format": {"type": "json_schema", "json_schema": {"name": "f"}}}, "response_format"),
    **{
        name: ({"response_format": json_schema(schema)}, f"response_format.json_schema.schema{keyword}")
        for name, (schema, keyword) in BAD_SCHEMAS.items()
    },
    "strict is a text": ({"tools": [tool(strict="yes")]}, "tools[0].function.strict"),
    "strict and not served": ({"tools": [tool(strict=True, parameters=NOT)]}, "tools[0].function.parameters"),
    "no tools": ({"tool_choice": "required"}, "tool_choice"),
    "no such tool": ({"tools": [tool()], "tool_choice": OTHER_TOOL}, "tool_choice"),
    "choice": ({"tools": [tool()], "tool_choice": "any"}, "tool_choice"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_grammar_that_cannot_be_is_refused_by_its_field(running: Served, name: str) -> None:
    fields, field = BAD[name]
    for more in ({}, {"stream": True}):
        status, said = running.ask("/v1/chat/completions", chat(**fields, **more))
        assert (status, said["error"]["param"]) == (400, field), said
        assert said["error"]["message"].startswith(f"{field}: expected ")


def test_formats_that_ask_for_nothing_need_no_grammar() -> None:
    text, strict = {"type": "text"}, [tool(strict=True)]
    for fields in ({}, {"response_format": text}, {"tools": [tool()]}, {"tools": strict, "tool_choice": "none"}):
        assert AskedGrammar.of(read_fields(chat(**fields), CHAT)) == AskedGrammar(several=True)


def test_without_the_package_each_field_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammars, "has_grammars", lambda: False)
    made = Grammars(byte_tokenizer(HERMES), AnswerFormats(FORMATS_BY_NAME["hermes"]))
    made.start()
    asked: dict[str, dict[str, Any]] = {
        "response_format": {"response_format": {"type": "json_object"}},
        "tool_choice": {"tools": [tool()], "tool_choice": "required"},
        "tools[0].function.strict": {"tools": [tool(strict=True)]},
    }
    for field, fields in asked.items():
        with pytest.raises(Refused, match="pip install") as raised:
            grammar_of(made, **fields)
        assert (raised.value.status, raised.value.param) == (400, field)
    assert asyncio.run(made.of(read_fields(chat(), CHAT), "")) is None


def chain(*, step: str, links: int) -> dict[str, Any]:
    """Return a schema with references one after another."""

    def inside(place: int) -> dict[str, Any]:
        ref = {"$ref": f"#/$defs/A{place}"}
        steps: dict[str, Any] = {"$ref": ref, "anyOf": {"anyOf": [ref]}, "items": {"type": "array", "items": ref}}
        found: dict[str, Any] = steps[step]
        return found

    defined = {f"A{i}": inside(i + 1) for i in range(links)} | {f"A{links}": {"type": "string"}}
    return {"$defs": defined, **inside(0)}


ENDLESS = {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}

ITEMS: dict[str, Any] = {"$defs": {"A": {"type": "array", "items": {"$ref": "#/$defs/A"}, "minItems": 1}}}

TOO_MUCH: dict[str, Any] = {
    **{f"deep {step}": chain(step=step, links=2500) for step in ("$ref", "anyOf", "items")},
    "a circle of many": {
        "$defs": {f"A{i}": {"properties": {"a": {"$ref": f"#/$defs/A{(i + 1) % 200}"}}} for i in range(200)},
        "$ref": "#/$defs/A0",
    },
    "an object in itself": ENDLESS,
    "a list in itself": ITEMS | {"type": "object", "properties": {"a": {"$ref": "#/$defs/A"}}},
    "many numbers": {"properties": {f"p{i}": {"type": "integer", "multipleOf": 29_999 + i} for i in range(9)}},
    "a large number": {"type": "integer", "multipleOf": 1_000_000_007},
    "a number beyond those of 64 bits": {"type": "integer", "multipleOf": 10**400},
    "a list in itself, beyond its first items": {
        "type": "array",
        "items": [True],
        "additionalItems": {"$ref": "#"},
        "minItems": 2,
    },
    "no schema beyond the first items": {"type": "array", "items": [True], "additionalItems": 5, "minItems": 2},
    "numbers together": {"allOf": [{"multipleOf": 311}, {"multipleOf": 331}]},
    "patterns together": {"allOf": [{"type": "string", "pattern": f"^.*a.{{{i}}}"} for i in range(30)]},
    "patterns of names": {"type": "object", "patternProperties": {f"^{i}": {} for i in range(40)}},
    "a place of its own": {"anyOf": [{"$id": "http://x/y", "type": "string"}]},
    "no such place": {"$ref": "#/$defs/other"},
    "a place by name": {"$defs": {"a": {"$anchor": "b"}}, "$ref": "#b"},
}


@pytest.mark.parametrize("name", TOO_MUCH)
def test_schemas_of_too_much_work_are_refused_before_a_grammar_is_made(name: str) -> None:
    asked = AskedGrammar(content=TOO_MUCH[name], field="response_format")
    with pytest.raises(Refused, match=r"^response_format\.json_schema\.schema.*: expected ") as raised:
        grammars.check_schema_size(asked)
    assert raised.value.status == 400


TREE = {"anyOf": [{"type": "array", "items": {"$ref": "#/definitions/a~1b"}}, {"type": ["integer", "null"]}]}

WIDEST = [f"p{i}" for i in range(MAX_PROPERTIES)]

SERVED: list[dict[str, Any]] = [
    {"type": "object", "properties": dict.fromkeys(WIDEST, True), "required": WIDEST, "additionalProperties": False},
    chain(step="items", links=50),
    {"definitions": {"a/b": TREE}, "$ref": "#/definitions/a~1b"},
    {"definitions": {"a/b": TREE}, "type": "array", "items": {"$ref": "#/definitions/a%7E1b"}, "minItems": 3},
    {"properties": {"a": {"$ref": "#"}}, "required": ["a"]},  # a may be a text
    {"type": "object", "properties": {"a": {"$ref": "#"}, "b": {"multipleOf": 0.01}}, "required": ["b"]},
    {"allOf": [{"$ref": "#/$defs/a"}, {"multipleOf": 60}], "$defs": {"a": {"type": "integer", "multipleOf": 1000}}},
]


def test_schemas_that_end_make_grammars() -> None:
    grammar_tokens = GrammarTokens(BYTES)
    for schema in SERVED:
        grammars.check_schema_size(AskedGrammar(content=schema, field="response_format"))
        grammars.check_grammar(grammar_tokens, Grammar(Rules({}).alone(schema)))
    grammar_tokens.close()


def test_who_waits_for_its_turn_is_told_to_ask_again(monkeypatch: pytest.MonkeyPatch) -> None:
    free, began, made_once = threading.Event(), threading.Semaphore(0), Grammars._make_grammar
    monkeypatch.setattr(grammars, "GRAMMAR_TIMEOUT", 0.3)

    def slow(*arguments: Any) -> Grammar:
        began.release()
        assert free.wait(60)
        return made_once(*arguments)

    async def ask_three(made: Grammars) -> list[Any]:
        fields = read_fields(chat(response_format={"type": "json_object"}), CHAT)
        first = [asyncio.create_task(made.of(fields, "")) for _ in range(grammars.GRAMMAR_THREADS)]
        await asyncio.gather(*first, return_exceptions=True)
        found = [one.exception() for one in first]
        try:
            await made.of(fields, "")
        except Refused as error:
            found.append(error)
        free.set()
        monkeypatch.setattr(grammars, "GRAMMAR_TIMEOUT", 10.0)
        return [*found, await made.of(fields, "")]

    with grammars_of(byte_tokenizer(HERMES.replace("</think>", ""))) as (made, _):
        monkeypatch.setattr(Grammars, "_make_grammar", slow)
        *late, waited, last = asyncio.run(ask_three(made))
        assert [one.status for one in late] == [400] * grammars.GRAMMAR_THREADS
        assert (waited.status, "retry-after" in waited.headers) == (503, True)
        assert last["text"].startswith("%llguidance")
        threads = [one for one in threading.enumerate() if one.name == "grammar"]
        assert all(one.daemon for one in threads)
        made.close()
        with pytest.raises(RuntimeError, match="shutdown"):
            made._grammar_tokens.result().begin(Grammar('start: "a"'), [])  # type: ignore[union-attr]
