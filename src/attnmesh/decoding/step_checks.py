"""Checks of the inputs of a step of decoding. Each raises an error of `attnmesh.errors`."""

from collections.abc import Mapping
from typing import Never

import torch
from torch import Tensor

from attnmesh.cache.cache import KVCache
from attnmesh.cache.cache_config import check_no_gradients
from attnmesh.core.mask import Mask, check_mask
from attnmesh.core.partial import sum_dtype
from attnmesh.core.scaling import Scaling
from attnmesh.core.selection import Selection
from attnmesh.decoding.step_arguments import DecodeStep, StepInputs, StepOptions
from attnmesh.errors import (
    ArgumentError,
    DeviceError,
    DtypeError,
    KernelError,
    LayoutError,
    MaskError,
    ShapeError,
    require,
)
from attnmesh.guard.agreement import is_capturing, may_compare
from attnmesh.guard.argument_checks import (
    check_distance_bias,
    check_key_lengths,
    check_lengths_within,
    check_merge,
    check_one_device,
    check_same_kind,
    check_selection,
    check_sinks,
    check_unknown_options,
    swap_first,
)
from attnmesh.kernels.cache_view import CacheView
from attnmesh.kernels.choice import choose
from attnmesh.kernels.kernel import KernelRequest
from attnmesh.kernels.triton_runtime import interpreted
from attnmesh.mesh.merges import MERGES, Pattern


def checked_step(
    inputs: StepInputs,
    options: StepOptions,
    unsupported: Mapping[str, Never],
    subject: str = "decode",
    row: int | None = None,
) -> DecodeStep:
    """Return the step on one cache, or raise unless each argument can be served.

    Errors name the function `subject`, and the row of its queries that these are.
    """
    of_row = "" if row is None else f" of row {row}"
    q, (cache,), sinks, key_lengths, selected, _ = inputs
    sizes = cache.sizes
    check_no_gradients(subject, {"q": q, "sinks": sinks})
    check_unknown_options(subject, unsupported)
    fix = 'append values too, to a cache without values="none"'
    require(sizes.values != "none", ArgumentError, f"{subject} cache", "a cache with values", "one of keys alone", fix)
    check_same_kind(subject, {"q": q})
    shape = (sizes.batch, "heads", "length", sizes.head_dim)
    if q.ndim != 4 or (q.shape[0], q.shape[3]) != (sizes.batch, sizes.head_dim) or not q.shape[2]:
        fix = "pass the queries of the cache's last tokens"
        raise ShapeError(f"{subject} q{of_row}", f"shape {shape}", f"{tuple(q.shape)}", fix)
    if q.shape[1] % sizes.kv_heads or not q.shape[1]:
        given = f"{q.shape[1]} query heads on {sizes.kv_heads} key heads"
        fix = swap_first("pass the model's heads", q.shape[1] > 0 and q.shape[2] % sizes.kv_heads == 0)
        raise ShapeError(f"{subject} q{of_row}", "query heads a multiple of key heads", given, fix)
    sizes.check_dtype(f"{subject} q{of_row}", q, cache.device)
    check_mask(f"{subject} mask", options.mask)
    if sizes.mask is not None and not options.mask.is_within(sizes.mask):
        expected = f"{sizes.mask}, by which the cache forgets tokens, or a narrower mask"
        raise MaskError(f"{subject} mask", expected, f"{options.mask}", "pass mask=cache.sizes.mask")
    check_merge(subject, options.merge, options.output)
    step = options.step_on(cache, Scaling.of(subject, options.scale, options.softcap, q.shape[-1]))
    if step.kernel != "auto" and not torch.compiler.is_compiling():  # raises here, where all ranks can raise alike
        choose(KernelRequest.of_cache(q, cache.shard.view, step.scaling), step.kernel)
    check_sinks(f"{subject} sinks", sinks, q)
    on_device = isinstance(key_lengths, Tensor) and key_lengths.device.type == "cuda"
    check_key_lengths(f"{subject} key_lengths", key_lengths, sizes.batch, on_device=on_device)
    if cache.padding is not None and step.mask.ends:
        fix = "keep documents in sequences of their own"
        raise MaskError(f"{subject} mask{of_row}", "no documents in a padded batch", f"{step.mask}", fix)
    if selected is not None:
        step = _with_selection(q, cache, selected, step)
    check_reproducible(f"{subject} reproducible", step.reproducible, step.token_axis.size, step.merge)
    if step.reproducible:
        _check_reproducible_cache(cache, key_lengths, f"{subject} reproducible", of_row)
    if not may_compare(q.device):  # a graph does not read the length
        if q.shape[2] > 1 or sizes.hot is not None:
            sizes.check_eager(subject, q.device)
        if is_capturing(q.device):
            _check_captured(cache, step, on_cpu=key_lengths is not None and not on_device)
        return step
    _check_lengths(q, cache, step.mask, subject, of_row)
    if not on_device:
        check_lengths_within(f"{subject} key_lengths", key_lengths, cache.length)
    return step


def _check_reproducible_cache(cache: KVCache, key_lengths: Tensor | None, subject: str, of_row: str) -> None:
    """Raise unless the keys of a step with `reproducible=True` are blocks of one tree, which one kernel reads."""
    if cache.padding is not None or not cache.is_block_cyclic:
        given = "a padded batch" if cache.padding is not None else "tokens in the layout of a sharded prefill"
        fix = "fill it with append, or prefill in cache.layout"
        raise LayoutError(f"{subject}{of_row}", "a cache with block-cyclic tokens", given, fix)
    check_even_shares(subject, cache.shares, even=cache.shard.block_cyclic.is_even)
    given, fix = f"hot={cache.sizes.hot} on {cache.device.type}", 'leave one of them out, or pass device="cpu"'
    in_one_memory = cache.sizes.hot is None or cache.device.type == "cpu"
    require(in_one_memory, KernelError, subject, "keys that one kernel reads", given, fix)
    if key_lengths is not None:
        expected, fix = "no key_lengths= beside reproducible=True", "leave one of them out"
        raise KernelError(subject, expected, f"key_lengths of {len(key_lengths)} sequences", fix)


def _with_selection(q: Tensor, cache: KVCache, selected: Selection, step: DecodeStep) -> DecodeStep:
    """Return the step over selected tokens, or raise unless they are tokens of the cache."""
    length = cache.length if may_compare(q.device) else None
    check_selection("decode selected", selected, q, cache.sizes.kv_heads, step.kernel, length)
    expected, fix = "no selected= beside reproducible=True", "leave one of them out"
    require(step.reproducible is not True, KernelError, "decode reproducible", expected, "a Selection", fix)
    return step._replace(index_block=selected.block)


def check_other_keys(inputs: StepInputs, step: DecodeStep) -> None:
    """Raise unless the partial of other keys is None or fits the queries of a checked step."""
    q, (cache,), *_, other_keys = inputs
    if other_keys is None:
        return
    subject, fix = "decode partial", "call decode outside of torch.compile"
    require(not torch.compiler.is_compiling(), KernelError, subject, "None in a graph", "a Partial", fix)
    fix = "pass what attend returned for the same queries"
    fits = isinstance(other_keys, tuple) and len(other_keys) == 2 and all(isinstance(x, Tensor) for x in other_keys)
    require(fits, DtypeError, subject, "a partial (out, lse)", type(other_keys).__name__, fix)
    heads = step.head_axis.slice_of(q.shape[1])
    rows = (q.shape[0], heads.stop - heads.start, q.shape[2])
    given, expected = f"{[tuple(x.shape) for x in other_keys]}", f"{[(*rows, cache.sizes.value_dim), rows]}"
    require(given == expected, ShapeError, subject, f"shapes {expected}", given, fix)
    wide = sum_dtype(q.dtype)
    given = f"out in {other_keys[0].dtype}, lse in {other_keys[1].dtype}"
    expected_dtypes = f"out in {q.dtype} or {wide}, lse in {wide}"
    fits = other_keys[0].dtype in (q.dtype, wide) and other_keys[1].dtype == wide
    require(fits, DtypeError, subject, expected_dtypes, given, fix)
    check_one_device(subject, {"q": q, "out": other_keys[0], "lse": other_keys[1]})
    check_no_gradients(subject, {"out": other_keys[0], "lse": other_keys[1]})
    expected, fix = "no partial= beside reproducible=True", "leave one of them out"
    require(not step.reproducible, KernelError, "decode reproducible", expected, "a Partial", fix)


def step_with_bias(inputs: StepInputs, bias: Tensor | None, step: DecodeStep) -> DecodeStep:
    """Return the checked step with the kernel of a bias by distance, or raise unless bias is None or can be served."""
    if bias is None:
        return step
    check_distance_bias("decode", bias, inputs.q, step.scaling, step.kernel, inputs.selected)
    check_no_gradients("decode", {"distance_bias": bias})
    storage = inputs.caches[0].sizes.storage
    for fits, expected, given in (
        (storage is None, "a cache of plain numbers", f"storage={storage!r}"),
        (not step.reproducible, "reproducible=False", "True"),
    ):
        require(fits, KernelError, "decode distance_bias", expected, given, "leave one of them out")
    return step._replace(kernel="reference")


def reads_length_on_device(view: CacheView, kernel: str, dtype: torch.dtype) -> bool:
    """Return whether the kernel reads the number of tokens on the device, so that the CPU does not wait."""
    if view.keys.device.type == "cpu" and not interpreted():  # the common case
        return False
    request = KernelRequest.of_cache(view.attended(dtype)[0], view, Scaling(1.0))
    return choose(request, kernel).reads_cache


def _check_captured(cache: KVCache, step: DecodeStep, *, on_cpu: bool) -> None:
    """Raise unless the CPU reads nothing of the device and copies nothing to it: a CUDA graph could not."""
    fix = "pass key_lengths.cuda(), made before the capture"
    require(not on_cpu, DeviceError, "decode key_lengths", "a tensor on the GPU in a CUDA graph", "one on the CPU", fix)
    expected = "one that reads the cache's length on the GPU, in a CUDA graph"
    fix = 'use kernel="auto" and a cache of bfloat16, float16 or float32, or leave the graph out'
    given = f"kernel={step.kernel!r} on {cache.sizes.dtype}"
    fits = reads_length_on_device(cache.shard.view, step.kernel, cache.sizes.dtype)
    require(fits, KernelError, "decode kernel", expected, given, fix)


def _check_lengths(q: Tensor, cache: KVCache, mask: Mask, subject: str, of_row: str) -> None:
    """Raise unless the cache holds what the queries see."""
    sizes = cache.sizes
    if not cache.shards.holds(q.shape[2]):
        given = f"{q.shape[2]} queries and {cache.length} of {cache.sizes.capacity} tokens in the cache"
        fits = q.shape[2] % cache.sizes.kv_heads == 0 and cache.shards.holds(q.shape[1])
        fix = swap_first(f"append before {subject}", fits)
        raise ShapeError(f"{subject} q{of_row}", "as many queries as tokens in the cache, or fewer", given, fix)
    if sizes.mask is not None and not cache.shards.serves(cache.shards.known_length - q.shape[2]):
        first_query = cache.shards.first_query
        first = cache.length - q.shape[2]
        expected = f"queries of token {first_query} and later ones: the cache has forgotten what earlier tokens see"
        fix = "decode after each append, or pass queries= to append_shard"
        fix = fix if cache.length > first_query else "append the next token first"
        raise ShapeError(
            f"{subject} q{of_row}", expected, f"queries of the tokens from {first} to {cache.length - 1}", fix
        )
    if mask.ends:
        mask.check_length(f"{subject} mask{of_row}", cache.length)


def check_even_shares(subject: str, shares: object, *, even: bool) -> None:
    """Raise unless each rank holds every n-th block, so that its blocks are one subtree of the tree over blocks."""
    fix = "leave shares= out, or reproducible=True"
    require(even, KernelError, subject, "even shares, whose blocks are subtrees of one tree", f"shares={shares}", fix)


def check_reproducible(subject: str, reproducible: object, ranks: int, merge: str) -> None:
    """Raise unless the result can have the same bits on any number of ranks, where that is wanted."""
    if not isinstance(reproducible, bool):
        raise KernelError(subject, "True or False", repr(reproducible), "pass True or False")
    if reproducible and (ranks & (ranks - 1) or (merge != "auto" and MERGES[merge].pattern is not Pattern.ROUNDS)):
        expected = "1, 2, 4, 8, ... ranks along queries and keys, and a tree"
        fix = 'use a power of two of ranks and merge="auto", or leave it out'
        raise KernelError(subject, expected, f"{ranks} ranks and merge {merge!r}", fix)
