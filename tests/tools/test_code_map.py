"""The map of the code and the table of tests: rooms, arrows as the code imports, files that exist."""

import re
from pathlib import Path

from tools import code_map
from tools.rooms import ARROWS, COMMAND, FILES

TESTS = Path(__file__).parents[1]
FOLDERS = {*ARROWS, "implementations", "programs", "native", "families"} - {"errors"}
"""Folders of the package that rows of the table name, too."""


def test_the_page_has_the_map_as_the_code_has_it() -> None:
    assert code_map.PAGE.read_text() == code_map.page(), "draw it anew: make format"


def test_rooms_import_as_the_arrows_say() -> None:
    assert code_map.arrows() == ARROWS


def test_each_room_has_a_purpose() -> None:
    assert code_map.PURPOSES.keys() == {*ARROWS}


def test_arrows_leave_out_what_others_lead_to() -> None:
    arrows, edges = code_map.arrows(), code_map.imported_rooms()
    assert "errors" in edges["hf"]
    assert "errors" not in arrows["hf"]
    assert arrows["core"] == ["errors"]


def rows_of_tests() -> list[list[str]]:
    """Return the cells of the table of tests: files of the package, and their tests."""
    table = (code_map.PAGE.parent / "code-tables.md").read_text().split("## Where the tests are")[1].split("\n## ")[0]
    return [row.split("|")[1:3] for row in table.splitlines() if row.startswith("| `")]


def test_each_file_has_tests_of_its_name_or_stands_in_the_table_of_tests() -> None:
    tested = {file.stem.removeprefix("test_") for file in TESTS.rglob("test_*.py")}
    stems = {name.rpartition(".")[2] for name in FILES | COMMAND if not name.startswith("hf.families.")}
    named = {name for files, _ in rows_of_tests() for name in re.findall(r"`(\w+)`", files)}
    assert stems - tested <= named
    assert not named & tested - FOLDERS


def test_the_files_and_folders_of_tests_that_the_page_names_exist() -> None:
    page, tests = code_map.PAGE.read_text(), TESTS
    rows = [tests_of_files for _, tests_of_files in rows_of_tests()]
    assert len(rows) > 10
    for row in rows:
        folder = Path()
        for name in re.findall(r"`([\w/.]+)`", row):
            is_beside = name.endswith(".py") and "/" not in name  # in the folder of the one before
            found = folder / name if is_beside else Path(name)
            assert (tests / found).exists(), name
            folder = found.parent
    named = {*re.findall(r"`tests/(\w+)`", page), *code_map.PURPOSES}
    folders = {one.name for one in tests.iterdir() if (one / "__init__.py").exists()}
    assert folders <= named
