"""The map of the code and its tables: rooms, arrows as the code imports, files and names that exist."""

import ast
import dataclasses
import re
from functools import cache
from pathlib import Path
from typing import TypeGuard

import pytest

from attnmesh.core.mask import Mask
from tools import code_map
from tools.rooms import ARROWS, COMMAND, FILES, PACKAGES

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


# --- names ---

NAMED = ("code", "code-tables", "glossary")
ROOT = TESTS.parent
FOREIGN = {"DeviceMesh", "torch.distributed", "repr", "quick", "long", "gpu"}
"""Names of PyTorch and Python, and markers of pytest."""
CLASS, FUNCTIONS = ast.ClassDef, (ast.FunctionDef, ast.AsyncFunctionDef)


def quoted(page: str) -> list[str]:
    """Return what stands in backticks in a page of docs, outside of its blocks."""
    text = re.sub(r"```.*?```", "", (ROOT / "docs" / f"{page}.md").read_text(), flags=re.DOTALL)
    return sorted({*re.findall(r"`([^`\n]+)`", text)})


@dataclasses.dataclass(frozen=True)
class Code:
    """What the code defines, with its tests and tools."""

    own: dict[str, set[str]]
    """Names that each class defines."""
    bases: dict[str, list[str]]
    names: set[str]
    """Names of modules' functions and constants, parameters, and attributes of `self`."""
    strings: set[str]


@cache
def code() -> Code:
    """Return what the code defines. Each file is read once, and its tree let go: those of all are a million nodes."""
    found = Code({}, {}, set(), set())
    files = (file for folder in ("src", "tests", "tools") for file in (ROOT / folder).rglob("*.py"))
    for node in (node for file in files for node in ast.walk(ast.parse(file.read_text()))):
        if isinstance(node, ast.Module):
            found.names.update(defined_in(node.body))
        elif isinstance(node, CLASS):
            found.own[node.name] = defined_in(node.body) | {one.attr for one in ast.walk(node) if is_of_self(one)}
            found.bases[node.name] = [ast.unparse(base).partition("[")[0] for base in node.bases]
        elif isinstance(node, ast.arg):
            found.names.add(node.arg)
        elif is_of_self(node):
            found.names.add(node.attr)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.strings.add(node.value)
    return found


def defined_in(body: list[ast.stmt]) -> set[str]:
    """Return names that the body of a module or class defines: functions, classes, constants and fields."""
    found = {node.name for node in body if isinstance(node, (CLASS, *FUNCTIONS))}
    assigned = [target for node in body if isinstance(node, ast.Assign) for target in node.targets]
    assigned += [node.target for node in body if isinstance(node, ast.AnnAssign)]
    return found | {node.id for target in assigned for node in ast.walk(target) if isinstance(node, ast.Name)}


def is_of_self(node: ast.AST) -> TypeGuard[ast.Attribute]:
    """Return whether an attribute of `self` is set."""
    is_set = isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
    return is_set and isinstance(node.value, ast.Name) and node.value.id == "self"


@cache
def classes() -> dict[str, set[str]]:
    """Return the names that each class defines, with those of its bases."""

    def all_of(name: str) -> set[str]:
        return code().own.get(name, set()).union(*(all_of(base) for base in code().bases.get(name, ())))

    return {name: all_of(name) for name in code().own}


@cache
def known_names() -> set[str]:
    """Return names of rooms, files, modules' functions and constants, members of classes, and parameters."""
    found = {*ARROWS, "attnmesh_command", *code().names, *classes()}.union(*classes().values())
    return found | {part for name in FILES | COMMAND for part in name.split(".")}


@cache
def paths() -> set[str]:
    """Return each file and folder of the repository with a slash before it."""
    folders = ("src", "tests", "tools", "benchmarks", "docs")
    below = (path for folder in folders for path in ((ROOT / folder), *(ROOT / folder).rglob("*")))
    return {f"/{path.relative_to(ROOT).as_posix()}" for path in (*below, *ROOT.glob("*.*"))}


def resolves(text: str) -> bool:
    """Return whether a name of the code is there. Other text resolves, too."""
    if re.fullmatch(r"[\w.-]*(/[\w.-]*)+|[\w-]+\.(py|md|toml|json|cpp)", text):
        return any(path.endswith(f"/{text.rstrip('/')}") for path in paths())
    if re.fullmatch(r'"\w+"', text):
        return text.strip('"') in code().strings
    named = re.fullmatch(r"(?:am\.)?([A-Za-z_][\w.]*)(\(.*\)|=.*)?", text)
    if named is None or text in FOREIGN:
        return True
    if named[1].startswith("attnmesh."):  # a module
        return named[1].removeprefix("attnmesh.") in FILES | PACKAGES
    owner, _, name = named[1].rpartition(".")
    if owner in classes():
        return name in classes()[owner]
    if name.endswith("_"):  # a beginning
        return any(known.startswith(name) for known in known_names())
    return name in known_names() and (not owner or owner in known_names())


@pytest.mark.parametrize("page", NAMED)
def test_names_of_the_code_that_a_page_has_are_there(page: str) -> None:
    names = quoted(page)
    assert len(names) > 20
    assert not [name for name in names if not resolves(name)]


@pytest.mark.parametrize("name", ["Mask.is_within", "Masks", "core/masks.py", "known_step", "agrees_", '"trees"'])
def test_names_that_are_not_there_do_not_resolve(name: str) -> None:
    assert not resolves(name)


def test_the_table_of_methods_of_masks_has_all_of_them() -> None:
    table = (ROOT / "docs" / "code-tables.md").read_text().split("## A field of `Mask`")[1].split("\n## ")[0]
    listed = {*re.findall(r"`(\w+)`", "".join(row.split("|")[2] for row in table.splitlines() if row.startswith("| ")))}
    fields = {field.name for field in dataclasses.fields(Mask)}
    methods = {name for name in vars(Mask) if not name.startswith("_")} - fields - {"draw", "is_undirected"}
    assert listed - {"repr"} == methods  # `draw` asks `visible`, and `is_undirected` is of how a mask was made
