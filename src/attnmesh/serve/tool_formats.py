"""Formats in which models write calls of tools: where a call begins, and how its end, name and arguments are read.

A format is one entry of `FORMATS_BY_NAME`. Its reader gets the text from a beginning on, yields each call once it is
whole, and raises `NoMatch` on a text that is no call.
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial as partial_of
from typing import Any, NamedTuple

from attnmesh.serve.growing_text import GrowingText, NoMatch, Reader, check_json, check_object


class ContentText(NamedTuple):
    """Text of an answer."""

    text: str


class ReasoningText(NamedTuple):
    """Text that a model thinks before it answers."""

    text: str


@dataclass(frozen=True)
class ToolCall:
    """A call: `arguments` is an object of JSON. A format may name the call's id."""

    name: str
    arguments: str
    id: str = ""
    index: int = 0


def read_text(text: GrowingText, is_thought: bool, *ends: str) -> Reader[None]:
    """Read what a model thinks, or its content, up to a mark or the end."""
    text.is_thought = is_thought
    kind = ReasoningText if is_thought else ContentText
    for piece in text.pieces(*ends):
        yield piece if piece is None else kind(piece)
    text.is_thought = False


Tools = Mapping[str, Mapping[str, Any]]
"""The properties of each tool's parameters."""

CALL_KEYS = frozenset(("name", "arguments", "parameters", "id", "type", "tool_name", "tool_call_id"))
"""Names in objects of JSON that are calls."""


def call_object(text: GrowingText) -> Reader[ToolCall]:
    """Read an object of JSON that has the name and the arguments of a call."""
    members = yield from text.members(CALL_KEYS)
    names = [members[key] for key in ("name", "tool_name") if key in members]
    name = text_in(names[0]) if names else ""
    if not name:
        raise NoMatch
    arguments = members.get("arguments", members.get("parameters", "{}"))
    check_object(arguments)
    return ToolCall(name, arguments, text_in(members.get("id", '""')))


def text_in(value: str) -> str:
    """Return the text that a value of JSON is; empty if it is another. Raise if the value is none."""
    check_json(value)
    return str(json.loads(value)) if value.startswith('"') else ""


def call_list(text: GrowingText) -> Reader[None]:
    """Read a list of objects that are calls."""
    yield from text.expect("[")
    while True:
        yield from text.space()
        yield (yield from call_object(text))
        yield from text.space()
        if (yield from text.expect(",", "]")) == "]":
            return


def typed_value(tools: Tools, name: str, key: str, value: str) -> str:
    """Return an argument, written without quotes, as JSON: null, or text, where the tool takes it, else as it is.

    >>> typed_value({"f": {"a": {"type": "string"}}}, "f", "a", "12"), typed_value({}, "f", "a", "1e999")
    ('"12"', '1e999')
    """
    types = types_of(tools.get(name, {}).get(key))
    if "string" in types:
        return value if "null" in types and value == "null" else quoted(value)
    try:
        check_json(value)
    except NoMatch:
        return quoted(value)
    return value.strip()


def quoted(text: str) -> str:
    """Return a text as JSON."""
    return json.dumps(text, ensure_ascii=False)


def types_of(schema: Any) -> set[str]:
    """Return the types that a schema names.

    >>> sorted(types_of({"anyOf": [{"type": "string"}, {"type": "null"}], "default": None}))
    ['null', 'string']
    """
    types = flat(schema).get("type", []) if isinstance(schema, dict) else []
    return {types} if isinstance(types, str) else {*types}


def flat(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a schema with a list of types in place of alternatives that name a type each, and nothing else."""
    several = schema.get("anyOf")
    if not isinstance(several, list) or "type" in schema or not all(map(is_type_alone, several)):
        return schema
    return {name: value for name, value in schema.items() if name != "anyOf"} | {
        "type": [plain["type"] for plain in several]
    }


def is_type_alone(schema: Any) -> bool:
    """Return whether a schema names one type, and holds a value to nothing else."""
    named = isinstance(schema, dict) and isinstance(schema.get("type"), str)
    return named and schema.keys() <= {"type", "title", "description"}


def write_arguments(arguments: Mapping[str, str]) -> str:
    """Return arguments, each of which is JSON, as an object."""
    return f"{{{', '.join(f'{quoted(key)}: {value}' for key, value in arguments.items())}}}"


# --- readers ---


def read_object_between(begin: str, end: str, text: GrowingText, _: Tools) -> Reader[None]:
    """Read one object between marks."""
    yield from text.expect(begin)
    yield from text.space()
    call = yield from call_object(text)
    yield from text.close(end)
    yield call


def read_list_between(begin: str, end: str, text: GrowingText, _: Tools) -> Reader[None]:
    """Read a list of objects between marks."""
    yield from text.expect(begin)
    yield from text.space()
    yield from call_list(text)
    yield from text.close(end)


def read_llama(text: GrowingText, tools: Tools) -> Reader[None]:
    """Read objects after a tag, or the first ones of an answer if they name tools, with semicolons between them."""
    tagged = (yield from text.has("<|python_tag|>")) or (yield from text.has("<|python_start|>"))
    while True:
        yield from text.space()
        call = yield from call_object(text)
        if not tagged and call.name not in tools:
            raise NoMatch
        yield call
        yield from text.space()
        if not (yield from text.has(";")):
            break
    yield from text.has("<|python_end|>")


def read_mistral(text: GrowingText, _: Tools) -> Reader[None]:
    """Read a list of objects, or a name and its arguments."""
    yield from text.expect("[TOOL_CALLS]")
    yield from text.space()
    if text.text[text.at : text.at + 1] in ("[", ""):
        yield from call_list(text)
        return
    name = yield from text.word()
    id = ""
    if (yield from text.has("[CALL_ID]")):
        id = yield from text.word()
    yield from text.has("[ARGS]")
    yield from text.space()
    arguments = yield from text.json_text()
    check_object(arguments)
    yield ToolCall(name, arguments, id)


BAR = "\uff5c"
"""The wide bar of DeepSeek's marks."""


def read_deepseek(text: GrowingText, _: Tools) -> Reader[None]:
    """Read names with their arguments, in a block of code after a type, or alone."""
    yield from text.expect(deepseek("calls▁begin"))
    while True:
        yield from text.space()
        yield from text.expect(deepseek("call▁begin"))
        name = yield from text.word()
        yield from text.expect(deepseek("sep"))
        yield from text.space()
        start = text.at
        is_code = name == "function" and not (yield from text.has("{"))
        text.at = start
        if is_code:
            name = yield from text.word()
            yield from text.space()
            yield from text.expect("```json")
            yield from text.space()
        arguments = yield from text.json_text()
        check_object(arguments)
        yield from text.space()
        if is_code:
            yield from text.expect("```")
        yield from text.close(deepseek("call▁end"))
        yield ToolCall(name, arguments)
        yield from text.space()
        if (yield from text.has(deepseek("calls▁end"))):
            return


def deepseek(name: str) -> str:
    """Return a mark of DeepSeek's."""
    return f"<{BAR}tool▁{name}{BAR}>"


def read_kimi(text: GrowingText, _: Tools) -> Reader[None]:
    """Read ids, which hold the names, with their arguments."""
    yield from text.expect("<|tool_calls_section_begin|>")
    while True:
        yield from text.space()
        yield from text.expect("<|tool_call_begin|>")
        yield from text.space()
        id = yield from text.word()
        yield from text.space()
        yield from text.expect("<|tool_call_argument_begin|>")
        yield from text.space()
        arguments = yield from text.json_text()
        check_object(arguments)
        yield from text.close("<|tool_call_end|>")
        yield ToolCall(id.removeprefix("functions.").rsplit(":", 1)[0], arguments, id)
        yield from text.space()
        if (yield from text.has("<|tool_calls_section_end|>")):
            return


def read_glm(text: GrowingText, tools: Tools) -> Reader[None]:
    """Read a name, and pairs of keys and values."""
    yield from text.expect("<tool_call>")
    yield from text.space()
    name = yield from text.word()
    arguments = dict[str, str]()
    while True:
        yield from text.space()
        if (yield from text.expect("<arg_key>", "</tool_call>")) == "</tool_call>":
            yield ToolCall(name, write_arguments(arguments))
            return
        key = (yield from text.until("</arg_key>")).strip()
        yield from text.space()
        yield from text.expect("<arg_value>")
        arguments[key] = typed_value(tools, name, key, (yield from text.until("</arg_value>")))


def read_qwen_coder(text: GrowingText, tools: Tools) -> Reader[None]:
    """Read a function's mark, and those of its parameters, whose values stand on lines of their own."""
    yield from text.expect("<tool_call>")
    yield from text.space()
    yield from text.expect("<function=")
    name = yield from text.word()
    arguments = dict[str, str]()
    yield from text.expect(">")
    while True:
        yield from text.space()
        if (yield from text.expect("<parameter=", "</function>")) == "</function>":
            break
        key = yield from text.until(">")
        value = yield from text.until("</parameter>")
        arguments[key] = typed_value(tools, name, key, value.removeprefix("\n").removesuffix("\n"))
    yield from text.close("</tool_call>")
    yield ToolCall(name, write_arguments(arguments))


def read_invokes(begin: str, end: str, space: str, text: GrowingText, tools: Tools) -> Reader[None]:
    """Read marks with a name each, in a namespace, of calls and their parameters."""
    invoke, parameter = f'<{space}invoke name="', f'<{space}parameter name="'
    yield from text.expect(begin)
    yield from text.space()
    yield from text.expect(invoke)
    while True:
        name = yield from text.word()
        arguments = dict[str, str]()
        yield from text.expect('">')
        while True:
            yield from text.space()
            if (yield from text.expect(parameter, f"</{space}invoke>")) != parameter:
                break
            key = yield from text.until('"')
            kind = yield from text.until(">")
            value = yield from text.until(f"</{space}parameter>")
            arguments[key] = quoted(value) if 'string="true"' in kind else typed_value(tools, name, key, value)
        yield ToolCall(name, write_arguments(arguments))
        yield from text.space()
        if (yield from text.expect(invoke, end)) == end:
            return


QUOTES = {"<|tool_call>": ("<tool_call|>", '<|"|>'), "<start_function_call>": ("<end_function_call>", "<escape>")}
"""Marks at which calls of Gemma begin and end, and the mark at both ends of its strings."""

UNQUOTED_NAME = re.compile(r"([{,]\s*)([^\s{}\[\],:\"]+)\s*:")
"""A name in Gemma's objects, which has no quotes."""


def read_gemma(text: GrowingText, _: Tools) -> Reader[None]:
    """Read a name, and an object whose names have no quotes and whose strings have marks for them."""
    end, quote = QUOTES[(yield from text.expect(*QUOTES))]
    yield from text.expect("call:")
    name = yield from text.word()
    inside = (yield from text.until(end)).split(quote)
    parts = [quoted(part) if place % 2 else part for place, part in enumerate(inside)]
    parts[::2] = [UNQUOTED_NAME.sub(r'\1"\2":', part) for part in parts[::2]]
    arguments = "".join(parts)
    check_object(arguments)
    yield ToolCall(name, arguments)


HARMONY = ("<|channel|>", "<|start|>")
"""Marks at which messages within an answer begin: the first one's beginning is in the prompt."""

HARMONY_ENDS = ("<|end|>", "<|call|>", "<|return|>")


def read_harmony(text: GrowingText, tools: Tools) -> Reader[None]:
    """Read a message within an answer: its header names a channel, and a recipient if it is a call."""
    yield from text.expect(*HARMONY)
    header = yield from text.until("<|message|>")
    to = re.search(r"to=([\w.:/-]+)", header)
    if to is None:
        yield from read_text(text, "analysis" in header, *HARMONY_ENDS)
        return
    if not tools:
        raise NoMatch
    yield from text.space()
    arguments = yield from text.json_text()
    check_object(arguments)
    yield from text.space()
    if text.at < len(text.text):
        yield from text.expect(*HARMONY_ENDS)
    yield ToolCall(to[1].removeprefix("functions."), arguments)


# --- formats ---

DSML = f"{BAR}DSML{BAR}"
"""The namespace of DeepSeek's later marks."""


@dataclass(frozen=True)
class ToolFormat:
    """How models of some families write calls."""

    begins: tuple[str, ...]
    """Marks at which calls may begin."""
    read: Callable[[GrowingText, Tools], Reader[None]]
    in_template: tuple[str, ...]
    """Texts that a chat template of these families has, all of them."""
    is_bare: bool = False
    """An answer may also begin with an object of JSON that is a call."""
    rescans: bool = True
    """A call may begin within a text that began like one."""
    has_thoughts: bool = False
    """The format also has marks of content, and of what a model thinks."""


def between(read: Callable[..., Reader[None]], begin: str, end: str) -> ToolFormat:
    """Return a format whose calls stand between two marks."""
    return ToolFormat((begin,), partial_of(read, begin, end), (begin,))


def invokes(begin: str, end: str, space: str) -> ToolFormat:
    """Return a format whose calls have marks in a namespace."""
    return ToolFormat((begin,), partial_of(read_invokes, begin, end, space), (begin,))


FORMATS_BY_NAME: dict[str, ToolFormat] = {
    "harmony": ToolFormat(HARMONY, read_harmony, ("<|channel|>", "<|message|>"), rescans=False, has_thoughts=True),
    "kimi": ToolFormat(("<|tool_calls_section_begin|>",), read_kimi, ("<|tool_calls_section_begin|>",)),
    "deepseek": ToolFormat((deepseek("calls▁begin"),), read_deepseek, (deepseek("calls▁begin"),)),
    "deepseek_v32": invokes(f"<{DSML}function_calls>", f"</{DSML}function_calls>", DSML),
    "minimax": invokes("<minimax:tool_call>", "</minimax:tool_call>", ""),
    "glm": ToolFormat(("<tool_call>",), read_glm, ("<arg_key>",)),
    "qwen_coder": ToolFormat(("<tool_call>",), read_qwen_coder, ("<function=",)),
    "mistral": ToolFormat(("[TOOL_CALLS]",), read_mistral, ("[TOOL_CALLS]",)),
    "gemma": ToolFormat(("<|tool_call>",), read_gemma, ("<|tool_call>call:",)),
    "function_gemma": ToolFormat(("<start_function_call>",), read_gemma, ("<start_function_call>",)),
    "command": between(read_list_between, "<|START_ACTION|>", "<|END_ACTION|>"),
    "nemotron": between(read_list_between, "<TOOLCALL>", "</TOOLCALL>"),
    "jamba": between(read_list_between, "<tool_calls>", "</tool_calls>"),
    "granite": between(read_list_between, "<|tool_call|>", "<|/tool_call|>"),
    "hermes": between(read_object_between, "<tool_call>", "</tool_call>"),
    "llama": ToolFormat(("<|python_tag|>", "<|python_start|>"), read_llama, ("header_", '"parameters"'), is_bare=True),
}
"""Formats by name. Of those that a chat template has the texts of, the first one counts."""


def find_format(template: str) -> ToolFormat | None:
    """Return the format of the calls that a chat template writes; None if none is known.

    >>> find_format("{{ '<tool_call>' + (call | tojson) }}") is FORMATS_BY_NAME["hermes"], find_format("{{ messages }}")
    (True, None)
    """
    shown = (format for format in FORMATS_BY_NAME.values() if all(text in template for text in format.in_template))
    return next(shown, None)
