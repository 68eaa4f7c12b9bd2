"""Merges of stacked partials, in plain tensors or in received messages: one launch where Triton is supported.

Blocks of one rank and messages of several ranks are merged by the same arithmetic, so that they give the same bits.
"""

import math
import warnings
from collections.abc import Sequence
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor

from attnmesh.core.digest import bits
from attnmesh.core.partial import Partial, merge_stack, sum_dtype, with_sinks
from attnmesh.kernels.triton_runtime import installed, interpreted, launch, powers_covering

MERGE_PROGRAM_ROWS = 16
"""Rows per program instance. A decode step has few rows, and small tiles spread them over the chip."""


def merge_stack_on_device(
    stacked: Partial,
    into: Partial | None = None,
    *,
    sinks: Tensor | None = None,
    checksums: Tensor | None = None,
    checksum: Tensor | None = None,
) -> Partial:
    """Return the merge of partials stacked along a first dim, with sinks, written to `into` if given.

    With Triton, the maximum of the `checksums` is written to `checksum`. If its two values do not cancel, ranks
    disagree and the result is NaN.
    """
    if not use_triton(stacked.lse):
        return copy_into(with_sinks(merge_stack(stacked), sinks), into)
    return merge_stack_by_triton(stacked, into, sinks, checksums, checksum)


def merge_stack_by_triton(
    stacked: Partial,
    into: Partial | None,
    sinks: Tensor | None,
    checksums: Tensor | None = None,
    checksum: Tensor | None = None,
) -> Partial:
    """Return the merge of partials on a device that Triton supports, as `merge_stack_on_device` does."""
    if into is None:
        shape = stacked.out.shape[1:]
        out = stacked.out.new_empty(shape, dtype=sum_dtype(stacked.out.dtype))
        into = Partial(out, stacked.lse.new_empty(shape[:-1]))
    _launch(stacked, into, sinks, checksums, checksum)
    return into


def launch_checksum(
    tensors: Sequence[Tensor], call_hash: int, device_counts: Tensor, modulus: int, checksum: Tensor
) -> Tensor:
    """Write the checksum of a call: of its hash, one or two tensors, and the length of a cache."""
    patterns = [bits(x) for x in tensors]
    counts = [len(x) for x in patterns]
    launch(
        "decode",
        "checksum",
        (1,),
        checksum.device,
        bits=patterns[0],
        count=counts[0],
        other_bits=patterns[-1],
        other_count=sum(counts[1:]),
        device_counts=device_counts,
        call_hash=call_hash % modulus,
        checksum=checksum,
        MODULUS=modulus,
        WIDE=1024,
    )
    return checksum


def merge_in_pairs(blocks: Partial) -> Partial:
    """Return the merge of stacked blocks along a tree: pairs that differ in the highest bit, then the next bit."""
    while (count := len(blocks.lse)) > 1:
        half = 1 << (count - 1).bit_length() - 1
        pairs = count - half
        stacked = (x.as_strided((2, pairs, *x.shape[1:]), (half * x.stride(0), *x.stride())) for x in blocks)
        both = merge_stack_on_device(Partial(*stacked))
        blocks = Partial(*(torch.cat((x, y[pairs:half])) for x, y in zip(both, blocks, strict=True)))
    return Partial(blocks.out[0], blocks.lse[0])


def by_residue(blocks: Partial, first: int | Tensor) -> Partial:
    """Return stacked partials of blocks from number `first` on, each at its number modulo a power of two.

    `merge_in_pairs` then gives the bits that it gives for all blocks from number 0 on, if the earlier ones are empty.
    """
    count = len(blocks.lse)
    size = 1 << (count - 1).bit_length()
    residues = (first + torch.arange(count, device=blocks.lse.device)) % size
    out = blocks.out.new_zeros(size, *blocks.out.shape[1:])
    lse = blocks.lse.new_full((size, *blocks.lse.shape[1:]), -torch.inf)
    return Partial(out.index_copy_(0, residues, blocks.out), lse.index_copy_(0, residues, blocks.lse))


def copy_into(partial: Partial, into: Partial | None) -> Partial:
    """Return the partial, copied to `into` if given."""
    return partial if into is None else Partial(into.out.copy_(partial.out), into.lse.copy_(partial.lse))


def unsupported_reason(device: torch.device) -> str | None:
    """Return why Triton programs do not run on a GPU, or on the CPU when they are interpreted; None if they do."""
    if not installed():
        return "Triton is not installed"
    return _gpu_fault(device) if device.type == "cuda" else None


@cache
def _gpu_fault(device: torch.device) -> str | None:
    """Return why a GPU does not run a merge correctly, or None; warn unless the GPU is too old."""
    if torch.version.hip is None and torch.cuda.get_device_capability(device) < (8, 0):
        return f"{torch.cuda.get_device_name(device)} has no bfloat16 products"
    try:
        floats: Any = {"dtype": torch.float32, "device": device}
        stack = Partial(torch.ones(2, 1, 1, 1, 16, **floats), torch.zeros(2, 1, 1, 1, **floats))
        merged = Partial(torch.zeros_like(stack.out[0]), torch.zeros_like(stack.lse[0]))
        _launch(stack, merged, None, None, None)
    except Exception as error:  # a compiler may raise any exception
        return warn_unsupported(f"{type(error).__name__}: {error}".splitlines()[0])
    return None if bool((merged.out == 1).all()) else warn_unsupported("a merge gives a wrong result")


def warn_unsupported(fault: str) -> str:
    """Warn that PyTorch's kernels are used instead of Triton, and return the reason."""
    reason = f"Triton does not work on this device: {fault}"
    warnings.warn(f"attnmesh uses PyTorch's own kernels, since {reason}", stacklevel=3)
    return reason


def supports(device: torch.device) -> bool:
    """Return True if Triton programs run on a device."""
    return (device.type == "cuda" or interpreted()) and unsupported_reason(device) is None


def use_triton(lse: Tensor) -> bool:
    """Return True if a Triton program merges partials: the lse is not empty, in float32, on a supported device."""
    return lse.dtype == torch.float32 and lse.numel() > 0 and supports(lse.device)


writes_nan = use_triton
"""Returns True if a merge of messages writes NaN where their checksums differ. PyTorch's own kernels do not."""


def _launch(
    stacked: Partial, into: Partial, sinks: Tensor | None, checksums: Tensor | None, checksum: Tensor | None
) -> None:
    """Launch the merge. An argument that is None is replaced by another tensor, which is not read."""
    outs, lses = (x if x.is_contiguous() or x[0].is_contiguous() else x.contiguous() for x in stacked)
    grid, sizes = _sizes(outs.shape)
    launch(
        "decode",
        "merge",
        grid,
        outs.device,
        outs=outs,
        lses=lses,
        checksums=lses if checksums is None else checksums,
        sinks=lses if sinks is None else sinks.contiguous(),
        out=into.out,
        lse=into.lse,
        checksum=into.lse if checksum is None else checksum,
        outs_split=outs.stride(0),
        lses_split=lses.stride(0),
        checksums_split=0 if checksums is None else checksums.stride(0),
        **sizes,
        HAS_SINKS=sinks is not None,
        HAS_CHECKSUMS=checksums is not None and checksum is not None,
    )


@lru_cache(maxsize=1024)
def _sizes(outs: tuple[int, ...]) -> tuple[tuple[int, ...], dict[str, Any]]:
    """Return the grid of a merge of outs of this shape, and its arguments that depend on nothing else."""
    splits, *shape, value_width = outs
    first, second = powers_covering(value_width)
    rows = math.prod(shape)
    numbers = {"splits": splits, "rows": rows, "queries": shape[-1], "heads": shape[-2] if len(shape) > 1 else 1}
    constants = {"value_width": value_width, "ROWS": MERGE_PROGRAM_ROWS, "V_0": first, "V_1": second}
    # With fusion the bits would depend on the order of the partials.
    return (-(-rows // MERGE_PROGRAM_ROWS),), {**numbers, **constants, "enable_fp_fusion": False}
