"""Kinds of new tokens that were checked before, which are appended in one native call."""

from typing import Any

from torch import Tensor

from attnmesh.cache.cache_config import Sizes
from attnmesh.cache.cache_shard import stored
from attnmesh.cache.replicas import LocalShards
from attnmesh.kernels.traced import are_plain
from attnmesh.runtime.caches import Kinds


def append_known(kinds: Kinds[bool], k: Tensor, v: Tensor | None, shards: LocalShards) -> bool:
    """Append tokens of a kind that was checked before, if they fit and one rank owns them. Return False for others."""
    shard = shards.own
    if not kinds or kind_of_new(k, v, shard.sizes) not in kinds:
        return False
    if shard.padding is not None or shards.copies or shards.counts.start or shards.forgets is not None:
        return False
    (length, used), more = shard.state.tolist(), k.shape[2]
    if not shard.append_run(stored(k, v), more, length, used):
        return False
    shards.known_length = length + more
    return True


def kind_of_new(k: Tensor, v: Tensor | None, sizes: Sizes) -> tuple[Any, ...] | None:
    """Return all that the checks of new tokens depend on; None for tensors that PyTorch has to know of."""
    if v is None:
        return (k.shape, k.dtype, sizes) if are_plain(k) else None
    return (k.shape, v.shape, k.dtype, v.dtype, sizes) if are_plain(k, v) else None
