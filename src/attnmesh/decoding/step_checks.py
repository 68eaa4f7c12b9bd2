"""Checks of the inputs of a step of decoding. Each raises an error of `attnmesh.errors`."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Never

import torch
from torch import Tensor

from attnmesh.cache.cache import KVCache
from attnmesh.cache.call_checks import (
    check_dtype_and_device,
    check_eager,
    check_eager_tensors,
    check_step,
    needs_cpu,
)
from attnmesh.checks.argument_checks import (
    check_distance_bias,
    check_key_lengths,
    check_lengths_within,
    check_one_device,
    check_same_kind,
    check_selection,
    check_sinks,
    check_tensor,
    check_unknown_options,
    transpose_hint_first,
)
from attnmesh.comm.merges import MERGES, check_merge
from attnmesh.core.mask import check_mask
from attnmesh.core.partial import sum_dtype
from attnmesh.core.scaling import Scaling, with_distance_bias
from attnmesh.core.selection import Selection
from attnmesh.decoding.step_arguments import StepInputs, StepOptions, StepSpec
from attnmesh.errors import (
    ArgumentError,
    DeviceError,
    DtypeError,
    KernelError,
    MaskError,
    ShapeError,
)
from attnmesh.guard.agreement import is_capturing, may_compare
from attnmesh.kernels.cache_view import CacheView
from attnmesh.kernels.choice import choose
from attnmesh.kernels.kernel import KernelRequest
from attnmesh.kernels.triton_runtime import interpreted


def inputs_and_spec(
    inputs: StepInputs, options: StepOptions, distance_bias: Tensor | None, unsupported: Mapping[str, Never]
) -> tuple[StepInputs, StepSpec]:
    """Return the inputs of `decode`, with the bias in the queries, and its spec; or raise unless all can be served."""
    spec = spec_of_step(inputs, options, unsupported)
    _check_other_partial(inputs, spec)
    spec = spec_with_bias(inputs, distance_bias, spec)
    return replace(inputs, q=with_distance_bias(inputs.q, distance_bias)), spec


def spec_of_step(
    inputs: StepInputs,
    options: StepOptions,
    unsupported: Mapping[str, Never],
    subject: str = "decode",
    row: int | None = None,
) -> StepSpec:
    """Return the spec of a step on one cache, or raise unless each argument can be served.

    Errors name the function `subject`, and the row of its queries that these are.
    """
    row_text = "" if row is None else f" of row {row}"
    q, sinks, key_lengths, selected = inputs.q, inputs.sinks, inputs.key_lengths, inputs.selected
    (cache,) = inputs.caches
    config = cache.config
    check_unknown_options(subject, unsupported)
    if config.values == "none":
        fix = 'append values too, to a cache without values="none"'
        raise ArgumentError(f"{subject} cache", "a cache with values", "one of keys alone", fix)
    check_same_kind(subject, {"q": q})
    check_eager_tensors(subject, {"q": q, "sinks": sinks})
    if q.ndim != 4 or (q.shape[0], q.shape[3]) != (config.batch, config.head_dim) or not q.shape[2]:
        shape = (config.batch, "heads", "length, 1 or more" if 0 in q.shape[2:3] else "length", config.head_dim)
        fix = "pass the queries of the cache's last tokens"
        raise ShapeError(f"{subject} q{row_text}", f"shape {shape}", f"{tuple(q.shape)}", fix)
    if q.shape[1] % config.kv_heads or not q.shape[1]:
        given = f"{q.shape[1]} query heads on {config.kv_heads} key heads"
        fix = transpose_hint_first("pass the model's heads", q.shape[1] > 0 and q.shape[2] % config.kv_heads == 0)
        raise ShapeError(f"{subject} q{row_text}", "query heads a multiple of key heads", given, fix)
    check_dtype_and_device(f"{subject} q{row_text}", config, q, cache.own_shard.device)
    check_mask(f"{subject} mask", options.mask)
    if config.mask is not None and not options.mask.sees_no_further_back_than(config.mask):
        expected = f"{config.mask}, by which the cache forgets tokens, or a narrower mask"
        raise MaskError(f"{subject} mask", expected, f"{options.mask}", "pass mask=cache.config.mask")
    check_merge(subject, options.merge, options.output)
    scaling = Scaling.of(subject, options.scale, options.softcap, q.shape[-1])
    spec = options.spec_on(cache, scaling)
    if options.kernel != "auto" and not torch.compiler.is_compiling():  # raises here, where all ranks can raise alike
        choose(KernelRequest.of_cache(q, cache.own_shard.view, scaling), options.kernel)
    check_sinks(f"{subject} sinks", sinks, q)
    lengths_on_gpu = isinstance(key_lengths, Tensor) and key_lengths.is_cuda
    check_key_lengths(f"{subject} key_lengths", key_lengths, config.batch, may_read=not lengths_on_gpu)
    if cache.padding is not None and options.mask.documents:
        fix = "keep documents in sequences of their own"
        raise MaskError(f"{subject} mask{row_text}", "no documents in a padded batch", f"{options.mask}", fix)
    if selected is not None:
        spec = _with_selection(q, cache, selected, spec)
    check_reproducible(f"{subject} reproducible", options.reproducible, spec.token_axis.size, options.merge)
    if options.reproducible and key_lengths is not None:
        expected, fix = "no key_lengths= beside reproducible=True", "leave one of them out"
        raise KernelError(f"{subject} reproducible", expected, f"key_lengths of {len(key_lengths)} sequences", fix)
    in_graph = not may_compare(q.device)
    check_step(cache.local_shards, subject, row_text, q, in_graph=in_graph, reproducible=options.reproducible)
    if in_graph:
        if needs_cpu(config, q.shape[2]):
            check_eager(subject, config, q.device)
        if is_capturing(q.device):
            _check_captured(cache, spec, lengths_on_cpu=key_lengths is not None and not lengths_on_gpu)
        return spec
    if options.mask.documents:
        options.mask.check_length(f"{subject} mask{row_text}", cache.length)
    if not lengths_on_gpu:
        check_lengths_within(f"{subject} key_lengths", key_lengths, cache.length)
    return spec


def _with_selection(q: Tensor, cache: KVCache, selected: Selection, spec: StepSpec) -> StepSpec:
    """Return the spec over selected tokens, or raise unless they are tokens of the cache."""
    length = cache.length if may_compare(q.device) else None
    check_selection("decode selected", selected, q, cache.config.kv_heads, spec.options.kernel, length)
    if spec.options.reproducible is True:
        expected = "no selected= beside reproducible=True"
        raise KernelError("decode reproducible", expected, "a Selection", "leave one of them out")
    return spec._replace(index_block=selected.block)


def _check_other_partial(inputs: StepInputs, spec: StepSpec) -> None:
    """Raise unless the partial of other keys is None or fits the queries of the step."""
    q, other_partial = inputs.q, inputs.other_partial
    (cache,) = inputs.caches
    if other_partial is None:
        return
    subject = "decode partial"
    if torch.compiler.is_compiling():
        raise KernelError(subject, "None in a graph", "a Partial", "call decode outside of torch.compile")
    fix = "pass what attend returned for the same queries"
    is_pair = isinstance(other_partial, tuple) and len(other_partial) == 2
    if not is_pair or not all(isinstance(x, Tensor) for x in other_partial):
        raise DtypeError(subject, "a partial (out, lse)", type(other_partial).__name__, fix)
    out, lse = other_partial
    own_heads = spec.heads_axis.slice_of(q.shape[1])
    rows = (q.shape[0], own_heads.stop - own_heads.start, q.shape[2])
    expected_shapes, shapes = [(*rows, cache.config.value_dim), rows], [tuple(out.shape), tuple(lse.shape)]
    if shapes != expected_shapes:
        raise ShapeError(subject, f"shapes {expected_shapes}", f"{shapes}", fix)
    wide = sum_dtype(q.dtype)
    if out.dtype not in (q.dtype, wide) or lse.dtype != wide:
        expected = f"out in {q.dtype} or {wide}, lse in {wide}"
        raise DtypeError(subject, expected, f"out in {out.dtype}, lse in {lse.dtype}", fix)
    for name, x in (("out", out), ("lse", lse)):
        check_tensor(f"{subject} {name}", x)
    check_one_device(subject, {"q": q, "out": out, "lse": lse})
    check_eager_tensors(subject, {"out": out, "lse": lse})
    if spec.options.reproducible:
        expected = "no partial= beside reproducible=True"
        raise KernelError("decode reproducible", expected, "a Partial", "leave one of them out")


def spec_with_bias(inputs: StepInputs, bias: Tensor | None, spec: StepSpec) -> StepSpec:
    """Return the spec with the kernel of a bias by distance, or raise unless bias is None or can be served."""
    if bias is None:
        return spec
    check_distance_bias("decode", bias, inputs.q, spec.scaling, spec.options.kernel, inputs.selected)
    check_eager_tensors("decode", {"distance_bias": bias})
    subject, fix = "decode distance_bias", "leave one of them out"
    storage = inputs.caches[0].config.storage
    if storage is not None:
        raise KernelError(subject, "a cache of plain numbers", f"storage={storage!r}", fix)
    if spec.options.reproducible:
        raise KernelError(subject, "reproducible=False", "True", fix)
    return spec._replace(options=spec.options._replace(kernel="reference"))


def reads_length_on_device(view: CacheView, kernel: str, dtype: torch.dtype) -> bool:
    """Return whether the kernel reads the number of tokens on the device, so that the CPU does not wait."""
    if view.keys.is_cpu and not interpreted():  # the common case
        return False
    request = KernelRequest.of_cache(view.attended(dtype)[0], view, Scaling(1.0))
    return choose(request, kernel).reads_cache


def _check_captured(cache: KVCache, spec: StepSpec, *, lengths_on_cpu: bool) -> None:
    """Raise unless the CPU reads nothing of the device and copies nothing to it: a CUDA graph could not."""
    if lengths_on_cpu:
        expected, fix = "a tensor on the GPU in a CUDA graph", "pass key_lengths.cuda(), made before the capture"
        raise DeviceError("decode key_lengths", expected, "one on the CPU", fix)
    if not reads_length_on_device(cache.own_shard.view, spec.options.kernel, cache.config.dtype):
        expected = "one that reads the cache's length on the GPU, in a CUDA graph"
        given = f"kernel={spec.options.kernel!r} on {cache.config.dtype}"
        fix = 'use kernel="auto" and a cache of bfloat16, float16 or float32, or leave the graph out'
        raise KernelError("decode kernel", expected, given, fix)


def check_reproducible(subject: str, reproducible: object, ranks: int, merge: str) -> None:
    """Raise if the result should have the same bits on any number of ranks, and cannot."""
    if not isinstance(reproducible, bool):
        raise KernelError(subject, "True or False", repr(reproducible), "pass True or False")
    if reproducible and (ranks & (ranks - 1) or (merge != "auto" and not MERGES[merge].is_canonical)):
        expected = "1, 2, 4, 8, ... ranks along queries and keys, and a tree"
        fix = 'use a power of two of ranks and merge="auto", or leave it out'
        raise KernelError(subject, expected, f"{ranks} ranks and merge {merge!r}", fix)
