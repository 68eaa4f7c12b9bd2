"""Digests of calls and of tensors on the CPU, by one native call for a tensor where there is a library."""

import struct
from collections.abc import Sequence

import torch
from torch import Tensor

from attnmesh.core.digest import cpu_weights, digest, digest_of_run, wide_size
from attnmesh.kernels.native.build import library

RUN_FIELDS = struct.Struct("2P7q")
"""Fields of `Run` in `cache.cpp`."""


def digest_of_call(tensors: Sequence[Tensor], call_hash: int, device_counts: Tensor) -> int:
    """Return the digest of a call on CPUs, as `comm/mismatch.py` defines it. The first count is of a cache's tokens."""
    tokens: int = device_counts.tolist()[0]
    return tokens + call_hash + sum(map(digest_on_cpu, tensors))


def digest_on_cpu(x: Tensor) -> int:
    """Return the int64 digest of a tensor's bits, as `core.digest` defines it."""
    function = library().digest
    if function is None or not x.is_cpu or type(x) is not Tensor:
        return int(digest(x))
    x = x.contiguous()
    return function(x.data_ptr(), x.numel(), x.element_size(), cpu_weights().data_ptr())


def digest_of_rows(x: Tensor, start: int, slots: int) -> int:
    """Return the digest of a tensor of `slots` slots that is zeros but for x, the run of slots from `start` on.

    Slots are the third dim of x, or its only one. The digest is of the widest integers that rows are made of.
    """
    run = x.flatten(0, 1) if x.ndim == 4 else x[None, :, None]
    function = library().digest_run
    if function is None:
        return int(digest_of_run(run, start, slots))
    heads, count, width = run.shape
    run = run if run.stride()[1:] == (width, 1) else run.contiguous()
    row_bytes = width * run.itemsize
    size = wide_size(row_bytes)
    row = row_bytes // size
    stride = run.stride(0) * run.itemsize
    numbers = size, heads, stride, count * row, start * row, slots * row, heads * slots * row
    return function(RUN_FIELDS.pack(run.data_ptr(), cpu_weights().data_ptr(), *numbers))


def wrapped(number: int) -> int:
    """Return a number modulo 2^64, as int64 has it.

    >>> wrapped(2**63)
    -9223372036854775808
    """
    limit = torch.iinfo(torch.int64).max + 1
    return (number + limit) % (2 * limit) - limit
