"""Blocks of prefixes on rank 0: which are stored and loaded in each step, without ranks."""

from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from attnmesh.cache.cache_config import CacheConfig
from attnmesh.errors import KernelError
from attnmesh.hf.serving.engine_request import EngineRequest, Origin
from attnmesh.hf.serving.operations import (
    BlockToRead,
    CloseStored,
    LoadBlocks,
    OpenStored,
    Operation,
    ReadFrom,
    SaveBlocks,
    StepResults,
)
from attnmesh.hf.serving.prefix_store import OpenStore, PrefixStore
from attnmesh.hf.serving.rank_report import RankReport
from attnmesh.hf.serving.store_scheduler import LoadingCache, StoreScheduler
from attnmesh.mesh.axes import RankMesh
from attnmesh.store.block_folder import BlockFolder, FolderLock
from attnmesh.store.block_names import StoredBlock
from attnmesh.store.block_tiers import TierEntry
from tests.support.serving.fake_caches import request

CONFIG = CacheConfig(1, 1, 4, 4, 16, 16, torch.float32)
"""Sizes of one layer, in which a token takes 32 bytes, and 8 for its number."""


@pytest.fixture
def store(tmp_path: Path) -> Iterator[StoreScheduler]:
    settings = PrefixStore(tmp_path)
    lock = FolderLock(tmp_path)
    template = SimpleNamespace(
        config=LlamaConfig(), irreversible_layers=[], windows=False, block=16, choose_block=lambda _: None
    )
    worker: Any = SimpleNamespace(
        template=template, mesh=RankMesh.of(None), caches={}, store=None, left_to_decode=1, recomputes_by_token=False
    )
    yield StoreScheduler(settings, OpenStore(BlockFolder(tmp_path), "ab" * 16, lock), worker)
    lock.release()


def keep(
    store: StoreScheduler, cache_id: int, ids: Any, change: Callable[[Any], object] = lambda _: None, rejected: int = 0
) -> EngineRequest:
    """Keep a cache that has computed a prompt, and was changed, and store its prefix."""
    ended = request(ids)
    shard = SimpleNamespace(block_cyclic=SimpleNamespace(is_even=True))
    cache: Any = SimpleNamespace(
        cross_layers=[],
        history=SimpleNamespace(is_consistent=True, rope_regime=store._rope(ended)),
        kv_caches=[SimpleNamespace(is_block_cyclic=True, config=CONFIG, own_shard=shard)],
        block=16,
        get_seq_length=lambda: len(ended.ids),
    )
    store.worker.caches[cache_id] = cache
    change(cache)
    store.keep(ended, cache_id, rejected)
    return ended


def saved(operations: list[Operation]) -> list[tuple[int, int]]:
    """Return the cache and the end of each block that is saved."""
    saves = [one for one in operations if isinstance(one, SaveBlocks)]
    return [(one.cache_id, block.stop) for one in saves for block, _ in one.blocks]


def load(store: StoreScheduler, ids: Any) -> tuple[EngineRequest, OpenStored]:
    """Begin to load the prefix of a prompt."""
    asked = request(ids)
    assert store.begin_loading(asked, 0, count(7), lambda: True)
    (opening,) = store.operations_after()
    assert isinstance(opening, OpenStored)
    return asked, opening


def test_blocks_of_a_kept_cache_are_stored_some_in_each_step(store: StoreScheduler) -> None:
    keep(store, 3, range(40))
    assert store.busy
    one_a_step = [saved(store.operations_before([], 0.0)) for _ in range(3)]  # in no time one of them
    assert one_a_step == [[(3, 16)], [(3, 32)], []]
    assert not store.busy
    assert store.is_writing


def test_a_step_without_rows_copies_more(store: StoreScheduler) -> None:
    keep(store, 3, range(40))
    assert saved(store.operations_before([], None)) == [(3, 16), (3, 32)]


def test_blocks_that_are_stored_are_not_stored_again(store: StoreScheduler) -> None:
    keep(store, 3, range(40))
    store.operations_before([], None)
    keep(store, 4, [*range(32), *range(100, 120)])
    assert saved(store.operations_before([], None)) == [(4, 48)]


@pytest.mark.parametrize(
    "change",
    [
        lambda cache: cache.cross_layers.append(SimpleNamespace(is_initialized=True)),
        lambda cache: setattr(cache.history, "is_consistent", False),
        lambda cache: setattr(cache.history, "rope_regime", (1,)),
        lambda cache: setattr(cache.kv_caches[0], "is_block_cyclic", False),
    ],
    ids=["other inputs", "several calls", "other angles", "another layout"],
)
def test_keys_that_other_prompts_would_not_have_are_not_stored(
    store: StoreScheduler, change: Callable[[Any], object]
) -> None:
    keep(store, 3, range(40), change)
    assert saved(store.operations_before([], None)) == []


def test_tokens_that_the_next_step_takes_back_are_not_stored(store: StoreScheduler) -> None:
    keep(store, 3, range(40), rejected=9)
    assert saved(store.operations_before([], None)) == [(3, 16)]


def test_blocks_of_a_cache_that_is_gone_are_not_stored(store: StoreScheduler) -> None:
    keep(store, 3, range(40))
    del store.worker.caches[3]
    assert saved(store.operations_before([], None)) == []
    assert not store.busy


def test_blocks_that_can_never_fit_are_not_tried_again(store: StoreScheduler) -> None:
    store.tiers.memory.max_bytes = 100
    keep(store, 3, range(40))
    assert saved(store.operations_before([], None)) == []
    assert not store.busy


def test_first_blocks_of_a_prefix_stay_longest(store: StoreScheduler) -> None:
    keep(store, 3, range(40))
    store.operations_before([], None)
    store.receive_reports([RankReport(blocks_written=2)])
    assert [block.stop for block in store.tiers.memory.blocks] == [32, 16]


def test_a_state_without_room_is_stored_once_there_is_some(store: StoreScheduler) -> None:
    store.forgets = True
    earlier = StoredBlock("f" * 32, 0, 16)
    assert store.tiers.admit(earlier, TierEntry(store.tiers.memory.max_bytes))
    keep(store, 3, range(40), lambda cache: setattr(cache, "states", {}))
    assert saved(store.operations_before([], None)) == []
    assert store.busy
    assert store.tiers.pop_written() == (earlier, True)
    assert saved(store.operations_before([], None)) == [(3, 40), (3, 16), (3, 32)]


def test_a_cache_that_is_dropped_goes_first(store: StoreScheduler) -> None:
    keep(store, 3, range(40))
    keep(store, 4, range(100, 140))
    assert saved(store.operations_before([4], 0.0))[0] == (4, 16)
    assert [saving.cache_id for saving in store.saving] == [3]


def test_the_rate_of_copies_follows_what_they_took(store: StoreScheduler) -> None:
    keep(store, 3, range(16))
    store.operations_before([], None)
    assert store.copied == 16 + 16 * 40
    store.apply_results(StepResults(seconds={SaveBlocks: 1.0}))
    assert store.copy_rate == pytest.approx(0.7e9 + 0.3 * 656)


def test_written_blocks_count_once_each_rank_has_written_them(
    store: StoreScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store.folder, "size", lambda _: 700)
    keep(store, 3, range(40))
    store.operations_before([], None)
    store.receive_reports([RankReport(blocks_written=2), RankReport(blocks_written=1)])
    assert store.metrics()["store_blocks_written"] == 1
    assert store.metrics()["store_disk_bytes"] == 700


def test_a_folder_that_cannot_be_written_to_ends_the_storing(store: StoreScheduler) -> None:
    keep(store, 3, range(40))
    store.operations_before([], 0.0)
    assert store.is_writing
    with pytest.warns(UserWarning, match="no more prefixes are stored: rank 1 cannot write"):
        store.receive_reports([RankReport(), RankReport(write_error=28)])
    assert not store.is_writing
    keep(store, 4, range(40))
    assert saved(store.operations_before([], None)) == []
    assert store.metrics()["store_stopped"] == 1
    assert not store.busy


def test_a_stored_prefix_is_loaded_before_its_prompt_begins(store: StoreScheduler) -> None:
    keep(store, 3, range(40))
    store.operations_before([], None)
    asked, opening = load(store, range(50))
    assert (opening.cache_id, opening.tokens) == (7, 49)
    assert [(block.stop, read_from) for block, read_from in opening.blocks] == [
        (16, ReadFrom.MEMORY),
        (32, ReadFrom.MEMORY),
    ]
    assert [store.holds_up(one) for one in (asked, request(range(60)), request(range(9, 60)))] == [True, True, False]
    assert store.tiers.pinned == {block for block, _ in opening.blocks}
    assert [type(one) for one in store.operations_before([], None)] == [LoadBlocks]
    assert store.receive_reports([RankReport(blocks_read=2), RankReport(blocks_read=1)]) == []
    assert store.origin_of(asked) is None
    assert store.receive_reports([RankReport(blocks_read=2)] * 2) == []
    assert store.origin_of(asked) == Origin(7, 32, moves=True)
    assert not store.tiers.pinned
    assert store.operations_before([], None) == [CloseStored(7, 32)]
    assert not store.holds_up(asked)
    store.note_begun(asked)
    assert not store.holds_memory


def test_a_prefix_is_loaded_where_it_is_longer_than_others_and_fits(store: StoreScheduler) -> None:
    keep(store, 3, range(40))
    store.operations_before([], None)
    asked = request(range(50))
    assert not store.begin_loading(asked, 20, count(), lambda: True)
    assert not store.begin_loading(asked, 16, count(), lambda: False)
    assert store.begin_loading(asked, 16, count(), lambda: True)


def test_a_damaged_block_and_those_after_it_are_computed_again(store: StoreScheduler) -> None:
    keep(store, 3, range(40))
    store.operations_before([], None)
    asked, _ = load(store, range(50))
    store.receive_reports([RankReport(blocks_read=1, is_damaged=True)])
    assert store.origin_of(asked) == Origin(7, 16, moves=True)
    assert store.metrics()["store_blocks_damaged"] == 1


def test_a_damaged_block_is_forgotten_and_later_ones_are_not_in_memory(store: StoreScheduler) -> None:
    """Those before it are read, and later ones stay in the folder."""
    first, damaged, later = (StoredBlock(f"{number:032x}", number * 16, number * 16 + 16) for number in range(3))
    for block in (first, damaged, later):
        store.tiers.add(store.tiers.memory, block, TierEntry(1))
        store.tiers.add(store.tiers.disk, block, TierEntry(1))
    blocks = [BlockToRead(block, ReadFrom.DISK_TO_MEMORY) for block in (first, damaged, later)]
    store.loading = LoadingCache(request(range(50)), 7, blocks, 49)
    store.receive_reports([RankReport(blocks_read=1, is_damaged=True)])
    assert [*store.tiers.memory.blocks] == [first]
    assert [*store.tiers.disk.blocks] == [first, later]


def test_a_damaged_block_leaves_no_prefix_to_layers_that_forget(store: StoreScheduler) -> None:
    """Their state is that after all blocks, which no other request waits for."""
    keep(store, 3, range(40))
    store.operations_before([], None)
    asked, _ = load(store, range(50))
    store.forgets = True
    assert [store.holds_up(one) for one in (asked, request(range(60)))] == [True, False]
    assert store.receive_reports([RankReport(blocks_read=1, is_damaged=True)]) == [7]
    assert store.operations_before([], None)[-1] == CloseStored(7, 0)
    assert store.origin_of(asked) is None


def test_blocks_of_which_ranks_hold_other_tokens_are_read_from_the_folder(store: StoreScheduler) -> None:
    keep(store, 3, range(40))
    store.operations_before([], None)
    for block in [*store.tiers.memory.blocks]:
        store.tiers.add(store.tiers.disk, block, TierEntry(1))
    store.template.block = 32
    _, opening = load(store, range(50))
    assert [read_from for _, read_from in opening.blocks] == [ReadFrom.DISK] * 2


def test_a_cache_that_was_loaded_for_a_request_that_has_ended_is_dropped(store: StoreScheduler) -> None:
    keep(store, 3, range(40))
    store.operations_before([], None)
    asked, _ = load(store, range(50))
    store.receive_reports([RankReport(blocks_read=2)])
    asked.cancel()
    assert store.receive_reports([RankReport()]) == [7]


def test_no_room_for_a_loaded_cache_lets_its_request_begin(store: StoreScheduler) -> None:
    keep(store, 3, range(40))
    store.operations_before([], None)
    asked, _ = load(store, range(50))
    store.apply_results(StepResults(errors={OpenStored: KernelError("a", "b", "c", "d")}))
    assert not store.tiers.pinned
    assert not store.holds_up(asked)
    assert not store.begin_loading(asked, 0, count(), lambda: True)  # it is tried once


def test_a_copy_that_failed_ends_the_engine(store: StoreScheduler) -> None:
    with pytest.raises(KernelError):
        store.apply_results(StepResults(errors={SaveBlocks: KernelError("a", "b", "c", "d")}))
