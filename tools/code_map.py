"""Write the map of the code in docs/code.md from the first lines of its files: `python -m tools.code_map`."""

import ast
from graphlib import TopologicalSorter
from pathlib import Path

from tests.test_rooms import COMMAND, FILES, ROOMS, imports

PAGE = Path(__file__).parents[1] / "docs" / "code.md"
FIRST, LAST = "<!-- The map: make format -->\n", "<!-- The end of the map -->\n"
PURPOSES = {
    "errors": "the exceptions",
    "core": "the mathematics, on tensors; no rank",
    "runtime": "what one process owns",
    "mesh": "which rank holds and computes what, as values; nothing is sent",
    "kernels": "one device",
    "planner": "every way to run a workload, priced before a run",
    "comm": "everything that crosses ranks",
    "guard": "ranks compare their calls, and fail alike",
    "setup": "what is made before any call: worlds, meshes, measured constants",
    "mesh_attention": "prefill and training",
    "cache": "keys and values that ranks hold",
    "decoding": "a step of decoding",
    "recurrent": "what recurrent layers send",
    "store": "caches on disk, and recovery",
    "hf": "transformers",
    "diffusers": "diffusion transformers",
    "engines": "serving engines",
    "serve": "an HTTP server of one model",
    "cli": "the command",
}


def line_of(name: str) -> str:
    """Return a file's line of the map: its path in the room, and the first line of its docstring."""
    docstring = ast.get_docstring(ast.parse((FILES | COMMAND)[name].read_text()))
    assert docstring is not None
    return f"- `{'/'.join(name.split('.')[1:]) or name}`: {docstring.splitlines()[0]}"


def rooms() -> str:
    """Return the map. In each room files come after those that they import."""
    edges = {name: imports(file) & FILES.keys() for name, file in FILES.items()}
    order = [name for batch in _batches(edges) for name in sorted(batch)]
    parts = []
    for room in ROOMS:
        lines = [line_of(name) for name in order if name.split(".")[0] == room]
        parts += ["\n".join([f"### {room}: {PURPOSES[room]}\n", *lines, ""])] if lines else []
    title = "### attnmesh_command: options of the command, beside the package and without PyTorch\n"
    parts.append("\n".join([title, *map(line_of, COMMAND), ""]))
    return "\n".join(parts)


def _batches(edges: dict[str, set[str]]) -> list[tuple[str, ...]]:
    """Return the files in batches that import only from earlier ones."""
    sorter, found = TopologicalSorter(edges), []
    sorter.prepare()
    while sorter.is_active():
        found.append(sorter.get_ready())
        sorter.done(*found[-1])
    return found


def page() -> str:
    """Return the page with the map as the code has it."""
    before, rest = PAGE.read_text().split(FIRST)
    return before + FIRST + "\n" + rooms() + "\n" + LAST + rest.split(LAST)[1]


if __name__ == "__main__":
    PAGE.write_text(page())
