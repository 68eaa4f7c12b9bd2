"""Draw the map of docs/code.md, the rooms with arrows as files import: `python -m tools.code_map`."""

from pathlib import Path

from tools.rooms import ARROWS, FILES, PACKAGES, imports

PAGE = Path(__file__).parents[1] / "docs" / "code.md"
MAP = "<!-- The map: make format -->\n", "<!-- The end of the map -->\n"
"""Comments of the page before and after what is drawn."""
PURPOSES = {
    "errors": "the exceptions",
    "core": "the mathematics, on tensors; no rank",
    "runtime": "what one process owns",
    "mesh": "which rank holds and computes what, as values; nothing is sent",
    "cost": "the prices by which a run itself chooses, as values",
    "checks": "what one rank checks of its own arguments; nothing is sent",
    "kernels": "one device; native code and Triton programs of merges are here too",
    "comm": "messages of calls between ranks; a merge has its price, and kernels merge messages",
    "guard": "ranks agree: they compare their calls, and fail alike",
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


def page() -> str:
    """Return the page as the code has it."""
    first, last = MAP
    before, rest = PAGE.read_text().split(first)
    return f"{before}{first}\n```\n{drawing()}\n```\n\n{last}{rest.split(last)[1]}"


if __name__ == "__main__":
    PAGE.write_text(page())
