"""Checks of what calls on a cache are given, against its configuration and its tokens."""

from collections.abc import Mapping
from enum import Enum
from typing import assert_never

import torch
from torch import Tensor

from attnmesh.cache.cache_config import CacheConfig
from attnmesh.cache.local_shards import LocalShards
from attnmesh.checks.argument_checks import check_same_kind, transpose_hint_first
from attnmesh.errors import ArgumentError, DtypeError, KernelError, LayoutError, ShapeError
from attnmesh.guard.agreement import is_capturing, may_compare
from attnmesh.kernels.cache_view import LENGTH
from attnmesh.mesh.shares import check_even_shares


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
    check_eager_tensors(subject, tensors)
    check_eager(subject, config, device)
    if v is not None and k.shape[2] != v.shape[2]:
        given = f"{k.shape[2]} and {v.shape[2]} tokens"
        raise ShapeError(subject, "k and v of the same tokens", given, "pair each key with its value")


def check_dtype_and_device(
    subject: str, config: CacheConfig, x: Tensor, device: torch.device, *, rows: bool = False
) -> None:
    """Raise unless a tensor has the cache's dtype, or that of its stored rows, on its device."""
    storage_format = config.storage_format if rows else None
    dtype = config.dtype if storage_format is None else storage_format.dtype
    if x.dtype != dtype or x.device != device:
        fix = "call .to() with the cache's dtype and device"
        raise DtypeError(subject, f"{dtype} on {device}", f"{x.dtype} on {x.device}", fix)


def check_eager(subject: str, config: CacheConfig, device: torch.device) -> None:
    """Raise if a cache that forgets, or has two memories, is changed inside a graph, which cannot move tokens."""
    if may_compare(device):
        return
    for option, value, kind in (("mask", config.mask, "forgets"), ("hot", config.hot, "has two memories")):
        if value is not None:
            expected, given = f"no graph around a cache that {kind}", f"one with {option}={value!r}"
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


def check_eager_tensors(subject: str, tensors: Mapping[str, Tensor | None]) -> None:
    """Raise unless kernels of a cache can read the tensors' memory, and no gradient is asked for."""
    for name, x in tensors.items():
        if not isinstance(x, Tensor):
            continue
        if torch.is_grad_enabled() and x.requires_grad:
            given, fix = "one with requires_grad=True", "decode under torch.no_grad(), or train with attention"
            raise KernelError(f"{subject} {name}", "a tensor without gradients", given, fix)
        if not torch.compiler.is_compiling() and not _has_memory(x):
            call = next((f"x.{call}()" for call in ("to_local", "wait") if hasattr(x, call)), "a copy of its numbers")
            fix = f"pass the plain tensor in it: {call}"
            raise DtypeError(f"{subject} {name}", "a tensor with memory of its own", type(x).__name__, fix)
    if not torch.compiler.is_compiling() and torch._C._functorch.peek_interpreter_stack() is not None:
        fix = "call it before the transform, and pass its output on"
        raise KernelError(subject, "a call outside of torch.func's transforms", "one inside", fix)


def _has_memory(x: Tensor) -> bool:
    """Return whether a tensor has memory: a DTensor and the result of an asynchronous collective wrap one that has."""
    if not x.is_cpu:  # a subclass may keep its numbers where kernels of its device find them
        return type(x).__name__ != "AsyncCollectiveTensor"
    try:
        x.untyped_storage().data_ptr()
    except RuntimeError:
        return False
    return True


class StepFault(Enum):
    """Why the shards of a cache cannot serve a step of decoding as they are."""

    LENGTH = "there are fewer tokens than queries, or more than the capacity"
    FORGOTTEN = "the queries see tokens that the cache has forgotten"
    # Of a reproducible step, which merges the blocks of one tensor along one tree:
    LAYOUT = "its tokens are no blocks in turn"
    SHARES = "the blocks of a rank are no subtree of the tree"
    TIERS = "two kernels read its tokens"
    SHARED = "other caches share some of its blocks, which can be copied"


def step_fault(shards: LocalShards, queries: int | None, *, reproducible: bool) -> StepFault | None:
    """Return why a step of `queries` queries cannot be served, or None. A graph passes None: it reads no length.

    New steps and known steps both call this function, so all reasons of the shards belong here.
    """
    shard = shards.own
    config = shard.config
    if reproducible:
        if shard.padding is not None or shards.counter.rank_counts.start:
            return StepFault.LAYOUT
        if not shard.block_cyclic.is_even:
            return StepFault.SHARES
        if config.hot is not None and shard.device.type != "cpu":
            return StepFault.TIERS
    if queries is not None:
        counter = shards.counter
        if not shard.on_gpu or (counter.in_graphs and not is_capturing(shard.device)):
            length = shard.device_counts.tolist()[LENGTH]
        else:
            length = counter.length
        if not queries <= length <= config.capacity:
            return StepFault.LENGTH
        if config.mask is not None and not shards.serves(length - queries):
            return StepFault.FORGOTTEN
    return StepFault.SHARED if reproducible and shards.forked else None


def check_step(
    shards: LocalShards, subject: str, of_row: str, q: Tensor, *, in_graph: bool, reproducible: bool
) -> None:
    """Raise unless a step of the queries `q` can be served, at once or after shared blocks are copied."""
    queries = q.shape[2]
    fault = step_fault(shards, None if in_graph else queries, reproducible=reproducible)
    if fault is None or fault is StepFault.SHARED:
        return
    own, config = shards.own, shards.own.config
    match fault:
        case StepFault.LENGTH:
            length = shards.length  # in a capture of a graph no other fault may read it
            given = f"{queries} queries and {length} of {config.capacity} tokens in the cache"
            fits = queries % config.kv_heads == 0 and q.shape[1] <= length <= config.capacity
            fix = transpose_hint_first(f"append before {subject}", fits)
            raise ShapeError(f"{subject} q{of_row}", "as many queries as tokens in the cache, or fewer", given, fix)
        case StepFault.FORGOTTEN:
            length = shards.length
            seen = f"queries of token {shards.oldest_query} and later ones"
            expected = f"{seen}: the cache has forgotten what earlier tokens see"
            given = f"queries of the tokens from {length - queries} to {length - 1}"
            fix = "decode after each append, or pass queries= to append_shard"
            fix = fix if length > shards.oldest_query else "append the next token first"
            raise ShapeError(f"{subject} q{of_row}", expected, given, fix)
        case StepFault.LAYOUT:
            given = "a padded batch" if own.padding is not None else "tokens in the layout of a sharded prefill"
            fix = "fill it with append, or prefill in cache.layout"
            raise LayoutError(f"{subject} reproducible{of_row}", "a cache with block-cyclic tokens", given, fix)
        case StepFault.SHARES:
            check_even_shares(f"{subject} reproducible", own.block_cyclic.shares, even=False)
        case StepFault.TIERS:
            given, fix = f"hot={config.hot} on {own.device.type}", 'leave one of them out, or pass device="cpu"'
            raise KernelError(f"{subject} reproducible", "keys that one kernel reads", given, fix)
        case _:
            assert_never(fault)
