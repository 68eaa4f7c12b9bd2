"""Preparations on one device for calls of one signature. Later calls of it check and choose nothing.

A signature is everything that checks depend on: shapes, dtypes, devices and options.
"""

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnmesh.core.band import Band
from attnmesh.core.mask import FULL, Mask
from attnmesh.core.partial import Partial, with_sinks
from attnmesh.core.scaling import Scaling
from attnmesh.kernels.choice import choose
from attnmesh.kernels.driver import attend_visible
from attnmesh.kernels.kernel import BoundKernel, Kernel, KernelRequest
from attnmesh.kernels.traced import PLAIN_TENSORS, are_plain, autocast_enabled, is_dense, needs_grad, needs_operator
from attnmesh.runtime.memo import Memo
from attnmesh.runtime.tensors import length_major

Signature = tuple[Any, ...]
"""All that the checks of a call depend on."""


def signature_of(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    options: tuple[Any, ...],
    *,
    any_keys: bool = False,
    with_grad: bool = True,
) -> Signature | None:
    """Return all that the checks of a call depend on. None is for a call that is checked each time.

    With `any_keys` calls on a CPU with any number of keys, 1 or more, have one signature. Calls that autograd records
    have one only `with_grad`.
    """
    if are_plain(q, k, v) if sinks is None else are_plain(q, k, v, sinks):
        tensors: Signature = q.shape, q.dtype, k.dtype, v.dtype
        if any_keys and k.ndim == v.ndim == 4:
            batch, heads, keys, dim = k.shape
            value_batch, value_heads, values, width = v.shape
            lengths = "equal" if keys == values > 0 else (keys, values)
            tensors += batch, heads, dim, value_batch, value_heads, width, lengths
        else:
            tensors += k.shape, v.shape
    else:
        inputs = (q, k, v) if sinks is None else (q, k, v, sinks)
        if not PLAIN_TENSORS.issuperset(map(type, inputs)) or needs_operator(*inputs) or not all(map(is_dense, inputs)):
            return None
        if autocast_enabled(q) or (not with_grad and needs_grad(*inputs)):
            return None
        graded = torch.is_grad_enabled()
        tensors = tuple((x.shape, x.dtype, x.device, graded and x.requires_grad) for x in inputs)
    if sinks is not None:
        tensors += sinks.shape, sinks.dtype
    # Options of equal values may differ in type, as 1 and True do.
    return *tensors, *options, *map(type, options)


class PreparedLocal(NamedTuple):
    """A kernel, and the keys that each row sees, for calls of one signature whose tokens are in order."""

    kernel: Kernel
    scaling: Scaling
    band: Band | None
    """Keys that each row sees; None if every row sees every key."""
    bound: BoundKernel | None
    """The kernel's launch, if one serves the whole call."""

    @staticmethod
    def of(q: Tensor, k: Tensor, v: Tensor, mask: Mask, scaling: Scaling, kernel: str) -> "PreparedLocal":
        """Choose the kernel and its launch for calls like this one. Arguments have been checked."""
        chosen = choose(KernelRequest.of(q, k, v, scaling, (None, None)), kernel)
        keys = k.shape[2]
        sees_all = mask == FULL and q.shape[2] > 0 and keys > 0
        band = None if sees_all else whole_band(mask, q.shape[2], keys)
        bound = chosen.bind(q, k, v, scaling)
        if band is not None and bound is not None and (int(band.low[0]), int(band.high[-1])) != (0, keys):
            bound = None
        return PreparedLocal(chosen, scaling, band, bound)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Partial:
        """Return the partial, with out in q's dtype."""
        if self.bound is not None and sinks is None:
            partial = self.bound.blank()
            if self.bound.attend(q, k, v, partial, self.band):
                return Partial(partial.out.to(q.dtype), partial.lse)
        band = self.band
        if band is None and self.bound is None:
            band = whole_band(FULL, q.shape[2], k.shape[2])
        partial = attend_visible(self.kernel, q, k, v, band, self.scaling)
        out, lse = partial if sinks is None else with_sinks(partial, sinks)
        return Partial(length_major(out, q.dtype), lse.contiguous())


PREPARED_LOCAL = Memo[PreparedLocal]()
"""Calls that are prepared for `attend`, and for `attention` on one rank, whose signatures have more options."""


@lru_cache(maxsize=64)
def whole_band(mask: Mask, queries: int, keys: int) -> Band:
    """Return the band over tokens in order. It lives on, so that a GPU gets its bounds once."""
    with torch.inference_mode(False):
        return Band.of(mask, torch.arange(queries, device="cpu"), keys)
