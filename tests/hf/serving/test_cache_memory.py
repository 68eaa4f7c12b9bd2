"""The memory of caches: kept ones go for others, the least recently used first."""

from typing import Any

from attnmesh.hf.serving.cache_memory import CacheMemory
from attnmesh.hf.serving.guesses import Guesser
from attnmesh.hf.serving.step_plan import StepPlan
from tests.support.serving.fake_caches import FakeFootprint, FakeWorker, request


class Releasing(Guesser):
    """Has a cache of its own, which it gives back once."""

    def __init__(self, worker: FakeWorker, cache_id: int) -> None:
        self.worker = worker
        self.cache_id = cache_id

    def release(self) -> bool:
        return self.worker.caches.pop(self.cache_id, None) is not None


def memory_of(*tokens: int, limit: int = 100) -> CacheMemory:
    """Return a memory in which caches of so many tokens are kept."""
    worker: Any = FakeWorker()
    memory = CacheMemory(worker, limit, Guesser())
    for cache_id, count in enumerate(tokens):
        worker.hold(cache_id, range(count))
        memory.kept_caches.keep(cache_id, "", is_snapshot=True)
    return memory


def test_kept_caches_go_until_there_is_room() -> None:
    memory, step = memory_of(30, 20, 10), StepPlan()
    assert memory.free(step) == 40
    assert memory.make_room(step, 75)
    assert memory.drops == [0, 1]
    assert memory.evicted == 2
    assert memory.free(step) == 90  # though the next step drops them
    assert not memory.make_room(step, 101)


def test_promised_bytes_count_as_held_ones() -> None:
    memory, step = memory_of(30), StepPlan(promised=50)
    assert memory.free(step) == 20
    assert memory.make_room(step, 20)
    assert memory.drops == []


def test_bytes_are_promised_only_if_they_fit() -> None:
    memory, step = memory_of(30), StepPlan()
    assert not memory.reserve(step, 40, beside=31, spared=[0])
    assert memory.reserve(step, 40, beside=30)
    assert not memory.reserve_free(step, 31)
    assert (step.promised, memory.drops) == (40, [])
    assert memory.reserve_free(step, 30)
    assert not memory.reserve(step, 31)  # though the kept cache went for it
    assert (step.promised, memory.drops) == (70, [0])


def test_the_cache_that_a_prompt_goes_on_from_stays() -> None:
    memory, step = memory_of(30, 20, 10), StepPlan(spared={0})
    assert not memory.make_room(step, 90, spared=[1])
    assert memory.drops == [2]


def test_caches_of_guesses_go_last() -> None:
    memory, step = memory_of(30, 20), StepPlan()
    worker: Any = memory.worker
    memory.guesser = Releasing(worker, 1)
    memory.kept_caches.stop_keeping(1)
    assert memory.make_room(step, 100)
    assert memory.drops == [0]
    assert 1 not in worker.caches
    assert not memory.make_room(step, 101)


def test_the_fullest_rank_counts() -> None:
    memory, step = memory_of(20), StepPlan()
    memory.worker.fullest_ratio = 2.0  # type: ignore[misc]
    assert memory.free(step) == 60
    memory.note_bytes([20, 55])  # 15 more than its share
    assert memory.free(step) == 45


def test_only_so_many_caches_are_kept() -> None:
    memory = memory_of(1, 2, 3)
    memory.keep_at_most(1)
    assert [*memory.kept_caches.kept] == [2]
    assert memory.pop_drops() == [0, 1]
    assert memory.drops == []


def test_a_cache_without_tokens_grows_by_all_that_it_will_hold() -> None:
    memory, asked = memory_of(), request([1])
    asked.cache_id = 0
    worker: Any = memory.worker
    worker.hold(0, [])
    assert memory.growth(asked, 9) == 0  # the first cache shows the bytes
    footprint: Any = FakeFootprint()
    memory.footprint = footprint
    assert memory.growth(asked, 9) == 9
    assert memory.bytes_of(9, shared=4) == 5
