"""The kernels, and the choice of one for a call."""

from collections.abc import Iterable
from importlib import import_module
from pkgutil import iter_modules

from attnmesh.errors import KernelError, check_choice
from attnmesh.kernels import implementations
from attnmesh.kernels.kernel import Kernel, KernelRequest

_FILES = [import_module(f"{implementations.__name__}.{file.name}") for file in iter_modules(implementations.__path__)]


def in_order(kernels: Iterable[Kernel]) -> tuple[Kernel, ...]:
    """Return kernels in the order of `best_kernel`."""
    return tuple(sorted(kernels, key=lambda kernel: (kernel.priority, kernel.name)))


KERNELS = in_order(file.KERNEL for file in _FILES)
"""Kernels in their order. The reference serves all calls but those that read scattered keys."""


def choose(request: KernelRequest, name: str = "auto") -> Kernel:
    """Return the kernel of that name, or for "auto" the best one, or raise if it does not serve the call.

    >>> import torch
    >>> from attnmesh.core.scaling import Scaling
    >>> choose(KernelRequest.of(*torch.zeros(3, 1, 1, 100, 8), Scaling(1.0))).name
    'cpu'
    """
    check_kernel(name)
    kernel = best_kernel(request) if name == "auto" else next(kernel for kernel in KERNELS if kernel.name == name)
    if kernel is None:
        reasons = "; ".join(f"{kernel.name}: {kernel.refusal(request)}" for kernel in KERNELS)
        raise KernelError("kernel auto", "tensors that a kernel supports", reasons, "change what one of these names")
    if (reason := kernel.refusal(request)) is not None:
        raise KernelError(f"kernel {name}", "tensors that it supports", f"others: {reason}", 'leave it at "auto"')
    return kernel if request.positions is None else kernel.with_positions(*request.positions)


def best_kernel(request: KernelRequest) -> Kernel | None:
    """Return the kernel that "auto" takes, of those that serve a call, or None if none does.

    Kernels whose `is_made_for` is true come before all others. Among these, and among the others, a lower `priority`
    comes first, then the first name. A kernel with neither field comes after the reference.
    """
    for made_for in (True, False):
        for kernel in KERNELS:
            if kernel.is_made_for(request) == made_for and kernel.refusal(request) is None:
                return kernel
    return None


def check_kernel(name: str) -> None:
    """Raise unless name is "auto" or a kernel's."""
    check_choice("kernel", name, ("auto", *(kernel.name for kernel in KERNELS)))
