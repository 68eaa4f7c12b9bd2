"""Keys and values stored in 8 bits: rows of bytes, each with its numbers and then its scales.

A row of `columns` numbers has one bfloat16 scale for each 128 of them. A number's value is `number * scale`, which is
exact in float32. Rows depend on nothing but themselves, so appending in any pieces gives the same bits.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from attnmesh.errors import ShapeError

SCALE_COLUMNS = 128
"""Columns of a row that share a scale: a group."""

ROW_ALIGN_BYTES = 16
"""Bytes of the widest load of a GPU. Rows of bytes begin at multiples of it there: otherwise each byte is a load."""

LEAST_SCALE = torch.finfo(torch.bfloat16).tiny
"""The least scale, which groups of smaller numbers have: no scale is 0."""


@dataclass(frozen=True)
class Storage:
    """How a cache stores numbers in 8 bits.

    >>> rows = INT8.quantize(torch.tensor([1.0, -0.5, 0.0, 127.0]))
    >>> rows.dtype, rows.shape, INT8.dequantize(rows).tolist()
    (torch.int8, torch.Size([6]), [1.0, 0.0, 0.0, 127.0])
    """

    name: str
    dtype: torch.dtype
    largest: float
    """The largest number of the dtype."""

    def row_width(self, columns: int) -> int:
        """Return the bytes of a row: an even number of columns, and 2 for each scale."""
        return columns + 2 * -(-columns // SCALE_COLUMNS)

    def quantize(self, x: Tensor) -> Tensor:
        """Return rows of bytes. A group with an infinity or NaN is stored as NaN.

        Scales are rounded up, so that the largest number of a group does not exceed the dtype's.
        """
        columns = x.shape[-1]
        if columns % 2:
            raise ShapeError("quantize", "an even number of columns", str(columns), "pad the rows")
        rows = torch.empty(*x.shape[:-1], self.row_width(columns), dtype=self.dtype, device=x.device)
        scales = rows[..., columns:].view(torch.bfloat16)
        for index, group in enumerate(x.to(torch.float32).split(SCALE_COLUMNS, -1)):
            scale = _rounded_up(group.abs().amax(-1, keepdim=True) / self.largest).clamp(min=LEAST_SCALE)
            finite = scale.isfinite()
            numbers = (group / scale).where(finite, 0.0)
            start = index * SCALE_COLUMNS
            rows[..., start : start + group.shape[-1]] = numbers.round() if self.dtype == torch.int8 else numbers
            scales[..., index : index + 1] = scale.where(finite, torch.nan)
        return rows

    def dequantize(self, rows: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the values of rows."""
        columns = columns_of(rows)
        numbers = rows[..., :columns]
        scales = rows[..., columns:].view(torch.bfloat16)
        parts = zip(numbers.split(SCALE_COLUMNS, -1), scales.split(1, -1), strict=True)
        return torch.cat([part.to(dtype) * scale.to(dtype) for part, scale in parts], -1)


INT8, FP8_E4M3 = Storage("int8", torch.int8, 127.0), Storage("fp8_e4m3", torch.float8_e4m3fn, 448.0)

STORAGES = {storage.name: storage for storage in (INT8, FP8_E4M3)}
"""Values of `storage=`, beside None. Files of caches hold their places, counted from 1: a new one comes last."""


def storage_of(x: Tensor) -> Storage | None:
    """Return how a tensor of a cache is stored; None if it holds plain numbers."""
    return _BY_DTYPE.get(x.dtype)


def is_prefix(values: Tensor, keys: Tensor) -> bool:
    """Return whether values are the first columns of keys, as those of latents: then they have the keys' scales."""
    return values.data_ptr() == keys.data_ptr()


def columns_of(x: Tensor) -> int:
    """Return the columns of keys or values, stored or plain: the width of a row tells where its scales begin."""
    width = x.shape[-1]
    if x.dtype not in _BY_DTYPE:
        return width
    columns = width - 2 * -(-width // (SCALE_COLUMNS + 2))
    if columns <= 0 or columns % 2 or columns + 2 * -(-columns // SCALE_COLUMNS) != width:
        raise ShapeError("stored rows", "numbers and then scales", f"{width} bytes", "pass whole rows")
    return columns


def empty_rows(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return new memory for rows of keys or values, the last dim."""
    *outer, width = shape
    return torch.empty(*outer, width_in_memory(width, dtype, device), dtype=dtype, device=device)[..., :width]


def width_in_memory(width: int, dtype: torch.dtype, device: torch.device) -> int:
    """Return the elements from one row of `empty_rows` to the next."""
    return width + -width % ROW_ALIGN_BYTES if dtype in _BY_DTYPE and device.type == "cuda" else width


_BY_DTYPE = {storage.dtype: storage for storage in STORAGES.values()}


def _rounded_up(x: Tensor) -> Tensor:
    """Return positive float32 numbers rounded up to bfloat16, which keeps the upper half of their bits.

    Infinity and NaN stay as they are: the bits of some NaN would overflow.
    """
    return ((x.view(torch.int32) + 0xFFFF) & ~0xFFFF).view(torch.float32).where(x.isfinite(), x)
