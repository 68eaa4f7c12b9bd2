"""Means over the tokens of all ranks, with gradients that are right once they are averaged over the ranks."""

from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from attnmesh.core.layout import Contiguous
from attnmesh.core.partial import sum_dtype
from attnmesh.errors import ArgumentError, DtypeError, InputError, MeshError, ShapeError, type_and_shape
from attnmesh.guard.agreement import Agreement
from attnmesh.hf.shard_tensors import ShardTensor
from attnmesh.mesh.axes import RankMesh
from attnmesh.mesh_attention.sharding import unshard


def mean_over_mesh(values: Tensor, mask: Tensor | None, mesh: DeviceMesh | None) -> Tensor:
    """Return the mean of values over the tokens of all ranks: the same number on every rank, with gradients.

    A loss of one's own needs it, because ranks have unequally many labels. Its gradients are those of one device once
    they are averaged over the ranks, as DDP and FSDP2 do.

    Args:
        values: One value for each of this rank's tokens, such as losses.
        mask: True for the tokens that count, in the same shape; None for all. Their number must not be 0 on all ranks.
            1 and 0 stand for True and False.
        mesh: The mesh that shares the sequence; None for one device.

    Returns:
        A scalar, in float32 or wider.

    Raises:
        InputError: Values are no floats, the mask has another shape or other values, or no token counts.

    >>> mean_over_mesh(torch.tensor([1.0, 2.0, 6.0]), torch.tensor([True, True, False]), None)
    tensor(1.5000)
    """
    counts = torch.ones_like(values, dtype=torch.bool) if mask is None and isinstance(values, Tensor) else mask
    try:
        _check(values, counts, RankMesh.of(mesh).ranks)
    except InputError as error:  # other ranks may wait in the sum already
        Agreement(RankMesh.of(mesh), "mean_over_mesh").raise_on_all(error)
    assert counts is not None
    values, counts = (x.plain() if isinstance(x, ShardTensor) else x for x in (values, counts))
    total = values.to(sum_dtype(values.dtype)).masked_fill(~counts.bool(), 0.0).sum()
    not_boolean = (counts != counts.bool()).sum()
    own_sums = torch.stack((total.detach(), counts.bool().sum().to(total), not_boolean.to(total)))
    totals = unshard(own_sums[None], mesh, layout=Contiguous(), dim=0).sum(0)
    if not bool(totals[2] == 0):
        expected = "True or 1 for tokens that count, False or 0 for others"
        fix = "pass targets != -100, and multiply the values by weights of their own"
        raise ArgumentError("mean_over_mesh mask", expected, "other numbers, as labels are", fix)
    if not bool(totals[1] > 0):
        fix = "leave batches without labels out"
        raise ShapeError("mean_over_mesh mask", "a token that counts on some rank", "none", fix)
    return mean_over_ranks(total * RankMesh.of(mesh).ranks / totals[1], mesh)


def _check(values: Any, counts: Any, ranks: int) -> None:
    """Raise unless `values` are floats of a batch on as many ranks, and `counts` has their shape."""
    is_float = isinstance(values, Tensor) and values.is_floating_point()
    if not is_float:
        fix = "pass losses with reduction='none'"
        raise DtypeError("mean_over_mesh values", "a tensor of floats", type_and_shape(values), fix)
    fits = isinstance(counts, Tensor) and counts.shape == values.shape
    if not fits:
        expected = f"a tensor of shape {tuple(values.shape)}"
        raise ShapeError("mean_over_mesh mask", expected, type_and_shape(counts), "pass one value for each token")
    ranks_of_values = values.sequence.ranks if isinstance(values, ShardTensor) else ranks
    if ranks != ranks_of_values:
        expected = f"one of {ranks_of_values} ranks, as of the values"
        raise MeshError("mean_over_mesh mesh", expected, f"one of {ranks}", "pass the mesh of shard_batch")


def mean_over_ranks(loss: Tensor, device_mesh: DeviceMesh | None) -> Tensor:
    """Return the mean of the ranks' losses. Its gradient is of this rank's loss: gradients are averaged over ranks."""
    mean: Tensor = cast(Any, _MeanOverRanks).apply(loss, device_mesh)
    return mean


class _MeanOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: Tensor, device_mesh: DeviceMesh | None) -> Tensor:
        return unshard(loss.detach()[None], device_mesh, layout=Contiguous(), dim=0).mean()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None
