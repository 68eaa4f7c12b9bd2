"""The options `--mesh`, text such as "tp=2,keys=4" to the ranks along named axes, and `--kv`."""

import re
from math import prod
from typing import Annotated, NamedTuple

import typer

from attnmesh.core.storage import STORAGES
from attnmesh.errors import ArgumentError, MeshError, check_choice, require
from attnmesh.mesh.shapes import AXES, Shape, elements, mesh_shapes, share_evenly

KvOption = Annotated[
    str, typer.Option("--kv", help=f"How keys and values are stored: auto, as the model's, or {', '.join(STORAGES)}.")
]

TP = "tp"
"""Name of the axis of ranks that share weights and heads."""

EXAMPLES = 'axes by name, as "queries=2,keys=2", "tp=2,keys=4" or "tp=keys=8", or "auto"'


def storage_of(kv: str) -> str | None:
    """Return the storage of `--kv`."""
    check_choice("--kv", kv, ("auto", *STORAGES), "leave it out", ArgumentError)
    return None if kv == "auto" else kv


class MeshChoice(NamedTuple):
    """A mesh of attention, and the ranks that share weights beside it or within it."""

    shape: Shape
    """Ranks along the axes of attention."""
    tp: int
    """Ranks that share weights and heads, beside those of attention."""
    is_shared: bool
    """True if the ranks along the keys axis also share the weights."""
    reason: str

    @property
    def output(self) -> str:
        """Heads that attention returns on a rank: its share where it also has a share of the weights, or all."""
        return "heads" if self.is_shared else "replicated"

    def __str__(self) -> str:
        """Return the text of `--mesh`.

        >>> print(MeshChoice(Shape(1, 1, 4), 2, False, ""), MeshChoice(Shape(1, 1, 8), 1, True, ""))
        tp=2,keys=4 tp=keys=8
        """
        if self.is_shared:
            return f"{TP}=keys={self.shape.keys}"
        sizes = {TP: self.tp, **self.shape._asdict()}
        return ",".join(f"{name}={size}" for name, size in sizes.items() if size > 1) or "one rank"


def axes_of(text: str) -> dict[str, int]:
    """Return the ranks along each axis that is named; along "tp=keys" for ranks that share both.

    >>> axes_of("tp=2,keys=4"), axes_of("tp=keys=8"), axes_of("auto")
    ({'tp': 2, 'keys': 4}, {'tp=keys': 8}, {})
    """
    found: dict[str, int] = {}
    for part in text.lower().split(",") if text != "auto" else ():
        name, _, size = part.strip().rpartition("=")
        known = name in (TP, *AXES, f"{TP}=keys", f"keys={TP}") and name not in found
        if not known or not re.fullmatch("[0-9]{1,9}", size) or int(size) == 0:
            sizes = re.fullmatch("([0-9]{1,4})x([0-9]{1,4})x([0-9]{1,4})", text)
            named = dict(zip(AXES, sizes.groups(), strict=True)) if sizes else {}
            fix = ",".join(f"{axis}={count}" for axis, count in named.items())
            fix = fix or (f"{part}=2" if part in (TP, *AXES) else "")
            raise MeshError("--mesh", EXAMPLES, repr(text), f"write --mesh {fix}" if fix else "leave it out")
        found[f"{TP}=keys" if "=" in name else name] = int(size)
    if f"{TP}=keys" in found and len(found) > 1:
        raise MeshError("--mesh", "tp=keys alone", repr(text), "give these ranks to it, or name tp and keys apart")
    return found


def ranks_of_axes(text: str) -> int:
    """Return the ranks of the axes that are named."""
    return prod(axes_of(text).values())


def choose(text: str, ranks: int, q_heads: int, kv_heads: int) -> MeshChoice:
    """Return the mesh of `--mesh`. Axes of attention that are not named are those that send least."""
    named = axes_of(text)
    if shared := named.get(f"{TP}=keys"):
        _check_count(text, ranks, shared)
        return MeshChoice(Shape(1, 1, shared), 1, shared > 1, "it was asked for")
    tp = named.get(TP, 1)
    fits = ranks % tp == 0 and q_heads % tp == 0 and share_evenly(kv_heads, tp)
    given = f"{text} on {ranks} ranks, with {q_heads}/{kv_heads} heads"
    fix = "take another number, or give the ranks to the keys axis"
    require(fits, MeshError, "--mesh", "a tp that divides the ranks and the heads", given, fix)
    heads = q_heads // tp, max(1, kv_heads // tp)
    if len(named) > (TP in named):
        shape = Shape(*(named.get(name, 1) for name in AXES))
        _check_count(text, ranks, shape.ranks * tp)
        fits, expected = heads[1] % shape.heads == 0, f"a heads axis that divides {heads[1]} key heads"
        given, fix = f"{text}, with {heads[0]}/{heads[1]} heads on a rank", "give its ranks to another axis"
        require(fits, MeshError, "--mesh", expected, given, fix)
        return MeshChoice(shape, tp, False, "it was asked for")
    return MeshChoice(*_best(ranks // tp, tp, *heads))


def _check_count(text: str, ranks: int, named: int) -> None:
    given, fix = f"{text}, which is {named}", "change --mesh or --ranks, or leave one out"
    require(ranks == named, MeshError, "--mesh", f"{ranks} ranks", given, fix)


def _best(ranks: int, tp: int, q_heads: int, kv_heads: int) -> tuple[Shape, int, bool, str]:
    """Return the mesh that sends least in prefill, and the reason."""
    shapes = mesh_shapes(ranks, q_heads, kv_heads, training=False)
    if len(shapes) == 1:
        reason = "one rank" if tp == 1 else "it was asked for"
        return shapes[0], tp, False, reason if ranks == 1 else f"no other shape serves {q_heads}/{kv_heads} heads"
    sent = [sum(elements(shape, q_heads, kv_heads, training=False)) for shape in shapes]
    other = MeshChoice(shapes[1], tp, False, "")
    figures = f"{sent[0]:.0f} elements a token and column of a head, {other} {sent[1]:.0f}"
    return shapes[0], tp, False, f"of {len(shapes)} shapes it sends least in prefill: {figures}"
