"""Print the size of each room, and count what makes the package hard to hold in mind: `python -m tools.house`.

A word has one meaning, so a class and a file have names of their own. A value travels whole, so functions have few
parameters. A room leans on few others. A file holds one idea, and six small files of one idea are worse than one.
It exits with 1 where a count has grown. One that falls is written down as the new bound; `-v` lists what is counted.
"""

import ast
import io
import re
import sys
import tokenize
from collections import defaultdict
from collections.abc import Iterable
from functools import cache
from itertools import combinations, product
from pathlib import Path

from tools.rooms import ARROWS, COMMAND, FILES

SOURCE = Path(__file__).parents[1] / "src" / "attnmesh"
MAX_PARAMETERS, MAX_IMPORTS, MAX_FILE, MAX_FUNCTION, MAX_NAMESAKES = 8, 15, 650, 60, 4
BLANK = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
PUBLIC = {
    *("mesh_attention.attention", "kernels.local", "decoding.decode_call", "decoding.rows", "cache.cache"),
    *("hf.cache.sharded_cache", "hf.serving.engine", "engines.combine", "mesh_attention.context_parallel"),
    *("diffusers.backend",),
    *("cli.generate_command", "cli.plan_command", "cli.serve_command"),
}
"""Files whose signatures users call, or diffusers, by the names of its arguments."""
PROGRAMS = "kernels.programs."
"""Files of Triton programs, whose functions take as many parameters and lines as one launch does."""
ENGINE = (
    *("core", "runtime", "checks", "mesh", "cost", "kernels", "comm", "guard"),
    *("setup", "mesh_attention", "cache", "decoding"),
)
"""Rooms that need no prices before a run."""
COLLECTIVE_PREFIXES = ("agreed_", "agree_on_")
"""Beginnings of the names of functions whose first call is collective."""

Found = list[str]
FUNCTION = ast.FunctionDef | ast.AsyncFunctionDef


def modules(source: Path = SOURCE) -> dict[str, ast.Module]:
    """Return the syntax of each file by its dotted name."""
    files = {".".join(file.relative_to(source).with_suffix("").parts): file for file in sorted(source.rglob("*.py"))}
    return {name: ast.parse(file.read_text()) for name, file in (files | COMMAND).items()}


def shared_classes(trees: dict[str, ast.Module]) -> Found:
    """Return names of classes that stand in several files."""
    positions = defaultdict(set)
    for name, tree in trees.items():
        for node in _nodes(tree):
            if isinstance(node, ast.ClassDef):
                positions[node.name].add(name)
    return _several(positions)


def shared_functions(trees: dict[str, ast.Module]) -> Found:
    """Return names of functions that stand in many files. That of a fake operator is no name."""
    positions = defaultdict(set)
    for name, tree in trees.items():
        for node in tree.body:
            if isinstance(node, FUNCTION) and node.name != "_":
                positions[node.name].add(name)
    return _several(positions, MAX_NAMESAKES)


def shared_plain_functions(trees: dict[str, ast.Module]) -> Found:
    """Return names of functions without an underscore that stand in several files.

    Public names may: users find `plan` in Python and in the command. A family names a function for the field it fills.
    """
    positions = defaultdict(set)
    for name, tree in trees.items():
        for node in tree.body:
            if isinstance(node, FUNCTION) and not node.name.startswith("_") and not name.startswith("hf.families."):
                positions[node.name].add(name)
    fronts = (tree for name, tree in trees.items() if name in ("__init__", "hf.__init__"))
    front = {one.asname for tree in fronts for one in _imported_names(tree)}
    return _several({name: files for name, files in positions.items() if name not in front})


def shared_stems(trees: dict[str, ast.Module]) -> Found:
    """Return names of files that stand in several rooms."""
    positions = defaultdict(set)
    for name in trees:
        stem = name.rpartition(".")[2]
        if not stem.startswith("__"):
            positions[stem].add(name)
    return _several(positions)


CONVENTIONAL = {"SUBJECT", "KERNEL", "FAMILIES"}
"""Constants that many files have, each the same thing: what errors of the file name first, its kernel, its records."""


def shared_constants(trees: dict[str, ast.Module]) -> Found:
    """Return names of constants that several files assign, with unequal values. A copy for Triton is none."""
    positions = defaultdict(set)
    values = defaultdict(set)
    for name, tree in trees.items():
        for constant, value in _constants(tree):
            positions[constant].add(name)
            values[constant].add(value)
    unequal = {name for name, texts in values.items() if len(texts - {name}) > 1} - CONVENTIONAL
    return _several({name: positions[name] for name in unequal})


def long_files(trees: dict[str, ast.Module]) -> Found:
    """Return files of too many lines."""
    lines = {name: tree.body[-1].end_lineno or 0 for name, tree in trees.items() if tree.body}
    return [f"{name}: {count}" for name, count in lines.items() if count > MAX_FILE]


def long_functions(trees: dict[str, ast.Module]) -> Found:
    """Return functions of too many lines, without those of docstrings."""
    found = []
    for name, node in _functions(trees):
        count = (node.end_lineno or 0) - node.lineno + 1 - len(_docstring_rows(node))
        found += [f"{name}.{node.name}: {count}"] * (count > MAX_FUNCTION)
    return found


def long_signatures(trees: dict[str, ast.Module]) -> Found:
    """Return functions behind the public edge that take too many parameters."""
    found = []
    for name, node in _functions({name: tree for name, tree in trees.items() if name not in PUBLIC}):
        given = (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
        count = sum(one.arg not in ("self", "cls") for one in given)
        found += [f"{name}.{node.name}: {count}"] * (count > MAX_PARAMETERS)
    return found


def wide_imports(trees: dict[str, ast.Module]) -> Found:
    """Return files that import from too many others of the package. Fronts of packages are lists of names."""
    counts = {name: len(_imported(tree)) for name, tree in trees.items() if not name.endswith("__init__")}
    return [f"{name}: {count}" for name, count in counts.items() if count > MAX_IMPORTS]


def engine_on_planner(trees: dict[str, ast.Module]) -> Found:
    """Return files of engine rooms that import the planner."""
    engine = {name: tree for name, tree in trees.items() if name.split(".")[0] in ENGINE}
    return [
        f"{name}: {module}"
        for name, tree in engine.items()
        for module in sorted(_imported(tree))
        if module.startswith("attnmesh.planner")
    ]


def folder_cycles(trees: dict[str, ast.Module]) -> Found:
    """Return folders of a room that import each other, directly or through others. A file beside them is of all."""
    folders = {folder for name in trees if (folder := name.rpartition(".")[0]).count(".") == 1}
    reached = defaultdict[str, set[str]](set)
    for name, tree in trees.items():
        targets = (".".join(module.split(".")[1:3]) for module in _imported(tree))
        reached[name.rpartition(".")[0]] |= folders & {*targets}
    for middle, start in product(folders, folders):
        reached[start] |= reached[middle] if middle in reached[start] else set()
    pairs = combinations(sorted(folders), 2)
    return [f"{one}, {other}" for one, other in pairs if other in reached[one] and one in reached[other]]


def shadowed_rooms(trees: dict[str, ast.Module]) -> Found:
    """Return rooms that a name of the package's front stands over: none of their files could be imported by `as`."""
    rooms = {name.split(".")[0] for name in trees if "." in name}
    front = {alias.asname or alias.name for node in trees["__init__"].body for alias in getattr(node, "names", ())}
    return sorted(rooms & front)


WORDS = {"beam"}
"""Types of models whose names are words of the field."""


def named_families(trees: dict[str, ast.Module]) -> Found:
    """Return names of model families in hf, outside of the room of their records.

    A name is an identifier, or a string without spaces, that is a class of transformers which a record names, or that
    has the words of a model type in a row. The text of messages and docstrings is none: it may have examples.
    """
    from attnmesh.hf.family import families

    known = families().values()
    types = {f"_{one.type.replace('-', '_')}_" for one in known if one.type not in WORDS}
    classes = {name for one in known for name in (*one.recurrences, *one.subclassed, *one.stores)}
    classes |= {name.partition(".")[0] for one in known for name in one.sources if "." in name}
    own = ((name, tree) for name, tree in trees.items() if name.startswith("hf.") and "families" not in name)
    found = {(name, word) for name, tree in own for word in _names(tree)}
    return sorted(
        f"{name}: {word}"
        for name, word in found
        if word in classes or any(kind in f"_{word.lower()}_" for kind in types)
    )


def commented_families(trees: dict[str, ast.Module]) -> Found:
    """Return names of model families in comments of hf, outside of the room of their records."""
    from attnmesh.hf.family import families

    types = {kind.replace("_", "").replace("-", "") for kind in families() if kind not in WORDS}
    types |= {kind.removesuffix("text") for kind in types}
    own = [name for name in trees if name.startswith("hf.") and "families" not in name and name in FILES]
    comments = ((name, text) for name in own for text in _comments(FILES[name].read_text()))
    words = ((name, word) for name, text in comments for word in re.findall(r"[A-Za-z][\w-]*", text))
    return [f"{name}: {word}" for name, word in words if re.sub("[_-]", "", word.lower()) in types]


MASKS = ("mask", "documents")
"""Ends of names of masks."""


def mask_fields_read(trees: dict[str, ast.Module]) -> Found:
    """Return where a field of `Mask` is read outside of its file: of a value whose name ends in mask or documents.

    Other files ask its methods, so that a new field is known in one file.
    """
    (mask,) = (node for node in trees["core.mask"].body if isinstance(node, ast.ClassDef) and node.name == "Mask")
    fields = {ast.unparse(node.target) for node in mask.body if isinstance(node, ast.AnnAssign)}
    read = (
        (name, node)
        for name, tree in trees.items()
        if name != "core.mask"
        for node in _nodes(tree)
        if isinstance(node, ast.Attribute) and node.attr in fields
    )
    found = ((name, node, ast.unparse(node.value)) for name, node in read)
    return [f"{name}:{node.lineno}: {ast.unparse(node)}" for name, node, value in found if value.endswith(MASKS)]


def unnamed_collectives(trees: dict[str, ast.Module]) -> Found:
    """Return functions that are collective at their first call, and whose names do not say it.

    At the place of a call such a function looks like one that sends nothing.
    """
    found = []
    for name, function in _functions(trees):
        decorators = [ast.unparse(decorator) for decorator in function.decorator_list]
        is_collective = "collective_once" in decorators or "at its first call" in (ast.get_docstring(function) or "")
        if is_collective and not function.name.lstrip("_").startswith(COLLECTIVE_PREFIXES):
            found.append(f"{name}: {function.name}")
    return found


def misnamed_checks(trees: dict[str, ast.Module]) -> Found:
    """Return functions called `check_` that return a value, and those called `checked_` that return none."""
    found = []
    for name, function in _functions(trees):
        beginning = function.name.lstrip("_").partition("_")[0]
        returns_none = function.returns is not None and ast.unparse(function.returns) == "None"
        if beginning == ("checked" if returns_none else "check"):
            found.append(f"{name}: {function.name}")
    return found


PUBLIC_TOKENS = {
    "cache.pages: tokens: Tensor",
    "cli.generate_worker: tokens: list[int]",
    "hf.serving.row_pass: tokens: Sequence[NextIds]",
}
"""Where users know `tokens` as no count: `KVCache.pages`, `generate --json` and `hf.decode_rows`."""


def uncounted_tokens(trees: dict[str, ast.Module]) -> Found:
    """Return where a parameter, a field or an annotated variable is called `tokens`, and its annotation is no count.

    A count is an `int` or a `float`, or None. A sequence of ints could be one of ids, so it has another name.
    """
    found = []
    for name, tree in trees.items():
        for node in _nodes(tree):
            if isinstance(node, ast.arg | ast.AnnAssign) and node.annotation is not None:
                named = node.arg if isinstance(node, ast.arg) else ast.unparse(node.target).rpartition(".")[2]
                kinds = {*ast.unparse(node.annotation).split(" | ")}
                if named == "tokens" and kinds - {"int", "float", "None"}:
                    found.append(f"{name}: tokens: {ast.unparse(node.annotation)}")
    return [one for one in found if one not in PUBLIC_TOKENS]


COUNTS = {
    f"files of more than {MAX_FILE} lines": (long_files, 0),
    f"functions of more than {MAX_FUNCTION} lines": (long_functions, 0),
    f"functions of one name in more than {MAX_NAMESAKES} files": (shared_functions, 0),
    "functions without an underscore of one name in several files": (shared_plain_functions, 0),
    "classes of one name in several files": (shared_classes, 0),
    "constants of one name in several files": (shared_constants, 0),
    "files of one name in several rooms": (shared_stems, 0),
    "rooms under a public name": (shadowed_rooms, 0),
    f"functions of more than {MAX_PARAMETERS} parameters behind the public edge": (long_signatures, 0),
    f"files that import from more than {MAX_IMPORTS} others": (wide_imports, 0),
    "imports of the planner in the engine": (engine_on_planner, 0),
    "folders of a room that import each other": (folder_cycles, 0),
    "names of model families in hf outside of their records": (named_families, 0),
    "names of model families in comments of hf": (commented_families, 0),
    "reads of fields of Mask outside of its file": (mask_fields_read, 0),
    "functions called check_ that return a value, or checked_ that return none": (misnamed_checks, 0),
    "functions that are collective once, and are not called agreed_ or agree_on_": (unnamed_collectives, 0),
    "names `tokens` that are no count": (uncounted_tokens, 0),
}
"""Counts, and the bound of each: what was found when it was last counted. All of them are wanted at 0."""


@cache
def _nodes(tree: ast.Module) -> list[ast.AST]:
    """Return all nodes of a file, which most counts look through."""
    return [*ast.walk(tree)]


def _several(positions: dict[str, set[str]], most: int = 1) -> Found:
    return [f"{name}: {', '.join(sorted(some))}" for name, some in sorted(positions.items()) if len(some) > most]


def _constants(tree: ast.Module) -> Iterable[tuple[str, str]]:
    """Yield the upper-case names that a file assigns outside of functions, each with the text of its value."""
    for node in tree.body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value:
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                yield from ((name, text) for name, text in _assigned(target, node.value) if name.isupper())


def _assigned(target: ast.expr, value: ast.expr) -> Iterable[tuple[str, str]]:
    if not isinstance(target, ast.Tuple):
        copied = re.fullmatch(r"tl\.constexpr\((?:\w+\.)?(.+)\)", text := ast.unparse(value))
        yield ast.unparse(target), copied[1] if copied else text
        return
    values = value.elts if isinstance(value, ast.Tuple) else [value] * len(target.elts)
    for one, given in zip(target.elts, values, strict=False):
        yield from _assigned(one, given)


def _imported(tree: ast.Module) -> set[str]:
    froms = (node.module or "" for node in _nodes(tree) if isinstance(node, ast.ImportFrom))
    return {module for module in froms if module.startswith("attnmesh.")}


def _imported_names(tree: ast.Module) -> Iterable[ast.alias]:
    return (one for node in tree.body if isinstance(node, ast.ImportFrom) for one in node.names)


def _names(tree: ast.Module) -> set[str]:
    """Return all identifiers of a file, and its strings that could be one."""
    found = set()
    for node in _nodes(tree):
        values = (getattr(node, name, None) for name in ("id", "attr", "arg", "name", "asname", "module", "value"))
        found |= {part for value in values if isinstance(value, str) for part in value.split(".") if " " not in value}
    return found


def _functions(trees: dict[str, ast.Module]) -> Iterable[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for name, tree in trees.items():
        for node in () if name.startswith(PROGRAMS) else _nodes(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield name, node


def _docstring_rows(node: ast.AST) -> set[int]:
    """Return the rows of all docstrings inside a node, also of those below constants and fields."""
    strings = (n for n in ast.walk(node) if isinstance(n, ast.Expr) and isinstance(n.value, ast.Constant))
    return {row for n in strings if isinstance(n.value.value, str) for row in range(n.lineno, n.end_lineno + 1)}


def _comments(text: str) -> list[str]:
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return [token.string for token in tokens if token.type == tokenize.COMMENT]


def code_lines(text: str) -> int:
    """Return how many lines of a text are code: no blank lines, comments or docstrings."""
    tokens = (t for t in tokenize.generate_tokens(io.StringIO(text).readline) if t.type not in BLANK)
    rows = {row for t in tokens for row in range(t.start[0], t.end[0] + 1)}
    return len(rows - _docstring_rows(ast.parse(text)))


def sizes() -> Iterable[str]:
    """Yield a line for each room, and one for the package."""
    texts = {name: file.read_text() for name, file in FILES.items()}
    for title in (*ARROWS, "package"):
        own = [text for name, text in texts.items() if title in (name.split(".")[0], "package")]
        lines, code = sum(len(text.splitlines()) for text in own), sum(map(code_lines, own))
        yield f"{title:15} {len(own):3} files {lines:6,} lines {code:6,} of code"


def table(trees: dict[str, ast.Module]) -> Iterable[tuple[str, Found, int]]:
    """Yield each count: its title, what was found, and its bound."""
    for title, (count, bound) in COUNTS.items():
        yield title, count(trees), bound


def main() -> None:
    """Print the sizes and all counts, and exit with 1 where a count is over its bound."""
    print(*sizes(), sep="\n")
    over = False
    for title, found, bound in table(modules()):
        print(f"{len(found):3} of {bound:2}  {title}")
        if "-v" in sys.argv or len(found) > bound:
            print(*(f"           {one}" for one in found), sep="\n")
        over |= len(found) > bound
    sys.exit(over)


if __name__ == "__main__":
    main()
