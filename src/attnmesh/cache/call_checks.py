"""Checks of what calls on a cache are given, against its configuration."""

from collections.abc import Mapping

import torch
from torch import Tensor

from attnmesh.cache.cache_config import CacheConfig
from attnmesh.checks.argument_checks import check_same_kind, transpose_hint_first
from attnmesh.errors import ArgumentError, DtypeError, KernelError, ShapeError
from attnmesh.guard.agreement import is_capturing, may_compare


def check_new(subject: str, config: CacheConfig, k: Tensor, v: Tensor | None, device: torch.device) -> None:
    """Raise unless k and v are new tokens with all heads."""
    if v is not None and config.values != "separate":
        given = f"{tuple(v.shape)}" if isinstance(v, Tensor) else type(v).__name__
        expected = "None, for values are columns of k" if config.values == "prefix" else "None in a cache of keys"
        raise ArgumentError(f"{subject} v", expected, given, "pass the keys alone")
    if v is None and config.values == "separate":
        fix = 'pass v, or make the cache with values="prefix" if they are columns of the keys, "none" without any'
        raise ArgumentError(f"{subject} v", "a tensor of values", "None", fix)
    tensors = {"k": k} if v is None else {"k": k, "v": v}
    check_same_kind(subject, tensors)
    for (name, x), width in zip(tensors.items(), config.columns, strict=True):
        if x.ndim != 4 or (x.shape[0], x.shape[1], x.shape[3]) != (config.batch, config.kv_heads, width):
            expected = f"shape ({config.batch}, {config.kv_heads}, tokens, {width})"
            fits = x.ndim == 4 and (x.shape[0], x.shape[2], x.shape[3]) == (config.batch, config.kv_heads, width)
            fix = transpose_hint_first("pass what the cache was made for", fits)
            raise ShapeError(f"{subject} {name}", expected, f"{tuple(x.shape)}", fix)
        check_dtype_and_device(f"{subject} {name}", config, x, device)
    check_no_gradients(subject, tensors)
    check_eager(subject, config, device)
    if v is not None and k.shape[2] != v.shape[2]:
        given = f"{k.shape[2]} and {v.shape[2]} tokens"
        raise ShapeError(subject, "k and v of the same tokens", given, "pair each key with its value")


def check_dtype_and_device(
    subject: str, config: CacheConfig, x: Tensor, device: torch.device, *, rows: bool = False
) -> None:
    """Raise unless a tensor has the cache's dtype, or that of its stored rows, on its type of device."""
    storage_format = config.storage_format if rows else None
    dtype = config.dtype if storage_format is None else storage_format.dtype
    if x.dtype != dtype or x.device.type != device.type:
        fix = "call .to() with the cache's dtype and device"
        raise DtypeError(subject, f"{dtype} on {device}", f"{x.dtype} on {x.device}", fix)


def check_eager(subject: str, config: CacheConfig, device: torch.device) -> None:
    """Raise if a cache that forgets, or has two memories, is changed inside a graph, which cannot move tokens."""
    if may_compare(device):
        return
    for option, value, kind in (("mask", config.mask, "forgets"), ("hot", config.hot, "has two memories")):
        if value is not None:
            expected, given = f"no graph around a cache that {kind}", f"one with {option}={value}"
            fix = f"leave torch.compile and CUDA graphs out, or make the cache without {option}="
            raise KernelError(subject, expected, given, fix)


def needs_cpu(config: CacheConfig, queries: int) -> bool:
    """Return whether the CPU takes part in a step of `queries` queries, so that no graph can hold the step."""
    return config.hot is not None or (config.mask is not None and queries > 1)


def check_captured(subject: str, token_mask: Tensor | None, device: torch.device) -> None:
    """Raise for a token mask in a CUDA graph: the CPU reads it, to compare the padding of all ranks."""
    if token_mask is not None and is_capturing(device):
        fix = "append the padded tokens before the capture; real ones need no token_mask"
        raise KernelError(f"{subject} token_mask", "None in a CUDA graph", "a tensor", fix)


def check_no_gradients(subject: str, tensors: Mapping[str, Tensor | None]) -> None:
    """Raise if a tensor requires gradients, where they are enabled."""
    for name, x in tensors.items():
        if torch.is_grad_enabled() and isinstance(x, Tensor) and x.requires_grad:
            given, fix = "one with requires_grad=True", "decode under torch.no_grad(), or train with attention"
            raise KernelError(f"{subject} {name}", "a tensor without gradients", given, fix)
