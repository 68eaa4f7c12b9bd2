"""Configuration of one layer's cache: sizes, dtype, mask and storage, their checks, and their codes."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from attnmesh.cache.window import check_window
from attnmesh.core.mask import Mask
from attnmesh.core.partial import DTYPE_NAMES
from attnmesh.core.storage import STORAGES, Storage
from attnmesh.errors import ArgumentError, DtypeError, KernelError, ShapeError, check_choice, check_int
from attnmesh.runtime.machine import is_out_of_memory

NUMBERS = ("batch", "kv_heads", "head_dim", "value_dim", "capacity", "block")
"""Fields of `CacheConfig` that are whole numbers."""

LARGEST = 2**48
"""The largest of the numbers of a cache: products of several fit 64 bits, or PyTorch says that they do not."""

VALUE_FORMS = ("separate", "prefix", "none")
"""Values of `values=`. A file holds their places in one number with those of `storage=`, so a new one changes it."""


@dataclass(frozen=True)
class CacheConfig:
    """Sizes and options of one layer's keys and values over all ranks, as `KVCache.config` has them."""

    batch: int
    kv_heads: int
    head_dim: int
    value_dim: int
    capacity: int
    block: int
    dtype: torch.dtype
    values: str = "separate"
    mask: Mask | None = None
    """The widest mask of later queries. Tokens that it hides are forgotten. None keeps all tokens."""
    keep: int = 0
    """Tokens that `truncate` may remove from a cache with a mask."""
    storage: str | None = None
    """Form of the stored numbers: a name of `STORAGES`; None for `dtype`."""
    hot: int | None = None
    """Newest tokens on the device, beside all in a second memory; None for one memory."""

    @property
    def kept(self) -> int:
        """Most tokens on all ranks that have to be in memory."""
        if self.mask is None:
            return self.capacity
        return min(self.capacity, self.mask.max_causal_keys_of(self.capacity) + self.keep)

    def arguments(self) -> dict[str, Any]:
        """Return the fields by name, as `KVCache` takes them."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @cached_property
    def common_config(self) -> "CacheConfig":
        """The configuration without what may differ between the caches of one call."""
        return replace(self, capacity=1, block=1, keep=0, hot=None)

    @property
    def columns(self) -> tuple[int, ...]:
        """Columns of the tensors that are appended: keys, and values if they are separate."""
        return (self.head_dim, self.value_dim) if self.values == "separate" else (self.head_dim,)

    @property
    def row_widths(self) -> tuple[int, ...]:
        """Elements in a row of each stored tensor: keys, and values if they are separate."""
        storage_format = self.storage_format
        return self.columns if storage_format is None else tuple(map(storage_format.row_width, self.columns))

    @property
    def row_dtype(self) -> torch.dtype:
        """Dtype of rows in memory. Rows in 8 bits are bytes, which PyTorch moves on all devices."""
        return self.dtype if self.storage is None else torch.int8

    @property
    def storage_format(self) -> Storage | None:
        """How numbers are stored in 8 bits; None if they are stored in `dtype`."""
        return None if self.storage is None else STORAGES[self.storage]

    @property
    def nbytes(self) -> int:
        """Bytes of the tokens that have to be in memory on all ranks."""
        return self.kept * self.batch * self.kv_heads * sum(self.row_widths) * self.row_dtype.itemsize

    def rows_of(self, x: Tensor) -> Tensor:
        """Return new keys or values as rows in memory."""
        storage_format = self.storage_format
        return x if storage_format is None else storage_format.quantize(x).view(torch.int8)

    def keys_and_values(self, kv_tensors: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Return rows in memory as kernels read them: values that are a prefix of keys in 8 bits are the same rows."""
        storage_format = self.storage_format
        rows = [*kv_tensors] if storage_format is None else [x.view(storage_format.dtype) for x in kv_tensors]
        if storage_format is None and len(rows) == 1:
            rows.append(rows[0][..., : self.value_dim])
        return rows[0], rows[-1]

    def check(self, head_ranks: int) -> None:
        """Raise unless every size is supported and the heads axis divides the key heads."""
        for name in NUMBERS:
            least = 0 if name == "value_dim" and self.values == "none" else 1
            size = getattr(self, name)
            check_int(f"KVCache {name}", size, least, f"pass a Python int of {least} or more")
            if size > LARGEST:
                raise ShapeError(f"KVCache {name}", f"at most {LARGEST:,}", f"{size:,}", "pass a smaller one")
        if not isinstance(self.dtype, torch.dtype) or str(self.dtype).removeprefix("torch.") not in DTYPE_NAMES:
            raise DtypeError(
                "KVCache dtype", f"one of {', '.join(DTYPE_NAMES)}", repr(self.dtype), "pass the model's dtype"
            )
        fix = 'leave it out, or pass "prefix" for latents and "none" for keys alone'
        check_choice("KVCache values", self.values, VALUE_FORMS, fix, ArgumentError)
        if self.values == "prefix" and self.value_dim > self.head_dim:
            expected = f"no more than head_dim {self.head_dim} for a prefix of the keys"
            raise ShapeError("KVCache value_dim", expected, f"{self.value_dim}", 'leave out values="prefix"')
        if self.values == "none" and self.value_dim:
            raise ShapeError("KVCache value_dim", "None for keys alone", f"{self.value_dim}", "leave out value_dim")
        if self.storage is not None:
            self._check_storage()
        check_window(self.mask, self.keep)
        self._check_hot()
        check_key_heads("KVCache", self.kv_heads, head_ranks)

    def _check_storage(self) -> None:
        """Raise unless rows can be stored in 8 bits."""
        check_storage("KVCache storage", self.storage)
        for name, columns in zip(("head_dim", "value_dim"), self.columns, strict=False):
            if columns % 2:
                expected = f"an even number with storage={self.storage!r}"
                raise ShapeError(f"KVCache {name}", expected, f"{columns}", "leave out storage=")

    def _check_hot(self) -> None:
        """Raise unless the newest tokens can be in a memory of their own."""
        if self.hot is None:
            return
        check_int("KVCache hot", self.hot, 1, "count the newest tokens to keep on the device, or leave it out")
        if self.mask is not None:
            fix = "leave hot= out: the window alone is in memory"
            raise KernelError("KVCache hot", "a cache that keeps all tokens", f"mask={self.mask}", fix)
        if self.values == "none":
            fix = "leave hot= out: all of these keys are read at each step"
            raise KernelError("KVCache hot", "a cache with values", f"values={self.values!r}", fix)

    @contextmanager
    def allocating(self) -> Iterator[None]:
        """Raise an error that names the capacity if there is no memory for it."""
        try:
            yield
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            given, fix = f"no room for {self.capacity:,}", "pass a smaller capacity, or use more ranks"
            raise ShapeError("KVCache capacity", "tokens that fit the device's memory", given, fix) from error

    def to_code(self) -> list[int]:
        """Return the configuration as integers, for a file or a message.

        Files outlive a version: what changes the meaning of a number changes `MANIFEST_VERSION` of `store/manifest.py`.
        """
        numbers = [
            *(getattr(self, name) for name in NUMBERS),
            DTYPE_NAMES.index(str(self.dtype).removeprefix("torch.")),
        ]
        window = [] if self.mask is None else [self.keep, *self.mask.to_code()]
        storage = 0 if self.storage is None else 1 + [*STORAGES].index(self.storage)
        return [*numbers, VALUE_FORMS.index(self.values) + len(VALUE_FORMS) * storage, *window]

    @staticmethod
    def from_code(code: list[int]) -> "CacheConfig":
        """Return the configuration that `to_code` wrote."""
        batch, kv_heads, head_dim, value_dim, capacity, block, dtype, *optional = code
        numbers = batch, kv_heads, head_dim, value_dim, capacity, block, getattr(torch, DTYPE_NAMES[dtype])
        storage, values = divmod(optional[0] if optional else 0, len(VALUE_FORMS))
        config = CacheConfig(*numbers, VALUE_FORMS[values], storage=(None, *STORAGES)[storage])
        return replace(config, keep=optional[1], mask=Mask.from_code(optional[2:])) if optional[1:] else config


def check_key_heads(subject: str, kv_heads: int, head_ranks: int) -> None:
    """Raise unless the heads axis divides the key heads."""
    if kv_heads % head_ranks:
        given = f"{kv_heads} key heads and a heads axis of {head_ranks}"
        raise ShapeError(subject, "key heads that the heads axis divides", given, "give its ranks to the keys axis")


def check_storage(subject: str, storage: object) -> None:
    """Raise unless `storage` is None or a name of `STORAGES`."""
    if storage is not None and (not isinstance(storage, str) or storage not in STORAGES):
        expected = f"None or one of {', '.join(STORAGES)}"
        raise ArgumentError(subject, expected, repr(storage), "pass one of them, or leave it out")
