"""Calls that must be, strict tools, and thoughts: answers are as each family writes them, and readers read them so."""

import json
import re
from random import Random
from typing import Any

import pytest

from attnmesh.errors import GrammarError
from attnmesh.hf.serving.grammar_masks import Grammar, GrammarTokens
from attnmesh.serve.answer_parts import find_formats
from attnmesh.serve.chat import read_call
from attnmesh.serve.grammars import CHANNELS
from attnmesh.serve.refused import Refused
from attnmesh.serve.tool_formats import FORMATS_BY_NAME, ContentText, ToolCall
from attnmesh.serve.tool_grammars import CALL_SHAPES
from tests.support.serving.fake_engine import byte_tokenizer
from tests.support.serving.grammars import END, WEATHER, allowed, grammar_of, grammars_of, ids_of, is_valid, tool, walk
from tests.support.serving.tool_calls import PAIRED, parts_of, tokenizer_of


def calls_of(tokenizer: Any, text: str) -> tuple[list[ToolCall], str]:
    split = find_formats(tokenizer).parts([tool(), tool("weather.2")], "")
    assert split is not None
    parts = parts_of(tokenizer, split(), tokenizer(text)["input_ids"])
    calls = [part for part in parts if isinstance(part, ToolCall)]
    return calls, "".join(part.text for part in parts if isinstance(part, ContentText))


KINDS = [
    (name, number, special)
    for name in CALL_SHAPES
    for number in range(len(CALL_SHAPES[name]))
    for special in (False, True)
]


@pytest.mark.parametrize(("name", "number", "special"), KINDS)
def test_calls_are_forced_as_each_family_writes_them(name: str, number: int, special: bool) -> None:
    tokenizer, draw = tokenizer_of(name, number, special=special), Random(7)
    both, named = [tool(), tool("weather.2")], {"type": "function", "function": {"name": "weather.2"}}
    with grammars_of(tokenizer) as (made, grammar_tokens):
        for choice in ("required", named):
            text = walk(grammar_tokens, grammar_of(made, tools=both, tool_choice=choice), tokenizer, draw)
            calls, content = calls_of(tokenizer, text)
            assert calls, text
            assert content == "", text
            assert len(calls) == 1 or choice == "required"
            for call in calls:
                assert call.name in (("weather", "weather.2") if choice == "required" else ("weather.2",)), text
                assert is_valid(call.arguments, WEATHER | {"additionalProperties": False})
        auto = grammar_of(made, tools=[tool(strict=True), tool("weather.2")])
        bad = text.replace("weather.2", "weather.3")
        before = "" if name in ("harmony", "llama") else "Hm <"
        grammar_tokens.begin(auto, [], tokenizer(before + text)["input_ids"])
        with pytest.raises(GrammarError, match="an answer that follows it"):
            grammar_tokens.begin(auto, [], tokenizer(before + bad)["input_ids"])
        said = "<|channel|>final<|message|>Hm." if name == "harmony" else "Hm."
        grammar_tokens.begin(auto, [], tokenizer(said)["input_ids"])


def one_of(schema: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"a": schema}, "required": ["a"]}


ODD_ARGUMENTS = [
    ("hermes", {"type": "object"}, '{"a": 1, "a": 2}'),
    ("hermes", {"type": "object"}, '{"a": 1e999}'),
    ("hermes", {"type": "object"}, f'{{"a": {"[" * 70}{"]" * 70}}}'),
    ("hermes", one_of({"type": "number"}), '{"a": 1e999}'),
    ("hermes", one_of({"type": "integer"}), f'{{"a": {"9" * 4400}}}'),
    ("hermes", one_of({"type": "object", "patternProperties": {"^x": {}}}), '{"a": {"x": 1, "x": null}}'),
    ("hermes", one_of({"items": {"additionalProperties": {"type": "integer"}}}), '{"a": [{"k": 1, "k": 1}]}'),
    ("glm", one_of({"type": "number"}), '{"a": 1e999}'),
    ("glm", one_of({"type": "integer"}), f'{{"a": {"9" * 4400}}}'),
    ("glm", one_of({"type": "object"}), '{"a": {"b": 1, "b": 2}}'),
]
WRITTEN = {
    "hermes": '<tool_call>\n{"name": "weather", "arguments": $all}\n</tool_call>',
    "glm": "<tool_call>weather\n<arg_key>a</arg_key>\n<arg_value>$value</arg_value>\n</tool_call>",
}


@pytest.mark.parametrize(("name", "schema", "arguments"), ODD_ARGUMENTS)
def test_what_a_grammar_of_calls_lets_through_is_a_call(name: str, schema: Any, arguments: str) -> None:
    tokenizer = tokenizer_of(name, special=False)
    text = WRITTEN[name].replace("$all", arguments).replace("$value", arguments[len('{"a": ') : -1])
    with grammars_of(tokenizer) as (made, grammar_tokens):
        grammar = grammar_of(made, tools=[tool(parameters=schema)], tool_choice="required")
        assert grammar_tokens.begin(grammar, [END], tokenizer(text)["input_ids"]).mask().allowed[END]
    ((call,), content) = calls_of(tokenizer, text)
    assert (call.arguments, content) == (arguments, "")
    earlier = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": call.arguments}}
    assert read_call("messages[1].tool_calls[0]", earlier)["function"]["arguments"] == arguments


def test_each_format_has_a_shape_or_is_refused_by_name() -> None:
    assert FORMATS_BY_NAME.keys() - CALL_SHAPES.keys() == {"gemma", "function_gemma"}
    tokenizer = byte_tokenizer("{{ messages }}{{ tools }}<|tool_call>call:")
    with grammars_of(tokenizer) as (made, _), pytest.raises(Refused, match="written as gemma") as raised:
        grammar_of(made, tools=[tool()], tool_choice="required")
    assert raised.value.param == "tool_choice"


def test_texts_without_quotes_may_be_any() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string"}, "b": {"anyOf": [{"type": "string"}]}}}
    tokenizer = tokenizer_of("qwen_coder", special=True)
    with grammars_of(tokenizer) as (made, grammar_tokens):
        grammar = grammar_of(made, tools=[tool(parameters=schema)], tool_choice="required")
        text = '<tool_call>\n<function=weather>\n<parameter=a>\n</b> "é"\n\n</parameter>\n'
        text += '<parameter=b>\n"x"\n</parameter>\n</function>\n</tool_call>'
        state = grammar_tokens.begin(grammar, [END], tokenizer(text)["input_ids"])
        assert END in state.mask().allowed.nonzero()
        for kind, field in (("pattern", "properties.a.pattern"), ("maxLength", "properties.a.maxLength")):
            bad = {"type": "object", "properties": {"a": {"type": "string", kind: {"pattern": "x"}.get(kind, 3)}}}
            with pytest.raises(Refused, match="without quotes") as raised:
                grammar_of(made, tools=[tool(parameters=bad)], tool_choice="required")
            assert raised.value.param == f"tools[0].function.parameters.{field}"


def fits(grammar_tokens: GrammarTokens, grammar: Grammar, tokenizer: Any, text: str) -> bool:
    """Return whether an answer may be a text."""
    try:
        state = grammar_tokens.begin(grammar, [END], tokenizer(text)["input_ids"])
        return bool(state.mask().allowed[END])
    except GrammarError:
        return False


@pytest.mark.parametrize("name", PAIRED)
@pytest.mark.parametrize("special", [False, True])
def test_texts_without_quotes_end_where_readers_end_them(name: str, special: bool) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
    tokenizer, shape = tokenizer_of(name, special=special), CALL_SHAPES[name][0]
    mark = shape.pair.split("$value")[1].strip("\n")
    with grammars_of(tokenizer) as (made, grammar_tokens):
        grammar = grammar_of(made, tools=[tool(parameters=schema)], tool_choice="required")
        assert fits(grammar_tokens, grammar, tokenizer, PAIRED[name].replace("$value", "x <y"))
        assert not fits(grammar_tokens, grammar, tokenizer, PAIRED[name].replace("$value", f"x{mark}y"))
        asked = schema | {"properties": {"a": {"type": "string", "enum": [f"x{mark}y"]}}}
        with pytest.raises(Refused, match="enum: expected texts"):
            grammar_of(made, tools=[tool(parameters=asked)], tool_choice="required")


@pytest.mark.parametrize("name", PAIRED)
def test_texts_may_be_null_where_the_schema_takes_it(name: str) -> None:
    tokenizer = tokenizer_of(name, special=True)
    either = [{"type": ["string", "null"]}, {"anyOf": [{"type": "string", "title": "A"}, {"type": "null"}]}]
    chosen: list[dict[str, Any]] = [{"type": ["string", "null"], "enum": ["x", None]}]
    text, bare = PAIRED[name], PAIRED[name].replace('string="true"', 'string="false"')
    with grammars_of(tokenizer) as (made, grammar_tokens):
        for schema in either + chosen:
            tools = [tool(parameters={"type": "object", "properties": {"a": schema}, "required": ["a"]})]
            grammar = grammar_of(made, tools=tools, tool_choice="required")
            assert fits(grammar_tokens, grammar, tokenizer, text.replace("$value", "x"))
            assert fits(grammar_tokens, grammar, tokenizer, text.replace("$value", "y")) == (schema in either)
            null = bare.replace("$value", "null")
            assert fits(grammar_tokens, grammar, tokenizer, null)
            split = find_formats(tokenizer).parts(tools, "")
            assert split is not None
            (call,) = parts_of(tokenizer, split(), tokenizer(null)["input_ids"])
            assert isinstance(call, ToolCall)
            assert json.loads(call.arguments) == {"a": None}
        for bad in ({"type": ["string", "null"], "enum": ["null"]}, {"type": "string", "enum": ["x", None]}):
            with pytest.raises(Refused, match="enum: expected texts"):
                grammar_of(made, tools=[tool(parameters={"properties": {"a": bad}})], tool_choice="required")


@pytest.mark.parametrize("name", ["glm", "qwen_coder"])
@pytest.mark.parametrize("special", [False, True])
def test_content_in_a_format_may_quote_a_call(name: str, special: bool) -> None:
    tokenizer = tokenizer_of(name, special=special)
    call = PAIRED[name].replace("<parameter=a>\n$value\n</parameter>\n", "").replace("\n", "")
    content = json.dumps({"a": call})
    with grammars_of(tokenizer) as (made, grammar_tokens):
        grammar = grammar_of(made, tools=[tool()], response_format={"type": "json_object"})
        state = grammar_tokens.begin(grammar, [END], ids_of(content))
        assert END in state.mask().allowed.nonzero()
    split = find_formats(tokenizer).parts([tool()], "", either=True)
    assert split is not None
    found = parts_of(tokenizer, split(), ids_of(content))
    assert "".join(one.text for one in found if isinstance(one, ContentText)) == content


def test_formats_whose_calls_look_like_content_are_refused_beside_it() -> None:
    tokenizer, asked = tokenizer_of("llama", special=True), {"response_format": {"type": "json_object"}}
    with grammars_of(tokenizer) as (made, grammar_tokens):
        for tools in ([tool()], [tool(strict=True)]):
            with pytest.raises(Refused, match=r"response_format: expected none beside tools.*tool_choice") as raised:
                grammar_of(made, tools=tools, **asked)
            assert raised.value.param == "response_format"
        for choice in ("none", "required"):
            grammar = grammar_of(made, tools=[tool()], tool_choice=choice, **asked)
            assert fits(grammar_tokens, grammar, tokenizer, '{"name": "Ann"}') == (choice == "none")


NOT_IN_PAIRS: dict[str, dict[str, Any]] = {
    "required": {"properties": {"a": {}}, "required": ["b"]},
    "minProperties": {"properties": {"a": {}}, "required": ["a"], "minProperties": 1},
    "properties": {"additionalProperties": {"type": "integer"}},
    "anyOf": {"properties": {}, "anyOf": [{"required": ["a"]}]},
    "properties.a>b": {"properties": {"a>b": {}}},
    'properties.a"b': {"properties": {'a"b': {"type": "string"}}},
    "properties. a": {"properties": {" a": {"type": "string"}}},
    "properties.[TOOL_CALLS]": {"properties": {"[TOOL_CALLS]": {}}},
}


@pytest.mark.parametrize("name", ["qwen_coder", "glm"])
def test_what_pairs_cannot_say_is_refused_by_name(name: str) -> None:
    tokenizer = tokenizer_of(name, special=True)
    tokenizer.add_special_tokens({"additional_special_tokens": ["[TOOL_CALLS]"]})
    with grammars_of(tokenizer) as (made, _):
        for keyword, schema in NOT_IN_PAIRS.items():
            with pytest.raises(Refused, match=re.escape(f"parameters.{keyword}: expected ")):
                grammar_of(made, tools=[tool(parameters=schema)], tool_choice="required")
        never = {"properties": {"a": False, "b": {"type": "integer"}}, "required": ["b"]}
        assert '"not"' not in grammar_of(made, tools=[tool(parameters=never)], tool_choice="required").text


THOUGHTS = [("<|assistant|>", False, True), ("<think>\n", True, False), ("<think>\n\n</think>\n\n", False, False)]


@pytest.mark.parametrize(("end", "is_thinking", "may_think"), THOUGHTS)
def test_a_grammar_begins_where_thoughts_end(end: str, is_thinking: bool, may_think: bool) -> None:
    tokenizer = byte_tokenizer("{{ messages }}<think></think>")
    with grammars_of(tokenizer) as (made, grammar_tokens):
        grammar = grammar_of(made, end, response_format={"type": "json_object"})
        assert (grammar.is_thinking, bool(grammar.thought_begin)) == (is_thinking, may_think)
        first = allowed(grammar_tokens.begin(grammar, [END]))
        assert ("{" in first, "<" in first, "END" in first) == (True, is_thinking or may_think, False)
        thought = "" if is_thinking else "<think>"
        if is_thinking or may_think:
            state = grammar_tokens.begin(grammar, [END], ids_of(f"{thought}Hm {{</think>\n\n"))
            assert allowed(state) == {"{"}


def test_harmony_thinks_in_a_channel_of_its_own() -> None:
    tokenizer = tokenizer_of("harmony", special=True)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|start|>", "<|end|>"]})
    thought = f"{CHANNELS.begin}Hm{CHANNELS.end}"
    with grammars_of(tokenizer) as (made, grammar_tokens):
        asked = {"tools": [tool()], "response_format": {"type": "json_object"}}
        for before in ("", thought):
            grammar = grammar_of(made, CHANNELS.end, **asked)
            for answer in ('<|channel|>final<|message|>{"a": 1}', f"<|channel|>{calls_head('weather')}"):
                grammar_tokens.begin(grammar, [END], tokenizer(before + answer)["input_ids"])
            with pytest.raises(GrammarError):
                grammar_tokens.begin(grammar, [END], tokenizer(before + "<|channel|>final<|message|>Hm")["input_ids"])


def calls_head(name: str) -> str:
    return f'commentary to=functions.{name} <|constrain|>json<|message|>{{"city": "'
