"""Seconds and bytes as text: a number under 1,000 in the unit that its rounding has."""

import re

import pytest

from attnmesh.planner.units import bytes_text, seconds_text

SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6}
BYTES = {"PB": 1e15, "TB": 1e12, "GB": 1e9, "MB": 1e6, "kB": 1e3, "bytes": 1.0}

pytestmark = pytest.mark.quick


def test_the_unit_is_that_of_the_rounded_number() -> None:
    assert [bytes_text(count) for count in (999.6, 999_499, 999_500, 999_999, 2e15)] == [
        "1 kB",
        "999 kB",
        "1 MB",
        "1 MB",
        "2 PB",
    ]
    assert [seconds_text(seconds) for seconds in (0.99999, 0.994, 9.999e-4)] == ["1 s", "990 ms", "1 ms"]
    assert seconds_text(0.9994, 3) == "999 ms"


@pytest.mark.parametrize(("units", "digits"), [(SECONDS, 2), (SECONDS, 3), (BYTES, 3)])
def test_no_text_has_an_exponent_or_thousands_of_a_unit_that_has_a_larger_one(
    units: dict[str, float], digits: int
) -> None:
    largest, *_, smallest = units
    for power in range(-30, 121):
        for part in (1.0, 1.234, 9.94, 9.949, 9.95, 9.994, 9.995, 9.99999):
            value = part * 10 ** (power / 10) * units[smallest] * 1e3
            text = bytes_text(value) if units is BYTES else seconds_text(value, digits)
            number, unit = text.split()
            assert re.fullmatch(r"[0-9,]+(\.[0-9]+)?", number), text
            shown = float(number.replace(",", ""))
            assert unit == largest or shown < 1000, text
            assert unit == smallest or shown >= 1, text
            assert shown * units[unit] == pytest.approx(
                value, rel=0.51 * 10 ** (1 - digits), abs=0.5 * (unit == "bytes")
            )
