"""The page of the tests names each helper, and nothing that is none."""

import re
from pathlib import Path

TESTS = Path(__file__).parents[1]


def helpers() -> set[str]:
    """Return the names of the folders of helpers, and of what is in them."""
    support = TESTS / "support"
    folders = [folder for folder in support.iterdir() if (folder / "__init__.py").exists()]
    parts = [part for folder in folders for part in folder.iterdir()]
    return {path.stem for path in (*folders, *parts) if not path.name.startswith("__")}


def test_the_page_of_the_tests_names_each_helper() -> None:
    page = (TESTS / "README.md").read_text("utf-8").split("## Helpers")[1]
    assert set(re.findall(r"`([a-z_]+)`", page)) - {"support"} == helpers()


def test_each_row_of_the_page_names_helpers_of_its_folder() -> None:
    page = (TESTS / "README.md").read_text("utf-8").split("## Helpers")[1]
    folder = ""
    for first, _, used in re.findall(r"^\| (`[a-z]+`|) ?\| ([^|]+) \| ([^|]+) \|$", page, re.MULTILINE):
        folder = first.strip("`") or folder
        for name in re.findall(r"`([a-z_]+)`", used):
            assert (TESTS / "support" / folder / f"{name}.py").exists(), (folder, name)


def test_helpers_are_in_folders() -> None:
    assert [path.name for path in (TESTS / "support").glob("*.py")] == ["__init__.py"]
