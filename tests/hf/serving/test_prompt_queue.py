"""Prompts in turn: which begins, from which cache, and whose chunk is next."""

from typing import Any

import pytest

from attnmesh.errors import TooLong
from attnmesh.hf.serving import prompt_queue
from attnmesh.hf.serving.cache_memory import CacheMemory
from attnmesh.hf.serving.chunk_pace import ChunkPace
from attnmesh.hf.serving.engine_request import EngineRequest, Origin
from attnmesh.hf.serving.engine_store import NoStore
from attnmesh.hf.serving.guesses import Guesser
from attnmesh.hf.serving.operations import Fill, Fork, Operation, Start
from attnmesh.hf.serving.prompt_queue import PromptQueue
from attnmesh.hf.serving.step_plan import ServedRequests, StepPlan
from tests.support.serving.fake_caches import FakeFootprint, FakeWorker, fake_growth, request

CHUNK = 256
"""Tokens of a chunk whose speed is not known."""


class Queue:
    """A queue, whose operations are run without a model."""

    def __init__(self, *, limit: int = 10**6, max_rows: int = 8, crops_anywhere: bool = True) -> None:
        self.worker: Any = FakeWorker(crops_anywhere=crops_anywhere)
        self.requests = ServedRequests()
        self.memory = CacheMemory(self.worker, limit, Guesser())
        footprint: Any = FakeFootprint()
        self.memory.footprint = footprint
        self.prompts = PromptQueue(self.worker, self.requests, self.memory, NoStore(), max_rows)
        self.pace = ChunkPace(None)

    def ask(self, *prompts: Any, **fields: Any) -> list[EngineRequest]:
        asked = [request(prompt, **fields) for prompt in prompts]
        self.requests.waiting += asked
        return asked

    def step(self) -> list[Operation]:
        """Plan and run a step. Return its operations."""
        step = StepPlan()
        operations = self.prompts.plan(step, self.pace)
        results = self.worker.run(operations)
        if step.starting is not None:
            step.starting.computed_tokens = results.cached_tokens or 0
        if step.computing is not None:
            step.computing.computed_tokens = results.computed_tokens
            if results.logits is not None:
                self.requests.prefilling.remove(step.computing)
                self.requests.rows.append(step.computing)
        return operations

    def keep(self, cache_id: int, ids: Any, *, snapshot: bool = False) -> None:
        self.worker.hold(cache_id, ids)
        self.memory.kept_caches.keep(cache_id, "", is_snapshot=snapshot)


def chunks(operations: list[Operation]) -> list[int]:
    return [operation.cache_id for operation in operations if isinstance(operation, Fill)]


def test_a_prompt_begins_and_is_computed_in_chunks() -> None:
    queue = Queue()
    (asked,) = queue.ask(range(300))
    assert queue.step() == [Start(0, [*range(300)], None, False, 0, []), Fill(0, CHUNK, 300)]
    assert queue.step() == [Fill(0, 300 - CHUNK, 300)]
    assert queue.requests.rows == [asked]
    assert queue.step() == []


def test_the_shortest_rest_goes_first_and_each_third_chunk_is_of_the_oldest() -> None:
    queue = Queue()
    queue.ask(range(3000), *([n] * 600 for n in range(3001, 3004)))
    order = [cache_id for _ in range(9) for cache_id in chunks(queue.step())]
    assert order == [0, 1, 0, 1, 1, 0, 2, 2, 0]


def test_no_more_requests_run_than_may() -> None:
    queue = Queue(max_rows=2)
    queue.ask([1], [2], [3])
    for _ in range(3):
        queue.step()
    assert len(queue.requests.rows) == 2
    assert len(queue.requests.waiting) == 1


@pytest.mark.parametrize("snapshot", [False, True])
def test_a_prompt_goes_on_from_the_longest_kept_cache(snapshot: bool) -> None:
    queue = Queue()
    queue.keep(90, range(20))
    queue.keep(91, range(50), snapshot=snapshot)
    queue.keep(92, range(1000, 1100))
    queue.prompts.new_cache_ids = iter([7])  # type: ignore[assignment]
    queue.ask(range(60))
    start, fill = queue.step()
    assert isinstance(start, Start)
    assert (start.source, start.moves) == (91, not snapshot)
    assert fill == Fill(7, 10, 60)


def test_a_prompt_that_begins_as_another_waits_for_its_cache() -> None:
    queue = Queue()
    first, second = queue.ask([*range(400), 1], [*range(400), 2])
    queue.step()
    assert queue.requests.waiting == type(queue.requests.waiting)([second])
    assert queue.step() == [Fill(0, 400 - CHUNK, 400)]  # up to where they part
    start, *_ = queue.step()
    assert isinstance(start, Start)
    assert (start.source, start.moves) == (0, False)
    assert first.passed_fork_points == {400}


def test_a_cache_that_cannot_go_back_is_forked_where_prompts_part() -> None:
    queue = Queue(crops_anywhere=False)
    queue.ask([*range(400), 1], [*range(400), 2])
    for _ in range(2):
        queue.step()
    start, fork, *_ = queue.step()
    assert isinstance(start, Start)
    assert (start.source, start.moves, fork) == (0, False, Fork(0, 2))
    while queue.step():
        pass
    queue.ask([*range(400), 3])
    start, fill = queue.step()
    assert isinstance(start, Start)
    assert (start.source, start.moves, fill) == (2, False, Fill(3, 1, 401))  # the fork, which others need yet


@pytest.mark.parametrize(("shared", "fork_points"), [(60, set()), (66, {66})])
def test_a_cache_is_forked_where_prompts_part_if_that_saves_much(shared: int, fork_points: set[int]) -> None:
    queue = Queue(crops_anywhere=False)
    queue.keep(90, range(50), snapshot=True)
    queue.keep(91, [*range(shared), 1000])
    (asked,) = queue.ask([*range(shared), 2000, 2001])
    queue.step()
    assert asked.fork_points == fork_points


def test_of_requests_that_may_have_failed_a_step_one_runs() -> None:
    queue = Queue()
    first, second, third = queue.ask(range(20), range(100, 120), range(200, 220))
    first.suspected = second.suspected = True
    for _ in range(4):
        queue.step()
    assert queue.requests.rows == [first, third]
    first.suspected = False
    queue.step()
    assert queue.requests.rows == [first, third, second]


class Loaded(NoStore):
    """A store that has loaded a cache for each request."""

    def __init__(self, origin: Origin) -> None:
        self.origin = origin

    def origin_of(self, request: EngineRequest) -> Origin | None:
        return self.origin


@pytest.mark.parametrize(("kept", "source", "drops"), [(20, 50, []), (40, 90, [50])])
def test_a_loaded_cache_goes_if_a_prompt_goes_on_from_another(kept: int, source: int, drops: list[int]) -> None:
    queue = Queue()
    queue.prompts.store = Loaded(Origin(50, 30, moves=True))
    queue.worker.hold(50, range(30))
    queue.keep(90, range(kept))
    queue.ask(range(60))
    start, *_ = queue.step()
    assert isinstance(start, Start)
    assert (start.source, queue.memory.drops) == (source, drops)


class WithChunks(FakeFootprint):
    """Bytes of caches, where each chunk takes memory of its own."""

    def chunk_bytes(self, tokens: int) -> int:
        return 30


def test_the_caches_of_a_step_do_not_go_for_its_chunk() -> None:
    """A cache that a prompt goes on from, and one that is forked: they would be dropped too early."""
    queue = Queue(crops_anywhere=False)
    footprint: Any = WithChunks()
    queue.memory.footprint = footprint
    queue.keep(90, range(50), snapshot=True)
    (asked,) = queue.ask(range(60))
    queue.memory.limit = 80  # 10 for the prompt, and 20 of the 30 that its chunk takes
    assert [type(operation) for operation in queue.step()] == [Start]
    assert queue.memory.drops == []
    queue.memory.evict(90)
    queue.worker.do_drop(queue.memory.pop_drops())
    asked.fork_points.add(50)
    queue.memory.limit = 100  # for the fork alone
    assert queue.step() == [Fork(0, 1)]
    assert queue.memory.drops == []


def test_a_prompt_that_has_no_room_beside_a_loaded_cache_waits() -> None:
    queue, store = Queue(limit=310), NoStore()
    queue.prompts.store, store.holds_memory = store, True
    queue.worker.hold(50, range(1000, 1030))
    (asked,) = queue.ask(range(300))
    assert queue.step() == []
    assert asked.finish_reason is None
    queue.worker.do_drop([50])
    assert isinstance(queue.step()[0], Start)


def test_a_prompt_that_is_asked_again_goes_on_from_its_fork() -> None:
    """Answers are computed by another rule than prompts: their caches are of no use for prompts."""
    queue = Queue(crops_anywhere=False)
    queue.worker.recomputes_by_token = True
    queue.ask(range(40))
    while queue.step():
        pass
    assert queue.memory.kept_caches.snapshots == {1}
    queue.ask(range(40))
    start, fill = queue.step()
    assert isinstance(start, Start)
    assert (start.source, fill) == (1, Fill(2, 1, 40))


def test_a_prompt_waits_until_others_leave_room() -> None:
    queue = Queue(limit=500)
    queue.ask(range(400))
    queue.step()
    (late,) = queue.ask(range(1000, 1200))  # with the rest of the first it has no room
    queue.step()
    assert [*queue.requests.waiting] == [late]
    queue.requests.rows.clear()
    queue.worker.caches.clear()
    queue.step()
    assert not queue.requests.waiting


def test_kept_caches_go_for_a_prompt() -> None:
    queue = Queue(limit=400)
    queue.keep(90, range(1000, 1200))
    queue.ask(range(300))
    queue.step()
    assert queue.memory.drops == [90]


def test_the_cache_that_a_prompt_goes_on_from_stays_for_it() -> None:
    queue = Queue(limit=85)
    queue.keep(90, range(50), snapshot=True)
    queue.keep(91, range(1000, 1030))
    queue.ask(range(60))
    start, *_ = queue.step()
    assert isinstance(start, Start)
    assert (start.source, queue.memory.drops) == (90, [91])


def test_the_cache_that_a_prompt_could_go_on_from_goes_if_nothing_else_does() -> None:
    queue = Queue(limit=80)
    queue.keep(90, [*range(20), *range(1000, 1040)], snapshot=True)
    queue.ask(range(60))
    start, *_ = queue.step()
    assert isinstance(start, Start)
    assert (start.source, queue.memory.drops) == (None, [90])


def test_a_prompt_that_can_never_fit_is_refused() -> None:
    queue = Queue(limit=200)
    (asked,) = queue.ask(range(300))
    assert queue.step() == []
    with pytest.raises(TooLong, match="caches of at most 200 bytes a rank, given 300 bytes"):
        next(iter(asked))


def test_chunks_get_shorter_where_memory_ends_and_no_other_prompt_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attnmesh.hf.serving.cache_memory.growth", fake_growth)
    monkeypatch.setattr(prompt_queue, "growth", fake_growth)
    queue = Queue(limit=600)
    queue.ask(range(500))
    queue.step()
    queue.memory.limit = CHUNK + 100
    assert chunks(queue.step()) == [0]
    assert queue.worker.caches[0].get_seq_length() == CHUNK + 61  # a quarter of the 244 that are left
    queue.memory.limit = CHUNK + 61
    queue.ask([5])
    assert queue.step() == []
    assert queue.prompts.is_full
    assert queue.step() == []
    assert len(queue.requests.waiting) == 1


def test_a_replay_that_is_whole_ends() -> None:
    queue = Queue()
    (asked,) = queue.ask([1, 2], new=2, answer=[3, 4])
    assert queue.step() == []
    assert asked.finish_reason == "length"
