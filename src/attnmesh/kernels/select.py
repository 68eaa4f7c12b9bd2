"""The list of kernels, and the choice of one. Each kernel decides if it supports q, k and v."""

from torch import Tensor

from attnmesh.core.checks import check_choice
from attnmesh.errors import KernelError
from attnmesh.kernels.cpu import FlashCPU
from attnmesh.kernels.cuda import CUDA
from attnmesh.kernels.driver import CacheKernel, Kernel
from attnmesh.kernels.reference import Reference
from attnmesh.kernels.triton import Triton

KERNELS: tuple[Kernel, ...] = (FlashCPU(), CUDA(), Triton(), Reference())
"""Best first; the last supports everything."""

NAMES = ("auto", *(kernel.name for kernel in KERNELS))
"""Values of `kernel=`."""


def choose(name: str, q: Tensor, k: Tensor, v: Tensor, capped: bool = False) -> Kernel:
    """Return the kernel of that name, or for "auto" the first that supports the tensors, with capped logits or not.

    >>> import torch
    >>> choose("auto", *torch.zeros(3, 1, 1, 1, 8)).name
    'cpu'
    """
    check_kernel(name)
    if name == "auto":
        return next(kernel for kernel in KERNELS if kernel.unsupported_reason(q, k, v, capped) is None)
    kernel = next(kernel for kernel in KERNELS if kernel.name == name)
    if (reason := kernel.unsupported_reason(q, k, v, capped)) is not None:
        raise KernelError(f"kernel {name}", "tensors that it supports", f"others: {reason}", 'leave it at "auto"')
    return kernel


def choose_for_cache(name: str, q: Tensor, k: Tensor, v: Tensor, capped: bool = False) -> Kernel:
    """Return the kernel of a decode step. On a GPU "auto" prefers a supported `CacheKernel`."""
    if name == "auto" and q.device.type != "cpu":
        for kernel in KERNELS:
            if isinstance(kernel, CacheKernel) and kernel.unsupported_reason(q, k, v, capped) is None:
                return kernel
    return choose(name, q, k, v, capped)


def check_kernel(name: str) -> None:
    """Raise unless name is "auto" or a kernel's."""
    check_choice("kernel", name, NAMES)
