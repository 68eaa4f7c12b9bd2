"""Cut a whole tensor into this rank's shard, and put the shards of all ranks together again."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from attnmesh.checks.argument_checks import check_tensor
from attnmesh.comm.p2p import all_to_all_tokens
from attnmesh.core.layout import Layout, check_layout
from attnmesh.core.mask import FULL, Mask, check_mask
from attnmesh.errors import KernelError, LayoutError, ShapeError, warn_once
from attnmesh.guard.agreement import Agreement
from attnmesh.mesh.axes import RankMesh
from attnmesh.mesh.shapes import Shape
from attnmesh.mesh.shard_marks import ShardMark, marked, shard_marks
from attnmesh.mesh_attention.auto_choices import agreed_layout, check_auto
from attnmesh.runtime.operators import custom_operator
from attnmesh.runtime.tensors import is_dtensor


def shard(
    x: Tensor, mesh: DeviceMesh | None, *, layout: Layout | str, dim: int = 2, mask: Mask | None = None
) -> Tensor:
    """Return the tokens of a whole tensor that this rank holds, with gradients.

    Args:
        x: The whole tensor, equal on every rank.
        mesh: The mesh whose ranks share the tokens; None for one rank.
        layout: Which tokens each rank holds. "auto": under a mask with documents the layout that the planner prices
            lowest, of `Packed`, `Zigzag` and `Contiguous`, and `Zigzag` otherwise. All ranks pass it alike.
        dim: Dimension of the tokens.
        mask: Mask of the attention, which "auto" needs on several ranks.

    Returns:
        This rank's shard, with tokens in order of position. Calls that get this very tensor check its layout.

    Raises:
        InputError: The layout or the dimension is invalid, or x is itself a shard of this mesh.

    >>> import attnmesh as am
    >>> shard(torch.arange(6), None, layout=am.Zigzag(), dim=0)
    tensor([0, 1, 2, 3, 4, 5])
    """
    rank_mesh = RankMesh.of(mesh)
    applied_mask = FULL if mask is None else mask
    chooses = isinstance(layout, str) and not torch.compiler.is_compiling()
    with Agreement(rank_mesh, "shard", is_compared=chooses) as agreement:
        check_layout("shard layout", layout, auto=True)
        check_mask("shard mask", applied_mask)
        check_auto("shard", layout, mask, rank_mesh.ranks)
        dim = _checked_dim("shard", x, dim)
        mark = shard_marks().get(id(x))
        if mark is not None and mark.cuts_again(rank_mesh, dim):
            raise LayoutError("shard", "a whole tensor", "a shard of this mesh", "cut the whole tensor once")
        agreement.compare({"tokens": x.shape[dim], "layout": layout, "mask": mask})
    check_mask("shard mask", applied_mask, x.shape[dim])
    chosen = agreed_layout(layout, applied_mask, rank_mesh)
    part = x.index_select(dim, chosen.positions(x.shape[dim], rank_mesh.ranks, rank_mesh.shard_index).to(x.device))
    return marked(part, ShardMark(chosen, mask if chooses else None, rank_mesh, dim))


@torch.no_grad()
def unshard(
    x: Tensor,
    mesh: DeviceMesh | None,
    *,
    layout: Layout | str,
    length: int | None = None,
    dim: int = 2,
    mask: Mask | None = None,
) -> Tensor:
    """Return the whole tensor on every rank from the shards of all ranks: the inverse of `shard`, without gradients.

    Args:
        x: This rank's shard.
        mesh: The mesh whose ranks share the tokens; None for one rank.
        layout: Layout of the shards.
        length: Tokens of the whole sequence; counted if it is left out.
        dim: Dimension of the tokens.
        mask: Mask of the attention, which `layout="auto"` needs on several ranks, as in `shard`.

    Returns:
        The whole tensor, equal on every rank.

    Raises:
        InputError: An argument is invalid, or the shards are not those of the layout.

    >>> import attnmesh as am
    >>> unshard(torch.arange(6), None, layout=am.Zigzag(), dim=0)
    tensor([0, 1, 2, 3, 4, 5])
    """
    rank_mesh = RankMesh.of(mesh)
    applied_mask = FULL if mask is None else mask
    with Agreement(rank_mesh, "unshard") as agreement:
        check_layout("unshard layout", layout, auto=True)
        check_mask("unshard mask", applied_mask)
        check_auto("unshard", layout, mask, rank_mesh.ranks)
        check_tensor("unshard", x)
        dim = _checked_dim("unshard", x, dim)
        if (mark := shard_marks().get(id(x))) is not None:
            mark.check("unshard", layout, applied_mask, rank_mesh, dim)
        if x.requires_grad:
            given, fix = "one that asks for gradients", "call .detach() first, or keep the loss on the shards"
            raise KernelError("unshard", "a tensor without gradients", given, fix)
        other_dims = [size for other, size in enumerate(x.shape) if other != dim]
        options = {"layout": layout, "length": length, "mask": mask}
        fields = {"dtype": x.dtype, "other_dims": other_dims, "dim": dim, **options}
        table = agreement.compare(fields, payload=[x.shape[dim]])
    counts = [numbers[0] for numbers in table]
    length = sum(counts) if length is None else length
    check_mask("unshard mask", applied_mask, length)
    positions = _positions(agreed_layout(layout, applied_mask, rank_mesh), length, counts)
    whole = _gather_shards(x.movedim(dim, 0), rank_mesh, counts)
    _warn_of_whole_tensors(whole, counts)
    return whole.index_select(0, positions.argsort().to(x.device)).movedim(0, dim)  # of all dtypes, unlike index_copy


def unshard_runs(x: Tensor, mesh: RankMesh, sizes: Sequence[int], dim: int) -> Tensor:
    """Return the whole tensor on every rank from runs of these sizes, with gradients.

    All ranks go on with the same whole tensor. The gradient of a rank's run is the part of the rank's own gradient, so
    gradients of parameters have to be summed over the ranks.
    """
    sizes_and_indices = [*mesh.shape, *(axis.index for axis in mesh.axes)]
    whole: Tensor = unshard_op(x, dim % x.ndim, ",".join(mesh.group_names), sizes_and_indices, sizes)
    return whole


def _fake_whole(x: Tensor, dim: int, groups: str, sizes_and_indices: Sequence[int], sizes: Sequence[int]) -> Tensor:
    return x.new_empty([sum(sizes) if other == dim else size for other, size in enumerate(x.shape)])


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, ctx.dim, _, sizes_and_indices, sizes = inputs
    index = Shape(*sizes_and_indices[:3]).shard(*sizes_and_indices[3:])
    ctx.start, ctx.size = sum(sizes[:index]), sizes[index]


def _gradient(ctx: Any, dout: Tensor) -> list[Tensor]:
    return [dout.narrow(ctx.dim, ctx.start, ctx.size)]


@custom_operator("unshard", _fake_whole, _save_for_backward, _gradient)
def unshard_op(x: Tensor, dim: int, groups: str, sizes_and_indices: Sequence[int], sizes: Sequence[int]) -> Tensor:
    """Gather runs of these sizes along `dim`."""
    mesh = RankMesh.named(sizes_and_indices[:3], sizes_and_indices[3:], groups.split(","))
    whole = _gather_shards(x.movedim(dim, 0).contiguous(), mesh, list(sizes)).movedim(0, dim).contiguous()
    return whole.clone() if mesh.ranks == 1 else whole


def _gather_shards(x: Tensor, mesh: RankMesh, counts: list[int]) -> Tensor:
    """Return all shards in order of their number, gathered along one axis after the other, the innermost first."""
    gathered = 1  # shards gathered so far, from `first` on
    for axis in reversed(mesh.axes):
        if axis.group is not None:
            first = mesh.shard_index - mesh.shard_index % (gathered * axis.size)
            starts = [first + index * gathered for index in range(axis.size)]
            lengths = [sum(counts[start : start + gathered]) for start in starts]
            x = torch.cat(all_to_all_tokens([x] * axis.size, lengths, axis, dim=0))
        gathered *= axis.size
    return x


def _positions(layout: Layout, length: int, counts: list[int]) -> Tensor:
    """Return the positions of all tokens, shard by shard. Raise unless the counts are those of the layout."""
    parts = [layout.positions(length, len(counts), index) for index in range(len(counts))]
    if [len(part) for part in parts] != counts:
        expected = f"shards of {[len(part) for part in parts]} tokens for {layout} of length {length}"
        raise ShapeError(
            "unshard", expected, f"{counts}", "pass the layout and the length that the tensor was sharded with"
        )
    return torch.cat(parts)


def _warn_of_whole_tensors(x: Tensor, counts: list[int]) -> None:
    """Warn once if all ranks passed the same tokens, which are not all alike: shards of one sequence differ."""
    shard_tokens = counts[0]
    ranks = len(counts)
    if ranks == 1 or shard_tokens < 2 or {*counts} != {shard_tokens} or x.is_meta or x.numel() == 0:
        return
    sample = x.view(ranks, shard_tokens, -1)[:, :: max(1, shard_tokens // 64)]
    if bool((sample == sample[:1]).all()) and not bool((sample == sample[:, :1]).all()):
        same = f"unshard: x is the same on all {ranks} ranks, and counts as {ranks} shards"
        warn_once(f"{same}; leave unshard out if it is whole.")


def _checked_dim(subject: str, x: Tensor, dim: int) -> int:
    """Return the dim of the tokens, counted from 0. Raise unless x is a dense tensor that has it."""
    if not isinstance(x, Tensor) or x.layout != torch.strided or is_dtensor(x):
        check_tensor(subject, x)
    if not isinstance(dim, int) or not -x.ndim <= dim < x.ndim:
        fix = "say along which dim the tokens lie"
        raise ShapeError(subject, f"a dim of the tensor's {x.ndim}", f"dim {dim!r}", fix)
    return dim % x.ndim
