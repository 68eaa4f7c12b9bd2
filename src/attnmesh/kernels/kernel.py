"""The interface of a kernel: what a call asks of it, what a kernel can do, and what it computes for a rectangle."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from attnmesh.core.band import Band
from attnmesh.core.partial import Partial
from attnmesh.core.scaling import Scaling, bias_columns
from attnmesh.kernels.cache_view import CacheView, DecodeQuery
from attnmesh.kernels.rectangles import BackwardInputs, Gradients, Rectangle, cut

DEVICES = {"cpu": "the CPU", "cuda": "CUDA"}
"""Names of types of devices in messages. A type that has none here is named as PyTorch names it."""


class KernelRequest(NamedTuple):
    """A call's request to a kernel: all that its choice depends on."""

    device: torch.device
    dtype: torch.dtype
    rows: int
    """Queries times the query heads that share a key head."""
    width: int
    """Columns of the widest head."""
    capped: bool = False
    """True if logits have a soft cap."""
    biased: bool = False
    """True if queries end with a bias by distance."""
    cached: bool = False
    """True if keys and values are the slots of a cache."""
    scattered: bool = False
    """True if some keys and values are read, in any order."""
    positions: tuple[Tensor, Tensor] | None = None
    """Positions of queries, (queries,), and of keys, (keys,), for a bias."""

    @staticmethod
    def of(
        q: Tensor, k: Tensor, v: Tensor, scaling: Scaling, positions: tuple[Tensor | None, Tensor | None] | None = None
    ) -> "KernelRequest":
        """Return the request for q, k and v. An entry of `positions` that is None stands for 0, 1, 2, ..."""
        rows = q.shape[1] // max(1, k.shape[1]) * q.shape[2]
        width = max(q.shape[3], v.shape[3])
        biased = bias_columns(q, k.shape[3]) > 0
        request = KernelRequest(q.device, k.dtype, rows, width, capped=scaling.capped, biased=biased)
        if positions is None or not request.biased:
            return request
        queries, keys = (
            torch.arange(x.shape[2], device="cpu") if own_positions is None else own_positions
            for x, own_positions in zip((q, k), positions, strict=True)
        )
        return request._replace(positions=(queries, keys))

    @staticmethod
    def of_cache(q: Tensor, view: CacheView, scaling: Scaling) -> "KernelRequest":
        """Return the request for a decode step on a view of a cache."""
        return KernelRequest.of(q, *view.attended(q.dtype), scaling)._replace(cached=True)


class BoundKernel(Protocol):
    """A kernel with its shapes fixed, for rows that see a run of keys each: a call passes memory alone.

    Shapes are those of `Kernel`, where k and v may have more keys than a row sees.
    """

    def blank(self) -> Partial:
        """Return memory for a partial."""
        ...

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        into: Partial,
        bounds: Band | None = None,
        first: int = 0,
        keys: int | None = None,
    ) -> bool:
        """Write the partial of `keys` keys, by default all, from index `first` on, or of those in each row's bounds.

        Bounds count from `first`. Return False if the call is not served.
        """
        ...

    def parts(self, keys: Sequence[int]) -> "Sequence[BoundKernel]":
        """Return a launch for each part, of `keys[i]` keys. They run in order; the last writes the partial of all."""
        ...


class BoundCacheKernel(Protocol):
    """The launch of a kernel that reads a cache in place."""

    def attend_cache(self, query: DecodeQuery, view: CacheView) -> Partial:
        """Return the partial of the last queries over a cache, merged from one partial per block if there are some."""
        ...


class Kernel:
    """Attention over one rectangle on one device. q, k and v are those of the rectangle; heads may be grouped.

    Shapes, also in `attend_visible`:

        q   (batch, heads, queries, dim); with a bias by distance, a column more for each distance
        k   (batch, kv_heads, keys, dim), where `kv_heads` divides `heads`
        v   (batch, kv_heads, keys, value_dim)

    A new one is a file of `implementations`, with a `KERNEL`. It needs a `name`, `unsupported_reason`, `attend` and
    `backward`. The rest says for which calls "auto" takes it, and is what else it can do.
    """

    # Choice
    name: str
    """The kernel's name, as in `kernel=`."""
    device_type: str | None = None
    """The type of the devices that it runs on; None for all."""
    made_for = "calls that name it"
    """The calls of `is_made_for`, in words."""
    priority = 3
    """Number in the order of `best_kernel`: a lower one comes first. The reference, which serves all calls, has 2."""

    def is_elsewhere(self, device: torch.device) -> bool:
        """Return whether the kernel runs on devices of another type alone."""
        return self.device_type not in (None, device.type)

    def unsupported_reason(self, request: KernelRequest) -> str | None:
        """Return why the kernel does not support a call on a device that it runs on, or None if it does."""
        raise NotImplementedError

    def refusal(self, request: KernelRequest) -> str | None:
        """Return why the kernel does not serve a call, or None if it does."""
        if self.is_elsewhere(request.device):
            own = self.device_type or ""
            return f"it runs on {DEVICES.get(own, own)}, the tensors are on {request.device.type}"
        if (reason := self.unsupported_reason(request)) is not None:
            return reason
        if request.capped and not self.caps_logits:
            return "it has no soft cap"
        if request.biased and not self.adds_bias:
            return "it adds no bias by distance"
        return "it reads no scattered keys" if request.scattered and not self.reads_scattered else None

    def is_made_for(self, request: KernelRequest) -> bool:
        """Return whether the kernel comes before others that also serve the call."""
        return False

    # Rectangles
    caps_logits = True
    """True if logits may have a soft cap."""

    def cut(self, band: Band, q: Tensor, k: Tensor, v: Tensor) -> list[Rectangle]:
        """Return the rectangles into which a band is cut for this kernel; by default the fewest."""
        return cut(band)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, rectangle: Rectangle, scaling: Scaling) -> Partial:
        """Return `(out, lse)` of the rectangle's queries over its keys."""
        raise NotImplementedError

    def backward(
        self, q: Tensor, k: Tensor, v: Tensor, inputs: BackwardInputs, rectangle: Rectangle, scaling: Scaling
    ) -> Gradients:
        """Return the rectangle's share of the gradients. Weights are `e^(logit - lse)`, with the lse over all keys.

        Of `inputs.out` only `sum(out * dout)` of each row counts: on a mesh it is another tensor with this sum.
        """
        raise NotImplementedError

    def operator_name(self, q: Tensor, k: Tensor, v: Tensor, rectangle: Rectangle) -> str:
        """Return the name of the operator that computes the rectangle."""
        return self.name

    # Launches that are prepared for shapes
    reads_8_bits = False
    """True if launches of `bind` read keys and values that are stored in 8 bits."""

    def bind(self, q: Tensor, k: Tensor, v: Tensor, scaling: Scaling) -> BoundKernel | None:
        """Return the launch that serves all calls with tensors of these shapes, or None if there is none."""
        return None

    # Cache
    reads_cache = False
    """True if `attend_cache` reads a cache in place, and on the device how many tokens it holds."""

    def attend_cache(self, query: DecodeQuery, view: CacheView) -> Partial:
        """Return the partial of the last queries over a cache, merged from one partial per block if there are some."""
        raise NotImplementedError

    def bind_cache(self) -> "BoundCacheKernel":
        """Return what serves all steps that differ in their tensors alone: of one mask, capacity, block and scaling."""
        return self

    # Scattered keys
    reads_scattered = False
    """True if `attend_scattered` reads scattered keys and values in place."""

    def attend_scattered(
        self, q: Tensor, k: Tensor, v: Tensor, indices: Tensor, hidden: Tensor, scaling: Scaling
    ) -> Partial | None:
        """Return the partial of the keys of each sequence at these indices, those that are hidden last.

        `indices` and `hidden` are (batch, keys), and q has one query. Return None if a number is not finite.
        """
        raise NotImplementedError

    # Bias
    adds_bias = False
    """True if queries may end with a bias by distance, for the positions that `with_positions` is given."""

    def with_positions(self, queries: Tensor, keys: Tensor) -> "Kernel":
        """Return the kernel for a bias by distance between queries and keys at these positions, in any order."""
        raise NotImplementedError
