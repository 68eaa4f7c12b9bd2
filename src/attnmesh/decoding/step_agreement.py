"""Messages of a step of decoding beside its merge: comparisons, poison, and the output along a heads axis."""

from collections.abc import Mapping, Sequence
from functools import partial as partial_of

import torch
from torch import Tensor

from attnmesh.cache.cache import KVCache
from attnmesh.comm.merges import detects_mismatch
from attnmesh.comm.mismatch import question_like
from attnmesh.comm.p2p import all_to_all_tokens
from attnmesh.comm.rank_merge import RequestedMerge, highest_checksum
from attnmesh.core.digest import fingerprints
from attnmesh.core.partial import identity, sum_dtype
from attnmesh.core.scaling import bias_columns
from attnmesh.decoding.step_arguments import StepInputs, StepOptions, StepSpec
from attnmesh.decoding.step_checks import reads_length_on_device
from attnmesh.errors import InputError
from attnmesh.guard.merge_agreement import MergeAgreement


def merge_agreement_for(caches: Sequence[KVCache], options: StepOptions, checked: bool | None) -> MergeAgreement:
    """Return the agreement on a step. `options` may be unchecked."""
    first = caches[0]
    name = "decode" if len(caches) == 1 else "decode_rows"
    poison = partial_of(_send_poison, first, options)
    return MergeAgreement(first.guard, first.device, options.merge, checked, name, poison)


def fields_of_step(inputs: StepInputs, spec: StepSpec) -> Mapping[str, object]:
    """Return the arguments of the call that ranks compare."""
    q, caches, key_lengths = inputs.q, inputs.caches, inputs.key_lengths
    options = spec.fields_to_compare
    options["key_lengths"] = None if key_lengths is None else key_lengths.tolist()
    options |= {} if inputs.other_partial is None else {"partial": True}
    width = caches[0].config.head_dim
    bias = q[..., width:] if bias_columns(q, width) else None
    tensors = {"q": q[..., :width], "distance_bias": bias, "sinks": inputs.sinks, "selected": inputs.indices}
    lengths, histories = [cache.length for cache in caches], [cache.history.digest for cache in caches]
    held = "tokens in the cache" if len(caches) == 1 else "tokens in the caches"
    by_cache = {held: lengths, "padding and order": histories}
    contents = {field: values[0] if len(values) == 1 else values for field, values in by_cache.items()}
    return {**options, **fingerprints(tensors), **contents}


def runs_asynchronously(cache: KVCache, spec: StepSpec) -> bool:
    """Return whether the CPU waits for nothing of the device during the step. A wrong kernel counts as "auto"."""
    if spec.index_block is not None:
        return cache.device.type != "cpu" and detects_mismatch(spec.options.merge)
    try:
        reads_on_device = reads_length_on_device(cache.own_shard.view, spec.options.kernel, cache.config.dtype)
    except InputError:
        reads_on_device = reads_length_on_device(cache.own_shard.view, "auto", cache.config.dtype)
    return reads_on_device and detects_mismatch(spec.options.merge)


def ask_in_step(spec: StepSpec, like: Tensor, shape: Sequence[int]) -> Tensor:
    """Take part in the merge of a step with an empty partial and a question. Return the merged checksum.

    `like` has the dtype and device of the step's queries, and `shape` is their shape, so that messages have the sizes
    that the other ranks expect.
    """
    own_heads = spec.heads_axis.slice_of(shape[1])
    q = like.new_empty(1).expand(shape)[:, own_heads]
    nothing = identity(q, spec.value_dim, sum_dtype(q.dtype))
    partial, checksum = spec.rank_merge.run(nothing, question_like(nothing.lse))
    return gather_heads(partial.out.to(q.dtype).contiguous(), checksum, spec, shape[1])[1]


def gather_heads(out: Tensor, checksum: Tensor, spec: StepSpec, heads: int) -> tuple[Tensor, Tensor]:
    """Return the output with all heads, or NaN if the calls of ranks differ; and the checksum of all ranks."""
    axis = spec.heads_axis
    if axis.size == 1:
        return out, checksum
    checksum = highest_checksum(checksum, axis)
    if spec.options.output != "heads":
        if out.is_cpu and float(checksum.sum()) != 0:  # shares may have other sizes, too
            return out.new_full((out.shape[0], heads, *out.shape[2:]), torch.nan), checksum
        out = torch.cat(all_to_all_tokens([out] * axis.size, [out.shape[2]] * axis.size, axis), 1)
    return torch.where(checksum.sum() == 0, out, torch.nan), checksum


def _send_poison(cache: KVCache, options: StepOptions) -> None:
    """Run the exchanges of a step whose arguments are wrong on this rank, so that the others detect it."""
    ranks = cache.token_axis.size
    reproducible = options.reproducible is True  # values of other types are invalid on the other ranks too
    reproducible = reproducible and not ranks & (ranks - 1)
    like = torch.empty(0, dtype=sum_dtype(cache.config.dtype), device=cache.device)
    merge = RequestedMerge(cache.token_axis, options.merge, options.output, reproducible=reproducible)
    checksum = merge.send_poison(like)
    if cache.rank_mesh.heads.size > 1:
        highest_checksum(checksum, cache.rank_mesh.heads)
