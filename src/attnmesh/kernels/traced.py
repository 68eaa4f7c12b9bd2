"""Calls that PyTorch does more with than compute them: it traces, transforms, casts or records them."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Never

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter

from attnmesh.errors import KernelError

PLAIN_TENSORS = {Tensor, Parameter}
"""Types of tensors that PyTorch itself computes with."""

dispatch_mode_count: Callable[[], int] = torch._C._len_torch_dispatch_stack
"""Returns the number of modes of PyTorch that look at operators."""

PLAIN_OR_NONE = {*PLAIN_TENSORS, type(None)}
"""Types of tensors that PyTorch itself computes with, and the type of None for a tensor that is left out."""


def is_traced() -> bool:
    """Return True while PyTorch traces or transforms calls: by torch.compile, torch.func or forward gradients."""
    if torch.compiler.is_compiling() or torch._C._functorch.peek_interpreter_stack() is not None:
        return True
    return forward_ad._current_level >= 0 or torch._C._get_tracing_state() is not None


def is_dense(x: Tensor) -> bool:
    """Return True for a tensor whose memory holds its numbers: not sparse, nested or lazily negated."""
    return x.layout is torch.strided and not (x.is_nested or x.is_neg())


def needs_operator(*tensors: Tensor | None) -> bool:
    """Return True if PyTorch has to see a call as one operator, which costs 0.1 ms on a CPU.

    A mode that looks at operators may keep the results of some, as selective checkpointing does.
    """
    is_watched = is_traced() or dispatch_mode_count() > 0
    return is_watched or not PLAIN_OR_NONE.issuperset(map(type, tensors))


def needs_grad(*tensors: Tensor | None) -> bool:
    """Return True if autograd records a call of these tensors."""
    if torch.is_grad_enabled():
        for x in tensors:
            if x is not None and x.requires_grad:
                return True
    return False


class OnceDifferentiable(torch.autograd.Function):
    """A backward pass, which has no gradients of its own."""

    @staticmethod
    def forward(ctx: Any, run: Callable[..., tuple[Tensor, ...]], *arguments: Any) -> tuple[Tensor, ...]:
        """Return what `run` returns. A batch of gradients is refused: kernels read the memory of one."""
        for x in arguments:
            if isinstance(x, Tensor) and torch._C._functorch.is_legacy_batchedtensor(x):
                expected, given = "one gradient of the output", "a batch, as is_grads_batched makes"
                fix = "call torch.autograd.grad for each, or jacobian without vectorize"
                raise KernelError("attention", expected, given, fix)
        return run(*arguments)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Never:
        """Raise: a gradient of a gradient was asked for."""
        expected = "gradients of the first order"
        fix = "differentiate energy, which is dense and without a mask, or PyTorch's attention under SDPBackend.MATH"
        raise KernelError("attention", expected, "a gradient of a gradient", fix)


run_once_differentiable: Callable[..., Any] = OnceDifferentiable.apply
"""Runs a backward pass whose own gradient raises."""


def are_plain(*tensors: Any, on_gpu: bool = False) -> bool:
    """Return True for dense tensors on the CPU, or a GPU, without gradients, outside traces, modes and autocast."""
    # `is_traced`, inlined: hot path, see `decoding/known_steps.py`.
    if torch.compiler.is_compiling() or torch._C._functorch.peek_interpreter_stack() is not None:
        return False
    if forward_ad._current_level >= 0 or torch._C._get_tracing_state() is not None:
        return False
    if dispatch_mode_count() or torch.is_autocast_enabled("cuda" if on_gpu else "cpu"):
        return False
    graded = torch.is_grad_enabled()
    for x in tensors:
        if type(x) not in PLAIN_TENSORS or not (x.is_cuda if on_gpu else x.is_cpu) or (graded and x.requires_grad):
            return False
        if x.layout is not torch.strided or x.is_nested or x.is_neg():  # `is_dense`, on the path of every step
            return False
    return True


def autocast_enabled(x: Any) -> bool:
    """Return True for a tensor for whose device autocast is enabled."""
    if not isinstance(x, Tensor):
        return False
    if x.is_cpu:
        return torch.is_autocast_enabled("cpu")
    kind = x.device.type
    return torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)


def cast_for_autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Return the tensors, cast as autocast casts those of PyTorch's own attention."""
    if not all(map(autocast_enabled, tensors)):
        return tensors
    dtype = torch.get_autocast_dtype(tensors[0].device.type)
    return tuple(x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x for x in tensors)


def without_autocast(x: Tensor) -> AbstractContextManager[object]:
    """Return a context without autocast, which would round more than the caller's dtype does."""
    return torch.autocast(x.device.type, enabled=False) if autocast_enabled(x) else nullcontext()
