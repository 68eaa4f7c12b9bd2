"""Counts of a cache's tokens by the CPU."""

from dataclasses import dataclass
from typing import cast

import pytest
import torch

from attnmesh.cache.block_cyclic import BlockCyclic, RankCounts
from attnmesh.cache.cache_config import CacheConfig
from attnmesh.cache.cache_shard import CacheShard
from attnmesh.cache.token_counter import TokenCounter
from attnmesh.core.mask import Mask, Window
from attnmesh.kernels.cache_view import LENGTH, USED

BLOCKS = BlockCyclic(block=2, ranks=2)
WINDOW = Window(3)


@dataclass
class FakeShard:
    """What a counter reads of a shard, with no memory for tokens: it may say that it is on a GPU which is not there."""

    device: torch.device
    config: CacheConfig
    length: int
    used_slots: int
    index: int
    earlier_tokens: int

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    @property
    def device_counts(self) -> torch.Tensor:
        counts = torch.zeros(2, dtype=torch.int64)
        counts[LENGTH], counts[USED] = self.length, self.used_slots
        return counts


def shard_on(
    device: str, length: int = 0, used: int = 0, index: int = 0, *, earlier_tokens: int = 0, mask: Mask | None = None
) -> CacheShard:
    """Return a shard that has `length` tokens on all ranks and `used` slots in use, by its own count."""
    config = CacheConfig(1, 1, 4, 4, 16, 2, torch.float32, mask=mask)
    return cast(CacheShard, FakeShard(torch.device(device), config, length, used, index, earlier_tokens))


@pytest.fixture
def counter(monkeypatch: pytest.MonkeyPatch) -> TokenCounter:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return TokenCounter(BLOCKS, [0, 1])


def test_appends_are_counted_where_a_gpu_has_the_shard(counter: TokenCounter) -> None:
    counter.add_tokens(5)
    counter.add_tokens(2)
    assert counter.length_in(shard_on("cuda")) == 7
    assert [counter.length_and_used(shard_on("cuda", index=rank)) for rank in (0, 1)] == [(7, 4), (7, 3)]
    assert counter.length_and_used(shard_on("cuda", earlier_tokens=2)) == (7, 2)


def test_a_shard_on_the_cpu_counts_itself(counter: TokenCounter) -> None:
    counter.add_tokens(5)
    shard = shard_on("cpu", 6, 4)
    assert counter.length_in(shard) == 6
    assert counter.length_and_used(shard) == (6, 4)


def test_the_gpu_alone_counts_what_graphs_append(counter: TokenCounter) -> None:
    counter.add_tokens(5)
    counter.enter_graphs()
    shard = shard_on("cuda", 9)
    assert counter.length_in(shard) == 9
    assert counter.length_and_used(shard) is None
    assert counter.length == 5, "a replay is not seen"
    counter.leave_graphs(9)
    counter.add_tokens(1)
    assert counter.length_in(shard) == 10
    assert counter.length_and_used(shard) == (10, 6)


def test_a_capture_reads_no_count(counter: TokenCounter, monkeypatch: pytest.MonkeyPatch) -> None:
    counter.add_tokens(5)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert counter.length_and_used(shard_on("cuda")) is None


def test_a_truncation_goes_back_in_a_layout_of_its_own(counter: TokenCounter) -> None:
    counter.set_rank_counts(RankCounts(BLOCKS, 6, (6, 0)))
    counter.set_length(6)
    counter.add_tokens(2)
    counter.truncate(7, ())
    assert counter.length_and_used(shard_on("cuda")) == (7, 6)
    counter.truncate(3, [(1, 0), (0, 3), (1, 0)])
    assert [counter.length_and_used(shard_on("cuda", index=rank)) for rank in (0, 1)] == [(3, 3), (3, 0)]
    counter.truncate(0, [(0, 0), (1, 0)])
    assert counter.rank_counts == TokenCounter(BLOCKS, [0, 1]).rank_counts


def test_a_shard_that_forgets_has_fewer_tokens_than_it_was_given(counter: TokenCounter) -> None:
    shard, other = shard_on("cuda", mask=WINDOW), shard_on("cuda", mask=WINDOW, index=1)
    counter.add_slots(shard, 3)
    counter.add_slots(other, 2)
    counter.add_tokens(5)
    counter.recount_slots(shard_on("cuda", used=1, mask=WINDOW))
    counter.add_slots(shard, 1)
    counter.add_tokens(1)
    assert counter.length_and_used(shard) == (6, 2)
    assert counter.length_and_used(other) == (6, 2)


def test_a_copy_counts_by_itself(counter: TokenCounter) -> None:
    shard = shard_on("cuda", mask=WINDOW)
    counter.add_slots(shard, 3)
    counter.add_tokens(3)
    other = counter.clone()
    other.add_slots(shard, 1)
    other.add_tokens(1)
    other.enter_graphs()
    assert counter.length_and_used(shard) == (3, 3)
    assert other.length == 4
    assert other.used_slots[0] == 4
