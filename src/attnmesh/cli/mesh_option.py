"""The mesh of `--mesh` for a model: the axes that were named, or those that send least."""

from typing import NamedTuple

from attnmesh.errors import MeshError, require
from attnmesh.mesh.shapes import AXES, Shape, elements, mesh_shapes, share_evenly
from attnmesh_command.option_texts import TP, axes_of, check_ranks_of_mesh


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


def choose_mesh(text: str, ranks: int, q_heads: int, kv_heads: int) -> MeshChoice:
    """Return the mesh of `--mesh`. Axes of attention that are not named are those that send least."""
    named = axes_of(text)
    check_ranks_of_mesh(text, ranks)
    if shared := named.get(f"{TP}=keys"):
        return MeshChoice(Shape(1, 1, shared), 1, shared > 1, "as --mesh says")
    tp = named.get(TP, 1)
    fits = ranks % tp == 0 and q_heads % tp == 0 and share_evenly(kv_heads, tp)
    given = f"{text} on {ranks} ranks, with {q_heads}/{kv_heads} heads"
    fix = "take another number, or give the ranks to the keys axis"
    require(fits, MeshError, "--mesh", "a tp that divides the ranks and the heads", given, fix)
    heads = q_heads // tp, max(1, kv_heads // tp)
    if len(named) > (TP in named):
        shape = Shape(*(named.get(name, 1) for name in AXES))
        fits, expected = heads[1] % shape.heads == 0, f"a heads axis that divides {heads[1]} key heads"
        given, fix = f"{text}, with {heads[0]}/{heads[1]} heads on a rank", "give its ranks to another axis"
        require(fits, MeshError, "--mesh", expected, given, fix)
        return MeshChoice(shape, tp, False, "as --mesh says")
    return MeshChoice(*_best(ranks // tp, tp, *heads))


def _best(ranks: int, tp: int, q_heads: int, kv_heads: int) -> tuple[Shape, int, bool, str]:
    """Return the mesh that sends least in prefill, and the reason."""
    shapes = mesh_shapes(ranks, q_heads, kv_heads, training=False)
    if len(shapes) == 1:
        reason = "" if tp == 1 else "as --mesh says"
        return shapes[0], tp, False, reason if ranks == 1 else f"no other shape serves {q_heads}/{kv_heads} heads"
    sent = [sum(elements(shape, q_heads, kv_heads, training=False)) for shape in shapes]
    other, keys = MeshChoice(shapes[1], tp, False, ""), Shape(1, 1, ranks)
    reason = f"a prompt sends least so; with {other} it sends {sent[1] / sent[0]:.1f} times as much"
    decoding = f". New tokens alone send least with {MeshChoice(keys, tp, False, '')}"
    return shapes[0], tp, False, reason + decoding * (shapes[0] != keys)
