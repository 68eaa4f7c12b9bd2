"""Counts of a cache's tokens by the CPU, which would wait if it asked a GPU."""

from collections.abc import Sequence
from copy import copy

import torch

from attnmesh.cache.block_cyclic import BlockCyclic, RankCounts
from attnmesh.cache.cache_shard import CacheShard
from attnmesh.guard.agreement import is_capturing


class TokenCounter:
    """Tokens of a cache's shards, as the CPU counts them.

    Kernels read `device_counts` of a shard. The CPU reads them too if the shard is there, and otherwise these counts.
    A call that changes a shard writes `device_counts` first, and these counts after them. A graph's replay writes
    `device_counts` alone: from the capture on `length` may lag behind them, and the CPU asks the device.
    """

    def __init__(self, block_cyclic: BlockCyclic, shards: Sequence[int]) -> None:
        """Count no tokens yet. `shards` are the indices of those on this rank."""
        self.length = 0
        """Tokens on all ranks. Where a graph appends it lacks those of replays, until `set_length`."""
        self.rank_counts = RankCounts(block_cyclic, 0, (0,) * block_cyclic.ranks)
        """Tokens of each rank, of any length: ranks agree on new ones when tokens do not lie block-cyclic."""
        self.used_slots = dict.fromkeys(shards, 0)
        """Slots in use of each shard of this rank, by its index, if the cache forgets."""
        self.in_graphs = False
        """True if a graph holds an append: the CPU does not see its replays."""

    def clone(self) -> "TokenCounter":
        """Return a counter that goes on from here by itself."""
        other = copy(self)
        other.used_slots = {**self.used_slots}
        return other

    def add_tokens(self, new_count: int) -> None:
        """Count `new_count` more tokens on all ranks together."""
        self.length += new_count

    def enter_graphs(self) -> None:
        """Leave the length to the device: a graph appends when it is replayed."""
        self.in_graphs = True

    def set_length(self, length: int) -> None:
        """Set the tokens on all ranks together, those of graphs included."""
        self.length = length

    def leave_graphs(self, length: int) -> None:
        """Set the tokens on all ranks together, once no graph appends any more."""
        self.length, self.in_graphs = length, False

    def truncate(self, length: int, table: Sequence[Sequence[int]]) -> None:
        """Count no tokens from `length` on. Rows of `table` are (rank, its tokens before `length`)."""
        if length < self.rank_counts.start:
            kept = sorted(set(map(tuple, table)))  # ranks along the heads axis hold the same tokens
            self.rank_counts = RankCounts(self.rank_counts.block_cyclic, length, tuple(count for _, count in kept))
        self.length = length

    def set_rank_counts(self, rank_counts: RankCounts) -> None:
        """Set the tokens of each rank, as all ranks have reported them."""
        self.rank_counts = rank_counts

    def add_slots(self, shard: CacheShard, new_count: int) -> None:
        """Count `new_count` more slots of a shard of a cache that forgets."""
        self.used_slots[shard.index] += new_count

    def recount_slots(self, shard: CacheShard) -> None:
        """Ask the device of a shard, if the cache forgets: it has lost tokens, or has them in other slots."""
        if shard.config.mask is not None:
            self.used_slots[shard.index] = shard.used_slots

    def length_in(self, shard: CacheShard) -> int:
        """Return the tokens on all ranks. The device is asked if the shard is on the CPU, or a graph appends."""
        return self.length if shard.on_gpu and not self.in_graphs else shard.length

    def used_in(self, shard: CacheShard) -> int:
        """Return the slots in use of a shard of a cache that forgets. Its device is asked if that is the CPU."""
        return self.used_slots[shard.index] if shard.on_gpu else shard.used_slots

    def length_and_used(self, shard: CacheShard) -> tuple[int, int] | None:
        """Return the counts of tokens: on all ranks, and in a shard. None where the device alone knows them."""
        if torch.compiler.is_compiling():
            return None
        if not shard.on_gpu:
            length, used, *_ = shard.device_counts.tolist()
            return length, used
        if self.in_graphs or is_capturing(shard.device):
            return None
        if shard.config.mask is not None:
            return self.length, self.used_slots[shard.index]
        return self.length, self.rank_counts.by_rank(self.length)[shard.index] - shard.earlier_tokens
