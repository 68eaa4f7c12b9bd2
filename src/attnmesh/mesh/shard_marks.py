"""Marks of shards: how `shard` cut a tensor, so that a call which names another layout raises.

A mark belongs to one tensor object, and goes with it. What is computed from a shard has none, and is not checked.
Marks are kept beside tensors, not on them: a shard is saved and copied like any tensor.
"""

import weakref
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from attnmesh.core.layout import Layout, Zigzag
from attnmesh.core.mask import Mask
from attnmesh.errors import LayoutError
from attnmesh.mesh.axes import RankMesh
from attnmesh.runtime.world import cached_per_world


class ShardMark(NamedTuple):
    """The cut of a shard: its layout, the mask if that chose the layout, the mesh, and the dim of the tokens."""

    layout: Layout
    mask: Mask | None
    mesh: RankMesh
    dim: int

    def check(self, subject: str, layout: Layout | str, mask: Mask, mesh: RankMesh, dim: int) -> None:
        """Raise unless the shard was cut by this layout, mask and mesh, along this dim."""
        expected_layout = unpriced_layout(layout, mask, mesh.ranks)
        if expected_layout is not None and expected_layout != self.layout:
            fix = "pass the layout that am.shard got"
            raise LayoutError(subject, f"a shard of {expected_layout}", f"one of {self.layout}", fix)
        if expected_layout is None and self.mask not in (None, mask):
            fix = "pass one mask to am.shard and to this call"
            raise LayoutError(subject, f'a shard of layout="auto" for {mask}', f"one for {self.mask}", fix)
        expected_shard, marked_shard = (f"shard {axes.shard_index} of {axes.ranks}" for axes in (mesh, self.mesh))
        if marked_shard != expected_shard:
            fix = "call am.shard with the mesh of this call"
            raise LayoutError(subject, expected_shard, marked_shard, fix)
        if self.dim != dim:
            given, fix = f"one cut along dim {self.dim}", f"call am.shard with dim={dim} on the whole tensor"
            raise LayoutError(subject, f"a shard cut along dim {dim}", given, fix)

    def cuts_again(self, mesh: RankMesh, dim: int) -> bool:
        """Return whether `shard` on this mesh, along this dim, would cut the shard once more."""
        return mesh.ranks > 1 and self.mesh == mesh and self.dim == dim


@cached_per_world()
def shard_marks() -> dict[int, ShardMark]:
    """Return the marks of the shards that live, by the identity of the tensor."""
    return {}


def marked(x: Tensor, mark: ShardMark) -> Tensor:
    """Mark the tensor, and return it. In a graph it gets no mark."""
    if not torch.compiler.is_compiling():
        shard_marks()[id(x)] = mark
        weakref.finalize(x, _forget, id(x)).atexit = False
    return x


def _forget(key: int) -> None:
    shard_marks().pop(key, None)


def check_not_cut(subject: str, arguments: Mapping[str, object], fix: str) -> None:
    """Raise if one of the arguments is a shard of a mesh of several ranks."""
    for name, mark in _marks(arguments).items():
        if mark.mesh.ranks > 1:
            raise LayoutError(f"{subject} {name}", "all tokens", f"a shard of {mark.mesh.ranks} ranks", fix)


def check_equal_cuts(subject: str, arguments: Mapping[str, object]) -> None:
    """Raise if the arguments are shards of several layouts."""
    marks = _marks(arguments)
    if len({mark.layout for mark in marks.values()}) > 1:
        given = ", ".join(f"{name} of {mark.layout}" for name, mark in marks.items())
        raise LayoutError(subject, "shards of one layout", given, "cut them with one layout")


def unpriced_layout(layout: Layout | str, mask: Mask, ranks: int) -> Layout | None:
    """Return the layout given, or for "auto" the one of a mask without documents; None if it depends on prices."""
    if not isinstance(layout, str):
        return layout
    return Zigzag() if len(mask.documents) < 2 or ranks == 1 else None


def _marks(arguments: Mapping[str, object]) -> dict[str, ShardMark]:
    """Return the marks of the arguments that are shards; none in a graph."""
    if torch.compiler.is_compiling():
        return {}
    return {name: mark for name, x in arguments.items() if (mark := shard_marks().get(id(x))) is not None}
