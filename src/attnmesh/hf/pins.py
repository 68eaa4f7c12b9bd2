"""Checks of what a family needs of transformers. Where a part is missing, the types that need it are refused alone.

attnmesh reads some fields with a default. After a renaming in transformers every model would silently get the default.
So a record lists what its type must have, and the digests of the sources that attnmesh follows.
"""

import ast
from collections.abc import Iterable
from functools import cached_property
from hashlib import sha256
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

import torch

from attnmesh.errors import VersionError
from attnmesh.hf.family import CONFIGURATION, MODELING, MODELS, Pins, family_of_class
from attnmesh.hf.transformers_names import TRANSFORMERS

CHECKED: set[object] = set()
"""Configurations' classes and shared pins that have passed."""


def check_family(config: Any) -> None:
    """Raise unless the installed transformers has what a model and its text model need, as attnmesh knows it."""
    for part in (config, config.get_text_config(decoder=True)):
        if type(part) not in CHECKED:
            _check_class(part)


@torch.compiler.disable  # type: ignore[untyped-decorator] # it reads files
def _check_class(config: Any) -> None:
    """Raise unless the record of a configuration's class holds. Classes of other packages have no record."""
    stock: Any = next((base for base in type(config).__mro__ if base.__module__.startswith(MODELS)), None)
    if stock is not None:
        family = family_of_class(stock)
        layer = config.per_layer_config[0] if config.is_heterogeneous else config
        for name in family.fields.split():
            if not hasattr(layer, name):
                raise_lost(family.type, f"{stock.__name__}.{name}")
        source = ModuleSource(stock.__module__.replace(CONFIGURATION, MODELING))
        for part, names in family.stores.items():
            for name in sorted({*names.split()} - source.assigned_attributes(part)):
                raise_lost(family.type, f"{part}.{name}")
        _check_sources(family.type, source, family.sources.items())
        for pins in family.uses:
            check_pins(pins, family.type)
    CHECKED.add(type(config))


@torch.compiler.disable  # type: ignore[untyped-decorator] # it reads files
def check_pins(pins: Pins, kind: str) -> None:
    """Raise unless transformers has what `pins` name. Models of the type `kind` need it by their settings."""
    if pins.name in CHECKED:
        return
    for name in pins.names.split():
        TRANSFORMERS.find(name, f"attnmesh.hf {kind}")
    _check_sources(kind, ModuleSource(pins.module), pins.sources.items())
    CHECKED.add(pins.name)


def _check_sources(kind: str, source: "ModuleSource", digests: Iterable[tuple[str, str]]) -> None:
    """Raise unless the sources of functions have the digests of those that attnmesh follows."""
    for name, digest in digests:
        source_digest = source.digest(name)
        if source_digest is None:
            raise_lost(kind, name)
        if source_digest != digest:
            expected = f"{TRANSFORMERS.requirement} with the {name} that attnmesh follows"
            TRANSFORMERS.refuse_or_warn(f"attnmesh.hf {kind}", expected, f"{TRANSFORMERS.installed} with another one")


def raise_lost(kind: str, name: str) -> NoReturn:
    """Raise for a part of transformers that a model type needs, and that the installed version does not have."""
    expected, given = f"{TRANSFORMERS.requirement} with {name}", f"{TRANSFORMERS.installed} without it"
    raise VersionError(f"attnmesh.hf {kind}", expected, given, TRANSFORMERS.fix)


class ModuleSource:
    """The code of a module, as its file has it: packages with faster kernels replace functions when they are loaded."""

    def __init__(self, module: str) -> None:
        self.module = module

    @cached_property
    def lines(self) -> list[str]:
        """The lines of the file; none if there is no file."""
        path = Path(import_module(self.module).__file__ or "")
        return path.read_text(encoding="utf-8").splitlines() if path.is_file() else []

    @cached_property
    def parts(self) -> dict[str, ast.AST]:
        """Functions, classes and methods, by name."""
        nodes: dict[str, ast.AST] = {}
        for node in ast.parse("\n".join(self.lines)).body:
            if isinstance(node, ast.ClassDef):
                nodes |= {
                    f"{node.name}.{method.name}": method for method in node.body if isinstance(method, ast.FunctionDef)
                }
            if isinstance(node, ast.ClassDef | ast.FunctionDef):
                nodes[node.name] = node
        return nodes

    def digest(self, name: str) -> str | None:
        """Return a digest of a function's source, without comments and docstring; None if there is no function."""
        node: Any = self.parts.get(name)
        if node is None:
            return None
        first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
        comment = node.body[0] if ast.get_docstring(node, clean=False) is not None else None
        skipped = range(0) if comment is None else range(comment.lineno, comment.end_lineno + 1)
        numbers = (number for number in range(first, node.end_lineno + 1) if number not in skipped)
        lines = [line for number in numbers if (line := self.lines[number - 1].strip()) and not line.startswith("#")]
        return sha256("\n".join(lines).encode()).hexdigest()[:12]

    def assigned_attributes(self, name: str) -> set[str]:
        """Return the attributes that a class sets on its instances."""
        nodes = ast.walk(self.parts[name]) if name in self.parts else ()
        targets = (node for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store))
        return {node.attr for node in targets if isinstance(node.value, ast.Name) and node.value.id == "self"}
