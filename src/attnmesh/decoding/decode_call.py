"""Decoding: keys stay on their ranks, and every rank gets the query. A step is a local attention and one merge.

With `reproducible=True` the result has the same bits on 1, 2, 4, 8, ... ranks. Each block of keys makes one partial.
Partials are merged along one tree over block numbers: even against odd at the top, then residues modulo 4, and so on.
The blocks of a rank are one subtree.
"""

from collections.abc import Hashable, Mapping, Sequence
from functools import partial as bound
from operator import attrgetter
from typing import Any, Never, cast

import torch
from torch import Tensor

from attnmesh.cache.cache import KVCache
from attnmesh.comm.rank_merge import highest_checksum, send_poison
from attnmesh.core.digest import fingerprints
from attnmesh.core.logits import Logits, with_distance_bias
from attnmesh.core.mask import Causal, Mask
from attnmesh.core.partial import Partial, sum_dtype
from attnmesh.core.selection import Selection
from attnmesh.decoding.decode_op import decode_op, encode, tensors_of
from attnmesh.decoding.runs import DeviceKernel
from attnmesh.decoding.step import (
    DecodeStep,
    Operands,
    StepPlan,
    ask_in_step,
    find_plan,
    run_step,
)
from attnmesh.decoding.step_checks import StepInputs, check_bias, check_further, check_step
from attnmesh.errors import DtypeError, InputError, KernelError, RankFailure, require
from attnmesh.guard.agreement import MergeAgreement, number_of
from attnmesh.guard.checks import check_checked, warn_if_swapped
from attnmesh.mesh.merges import COLLECTIVE

HISTORY = attrgetter("history_checksum")


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
    caches = (cache,)
    if k is not None or v is not None:
        try:
            cache.append(cast(Tensor, k), v)
        except InputError as error:
            agreement_on(caches, unchecked_step(cache, *options[:-1]), checked).fail(error)
    inputs = StepInputs(q, caches, sinks, key_lengths, selected, partial)
    is_given = key_lengths is not None or selected is not None or partial is not None or distance_bias is not None
    plain = cache.mesh.heads.size == 1 and not is_given and not unsupported
    plan, held, kind = find_plan(q, caches, sinks, options) if plain else (None, (), None)
    if plan is not None:
        return run(plan, inputs, held, checked)
    step = unchecked_step(cache, *options[:-1])
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
        return cast(Tensor, decode_op(*tensors, *encode(step)))
    out = run_checked(inputs, step, checked, kind)
    warn_if_swapped("decode", q, cache.sizes.kv_heads)
    return out


def unchecked_step(cache: KVCache, mask: Mask, scale: float | None, softcap: float | None, *options: Any) -> DecodeStep:
    """Return the step of a call, whose scale and cap may be None until they are checked."""
    sizes = cache.sizes
    placement = cache.mesh.heads, cache.tokens, sizes.block, sizes.capacity, sizes.value_dim
    return DecodeStep(*placement, mask, Logits(cast(float, scale), cast(float, softcap)), *options)


def named_options(step: DecodeStep) -> dict[str, Any]:
    """Return the values of a step that its caller passes, by name."""
    return dict(zip(step._fields[-len(step.options) :], step.options, strict=True))


@torch.no_grad()
def run_checked(inputs: StepInputs, step: DecodeStep, checked: bool | None, kind: Hashable = None) -> Tensor:
    """Return the output of a step that was checked. Its plan is kept for its kind, unless that is None."""
    q, caches, *_ = inputs
    with agreement_on(caches, step, checked):
        plan = StepPlan.of(step, q, caches[0].shard.view)
    plan = plan._replace(sizes=caches[0].sizes, call=inputs.kind(step))
    if plan.is_kept and kind is not None:
        caches[0].step_plans.keep(kind, plan)
    for cache in caches:
        if step.reproducible and cache.shards.forked and isinstance(plan.kernel, DeviceKernel):
            cache.shards.unshare()  # the kernel merges the blocks of one tensor
    return run(plan, inputs, plan.kernel.hold([cache.shard for cache in caches]), checked)


def run(plan: StepPlan, inputs: StepInputs, held: Sequence[Any], checked: bool | None) -> Tensor:
    """Return the output, or raise the same error on all ranks if their calls differ. Uncompared calls give NaN."""
    q, caches, sinks, key_lengths, selected, further = inputs
    operands = Operands(q, held, sinks, key_lengths, selected, further)
    state: tuple[Hashable, ...] = ()
    if not plan.is_alone:
        is_given = key_lengths is not None and key_lengths.device.type == "cpu"  # others would hold up the device
        state = tuple(cast(Tensor, key_lengths).tolist()) if is_given else (), *map(HISTORY, caches)
        if plan.merge is None:
            return _run_compared(plan, inputs, operands, state, checked)
    try:
        out, equal = run_step(plan, operands, number_of(plan.call, *state) if state else 0)
    except RankFailure:
        raise
    except Exception as error:
        agreement_on(caches, plan.step, checked).fail(error)
    if equal is False and checked is not False:
        agreement = agreement_on(caches, plan.step, checked)
        agreement.fields = bound(_fields, inputs, plan.step)
        agreement.unequal()
    return out


def _run_compared(
    plan: StepPlan, inputs: StepInputs, operands: Operands, state: tuple[Hashable, ...], checked: bool | None
) -> Tensor:
    """Return the output of a step whose messages a host may not look at."""
    q, caches, *_ = inputs
    step, on_device = plan.step, isinstance(plan.kernel, DeviceKernel)
    agreement = agreement_on(caches, step, checked)
    agreement.kind, agreement.state, agreement.fields = plan.call, state, bound(_fields, inputs, step)
    stays = q.device.type != "cpu" if step.index_block is not None else on_device
    if stays and step.merge not in COLLECTIVE:
        agreement.ask = bound(ask_in_step, step, q.new_empty(0), q.shape, step.value_dim)
    with agreement:
        if not agreement.before():
            return q.new_full(step.output_shape(q), torch.nan)
        out, found = run_step(plan, operands, agreement.number)
        agreement.checksum = cast(Tensor, found)
    return out


def agreement_on(caches: Sequence[KVCache], step: DecodeStep, checked: bool | None) -> MergeAgreement:
    """Return the agreement on a step, whose arguments may not be checked yet."""
    first, name = caches[0], "decode" if len(caches) == 1 else "decode_rows"
    poison = bound(_send_poison, first, step)
    return MergeAgreement(first.calls, first.device, step.merge, checked, name, poison)


def _fields(inputs: StepInputs, step: DecodeStep) -> Mapping[str, object]:
    """Return the arguments of the call that ranks compare."""
    q, caches, sinks, key_lengths, _, partial = inputs
    options = named_options(step) | step.logits._asdict()
    del options["logits"]
    options["key_lengths"] = None if key_lengths is None else key_lengths.tolist()
    options |= {} if partial is None else {"partial": True}
    width = caches[0].sizes.head_dim
    bias = q[..., width:] if q.shape[-1] > width else None  # with which the queries end
    tensors = {"q": q[..., :width], "distance_bias": bias, "sinks": sinks, "selected": inputs.indices}
    lengths, histories = [cache.length for cache in caches], [cache.history_checksum for cache in caches]
    held = "tokens in the cache" if len(caches) == 1 else "tokens in the caches"
    each = {held: lengths, "padding and order": histories}
    contents = {field: values[0] if len(values) == 1 else values for field, values in each.items()}
    return {**options, **fingerprints(tensors), **contents}


def _send_poison(cache: KVCache, step: DecodeStep) -> None:
    """Run the exchanges of a step whose arguments are wrong on this rank, so that the others detect it."""
    ranks, reproducible = cache.tokens.size, step.reproducible is True  # other values are invalid on other ranks too
    merge, canonical = "tree" if reproducible else step.merge, reproducible and not ranks & (ranks - 1)
    like = torch.empty(0, dtype=sum_dtype(cache.sizes.dtype), device=cache.device)
    checksum = send_poison(cache.tokens, merge, step.output, like, canonical=canonical)
    if cache.mesh.heads.size > 1:
        highest_checksum(checksum, cache.mesh.heads)
