"""Tools, calls of them as models write them, and the parts of answers that are read from these."""

import re
from collections.abc import Iterable
from typing import Any

from attnmesh.serve.answer_parts import AnswerPart, AnswerParts
from attnmesh.serve.spelling import Spelling
from attnmesh.serve.text import SentToken, Text
from attnmesh.serve.tool_formats import FORMATS_BY_NAME
from attnmesh.serve.tool_grammars import CALL_SHAPES
from tests.support.serving.fake_engine import byte_tokenizer

WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}

ARGUMENTS = ('{"city":"Zürich"}', '{"city": "Bern", "note": "' + "x" * 700 + '"}')

TWO = "I look.\n" + "\n".join(
    f'<tool_call>\n{{"name": "weather", "arguments": {arguments}}}\n</tool_call>' for arguments in ARGUMENTS
)


def tokenizer_of(name: str, number: int = 0, *, special: bool, more: Iterable[str] = ()) -> Any:
    """Return a tokenizer whose template is one of a format, with the marks as tokens or without."""
    shape, own = CALL_SHAPES[name][number], FORMATS_BY_NAME[name]
    tokenizer = byte_tokenizer("".join(own.in_template) + shape.in_template + "{{ messages }}{{ tools }}")
    if special:
        written = shape.begin + shape.call + shape.pair + shape.end + shape.content
        marks = {*re.findall(r"<\|[^>]*\|>|<\uff5c[^>]*\uff5c>|\uff5cDSML\uff5c|\[[A-Z_]+\]|</?tool_call>", written)}
        tokenizer.add_special_tokens({"additional_special_tokens": sorted(marks.union(more))})
    return tokenizer


def parts_of(tokenizer: Any, made: AnswerParts, ids: list[int]) -> list[AnswerPart]:
    """Return the parts of an answer whose tokens come one by one."""
    text, found = Text(Spelling(tokenizer), ()), list[AnswerPart]()
    for piece in [*(text.add(SentToken(id)) for id in ids), text.end()]:
        found += made.add(piece.text, piece.sent_tokens)
    return found + made.end()


PAIRED = {
    "qwen_coder": "<tool_call>\n<function=weather>\n<parameter=a>\n$value\n</parameter>\n</function>\n</tool_call>",
    "glm": "<tool_call>weather\n<arg_key>a</arg_key>\n<arg_value>$value</arg_value>\n</tool_call>",
    "minimax": '<minimax:tool_call>\n<invoke name="weather">\n<parameter name="a">$value</parameter>\n</invoke>\n'
    "</minimax:tool_call>",
    "deepseek_v32": CALL_SHAPES["deepseek_v32"][0].begin
    + '<\uff5cDSML\uff5cinvoke name="weather">\n<\uff5cDSML\uff5cparameter name="a" string="true">$value'
    + "</\uff5cDSML\uff5cparameter>\n</\uff5cDSML\uff5cinvoke>\n"
    + CALL_SHAPES["deepseek_v32"][0].end,
}
