"""Digests of tensors on the host, by one native call where there is a library."""

import torch
from torch import Tensor

from attnmesh.core.digest import cpu_weights, digest
from attnmesh.kernels.native.build import library


def digest_on_host(x: Tensor) -> int:
    """Return the int64 digest of a tensor's bits, as `core.digest` defines it."""
    function = library().digest
    if function is None or not x.is_cpu or type(x) is not Tensor:
        return int(digest(x))
    x = x.contiguous()
    return function(x.data_ptr(), x.numel(), x.element_size(), cpu_weights().data_ptr())


def wrapped(number: int) -> int:
    """Return a number modulo 2^64, as int64 has it.

    >>> wrapped(2**63)
    -9223372036854775808
    """
    limit = torch.iinfo(torch.int64).max + 1
    return (number + limit) % (2 * limit) - limit
