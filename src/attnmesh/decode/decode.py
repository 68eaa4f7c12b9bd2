"""Decoding: keys stay where they are and the query goes to them. A step is a local attention and a merge across ranks.

With `reproducible=True` the result is the same bits on 1, 2, 4, 8, ... ranks. The law: each block of keys that is dealt
makes a partial of its own, and these are merged along one tree over the blocks' numbers, whose halves are the even and
the odd numbers, their halves the residues modulo 4, and so on. Of that tree each rank's blocks are a subtree.
"""

from functools import lru_cache
from typing import Any, NamedTuple, Never, cast
from zlib import crc32

import torch
from torch import Tensor

from attnmesh.comm.consensus import agree, askable, describe_call, unlike
from attnmesh.comm.merge import COLLECTIVE, check_merge, send_poison
from attnmesh.core.checks import (
    check_checked,
    check_same_kind,
    check_scale,
    check_sinks,
    check_unknown_options,
    swap_hint,
    warn_if_swapped,
)
from attnmesh.core.digest import fingerprints
from attnmesh.core.mask import Causal, Mask, check_mask
from attnmesh.core.partial import wide
from attnmesh.decode.cache import KVCache
from attnmesh.decode.local import on_device
from attnmesh.decode.operator import Step, decode_op, highest_checksum, or_nan, output_shape, run_step
from attnmesh.errors import DtypeError, InputError, KernelError, LayoutError, MaskError, MeshError, ShapeError
from attnmesh.kernels.select import NAMES, check_kernel


def decode(
    q: Tensor,
    cache: KVCache,
    *,
    mask: Mask = Causal(),
    scale: float | None = None,
    sinks: Tensor | None = None,
    merge: str = "auto",
    output: str = "replicated",
    reproducible: bool = False,
    kernel: str = "auto",
    checked: bool | None = None,
    **more: Never,
) -> Tensor:
    """Attention of the last tokens of the cache, the same `q` on every rank, over all that the cache holds.

    Each row of `q` (batch, heads, length, dim) sees what the mask lets its position see: causal, unless another is
    given. The output is the same bits on every rank, or with `output="heads"` this rank's share of the heads. `merge`
    is "tree", "direct", "gather", "allreduce" or "auto". `reproducible` asks for the same bits on any power of two of
    ranks; it wants a cache filled by dealing, and blocks of 128 tokens or more to be fast. `checked` is the cache's own
    unless it is given: see `KVCache`. Ranks that were called differently and do not ask get NaN.

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
    options = _Options(mask, scale, merge, output, reproducible, kernel, more or None)
    checked = cache.checker.checked if checked is None else checked
    try:
        check_checked("decode", checked)
        options = options._replace(scale=_check(q, cache, sinks, options))
    except InputError as error:
        if not torch.compiler.is_compiling() and cache.mesh.shape.ranks > 1:
            _refuse(error, cache, options, checked)
        raise
    if torch.compiler.is_compiling():
        return _compiled(q, cache, sinks, _step(cache, options))
    with torch.no_grad():
        out = _agreed(q, cache, sinks, options, checked)
    warn_if_swapped("decode", q, cache.sizes.kv_heads)
    return out


def _agreed(q: Tensor, cache: KVCache, sinks: Tensor | None, options: "_Options", checked: bool | None) -> Tensor:
    """The output, if all ranks were asked the same; else the error that all raise, or where nothing is asked NaN."""
    held, step = cache.held, _step(cache, options)
    silent = _silent(cache, options)
    call = _Call(options, q.dtype, q.shape, None if sinks is None else sinks.dtype, cache.history_checksum)
    asks = _asks(cache, call, silent, checked)
    if asks and options.merge in COLLECTIVE:  # collectives cannot hear of a message that is not the one expected
        agree(cache.mesh, call.text(q, sinks, cache.length))
    out, checksum = run_step(q, held, sinks, step, _number(call))
    if checksum is None:
        return out
    if not asks:
        return or_nan(out, checksum, output_shape(q, cache.values, step), merged=silent and step.heads.size == 1)
    if float(checksum.sum()) != 0:
        if silent and not checked and float(checksum.sum()) == torch.inf:  # by the message of one that asks nobody
            given, fix = "an error on another that raised it alone", "see what it raised"
            raise MeshError("decode", "the same call on every rank", given, fix)
        agree(cache.mesh, call.text(q, sinks, cache.length))
        unlike("decode")
    if silent:
        cache.checker.kinds.add(call.kind)
    return out


def _asks(cache: KVCache, call: "_Call", silent: bool, checked: bool | None) -> bool:
    """Whether the host looks at what the ranks said: always where that is free, else as it is told to."""
    if not askable(cache.device):
        return False
    return (not silent or call.kind not in cache.checker.kinds) if checked is None else checked


def _silent(cache: KVCache, options: "_Options") -> bool:
    """Whether ranks ask nothing of each other, and of the device, beyond the merge itself."""
    kernel = options.kernel if options.kernel in NAMES else "auto"
    return on_device(cache.keys, cache.held, kernel) and options.merge not in COLLECTIVE


class _Call(NamedTuple):
    """What ranks have to agree on."""

    options: "_Options"
    dtype: torch.dtype
    shape: torch.Size
    sinks: torch.dtype | None
    history_checksum: int

    @property
    def kind(self) -> tuple[Any, ...]:
        """What calls have in common that only differ in numbers."""
        return self[:-1]

    def text(self, q: Tensor, sinks: Tensor | None, length: int) -> str:
        """The call, as ranks tell each other of it."""
        held = {"tokens in the cache": length, "padding and order": self.history_checksum}
        return describe_call("decode", **self.options._asdict(), **fingerprints({"q": q, "sinks": sinks}), **held)


@lru_cache(maxsize=64)
def _number(call: _Call) -> int:
    return crc32(repr(call).encode())


class _Options(NamedTuple):
    mask: Mask
    scale: float | None
    merge: str
    output: str
    reproducible: bool
    kernel: str
    more: dict[str, Never] | None


def _step(cache: KVCache, options: _Options) -> Step:
    where = cache.mesh.heads, cache.tokens, cache.sizes.block, cache.sizes.capacity
    scale = cast(float, options.scale)  # as it was checked
    return Step(*where, options.mask, scale, options.merge, options.output, options.reproducible, options.kernel)


def _refuse(error: InputError, cache: KVCache, options: "_Options", checked: bool | None) -> None:
    """Before a rank raises: it takes its part in what the others do, and tells those who ask."""
    if options.merge not in COLLECTIVE:
        _absent(cache, options)
    if checked is True or (checked is not False and not _silent(cache, options)):  # else they hear of it
        agree(cache.mesh, error)


def _absent(cache: KVCache, options: "_Options") -> None:
    """A rank that cannot go on takes its part in the exchanges all the same."""
    ranks = cache.tokens.size
    reproducible = options.reproducible is True  # what is neither True nor False, the others do not go by
    canonical = reproducible and not ranks & (ranks - 1)
    checksum = torch.full((2,), torch.inf, dtype=wide(cache.sizes.dtype), device=cache.device)
    merge = "tree" if reproducible else options.merge
    send_poison(cache.tokens, merge, options.output, checksum, canonical=canonical)
    if cache.mesh.heads.size > 1:
        highest_checksum(checksum, cache.mesh.heads)


def _compiled(q: Tensor, cache: KVCache, sinks: Tensor | None, step: Step) -> Tensor:
    groups = (axis.group.group_name if axis.group is not None else "" for axis in (step.heads, step.tokens))
    names = [*groups, step.merge, step.output, step.kernel]
    places = (step.heads.size, step.heads.index, step.tokens.size, step.tokens.index)
    numbers = [*places, step.block, step.capacity, int(step.reproducible), *step.mask.encode()]
    padded = (None, None, None) if cache.padding is None else cache.padding
    room = cache.shard
    held = (room.keys, room.values, room.token_index, room.state, *padded)
    return decode_op(q, *held, sinks, numbers, ",".join(names), step.scale)  # type: ignore[no-any-return]


def _check(q: Tensor, cache: KVCache, sinks: Tensor | None, options: _Options) -> float:
    """The scale, if all the rest can be served too."""
    if torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in (q, sinks)):
        fix = "decode under torch.no_grad(), or train with attention"
        raise KernelError("decode", "a query and sinks without gradients", "some that ask for them", fix)
    check_unknown_options("decode", options.more or {})
    check_same_kind("decode", {"q": q})
    shape = (cache.sizes.batch, "heads", "length", cache.sizes.head_dim)
    if q.ndim != 4 or (q.shape[0], q.shape[3]) != (cache.sizes.batch, cache.sizes.head_dim) or not q.shape[2]:
        fix = "pass the queries of the cache's last tokens"
        raise ShapeError("decode q", f"shape {shape}", f"{tuple(q.shape)}", fix)
    if q.shape[1] % cache.sizes.kv_heads or not q.shape[1]:
        given = f"{q.shape[1]} query heads on {cache.sizes.kv_heads} key heads"
        fix = "pass the model's heads" + swap_hint(q.shape[1] > 0 and q.shape[2] % cache.sizes.kv_heads == 0)
        raise ShapeError("decode q", "query heads a multiple of key heads", given, fix)
    if q.dtype != cache.sizes.dtype or q.device.type != cache.device.type:
        given = f"{q.dtype} on {q.device}"
        raise DtypeError("decode q", f"{cache.sizes.dtype} on {cache.device}", given, "call .to(cache.sizes.dtype)")
    check_mask("decode mask", options.mask)
    check_merge("decode", options.merge, options.output)
    check_kernel(options.kernel)
    scale = check_scale("decode", options.scale, q)
    check_sinks("decode sinks", sinks, q)
    if cache.padding is not None and options.mask.ends:
        fix = "keep documents in sequences of their own"
        raise MaskError("decode mask", "no documents in a padded batch", f"{options.mask}", fix)
    check_reproducible("decode reproducible", options.reproducible, cache.tokens.size, options.merge)
    if options.reproducible:
        _check_dealt(cache)
    if askable(q.device):
        _check_length(q, cache, options)
    return scale


def _check_length(q: Tensor, cache: KVCache, options: _Options) -> None:
    """What needs to know the length: a graph does not ask for it."""
    if not cache.holds(q.shape[2]):
        given = f"{q.shape[2]} queries and {cache.length} of {cache.sizes.capacity} tokens in the cache"
        fits = q.shape[2] % cache.sizes.kv_heads == 0 and cache.holds(q.shape[1])
        fix = "append before decode" + swap_hint(fits)
        raise ShapeError("decode q", "as many queries as tokens in the cache, or fewer", given, fix)
    if options.mask.ends:
        options.mask.check_length("decode mask", cache.length)


def check_reproducible(subject: str, reproducible: object, ranks: int, merge: str) -> None:
    """Raise unless the same bits are not asked for, or can be had on so many ranks along queries and keys."""
    if not isinstance(reproducible, bool):
        raise KernelError(subject, "True or False", repr(reproducible), "say one of them")
    if not reproducible:
        return
    expected = "1, 2, 4, 8, ... ranks along queries and keys, and a tree"
    if ranks & (ranks - 1):
        fix = "use a power of two of ranks, or leave it out"
        raise KernelError(subject, expected, f"{ranks} ranks", fix)
    if merge not in ("auto", "tree"):
        raise KernelError(subject, expected, f"merge {merge!r}", 'leave merge at "auto"')


def _check_dealt(cache: KVCache) -> None:
    if not cache.is_block_cyclic or cache.padding is not None:
        given = "a padded batch" if cache.padding is not None else "one that keeps what a sharded prefill made"
        fix = "fill it with append, or prefill in Striped(cache.sizes.block)"
        raise LayoutError("decode reproducible", "a cache whose tokens were dealt", given, fix)
