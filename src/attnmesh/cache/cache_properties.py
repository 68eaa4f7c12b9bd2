"""Properties of a cache: sizes, lengths, keys and values of this rank, read from its shards."""

import torch
from torch import Tensor

from attnmesh.cache.cache_config import CacheSizes
from attnmesh.cache.cache_shard import CacheShard
from attnmesh.cache.local_shards import LocalShards
from attnmesh.core.digest import chained_checksum
from attnmesh.core.layout import Striped
from attnmesh.kernels.cache_view import LENGTH
from attnmesh.kernels.padding import Padding


class CacheProperties:
    """Properties of a cache, from the shards that this rank keeps, and the checksum of its padding and orders."""

    shards: LocalShards
    history_checksum: int = 0  # of padding and reorders so far
    device: torch.device
    history: Tensor  # the same on the device, for graphs

    @property
    def shard(self) -> CacheShard:
        """This rank's own shard."""
        return self.shards.own

    @property
    def sizes(self) -> CacheSizes:
        """Sizes of this layer over all ranks."""
        return self.shard.sizes

    @property
    def keys(self) -> Tensor:
        """This rank's keys, (batch, heads, slots, dim), of which the first `used` slots hold tokens.

        A forked cache first copies the tokens that it shares, and one with `hot` its newest to the CPU, where all
        then are. With `storage=` they are rows of bytes:
        `core.storage.storage_of(rows).dequantize(rows)` returns their numbers.
        """
        return self.shard.whole().view.keys

    @property
    def values(self) -> Tensor:
        """This rank's values, in the slots of its keys. In 8 bits a prefix of the keys is their rows."""
        return self.shard.whole().view.values

    @property
    def padding(self) -> Padding | None:
        """Padding of the batch, or None if all tokens are real."""
        return self.shard.padding

    @property
    def length(self) -> int:
        """Cached tokens per sequence on all ranks, padding included."""
        return self.shards.length

    @property
    def used(self) -> int:
        """Cached tokens per sequence on this rank."""
        return self.shard.used_slots + self.shard.earlier_tokens

    @property
    def nbytes(self) -> int:
        """Bytes of the cached tokens in this rank's own shard, scales of 8 bits included."""
        return self.shard.token_bytes

    @property
    def lengths(self) -> Tensor:
        """Real tokens of each sequence on all ranks, (batch,)."""
        length = self.shard.device_counts[LENGTH].expand(self.sizes.batch)
        return (length if self.padding is None else self.padding.lengths).clone()

    @property
    def shares(self) -> tuple[float, ...] | None:
        """Ratios of the tokens of each rank; None for even shares."""
        return self.shard.block_cyclic.shares

    @property
    def layout(self) -> Striped:
        """Layout of a sharded prefill of an empty cache, after which its tokens are block-cyclic."""
        return Striped(self.shard.block_cyclic.block)

    @property
    def is_block_cyclic(self) -> bool:
        """True if all tokens lie where the block-cyclic layout puts them, as after `append` alone."""
        return self.shards.rank_counts.start == 0

    def record_padding(self, token_mask: Tensor | None, new_count: int) -> None:
        """Add the last `new_count` tokens to the history checksum, if any of them is padding.

        Real tokens are left out: a rank on which an append has failed may not know that the batch had padding.
        """
        if token_mask is None or torch.compiler.is_compiling():
            return
        places = (~token_mask).nonzero()  # few, and faster to add up than a mask of all tokens
        if len(places):
            start = self.length - new_count
            self.record_history(chained_checksum(self.history_checksum + start, places))

    def record_history(self, checksum: int) -> None:
        """Set the history checksum, also in the memory that graphs read."""
        if checksum != self.history_checksum:
            self.history_checksum = checksum
            self.history.fill_(checksum)

    def history_on(self, device: torch.device) -> Tensor:
        """Return the history checksum in memory of a device, which can be written to in any mode."""
        with torch.inference_mode(False):
            return torch.full((), self.history_checksum, dtype=torch.int64, device=device)
