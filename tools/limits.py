"""Print the size of each room of the package, and fail if a file or a function is over a limit.

`python -m tools.limits` counts code without blank lines, comments and docstrings.
"""

import ast
import io
import sys
import tokenize
from pathlib import Path

from tests.test_rooms import COMMAND, FILES, ROOMS

MAX_FILE, MAX_FUNCTION, MAX_PARAMETERS = 650, 60, 7
"""A file holds one idea: one near its limit is more than one, and six small files of one idea are worse than one."""
PROGRAMS = "kernels.programs."
"""Files of Triton programs, whose functions take as many parameters and lines as one launch does."""

BLANK = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
FUNCTION = ast.FunctionDef | ast.AsyncFunctionDef


def docstring_rows(node: ast.AST) -> set[int]:
    """Return the rows of all docstrings inside a node, also of those below constants and fields."""
    strings = (n for n in ast.walk(node) if isinstance(n, ast.Expr) and isinstance(n.value, ast.Constant))
    return {row for n in strings if isinstance(n.value.value, str) for row in range(n.lineno, n.end_lineno + 1)}


def code_lines(text: str) -> int:
    """Return how many lines of a text are code."""
    tokens = (t for t in tokenize.generate_tokens(io.StringIO(text).readline) if t.type not in BLANK)
    rows = {row for t in tokens for row in range(t.start[0], t.end[0] + 1)}
    return len(rows - docstring_rows(ast.parse(text)))


def long_functions(name: str, text: str) -> list[str]:
    """Return the functions of a file that are over a limit."""
    found = []
    for node in (n for n in ast.walk(ast.parse(text)) if isinstance(n, FUNCTION)):
        lines = node.end_lineno - node.lineno + 1 - len(docstring_rows(node))
        named = [a.arg for a in (*node.args.posonlyargs, *node.args.args) if a.arg not in ("self", "cls")]
        options = len(node.args.defaults) + sum(default is not None for default in node.args.kw_defaults)
        parameters = len(named) + len(node.args.kwonlyargs) - options
        if lines > MAX_FUNCTION:
            found.append(f"{name}.{node.name} has {lines} lines of {MAX_FUNCTION}")
        operator = any("custom_op" in ast.unparse(decorator) for decorator in node.decorator_list)
        if parameters > MAX_PARAMETERS and not operator:  # PyTorch sets what the schema of an operator can carry
            found.append(f"{name}.{node.name} has {parameters} parameters without a default, of {MAX_PARAMETERS}")
    return found


def over_a_limit(files: dict[str, Path]) -> list[str]:
    """Return a line for each file and each function that is over a limit."""
    found = []
    for name, file in files.items():
        text = file.read_text()
        lines = len(text.splitlines())
        found += [f"{name} has {lines} lines of {MAX_FILE}"] * (lines > MAX_FILE)
        found += [] if name.startswith(PROGRAMS) else long_functions(name, text)
    return found


def main() -> None:
    """Print the table of rooms, then what is over a limit, and exit with 1 if anything is."""
    texts = {name: file.read_text() for name, file in FILES.items()}
    for title in (*ROOMS, "package"):
        own = [text for name, text in texts.items() if title in (name.split(".")[0], "package")]
        lines, code = sum(len(text.splitlines()) for text in own), sum(map(code_lines, own))
        print(f"{title:10} {len(own):3} files {lines:6,} lines {code:6,} of code")
    if over := over_a_limit(FILES | COMMAND):
        sys.exit("\n".join(over))
    print(f"no file has over {MAX_FILE} lines; no function has over {MAX_FUNCTION} lines, or over {MAX_PARAMETERS}")
    print("parameters without a default (the programs of Triton are not counted)")


if __name__ == "__main__":
    main()
