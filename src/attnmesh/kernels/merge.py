"""Merges of partials that lie stacked, in tensors of their own or packed in messages: one launch where Triton serves.

Blocks of one rank and messages of several are merged by the same arithmetic, so that who held a block cannot be told.
"""

import warnings
from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from attnmesh.core.digest import bits
from attnmesh.core.partial import Partial, collapse, wide, with_sinks
from attnmesh.kernels.triton_runtime import installed, interpreted, launch, parts

ROWS = 16
"""Rows of a program: a step has few, and each is to have a part of the chip."""


def merged(
    stacked: Partial,
    into: Partial | None = None,
    *,
    sinks: Tensor | None = None,
    checksums: Tensor | None = None,
    checksum: Tensor | None = None,
) -> Partial:
    """Partials stacked along a first dim as one, written to where `into` says, in its dtype.

    Where it is `by_triton`, the maximum of the `checksums` goes to `checksum`, and if they do not cancel all is NaN.
    """
    if not by_triton(stacked.lse):
        return placed(with_sinks(collapse(stacked), sinks), into)
    if into is None:
        shape = stacked.out.shape[1:]
        out = stacked.out.new_empty(shape, dtype=wide(stacked.out.dtype))
        into = Partial(out, stacked.lse.new_empty(shape[:-1]))
    _launch(stacked, into, sinks, checksums, checksum)
    return into


def compared(tensors: Sequence[Tensor], number: int, state: Tensor, modulus: int, checksum: Tensor) -> Tensor:
    """A number for what a rank was told, and less that number: of one or two tensors, and the tokens in a cache."""
    patterns = [bits(x) for x in tensors]
    counts = [len(x) for x in patterns]
    launch(
        "decode",
        "checksum",
        (1,),
        checksum.device,
        bits=patterns[0],
        count=counts[0],
        more=patterns[-1],
        more_count=sum(counts[1:]),
        state=state,
        number=number % modulus,
        checksum=checksum,
        MODULUS=modulus,
        WIDE=1024,
    )
    return checksum


def up_the_tree(blocks: Partial) -> Partial:
    """Merge blocks whose numbers differ in the highest bit, then the next: the two halves of what there is, again."""
    while (count := len(blocks.lse)) > 1:
        half = 1 << (count - 1).bit_length() - 1
        more = count - half
        pairs = (x.as_strided((2, more, *x.shape[1:]), (half * x.stride(0), *x.stride())) for x in blocks)
        both = merged(Partial(*pairs))
        blocks = Partial(*(torch.cat((x, y[more:half])) for x, y in zip(both, blocks, strict=True)))
    return Partial(blocks.out[0], blocks.lse[0])


def placed(partial: Partial, into: Partial | None) -> Partial:
    """The partial, put where it is asked for."""
    return partial if into is None else Partial(into.out.copy_(partial.out), into.lse.copy_(partial.lse))


def unable(device: torch.device) -> str | None:
    """Why Triton's programs do not run on a device, or None."""
    if not installed():
        return "Triton is not installed"
    if device.type == "cuda":
        return _fault(device)
    return None if interpreted() else f"it runs on CUDA, the tensors are on {device.type}"


@cache
def _fault(device: torch.device) -> str | None:
    """What keeps a GPU from it, said once if it is not its age."""
    if torch.version.hip is None and torch.cuda.get_device_capability(device) < (8, 0):
        return f"{torch.cuda.get_device_name(device)} multiplies no bfloat16"
    try:
        few = Partial(torch.ones(2, 1, 1, 1, 16, device=device), torch.zeros(2, 1, 1, 1, device=device))
        one = Partial(torch.zeros_like(few.out[0]), torch.zeros_like(few.lse[0]))
        _launch(few, one, None, None, None)
    except Exception as error:  # whatever a compiler comes upon
        return said_once(f"{type(error).__name__}: {error}".splitlines()[0])
    return None if bool((one.out == 1).all()) else said_once("a merge comes out wrong")


def said_once(what: str) -> str:
    """A warning, and the reason that it gives."""
    reason = f"Triton does not serve here: {what}"
    warnings.warn(f"attnmesh goes by PyTorch's own kernels, as {reason}", stacklevel=3)
    return reason


def serves(device: torch.device) -> bool:
    """Whether Triton's programs run on tensors of a device."""
    return (device.type == "cuda" or interpreted()) and unable(device) is None


def by_triton(lse: Tensor) -> bool:
    """Whether one program merges partials of such an lse: of any rows, in float32, where Triton serves."""
    return lse.dtype == torch.float32 and lse.numel() > 0 and serves(lse.device)


def _launch(
    stacked: Partial, into: Partial, sinks: Tensor | None, checksums: Tensor | None, checksum: Tensor | None
) -> None:
    """What is absent is stood for by something that is there, and is not read."""
    outs, lses = (x if x[0].is_contiguous() else x.contiguous() for x in stacked)
    splits, *shape, values = outs.shape
    rows, (first, second) = lses[0].numel(), parts(values)
    launch(
        "decode",
        "merge",
        (-(-rows // ROWS),),
        outs.device,
        outs=outs,
        lses=lses,
        checksums=lses if checksums is None else checksums,
        sinks=lses if sinks is None else sinks.contiguous(),
        out=into.out,
        lse=into.lse,
        checksum=into.lse if checksum is None else checksum,
        splits=splits,
        outs_split=outs.stride(0),
        lses_split=lses.stride(0),
        checksums_split=0 if checksums is None else checksums.stride(0),
        rows=rows,
        queries=shape[-1],
        heads=shape[-2] if len(shape) > 1 else 1,
        values=values,
        ROWS=ROWS,
        V_0=first,
        V_1=second,
        SUNK=sinks is not None,
        WITNESSED=checksums is not None and checksum is not None,
        enable_fp_fusion=False,  # or the bits would depend on which partial is the first
    )
