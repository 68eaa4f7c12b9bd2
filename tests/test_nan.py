"""A NaN fails each test that compares errors: Python's `max` drops one that is not the first, `worst` keeps it."""

import ast
import re
from collections.abc import Iterator
from math import isnan
from pathlib import Path

import pytest

from tests.support.truth import tolerances
from tests.support.truth.tolerances import worst

pytestmark = pytest.mark.quick

ROOT = Path(__file__).parents[1]


def drops_nan(node: ast.AST, names: frozenset[str] = frozenset(vars(tolerances))) -> bool:
    """Return whether a node takes the `max` of distances, or compares the `max` of floats with a tolerance.

    A `max` with a number is a bound.
    """
    match node:
        case ast.Compare(
            ast.Call(ast.Name("max")), [ast.Lt() | ast.LtE()], [ast.Constant(float()) | ast.Name() as most]
        ):
            return isinstance(most, ast.Constant) or most.id in names
        case ast.Call(ast.Name("max"), arguments):
            inside = (each for argument in arguments for each in ast.walk(argument))
            return not any(isinstance(each, ast.Constant) for each in arguments) and any(
                isinstance(each, ast.Attribute) and each.attr == "abs" for each in inside
            )
    return False


def dropped() -> Iterator[str]:
    """Yield the places in the project where a NaN may be dropped."""
    for folder in ("src", "tests", "tools", "benchmarks", "examples"):
        for file in (ROOT / folder).rglob("*.py"):
            text = file.read_text(encoding="utf-8")
            calls = re.search(r"(?<![\w.])max\((?!map\(len)", text)  # else it need not be parsed, which takes seconds
            for node in ast.walk(ast.parse(text)) if calls else ():
                if drops_nan(node):
                    yield f"{file.relative_to(ROOT)}:{node.lineno}"  # type: ignore[attr-defined]


def test_no_error_of_nan_is_dropped() -> None:
    assert [*dropped()] == []


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("assert max(errors) < 1e-6", True),
        ("assert max(pool.run(2, differences)) <= FLOAT32", True),
        ("most = max(most, float((one - other).abs().max()))", True),
        ("assert gap <= 1e-5 * max(1, float(expected.abs().max()))", False),
        ("assert max(sizes) <= capacity", False),
        ("assert worst(errors) < 1e-6", False),
        ("assert max(counts) < 4", False),
    ],
)
def test_lines_that_may_drop_a_nan_are_found(line: str, expected: bool) -> None:
    assert any(map(drops_nan, ast.walk(ast.parse(line)))) == expected


def test_the_worst_error_is_nan_if_one_is() -> None:
    nan = float("nan")
    assert isnan(worst([1e-7, nan]))
    assert isnan(worst([nan, 1e-7]))
    assert worst([1e-7, 3e-7, 2e-7]) == 3e-7
