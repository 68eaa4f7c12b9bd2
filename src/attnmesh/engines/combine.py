"""Merge the partials that an engine's attention kernel returns, tokens first."""

from typing import Any

import torch
from torch import Tensor

from attnmesh.checks.argument_checks import check_tensor
from attnmesh.comm.rank_merge import RequestedMerge
from attnmesh.core.partial import DTYPE_NAMES, Partial, sum_dtype
from attnmesh.errors import DtypeError, InputError, ShapeError, type_and_shape
from attnmesh.mesh.axes import axis_of
from attnmesh.mesh_attention.merge_across import merge_across, merge_agreement

SUBJECT = "combine"


def combine(
    partial_output: Tensor,
    partial_lse: Tensor,
    *,
    cp_group: Any,
    is_lse_base_on_e: bool = True,
    return_lse: bool = False,
    output: str = "heads",
    seq_lens: Tensor | None = None,
    query_start_loc: Tensor | None = None,
    wire: torch.dtype | None = None,
    how: str = "auto",
) -> Any:
    """Return this rank's heads of attention over the keys of all ranks, from each rank's partial over its own keys.

    Rows of a rank without keys may hold anything, NaN too, if their `lse` is NaN or infinite, or their length is 0.

    Args:
        partial_output: This rank's output of all heads, (tokens, heads, dim).
        partial_lse: Its log-sum-exp, (tokens, heads).
        cp_group: The ranks that share a sequence: an engine's group coordinator, a process group, a mesh of one axis,
            or None for one rank.
        is_lse_base_on_e: False if the logarithm is in base 2, as FlashInfer's.
        return_lse: True returns the log-sum-exp over all keys too.
        output: "heads" for this rank's share of the heads, cut as `torch.tensor_split` cuts; "replicated" for all.
        seq_lens: Keys of each sequence on this rank, (sequences,).
        query_start_loc: First token of each sequence, and the end, (sequences + 1,). Left out, each has one token.
        wire: Dtype in which outputs travel: float32 unless it is given.
        how: "tree", "direct", "gather", "allreduce" or "auto", as in `merge_across`.

    Returns:
        The output, (tokens, heads of this rank, dim), with `return_lse` a pair of it and (tokens, heads of this rank).

    Raises:
        InputError: An argument cannot be served, or the ranks' calls differ.

    >>> out, lse = torch.randn(5, 4, 8), torch.randn(5, 4)
    >>> torch.equal(combine(out, lse, cp_group=None), out)
    True
    """
    group = getattr(cp_group, "device_group", cp_group)
    axis = axis_of(group, SUBJECT)
    try:
        _check_partials(partial_output, partial_lse, seq_lens, query_start_loc)
    except InputError as error:
        merge = RequestedMerge(axis, how, output)
        merge_agreement((partial_output, partial_lse), merge).raise_through_merge(error)
    lse = partial_lse.to(sum_dtype(partial_output.dtype))
    lse = lse.masked_fill(~lse.isfinite(), -torch.inf)  # kernels mark rows without keys by NaN or either infinity
    if seq_lens is not None:
        lse = lse.masked_fill(_without_keys(len(lse), seq_lens, query_start_loc)[:, None], -torch.inf)
    out = partial_output.masked_fill((lse == -torch.inf)[..., None], 0)
    partial = Partial(out.transpose(0, 1)[None], lse.T[None])
    base = "e" if is_lse_base_on_e else "2"
    merged = merge_across(partial, group, how=how, output=output, wire=wire, base=base)
    merged_out = merged.out[0].transpose(0, 1).contiguous()
    return (merged_out, merged.lse[0].T.contiguous().to(partial_lse.dtype)) if return_lse else merged_out


def _check_partials(out: Tensor, lse: Tensor, seq_lens: Tensor | None, query_start_loc: Tensor | None) -> None:
    """Raise unless these are partials with tokens first, and lengths of whole numbers."""
    check_tensor(f"{SUBJECT} partial_output", out)
    check_tensor(f"{SUBJECT} partial_lse", lse)
    if not all(str(x.dtype).removeprefix("torch.") in DTYPE_NAMES for x in (out, lse)):
        given, fix = f"{out.dtype} and {lse.dtype}", "cast them with .to(dtype)"
        raise DtypeError(SUBJECT, "an output and a log-sum-exp in floats", given, fix)
    if out.ndim != 3 or lse.shape != out.shape[:-1]:
        given = f"{tuple(out.shape)} and {tuple(lse.shape)}"
        fix = "put the tokens before the heads, and transpose an lse of (heads, tokens)"
        raise ShapeError(SUBJECT, "an output (tokens, heads, dim) and its lse (tokens, heads)", given, fix)
    for name, x in (("seq_lens", seq_lens), ("query_start_loc", query_start_loc)):
        is_whole = x is None or (isinstance(x, Tensor) and x.ndim == 1 and x.dtype in (torch.int32, torch.int64))
        if not is_whole:
            expected, fix = "a tensor (sequences,) of int32 or int64", "pass the engine's tensor of this batch"
            raise DtypeError(f"{SUBJECT} {name}", expected, type_and_shape(x), fix)
    if seq_lens is not None:
        sequences = len(out) if query_start_loc is None else len(query_start_loc) - 1
        if len(out) and not 0 < len(seq_lens) <= sequences:
            given = f"{len(seq_lens)} for {sequences}"
            fix = "pass query_start_loc if a sequence has several tokens"
            raise ShapeError(f"{SUBJECT} seq_lens", "a length of each sequence", given, fix)


def _without_keys(tokens: int, seq_lens: Tensor, query_start_loc: Tensor | None) -> Tensor:
    """Return True for tokens of sequences that have no keys on this rank, (tokens,). Reads nothing on the CPU."""
    sequence = torch.arange(tokens, device=seq_lens.device)
    if query_start_loc is not None:
        sequence = torch.searchsorted(query_start_loc[1:].contiguous(), sequence, right=True)
    inside = sequence < len(seq_lens)  # tokens beyond the last sequence fill a batch up
    return (seq_lens[sequence.clamp(max=len(seq_lens) - 1)] == 0) & inside
