"""Trees of functions in the map of the code, held to the calls that they draw."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from tools.walk import PACKAGE, PAGE, call_watched

CODE_MAP = PAGE.parent / "code.md"


def callers_in(call: Callable[[], object]) -> dict[str, set[str]]:
    """Return the functions that a call runs, each with those that it is called within."""
    found = dict[str, set[str]]()

    @cache
    def name_of(code: CodeType) -> str:
        file = Path(code.co_filename)
        return f"{file.relative_to(PACKAGE)} {code.co_qualname}" if file.is_relative_to(PACKAGE) else ""

    def on_frame(frame: FrameType, event: str, _: Any) -> None:
        above = frame if event == "call" and name_of(frame.f_code) else None
        while above is not None:
            found.setdefault(name_of(frame.f_code), set()).add(name_of(above.f_code))
            above = above.f_back

    call_watched(call, on_frame)
    return found


def check_tree(heading: str, lines: int, callers: dict[str, set[str]]) -> None:
    """Raise unless the tree under a heading has so many lines, and each function is called within those above it."""
    drawn = CODE_MAP.read_text().split(f"{heading}\n")[1].split("```\n")[1]
    assert drawn.count("\n") == lines
    path = list[tuple[int, str]]()
    for line in drawn.splitlines():
        file, function = line.split()[:2]
        depth = line.index(function, len(file))
        path = [*((above, name) for above, name in path if above < depth), (depth, f"{file} {function}")]
        assert {name for _, name in path} <= callers.get(path[-1][1], set()), line
