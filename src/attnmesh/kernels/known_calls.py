"""Calls on one device of a kind that was served before: no check is made twice, and no tensor but the result is made.

A kind is everything that checks depend on: shapes, dtypes, devices and options. Its first call takes the usual way. If
the native kernel serves it in one block, later calls are one launch.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Never

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter

from attnmesh.core.logits import Logits
from attnmesh.core.mask import Band, Causal, Full, Mask
from attnmesh.core.partial import Partial
from attnmesh.errors import KernelError
from attnmesh.kernels.driver import NATIVE, choose
from attnmesh.kernels.native.kernel import MOST_ROWS, NativeKind

MOST_KINDS = 1024
"""Kinds that are kept. Beyond it they are learned anew."""


PLAIN = {Tensor, Parameter, type(None)}
"""Types of tensors that PyTorch itself computes with, and that of one that is left out."""


def is_traced() -> bool:
    """Return True while PyTorch traces or transforms calls: by torch.compile, torch.func or forward gradients."""
    if torch.compiler.is_compiling() or torch._C._functorch.peek_interpreter_stack() is not None:
        return True
    return forward_ad._current_level >= 0 or torch._C._get_tracing_state() is not None


def needs_operator(*tensors: Tensor | None) -> bool:
    """Return True if PyTorch has to see a call as one operator, which costs 0.1 ms on a CPU.

    A mode that looks at operators may keep the results of some, as selective checkpointing does.
    """
    if is_traced() or torch._C._len_torch_dispatch_stack():
        return True
    return not PLAIN.issuperset(map(type, tensors))


def is_learned(*tensors: Tensor | None) -> bool:
    """Return True if autograd records a call of these tensors."""
    if torch.is_grad_enabled():
        for x in tensors:
            if x is not None and x.requires_grad:
                return True
    return False


class Once(torch.autograd.Function):
    """A backward pass, which has no gradients of its own."""

    @staticmethod
    def forward(ctx: Any, run: Callable[..., tuple[Tensor, ...]], *arguments: Any) -> tuple[Tensor, ...]:
        """Return what `run` returns."""
        return run(*arguments)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Never:
        """Raise: a gradient of a gradient was asked for."""
        expected, fix = "gradients of the first order", "differentiate energy, which is dense, instead"
        raise KernelError("attention", expected, "a gradient of a gradient", fix)


once: Callable[..., Any] = Once.apply
"""Run a backward pass."""


def are_plain(*tensors: Any) -> bool:
    """Return True for CPU tensors without gradients, outside traces and autocast."""
    graded = torch.is_grad_enabled()
    for x in tensors:
        if type(x) is not Tensor or not x.is_cpu or (graded and x.requires_grad):
            return False
    return not (is_traced() or torch.is_autocast_enabled("cpu"))


class Known(NamedTuple):
    """A known kind, and the keys that its rows see; None if all rows see all."""

    kind: NativeKind
    band: Band | None


class KnownCalls:
    """The known kinds of calls of one public function."""

    def __init__(self) -> None:
        self.kinds: dict[Any, Known] = {}

    def run(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask | None, options: tuple[Any, ...]) -> Partial | None:
        """Return the partial, with out in q's dtype, or None unless this kind of call is known."""
        if not self.kinds or not are_plain(q, k, v):
            return None
        try:
            known = self.kinds.get(_kind(q, k, v, mask, options))
        except (TypeError, ValueError):  # an option that cannot be hashed, or a tensor of other dims
            return None
        if known is None:
            return None
        partial = known.kind.blank()
        served = known.kind.launch(q, k, v, partial, known.band)
        return Partial(partial.out.to(q.dtype), partial.lse) if served else None

    def learn(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Mask | None, options: tuple[Any, ...], logits: Logits, kernel: str
    ) -> None:
        """Keep the kind of a call that was served, if the native kernel serves it in one block. No mask is causal."""
        if not are_plain(q, k, v) or not q.numel() or not k.numel() or not v.numel() or logits.scale <= 0:
            return
        if choose(kernel, q, k, v, logits.capped) is not NATIVE or q.shape[1] // k.shape[1] * q.shape[2] > MOST_ROWS:
            return
        band = None if mask == Full() else Band.of(mask or Causal(), torch.arange(q.shape[2], device="cpu"), k.shape[2])
        if band is not None and (int(band.low[0]), int(band.high[-1])) != (0, k.shape[2]):
            return
        if len(self.kinds) >= MOST_KINDS:
            self.kinds.clear()
        self.kinds[_kind(q, k, v, mask, options)] = Known(NativeKind.of(q, k, v, logits), band)


def _kind(q: Tensor, k: Tensor, v: Tensor, mask: Mask | None, options: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the kind of a call. Under a full mask it has any number of keys, 1 or more."""
    (batch, heads, keys, dim), (value_batch, value_heads, values, width) = k.shape, v.shape
    shapes = q.shape, batch, heads, dim, value_batch, value_heads, width, keys == values != 0
    dtypes = q.dtype, k.dtype, v.dtype
    # Options of equal values may differ in type, as 1 and True do.
    return *shapes, *dtypes, None if mask == Full() else keys, mask, *options, *map(type, options)
