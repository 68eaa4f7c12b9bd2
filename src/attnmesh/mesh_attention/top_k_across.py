"""`top_k_across`: the keys with the highest scores on all ranks, merged along the tree of partials."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from attnmesh.checks.argument_checks import check_one_device, check_tensor
from attnmesh.comm.topology import agreed_merge_rounds
from attnmesh.comm.transport import agreed_transport
from attnmesh.core.candidates import best_candidates, pack_candidates, unpack_candidates
from attnmesh.core.partial import DTYPE_NAMES
from attnmesh.core.selection import NO_INDEX
from attnmesh.errors import ArgumentError, DtypeError, KernelError, ShapeError, check_count, type_and_shape
from attnmesh.guard.agreement import Agreement, may_compare
from attnmesh.mesh.axes import Axis, axis_of, group_named, mesh_of_axis
from attnmesh.runtime.operators import custom_operator


def top_k_across(
    scores: Tensor, indices: Tensor, k: int, group: ProcessGroup | DeviceMesh | None, *, unique: bool = False
) -> tuple[Tensor, Tensor]:
    """Return the k highest scores of all ranks and the indices of their keys, best first, alike on all ranks.

    Of equal scores the lowest index comes first. So the result does not depend on which rank holds which key. Scores
    are compared in float32. NaN comes before all numbers and is returned, as by `torch.topk`. A score of -inf, or an
    index of 2^31 - 1, stands for no key.

    Args:
        scores: Scores of this rank's keys, (..., n), without gradients. The other dims are equal on all ranks.
        indices: Index of each key in the whole sequence, (..., n), integers from 0; or (n,), the same for all rows. On
            a GPU a negative one is not read and gives NaN for key 0.
        k: Keys to find in each row, equal on all ranks.
        group: A process group, a mesh of one axis, or None for a single rank.
        unique: True if several ranks may have scores of one index, as of the parts of a block: the highest counts.

    Returns:
        Scores in float32 and indices in int32, (..., k). Where there are fewer keys they end with -inf and 2^31 - 1.

    Raises:
        InputError: An argument cannot be served, or the ranks' calls differ.
        RankFailure: A rank is lost.

    >>> scores, indices = top_k_across(torch.tensor([0.5, 2.0, 2.0]), torch.tensor([7, 8, 3]), 2, None)
    >>> scores.tolist(), indices.tolist()
    ([2.0, 2.0], [3, 8])
    """
    axis = axis_of(group, "top_k_across")
    device = scores.device if isinstance(scores, Tensor) else torch.device(mesh_of_axis(axis).device_type)
    is_compared = axis.size > 1 and may_compare(device)
    with Agreement(mesh_of_axis(axis), "top_k_across", is_compared=is_compared) as agreement:
        _check_candidates(scores, indices, k, unique)
        agreement.compare({"rows": list(scores.shape[:-1]), "k": k, "unique": unique})
    wrong = (indices < 0) | (indices > NO_INDEX)
    candidates = pack_candidates(scores.masked_fill(wrong, torch.nan), indices.masked_fill(wrong, 0).expand_as(scores))
    top: Tensor = best_op(
        best_candidates(candidates, k, unique=unique), axis.group_name, [axis.size, axis.index], unique
    )
    return unpack_candidates(top)


@custom_operator("best_across", lambda candidates, *_: torch.empty_like(candidates))
def best_op(candidates: Tensor, group: str, size_and_index: Sequence[int], unique: bool) -> Tensor:
    """Merge candidates as an operator, which is one node of a compiled graph."""
    top = best_across(candidates, Axis(size_and_index[0], size_and_index[1], group_named(group)), unique=unique)
    return top.clone() if top is candidates else top


def best_across(candidates: Tensor, axis: Axis, *, unique: bool = False) -> Tensor:
    """Return the best k candidates of all ranks, best first. Each rank passes its own best k.

    Candidates merge along the tree of partials, in messages of rows x k x 8 bytes. Ranks have compared their calls.
    """
    if axis.size == 1 or not candidates.numel():
        return candidates
    k = candidates.shape[-1]

    def best_of_both(messages: Tensor) -> Tensor:
        both = messages.view(torch.int64).unflatten(-1, candidates.shape).movedim(0, -2).flatten(-2)
        return best_candidates(both, k, unique=unique).view(torch.uint8).reshape(-1)

    message = candidates.contiguous().view(torch.uint8).reshape(-1)
    merged = agreed_transport(axis, candidates.device).reduce(
        message, agreed_merge_rounds(axis, reproducible=False)[axis.index], best_of_both
    )
    return merged.view(torch.int64).view(candidates.shape)


def _check_candidates(scores: Tensor, indices: Tensor, k: int, unique: bool) -> None:
    check_tensor("top_k_across scores", scores)
    if str(scores.dtype).removeprefix("torch.") not in DTYPE_NAMES or scores.ndim == 0:
        fix = "pass the scores of this rank's keys in floats, (..., n)"
        raise DtypeError("top_k_across scores", "a tensor of floats", type_and_shape(scores), fix)
    if torch.is_grad_enabled() and scores.requires_grad:
        given, fix = "one with requires_grad=True", "call it under torch.no_grad()"
        raise KernelError("top_k_across scores", "a tensor without gradients", given, fix)
    subject, fix = "top_k_across indices", "pass the index of each key in the whole sequence"
    if not isinstance(indices, Tensor) or indices.dtype not in (torch.int32, torch.int64):
        raise DtypeError(subject, "a tensor of int32 or int64", type_and_shape(indices), fix)
    check_tensor(subject, indices)
    if indices.shape not in (scores.shape, scores.shape[-1:]):
        expected = f"shape {tuple(scores.shape)}, as the scores"
        raise ShapeError(subject, expected, f"{tuple(indices.shape)}", fix)
    check_one_device("top_k_across", {"scores": scores, "indices": indices})
    if indices.is_cpu and indices.numel() and may_compare(indices.device):
        first, last = (int(x) for x in indices.aminmax())
        if first < 0 or last > NO_INDEX:
            raise ShapeError(subject, f"numbers from 0 to {NO_INDEX}", f"{first} to {last}", fix)
    if type(k) is not int:
        raise ShapeError("top_k_across k", "a whole number, 1 or more", repr(k), "count the keys to find as an int")
    check_count("top_k_across k", k, "find at least one key")
    if not isinstance(unique, bool):
        fix = "pass unique=True if one index has scores on several ranks"
        raise ArgumentError("top_k_across unique", "True or False", repr(unique), fix)
