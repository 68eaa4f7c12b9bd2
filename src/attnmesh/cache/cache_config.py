"""Sizes of one layer's cache, and the checks of tensors against them."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from attnmesh.cache.window import check_window
from attnmesh.core.mask import Mask
from attnmesh.core.partial import DTYPES
from attnmesh.core.storage import STORAGES, Storage
from attnmesh.errors import ArgumentError, DtypeError, KernelError, ShapeError, check_choice, check_int, require
from attnmesh.guard.agreement import is_capturing, may_compare
from attnmesh.guard.argument_checks import check_same_kind, swap_first
from attnmesh.runtime.machine import is_out_of_memory

NUMBERS = ("batch", "kv_heads", "head_dim", "value_dim", "capacity", "block")
"""Fields of `CacheSizes` that are whole numbers."""

LARGEST = 2**48
"""The largest of the numbers of a cache: products of several fit 64 bits, or PyTorch says that they do not."""

VALUES = ("separate", "prefix", "none")
"""Values of `values=`. A file holds their numbers, and with them those of `storage=`."""


@dataclass(frozen=True)
class CacheSizes:
    """Sizes of one layer's keys and values over all ranks."""

    batch: int
    kv_heads: int
    head_dim: int
    value_dim: int
    capacity: int
    block: int
    dtype: torch.dtype
    values: str = "separate"
    mask: Mask | None = None  # the widest mask of later queries; tokens that it hides are forgotten
    keep: int = 0  # tokens that `truncate` may remove from such a cache
    storage: str | None = None  # form of the stored numbers: a name of `STORAGES`; None for `dtype`
    hot: int | None = None  # newest tokens on the device, beside all in a second memory; None for one memory

    @property
    def kept(self) -> int:
        """Most tokens on all ranks that have to be in memory."""
        if self.mask is None:
            return self.capacity
        return min(self.capacity, self.mask.longest_row(self.capacity) + self.keep)

    @cached_property
    def common_sizes(self) -> "CacheSizes":
        """The sizes that caches in one call have in common."""
        return replace(self, capacity=1, block=1, keep=0, hot=None)

    @property
    def columns(self) -> tuple[int, ...]:
        """Columns of the tensors that are appended: keys, and values if they are separate."""
        return (self.head_dim, self.value_dim) if self.values == "separate" else (self.head_dim,)

    @property
    def row_widths(self) -> tuple[int, ...]:
        """Elements in a row of each of these tensors in memory."""
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

    def keys_and_values(self, stored: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Return rows in memory as kernels read them: values that are a prefix of keys in 8 bits are the same rows."""
        storage_format = self.storage_format
        rows = [*stored] if storage_format is None else [x.view(storage_format.dtype) for x in stored]
        if storage_format is None and len(rows) == 1:
            rows.append(rows[0][..., : self.value_dim])
        return rows[0], rows[-1]

    def check(self, heads_axis: int) -> None:
        """Raise unless every size is supported and the heads axis divides the key heads."""
        for name in NUMBERS:
            least = 0 if name == "value_dim" and self.values == "none" else 1
            number = check_int(f"KVCache {name}", getattr(self, name), least, f"pass a Python int of {least} or more")
            expected, fix = f"at most {LARGEST:,}", "pass a smaller one"
            require(number <= LARGEST, ShapeError, f"KVCache {name}", expected, f"{number:,}", fix)
        is_supported = isinstance(self.dtype, torch.dtype) and str(self.dtype).removeprefix("torch.") in DTYPES
        expected, fix = f"one of {', '.join(DTYPES)}", "pass the model's dtype"
        require(is_supported, DtypeError, "KVCache dtype", expected, repr(self.dtype), fix)
        fix = 'leave it out, or pass "prefix" for latents and "none" for keys alone'
        check_choice("KVCache values", self.values, VALUES, fix, ArgumentError)
        if self.values == "prefix" and self.value_dim > self.head_dim:
            expected = f"no more than head_dim {self.head_dim} for a prefix of the keys"
            raise ShapeError("KVCache value_dim", expected, f"{self.value_dim}", 'leave out values="prefix"')
        if self.values == "none" and self.value_dim:
            raise ShapeError("KVCache value_dim", "None for keys alone", f"{self.value_dim}", "leave out value_dim")
        if self.storage is not None:
            self._check_storage()
        check_window(self.mask, self.keep)
        self._check_hot()
        check_key_heads("KVCache", self.kv_heads, heads_axis)

    def _check_storage(self) -> None:
        """Raise unless rows can be stored in 8 bits."""
        check_storage("KVCache storage", self.storage)
        for name, columns in zip(("head_dim", "value_dim"), self.columns, strict=False):
            expected, fix = f"an even number with storage={self.storage!r}", "leave out storage="
            require(columns % 2 == 0, ShapeError, f"KVCache {name}", expected, columns, fix)

    def _check_hot(self) -> None:
        """Raise unless the newest tokens can be in a memory of their own."""
        if self.hot is None:
            return
        check_int("KVCache hot", self.hot, 1, "count the newest tokens to keep on the device, or leave it out")
        given, fix = f"mask={self.mask}", "leave hot= out: the window alone is in memory"
        require(self.mask is None, KernelError, "KVCache hot", "a cache that keeps all tokens", given, fix)
        given, fix = f"values={self.values!r}", "leave hot= out: all of these keys are read at each step"
        require(self.values != "none", KernelError, "KVCache hot", "a cache with values", given, fix)

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
        """Return the sizes as integers, for a file or a message."""
        numbers = [*(getattr(self, name) for name in NUMBERS), DTYPES.index(str(self.dtype).removeprefix("torch."))]
        window = [] if self.mask is None else [self.keep, *self.mask.to_code()]
        storage = 0 if self.storage is None else 1 + [*STORAGES].index(self.storage)
        return [*numbers, VALUES.index(self.values) + len(VALUES) * storage, *window]

    @staticmethod
    def from_code(code: list[int]) -> "CacheSizes":
        """Return the sizes that `to_code` wrote."""
        batch, kv_heads, head_dim, value_dim, capacity, block, dtype, *optional = code
        numbers = batch, kv_heads, head_dim, value_dim, capacity, block, getattr(torch, DTYPES[dtype])
        storage, values = divmod(optional[0] if optional else 0, len(VALUES))
        sizes = CacheSizes(*numbers, VALUES[values], storage=(None, *STORAGES)[storage])
        return replace(sizes, keep=optional[1], mask=Mask.from_code(optional[2:])) if optional[1:] else sizes

    def check_new(self, subject: str, k: Tensor, v: Tensor | None, device: torch.device) -> None:
        """Raise unless k and v are new tokens with all heads."""
        if v is not None and self.values != "separate":
            given = f"{tuple(v.shape)}" if isinstance(v, Tensor) else type(v).__name__
            expected = "None, for values are columns of k" if self.values == "prefix" else "None in a cache of keys"
            raise ArgumentError(f"{subject} v", expected, given, "pass the keys alone")
        if v is None and self.values == "separate":
            fix = 'pass v, or make the cache with values="prefix" if they are columns of the keys, "none" without any'
            raise ArgumentError(f"{subject} v", "a tensor of values", "None", fix)
        tensors: dict[str, Any] = dict(zip("kv", (k, v), strict=True)) if self.values == "separate" else {"k": k}
        check_same_kind(subject, tensors)
        for (name, x), width in zip(tensors.items(), self.columns, strict=True):
            if x.ndim != 4 or (x.shape[0], x.shape[1], x.shape[3]) != (self.batch, self.kv_heads, width):
                expected = f"shape ({self.batch}, {self.kv_heads}, tokens, {width})"
                fits = x.ndim == 4 and (x.shape[0], x.shape[2], x.shape[3]) == (self.batch, self.kv_heads, width)
                fix = swap_first("pass what the cache was made for", fits)
                raise ShapeError(f"{subject} {name}", expected, f"{tuple(x.shape)}", fix)
            self.check_dtype(f"{subject} {name}", x, device)
        check_no_gradients(subject, tensors)
        self.check_eager(subject, device)
        if v is not None and k.shape[2] != v.shape[2]:
            given = f"{k.shape[2]} and {v.shape[2]} tokens"
            raise ShapeError(subject, "k and v of the same tokens", given, "pair each key with its value")

    def check_dtype(self, subject: str, x: Tensor, device: torch.device, *, rows: bool = False) -> None:
        """Raise unless a tensor has the cache's dtype, or that of its stored rows, and its type of device."""
        storage_format = self.storage_format if rows else None
        dtype = self.dtype if storage_format is None else storage_format.dtype
        if x.dtype != dtype or x.device.type != device.type:
            fix = "call .to() with the cache's dtype and device"
            raise DtypeError(subject, f"{dtype} on {device}", f"{x.dtype} on {x.device}", fix)

    def check_token_mask(self, subject: str, token_mask: Tensor | None, tokens: int | None) -> None:
        """Raise unless `token_mask` has one bool per token; `tokens=None` accepts any number."""
        if token_mask is None:
            return
        shape = tuple(token_mask.shape) if isinstance(token_mask, Tensor) else ()
        expected_shape = (self.batch, shape[-1] if tokens is None and len(shape) == 2 else tokens)
        if not isinstance(token_mask, Tensor) or token_mask.dtype != torch.bool or shape != expected_shape:
            given = f"{token_mask.dtype} {shape}" if isinstance(token_mask, Tensor) else type(token_mask).__name__
            fix = "pass attention_mask.bool(), of the new tokens alone"
            raise ShapeError(f"{subject} token_mask", f"torch.bool {expected_shape}", given, fix)

    def check_eager(self, subject: str, device: torch.device) -> None:
        """Raise if a cache that forgets, or has two memories, is changed inside a graph, which cannot move tokens."""
        if may_compare(device):
            return
        for option, kind in (("mask", "forgets"), ("hot", "has two memories")):
            value = getattr(self, option)
            fix = f"leave torch.compile and CUDA graphs out, or make the cache without {option}="
            expected = f"no graph around a cache that {kind}"
            require(value is None, KernelError, subject, expected, f"one with {option}={value}", fix)

    def check_captured(self, subject: str, token_mask: Tensor | None, device: torch.device) -> None:
        """Raise for a token mask in a CUDA graph: the CPU reads it, to compare the padding of all ranks."""
        if token_mask is not None and is_capturing(device):
            fix = "append the padded tokens before the capture; real ones need no token_mask"
            raise KernelError(f"{subject} token_mask", "None in a CUDA graph", "a tensor", fix)

    def check_order(self, batch_index: Tensor) -> None:
        """Raise unless `batch_index` holds indices of sequences."""
        if not isinstance(batch_index, Tensor) or batch_index.dtype != torch.int64:
            given = str(batch_index.dtype) if isinstance(batch_index, Tensor) else type(batch_index).__name__
            raise DtypeError("reorder", "a tensor of torch.int64", given, "pass torch.tensor([...])")
        indices = batch_index.ndim == 1 and len(batch_index) > 0
        if not indices or not bool(((batch_index >= 0) & (batch_index < self.batch)).all()):
            expected = f"a number of a sequence below {self.batch} for each"
            raise ShapeError("reorder", expected, f"{batch_index.tolist()}", f"pass indices from 0 to {self.batch - 1}")


def check_key_heads(subject: str, kv_heads: int, heads_axis: int) -> None:
    """Raise unless the heads axis divides the key heads."""
    given, fix = f"{kv_heads} key heads and a heads axis of {heads_axis}", "give its ranks to the keys axis"
    require(kv_heads % heads_axis == 0, ShapeError, subject, "key heads that the heads axis divides", given, fix)


def check_storage(subject: str, storage: object) -> None:
    """Raise unless `storage` is None or a name of `STORAGES`."""
    is_supported = storage is None or (isinstance(storage, str) and storage in STORAGES)
    expected, fix = f"None or one of {', '.join(STORAGES)}", "pass one of them, or leave it out"
    require(is_supported, ArgumentError, subject, expected, repr(storage), fix)


def check_hot(sizes: CacheSizes, copies: int) -> None:
    """Raise unless the newest tokens of a cache with so many copies can be in a memory of their own."""
    fix = "leave copies out, or hot"
    fits = sizes.hot is None or copies == 1
    require(fits, KernelError, "KVCache hot", "one rank of each token", f"copies={copies}", fix)


def check_in_folder(sizes: CacheSizes, device: torch.device, copies: int, shares: object) -> None:
    """Raise unless a cache of these sizes can be files of a folder."""
    subject, fix = "KVCache folder", 'pass hot=, or device="cpu"'
    fits = device.type == "cpu" or sizes.hot is not None
    expected = "a cache on a CPU, or one whose newest tokens alone are on a device"
    require(fits, KernelError, subject, expected, str(device), fix)
    given, fix = f"mask={sizes.mask}", "leave mask= out, and decode with it"
    require(sizes.mask is None, KernelError, subject, "a cache that keeps all tokens", given, fix)
    check_ranks_in_folder(subject, copies, shares)


def check_ranks_in_folder(subject: str, copies: int, shares: object) -> None:
    """Raise unless a folder can have the tokens of ranks with such copies and shares."""
    fix = "leave copies out: files outlive their rank"
    require(copies == 1, KernelError, subject, "one rank of each token", f"copies={copies}", fix)
    fix = "leave shares out, or load the folder with shares="
    require(shares is None, KernelError, subject, "even shares", f"shares={shares!r}", fix)


def check_no_gradients(subject: str, tensors: Mapping[str, Tensor | None]) -> None:
    """Raise if a tensor requires gradients, where they are enabled."""
    for name, x in tensors.items():
        if torch.is_grad_enabled() and isinstance(x, Tensor) and x.requires_grad:
            given, fix = "one with requires_grad=True", "decode under torch.no_grad(), or train with attention"
            raise KernelError(f"{subject} {name}", "a tensor without gradients", given, fix)
