"""The kernels there are, and which one serves: asked of each, never told from a version or a name of a device."""

from torch import Tensor

from attnmesh.errors import KernelError
from attnmesh.kernel.cpu import FlashCPU
from attnmesh.kernel.cuda import CUDA
from attnmesh.kernel.reference import Reference
from attnmesh.kernel.walk import Kernel

KERNELS: tuple[Kernel, ...] = (FlashCPU(), CUDA(), Reference())
"""Best first; the last serves everything."""


def choose(name: str, q: Tensor, k: Tensor, v: Tensor) -> Kernel:
    """The kernel of that name, or for "auto" the first that serves tensors like these.

    >>> import torch
    >>> choose("auto", *torch.zeros(3, 1, 1, 1, 8)).name
    'cpu'
    """
    if name == "auto":
        return next(kernel for kernel in KERNELS if kernel.refuses(q, k, v) is None)
    named = {kernel.name: kernel for kernel in KERNELS}
    if name not in named:
        expected = ", ".join(("auto", *named))
        raise KernelError("kernel", f"one of {expected}", repr(name), 'leave it at "auto"')
    if (reason := named[name].refuses(q, k, v)) is not None:
        raise KernelError(f"kernel {name}", "tensors that it serves", f"others: {reason}", 'leave it at "auto"')
    return named[name]
