"""Patterns of a schema as llguidance is to have them: classes mean there what they mean in ECMA's regular expressions.

llguidance lets escaped quotes and backslashes into each set of characters that has all of code 0 to 31. So that no set
has all, classes lose the character of code 0, which no text needs.
"""

import re
from collections.abc import Iterator
from typing import Any

from attnmesh.serve.refused import Refused
from attnmesh.serve.request_fields import shown
from attnmesh.serve.tool_schemas import LISTS, OF_SCHEMAS, SINGLE

PART = re.compile(
    r"(?P<zero>\\x00|\\u0000|\\U0{8}|\\[xu]\{0+\}|\x00)|(?P<named>\\[pP](?:\{[^}]*\}|.))"
    r"|(?P<class>\[\^?(?:\\.|[^\]\\])*\])|\\.|.",
    re.DOTALL,
)
"""Parts of a pattern: the character of code 0, a class by name, one in brackets, or another."""

MANY = re.compile(r"\[\^|\\[pPDWSxuU]|\x00")
"""Signs of a class in brackets that may have all characters of code 0 to 31."""

NOT_ECMA = re.compile(r"\[\^?\]|.\[|&&|--|~~", re.DOTALL)
"""Classes in brackets, without escapes, that are read in several ways."""


def check_pattern(field: str, pattern: Any) -> None:
    r"""Raise on a pattern that llguidance would read otherwise than ECMA.

    >>> check_pattern("f", r"^[^\[\]\"]+$")
    >>> check_pattern("f", "[a-z&&[^b]]")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    attnmesh.serve.refused.Refused: f: expected classes without [, &&, -- or ~~, and not empty, given "[a-z&&[^b]"...
    """
    for part in PART.finditer(pattern) if isinstance(pattern, str) else ():
        if part["zero"]:
            raise Refused(400, f"{field}: expected no character of code 0 outside of classes. Leave it out.", field)
        if part["class"] and NOT_ECMA.search(re.sub(r"\\.", "a", part["class"], flags=re.DOTALL)):
            expected = "classes without [, &&, -- or ~~, and not empty"
            fix = "Write a backslash before signs that are meant."
            raise Refused(400, f"{field}: expected {expected}, given {shown(part['class'])}. {fix}", field)


def write_pattern(pattern: str) -> str:
    r"""Return a pattern whose classes have not the character of code 0.

    >>> print(write_pattern(r'^[^"\\]+[a-z]\P{P}$'))
    ^[[^"\\]--\x00]+[a-z][\P{P}--\x00]$
    """
    return "".join(
        rf"[{part[0]}--\x00]" if part["named"] or (part["class"] and MANY.search(part[0])) else part[0]
        for part in PART.finditer(pattern)
    )


def write_patterns(schema: Any) -> Any:
    """Return a schema with its patterns, and those within, as llguidance is to have them."""
    return dict(_written(schema)) if isinstance(schema, dict) else schema


def _written(schema: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for keyword, value in schema.items():
        if keyword == "pattern" and isinstance(value, str):
            yield keyword, write_pattern(value)
        elif keyword in OF_SCHEMAS:
            is_pattern = keyword == "patternProperties"
            yield (
                keyword,
                {(write_pattern(name) if is_pattern else name): write_patterns(value[name]) for name in value},
            )
        elif keyword in (*LISTS, *SINGLE):
            yield (
                keyword,
                [write_patterns(inner) for inner in value] if isinstance(value, list) else write_patterns(value),
            )
        else:
            yield keyword, value
