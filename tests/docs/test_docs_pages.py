"""What README and the pages of docs/ name exists: files, pictures, messages, public names, environment variables."""

import ast
import pkgutil
import re
import subprocess
from functools import cache
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TOP = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "MAINTAINERS.md")
PAGES = [*(ROOT / name for name in TOP), *sorted((ROOT / "docs").glob("*.md"))]
NAMES = [page.relative_to(ROOT).as_posix() for page in PAGES]


def page(name: str) -> str:
    return (ROOT / name).read_text()


@cache
def tracked() -> set[Path]:
    """The files and folders of this checkout that git tracks; in a source distribution, all of them."""
    if not (ROOT / ".git").exists():
        return set(ROOT.rglob("*"))
    done = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
    files = [ROOT / name for name in done.stdout.splitlines()]
    return {*files, *(folder for file in files for folder in file.parents)}


@pytest.mark.parametrize("name", NAMES)
def test_linked_files_and_pictures_are_tracked_by_git(name: str) -> None:
    links = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page(name))
    files = {((ROOT / name).parent / link).resolve() for link in links if "://" not in link}
    assert not files - tracked()


@cache
def anchors(path: Path) -> set[str]:
    """Return the places of a page that links name: its headings, as GitHub and Sphinx write them, and marks."""
    text = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.DOTALL | re.MULTILINE)
    headings = (re.sub(r"[^\w\- ]", "", line.lower()) for line in re.findall(r"^#+ (.+)$", text, re.MULTILINE))
    return {*re.findall(r"^\(([\w-]+)\)=$", text, re.MULTILINE), *(line.replace(" ", "-") for line in headings)}


@pytest.mark.parametrize("name", NAMES)
def test_places_of_pages_that_links_name_are_there(name: str) -> None:
    here = ROOT / name
    links = [link for link in re.findall(r"\]\(([^)#\s]*)#([^)\s]+)\)", page(name)) if "://" not in link[0]]
    targets = [((here.parent / link).resolve() if link else here, place) for link, place in links]
    assert not [(path.name, place) for path, place in targets if path.suffix == ".md" and place not in anchors(path)]


@pytest.mark.parametrize("name", NAMES)
def test_tests_that_a_page_names_are_there(name: str) -> None:
    files, text = [*(ROOT / "tests").rglob("test_*.py")], ""
    for path, test in re.findall(r"`((?:\w+/)*test_\w+\.py)?(?:::(test_\w+))?`", page(name)):
        if path:
            (file,) = (file for file in files if file.as_posix().endswith(f"/{path}"))
            text = file.read_text()
        assert not test or f"def {test}(" in text, test


# --- messages ---

VALUE = "\0"
"""Stands in a message for a value that is known when it is raised."""

NOT_QUOTED = {"X": "the form of all messages", "Window(15)": "the text of a mask"}


@cache
def source() -> list[ast.AST]:
    """All nodes of the package's syntax trees."""
    return [node for file in (ROOT / "src").rglob("*.py") for node in ast.walk(ast.parse(file.read_text()))]


@cache
def messages() -> set[str]:
    """All strings of the package."""
    filled = [node.values for node in source() if isinstance(node, ast.JoinedStr)]
    found = {"".join(str(x.value) if isinstance(x, ast.Constant) else VALUE for x in parts) for parts in filled}
    return found | {x.value for x in source() if isinstance(x, ast.Constant) and isinstance(x.value, str)}


@cache
def words() -> set[str]:
    """All words of these strings: names of functions and arguments are among them."""
    return {word for message in messages() for word in re.findall(r"[\w.]+", message)}


def is_message(quote: str) -> bool:
    """Whether a quote is a string of the package; one that ends in "..." is the beginning of a string."""
    alike = [message for message in messages() if message[:8] == quote[:8]]
    if not quote.endswith("..."):
        return any(re.fullmatch(pattern(message), quote) for message in alike)
    beginning = quote.removesuffix("...").rstrip()
    cuts = {message[:length] for message in alike for length in range(8, len(message) + 1)}
    return any(re.fullmatch(pattern(cut), beginning) for cut in cuts)


def pattern(message: str) -> str:
    return ".+".join(map(re.escape, message.split(VALUE)))


def quotes(name: str) -> list[tuple[str, str]]:
    """The messages that a page quotes: the function and argument, and what is expected."""
    found = re.findall(r"((?:\w[\w.]*)(?: \w+)*|\.\.\.): expected ([^`|\n]+)", page(name))
    cut = [(subject, re.sub(r"(\.\.\.)?,? given.*", r"\1", text).rstrip()) for subject, text in found]
    return [(subject, text if text.endswith("...") else text.rstrip(".")) for subject, text in cut]


@pytest.mark.parametrize("name", [name for name in NAMES if name != "docs/mistakes.md"])  # whose messages are raised
def test_quoted_messages_are_those_of_the_source(name: str) -> None:
    for subject, expected in quotes(name):
        assert is_message(expected) or expected in NOT_QUOTED, expected
        assert set(subject.replace("...", "").split()) <= words(), subject


def test_quoted_warnings_are_those_of_the_source() -> None:
    table = page("docs/troubleshooting.md").split("## Warnings")[1].split("## ")[0]
    warnings = re.findall(r"^\| `(?:\w+: )?(.+?)` \|", table, re.MULTILINE)
    assert len(warnings) == len(table.split("\n| ")) - 2 >= 3
    assert not [text for text in warnings if not is_message(text)]


# --- names ---

PACKAGES = ("attnmesh", "attnmesh.hf", "attnmesh.diffusers", "attnmesh.engines")


def public_names(package: str) -> list[str]:
    """Names that a package exports: as `X as X`, and all that the files of masks and layouts do."""
    tree = ast.parse((ROOT / "src" / package.replace(".", "/") / "__init__.py").read_text())
    lines = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    names = [name.name for line in lines for name in line.names if name.asname == name.name]
    names += [name for line in lines if line.names[0].name == "*" for name in import_module(str(line.module)).__all__]
    return [f"{package}.{name}" for name in names]


@pytest.mark.parametrize("package", PACKAGES)
def test_the_reference_has_all_public_names(package: str) -> None:
    documented = re.findall(r"^\.\. auto\w+:: (\S+)$", page("docs/api.md"), re.MULTILINE)
    assert not set(public_names(package)) - set(documented)


def is_there(dotted: str) -> bool:
    """Return whether a dotted name is a module, or what one has."""
    module, _, rest = dotted.rpartition(".")
    try:
        import_module(dotted)
    except ModuleNotFoundError:
        return bool(module) and is_there(module) and hasattr(pkgutil.resolve_name(module), rest)
    return True


@pytest.mark.parametrize("name", [name for name in NAMES if name != "CHANGELOG.md"])  # which has former names
def test_modules_and_imports_that_are_shown_are_there(name: str) -> None:
    text = page(name)
    found = set(re.findall(r"`(attnmesh(?:\.\w+)+)[`(]", text))
    for module, names in re.findall(r"from (attnmesh[\w.]*) import ([\w, ]+)", text):
        found |= {f"{module}.{each.split()[0]}" for each in names.split(",")}
    assert not [each for each in sorted(found) if not is_there(each)]


def test_the_reference_has_all_errors() -> None:
    errors = import_module("attnmesh.errors")
    found = [name for name, value in vars(errors).items() if getattr(value, "__module__", "") == errors.__name__]
    classes = [f"attnmesh.errors.{name}" for name in found if isinstance(vars(errors)[name], type)]
    assert classes
    assert not [name for name in classes if f".. autoclass:: {name}\n" not in page("docs/api.md")]


@pytest.mark.parametrize("name", ["attnmesh.KVCache", "attnmesh.hf.ShardedCache"])
def test_the_reference_has_the_methods_that_pages_call(name: str) -> None:
    module, _, kind = name.rpartition(".")
    described = getattr(import_module(module), kind)
    methods = {x for x in dir(described) if not x.startswith("_") and callable(getattr(described, x))}
    pages = "".join(map(page, NAMES))
    called = {*re.findall(r"(?<!\bam)\.(\w+)\(", pages), *re.findall(r"`(\w+)\(", pages)} & methods
    (members,) = re.findall(rf"autoclass:: {re.escape(name)}\n   :members: (.+)", page("docs/api.md"))
    assert called
    assert not called - set(members.split(", "))


def test_the_environment_variables_of_the_library_are_listed() -> None:
    strings = [node.value for node in source() if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    variables = {text for text in strings if re.fullmatch("ATTNMESH_[A-Z_]+", text)}
    listed = re.findall(r"^\| `(ATTNMESH_\w+)", page("docs/machines.md"), re.MULTILINE)
    assert sorted(listed) == sorted(variables)
