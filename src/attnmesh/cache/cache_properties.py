"""Properties of a cache: configuration, lengths, keys and values of this rank, read from its shards."""

from torch import Tensor

from attnmesh.cache.cache_config import CacheConfig
from attnmesh.cache.cache_shard import CacheShard
from attnmesh.cache.local_shards import LocalShards
from attnmesh.core.layout import Striped
from attnmesh.errors import warn_once
from attnmesh.kernels.cache_view import LENGTH
from attnmesh.kernels.padding import Padding


class CacheProperties:
    """Properties of a cache, from the shards that this rank keeps."""

    local_shards: LocalShards

    @property
    def own_shard(self) -> CacheShard:
        """This rank's own shard."""
        return self.local_shards.own

    @property
    def config(self) -> CacheConfig:
        """Sizes and options of this layer over all ranks."""
        return self.own_shard.config

    @property
    def sizes(self) -> CacheConfig:
        """The former name of `config`."""
        warn_once("KVCache.sizes is KVCache.config now, and will be removed. Fix: read cache.config.", FutureWarning)
        return self.config

    @property
    def keys(self) -> Tensor:
        """This rank's keys, (batch, heads, slots, dim), of which the first `used` slots hold tokens.

        Reading them joins the pieces of a forked cache: the tokens that it shares are copied. A cache with `hot` copies
        its newest tokens to the CPU, and returns the keys of all tokens there. With `storage=` keys are rows of bytes:
        `core.storage.storage_of(rows).dequantize(rows)` returns their numbers.
        """
        return self.own_shard.join_pieces().view.keys

    @property
    def values(self) -> Tensor:
        """This rank's values, in the slots of its keys. In 8 bits a prefix of the keys is their rows.

        Reading them joins a fork's pieces, and copies hot tokens, as reading `keys` does.
        """
        return self.own_shard.join_pieces().view.values

    @property
    def padding(self) -> Padding | None:
        """Padding of the batch, or None if all tokens are real."""
        return self.own_shard.padding

    @property
    def length(self) -> int:
        """Cached tokens per sequence on all ranks, padding included."""
        return self.local_shards.length

    @property
    def used(self) -> int:
        """Cached tokens per sequence on this rank."""
        return self.own_shard.used_slots + self.own_shard.earlier_tokens

    @property
    def nbytes(self) -> int:
        """Bytes of the cached tokens in this rank's own shard, scales of 8 bits included."""
        return self.own_shard.token_bytes

    @property
    def lengths(self) -> Tensor:
        """Real tokens of each sequence on all ranks, (batch,)."""
        length = self.own_shard.device_counts[LENGTH].expand(self.config.batch)
        return (length if self.padding is None else self.padding.lengths).clone()

    @property
    def shares(self) -> tuple[float, ...] | None:
        """Ratios of the tokens of each rank; None for even shares."""
        return self.own_shard.block_cyclic.shares

    @property
    def layout(self) -> Striped:
        """Layout of a sharded prefill of an empty cache, after which its tokens are block-cyclic."""
        return Striped(self.own_shard.block_cyclic.block)

    @property
    def is_block_cyclic(self) -> bool:
        """True if all tokens lie where the block-cyclic layout puts them, as after `append` alone."""
        return self.local_shards.counter.rank_counts.start == 0
