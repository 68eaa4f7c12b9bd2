"""Sizes of one layer's cache, and the checks of tensors against them."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from attnmesh.core.mask import Mask
from attnmesh.core.partial import DTYPES
from attnmesh.decode.window import check_whole, check_window, longest_row
from attnmesh.errors import ArgumentError, DtypeError, KernelError, ShapeError, require
from attnmesh.guard.checks import check_same_kind, swap_first
from attnmesh.guard.consensus import is_capturing, may_compare
from attnmesh.runtime.machine import is_out_of_memory

NUMBERS = ("batch", "kv_heads", "head_dim", "value_dim", "capacity", "block")

LARGEST = 2**48
"""The largest of these numbers: products of several fit 64 bits, or PyTorch says that they do not."""

VALUES = ("separate", "prefix", "none")
"""Values of `values=`. A file holds their numbers."""


@dataclass(frozen=True)
class Sizes:
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

    @property
    def kept(self) -> int:
        """Most tokens on all ranks that have to be in memory."""
        if self.mask is None:
            return self.capacity
        return min(self.capacity, longest_row(self.mask, self.capacity) + self.keep)

    @property
    def widths(self) -> tuple[int, ...]:
        """Columns of the tensors that are stored: keys, and values if they are separate."""
        return (self.head_dim, self.value_dim) if self.values == "separate" else (self.head_dim,)

    def check(self, heads_axis: int) -> None:
        """Raise unless every size is supported and the heads axis divides the key heads."""
        for name in NUMBERS:
            least = 0 if name == "value_dim" and self.values == "none" else 1
            number = check_whole(f"KVCache {name}", getattr(self, name), least, "count it as an int")
            expected, fix = f"at most {LARGEST:,}", "pass a smaller one"
            require(number <= LARGEST, ShapeError, f"KVCache {name}", expected, f"{number:,}", fix)
        known = isinstance(self.dtype, torch.dtype) and str(self.dtype).removeprefix("torch.") in DTYPES
        expected, fix = f"one of {', '.join(DTYPES)}", "pass the model's dtype"
        require(known, DtypeError, "KVCache dtype", expected, repr(self.dtype), fix)
        expected = f"one of {', '.join(VALUES)}"
        fix = 'leave it out, or pass "prefix" for latents and "none" for keys alone'
        require(self.values in VALUES, ArgumentError, "KVCache values", expected, repr(self.values), fix)
        if self.values == "prefix" and self.value_dim > self.head_dim:
            expected = f"no more than head_dim {self.head_dim} for a prefix of the keys"
            raise ShapeError("KVCache value_dim", expected, f"{self.value_dim}", 'leave out values="prefix"')
        if self.values == "none" and self.value_dim:
            raise ShapeError("KVCache value_dim", "None for keys alone", f"{self.value_dim}", 'leave out values="none"')
        check_window(self.mask, self.keep)
        divides, fix = self.kv_heads % heads_axis == 0, "give its ranks to the keys axis"
        given = f"{self.kv_heads} key heads and a heads axis of {heads_axis}"
        require(divides, ShapeError, "KVCache", "key heads that the heads axis divides", given, fix)

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

    def encode(self) -> list[int]:
        """Return the sizes as integers, for a file or a message."""
        numbers = [*(getattr(self, name) for name in NUMBERS), DTYPES.index(str(self.dtype).removeprefix("torch."))]
        window = [] if self.mask is None else [self.keep, *self.mask.encode()]
        return [*numbers, VALUES.index(self.values), *window]

    @staticmethod
    def decode(code: list[int]) -> "Sizes":
        """Return the sizes that `encode` wrote."""
        batch, kv_heads, head_dim, value_dim, capacity, block, dtype, *more = code
        numbers = batch, kv_heads, head_dim, value_dim, capacity, block, getattr(torch, DTYPES[dtype])
        sizes = Sizes(*numbers, VALUES[more[0]] if more else "separate")
        return replace(sizes, keep=more[1], mask=Mask.decode(more[2:])) if more[1:] else sizes

    def check_new(self, subject: str, k: Tensor, v: Tensor | None, device: torch.device) -> None:
        """Raise unless k and v are new tokens with all heads."""
        if v is not None and self.values != "separate":
            given = f"{tuple(v.shape)}" if isinstance(v, Tensor) else type(v).__name__
            expected = "None, for values are columns of k" if self.values == "prefix" else "None in a cache of keys"
            raise ArgumentError(f"{subject} v", expected, given, "pass the keys alone")
        if v is None and self.values == "separate":
            fix = 'pass v, or make the cache with values="prefix" if they are columns of the keys, "none" without any'
            raise ArgumentError(f"{subject} v", "a tensor of values", "None", fix)
        named: dict[str, Any] = dict(zip("kv", (k, v), strict=True)) if self.values == "separate" else {"k": k}
        check_same_kind(subject, named)
        for (name, x), width in zip(named.items(), self.widths, strict=True):
            if x.ndim != 4 or (x.shape[0], x.shape[1], x.shape[3]) != (self.batch, self.kv_heads, width):
                expected = f"shape ({self.batch}, {self.kv_heads}, tokens, {width})"
                fits = x.ndim == 4 and (x.shape[0], x.shape[2], x.shape[3]) == (self.batch, self.kv_heads, width)
                fix = swap_first("pass what the cache was made for", fits)
                raise ShapeError(f"{subject} {name}", expected, f"{tuple(x.shape)}", fix)
            self.check_dtype(f"{subject} {name}", x, device)
        check_no_gradients(subject, named)
        self.check_eager(subject, device)
        if v is not None and k.shape[2] != v.shape[2]:
            given = f"{k.shape[2]} and {v.shape[2]} tokens"
            raise ShapeError(subject, "k and v of the same tokens", given, "pair each key with its value")

    def check_dtype(self, subject: str, x: Tensor, device: torch.device) -> None:
        """Raise unless a tensor has the cache's dtype and type of device."""
        if x.dtype != self.dtype or x.device.type != device.type:
            fix = "call .to() with the cache's dtype and device"
            raise DtypeError(subject, f"{self.dtype} on {device}", f"{x.dtype} on {x.device}", fix)

    def check_token_mask(self, subject: str, token_mask: Tensor | None, tokens: int | None) -> None:
        """Raise unless `token_mask` has one bool per token; `tokens=None` accepts any number."""
        if token_mask is None:
            return
        shape = tuple(token_mask.shape) if isinstance(token_mask, Tensor) else ()
        wanted = (self.batch, shape[-1] if tokens is None and len(shape) == 2 else tokens)
        if not isinstance(token_mask, Tensor) or token_mask.dtype != torch.bool or shape != wanted:
            given = f"{token_mask.dtype} {shape}" if isinstance(token_mask, Tensor) else type(token_mask).__name__
            fix = "pass attention_mask.bool(), of the new tokens alone"
            raise ShapeError(f"{subject} token_mask", f"torch.bool {wanted}", given, fix)

    def check_eager(self, subject: str, device: torch.device) -> None:
        """Raise if a cache that forgets is changed inside a graph, which cannot move tokens."""
        if self.mask is not None and not may_compare(device):
            fix = "leave torch.compile and CUDA graphs out, or make the cache without mask="
            raise KernelError(subject, "no graph around a cache that forgets", f"one with mask={self.mask}", fix)

    def check_captured(self, subject: str, token_mask: Tensor | None, device: torch.device) -> None:
        """Raise for a token mask in a CUDA graph: the host reads it, to compare the padding of all ranks."""
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


def check_no_gradients(subject: str, named: Mapping[str, Tensor | None]) -> None:
    """Raise if a tensor requires gradients, where they are enabled."""
    for name, x in named.items():
        if torch.is_grad_enabled() and isinstance(x, Tensor) and x.requires_grad:
            given, fix = "one with requires_grad=True", "decode under torch.no_grad(), or train with attention"
            raise KernelError(f"{subject} {name}", "a tensor without gradients", given, fix)
