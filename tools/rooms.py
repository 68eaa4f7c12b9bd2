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
def imports(file: Path) -> frozenset[str]:
    """The files and rooms of the package that a file imports, also inside functions."""
    nodes = [*ast.walk(ast.parse(file.read_text()))]
    froms = [node for node in nodes if isinstance(node, ast.ImportFrom)]
    names = {name for n in froms for name in (n.module, *(f"{n.module}.{alias.name}" for alias in n.names))}
    names |= {alias.name for n in nodes if isinstance(n, ast.Import) for alias in n.names}
    return frozenset({str(name).removeprefix("attnmesh.") for name in names} & (FILES | PACKAGES).keys())
