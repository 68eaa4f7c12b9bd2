"""New tokens of a cache shard, written in place by one native call, or to the files of a shard."""

import os
import struct
from collections.abc import Sequence

from torch import Tensor

from attnmesh.kernels.native.build import library

APPEND_FIELDS = struct.Struct("6P23q")
"""Fields of `Append` in `cache.cpp`."""

FILE_FIELDS = struct.Struct("5P7q")
"""Fields of `FileAppend` after those."""


def native_append(
    kv_tensors: Sequence[Tensor], new: Sequence[Tensor], token_index: Tensor, device_counts: Tensor, file: bytes = b""
) -> bool:
    """Write new tokens after those in the shard. Return False where there is no library, or rows are not in one piece.

    `device_counts` has the tokens on all ranks and those in the shard, and is updated. `file` has `FILE_FIELDS` of a
    shard whose memory is a file. If the system fails to write to it, raise an `OSError`. `device_counts` then stays, so
    the rows are no tokens.
    """
    function = library().append_to_file if file else library().append
    if function is None:
        return False
    keys, values, new_keys, new_values = kv_tensors[0], kv_tensors[-1], new[0], new[-1]
    strides = *keys.stride(), *values.stride(), *new_keys.stride(), *new_values.stride()
    if strides[3::4] != (1, 1, 1, 1):
        return False
    batch, heads, tokens, width = new_keys.shape
    fields = APPEND_FIELDS.pack(
        keys.data_ptr(),
        values.data_ptr(),
        new_keys.data_ptr(),
        new_values.data_ptr(),
        token_index.data_ptr(),
        device_counts.data_ptr(),
        *strides,
        width,
        new_values.shape[3],
        new_keys.itemsize,
        len(kv_tensors),
        batch,
        heads,
        tokens,
    )
    if failed := function(fields + file):
        raise OSError(failed, os.strerror(failed))
    return True
