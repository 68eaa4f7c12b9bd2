"""Known steps: calls find their prepared step by their signature. A new one is checked, prepared and kept.

A known step runs `find_step` and `PreparedStep.run`. They and what they run are the hot path. A call of a function
takes about 0.05 us, and a step on a short cache about 15 us (by `timeit`). So some short functions are inlined there;
`tests/tools/test_walk.py` bounds the number of calls.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from attnmesh.cache.call_checks import step_fault
from attnmesh.checks.argument_checks import check_compare_option, warn_if_transposed
from attnmesh.decoding.prepared_step import PreparedStep, new_prepared_step
from attnmesh.decoding.step_agreement import merge_agreement_for, runs_asynchronously
from attnmesh.decoding.step_arguments import StepInputs, StepOptions, StepSpec
from attnmesh.guard.agreement import is_capturing
from attnmesh.kernels.traced import are_plain
from attnmesh.runtime.memo import Memo

Signature = tuple[Any, ...]
"""All of a call that the checks of a step depend on, except its caches."""


def find_step(
    inputs: StepInputs, options: tuple[Any, ...], checked: object, prepared: Memo[PreparedStep]
) -> tuple[Signature | None, PreparedStep | None]:
    """Return the signature of a call, and its step if prepared. All checks depend on the signature and the caches.

    `inputs` have one cache or more, on one mesh and one device, of equal `common_config`. `options` are the fields of a
    `StepOptions`. That much is checked. The tensors, the values of the options and `checked` are as a caller passed
    them: a wrong one gives a signature that no prepared step has. `prepared` is the memo of the prepared steps of these
    caches. The signature is None for calls that are checked each time.
    """
    q, caches, sinks = inputs.q, inputs.caches, inputs.sinks
    first = caches[0]
    if inputs.key_lengths is not None or inputs.selected is not None or inputs.other_partial is not None:
        return None, None
    on_gpu = first.local_shards.own.on_gpu
    count = len(caches)
    if not (are_plain(q, on_gpu=on_gpu) if sinks is None else are_plain(q, sinks, on_gpu=on_gpu)):
        return None, None
    sinks_kind = None if sinks is None else (sinks.shape, sinks.dtype, sinks.get_device())
    # Options of equal values may differ in type.
    signature = (
        q.shape,
        count,
        q.dtype,
        q.get_device(),
        sinks_kind,
        checked,
        type(checked),
        *options,
        *map(type, options),
    )
    try:
        prepared_step = prepared.get(signature)
    except TypeError:  # an option has no hash
        return None, None
    if prepared_step is None:
        return signature, None
    if on_gpu and prepared_step.refuses_graphs and is_capturing(first.device):
        return signature, None
    spec = prepared_step.spec
    reproducible = spec.options.reproducible
    config = prepared_step.config
    queries = q.shape[2]
    for cache in caches:
        shards = cache.local_shards
        own_config = shards.own.config
        if own_config is not config:
            if cache is first and (count == 1 or config is None or own_config.common_config != config.common_config):
                return signature, None  # the step is of caches of another configuration
            if own_config.capacity > spec.capacity or (reproducible and own_config.block != spec.block):
                return signature, None  # its kernel is bound to fewer slots, or to other blocks
        if step_fault(shards, queries, reproducible=reproducible) is not None:
            return signature, None
    return signature, prepared_step


def _prepare_step(
    inputs: StepInputs,
    spec: StepSpec,
    checked: bool | None,
    signature: Signature | None,
    prepared: Memo[PreparedStep],
) -> PreparedStep:
    """Return the prepared step of a spec, which `prepared` keeps if its signature is known."""
    q, caches = inputs.q, inputs.caches
    first = caches[0]
    is_asynchronous = runs_asynchronously(first, spec)
    if spec.options.reproducible:
        for cache in caches:
            if cache.local_shards.forked and is_asynchronous:
                cache.local_shards.join_pieces()  # the kernel merges the blocks of one tensor
    hashed_values = inputs.values_to_hash(spec)
    prepared_step = new_prepared_step(
        q, first.own_shard.view, spec, hashed_values, first.config, checked=checked, is_asynchronous=is_asynchronous
    )
    if signature is not None and not spec.options.mask.depends_on_length:
        prepared.keep(signature, prepared_step)
    return prepared_step


def run_new_step(
    check: Callable[[], tuple[StepInputs, StepSpec]],
    inputs: StepInputs,
    options: StepOptions,
    checked: bool | None,
    signature: Signature | None,
    prepared: Memo[PreparedStep],
    subject: str,
) -> Tensor:
    """Return the output of a step that `find_step` has not found. `check` raises, or returns what it computes."""
    try:
        check_compare_option(subject, checked)
        inputs, spec = check()
        with torch.no_grad():
            prepared_step = _prepare_step(inputs, spec, checked, signature, prepared)
    except Exception as error:  # the other ranks may wait in their merge, which this poisons
        merge_agreement_for(inputs.caches, options, checked).raise_through_merge(error)
    with torch.no_grad():
        out = prepared_step.run(inputs)
    warn_if_transposed(subject, inputs.q, inputs.caches[0].config.kv_heads)
    return out
