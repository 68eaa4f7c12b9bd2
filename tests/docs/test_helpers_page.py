"""The page of the tests names each helper, and nothing that is none."""

import re
from pathlib import Path

TESTS = Path(__file__).parents[1]


def helpers() -> set[str]:
    """Return the names of helpers, of which folders hold a part."""
    support = TESTS / "support"
    files = {path.stem for path in support.glob("*.py")} | {path.name for path in support.iterdir() if path.is_dir()}
    return {name for name in files if not name.startswith("__")}


def test_the_page_of_the_tests_names_each_helper() -> None:
    page = (TESTS / "README.md").read_text("utf-8").split("## Helpers")[1]
    named = set(re.findall(r"`([a-z_]+)(?:/[a-z_]+)?`", page)) - {"support"}
    assert named == helpers()


def test_each_helper_in_a_folder_that_the_page_names_is_there() -> None:
    page = (TESTS / "README.md").read_text("utf-8")
    named = re.findall(r"`(models/[a-z_]+)`", page)
    assert named
    assert all((TESTS / "support" / f"{name}.py").exists() for name in named)
