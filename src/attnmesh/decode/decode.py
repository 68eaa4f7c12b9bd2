"""Decoding: keys stay on their ranks, and every rank gets the query. A step is a local attention and one merge.

With `reproducible=True` the result has the same bits on 1, 2, 4, 8, ... ranks. Each block of keys makes one partial.
Partials are merged along one tree over block numbers: even against odd at the top, then residues modulo 4, and so on.
The blocks of a rank are one subtree.
"""

from functools import lru_cache
from typing import Any, NamedTuple, Never, cast
from zlib import crc32

import torch
from torch import Tensor

from attnmesh.comm.consensus import describe_call, may_compare
from attnmesh.comm.merge_ranks import COLLECTIVE, MergedCall, send_poison
from attnmesh.core.checks import check_checked, warn_if_swapped
from attnmesh.core.digest import fingerprints
from attnmesh.core.mask import Causal, Mask
from attnmesh.core.partial import sum_dtype
from attnmesh.decode.cache import KVCache
from attnmesh.decode.local import on_device
from attnmesh.decode.operator import decode_op, highest_checksum, nan_unless_equal, run_step, tensors_of
from attnmesh.decode.step import DecodeStep, check_step
from attnmesh.errors import DtypeError, InputError, MeshError
from attnmesh.kernels.driver import NAMES


def decode(
    q: Tensor,
    cache: KVCache,
    *,
    mask: Mask = Causal(),
    scale: float | None = None,
    sinks: Tensor | None = None,
    merge: str = "auto",
    output: str = "replicated",
    reproducible: bool = False,
    kernel: str = "auto",
    checked: bool | None = None,
    **unsupported: Never,
) -> Tensor:
    """Return attention of the cache's last tokens over all tokens of the cache, the same bits on every rank.

    Args:
        q: Queries of the last tokens, (batch, heads, length, dim), equal on every rank.
        cache: The sharded cache, which holds the keys and values of these tokens too.
        mask: Which keys a query sees.
        scale: Factor of the logits; 1/sqrt(dim) unless it is given.
        sinks: One learned logit per query head. It takes a share of the softmax and adds nothing.
        merge: "tree", "direct", "gather", "allreduce" or "auto".
        output: "replicated": all heads on every rank; "heads": this rank's share of the heads.
        reproducible: True gives the same bits on any power of two of ranks. It needs a cache that was filled by
            `append`, and blocks of 128 tokens or more to be fast.
        kernel: Kernel of one device: "auto", or a name of `attnmesh.kernels.driver.NAMES`.
        checked: When ranks compare their calls; the cache's own unless it is given: see `KVCache`. Ranks whose calls
            differ and are not compared get NaN.
        **unsupported: Options of other attention functions, which raise an error that names a substitute.

    Returns:
        The output, (batch, heads, length, value dim).

    Raises:
        InputError: An argument cannot be served, or the ranks' calls differ.
        RankFailure: A rank is lost.

    >>> import attnmesh as am
    >>> q, k, v = torch.randn(3, 1, 2, 8, 4).unbind()
    >>> cache = am.KVCache(None, batch=1, kv_heads=2, head_dim=4, capacity=8, dtype=torch.float32)
    >>> cache.append(k, v)
    >>> whole = am.attend(q, k, v, mask=am.Causal()).out
    >>> torch.allclose(decode(q[:, :, -2:], cache), whole[:, :, -2:], atol=1e-6)
    True
    """
    if not isinstance(cache, KVCache):
        raise DtypeError("decode cache", "a KVCache", type(cache).__name__, "make one with attnmesh.KVCache")
    place = cache.mesh.heads, cache.tokens, cache.sizes.block, cache.sizes.capacity
    step = DecodeStep(*place, mask, cast(float, scale), merge, output, reproducible, kernel)
    checked = cache.checker.checked if checked is None else checked
    try:
        check_checked("decode", checked)
        step = check_step(q, cache, sinks, step, unsupported)
    except InputError as error:
        compares = checked is True or (checked is not False and not _stays_on_device(cache, step))
        call = MergedCall(cache.mesh, merge, compares, str)
        call.failed(error, lambda: _send_poison(cache, step))
        raise
    if torch.compiler.is_compiling():
        return cast(Tensor, decode_op(q, tensors_of(cache.held), sinks, *step.encode()))
    with torch.no_grad():
        out = _run_compared(q, cache, sinks, step, checked)
    warn_if_swapped("decode", q, cache.sizes.kv_heads)
    return out


def _run_compared(q: Tensor, cache: KVCache, sinks: Tensor | None, step: DecodeStep, checked: bool | None) -> Tensor:
    """Return the output, or raise the same error on all ranks if their calls differ. Uncompared calls give NaN."""
    stays, kind = (
        _stays_on_device(cache, step),
        _Kind(step.options, q.dtype, q.shape, None if sinks is None else sinks.dtype),
    )
    compares = may_compare(cache.device) and (
        (not stays or kind not in cache.checker.kinds) if checked is None else checked
    )
    call = MergedCall(cache.mesh, step.merge, compares, lambda: _describe(q, cache, sinks, step))
    call.before()
    out, checksum = run_step(q, cache.held, sinks, step, _number(kind, cache.history_checksum))
    if checksum is None:
        return out
    if not compares:
        has_nan = stays and step.heads.size == 1 and out.shape == step.output_shape(q, cache.values)  # by the kernel
        return out if has_nan else nan_unless_equal(out, checksum, step.output_shape(q, cache.values))
    if stays and not checked and float(checksum.sum()) == torch.inf:  # poison of a rank that compares nothing
        given, fix = "an argument error on another rank", "see the error of that rank"
        raise MeshError("decode", "the same call on every rank", given, fix)
    call.after(checksum, "decode")
    if stays:
        cache.checker.kinds.add(kind)
    return out


class _Kind(NamedTuple):
    """Properties of a call that do not depend on the values of its tensors."""

    options: tuple[Any, ...]
    dtype: torch.dtype
    shape: torch.Size
    sinks: torch.dtype | None


@lru_cache(maxsize=64)
def _number(kind: _Kind, history_checksum: int) -> int:
    """Return a number of the call for its checksum."""
    return crc32(f"{kind} {history_checksum}".encode())


def _describe(q: Tensor, cache: KVCache, sinks: Tensor | None, step: DecodeStep) -> str:
    """Return the text of the call that ranks compare."""
    options = dict(zip(step._fields[4:], step.options, strict=True))
    held = {"tokens in the cache": cache.length, "padding and order": cache.history_checksum}
    return describe_call("decode", **options, **fingerprints({"q": q, "sinks": sinks}), **held)


def _stays_on_device(cache: KVCache, step: DecodeStep) -> bool:
    """Return whether the host reads nothing of the device during the step."""
    kernel = step.kernel if step.kernel in NAMES else "auto"
    return on_device(cache.keys, cache.held, kernel) and step.merge not in COLLECTIVE


def _send_poison(cache: KVCache, step: DecodeStep) -> None:
    """Run the exchanges of a step whose arguments are wrong on this rank, so that the others detect it."""
    ranks, reproducible = cache.tokens.size, step.reproducible is True  # other values are invalid on other ranks too
    merge, canonical = "tree" if reproducible else step.merge, reproducible and not ranks & (ranks - 1)
    like = torch.empty(0, dtype=sum_dtype(cache.sizes.dtype), device=cache.device)
    checksum = send_poison(cache.tokens, merge, step.output, like, canonical=canonical)
    if cache.mesh.heads.size > 1:
        highest_checksum(checksum, cache.mesh.heads)
