"""The map of the code is true: each room is on it, and imports only from rooms above it."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "attnmesh"


def rooms() -> list[str]:
    """As docs/code.md lists them; those of `hf/` by their names."""
    found: list[str] = []
    for line in (ROOT / "docs" / "code.md").read_text().splitlines():
        if line.startswith("| `"):
            _, named, owned, *_ = line.split("|")
            names = re.findall(r"`([a-z_/]+)`", named)
            found += [f"hf/{name}" for name in re.findall(r"`([a-z_]+)`", owned)] if names == ["hf/"] else []
            found += names
    return found


def room(module: str) -> str:
    """The room of `attnmesh.a.b`."""
    first, *rest = module.split(".")[1:]
    if first in ("kernel", "bench"):
        return f"{first}/"
    return "/".join(["hf", *rest[:1]]) if first == "hf" and rest else f"{first}/" if first == "hf" else first


def imported(file: Path) -> set[str]:
    """The modules of attnmesh that a file imports, wherever in it."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("attnmesh"):
            place = SOURCE.joinpath(*str(node.module).split(".")[1:])
            inside = {
                a.name
                for a in node.names
                if (place / a.name).with_suffix(".py").exists() or (place / a.name / "__init__.py").exists()
            }
            found |= {f"{node.module}.{name}" for name in inside} if inside else {str(node.module)}
    return found - {"attnmesh"}


def test_each_room_imports_only_from_rooms_above_it() -> None:
    order = {name: number for number, name in enumerate(rooms())}
    for file in sorted(SOURCE.rglob("*.py")):
        if file.stem in ("__init__", "__main__"):
            continue
        here = room(".".join(("attnmesh", *file.relative_to(SOURCE).with_suffix("").parts)))
        assert here in order, f"{here} is not in docs/code.md"
        for other in map(room, imported(file)):
            assert other == here or order[other] < order[here], f"{here} imports {other}, which stands below it"
