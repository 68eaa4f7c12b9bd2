"""Schemas that no grammar is made of: too deep over references, without an end, or of too much work.

llguidance follows references on its stack, and looks whether patterns that hold together have a text in common.
"""

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from decimal import Decimal
from typing import Any, NamedTuple, NoReturn
from urllib.parse import unquote

from attnmesh.serve.refused import Refused
from attnmesh.serve.request_fields import shown
from attnmesh.serve.schema_numbers import check_numbers
from attnmesh.serve.schema_patterns import check_pattern
from attnmesh.serve.tool_schemas import inner_schemas

LEVELS = 128
"""Schemas inside each other, over references. Definitions that refer to each other in a circle count together."""

PATTERNS = 8
"""Patterns that hold for one text: each further pattern doubles the work."""

DIVISORS = 100_000
"""Sum of all `multipleOf` of a grammar, as whole numbers: the work for that many is about 1 s."""

PATTERN_NAMES = 32
"""Patterns of names of one object, each of which is compared with the others."""

INDEX = re.compile("0|[1-9][0-9]{0,8}")
"""Places in lists, as references name them: without zeros before (RFC 6901)."""

DEFINITIONS, CHOICES = ("$defs", "definitions"), ("anyOf", "oneOf")
OF_NOTHING = ("string", "number", "integer", "boolean", "null")
"""Types whose values have no values within."""


class Work(NamedTuple):
    """Most demands on one value: how many patterns, and the product of the numbers that it is a multiple of."""

    patterns: int = 0
    divisor: int = 1


class SchemaGraph:
    """A schema with the ones that it refers to.

    >>> tree = {"type": "object", "properties": {"next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}}
    >>> graph = SchemaGraph("f", tree)
    >>> graph.check_levels()
    >>> graph.check_ends()
    >>> SchemaGraph("f", tree | {"properties": {"next": {"$ref": "#"}}, "required": ["next"]}).check_ends()
    Traceback (most recent call last):
    attnmesh.serve.refused.Refused: f: expected schemas of values that end. One refers to itself without an end.
    """

    def __init__(self, field: str, root: Any) -> None:
        self.field = field
        self.root = root
        self.fields: dict[int, str] = {}
        """Names of the schemas within, by identity."""
        self._collect(field, root)
        self.defined = self._collect_defined()
        """The root and the definitions that are reached from it, each with the definitions that it refers to."""
        self.leaves_first, self.circles = self._sort_defined()

    def _collect(self, field: str, schema: Any) -> None:
        if isinstance(schema, dict):
            self.fields[id(schema)] = field
            for place, inner in inner_schemas(field, schema):
                self._collect(place, inner)

    def _collect_defined(self) -> dict[int, tuple[Any, list[Any]]]:
        reached = dict[int, tuple[Any, list[Any]]]()
        left = [self.root]
        while left:
            schema = left.pop()
            if id(schema) not in reached:
                reached[id(schema)] = schema, [self.target(inner) for inner in within(schema) if "$ref" in inner]
                left += reached[id(schema)][1]
        return reached

    def target(self, schema: Mapping[str, Any]) -> Any:
        """Return what a schema refers to, or raise."""
        pointer = schema["$ref"]
        field = f"{self.fields[id(schema)]}.$ref"
        is_pointer = isinstance(pointer, str) and (pointer == "#" or pointer.startswith("#/"))
        target = self.root
        for step in unquote(pointer).split("/")[1:] if is_pointer else ():
            name = step.replace("~1", "/").replace("~0", "~")
            if isinstance(target, list):
                target = target[int(name)] if INDEX.fullmatch(name) and int(name) < len(target) else None
            else:
                target = target.get(name) if isinstance(target, dict) else None
        if not is_pointer or not (isinstance(target, bool) or id(target) in self.fields):
            refuse(field, f'"#", or "#/" and the place of a schema within, given {shown(pointer)}')
        return target

    def _sort_defined(self) -> tuple[list[Any], list[Any]]:
        """Return definitions, those without references first, and those that lead to circles."""
        waits = {key: len(refs) for key, (_, refs) in self.defined.items()}
        users: dict[int, list[int]] = {key: [] for key in self.defined}
        for key, (_, refs) in self.defined.items():
            for target in refs:
                users[id(target)].append(key)
        ready = [key for key, count in waits.items() if not count]
        for key in ready:  # grows
            for user in users[key]:
                waits[user] -= 1
                if not waits[user]:
                    ready.append(user)
        return [self.defined[key][0] for key in ready], [
            schema for key, (schema, _) in self.defined.items() if waits[key]
        ]

    def check_levels(self) -> None:
        """Raise if schemas are inside each other too deep."""
        levels = dict[int, int]()
        for schema in self.leaves_first:
            _, refs = self.defined[id(schema)]
            levels[id(schema)] = depth_of(schema) + max((levels[id(target)] for target in refs), default=0)
        if sum(map(depth_of, self.circles)) + max(levels.values(), default=0) > LEVELS:
            refuse(self.field, f"schemas of at most {LEVELS} inside each other, over references")

    def check_ends(self) -> None:
        """Raise if a schema refers to itself so that no value of it ends."""
        finite = set[int]()
        left = [*self.leaves_first, *self.circles[::-1]]
        while left:
            ending = list[Any]()
            for schema in left:  # in this order most end after one pass
                if self._ends(schema, finite):
                    finite.add(id(schema))
                    ending.append(schema)
            if not ending:
                refuse(self.field, "schemas of values that end. One refers to itself without an end")
            left = [schema for schema in left if id(schema) not in finite]

    def _ends(self, schema: Any, finite: set[int]) -> bool:
        """Return whether a value of a schema ends, if values of the `finite` definitions do."""
        if isinstance(schema, bool):
            return True
        if "$ref" in schema and id(self.target(schema)) not in finite:
            return False
        if not all(self._ends(inner, finite) for inner in schemas_at(schema, "allOf")):
            return False
        for name in CHOICES:
            if name in schema and not any(self._ends(inner, finite) for inner in schemas_at(schema, name)):
                return False
        types = schema.get("type", OF_NOTHING)
        types = [types] if isinstance(types, str) else types
        if "enum" in schema or "const" in schema or any(kind in OF_NOTHING for kind in types):
            return True
        needed = {"object": self._members, "array": self._items}
        return not types or any(all(self._ends(inner, finite) for inner in needed[kind](schema)) for kind in types)

    def _members(self, schema: Mapping[str, Any]) -> Iterator[Any]:
        """Yield the schemas of members that an object must have."""
        named = schema.get("properties") or {}
        for name in schema.get("required") or ():
            yield named.get(name, schema.get("additionalProperties", True))

    def _items(self, schema: Mapping[str, Any]) -> Iterator[Any]:
        """Yield the schemas of items that a list must have."""
        least = schema.get("minItems")
        first = schemas_at(schema, "prefixItems")
        rest = schema.get("items", True)
        least = least if isinstance(least, int | float) else 0
        first, rest = (rest, schema.get("additionalItems", True)) if isinstance(rest, list) else (first, rest)
        yield from (item for index, item in enumerate(first) if index < least)
        if least > len(first):
            yield rest

    def work(self) -> Work:
        """Return the most demands on one value."""
        known: dict[int, Work] = {}
        for schema in self.leaves_first:
            self._work(schema, known)
        return self._work(self.root, known)

    def _work(self, schema: Any, known: dict[int, Work]) -> Work:
        if isinstance(schema, bool):
            return Work()
        if id(schema) not in known:
            known[id(schema)] = Work()  # for references of the schema to itself
            apart = [Work(int("pattern" in schema) + int("format" in schema), whole(schema.get("multipleOf")))]
            apart += [
                self._work(inner, known) for keyword, inner in children(schema) if keyword not in ("allOf", *CHOICES)
            ]
            parts = [either(apart), *(self._work(inner, known) for inner in schemas_at(schema, "allOf"))]
            parts += [either([self._work(inner, known) for inner in schemas_at(schema, name)]) for name in CHOICES]
            parts += [self._work(self.target(schema), known)] if "$ref" in schema else []
            product = math.prod(part.divisor for part in parts)
            known[id(schema)] = Work(sum(part.patterns for part in parts), min(product, DIVISORS + 1))
        return known[id(schema)]

    def divisors(self) -> int:
        """Return the sum of all `multipleOf`, each times those that may hold for the same value."""
        schemas = (inner for schema, _ in self.defined.values() for inner in within(schema))
        divisors = [whole(inner["multipleOf"]) for inner in schemas if "multipleOf" in inner]
        return sum(divisors) * max(1, self.work().divisor // max(divisors)) if divisors else 0

    def check_keywords(self) -> None:
        """Raise on addresses of schemas within (`$id`), choices of none, and numbers or patterns not held."""
        for schema in (inner for defined, _ in self.defined.values() for inner in within(defined)):
            field = self.fields[id(schema)]
            check_numbers(field, schema)
            check_pattern(f"{field}.pattern", schema.get("pattern"))
            names = schema.get("patternProperties", ())
            for name in names:
                check_pattern(f"{field}.patternProperties.{name[:60]}", name)
            for name in ("$id", "id"):
                if schema is not self.root and isinstance(schema.get(name), str):
                    refuse(f"{field}.{name}", "none within a schema")
            for name in CHOICES:
                if name in schema and not schema[name]:
                    refuse(f"{field}.{name}", "at least one schema")
            if len(names) > PATTERN_NAMES:
                refuse(f"{field}.patternProperties", f"at most {PATTERN_NAMES}")


def checked_divisors(field: str, schema: Any) -> int:
    """Raise if no grammar can be made of a schema. Return the sum of its divisors."""
    graph = SchemaGraph(field, schema)
    graph.check_levels()
    graph.check_keywords()
    graph.check_ends()
    if graph.work().patterns > PATTERNS:
        refuse(field, f"at most {PATTERNS} patterns that hold for one text")
    return graph.divisors()


def children(schema: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the schemas within one, but for definitions, with their keywords."""
    for keyword in schema:
        if keyword not in DEFINITIONS:
            yield from ((keyword, inner) for _, inner in inner_schemas("", {keyword: schema[keyword]}))


def within(schema: Any) -> Iterator[Mapping[str, Any]]:
    """Yield a schema and all within, but for definitions."""
    if isinstance(schema, dict):
        yield schema
        for _, inner in children(schema):
            yield from within(inner)


def depth_of(schema: Any) -> int:
    """Return how many schemas are inside each other.

    >>> depth_of({"properties": {"a": {"items": {"$ref": "#"}}, "b": True}})
    3
    """
    return 1 + max((depth_of(inner) for _, inner in children(schema)), default=0) if isinstance(schema, dict) else 1


def schemas_at(schema: Mapping[str, Any], keyword: str) -> list[Any]:
    """Return the schemas of a keyword; none without it."""
    return list(schema.get(keyword, ()))


def either(works: Iterable[Work]) -> Work:
    """Return what holds at most for a value of one of several schemas."""
    works = [Work(), *works]
    return Work(max(work.patterns for work in works), max(work.divisor for work in works))


def whole(number: Any) -> int:
    """Return the digits of a number as a whole one, at most one more than `DIVISORS`.

    >>> [whole(number) for number in (0.01, 12.5, 60, 1e9, "a")]
    [1, 125, 60, 100001, 1]
    """
    if isinstance(number, bool) or not isinstance(number, int | float):
        return 1
    if abs(number) > DIVISORS:
        return DIVISORS + 1
    digits = Decimal(repr(number)).normalize().as_tuple()
    value: int = int("".join(map(str, digits.digits))) * 10 ** max(0, int(digits.exponent))
    return min(max(1, value), DIVISORS + 1)


def refuse(field: str, expected: str) -> NoReturn:
    """Raise with a field and what is expected of it."""
    raise Refused(400, f"{field}: expected {expected}.", field)
