"""Each room imports only along these arrows, and no two files import each other."""

from collections import Counter
from graphlib import TopologicalSorter
from pathlib import Path

from tools.rooms import ARROWS, COMMAND, FILES, PACKAGES, imported, imports

APART = {("planner", "kernels")}
"""Rooms that stand apart, though arrows lead from one to the other.

The planner prices kernels by the rates of a device, also of one that this machine lacks. So it asks no kernel.
"""


def stands_on(room: str) -> set[str]:
    """All rooms to which arrows lead from a room."""
    return {*ARROWS[room]}.union(*map(stands_on, ARROWS[room]))


def test_rooms_import_only_along_arrows() -> None:
    edges = {(name, other) for name, file in (FILES | PACKAGES).items() for other in imports(file)}
    for name, other in sorted(edges):
        room, above = name.split(".")[0], other.split(".")[0]
        assert above in {room, *stands_on(room)}, f"{name} imports {other}"
        assert (room, above) not in APART, f"{name} imports {other}"
    TopologicalSorter({name: {b for a, b in edges if a == name} for name in FILES}).prepare()  # raises on a circle


def test_the_options_of_the_command_import_nothing_of_the_package() -> None:
    assert COMMAND
    assert not [(name, imports(file)) for name, file in COMMAND.items() if imports(file)]


def test_the_package_imports_nothing_that_is_in_a_checkout_alone() -> None:
    modules = {(name, module) for name, file in FILES.items() for module in imported(file)}
    assert not [pair for pair in modules if pair[1].split(".")[0] in ("benchmarks", "tests", "tools")]


def test_no_file_imports_from_a_file_of_tests() -> None:
    folders = (Path(__file__).parents[1] / folder for folder in ("tests", "tools", "benchmarks"))
    files = [file for folder in folders for file in folder.rglob("*.py")]
    names = [(file, name) for file in files for module in imported(file) for name in module.split(".")]
    assert any(name == "support" for _, name in names)
    assert not [(str(file), name) for file, name in names if name.startswith("test_")], "share it in tests/support"


def test_each_file_of_tests_has_a_name_of_its_own() -> None:
    assert max(Counter(file.stem for file in Path(__file__).parent.rglob("test_*.py")).values()) == 1
