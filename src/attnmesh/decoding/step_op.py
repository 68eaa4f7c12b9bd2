"""A decode step as an operator of PyTorch, for graphs."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from attnmesh.core.selection import Selection
from attnmesh.decoding.prepared_step import PreparedStep, new_prepared_step
from attnmesh.decoding.step_agreement import gather_heads
from attnmesh.decoding.step_arguments import StepInputs, StepSpec
from attnmesh.kernels.cache_view import LENGTH, CacheView
from attnmesh.kernels.padding import Padding
from attnmesh.runtime.operators import custom_operator


def _fake_output(q: Tensor, *inputs: Any) -> Tensor:
    *_, names, numbers = inputs
    return q.new_empty(StepSpec.from_code(names, numbers).output_shape(q))


@custom_operator("decode", _fake_output)
def decode_op(
    q: Tensor,
    cache: Sequence[Tensor],
    history: Tensor,
    sinks: Tensor | None,
    key_lengths: Tensor | None,
    indices: Tensor | None,
    names: str,
    numbers: Sequence[int],
) -> Tensor:
    """Run a step inside a graph, which cannot raise: all ranks get NaN if their calls differ."""
    view = view_of(cache, (spec := StepSpec.from_code(names, numbers)).value_dim)
    hashed_values = (StepSpec.hash_of_code(names, numbers),)
    selected = None if indices is None else Selection(indices, spec.index_block or 1)
    lengths = None if key_lengths is None else key_lengths.to(q.device)  # no check has read them in a graph
    inputs = StepInputs(q, (), sinks=sinks, key_lengths=lengths, selected=selected, history=history)
    out = run_in_graph(new_prepared_step(q, view, spec, hashed_values), inputs, view)
    length = view.device_counts[LENGTH]
    return torch.where(length <= spec.capacity, out, torch.nan)


def run_in_graph(step: PreparedStep, inputs: StepInputs, view: CacheView) -> Tensor:
    """Return the output of a step. It is NaN if the calls of ranks differ."""
    spec, views = step.spec, [view]
    own_inputs = inputs.of_own_heads(spec)
    partial, blank = step.attend(own_inputs, views)
    merged, checksum = step.merge(partial, blank, inputs, views)
    out = step.finish(merged, own_inputs, views)
    return out if checksum is None else gather_heads(out, checksum, spec, inputs.q.shape[1])[0]


def tensors_of(view: CacheView) -> list[Tensor]:
    """Return a view of a cache as the list of tensors that the operator takes."""
    return [view.keys, view.values, view.token_index, view.device_counts, *(view.padding or ())]


def view_of(tensors: Sequence[Tensor], value_dim: int) -> CacheView:
    """Return the view that `tensors_of` took apart."""
    keys, values, token_index, device_counts, *padding = tensors
    return CacheView(keys, values, token_index, device_counts, Padding(*padding) if padding else None, value_dim)
