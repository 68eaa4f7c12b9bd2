"""Print the size of each room of the package, and what is over a limit: `python -m tests.tools.limits`."""

import ast
import io
import sys
import tokenize
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
    "kernels.cache_view",
    "comm.consensus",
    "comm.p2p",
    "comm.message",
    "comm.merge",
    "comm.merge_messages",
    "attention.attention",
    "attention.call",
    "attention.operator",
    "attention.executor",
    "attention.ulysses",
    "decode.decode",
    "decode.step",
    "decode.cache",
    "decode.block_cyclic",
    "decode.cache_shard",
]
BLANK = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
FUNCTION = ast.FunctionDef | ast.AsyncFunctionDef


def lines_of(file: Path) -> int:
    """Return how many lines a file has."""
    return len(file.read_text().splitlines())


def docstring_lines(node: ast.AST) -> int:
    """Return how many lines the docstring of a function, a class or a file has."""
    body = getattr(node, "body", None)
    first = body[0] if isinstance(body, list) and body else None
    if not (
        isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str)
    ):
        return 0
    return (first.end_lineno or first.lineno) - first.lineno + 1


def code_lines(file: Path) -> int:
    """Return how many lines of a file are code: no docstrings, no comments, no blank lines."""
    text = file.read_text()
    docstrings = sum(docstring_lines(node) for node in ast.walk(ast.parse(text)))
    lines = {n for t in tokenize.generate_tokens(io.StringIO(text).readline) if t.type not in BLANK for n in rows(t)}
    return len(lines) - docstrings


def rows(token: tokenize.TokenInfo) -> range:
    """Return the numbers of the lines that a token takes."""
    return range(token.start[0], token.end[0] + 1)


def floor_of(name: str, floors: dict[str, int], edges: dict[str, set[str]]) -> int:
    """Return how many files stand below this one in the longest chain of imports, itself included."""
    if name not in floors:
        floors[name] = 1 + max((floor_of(other, floors, edges) for other in edges[name]), default=0)
    return floors[name]


def long_functions(name: str, file: Path) -> list[str]:
    """Return the functions of a file that are over a limit."""
    found = []
    for node in (n for n in ast.walk(ast.parse(file.read_text())) if isinstance(n, FUNCTION)):
        lines = (node.end_lineno or node.lineno) - node.lineno + 1 - docstring_lines(node)
        named = [a.arg for a in (*node.args.posonlyargs, *node.args.args) if a.arg not in ("self", "cls")]
        options = len(node.args.defaults) + sum(default is not None for default in node.args.kw_defaults)
        parameters = len(named) + len(node.args.kwonlyargs) - options
        if lines > MAX_FUNCTION:
            found.append(f"{name}.{node.name} has {lines} lines of {MAX_FUNCTION}")
        operator = any("custom_op" in ast.unparse(decorator) for decorator in node.decorator_list)
        if parameters > MAX_PARAMETERS and not operator:  # PyTorch sets what the schema of an operator can carry
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
    code = sum(map(code_lines, FILES.values()))
    print(f"package    {len(sizes):3} files {sum(sizes.values()):6,} lines, {code:,} of code of {MAX_PACKAGE:,}")
    walk, code = sum(sizes[n] for n in path), sum(code_lines(FILES[n]) for n in path)
    print(f"the path   {len(path):3} files {walk:6,} lines, {code:,} of code of {MAX_PATH:,} in {MAX_PATH_FILES}")
    count, height = sum(bool(rooms[r]) for r in ROOMS) + 1, max(floor_of(r, floors, rooms) for r in ROOMS)
    print(f"{count} rooms on {height} floors")
    over = [f"{n} has {lines} lines of {MAX_FILE}" for n, lines in sizes.items() if lines > MAX_FILE]
    programs = ("kernels.programs.",)
    over += [text for n, f in FILES.items() if not n.startswith(programs) for text in long_functions(n, f)]
    print("\n".join(over) or "no file and no function is over its limit")
    sys.exit(bool(over and "--strict" in sys.argv))


if __name__ == "__main__":
    main()
