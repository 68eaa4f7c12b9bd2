"""Grammars of calls of tools: each family's own marks, with the names and the arguments that a request allows."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from attnmesh.serve.refused import Refused
from attnmesh.serve.schema_limits import DEFINITIONS
from attnmesh.serve.schema_patterns import write_patterns
from attnmesh.serve.tool_formats import DSML, deepseek, flat, types_of

SPACE_RULE = r"(?: |\n[ \t]{0,32})"
"""Space within JSON: one, or a line with its indent. More of it would let an answer go on without saying anything."""

TEXT = "(?s:.*)"
"""Any characters, as a regular expression."""

COMBINED = ("anyOf", "oneOf", "allOf", "$ref", "not", "if", "patternProperties")
"""Keywords beside which properties are not all that a schema says of names."""

TEXT_KEYWORDS = ("pattern", "format", "minLength", "maxLength", *COMBINED)
"""Keywords that say something of a text, which is not served where texts have no quotes."""


PAIR_KEYWORDS = (
    "properties",
    "required",
    "type",
    "additionalProperties",
    "title",
    "description",
    "$schema",
    *DEFINITIONS,
)
"""Keywords of parameters that a model writes one after another, as names and values."""

KEY = re.compile(r'[^\s<>"]([^<>"\n]*[^\s<>"])?')
"""Names of parameters that are written one after another: a bracket or a quote ends a name."""


@dataclass(frozen=True)
class CallShape:
    """How calls are written: `$name` and `$arguments` stand for those of a call, `$index` for its number."""

    call: str
    begin: str = ""
    join: str = ""
    end: str = ""
    pair: str = ""
    """How a parameter is written, as `$key` and `$value`, where arguments are no JSON. `$quoted` tells texts."""
    in_template: str = ""
    """A text that the chat templates of models with this shape have."""
    is_single: bool = False
    """An answer has one call at most."""
    content: str = "$content"
    """How an answer without calls is written."""


NAMED_CALL = '{"name": "$name", "arguments": $arguments}'


def list_between(begin: str, end: str, *, in_template: str = "") -> CallShape:
    """Return the shape of a list of objects between marks."""
    return CallShape(NAMED_CALL, begin=f"{begin}[", join=", ", end=f"]{end}", in_template=in_template)


SEP = deepseek("sep")
SECTION_MARKS = (deepseek("calls▁begin"), deepseek("calls▁end"))
CALL_MARKS = (deepseek("call▁begin"), deepseek("call▁end"))

CALL_SHAPES: dict[str, tuple[CallShape, ...]] = {
    "harmony": (
        CallShape(
            "<|channel|>commentary to=functions.$name <|constrain|>json<|message|>$arguments",
            is_single=True,
            content="<|channel|>final<|message|>$content",
        ),
    ),
    "kimi": (
        CallShape(
            "<|tool_call_begin|>functions.$name:$index<|tool_call_argument_begin|>$arguments<|tool_call_end|>",
            begin="<|tool_calls_section_begin|>",
            end="<|tool_calls_section_end|>",
        ),
    ),
    "deepseek": (
        CallShape(
            f"{CALL_MARKS[0]}function{SEP}$name\n```json\n$arguments\n```{CALL_MARKS[1]}",
            begin=SECTION_MARKS[0],
            join="\n",
            end=SECTION_MARKS[1],
            in_template="```json",
        ),
        CallShape(f"{CALL_MARKS[0]}$name{SEP}$arguments{CALL_MARKS[1]}", begin=SECTION_MARKS[0], end=SECTION_MARKS[1]),
    ),
    "deepseek_v32": (
        CallShape(
            f'<{DSML}invoke name="$name">\n$arguments</{DSML}invoke>\n',
            begin=f"<{DSML}function_calls>\n",
            end=f"</{DSML}function_calls>",
            pair=f'<{DSML}parameter name="$key" string="$quoted">$value</{DSML}parameter>\n',
        ),
    ),
    "minimax": (
        CallShape(
            '<invoke name="$name">\n$arguments</invoke>\n',
            begin="<minimax:tool_call>\n",
            end="</minimax:tool_call>",
            pair='<parameter name="$key">$value</parameter>\n',
        ),
    ),
    "glm": (
        CallShape(
            "<tool_call>$name\n$arguments</tool_call>",
            join="\n",
            pair="<arg_key>$key</arg_key>\n<arg_value>$value</arg_value>\n",
        ),
    ),
    "qwen_coder": (
        CallShape(
            "<tool_call>\n<function=$name>\n$arguments</function>\n</tool_call>",
            join="\n",
            pair="<parameter=$key>\n$value\n</parameter>\n",
        ),
    ),
    "mistral": (
        CallShape("[TOOL_CALLS]$name[ARGS]$arguments", in_template="[ARGS]"),
        list_between("[TOOL_CALLS] ", "", in_template="[TOOL_CALLS] ["),
        list_between("[TOOL_CALLS]", ""),
    ),
    "command": (
        CallShape(
            '{"tool_call_id": "$index", "tool_name": "$name", "parameters": $arguments}',
            begin="<|START_ACTION|>[\n    ",
            join=",\n    ",
            end="\n]<|END_ACTION|>",
        ),
    ),
    "nemotron": (list_between("<TOOLCALL>", "</TOOLCALL>"),),
    "jamba": (list_between("<tool_calls>", "</tool_calls>"),),
    "granite": (
        list_between("<|tool_call|>", "<|/tool_call|>", in_template="<|/tool_call|>"),
        list_between("<|tool_call|>", ""),
    ),
    "hermes": (CallShape(f"<tool_call>\n{NAMED_CALL}\n</tool_call>", join="\n"),),
    "llama": (CallShape('{"name": "$name", "parameters": $arguments}', join="; "),),
}
"""Shapes by format: the first whose text is in the chat template counts. Gemma has none: its objects are not JSON."""


def find_shape(format: str, template: str) -> CallShape | None:
    """Return the shape of a format's calls in a chat template; None if it cannot be forced."""
    return next((shape for shape in CALL_SHAPES.get(format, ()) if shape.in_template in template), None)


class Rules:
    """The rules of a grammar in llguidance's variant of Lark. `special` are tokens that no text spells, by name."""

    def __init__(self, special: Mapping[str, int]) -> None:
        self.special = special
        self.rules = list[str]()
        names = sorted(special, key=len, reverse=True)
        self._marks = re.compile(f"({'|'.join(map(re.escape, names))})") if names else None

    def write(self, start: str) -> str:
        """Return the whole grammar."""
        return "\n".join(["%llguidance {}", f"start: {start}", *self.rules])

    def alone(self, schema: Any) -> str:
        """Return the whole grammar of JSON that follows a schema."""
        return self.write(self.json(schema))

    def add(self, body: str, options: str = "") -> str:
        """Add a rule and return its name."""
        name = f"r{len(self.rules)}"
        self.rules.append(f"{name}{options}: {body}")
        return name

    def pieces(self, text: str) -> list[str]:
        """Return the special tokens of a text, and what is between them."""
        return [piece for piece in (self._marks.split(text) if self._marks else [text]) if piece]

    def text(self, text: str) -> str:
        """Return an expression of a text, whose special tokens stand as tokens."""
        return " ".join(
            f"<[{self.special[piece]}]>" if piece in self.special else literal(piece) for piece in self.pieces(text)
        )

    def until(self, mark: str) -> str:
        """Return an expression of any text up to a mark, and the mark."""
        pieces = self.pieces(mark)
        place = next((place for place, piece in enumerate(pieces) if piece in self.special), None)
        if place is None:
            return self.add(f"/{TEXT}/", f"[suffix={literal(mark)}]")
        before = "".join(pieces[:place])
        name = f"T{len(self.rules)}"
        self.rules.append(
            f"{name}: /{TEXT}{escape_pattern(before)}/ & ~/{TEXT}{escape_pattern(mark)}{TEXT}/"
        )  # nor in letters
        return f"{name} {self.text(mark[len(before) :])}"

    def json(self, schema: Any) -> str:
        """Return the name of a rule of JSON that follows a schema."""
        schema = {} if schema is True else {"not": {}} if schema is False else write_patterns(schema)
        return self.add("%json " + json.dumps({**schema, "x-guidance": {"whitespace_pattern": SPACE_RULE}}))

    def fill(self, shape: str, **values: str) -> str:
        """Return an expression of a text, in which names after dollars stand for expressions."""
        parts = re.split(r"\$(\w+)", shape)
        filled = [values[part] if place % 2 else self.text(part) for place, part in enumerate(parts)]
        return " ".join(expression for expression in filled if expression)

    # --- calls ---

    def calls(self, shape: CallShape, tools: Sequence[tuple[str, Mapping[str, Any]]], *, several: bool) -> str:
        """Return an expression of one call or more. `tools` have the field and the function of each."""
        head, rest = shape.call.split("$name")
        index = "/[0-9]{1,3}/"
        alternatives = [
            self.fill(tool["name"] + rest, arguments=self.arguments(field, shape, tool), index=index)
            for field, tool in tools
        ]
        call = self.add(f"{self.fill(head, index=index)} ({' | '.join(map(self.add, alternatives))})")
        more = f"({self.text(shape.join)} {call})*" if several and not shape.is_single else ""
        return self.add(f"{self.text(shape.begin)} {call} {more} {self.text(shape.end)}")

    def arguments(self, field: str, shape: CallShape, function: Mapping[str, Any]) -> str:
        """Return an expression of a call's arguments: an object of JSON, or a parameter after the other."""
        field = f"{field}.parameters"
        schema = function.get("parameters")
        schema = {"properties": {}} if schema is None else schema
        combined = [name for name in COMBINED if name in schema]
        if not shape.pair:
            closed = {"additionalProperties": False} if "properties" in schema and not combined else {}
            return self.json({"type": "object", **closed, **schema})
        required, named = schema.get("required") or [], schema.get("properties") or {}
        others = [name for name in schema if name not in PAIR_KEYWORDS]
        others += [] if "properties" in schema else ["properties"]
        others += [] if all(named.get(name, False) is not False for name in required) else ["required"]
        if others:
            raise Refused(400, f"{field}.{others[0]}: expected properties alone, as this model writes calls", field)
        pairs = [
            self.pair(f"{field}.properties.{key[:60]}", shape, key, named_schema, schema)
            + ("" if key in required else "?")
            for key, named_schema in named.items()
            if named_schema is not False
        ]
        return " ".join(pairs)

    def pair(self, field: str, shape: CallShape, key: str, schema: Any, root: Mapping[str, Any]) -> str:
        """Return the name of a rule of one parameter. Texts have no quotes; what else there is is JSON."""
        before, after = shape.pair.split("$value")
        mark = after.strip("\n")
        if not KEY.fullmatch(key) or self.pieces(key) != [key] or key in self.special:
            raise Refused(400, f"{field}: expected a name without marks, as this model writes it bare", field)
        schema = flat(schema) if isinstance(schema, dict) else {}
        types = types_of(schema)
        is_text, is_null = "string" in types, types >= {"string", "null"}
        head, bare = (self.fill(before, key=self.text(key), quoted=literal(quoted)) for quoted in ("true", "false"))
        if not is_text:
            defined = {name: root[name] for name in DEFINITIONS if name in root}
            return self.add(f"{bare} {self.json({**defined, **schema})} {self.text(after)}")
        null = self.text("null" + after)
        or_null = f" | {bare} {null}" if is_null else ""
        if unserved := [name for name in TEXT_KEYWORDS if name in schema]:
            text = f"{field}.{unserved[0]}: expected none: this model writes texts without quotes. Leave it out."
            raise Refused(400, text, f"{field}.{unserved[0]}")
        values = [schema["const"]] if "const" in schema else schema.get("enum")
        if values is None:
            rest = after.partition(mark)[2]
            return self.add(f"{head} {self.until(mark)} {self.text(rest)}{or_null if bare != head else ''}")
        texts = [text for text in values if text is not None or not is_null]
        if not all(isinstance(text, str) and mark not in text and not (is_null and text == "null") for text in texts):
            raise Refused(400, f"{field}.enum: expected texts, as this model writes them", f"{field}.enum")
        alternatives = [f"{head} {self.text(text + after)}" for text in texts]
        return self.add(" | ".join([*alternatives, *([f"{bare} {null}"] if None in values and is_null else [])]))

    def calls_in_text(
        self, shape: CallShape, tools: Sequence[tuple[str, Mapping[str, Any]]], begins: Sequence[str], *, several: bool
    ) -> str:
        """Return an expression of text with calls in it: what follows the mark of a call is one."""
        if shape.is_single:  # a message of its own
            message = self.fill(shape.content, content=f"/{TEXT}/")
            return self.add(f"{message} | {self.calls(shape, tools, several=False)}")
        mark = next((begin for begin in begins if (shape.begin + shape.call).startswith(begin)), "")
        if not mark:  # calls are objects of JSON, at the beginning alone
            return self.add(f"/([ \\n]*[^\\s{{]{TEXT})?/ | {self.calls(shape, tools, several=several)}")
        part = "begin" if shape.begin else "call"
        rest = replace(shape, **{part: getattr(shape, part)[len(mark) :]})
        calls = self.calls(rest, tools, several=several and part == "begin")
        return self.add(f"({self.until(mark)} {calls}){'*' if several else '?'} /{TEXT}/")


def literal(text: str) -> str:
    """Return a text as Lark has it."""
    return json.dumps(text, ensure_ascii=False)


def escape_pattern(text: str) -> str:
    """Return a regular expression of a text, as Lark has it between slashes."""
    return re.escape(text).replace("/", "\\/")
