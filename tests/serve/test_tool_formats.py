"""Calls of tools in the formats of models: the same parts whole and cut anywhere, and no text lost that is no call."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnmesh.serve.answer_parts import AnswerPart, AnswerParts, find_formats
from attnmesh.serve.tool_formats import FORMATS_BY_NAME, ContentText, ReasoningText, ToolCall, deepseek, find_format
from tests.support.serving.fake_engine import byte_tokenizer
from tests.support.serving.tool_calls import PAIRED, tokenizer_of
from tests.support.serving.tool_calls import parts_of as parts_of_tokens

TOOLS: dict[str, dict[str, Any]] = {
    "weather": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "code": {"type": ["string", "null"]},
        "note": {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None},
        "hours": {"type": ["integer", "null"]},
    },
    "now": {},
}
NASTY = 'é "x" </tool_call> }] <end|> \n\\'
D = deepseek
DSML = "\uff5cDSML\uff5c"


def of(city: str = "Paris", days: int = 3) -> str:
    return json.dumps({"city": city, "days": days}, ensure_ascii=False)


def named(arguments: str, name: str = "weather", key: str = "arguments") -> str:
    return f'{{"name": "{name}", "{key}": {arguments}}}'


Call = tuple[str, dict[str, Any]]
ONE: list[Call] = [("weather", {"city": "Paris", "days": 3})]
TWO: list[Call] = [*ONE, ("now", {})]
ODD: list[Call] = [("weather", {"city": NASTY, "days": -1})]

WRITTEN: dict[tuple[str, str], tuple[str, list[Call]]] = {
    ("hermes", "one"): (f"<tool_call>\n{named(of())}\n</tool_call>", ONE),
    ("hermes", "two"): (f"<tool_call>{named(of())}</tool_call>\n<tool_call>\n{named('{}', 'now')}\n</tool_call>", TWO),
    ("hermes", "odd"): (f"<tool_call>\n{named(of(NASTY, -1))}\n</tool_call>", ODD),
    ("hermes", "arguments first"): (f'<tool_call>{{"arguments": {of()}, "name": "weather"}}</tool_call>', ONE),
    ("hermes", "no end"): (f"<tool_call>\n{named(of())}", ONE),
    ("hermes", "no arguments"): ('<tool_call>{"name": "now"}</tool_call>', TWO[1:]),
    ("llama", "bare"): (named(of(), key="parameters"), ONE),
    ("llama", "two"): (f"{named(of(), key='parameters')}; {named('{}', 'now', 'parameters')}", TWO),
    ("llama", "tag"): (f"<|python_tag|>{named(of(NASTY, -1), key='parameters')}", ODD),
    ("llama", "start"): (f"<|python_start|>{named(of(), key='parameters')}<|python_end|>", ONE),
    ("llama", "type"): (f'{{"type": "function", {named(of(), key="parameters")[1:]}', ONE),
    ("mistral", "list"): (f"[TOOL_CALLS] [{named(of())}, {named('{}', 'now')}]", TWO),
    ("mistral", "odd"): (f"[TOOL_CALLS][{named(of(NASTY, -1))}]", ODD),
    ("mistral", "name"): (f"[TOOL_CALLS]weather[ARGS]{of()}[TOOL_CALLS]now[ARGS]{{}}", TWO),
    ("mistral", "id"): (f"[TOOL_CALLS]weather[CALL_ID]abc123XYZ[ARGS]{of(NASTY, -1)}", ODD),
    ("mistral", "no mark"): (f"[TOOL_CALLS]weather{of()}", ONE),
    ("harmony", "one"): (f"<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{of()}<|call|>", ONE),
    ("harmony", "no end"): (f"<|channel|>commentary to=functions.weather json<|message|>{of(NASTY, -1)}", ODD),
    ("harmony", "role"): (
        f"<|start|>assistant to=functions.weather<|channel|>commentary json<|message|>{of()}<|call|>"
        "<|start|>assistant<|channel|>commentary to=functions.now<|message|>{}<|call|>",
        TWO,
    ),
    ("glm", "two"): (
        "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n"
        "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>\n<tool_call>now\n</tool_call>",
        TWO,
    ),
    ("glm", "narrow"): (
        "<tool_call>weather<arg_key>city</arg_key><arg_value>Paris</arg_value>"
        "<arg_key>days</arg_key><arg_value>3</arg_value></tool_call>",
        ONE,
    ),
    ("qwen_coder", "two"): (
        "<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
        "</function>\n</tool_call>\n<tool_call>\n<function=now>\n</function>\n</tool_call>",
        TWO,
    ),
    ("minimax", "two"): (
        '<minimax:tool_call>\n<invoke name="weather">\n<parameter name="city">Paris</parameter>\n'
        '<parameter name="days">3</parameter>\n</invoke>\n<invoke name="now">\n</invoke>\n</minimax:tool_call>',
        TWO,
    ),
    ("deepseek_v32", "one"): (
        f'<{DSML}function_calls>\n<{DSML}invoke name="weather">\n<{DSML}parameter name="city" string="true">Paris'
        f'</{DSML}parameter>\n<{DSML}parameter name="days" string="false">3</{DSML}parameter>\n</{DSML}invoke>\n'
        f"</{DSML}function_calls>",
        ONE,
    ),
    ("deepseek", "block"): (
        f"{D('calls▁begin')}{D('call▁begin')}function{D('sep')}weather\n```json\n{of()}\n```{D('call▁end')}\n"
        f"{D('call▁begin')}function{D('sep')}now\n```json\n{{}}\n```{D('call▁end')}{D('calls▁end')}",
        TWO,
    ),
    ("deepseek", "plain"): (
        f"{D('calls▁begin')}{D('call▁begin')}weather{D('sep')}{of(NASTY, -1)}{D('call▁end')}{D('calls▁end')}",
        ODD,
    ),
    ("kimi", "two"): (
        f"<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>{of()}"
        "<|tool_call_end|><|tool_call_begin|>functions.now:1<|tool_call_argument_begin|>{}<|tool_call_end|>"
        "<|tool_calls_section_end|>",
        TWO,
    ),
    ("gemma", "two"): (
        '<|tool_call>call:weather{city:<|"|>Paris<|"|>,days:3}<tool_call|><|tool_call>call:now{}<tool_call|>',
        TWO,
    ),
    ("gemma", "deep"): (
        '<|tool_call>call:f{a:[<|"|>b:{c:1<|"|>,true,{d.e:null,x:-1.5}],y:{}}<tool_call|>',
        [("f", {"a": ["b:{c:1", True, {"d.e": None, "x": -1.5}], "y": {}})],
    ),
    ("function_gemma", "one"): (
        f"<start_function_call>call:weather{{city:<escape>{NASTY}<escape>,days:-1}}<end_function_call>",
        ODD,
    ),
    ("command", "one"): (
        f'<|START_ACTION|>[\n {{"tool_call_id": "0", "tool_name": "weather", "parameters": {of()}}}\n]<|END_ACTION|>',
        ONE,
    ),
    ("nemotron", "one"): (f"<TOOLCALL>[{named(of(NASTY, -1))}]</TOOLCALL>", ODD),
    ("jamba", "two"): (f"<tool_calls>[\n{named(of())},\n{named('{}', 'now')}\n]</tool_calls>", TWO),
    ("granite", "one"): (f"<|tool_call|>[{named(of())}]", ONE),
    ("granite", "end"): (f"<|tool_call|>[{named(of())}]<|/tool_call|>", ONE),
}
"""Calls as the formats of models have them, and what they are."""

CASES = [pytest.param(*name, id=" ".join(name)) for name in WRITTEN]


def parts_of(name: str, pieces: list[str], **options: Any) -> tuple[str, str, list[Call]]:
    """Return the content, the thoughts and the calls of an answer that comes in pieces."""
    split = AnswerParts(FORMATS_BY_NAME[name], TOOLS, **options)
    return told_apart([part for piece in pieces for part in split.add(piece)] + split.end())


def told_apart(found: list[AnswerPart]) -> tuple[str, str, list[Call]]:
    calls = [part for part in found if isinstance(part, ToolCall)]
    assert [one.index for one in calls] == [*range(len(calls))]
    assert len({one.id for one in calls}) == len(calls)
    content, thought = (
        "".join(part.text for part in found if isinstance(part, kind)) for kind in (ContentText, ReasoningText)
    )
    return content, thought, [(one.name, json.loads(one.arguments)) for one in calls]


def cuts(text: str) -> list[list[str]]:
    """Return a text in two pieces in every way, and in pieces of one character."""
    return [[text[:place], text[place:]] for place in range(len(text) + 1)] + [[*text]]


@pytest.mark.parametrize(("name", "case"), CASES)
def test_calls_are_read_wherever_the_stream_is_cut(name: str, case: str) -> None:
    text, calls = WRITTEN[name, case]
    for pieces in cuts(text):
        assert parts_of(name, pieces) == ("", "", calls), pieces
    if name != "harmony" and case not in ("bare", "two", "type", "no end"):
        for pieces in cuts(f"I look.\n\n{text}\n"):
            assert parts_of(name, pieces) == ("I look.", "", calls), pieces


@pytest.mark.parametrize(("name", "case"), CASES)
def test_a_call_that_is_cut_short_or_spoilt_stays_text(name: str, case: str) -> None:
    text, calls = WRITTEN[name, case]
    for end in range(len(text)):
        whole = text[:end]
        content, thought, found = parts_of(name, [whole])
        assert thought == ""
        assert found == calls[: len(found)]
        if not found:
            assert content == whole
        if end % 7 == 0:
            assert (content, thought, found) == parts_of(name, [*whole])
    if '"days": 3' in text:
        spoilt = text.replace('"days": 3', '"days": 3 4')
        for pieces in ([spoilt], [*spoilt]):
            content, _, found = parts_of(name, pieces)
            assert content == spoilt or found == TWO[1:]
            assert '"days": 3 4' in content


@pytest.mark.parametrize("name", FORMATS_BY_NAME)
@given(st.data())
def test_no_text_is_lost_that_is_no_call(name: str, data: st.DataObject) -> None:
    marks = [
        *FORMATS_BY_NAME[name].begins,
        *FORMATS_BY_NAME[name].begins,
        "{é",  # neither objects nor names are whole: an empty object and a name make calls
        '{"name": ',
        '"f',
        "}",
        "[",
        "<",
        " ",
        "\n",
        "é",
        "a",
    ]
    text = "".join(data.draw(st.lists(st.sampled_from(marks), max_size=12)))
    content, _, calls = parts_of(name, [text])
    assert not calls
    assert content == text
    assert parts_of(name, [*text]) == (content, "", calls)


@pytest.mark.parametrize("name", [name for name in FORMATS_BY_NAME if name != "harmony"])
def test_a_call_is_found_after_a_mark_that_is_none(name: str) -> None:
    text, calls = WRITTEN[("llama", "tag") if name == "llama" else next(key for key in WRITTEN if key[0] == name)]
    mark = FORMATS_BY_NAME[name].begins[0]
    for pieces in ([f"{mark}?! {text}"], [*f"{mark}?! {text}"]):
        content, _, found = parts_of(name, pieces)
        assert (content, found) == (f"{mark}?!", calls)


def test_arguments_are_written_as_the_model_wrote_them() -> None:
    """Python would change numbers, and join names that are alike."""
    for value in ("1e999", "1.10", "9" * 4400, '{"b": 1, "b": 2}', "[" * 70 + "]" * 70, '"\\ud800"'):
        for text in (
            f"<tool_call>weather<arg_key>days</arg_key><arg_value>{value}</arg_value></tool_call>",
            f'<tool_call>{{"name": "weather", "arguments": {{"days": {value}}}}}</tool_call>',
        ):
            split = AnswerParts(FORMATS_BY_NAME["glm" if "arg_key" in text else "hermes"], TOOLS)
            (call,) = split.add(text) + split.end()
            assert isinstance(call, ToolCall)
            assert call.arguments == f'{{"days": {value}}}'


def test_an_object_that_calls_no_tool_stays_text() -> None:
    for text in (
        '{"name": "Ann", "parameters": {}}',
        '{"a": 1}',
        "{}",
        '  {"name"',
        '{"name": "weather", "parameters": 1}',
    ):
        assert parts_of("llama", [*text]) == (text, "", [])
    text = f"I say {named(of(), key='parameters')}"
    assert parts_of("llama", [text])[0] == text


def test_messages_of_harmony_are_thoughts_content_and_calls() -> None:
    text = (
        "<|channel|>analysis<|message|>Hm, é.<|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
        f"<|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{of()}"
    )
    for pieces in cuts(text):
        assert parts_of("harmony", pieces) == ("I look.", "Hm, é.", ONE)
    final = "<|channel|>final<|message|>It is <b>warm</b>."
    for pieces in cuts(final):
        assert parts_of("harmony", pieces) == ("It is <b>warm</b>.", "", [])


def test_long_texts_that_are_no_calls_take_little_time() -> None:
    """A text in which each mark might begin a call is looked through once."""
    for text in ('<tool_call>{"name": "' * 2_000, "<tool_call>" * 2_000, '<tool_call>{"arguments": ' * 2_000 + "x"):
        assert parts_of("hermes", [text])[0] == text
        split = AnswerParts(FORMATS_BY_NAME["hermes"], TOOLS)
        found = [part for first in range(0, len(text), 50) for part in split.add(text[first : first + 50])]
        assert "".join(part.text for part in [*found, *split.end()] if isinstance(part, ContentText)) == text


@pytest.mark.parametrize("name", PAIRED)
def test_arguments_without_quotes_have_the_types_of_the_tool(name: str) -> None:
    written: dict[str, dict[str, Any]] = {
        "city": {"null": "null", "3": "3"},
        "code": {"null": None, "nulls": "nulls", "Null": "Null", "5": "5", "true": "true", '"null"': '"null"'},
        "note": {"null": None, "5": "5", "[1]": "[1]", "": ""},
        "hours": {"null": None, "5": 5, "five": "five"},
        "other": {"null": None, "5": 5, "five": "five"},
    }
    for key, values in written.items():
        text = PAIRED[name].replace(">a<", f">{key}<").replace("=a>", f"={key}>").replace('name="a"', f'name="{key}"')
        for string in ("true", "false") if name == "deepseek_v32" else ("",):
            for value, wanted in values.items():
                wanted = value if string == "true" else wanted
                whole = text.replace('string="true"', f'string="{string}"').replace("$value", value)
                assert parts_of(name, [whole])[2] == [("weather", {key: wanted})], whole


ALONE = [
    ("glm", "<tool_call>now</tool_call>", "<tool_call>now</tool_call>"),
    (
        "qwen_coder",
        "<tool_call><function=now></function></tool_call>",
        "<tool_call><function=now></function></tool_call>",
    ),
    ("mistral", "[TOOL_CALLS]now[ARGS]{}", "[TOOL_CALLS]now[ARGS]{}"),
    ("kimi", *[WRITTEN["kimi", "two"][0].replace(of(), "{}").replace("functions.weather", "functions.now")] * 2),
    ("deepseek", *[WRITTEN["deepseek", "plain"][0].replace(of(NASTY, -1), "{}").replace("weather", "now")] * 2),
]
"""Calls that stand whole in a string of JSON, as they stand there and alone."""


@pytest.mark.parametrize(("name", "quoted", "alone"), ALONE)
def test_content_that_quotes_a_call_is_no_call_where_an_answer_is_either(name: str, quoted: str, alone: str) -> None:
    content = f'{{"a": "{quoted}"}}'
    json.loads(content)
    for pieces in cuts(content):
        assert parts_of(name, pieces, either=True) == (content, "", []), pieces
    for pieces in cuts(f"\n{alone}\n"):
        text, _, calls = parts_of(name, pieces, either=True)
        assert (text, {call for call, _ in calls}) == ("", {"now"}), pieces


OF_TOKENS = [
    (name, case) for name, case in WRITTEN if name in ("mistral", "harmony", "kimi", "deepseek", "hermes", "glm")
]


@pytest.mark.parametrize(("name", "case"), OF_TOKENS)
def test_marks_that_are_special_tokens_are_no_marks_in_letters(name: str, case: str) -> None:
    """A model that quotes a call in ordinary tokens, as a user wrote it, makes none."""
    marks = ("<|start|>", "<|call|>", "<|end|>", "[CALL_ID]")
    tokenizer, (text, calls) = tokenizer_of(name, special=True, more=marks), WRITTEN[name, case]
    tools = [{"function": {"name": name, "parameters": {"properties": one}}} for name, one in TOOLS.items()]
    split = find_formats(tokenizer, name).parts(tools, "")
    assert split is not None

    def told(ids: list[int]) -> tuple[str, str, list[Call]]:
        return told_apart(parts_of_tokens(tokenizer, split(), ids))

    spelled = byte_tokenizer()(f"é {text} 😀")["input_ids"]
    assert told(spelled) == (f"é {text} 😀", "", [])
    for before in ("", "é\n") if name != "harmony" else ("",):
        real = tokenizer(before + text)["input_ids"]
        assert len(real) < len(before.encode() + text.encode())
        assert told(real) == (before.strip(), "", calls)
        if name != "harmony":
            assert told([*spelled, *real]) == (f"é {text} 😀{before.strip()}", "", calls)


TEMPLATES = {
    "hermes": "{{ '<tool_call>\\n{\"name\": ' }}",
    "glm": "<tool_call>{{ name }}\n<arg_key>",
    "qwen_coder": "<tool_call>\n<function=",
    "llama": """{{ '<|start_header_id|>' }} {"name": function name, "parameters": ...}""",
    "mistral": "[TOOL_CALLS] [",
    "harmony": "<|start|>assistant<|channel|>final<|message|>",
    "gemma": "{{ '<|tool_call>call:' + name }}",
}


def test_the_format_is_found_from_the_template() -> None:
    for name, template in TEMPLATES.items():
        assert find_format(template) is FORMATS_BY_NAME[name]
    assert find_format("<|im_start|>{{ tools }}") is None
