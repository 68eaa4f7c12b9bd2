"""Steps of decoding on one rank, of a kind that was checked before: one launch of the native kernel on the cache."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnmesh.core.mask import Band, Mask
from attnmesh.decode.cache_config import Sizes
from attnmesh.decode.cache_shard import CacheShard
from attnmesh.decode.step import DecodeStep
from attnmesh.kernels.driver import NATIVE, choose_for_cache
from attnmesh.kernels.known_calls import MOST_KINDS, are_plain
from attnmesh.kernels.native.kernel import MOST_ROWS, NativeKind


class Known(NamedTuple):
    """A known kind of steps, on caches of one size."""

    kind: NativeKind
    mask: Mask
    sizes: Sizes


class KnownSteps:
    """The known kinds of steps of one cache and its forks."""

    def __init__(self) -> None:
        self.kinds: dict[Any, Known] = {}

    def run(self, q: Tensor, shard: CacheShard, options: tuple[Any, ...]) -> Tensor | None:
        """Return the output of a step, or None unless its kind is known and the shard has all tokens in one piece."""
        if not self.kinds or shard.padding is not None or shard.shared or not are_plain(q):
            return None
        try:
            known = self.kinds.get(_kind(q, options))
        except TypeError:  # an option that cannot be hashed
            return None
        if known is None or known.sizes is not shard.sizes:
            return None
        length, used = shard.state.tolist()
        if not q.shape[2] <= length == used <= shard.sizes.capacity:
            return None
        first, stop, bounds = _visible(known.mask, length, q.shape[2])
        partial = known.kind.blank()
        if not known.kind.launch(q, shard.stored[0], shard.stored[-1], partial, bounds, first, stop - first):
            return None
        return partial.out.to(q.dtype).contiguous()

    def learn(self, q: Tensor, shard: CacheShard, options: tuple[Any, ...], step: DecodeStep) -> None:
        """Keep the kind of a step that was served, if one launch serves it on a cache that keeps every token."""
        sizes, mask, logits = shard.sizes, step.mask, step.logits
        if not are_plain(q) or step.reproducible or sizes.mask is not None or mask.ends or mask.chunks:
            return
        kernel = choose_for_cache(step.kernel, q, shard.keys, shard.values, logits.capped)
        if kernel is not NATIVE or logits.scale <= 0 or q.shape[1] // sizes.kv_heads * q.shape[2] > MOST_ROWS:
            return
        if len(self.kinds) >= MOST_KINDS:
            self.kinds.clear()
        self.kinds[_kind(q, options)] = Known(NativeKind.of(q, shard.keys, shard.values, logits), mask, sizes)


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
    return first, stop, Band(torch.tensor(low), torch.tensor(high))
