"""Numbers of a schema that its grammar would write otherwise, or that end the process that makes it.

llguidance reads numbers as floats of 64 bits, without care for the last digit, and bounds of whole numbers as integers
of 64 bits, of which it negates the least one for ever.
"""

from collections.abc import Iterator, Mapping
from decimal import Decimal
from typing import Any

from attnmesh.serve.refused import Refused
from attnmesh.serve.request_fields import shown

BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
EXACT_INTEGERS, LARGEST_INTEGER = 1 << 53, (1 << 63) - 1
"""Up to the first a float holds each whole number; the second is the largest integer of 64 bits."""


def check_numbers(field: str, schema: Mapping[str, Any]) -> None:
    """Raise on a number of a schema, but for those within, that a grammar cannot hold exactly.

    >>> check_numbers("f", {"const": 0.1, "enum": [1e22, {"a": 10**18}], "type": "integer", "maximum": LARGEST_INTEGER})
    >>> check_numbers("f", {"enum": [1, {"id": 9007199254740993}]})  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    attnmesh.serve.refused.Refused: f.enum[1].id: expected a number that a float of 64 bits holds, given 9007...
    """
    for keyword in ("const", "enum"):
        for place, number in _numbers(f"{field}.{keyword}", schema.get(keyword)):
            if not _is_kept(number, as_integer=isinstance(number, int), as_float=isinstance(number, float)):
                raise _inexact(place, number, "Write it as a text, or with 15 digits at most.")
    types = schema.get("type") or ()
    types = [types] if isinstance(types, str) else types
    is_whole = "integer" in types and "number" not in types
    for keyword in BOUNDS:
        bound = schema.get(keyword)
        if not isinstance(bound, int | float) or isinstance(bound, bool):
            continue
        is_exclusive = keyword not in BOUNDS[:2] or schema.get(f"exclusive{keyword.capitalize()}") is True
        most = EXACT_INTEGERS - 1 if is_exclusive else LARGEST_INTEGER  # the next whole number counts, too
        if abs(bound) > most or not _is_kept(bound, as_integer=True, as_float=not is_whole):
            raise _inexact(f"{field}.{keyword}", bound, "Leave it out, or take a bound of 15 digits at most.")


def _numbers(place: str, value: Any) -> Iterator[tuple[str, int | float]]:
    """Yield each number within a value, with the field that it is in."""
    if isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _numbers(f"{place}[{index}]", inner)
    elif isinstance(value, dict):
        for name, inner in value.items():
            yield from _numbers(f"{place}.{name[:60]}", inner)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield place, value


def _is_kept(number: int | float, *, as_integer: bool, as_float: bool) -> bool:
    """Return whether a grammar has a number exactly, in each form that it may take there."""
    if isinstance(number, int) and abs(number) > LARGEST_INTEGER:
        return False
    written = Decimal(repr(number))
    read = float(number) if isinstance(number, int) else _read_float(number)
    if as_integer and (min(int(read), LARGEST_INTEGER) != written if written == int(written) else read != number):
        return False
    return not as_float or Decimal(repr(read)) == written


def _read_float(number: float) -> float:
    """Return a float as llguidance reads its text: the digits as a float, times or by a power of ten.

    >>> _read_float(0.1), _read_float(94.95886283158103)
    (0.1, 94.95886283158104)
    """
    sign, digits, exponent = Decimal(repr(number)).as_tuple()
    read, exponent = float("".join(map(str, digits))), int(exponent)
    if exponent < -308:
        read, exponent = read / 1e308, exponent + 308
    read = read * float(f"1e{exponent}") if exponent >= 0 else read / float(f"1e{-exponent}")
    return -read if sign else read


def _inexact(field: str, number: int | float, fix: str) -> Refused:
    text = f"{field}: expected a number that a float of 64 bits holds, given {shown(number)}. {fix}"
    return Refused(400, text, field)
