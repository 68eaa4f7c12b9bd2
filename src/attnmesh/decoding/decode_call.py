"""Decoding: keys stay on their ranks, and every rank gets the query. A step is a local attention and one merge.

With `reproducible=True` the result has the same bits on 1, 2, 4, 8, ... ranks. Each block of keys makes one partial.
Partials are merged along one tree over block numbers: even against odd at the top, then residues modulo 4, and so on.
The blocks of a rank are one subtree.
"""

from functools import partial as partial_of
from typing import Never, cast

import torch
from torch import Tensor

from attnmesh.cache.cache import KVCache
from attnmesh.checks.argument_checks import check_compare_option
from attnmesh.core.mask import Causal, Mask
from attnmesh.core.partial import Partial
from attnmesh.core.selection import Selection
from attnmesh.decoding.known_steps import find_step, run_new_step
from attnmesh.decoding.step_agreement import merge_agreement_for
from attnmesh.decoding.step_arguments import StepInputs, StepOptions, StepSpec
from attnmesh.decoding.step_checks import inputs_and_spec
from attnmesh.decoding.step_op import decode_op, tensors_of
from attnmesh.errors import DtypeError


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
    """Return attention of the last tokens over the whole cache. Its bits are the same on every rank.

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
            differ and are not compared get NaN, or wait for the deadline: in "gather" and "allreduce", and on GPUs
            where messages of another size are expected.
        selected: The tokens that each query attends, of those that it sees, equal on all ranks. An index counts tokens
            of the cache, padding included. Each rank reads those that it holds. On a GPU, where the CPU reads no index,
            rows with an invalid one give NaN. None for all tokens.
        partial: Attention of the same queries over other keys that this rank holds, such as entries that each stand
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
    checked = cache.guard.checked if checked is None else checked
    options = StepOptions(mask, scale, softcap, merge, output, reproducible, kernel)
    if k is not None or v is not None:
        try:
            cache.append(cast(Tensor, k), v)
        except Exception as error:  # other ranks may be in the merge of the step already
            merge_agreement_for((cache,), options, checked).raise_through_merge(error)
    caches = (cache,)
    signature = None
    prepared_step = None
    inputs = StepInputs(q, caches, sinks, key_lengths, selected, partial)
    if distance_bias is None and not unsupported:
        signature, prepared_step = find_step(inputs, options, checked, cache.prepared_steps)
    if prepared_step is not None:
        return prepared_step.run(inputs)
    check = partial_of(inputs_and_spec, inputs, options, distance_bias, unsupported)
    if torch.compiler.is_compiling():
        check_compare_option("decode", checked)
        return _decode_in_graph(*check())
    return run_new_step(check, inputs, options, checked, signature, cache.prepared_steps, "decode")


def _decode_in_graph(inputs: StepInputs, spec: StepSpec) -> Tensor:
    """Return the output of an operator of tensors: a graph cannot hold a `KVCache`."""
    (cache,) = inputs.caches
    cache.local_shards.check_in_graph("decode")
    tensors = (
        tensors_of(cache.own_shard.new_view()),
        cache.history.digest_on_device,
        inputs.sinks,
        inputs.key_lengths,
        inputs.indices,
    )
    return cast(Tensor, decode_op(inputs.q, *tensors, *spec.to_code()))
