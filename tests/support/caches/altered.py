"""Caches that a test alters from inside, as no call of a user does."""

from torch import Tensor

import attnmesh as am
from attnmesh.runtime.memo import Memo


def forget_known_calls(cache: am.KVCache) -> None:
    """Forget the signatures of steps and appends, so that the next call of each is checked and prepared."""
    cache.prepared_steps, cache.known_appends = Memo(), Memo()


def append_on_this_rank_alone(cache: am.KVCache, k: Tensor, v: Tensor) -> None:
    """Append tokens that no other rank gets, without an agreement. Each of them is on this rank."""
    cache.own_shard.append_own((k, v), None, None)
    cache.local_shards.counter.add_tokens(k.shape[2])
