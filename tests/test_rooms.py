"""Each room imports only along these arrows, and no two files import each other."""

import ast
from graphlib import TopologicalSorter
from pathlib import Path

ARROWS = {
    "errors": [],
    "core": ["errors"],
    "runtime": ["errors"],
    "mesh": ["core", "runtime"],
    "kernels": ["core", "runtime"],
    "comm": ["mesh", "kernels"],
    "guard": ["comm"],
    "setup": ["guard"],
    "mesh_attention": ["setup"],
    "cache": ["mesh_attention"],
    "decoding": ["cache"],
    "recurrent": ["guard"],
    "store": ["cache"],
    "planner": ["setup"],
    "hf": ["decoding", "recurrent", "store", "planner"],
    "diffusers": ["mesh_attention"],
    "engines": ["mesh_attention"],
    "serve": ["hf"],
    "cli": ["serve"],
}
"""What each room stands on. It may import what these stand on in turn, too. `docs/code.md` draws the arrows."""

APART = {("planner", "kernels")}
"""Rooms that stand apart, though arrows lead from one to the other.

The planner prices kernels by the rates of a device, also of one that this machine lacks. So it asks no kernel.
"""
SOURCE = Path(__file__).parents[1] / "src" / "attnmesh"
FILES = {".".join(f.relative_to(SOURCE).with_suffix("").parts): f for f in SOURCE.rglob("*.py") if "__" not in f.name}
PACKAGES = {
    ".".join(f.parent.relative_to(SOURCE).parts): f for f in SOURCE.rglob("*/__init__.py") if f.parent != SOURCE
}
COMMAND = {f"command.{file.stem}": file for file in sorted((SOURCE.parent / "attnmesh_command").glob("[a-z]*.py"))}
"""Files of the command's options, which import nothing of the package."""


def imports(file: Path) -> set[str]:
    """The files and rooms of the package that a file imports, also inside functions."""
    nodes = [*ast.walk(ast.parse(file.read_text()))]
    froms = [node for node in nodes if isinstance(node, ast.ImportFrom)]
    names = {name for n in froms for name in (n.module, *(f"{n.module}.{alias.name}" for alias in n.names))}
    names |= {alias.name for n in nodes if isinstance(n, ast.Import) for alias in n.names}
    return {str(name).removeprefix("attnmesh.") for name in names} & (FILES | PACKAGES).keys()


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
    nodes = {name: [*ast.walk(ast.parse(file.read_text()))] for name, file in FILES.items()}
    modules = {(name, str(n.module)) for name in nodes for n in nodes[name] if isinstance(n, ast.ImportFrom)}
    modules |= {(name, x.name) for name in nodes for n in nodes[name] if isinstance(n, ast.Import) for x in n.names}
    assert not [pair for pair in modules if pair[1].split(".")[0] in ("benchmarks", "tests", "tools")]
