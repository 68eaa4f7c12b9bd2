"""The kernels there are, and which one serves: asked of each, never told from a version or a name of a device."""

from torch import Tensor

from attnmesh.errors import KernelError
from attnmesh.kernels.cpu import FlashCPU
from attnmesh.kernels.cuda import CUDA
from attnmesh.kernels.driver import CacheKernel, Kernel
from attnmesh.kernels.reference import Reference
from attnmesh.kernels.triton import Triton

KERNELS: tuple[Kernel, ...] = (FlashCPU(), CUDA(), Triton(), Reference())
"""Best first; the last serves everything."""

NAMES = ("auto", *(kernel.name for kernel in KERNELS))
"""What `kernel=` may say."""


def choose(name: str, q: Tensor, k: Tensor, v: Tensor) -> Kernel:
    """The kernel of that name, or for "auto" the first that serves tensors like these.

    >>> import torch
    >>> choose("auto", *torch.zeros(3, 1, 1, 1, 8)).name
    'cpu'
    """
    check_kernel(name)
    if name == "auto":
        return next(kernel for kernel in KERNELS if kernel.unsupported_reason(q, k, v) is None)
    kernel = next(kernel for kernel in KERNELS if kernel.name == name)
    if (reason := kernel.unsupported_reason(q, k, v)) is not None:
        raise KernelError(f"kernel {name}", "tensors that it serves", f"others: {reason}", 'leave it at "auto"')
    return kernel


def choose_held(name: str, q: Tensor, k: Tensor, v: Tensor) -> Kernel:
    """The kernel of a decode step: on a GPU "auto" prefers one that reads lengths there, if it serves."""
    if name == "auto" and q.device.type != "cpu":
        for kernel in KERNELS:
            if isinstance(kernel, CacheKernel) and kernel.unsupported_reason(q, k, v) is None:
                return kernel
    return choose(name, q, k, v)


def check_kernel(name: str) -> None:
    """Raise unless there is a kernel of that name."""
    if not isinstance(name, str) or name not in NAMES:
        raise KernelError("kernel", f"one of {', '.join(NAMES)}", repr(name), 'leave it at "auto"')
