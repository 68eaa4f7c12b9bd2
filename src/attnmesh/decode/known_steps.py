"""Tokens and steps of decoding of a kind that was checked before.

New tokens are one native call, a step is one launch on the cache and one native merge across ranks.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnmesh.comm.host_merge import CHECKSUM, HostMerge, host_merge_for
from attnmesh.comm.merge_messages import chosen_merge
from attnmesh.core.mask import Band, Mask
from attnmesh.decode.cache_config import Sizes
from attnmesh.decode.cache_shard import CacheShard, stored
from attnmesh.decode.replicas import Shards
from attnmesh.decode.step import DecodeStep
from attnmesh.kernels.driver import NATIVE, choose_for_cache
from attnmesh.kernels.native.kernel import MOST_ROWS, NativeKind
from attnmesh.kernels.plans import MOST_KINDS
from attnmesh.kernels.traced import are_plain


class KnownAppends:
    """The kinds of new tokens that a cache and its forks have appended: shapes and dtypes, on caches of one size."""

    def __init__(self) -> None:
        self.kinds: set[tuple[Any, ...]] = set()

    def run(self, k: Tensor, v: Tensor | None, shards: Shards) -> bool:
        """Append tokens of a known kind that fit, all to one rank. Return False if others are to be checked."""
        shard = shards.own
        if not self.kinds or _kind_of_new(k, v, shard.sizes) not in self.kinds:
            return False
        if shard.padding is not None or shards.copies or shards.counts.start or shards.forgets is not None:
            return False
        (length, used), more = shard.state.tolist(), k.shape[2]
        if not shard.append_run(stored(k, v), more, length, used):
            return False
        shards.known_length = length + more
        return True

    def learn(self, k: Tensor, v: Tensor | None, sizes: Sizes) -> None:
        """Keep the kind of tokens that were checked and appended."""
        if (kind := _kind_of_new(k, v, sizes)) is not None and k.shape[2]:
            if len(self.kinds) >= MOST_KINDS:
                self.kinds.clear()
            self.kinds.add(kind)


def _kind_of_new(k: Tensor, v: Tensor | None, sizes: Sizes) -> tuple[Any, ...] | None:
    """Return all that the checks of new tokens depend on; None for tensors that PyTorch has to know of."""
    if v is None:
        return (k.shape, k.dtype, sizes) if are_plain(k) else None
    return (k.shape, v.shape, k.dtype, v.dtype, sizes) if are_plain(k, v) else None


class Known(NamedTuple):
    """A known kind of steps, on caches of one size. `host_merge` merges across ranks, if there are several."""

    kind: NativeKind
    step: DecodeStep
    sizes: Sizes
    host_merge: HostMerge | None


class KnownSteps:
    """The known kinds of steps of one cache and its forks."""

    def __init__(self) -> None:
        self.kinds: dict[Any, Known] = {}

    def find(self, q: Tensor, shard: CacheShard, options: tuple[Any, ...]) -> tuple[Known, int, int] | None:
        """Return the kind of a step that one launch serves, if known, with the tokens of all ranks and of this one."""
        if not self.kinds or shard.padding is not None or shard.shared or not are_plain(q):
            return None
        try:
            known = self.kinds.get(_kind(q, options))
        except TypeError:  # an option that cannot be hashed
            return None
        if known is None or known.sizes is not shard.sizes:
            return None
        length, used = shard.state.tolist()
        if not q.shape[2] <= length <= shard.sizes.capacity:
            return None
        alone, sees_all = known.host_merge is None, known.step.mask.left >= length - 1
        return (known, length, used) if (length == used if alone else sees_all) else None

    def learn(self, q: Tensor, shard: CacheShard, options: tuple[Any, ...], step: DecodeStep) -> None:
        """Keep the kind of a step that was served, if one launch serves it on a cache that keeps every token."""
        sizes, mask, logits, axis = shard.sizes, step.mask, step.logits, step.tokens
        if not are_plain(q) or step.reproducible or sizes.mask is not None or mask.ends or mask.chunks:
            return
        kernel = choose_for_cache(step.kernel, q, shard.keys, shard.values, logits.capped)
        if kernel is not NATIVE or logits.scale <= 0 or q.shape[1] // sizes.kv_heads * q.shape[2] > MOST_ROWS:
            return
        host_merge = None
        if axis.size > 1:
            how = chosen_merge(axis, step.merge, step.output, q.device)
            host_merge = host_merge_for(axis, (*q.shape[:-1], sizes.value_dim), how)
            if host_merge is None or q.shape[2] > 1:
                return
        if len(self.kinds) >= MOST_KINDS:
            self.kinds.clear()
        kind = NativeKind.of(q, shard.keys, shard.values, logits)
        self.kinds[_kind(q, options)] = Known(kind, step, sizes, host_merge)


def attend_alone(q: Tensor, shard: CacheShard, known: Known, length: int) -> Tensor | None:
    """Return the output of a step on one rank, or None if a number is not finite."""
    first, stop, bounds = _visible(known.step.mask, length, q.shape[2])
    out, lse = known.kind.blank()
    into = out.data_ptr(), lse.data_ptr()
    if not known.kind.launch_at(q, shard.stored[0], shard.stored[-1], into, bounds, first, stop - first):
        return None
    return out.to(q.dtype).contiguous()


def attend_and_merge(
    q: Tensor, shard: CacheShard, known: Known, host_merge: HostMerge, used: int, number: int
) -> tuple[Tensor, bool] | None:
    """Return the merged message of a step of one query on several ranks, and whether the ranks' calls are equal.

    `used` are this rank's tokens, and `number` is that of the call. Return None, before the merge, if a number is not
    finite.
    """
    message = host_merge.blank()
    lse = message.data_ptr() + CHECKSUM.size
    into = lse + 4 * host_merge.rows, lse
    if not used:  # the identity
        message[2 : 2 + host_merge.rows] = -torch.inf
        message[2 + host_merge.rows :] = 0.0
    elif not known.kind.launch_at(q, shard.stored[0], shard.stored[-1], into, None, 0, used):
        return None
    return message, host_merge.run(message, number)


def _kind(q: Tensor, options: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return all that the checks of a step depend on, but for its cache."""
    return q.shape, q.dtype, *options, *map(type, options)  # options of equal values may differ in type


def _visible(mask: Mask, length: int, rows: int) -> tuple[int, int, Band | None]:
    """Return the keys that the last rows see, from the first to the stop, and those of each row if they differ."""
    first, stop = max(0, length - rows - mask.left), min(length, length + mask.right)
    if rows == 1 or (mask.left >= length and mask.right >= rows):
        return first, stop, None
    positions = range(length - rows, length)
    low = [max(0, position - mask.left) - first for position in positions]
    high = [min(stop, position + mask.right + 1) - first for position in positions]
    return first, stop, Band(*(torch.tensor(bounds, dtype=torch.int64, device="cpu") for bounds in (low, high)))
