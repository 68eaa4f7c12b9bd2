"""Answers that follow grammars: formats of content, calls that must be, strict tools, and requests that none serves.

Models have random weights, so that nothing but the grammar makes an answer valid.
"""

import asyncio
import json
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from random import Random
from types import SimpleNamespace
from typing import Any

import jsonschema
import openai
import pytest

from attnmesh.errors import GrammarError
from attnmesh.hf.serving.engine import Engine
from attnmesh.hf.serving.grammar_masks import Grammar, GrammarState, GrammarTokens, TokenMask
from attnmesh.hf.serving.stream import Stream
from attnmesh.serve import grammars
from attnmesh.serve.answer_parts import AnswerFormats, find_formats
from attnmesh.serve.grammars import CHANNELS, MAX_PROPERTIES, AskedGrammar, Grammars
from attnmesh.serve.rank_requests import read_grammar, serve_rank_0
from attnmesh.serve.refused import Refused
from attnmesh.serve.schema import CHAT, read_fields
from attnmesh.serve.tool_formats import FORMATS, ContentText, ToolCall
from attnmesh.serve.tool_grammars import SHAPES, Rules
from tests.support import families
from tests.support.engines import guessing, started
from tests.support.fake_engine import HERMES, ThreadWorld, byte_tokenizer
from tests.support.served import NAME, Served, chat, served
from tests.support.tool_calls import PAIRED, parts_of, tokenizer_of

END, BYTES = 256, byte_tokenizer()
SIGNS = {id: BYTES.decode([id]) for id in range(256)} | {END: "END"}
SEEDS = range(30)

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
    return {"type": "function", "function": {"name": name, "parameters": WEATHER} | fields}


def json_schema(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "f", "schema": schema, "strict": True}}


# --- schemas ---


def random_schema(draw: Random, depth: int = 3) -> dict[str, Any]:
    """Return a schema whose values end soon, also where each token is as likely as the others."""
    least = draw.randrange(4)
    kinds = ["string", "integer", "number", "boolean", "null", "enum", "const", "pattern", "format"]
    match draw.choice(kinds + 3 * ["object", "array", "anyOf", "$ref"] if depth else kinds):
        case "string":
            return {"type": "string", "minLength": least, "maxLength": least + draw.randrange(6)}
        case "integer":
            return {"type": "integer", "minimum": -draw.randrange(1000), "exclusiveMaximum": draw.randrange(1, 10**6)}
        case "number":
            return {"type": "number", "minimum": 0, "maximum": draw.randrange(1, 9)}
        case "enum":
            return {"enum": draw.sample(["a", 1, None, True, "é\n", [1], {"b": 2}, 2.5], draw.randrange(1, 5))}
        case "const":
            return {"const": draw.choice(["x", 7, {"y": [None]}])}
        case "pattern":
            return {"type": "string", "pattern": draw.choice(["^[a-f]{2,5}$", "^(yes|no)+!?$", "^\\d{3}-\\d{4}$"])}
        case "format":
            return {"type": "string", "format": draw.choice(["date", "time", "uuid", "ipv4", "date-time"])}
        case "object":
            names = draw.sample(["a", "b c", "é", 'q"', "d\\", "$ref"], draw.randrange(5))
            properties = {name: random_schema(draw, depth - 1) for name in names}
            required = draw.sample(names, draw.randrange(len(names) + 1))
            return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
        case "array":
            return {"type": "array", "items": random_schema(draw, depth - 1), "minItems": least, "maxItems": least + 2}
        case "anyOf":
            return {"anyOf": [random_schema(draw, depth - 1) for _ in range(draw.randrange(1, 4))]}
        case "$ref":
            inner = random_schema(draw, depth - 1)
            inner = {"allOf": [inner]} if "$defs" in inner else inner
            return {"$defs": {"One": inner}, "$ref": "#/$defs/One"} if depth == 3 else inner
        case kind:
            return {"type": kind}


def is_valid(text: str, schema: Any) -> bool:
    jsonschema.Draft202012Validator(schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER).validate(
        json.loads(text)
    )
    return True


@pytest.fixture(scope="module")
def tokens() -> Iterator[GrammarTokens]:
    made = GrammarTokens(BYTES)
    yield made
    made.close()


@pytest.fixture(scope="module")
def engine(tokens: GrammarTokens) -> Iterator[Engine]:
    model = families.model("llama", "attnmesh", vocab_size=len(BYTES), initializer_range=0.1)
    made = Engine(model, None, max_rows=16, max_queue=2000, tokens_end=[END], grammars=tokens)
    thread = threading.Thread(target=made.run)
    thread.start()
    yield made
    made.close()
    thread.join()


def text_of(stream: Stream) -> str:
    return str(BYTES.decode([token.id for token in stream], skip_special_tokens=True))


NO_LINES = {BYTES("\n")["input_ids"][0]: -100}
"""A bias against new lines, whose indents make answers of random weights long."""


def answers_follow(engine: Engine, seeds: range) -> None:
    found = []
    for seed in seeds:
        schema = random_schema(Random(seed))
        grammar = Grammar(Rules({}).alone(schema))
        options: dict[str, Any] = {"max_new_tokens": 1500, "temperature": 1, "seed": seed, "logit_bias": NO_LINES}
        found.append((schema, engine.submit([5, 6], grammar=grammar, **options)))
    for schema, stream in found:
        text = text_of(stream)
        assert stream.finish_reason == "stop", (schema, text)
        assert is_valid(text, schema)


def test_answers_of_random_weights_follow_random_schemas(engine: Engine) -> None:
    answers_follow(engine, SEEDS)


@pytest.mark.long
def test_random_tokens_follow_a_thousand_schemas(tokens: GrammarTokens) -> None:
    for seed in range(1000, 2000):
        schema = random_schema(Random(seed))
        text = walk(tokens, Grammar(Rules({}).alone(schema)), BYTES, Random(seed))
        assert is_valid(text, schema)


# --- states ---


def allowed(state: GrammarState) -> set[str]:
    """Return the tokens that may come next, the end as a dollar."""
    return {SIGNS[id] for id in state.mask().allowed.nonzero().flatten().tolist()}


def ids_of(text: str) -> list[int]:
    return list(BYTES(text)["input_ids"])


def test_ends_are_allowed_once_the_grammar_is_whole(tokens: GrammarTokens) -> None:
    state = tokens.begin(Grammar('start: "ab" "c"?'), [END])
    assert allowed(state) == {"a"}
    for sign, more in (("a", {"b"}), ("b", {"c", "END"}), ("c", {"END"})):
        state.advance(*ids_of(sign))
        assert allowed(state) == more
    assert state.mask().is_whole
    assert allowed(tokens.begin(Grammar('start: "ab" "c"?'), [END], ids_of("ab"))) == {"c", "END"}


def test_a_grammar_begins_after_a_thought(tokens: GrammarTokens) -> None:
    grammar = Grammar('start: "<b>"', thought_begin=tuple(ids_of("<t>")), thought_end=tuple(ids_of("</t>")))
    everything = {*SIGNS.values()} - {"END"}
    state = tokens.begin(grammar, [END])
    steps = [("<", {"t", "b"}), ("t", {">"}), (">", everything), ("x", everything), ("<", everything)]
    steps += [("/", everything), ("t", everything), (">", {"<"}), ("<", {"b"}), ("b", {">"}), (">", {"END"})]
    assert allowed(state) == {"<"}
    for place, (sign, more) in enumerate(steps, 1):
        state.advance(*ids_of(sign))
        assert allowed(state) == more, (sign, place)
        replayed = tokens.begin(grammar, [END], ids_of("".join(one for one, _ in steps[:place])))
        assert allowed(replayed) == more, place
    assert allowed(tokens.begin(grammar, [END], ids_of("<b"))) == {">"}  # without a thought


def test_a_grammar_that_asks_too_much_ends_its_answer_alone(engine: Engine) -> None:
    easy = engine.submit([5, 6], max_new_tokens=40, grammar=Grammar("start: /[a-z]{30}/"))
    for bad in ('start: "a', 'start: %json {"$ref": "#"}', "start: other"):
        with pytest.raises(GrammarError, match="response_format: expected"):
            list(engine.submit([5, 6], max_new_tokens=40, grammar=Grammar(bad, "response_format")))
    assert len(text_of(easy)) == 30


def test_no_row_waits_for_the_mask_of_another(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    made, free, slow = GrammarState._mask, threading.Event(), Grammar("start: /[a-z]{10}/", "slow")

    def masked(state: GrammarState) -> TokenMask:
        if state.grammar is slow:
            assert free.wait(60)
        return made(state)

    monkeypatch.setattr(GrammarState, "_mask", masked)
    late = engine.submit([5, 6], max_new_tokens=40, grammar=slow)
    others = [engine.submit([5, 6, i], max_new_tokens=40, grammar=Grammar("start: /[a-z]{20}/")) for i in range(3)]
    assert [len(text_of(one)) for one in others] == [20] * 3
    assert len([*engine.submit([5, 7], max_new_tokens=30)]) == 30
    assert late.answer == []
    free.set()
    assert len(text_of(late)) == 10


def test_a_grammar_changes_no_row_beside_it(engine: Engine) -> None:
    options: dict[str, Any] = {"max_new_tokens": 30, "temperature": 1, "seed": 3}
    alone = [token.id for token in engine.submit([5, 6], **options)]
    streams = [engine.submit([5, 6], **options, grammar=Grammar(f"start: /[a-z]{{{size}}}/")) for size in range(5, 25)]
    beside = [token.id for token in engine.submit([5, 6], **options)]
    assert beside == alone
    assert [len(text_of(stream)) for stream in streams] == [*range(5, 25)]


def test_guesses_follow_a_grammar(engine: Engine, tokens: GrammarTokens) -> None:
    """Guess the tokens of answers that follow grammars, with errors: answers are those without guesses."""
    asked: list[dict[str, Any]] = [
        {"max_new_tokens": 30, "temperature": seed % 2, "seed": seed, "grammar": Grammar(f"start: /[a-z]{{{size}}}/")}
        for seed, size in enumerate((5, 24, 40, 9))
    ]
    streams = [engine.submit([5, 6], **options) for options in asked]
    wanted = [[token.id for token in stream] for stream in streams]
    with guessing([[5, 6, *answer] for answer in wanted]):
        made = Engine(engine.model, None, speculate="ngram", tokens_end=[END], grammars=tokens)
        with started(made):
            again = [made.submit([5, 6], **options) for options in asked]
            assert [[token.id for token in stream] for stream in again] == wanted
        assert [one.finish_reason for one in again] == [one.finish_reason for one in streams]
        assert 0 < made.metrics()["accepted_tokens"] < made.metrics()["drafted_tokens"]


def test_biases_penalties_and_cuts_leave_a_grammar(engine: Engine) -> None:
    digit, letter = ids_of("7")[0], ids_of("x")[0]
    options: dict[str, Any] = {"logit_bias": {digit: 100, letter: 100, END: 100}, "presence_penalty": 2.0}
    options |= {"frequency_penalty": 2.0, "repetition_penalty": 1.3, "min_p": 0.3, "top_p": 0.5, "top_k": 2}
    for seed in range(5):
        grammar = Grammar("start: /[0-9]{12}/")
        options |= {"max_new_tokens": 40, "temperature": 1, "seed": seed, "logprobs": 3}
        stream = engine.submit([5, 6], grammar=grammar, **options)
        drawn = [*stream]
        assert BYTES.decode([token.id for token in drawn]) == "7" * 12
        assert all(len(token.top) == 3 and token.logprob is not None for token in drawn)
    top = {id for token in drawn for id, _ in token.top}
    assert not top <= {*ids_of("0123456789")}, "log-probabilities are the model's, before masks"


def test_the_limit_of_tokens_ends_an_answer_that_is_not_whole(engine: Engine) -> None:
    stream = engine.submit([5, 6], max_new_tokens=9, grammar=Grammar("start: /[a-z]{20}/"))
    assert len(text_of(stream)) == 9
    assert stream.finish_reason == "length"


def test_an_engine_without_grammars_says_so() -> None:
    made = Engine(families.model("llama", "attnmesh"), None)
    with pytest.raises(GrammarError, match="GrammarTokens"):
        made.submit([5, 6], max_new_tokens=9, grammar=Grammar('start: "a"'))


# --- calls ---


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


def grammar_of(made: Grammars, prompt_end: str = "", **fields: Any) -> Grammar:
    found = asyncio.run(made.of(read_fields(chat(**fields), CHAT), prompt_end))
    assert found is not None
    return read_grammar(json.loads(json.dumps(found)))


@contextmanager
def grammars_of(tokenizer: Any, name: str = "auto") -> Iterator[tuple[Grammars, GrammarTokens]]:
    made = Grammars(tokenizer, find_formats(tokenizer, name))
    made.start()
    assert made._tokens is not None
    yield made, made._tokens.result()
    made._tokens.result().close()
    made.close()


def walk(tokens: GrammarTokens, grammar: Grammar, tokenizer: Any, draw: Random) -> str:
    """Return the text of random tokens that a grammar allows, without a thought."""
    end, ids = tokenizer.eos_token_id, list[int]()
    state = tokens.begin(replace(grammar, thought_begin=()), [end])
    while not (mask := state.mask()).is_whole:
        id = draw.choice(mask.allowed.nonzero().flatten().tolist())
        if id == end:
            break
        ids.append(id)
        state.advance(id)
    return str(tokenizer.decode(ids))


def calls_of(tokenizer: Any, text: str) -> tuple[list[ToolCall], str]:
    split = find_formats(tokenizer).parts([tool(), tool("weather.2")], "")
    assert split is not None
    parts = parts_of(tokenizer, split(), tokenizer(text)["input_ids"])
    calls = [part for part in parts if isinstance(part, ToolCall)]
    return calls, "".join(part.text for part in parts if isinstance(part, ContentText))


KINDS = [(name, number, special) for name in SHAPES for number in range(len(SHAPES[name])) for special in (False, True)]


@pytest.mark.parametrize(("name", "number", "special"), KINDS)
def test_calls_are_forced_as_each_family_writes_them(name: str, number: int, special: bool) -> None:
    tokenizer, draw = tokenizer_of(name, number, special=special), Random(7)
    both, named = [tool(), tool("weather.2")], {"type": "function", "function": {"name": "weather.2"}}
    with grammars_of(tokenizer) as (made, tokens):
        for choice in ("required", named):
            text = walk(tokens, grammar_of(made, tools=both, tool_choice=choice), tokenizer, draw)
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
        tokens.begin(auto, [], tokenizer(before + text)["input_ids"])
        with pytest.raises(GrammarError, match="an answer that follows it"):
            tokens.begin(auto, [], tokenizer(before + bad)["input_ids"])
        said = "<|channel|>final<|message|>Hm." if name == "harmony" else "Hm."
        tokens.begin(auto, [], tokenizer(said)["input_ids"])


def test_each_format_has_a_shape_or_is_refused_by_name() -> None:
    assert FORMATS.keys() - SHAPES.keys() == {"gemma", "function_gemma"}
    tokenizer = byte_tokenizer("{{ messages }}{{ tools }}<|tool_call>call:")
    with grammars_of(tokenizer) as (made, _), pytest.raises(Refused, match="written as gemma") as raised:
        grammar_of(made, tools=[tool()], tool_choice="required")
    assert raised.value.param == "tool_choice"


def test_texts_without_quotes_may_be_any() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string"}, "b": {"anyOf": [{"type": "string"}]}}}
    tokenizer = tokenizer_of("qwen_coder", special=True)
    with grammars_of(tokenizer) as (made, tokens):
        grammar = grammar_of(made, tools=[tool(parameters=schema)], tool_choice="required")
        text = '<tool_call>\n<function=weather>\n<parameter=a>\n</b> "é"\n\n</parameter>\n'
        text += '<parameter=b>\n"x"\n</parameter>\n</function>\n</tool_call>'
        state = tokens.begin(grammar, [END], tokenizer(text)["input_ids"])
        assert END in state.mask().allowed.nonzero()
        for kind, field in (("pattern", "properties.a.pattern"), ("maxLength", "properties.a.maxLength")):
            bad = {"type": "object", "properties": {"a": {"type": "string", kind: {"pattern": "x"}.get(kind, 3)}}}
            with pytest.raises(Refused, match="without quotes") as raised:
                grammar_of(made, tools=[tool(parameters=bad)], tool_choice="required")
            assert raised.value.param == f"tools[0].function.parameters.{field}"


def fits(tokens: GrammarTokens, grammar: Grammar, tokenizer: Any, text: str) -> bool:
    """Return whether an answer may be a text."""
    try:
        state = tokens.begin(grammar, [END], tokenizer(text)["input_ids"])
        return bool(state.mask().allowed[END])
    except GrammarError:
        return False


@pytest.mark.parametrize("name", PAIRED)
@pytest.mark.parametrize("special", [False, True])
def test_texts_without_quotes_end_where_readers_end_them(name: str, special: bool) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
    tokenizer, shape = tokenizer_of(name, special=special), SHAPES[name][0]
    mark = shape.pair.split("$value")[1].strip("\n")
    with grammars_of(tokenizer) as (made, tokens):
        grammar = grammar_of(made, tools=[tool(parameters=schema)], tool_choice="required")
        assert fits(tokens, grammar, tokenizer, PAIRED[name].replace("$value", "x <y"))
        assert not fits(tokens, grammar, tokenizer, PAIRED[name].replace("$value", f"x{mark}y"))
        asked = schema | {"properties": {"a": {"type": "string", "enum": [f"x{mark}y"]}}}
        with pytest.raises(Refused, match="enum: expected texts"):
            grammar_of(made, tools=[tool(parameters=asked)], tool_choice="required")


@pytest.mark.parametrize("name", PAIRED)
def test_texts_may_be_null_where_the_schema_takes_it(name: str) -> None:
    tokenizer = tokenizer_of(name, special=True)
    either = [{"type": ["string", "null"]}, {"anyOf": [{"type": "string", "title": "A"}, {"type": "null"}]}]
    chosen: list[dict[str, Any]] = [{"type": ["string", "null"], "enum": ["x", None]}]
    text, bare = PAIRED[name], PAIRED[name].replace('string="true"', 'string="false"')
    with grammars_of(tokenizer) as (made, tokens):
        for schema in either + chosen:
            tools = [tool(parameters={"type": "object", "properties": {"a": schema}, "required": ["a"]})]
            grammar = grammar_of(made, tools=tools, tool_choice="required")
            assert fits(tokens, grammar, tokenizer, text.replace("$value", "x"))
            assert fits(tokens, grammar, tokenizer, text.replace("$value", "y")) == (schema in either)
            null = bare.replace("$value", "null")
            assert fits(tokens, grammar, tokenizer, null)
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
    with grammars_of(tokenizer) as (made, tokens):
        grammar = grammar_of(made, tools=[tool()], response_format={"type": "json_object"})
        state = tokens.begin(grammar, [END], ids_of(content))
        assert END in state.mask().allowed.nonzero()
    split = find_formats(tokenizer).parts([tool()], "", either=True)
    assert split is not None
    found = parts_of(tokenizer, split(), ids_of(content))
    assert "".join(one.text for one in found if isinstance(one, ContentText)) == content


def test_formats_whose_calls_look_like_content_are_refused_beside_it() -> None:
    tokenizer, asked = tokenizer_of("llama", special=True), {"response_format": {"type": "json_object"}}
    with grammars_of(tokenizer) as (made, tokens):
        for tools in ([tool()], [tool(strict=True)]):
            with pytest.raises(Refused, match=r"response_format: expected none beside tools.*tool_choice") as raised:
                grammar_of(made, tools=tools, **asked)
            assert raised.value.param == "response_format"
        for choice in ("none", "required"):
            grammar = grammar_of(made, tools=[tool()], tool_choice=choice, **asked)
            assert fits(tokens, grammar, tokenizer, '{"name": "Ann"}') == (choice == "none")


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
def test_thoughts_are_free(end: str, is_thinking: bool, may_think: bool) -> None:
    tokenizer = byte_tokenizer("{{ messages }}<think></think>")
    with grammars_of(tokenizer) as (made, tokens):
        grammar = grammar_of(made, end, response_format={"type": "json_object"})
        assert (grammar.is_thinking, bool(grammar.thought_begin)) == (is_thinking, may_think)
        first = allowed(tokens.begin(grammar, [END]))
        assert ("{" in first, "<" in first, "END" in first) == (True, is_thinking or may_think, False)
        thought = "" if is_thinking else "<think>"
        if is_thinking or may_think:
            state = tokens.begin(grammar, [END], ids_of(f"{thought}Hm {{</think>\n\n"))
            assert allowed(state) == {"{"}


def test_harmony_thinks_in_a_channel_of_its_own() -> None:
    tokenizer = tokenizer_of("harmony", special=True)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|start|>", "<|end|>"]})
    thought = f"{CHANNELS.begin}Hm{CHANNELS.end}"
    with grammars_of(tokenizer) as (made, tokens):
        asked = {"tools": [tool()], "response_format": {"type": "json_object"}}
        for before in ("", thought):
            grammar = grammar_of(made, CHANNELS.end, **asked)
            for answer in ('<|channel|>final<|message|>{"a": 1}', f"<|channel|>{calls_head('weather')}"):
                tokens.begin(grammar, [END], tokenizer(before + answer)["input_ids"])
            with pytest.raises(GrammarError):
                tokens.begin(grammar, [END], tokenizer(before + "<|channel|>final<|message|>Hm")["input_ids"])


def calls_head(name: str) -> str:
    return f'commentary to=functions.{name} <|constrain|>json<|message|>{{"city": "'


# --- requests ---


@pytest.fixture(scope="module")
def running() -> Iterator[Served]:
    tokenizer = byte_tokenizer(HERMES.replace("</think>", ""))  # random weights would end no thought
    with served(Tiny(tokenizer), tokenizer=tokenizer, max_requests=40) as one:
        yield one


@pytest.fixture(scope="module")
def client(running: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=running.url + "/v1", api_key="none", max_retries=0, timeout=60) as one:
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

BAD: dict[str, tuple[dict[str, Any], str]] = {
    "kind": ({"response_format": {"type": "xml"}}, "response_format"),
    "no schema": ({"response_format": {"type": "json_schema", "json_schema": {"name": "f"}}}, "response_format"),
    "recursion without end": ({"response_format": json_schema(RECURSIVE)}, "response_format.json_schema.schema"),
    "itself": ({"response_format": json_schema({"$ref": "#"})}, "response_format.json_schema.schema"),
    "nothing fits": (
        {"response_format": json_schema({"type": "integer", "minimum": 3, "maximum": 1})},
        "response_format.json_schema.schema",
    ),
    "wide": ({"response_format": json_schema(WIDE)}, "response_format.json_schema.schema"),
    "long": ({"response_format": json_schema({"enum": ["x" * 200_000]})}, "response_format.json_schema.schema"),
    "look-around": ({"response_format": json_schema({"pattern": "(?=x)y"})}, "response_format.json_schema.schema"),
    "a pattern that is none": (
        {"response_format": json_schema({"type": "string", "pattern": "("})},
        "response_format.json_schema.schema",
    ),
    "another place": (
        {"response_format": json_schema({"$ref": "http://x/y"})},
        "response_format.json_schema.schema.$ref",
    ),
    "no type": ({"response_format": json_schema({"type": "text"})}, "response_format.json_schema.schema.type"),
    "strict is a text": ({"tools": [tool(strict="yes")]}, "tools[0].function.strict"),
    "strict and not served": (
        {"tools": [tool(strict=True, parameters={"type": "object", "not": {}})]},
        "tools[0].function.parameters",
    ),
    "no tools": ({"tool_choice": "required"}, "tool_choice"),
    "no such tool": (
        {"tools": [tool()], "tool_choice": {"type": "function", "function": {"name": "g"}}},
        "tool_choice",
    ),
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
    made = Grammars(byte_tokenizer(HERMES), AnswerFormats(FORMATS["hermes"]))
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


# --- work ---


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
        grammars.check_size(asked)
    assert raised.value.status == 400


TREE = {"anyOf": [{"type": "array", "items": {"$ref": "#/definitions/a~1b"}}, {"type": ["integer", "null"]}]}
SERVED: list[dict[str, Any]] = [
    chain(step="items", links=50),
    {"definitions": {"a/b": TREE}, "$ref": "#/definitions/a~1b"},
    {"definitions": {"a/b": TREE}, "type": "array", "items": {"$ref": "#/definitions/a%7E1b"}, "minItems": 3},
    {"properties": {"a": {"$ref": "#"}}, "required": ["a"]},  # a may be a text
    {"type": "object", "properties": {"a": {"$ref": "#"}, "b": {"multipleOf": 0.01}}, "required": ["b"]},
    {"allOf": [{"$ref": "#/$defs/a"}, {"multipleOf": 60}], "$defs": {"a": {"type": "integer", "multipleOf": 1000}}},
]


def test_schemas_that_end_make_grammars(tokens: GrammarTokens) -> None:
    for schema in SERVED:
        grammars.check_size(AskedGrammar(content=schema, field="response_format"))
        grammars.check(tokens, Grammar(Rules({}).alone(schema)))


def test_who_waits_for_its_turn_is_told_to_ask_again(monkeypatch: pytest.MonkeyPatch) -> None:
    free, began, made_once = threading.Event(), threading.Semaphore(0), Grammars._checked
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
        monkeypatch.setattr(Grammars, "_checked", slow)
        *late, waited, last = asyncio.run(ask_three(made))
        assert [one.status for one in late] == [400] * grammars.GRAMMAR_THREADS
        assert (waited.status, "retry-after" in waited.headers) == (503, True)
        assert last["text"].startswith("%llguidance")
        threads = [one for one in threading.enumerate() if one.name == "grammar"]
        assert all(one.daemon for one in threads)
        made.close()
        with pytest.raises(RuntimeError, match="shutdown"):
            made._tokens.result().begin(Grammar('start: "a"'), [])  # type: ignore[union-attr]


def test_a_grammar_is_compiled_once_and_answers_are_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    counted, llguidance = list[str](), pytest.importorskip("llguidance")
    made = llguidance.LLMatcher

    def count(tokens: Any, text: str, **options: Any) -> Any:
        counted.append(text)
        return made(tokens, text, **options)

    monkeypatch.setattr(llguidance, "LLMatcher", count)
    tokens, grammar = GrammarTokens(BYTES), Grammar('start: "ab" | "cd"')
    states = [tokens.begin(grammar, [END]) for _ in range(3)]
    states[0].advance(*ids_of("a"))
    states[1].advance(*ids_of("c"))
    assert [allowed(state) for state in states] == [{"b"}, {"d"}, {"a", "c"}]
    assert allowed(tokens.begin(grammar, [END])) == {"a", "c"}
    assert len(counted) == 1
    tokens.close()


def test_an_answer_that_nothing_can_follow_is_an_error() -> None:
    tokens = GrammarTokens(BYTES)
    state = tokens.begin(Grammar('start: "a" "b"', "response_format"), [END])
    state.matcher = SimpleNamespace(
        is_stopped=lambda: False, is_accepting=lambda: False, is_error=lambda: False, compute_bitmask=lambda: bytes(40)
    )
    with pytest.raises(GrammarError, match="response_format: expected an answer that can go on"):
        state._mask()
    tokens.close()


def test_rows_wait_for_masks_together(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    made, free = GrammarState._mask, threading.Event()

    def masked(state: GrammarState) -> TokenMask:
        assert state.grammar.field != "slow" or free.wait(60)
        return made(state)

    monkeypatch.setattr(GrammarState, "_mask", masked)
    slow = [engine.submit([5, 6, i], max_new_tokens=9, grammar=Grammar("start: /[a-z]/", "slow")) for i in range(8)]
    while len(engine.scheduler.rows) < 8:
        time.sleep(0.001)
    waits = []
    for _ in range(3):
        start = time.perf_counter()
        engine.scheduler._draw_held()
        waits.append(time.perf_counter() - start)
    free.set()
    assert [len(text_of(one)) for one in slow] == [1] * 8
    assert min(waits) < 0.05
