"""The rooms of the package, the files of each, and the arrows along which they import."""

import ast
from functools import cache
from pathlib import Path

ARROWS = {
    "errors": [],
    "core": ["errors"],
    "runtime": ["errors"],
    "mesh": ["core", "runtime"],
    "cost": ["mesh"],
    "checks": ["core", "runtime"],
    "kernels": ["checks"],
    "comm": ["cost", "kernels"],
    "guard": ["comm"],
    "setup": ["guard"],
    "mesh_attention": ["setup"],
    "cache": ["setup"],
    "decoding": ["mesh_attention", "cache"],
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

SOURCE = Path(__file__).parents[1] / "src" / "attnmesh"

FILES = {".".join(f.relative_to(SOURCE).with_suffix("").parts): f for f in SOURCE.rglob("*.py") if "__" not in f.name}

PACKAGES = {
    ".".join(f.parent.relative_to(SOURCE).parts): f for f in SOURCE.rglob("*/__init__.py") if f.parent != SOURCE
}

COMMAND = {f"command.{file.stem}": file for file in sorted((SOURCE.parent / "attnmesh_command").glob("[a-z]*.py"))}
"""Files of the command's options, which import nothing of the package."""


@cache
def imported(file: Path) -> frozenset[str]:
    """The modules that a file imports, also inside functions, and the names that it imports from each."""
    found = set[str]()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom):
            found |= {str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return frozenset(found)


def imports(file: Path) -> set[str]:
    """The files and rooms of the package that a file imports, also inside functions."""
    return {name.removeprefix("attnmesh.") for name in imported(file)} & (FILES | PACKAGES).keys()
