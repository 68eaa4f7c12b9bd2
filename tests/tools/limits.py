"""Print the size of each room of the package, and what is over a limit: `python -m tests.tools.limits`."""

import ast
import sys
from pathlib import Path

from tests.test_rooms import FILES, ROOMS, imports

MAX_FILE, MAX_FUNCTION, MAX_PARAMETERS = 350, 60, 7
MAX_PACKAGE, MAX_PATH, MAX_PATH_FILES = 11_000, 3_500, 25
PATH = [  # what a reader opens to follow `attention` and `decode` from the call to the kernel
    "core.*",
    "mesh.axes",
    "mesh.shapes",
    "mesh.schedule",
    "mesh.reduction_tree",
    "kernels.blocks",
    "kernels.driver",
    "kernels.cpu",
    "kernels.select",
    "kernels.cache_view",
    "comm.consensus",
    "comm.p2p",
    "comm.merge",
    "attention.attention",
    "attention.operator",
    "attention.executor",
    "attention.ulysses",
    "decode.decode",
    "decode.operator",
    "decode.local",
    "decode.cache",
    "decode.cache_shard",
]
FUNCTION = ast.FunctionDef | ast.AsyncFunctionDef


def lines_of(file: Path) -> int:
    """Return how many lines a file has."""
    return len(file.read_text().splitlines())


def floor_of(name: str, floors: dict[str, int], edges: dict[str, set[str]]) -> int:
    """Return how many files stand below this one in the longest chain of imports, itself included."""
    if name not in floors:
        floors[name] = 1 + max((floor_of(other, floors, edges) for other in edges[name]), default=0)
    return floors[name]


def long_functions(name: str, file: Path) -> list[str]:
    """Return the functions of a file that are over a limit."""
    found = []
    for node in (n for n in ast.walk(ast.parse(file.read_text())) if isinstance(n, FUNCTION)):
        lines = (node.end_lineno or node.lineno) - node.lineno + 1
        named = [a.arg for a in (*node.args.posonlyargs, *node.args.args) if a.arg not in ("self", "cls")]
        options = len(node.args.defaults) + sum(default is not None for default in node.args.kw_defaults)
        parameters = len(named) + len(node.args.kwonlyargs) - options
        if lines > MAX_FUNCTION:
            found.append(f"{name}.{node.name} has {lines} lines of {MAX_FUNCTION}")
        if parameters > MAX_PARAMETERS:
            found.append(f"{name}.{node.name} has {parameters} parameters without a default, of {MAX_PARAMETERS}")
    return found


def main() -> None:
    """Print the table, then what is over a limit."""
    sizes = {name: lines_of(file) for name, file in FILES.items()}
    for room in ROOMS:
        own = [lines for name, lines in sizes.items() if name.split(".")[0] == room]
        if own:
            print(f"{room:10} {len(own):3} files {sum(own):6,} lines")
    path = {n for n in sizes for p in PATH if n == p or (p.endswith("*") and n.startswith(p[:-1]))}
    edges = {n: {o for o in imports(f) if o.split(".")[0] != n.split(".")[0]} for n, f in FILES.items()}
    rooms = {r: {o.split(".")[0] for n in FILES if n.split(".")[0] == r for o in edges[n]} for r in ROOMS}
    late = {("planner", "comm")}  # inside Cluster.measure and Plan.init_mesh
    rooms = {r: {o for o in others if (r, o) not in late} for r, others in rooms.items()}
    floors: dict[str, int] = {}
    print(f"package    {len(sizes):3} files {sum(sizes.values()):6,} lines of {MAX_PACKAGE:,}")
    print(f"the path   {len(path):3} files {sum(sizes[n] for n in path):6,} lines of {MAX_PATH:,} in {MAX_PATH_FILES}")
    count, height = sum(bool(rooms[r]) for r in ROOMS) + 1, max(floor_of(r, floors, rooms) for r in ROOMS)
    print(f"{count} rooms on {height} floors")
    over = [f"{n} has {lines} lines of {MAX_FILE}" for n, lines in sizes.items() if lines > MAX_FILE]
    programs = ("kernels.programs.",)
    over += [text for n, f in FILES.items() if not n.startswith(programs) for text in long_functions(n, f)]
    print("\n".join(over) or "no file and no function is over its limit")
    sys.exit(bool(over and "--strict" in sys.argv))


if __name__ == "__main__":
    main()
