"""A decode step as an operator of PyTorch, for graphs."""

from collections.abc import Sequence
from typing import Any
from zlib import crc32

import torch
from torch import Tensor

from attnmesh.core.logits import Logits
from attnmesh.core.mask import Mask
from attnmesh.core.selection import Selection
from attnmesh.decoding.runs import DeviceKernel, Held
from attnmesh.decoding.step import DecodeStep, Operands, StepPlan, run_step
from attnmesh.kernels.cache_view import CacheView, Padding
from attnmesh.mesh.axes import Axis, group_named
from attnmesh.runtime.operators import operator
from attnmesh.runtime.world import cached_per_world, decode_cached


def encode(step: DecodeStep) -> tuple[str, list[int]]:
    """Return the step as names and numbers, which the schema of an operator can carry."""
    names = [step.heads.group_name, step.tokens.group_name, step.merge, step.output, step.kernel]
    axes = [step.heads.size, step.heads.index, step.tokens.size, step.tokens.index]
    sizes = [step.block, step.capacity, step.value_dim]
    numbers = [*axes, *sizes, int(step.reproducible), step.index_block or 0, *step.mask.encode()]
    return ",".join([*names, *map(repr, step.logits)]), numbers


def decoded(names: str, numbers: Sequence[int]) -> DecodeStep:
    """Return the step that `encode` wrote."""
    return decode_cached(_decode_step, names, numbers)


@cached_per_world(1024)
def _decode_step(names: str, numbers: tuple[int, ...]) -> DecodeStep:
    heads, tokens, merge, output, kernel, scale, softcap = names.split(",")
    axes = Axis(numbers[0], numbers[1], group_named(heads)), Axis(numbers[2], numbers[3], group_named(tokens))
    block, capacity, value_dim, reproducible, index_block, *mask = numbers[4:]
    logits = Logits(float(scale), float(softcap))
    sizes, wanted = (block, capacity, value_dim), Mask.decode(mask)
    return DecodeStep(*axes, *sizes, wanted, logits, merge, output, bool(reproducible), kernel, index_block or None)


def _fake_output(q: Tensor, *rest: Any) -> Tensor:
    *_, names, numbers = rest
    return q.new_empty(decoded(names, numbers).output_shape(q))


@operator("decode", _fake_output)
def decode_op(
    q: Tensor,
    cache: Sequence[Tensor],
    sinks: Tensor | None,
    key_lengths: Tensor | None,
    indices: Tensor | None,
    names: str,
    numbers: Sequence[int],
) -> Tensor:
    """Run a step inside a graph, which cannot raise: all ranks get NaN if their calls differ."""
    view = view_of(cache, (step := decoded(names, numbers)).value_dim)
    plan, selection = StepPlan.of(step, q, view), None if indices is None else Selection(indices, step.index_block or 1)
    held = view if isinstance(plan.kernel, DeviceKernel) else Held.of_view(view, on_host=selection is None)
    call_number = crc32(f"{numbers[4:]} {names.split(',')[2:]}".encode())
    out, _ = run_step(plan, Operands(q, [held], sinks, key_lengths, selection), call_number)
    return torch.where(view.state[0] <= step.capacity, out, torch.nan)


def tensors_of(view: CacheView) -> list[Tensor]:
    """Return a view of a cache as the list of tensors that the operator takes."""
    return [*view[:4], *(view.padding or ())]


def view_of(tensors: Sequence[Tensor], value_dim: int) -> CacheView:
    """Return the view that `tensors_of` took apart."""
    keys, values, token_index, state, *padding = tensors
    return CacheView(keys, values, token_index, state, Padding(*padding) if padding else None, value_dim)
