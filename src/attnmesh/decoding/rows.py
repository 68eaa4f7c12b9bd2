"""Decoding of several requests at once: rows of queries, each with a cache of its own length.

A step attends each row to its cache on this rank, and merges the partials of all rows in one message.
"""

from collections.abc import Sequence
from functools import partial as partial_of
from typing import Any, cast

from torch import Tensor

from attnmesh.cache.cache import KVCache
from attnmesh.cache.cache_config import CacheConfig
from attnmesh.core.mask import Causal, Mask
from attnmesh.decoding.known_steps import find_step, run_new_step
from attnmesh.decoding.prepared_step import PreparedStep
from attnmesh.decoding.step_agreement import merge_agreement_for
from attnmesh.decoding.step_arguments import StepInputs, StepOptions, StepSpec
from attnmesh.decoding.step_checks import spec_of_step
from attnmesh.errors import (
    ArgumentError,
    DtypeError,
    KernelError,
    LayoutError,
    MeshError,
    ShapeError,
)
from attnmesh.guard.agreement import may_compare
from attnmesh.mesh.axes import Axis
from attnmesh.runtime.memo import Memo
from attnmesh.runtime.world import cached_per_world

SUBJECT = "decode_rows"


def decode_rows(
    q: Tensor,
    caches: Sequence[KVCache],
    *,
    k: Tensor | None = None,
    v: Tensor | None = None,
    mask: Mask = Causal(),
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    merge: str = "auto",
    output: str = "replicated",
    reproducible: bool = False,
    kernel: str = "auto",
    checked: bool | None = None,
) -> Tensor:
    """Return attention of the last tokens of several caches: row r equals `decode(q[r : r + 1], caches[r])`.

    The rows of all caches are merged across ranks in one message, and ranks compare them in one checksum.

    Args:
        q: Queries of the last tokens, (caches, heads, length, dim), equal on every rank.
        caches: Caches of one sequence each, on one mesh. Their lengths, capacities and blocks may differ.
        k: Keys of new tokens, (caches, kv_heads, tokens, dim). Row r is first appended to cache r. If a cache has no
            room, no row is appended. Appended rows stay in the caches if the step raises.
        v: Values of new tokens.
        mask: Which keys a query sees.
        scale: Factor of the logits; 1/sqrt(dim) unless it is given.
        softcap: Bound of the logits, as in `decode`.
        sinks: One learned logit per query head.
        merge: "tree", "direct", "gather", "allreduce" or "auto".
        output: "replicated": all heads on every rank; "heads": this rank's share of the heads.
        reproducible: True gives the same bits on any power of two of ranks, as in `decode`.
        kernel: Kernel of one device.
        checked: When ranks compare their calls; as the first cache has it unless it is given.

    Returns:
        The output, (caches, heads, length, value dim).

    Raises:
        InputError: An argument cannot be served, or the ranks' calls differ.
        RankFailure: A rank is lost.

    >>> import torch, attnmesh as am
    >>> sizes = {"batch": 1, "kv_heads": 2, "head_dim": 4, "capacity": 9, "dtype": torch.float32}
    >>> caches = [am.KVCache(None, **sizes) for _ in range(2)]
    >>> for tokens, cache in zip((8, 3), caches, strict=True):
    ...     cache.append(*torch.randn(2, 1, 2, tokens, 4))
    >>> q = torch.randn(2, 2, 1, 4)
    >>> torch.allclose(decode_rows(q, caches)[1:], am.decode(q[1:], caches[1]), atol=1e-6)
    True
    """
    first = _first_of(caches)
    checked = first.guard.checked if checked is None else checked
    options = StepOptions(mask, scale, softcap, merge, output, reproducible, kernel)
    try:
        _check_caches(q, caches, k, v)
        if k is not None or v is not None:
            _append(k, v, caches)
    except Exception as error:  # other ranks may be in the merge of the step already
        merge_agreement_for(caches, options, checked).raise_through_merge(error)
    inputs = StepInputs(q, caches, sinks)
    prepared = _prepared_steps_of(caches)
    signature, prepared_step = find_step(inputs, options, checked, prepared)
    if prepared_step is not None:
        return prepared_step.run(inputs)
    check = partial_of(_inputs_and_spec_of_rows, inputs, options)
    return run_new_step(check, inputs, options, checked, signature, prepared, SUBJECT)


def _prepared_steps_of(caches: Sequence[KVCache]) -> Memo[PreparedStep]:
    """Return the memo of prepared steps: of one cache and its forks, or on CPUs of all caches of this kind."""
    first = caches[0]
    config = first.config
    if len(caches) == 1 or first.device.type != "cpu":
        return first.prepared_steps
    return _prepared_steps_of_rows(
        first.token_axis, first.rank_mesh.heads, config.common_config, config.block, config.hot
    )


@cached_per_world(1024)
def _prepared_steps_of_rows(
    token_axis: Axis, heads_axis: Axis, common_config: CacheConfig, block: int, hot: int | None
) -> Memo[PreparedStep]:
    return Memo()


def _first_of(caches: Any) -> KVCache:
    """Return the first cache, or raise: without one there is no mesh to compare on."""
    if not isinstance(caches, Sequence) or not len(caches) or not isinstance(caches[0], KVCache):
        given = f"{len(caches)} caches" if isinstance(caches, Sequence) and not len(caches) else type(caches).__name__
        raise DtypeError(f"{SUBJECT} caches", "a list of KVCaches", given, "pass a KVCache for each row of q")
    return caches[0]


def _check_caches(q: Tensor, caches: Sequence[Any], k: Any, v: Any) -> None:
    """Raise unless each row has a cache of its own, and the caches are alike but for their lengths."""
    first = caches[0]
    subject = f"{SUBJECT} caches"
    for cache in caches:
        if not isinstance(cache, KVCache):
            raise DtypeError(subject, "KVCaches", type(cache).__name__, "make them with attnmesh.KVCache")
        if cache.config.batch != 1:
            fix = "decode a batch with attnmesh.decode"
            raise ShapeError(subject, "caches of one sequence", f"one of {cache.config.batch}", fix)
        if (cache.token_axis, cache.rank_mesh.heads) != (first.token_axis, first.rank_mesh.heads):
            raise MeshError(subject, "caches on one mesh", "caches on several", "make all caches on one mesh")
        if cache.config.common_config != first.config.common_config or cache.own_shard.device != first.own_shard.device:
            expected = "caches of equal heads, widths, dtypes and masks"
            fix = "decode rows of one model and layer together"
            raise ShapeError(subject, expected, f"{cache.config} beside {first.config}", fix)
    if len({id(cache) for cache in caches}) < len(caches):
        raise ArgumentError(subject, "each cache once", "one cache twice", "pass cache.fork()")
    new = {name: x for name, x in (("k", k), ("v", v)) if x is not None}
    for name, x in {"q": q, **new}.items():
        if not isinstance(x, Tensor) or x.ndim != 4 or len(x) != len(caches):
            expected = f"4 dims, of which the first has {len(caches)} rows"
            given = f"{tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
            raise ShapeError(f"{SUBJECT} {name}", expected, given, "pass a row for each cache")
    if not may_compare(q.device):
        fix = "decode each row with attnmesh.decode"
        raise KernelError(SUBJECT, "no graph around rows of several caches", "one", fix)


def _append(k: Tensor | None, v: Tensor | None, caches: Sequence[KVCache]) -> None:
    """Append row r to cache r. If a cache has no room for its row, raise before a row is appended."""
    new_count = k.shape[2] if k is not None else 0
    for row, cache in enumerate(caches):
        cache.local_shards.check_row_fits(SUBJECT, row, new_count)
    for row, cache in enumerate(caches):
        rows = slice(row, row + 1)
        cache.append(cast(Tensor, k if k is None else k[rows]), v if v is None else v[rows])


def _inputs_and_spec_of_rows(inputs: StepInputs, options: StepOptions) -> tuple[StepInputs, StepSpec]:
    """Return the inputs and the spec of all rows, or raise unless each row can be served."""
    caches = inputs.caches
    specs = [
        spec_of_step(StepInputs(inputs.q[row : row + 1], (cache,), inputs.sinks), options, {}, SUBJECT, row)
        for row, cache in enumerate(caches)
    ]
    blocks = sorted({cache.config.block for cache in caches})
    if options.reproducible and len(blocks) > 1:
        fix = "make all caches with one block="
        raise LayoutError(f"{SUBJECT} reproducible", "caches of one block size", f"{blocks}", fix)
    return inputs, specs[0]._replace(capacity=max(cache.config.capacity for cache in caches))
