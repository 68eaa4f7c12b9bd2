"""Texts of errors and warnings name what exists: functions and their arguments, options of the command, and pages."""

import ast
import re
from collections.abc import Iterator
from functools import cache, reduce
from inspect import isclass, signature
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import typer
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from transformers import GenerationConfig, TrainingArguments

import attnmesh as am
import attnmesh.diffusers
import attnmesh.serve
from attnmesh import errors, hf
from attnmesh_command import app
from tests.support.models import families

ROOT = Path(__file__).parents[2]
FILES = sorted(file for room in ("attnmesh", "attnmesh_command") for file in (ROOT / "src" / room).rglob("*.py"))

UNKNOWN = "_unknown_"
"""Stands for what an f-string fills in."""

NAME = re.compile(r"(?<![\w./-])[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+")
CALL = re.compile(r"(?<![\w/)\]-])\.?[A-Za-z_][\w.]*\(")
KEYWORD = re.compile(r"(?<![\w.\-=/{(\[])([a-z]\w+)=(?![=\d{])")
OPTION = re.compile(r"(?<![\w-])--[a-z][a-z-]*")
PAGE = re.compile(r"(?<![\w/])(?:docs|examples|tests|tools)/[\w/.-]+")
COMMAND = re.compile(r"(?:run|with|on) attnmesh ([a-z]+)")
ENDINGS = (".json", ".html", ".py", ".md")

OTHERS = {
    *("--nnodes", "--nproc-per-node", "--master-addr", "--rdzv-backend", "--rdzv-endpoint"),
    *("--no-deps", "--query-gpu", "--format"),
}
"""Options of torchrun, pip and nvidia-smi."""

WRITTEN = {"conv": "a part of --recurrent", "to": "a header of harmony", "string": "an attribute of DSML"}
"""What has the form of an argument, and is none."""

MISSING = object()


@cache
def objects() -> dict[str, list[Any]]:
    """Return what a text may mean by a name, such as "cache"."""
    model = families.model("mistral", "attnmesh", num_hidden_layers=1)
    sizes: dict[str, Any] = {"batch": 1, "kv_heads": 1, "head_dim": 2, "capacity": 1, "dtype": torch.float32}
    tensors = ("labels", "key_lengths", "attention_mask")
    return {name: [torch.Tensor] for name in tensors} | {
        "x": [torch.Tensor, DTensor],
        "attnmesh": [am],
        "am": [am],
        "hf": [hf],
        "torch": [torch],
        "dist": [dist],
        "mesh": [DeviceMesh],
        "init_device_mesh": [init_device_mesh],
        "layout": [am.Zigzag()],
        "model": [model],
        "cache": [am.KVCache(None, **sizes), hf.ShardedCache(model.config)],
    }


@cache
def parameters() -> set[str]:
    """Return the names of all arguments, keywords and fields in the code."""
    nodes = [node for file in FILES for node in ast.walk(ast.parse(file.read_text()))]
    names = {str(node.arg) for node in nodes if isinstance(node, (ast.arg, ast.keyword))}
    names |= vars(GenerationConfig()).keys() | signature(TrainingArguments).parameters.keys() | WRITTEN.keys()
    return names | {n.target.id for n in nodes if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)}


@cache
def options() -> set[str]:
    """Return the options of all commands, and the commands."""
    command: Any = typer.main.get_command(app)
    context = typer.Context(command)
    commands = {name: command.get_command(context, name) for name in command.list_commands(context)}
    given = [*command.params, *(option for one in commands.values() for option in one.params)]
    return {*commands, *(name for option in given for name in (*option.opts, *option.secondary_opts))}


def texts(source: str) -> Iterator[tuple[int, str]]:
    """Yield the strings of a file, with their lines, but for docstrings."""
    nodes = [*ast.walk(ast.parse(source))]
    skipped = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    skipped |= {id(part) for node in nodes if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in nodes:
        if isinstance(node, ast.JoinedStr):
            yield (
                node.lineno,
                "".join(
                    str(getattr(part, "value", "")) if isinstance(part, ast.Constant) else UNKNOWN
                    for part in node.values
                ),
            )
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in skipped:
            yield node.lineno, node.value


def found(name: str) -> list[Any] | None:
    """Return what a dotted name may mean, nothing if it does not exist, and None if it is none of the package's."""
    first, *rest = name.split(".")
    starts = objects().get(first) or [vars(room)[first] for room in (am, hf, errors) if first in vars(room)]
    if not starts or (first not in objects() and rest and not isclass(starts[0])):
        return None
    rest = [part for part in rest if UNKNOWN not in part]
    values = [reduce(lambda x, part: getattr(x, part, MISSING), rest, start) for start in starts]
    return [value for value in values if value is not MISSING]


def calls(text: str) -> Iterator[tuple[str, ast.Call]]:
    """Yield the calls in a text that are Python, by their function."""
    for match in CALL.finditer(text):
        depth, stop = 1, match.end()
        while depth and stop < len(text):
            depth += {"(": 1, ")": -1}.get(text[stop], 0)
            stop += 1
        try:
            node = ast.parse(f"f({text[match.end() : stop]}", mode="eval").body
        except SyntaxError:
            continue
        if isinstance(node, ast.Call):
            yield match[0][:-1], node


def takes(function: Any, call: ast.Call) -> bool:
    """Return whether a function takes so many arguments, with these names."""
    arguments = [
        argument for argument in call.args if not (isinstance(argument, ast.Constant) and argument.value is ...)
    ]
    try:
        signature(function).bind_partial(*arguments, **{str(keyword.arg): None for keyword in call.keywords})
    except TypeError:
        return False
    except ValueError:  # of a function in C
        return True
    return True


def faults(text: str) -> list[str]:
    """Return what a text names, and does not exist."""
    names = [name for name in NAME.findall(text) if not name.endswith(ENDINGS)]
    wrong = [name for name in names if found(name) == []]
    for name, call in calls(text):
        if name.startswith("."):
            wrong += [name] * (not hasattr(torch.Tensor, name[1:]))
        elif functions := found(name):
            wrong += [name] * (not any(takes(function, call) for function in functions))
    wrong += [f"{name}=" for name in KEYWORD.findall(text) if UNKNOWN not in name and name not in parameters()]
    wrong += [name for name in OPTION.findall(text) if name not in options() | OTHERS]
    wrong += [name for name in COMMAND.findall(text) if name not in options()]
    return wrong + [page for page in PAGE.findall(text) if UNKNOWN not in page and not (ROOT / page).exists()]


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT / "src")))
def test_texts_name_what_exists(file: Path) -> None:
    assert not [(line, wrong, text) for line, text in texts(file.read_text()) if (wrong := faults(text))]


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("pass am.Zigzags()", "am.Zigzags"),
        ("prefill in cache.layouts", "cache.layouts"),
        ("load it with KVCache.loads", "KVCache.loads"),
        ("call cache.reserve(40, 2)", "cache.reserve"),
        ("pass hf.Checkpoint(path, each=2)", "hf.Checkpoint"),
        ("call .to_denser()", ".to_denser"),
        ("leave hott= out", "hott="),
        ("add --decodes", "--decodes"),
        ("measure it with attnmesh prove", "prove"),
        ("read docs/none.md", "docs/none.md"),
    ],
)
def test_a_wrong_name_is_found(text: str, wrong: str) -> None:
    assert faults(text) == [wrong]


def test_texts_are_read_in_f_strings_and_not_in_docstrings() -> None:
    assert [*texts('def f(n):\n    """A."""\n    return f"call cache.reserve({n})", "b"')] == [
        (3, f"call cache.reserve({UNKNOWN})"),
        (3, "b"),
    ]
