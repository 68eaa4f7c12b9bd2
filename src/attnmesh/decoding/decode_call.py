"""Decoding: keys stay on their ranks, and every rank gets the query. A step is a local attention and one merge.

With `reproducible=True` the result has the same bits on 1, 2, 4, 8, ... ranks. Each block of keys makes one partial.
Partials are merged along one tree over block numbers: even against odd at the top, then residues modulo 4, and so on.
The blocks of a rank are one subtree.
"""

import functools
from collections.abc import Sequence
from typing import Any, Never, cast

import torch
from torch import Tensor

from attnmesh.cache.cache import KVCache
from attnmesh.core.logits import with_distance_bias
from attnmesh.core.mask import Causal, Mask
from attnmesh.core.partial import Partial
from attnmesh.core.selection import Selection, Visible
from attnmesh.decoding.decode_step import DecodeStep, unchecked_step
from attnmesh.decoding.step import ask_in_step, decode_op, run_step, tensors_of
from attnmesh.decoding.step_agreement import agreement_on, compared_fields, stays_on_device
from attnmesh.decoding.step_checks import StepInputs, check_bias, check_further, check_step
from attnmesh.decoding.step_plan import DevicePlan, find_plan, learn_plan
from attnmesh.errors import DtypeError, InputError, KernelError, require
from attnmesh.guard.agreement import number_of
from attnmesh.guard.checks import check_checked, warn_if_swapped
from attnmesh.kernels.native.native_digest import digest_on_host
from attnmesh.runtime.ranges import ATTENTION, MERGE, is_profiled, named


def decode(
    q: Tensor,
    cache: KVCache,
    *,
    k: Tensor | None = None,
    v: Tensor | None = None,
    mask: Mask = Causal(),
    scale: float | None = None,
    softcap: float | None = None,
    key_lengths: Tensor | None = None,
    sinks: Tensor | None = None,
    merge: str = "auto",
    output: str = "replicated",
    reproducible: bool = False,
    kernel: str = "auto",
    checked: bool | None = None,
    selected: Selection | None = None,
    partial: Partial | None = None,
    distance_bias: Tensor | None = None,
    **unsupported: Never,
) -> Tensor:
    """Return attention of the cache's last tokens over all tokens of the cache, the same bits on every rank.

    Args:
        q: Queries of the last tokens, (batch, heads, length, dim), equal on every rank.
        cache: The sharded cache, which holds the keys and values of these tokens too, unless they are in `k` and `v`.
        k: Keys of new tokens, appended first, as `cache.append(k, v)` does. They stay in the cache if the step raises.
        v: Values of new tokens.
        mask: Which keys a query sees.
        scale: Factor of the logits; 1/sqrt(dim) unless it is given.
        softcap: Bound of the logits: each becomes `softcap * tanh(logit / softcap)`. None for no bound.
        key_lengths: Real keys of each sequence, int64, (batch,), equal on all ranks: cached tokens at this position or
            later are invisible. In a padded cache positions count real tokens. Numbers on a GPU are not read: one that
            is negative or above the cache's length gives NaN for its sequence.
        sinks: One learned logit per query head. It takes a share of the softmax and adds nothing.
        merge: "tree", "direct", "gather", "allreduce" or "auto".
        output: "replicated": all heads on every rank; "heads": this rank's share of the heads.
        reproducible: True gives the same bits on any power of two of ranks. It needs a cache that was filled by
            `append`, and blocks of 128 tokens or more to be fast.
        kernel: Kernel of one device: "auto", or the name of one of `attnmesh.kernels.choice.KERNELS`.
        checked: When ranks compare their calls; the cache's own unless it is given: see `KVCache`. Ranks whose calls
            differ and are not compared get NaN, or wait for the deadline in "gather" and "allreduce".
        selected: The tokens that each query attends, of those that it sees, equal on all ranks. An
            index counts tokens of the cache, padding included. Each rank reads those that it holds. On a GPU, where
            the host reads no index, rows with an invalid one give NaN. None for all tokens.
        partial: Attention of the same queries over further keys that this rank holds, such as entries that each stand
            for many tokens, as `attend` returns it. One softmax covers these keys, the cache and the sinks. Each rank
            passes one, of its own keys or of none. Ranks do not compare its numbers.
        distance_bias: Numbers to add to the logits of near tokens, (batch, heads, length, distances), equal on every
            rank. Column d is for the token d positions before the query. Tokens farther away have none.
        **unsupported: Options of other attention functions, which raise an error that names a substitute.

    Returns:
        The output, (batch, heads, length, value dim).

    Raises:
        InputError: An argument cannot be served, or the ranks' calls differ.
        RankFailure: A rank is lost.

    >>> import attnmesh as am
    >>> q, k, v = torch.randn(3, 1, 2, 8, 4).unbind()
    >>> cache = am.KVCache(None, batch=1, kv_heads=2, head_dim=4, capacity=8, dtype=torch.float32)
    >>> cache.append(k, v)
    >>> whole = am.attend(q, k, v, mask=am.Causal()).out
    >>> torch.allclose(decode(q[:, :, -2:], cache), whole[:, :, -2:], atol=1e-6)
    True
    """
    if not isinstance(cache, KVCache):
        raise DtypeError("decode cache", "a KVCache", type(cache).__name__, "make one with attnmesh.KVCache")
    checked = cache.calls.checked if checked is None else checked
    options = mask, scale, softcap, merge, output, reproducible, kernel, checked
    if k is not None or v is not None:
        try:
            cache.append(cast(Tensor, k), v)
        except InputError as error:
            agreement_on((cache,), unchecked_step(cache, *options[:-1]), checked).fail(error)
    is_given = key_lengths is not None or selected is not None or partial is not None or distance_bias is not None
    plain = cache.mesh.heads.size == 1 and not is_given and not unsupported
    caches = (cache,)
    if plain and (out := run_plan(q, caches, sinks, options)) is not None:
        return out
    step = unchecked_step(cache, *options[:-1])
    inputs = StepInputs(q, caches, sinks, key_lengths, selected, partial)
    with agreement_on(caches, step, checked):
        check_checked("decode", checked)
        step = check_step(inputs, step, unsupported)
        check_further(inputs, step)
        step = check_bias(inputs, distance_bias, step)
    inputs = inputs._replace(q=with_distance_bias(q, distance_bias))
    if torch.compiler.is_compiling():
        given, fix = "a forked cache", "decode with copy.deepcopy(cache)"
        require(not cache.shards.forked, KernelError, "decode", "a cache of one piece in a graph", given, fix)
        tensors = inputs.q, tensors_of(cache.shard.view), sinks, key_lengths, inputs.indices
        return cast(Tensor, decode_op(*tensors, *step.encode()))
    out = run_checked(inputs, step, options, learn=plain)
    warn_if_swapped("decode", q, cache.sizes.kv_heads)
    return out


def run_plan(q: Tensor, caches: Sequence[KVCache], sinks: Tensor | None, options: tuple[Any, ...]) -> Tensor | None:
    """Return the output of a step as `_run_compared` does; None if it has no plan, or a number is not finite."""
    if (known := find_plan(caches[0].step_plans, q, caches, sinks, options)) is None:
        return None
    plan, counts = known
    if isinstance(plan, DevicePlan):
        with torch.no_grad():
            return _run_compared(StepInputs(q, caches, sinks), plan.step, options[-1], plan)
    merge, equal, compares = plan.host_merge, True, options[-1] is not False
    message = None if merge is None else merge.blank()
    into = plan.kind.blank() if merge is None or message is None else merge.places(message)
    attend = named(ATTENTION, plan.attend) if is_profiled() else plan.attend
    try:
        partial = attend(q, caches, sinks, counts, into)
    except Exception as error:
        agreement_on(caches, plan.step, compares).fail(error)
    if partial is None:
        return None
    if merge is not None and message is not None:
        number, histories = digest_on_host(q), []
        for row, (cache, (length, _)) in enumerate(zip(caches, counts, strict=True), 1):
            number += row * length
            histories.append(cache.history_checksum)
        number += number_of(plan.call, (), *histories) + (0 if sinks is None else digest_on_host(sinks))
        merged = named(MERGE, merge.run) if is_profiled() else merge.run
        equal = merged(message, number)
        if not equal and compares:
            agreement = agreement_on(caches, plan.step, compares)
            agreement.fields = functools.partial(compared_fields, StepInputs(q, caches, sinks), plan.step)
            agreement.unequal()
    out = partial.out if plan.heads is None else partial.out[:, plan.heads]
    out = out.to(q.dtype).contiguous()
    return out if equal else out.fill_(torch.nan)


def run_checked(inputs: StepInputs, step: DecodeStep, options: tuple[Any, ...], *, learn: bool) -> Tensor:
    """Return the output of a step that was checked. Make its plan with `learn`, if a launch serves it.

    The last option is `checked`.
    """
    (q, caches, sinks, *_), checked = inputs, options[-1]
    for cache in caches:
        if step.reproducible and cache.shards.forked and stays_on_device(cache, step):
            cache.shards.unshare()  # the kernel merges the blocks of one tensor
    learned = learn and learn_plan(caches[0].step_plans, q, caches, sinks, options, step, inputs.kind(step))
    if learned and (out := run_plan(q, caches, sinks, options)) is not None:
        return out
    with torch.no_grad():
        return _run_compared(inputs, step, checked)


def _run_compared(inputs: StepInputs, step: DecodeStep, checked: bool | None, plan: DevicePlan | None = None) -> Tensor:
    """Return the output, or raise the same error on all ranks if their calls differ. Uncompared calls give NaN.

    `plan` is that of a known kind.
    """
    q, caches, sinks, key_lengths, _, further = inputs
    views, visible = [cache.shard.view for cache in caches], Visible(step.mask, None, None, *inputs[3:5])
    if plan is not None and caches[0].calls.is_alone:
        return run_step(q, views, sinks, step, 0, visible, launch=plan.launch)[0]
    agreement = agreement_on(caches, step, checked)
    agreement.kind, agreement.fields = inputs.kind(step), functools.partial(compared_fields, inputs, step)
    on_host = key_lengths is not None and key_lengths.device.type == "cpu"  # others would hold up the device
    values = tuple(key_lengths.tolist()) if key_lengths is not None and on_host else ()
    agreement.state = (values, *(cache.history_checksum for cache in caches))
    if plan is not None or all(stays_on_device(cache, step) for cache in caches):
        like = q.new_empty(0), q.shape, caches[0].sizes.value_dim
        agreement.ask = functools.partial(ask_in_step, step, *like)
    with agreement:
        if not agreement.before():
            return q.new_full(step.output_shape(q), torch.nan)
        launch = None if plan is None else plan.launch
        out, agreement.checksum = run_step(q, views, sinks, step, agreement.number, visible, further, launch)
    return out
