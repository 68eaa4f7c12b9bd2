"""Draw pages of docs from the code: `python -m tools.code_map`.

The map has the rooms with arrows, as files import; the tables have the functions that read fields of `Mask`.
"""

import ast
import textwrap
from pathlib import Path

from tools.rooms import ARROWS, FILES, PACKAGES, SOURCE, imports

DOCS = Path(__file__).parents[1] / "docs"
PAGE, TABLES = DOCS / "code.md", DOCS / "code-tables.md"
MAP = "<!-- The map: make format -->\n", "<!-- The end of the map -->\n"
READERS = "<!-- Fields of Mask: make format -->\n", "<!-- The end of the fields -->\n"
"""Comments before and after what is drawn."""
PURPOSES = {
    "errors": "the exceptions",
    "core": "the mathematics, on tensors; no rank",
    "runtime": "what one process owns",
    "mesh": "which rank holds and computes what, as values; nothing is sent",
    "kernels": "one device",
    "comm": "everything that crosses ranks",
    "guard": "ranks compare their calls, and fail alike",
    "setup": "what is made before any call: worlds, meshes, measured constants",
    "mesh_attention": "prefill and training",
    "cache": "keys and values that ranks hold",
    "decoding": "a step of decoding",
    "recurrent": "what recurrent layers send",
    "store": "caches on disk, and recovery",
    "planner": "every way to run a workload, priced before a run",
    "hf": "transformers",
    "diffusers": "diffusion transformers",
    "engines": "serving engines",
    "serve": "an HTTP server of one model",
    "cli": "the command",
}


def imported_rooms() -> dict[str, set[str]]:
    """Return for each room the others that its files import from."""
    found: dict[str, set[str]] = {room: set() for room in ARROWS}
    for name, file in (FILES | PACKAGES).items():
        found[name.split(".")[0]] |= {other.split(".")[0] for other in imports(file)}
    return {room: others - {room} for room, others in found.items()}


def arrows() -> dict[str, list[str]]:
    """Return for each room those that it stands on, without those that these stand on."""
    edges, below = imported_rooms(), dict[str, set[str]]()
    for room in ARROWS:
        below[room] = edges[room].union(*(below[other] for other in edges[room]))
    return {
        room: [other for other in ARROWS if other in edges[room] and not any(other in below[x] for x in edges[room])]
        for room in ARROWS
    }


def drawing() -> str:
    """Return the drawing: a line for each room, what it stands on, and what it is for."""
    left = {room: f"{room:<14} {'→ ' + ', '.join(others) if others else ''}" for room, others in arrows().items()}
    width = max(map(len, left.values()))
    return "\n".join(f"{text:<{width}}  {PURPOSES[room]}" for room, text in left.items())


def readers_of_mask() -> dict[str, list[str]]:
    """Return for each file the functions that read a field of `Mask`: of a value whose name ends in mask or documents.

    In the file of `Mask` those of any value.
    """
    own = SOURCE / "core" / "mask.py"
    mask_fields = _fields_of("Mask", own)
    found = dict[str, list[str]]()
    for file in sorted(SOURCE.rglob("*.py")):
        for function, node in _functions(ast.parse(file.read_text())):
            read = (
                each.value for each in ast.walk(node) if isinstance(each, ast.Attribute) and each.attr in mask_fields
            )
            if any(file == own or ast.unparse(value).endswith(("mask", "documents")) for value in read):
                found.setdefault(str(file.relative_to(SOURCE)), []).append(function)
    return found


def _fields_of(name: str, file: Path) -> set[str]:
    """Return the fields of a dataclass."""
    (found,) = (
        node for node in ast.parse(file.read_text()).body if isinstance(node, ast.ClassDef) and node.name == name
    )
    return {ast.unparse(node.target) for node in found.body if isinstance(node, ast.AnnAssign)}


def _functions(module: ast.Module) -> list[tuple[str, ast.AST]]:
    """Return the functions of a module and of its classes, each with its name."""
    scopes = [("", module), *((f"{node.name}.", node) for node in module.body if isinstance(node, ast.ClassDef))]
    return [
        (f"{scope}{node.name}", node)
        for scope, parent in scopes
        for node in ast.iter_child_nodes(parent)
        if isinstance(node, ast.FunctionDef)
    ]


def drawn_readers() -> str:
    """Return the list of the functions that read a field of `Mask`, a line for each file, or more if they are many."""
    lines = []
    for file, functions in readers_of_mask().items():
        texts = [f"{name}," for name in functions[:-1]] + functions[-1:]
        names = textwrap.wrap(" ".join(texts), 80, break_long_words=False, break_on_hyphens=False)
        lines += [f"{start:<36}{part}" for start, part in zip([file, *[""] * len(names)], names, strict=False)]
    return "\n".join(lines)


def pages() -> dict[Path, str]:
    """Return the pages as the code has them."""
    drawings = ((PAGE, *MAP, drawing()), (TABLES, *READERS, drawn_readers()))
    return {page: _redrawn(page.read_text(), first, last, drawn) for page, first, last, drawn in drawings}


def _redrawn(text: str, first: str, last: str, drawn: str) -> str:
    before, rest = text.split(first)
    return f"{before}{first}\n```\n{drawn}\n```\n\n{last}{rest.split(last)[1]}"


if __name__ == "__main__":
    for file, text in pages().items():
        file.write_text(text)
