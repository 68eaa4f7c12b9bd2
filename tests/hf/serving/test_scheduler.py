"""Steps of a scheduler, without a model: what each plans, and what becomes of its results."""

from typing import Any

import pytest

from attnmesh.errors import KernelError, ShapeError, TooLong
from attnmesh.hf.serving.engine_store import NoStore
from attnmesh.hf.serving.guesses import Guesser
from attnmesh.hf.serving.operations import (
    Crop,
    Drop,
    ForgetBlocks,
    LoadBlocks,
    OpenStored,
    Operation,
    SaveBlocks,
    StepResults,
)
from attnmesh.hf.serving.rank_report import RankReport
from attnmesh.hf.serving.scheduler import Scheduler
from tests.support.serving.fake_caches import FakeFootprint, FakeWorker, SamePace, fake_growth, request


class Steps:
    """A scheduler whose plans are run without a model."""

    def __init__(self, *, limit: int = 10**6, guesser: Guesser | None = None) -> None:
        self.worker: Any = FakeWorker()
        self.scheduler = Scheduler(self.worker, 4, limit, None, None, guesser)
        footprint: Any = FakeFootprint()
        self.scheduler.memory.footprint = footprint

    def ask(self, *prompts: Any, **fields: Any) -> list[Any]:
        asked = [request(prompt, **fields) for prompt in prompts]
        self.scheduler.requests.waiting += asked
        return asked

    def step(self) -> list[str]:
        """Run a step. Return the names of its operations."""
        self.scheduler.update_requests()
        step = self.scheduler.plan()
        self.scheduler.receive_reports([RankReport(self.worker.nbytes)])
        self.scheduler.apply_results(step, self.worker.run(step.operations))
        return [operation.name for operation in step.operations]

    def run(self) -> list[list[str]]:
        """Run steps until nothing is left to do."""
        steps = list[list[str]]()
        while self.scheduler.busy:
            steps.append(self.step())
            assert len(steps) < 500
        return steps


def answer(prompt: Any, new: int = 4) -> list[int]:
    return [prompt[-1] + 1 + index for index in range(new)]


def test_a_request_has_its_prompt_and_then_a_token_in_each_step() -> None:
    steps = Steps()
    (asked,) = steps.ask(range(9))
    assert steps.run() == [["start", "fill"], ["rows"], ["rows"], ["rows"]]
    assert [token.id for token in asked] == answer(range(9))
    assert asked.finish_reason == "length"
    assert [*steps.scheduler.memory.kept_caches.kept] == [asked.cache_id]
    metrics = steps.scheduler.metrics()
    assert (metrics["tokens"], metrics["prompt_tokens"], metrics["steps"]) == (4, 9, 3)
    assert (metrics["running"], metrics["filling"], metrics["kept"], metrics["cache_bytes"]) == (0, 0, 1, [11.0])


def test_prompts_begin_beside_rows() -> None:
    steps = Steps()
    first, second = steps.ask(range(9), range(100, 109))
    assert steps.run()[1] == ["rows", "start", "fill"]
    assert (first.answer, second.answer) == (answer(range(9)), answer(range(100, 109)))


class Guesses(Guesser):
    """Guesses three tokens, of which the last is wrong."""

    def guess(self, rows: Any, times: Any, free: Any) -> None:
        for row in rows:
            following = row.answer[-1] + 1
            row.guesses.ids = [following, following + 1, 0]
            row.guesses.checked = row.guesses.ids[: row.room]


def test_guesses_that_are_not_drawn_are_taken_back() -> None:
    steps = Steps(guesser=Guesses())
    (asked,) = steps.ask(range(9), new=9)
    assert steps.run() == [["start", "fill"], ["rows"], ["crop", "rows"], ["crop", "rows"]]
    assert asked.answer == answer(range(9), 9)
    counts = steps.scheduler.counts
    assert (counts["steps"], counts["drafted_tokens"], counts["accepted_tokens"]) == (3, 7, 5)


class Stored(NoStore):
    """A store with work before and after the operations of each step."""

    def __init__(self) -> None:
        self.drops: list[int] = []

    def operations_before(self, drops: Any, seconds: Any) -> list[Operation]:
        self.drops = [*drops]
        return [ForgetBlocks([], []), SaveBlocks(0, []), LoadBlocks(0, 1, 0.0)]

    def operations_after(self) -> list[Operation]:
        return [OpenStored(99, [], 0, [], [])]


def test_operations_have_the_order_that_each_of_them_needs() -> None:
    steps = Steps(guesser=Guesses())
    steps.scheduler.pace = SamePace(None)
    going, ending, _ = steps.ask(range(9), range(100, 109), [*range(200, 600), 1], new=20)
    for _ in range(4):
        steps.step()  # two rows, with guesses that were wrong, and a prompt that is computed in part
    (prompt,) = steps.scheduler.requests.prefilling
    steps.worker.caches[prompt.cache_id].crops_anywhere = False
    prompt.fork_points.add(prompt.computed_tokens)
    store = steps.scheduler.store = Stored()
    steps.ask(range(700, 709))
    steps.scheduler._end(ending, "stop", keep=False)
    steps.scheduler.requests.rows.remove(ending)
    steps.scheduler.update_requests()
    step = steps.scheduler.plan()
    names = [operation.name for operation in step.operations]
    assert names == ["crop", "forget", "save", "load", "drop", "rows", "fork", "fill", "open"]
    assert store.drops == [ending.cache_id]
    crop, drop = (step.operations[names.index(name)] for name in ("crop", "drop"))
    assert isinstance(crop, Crop)
    assert [cache_id for cache_id, _ in crop.rows] == [going.cache_id, ending.cache_id]  # though the step drops it
    assert drop == Drop([ending.cache_id])


def test_a_row_that_cannot_go_on_ends_alone() -> None:
    steps = Steps()
    asked = steps.ask(*([100 * n] * 20 for n in range(1, 5)), new=6)
    decode = steps.worker.do_rows

    def failing(rows: Any, grows: bool) -> Any:
        caches = [steps.worker.caches[cache_id].ids for cache_id, _ in rows]
        if any(held[0] == 200 and len(held) >= 22 for held in caches):
            raise ShapeError("KVCache capacity", "tokens that fit", "no room", "wait")
        return decode(rows, grows)

    steps.worker.do_rows = failing
    steps.run()
    assert [one.finish_reason for one in asked] == ["length", "error", "length", "length"]
    assert [one.answer for one in asked if one.finish_reason == "length"] == [answer([100 * n], 6) for n in (1, 3, 4)]
    assert asked[1].answer == answer([200], 4)
    assert not any(one.suspected for one in asked if one.finish_reason == "length")


def test_a_prompt_that_cannot_begin_ends_alone() -> None:
    steps = Steps()
    begin = steps.worker.do_start

    def failing(start: Any) -> int:
        if start.ids[0] == 5:
            raise KernelError("prompt", "a", "b", "c")
        return int(begin(start))

    def nothing(cache_id: int, size: int, stop: int) -> Any:
        return fill(cache_id, size, stop) if cache_id in steps.worker.prompts else (0, None)

    fill, steps.worker.do_start, steps.worker.do_fill = steps.worker.do_fill, failing, nothing
    bad, good = steps.ask([5, 6], [7, 8])
    steps.run()
    assert (bad.finish_reason, good.answer) == ("error", answer([8]))
    with pytest.raises(KernelError):
        next(iter(bad))


def test_caches_that_cannot_take_tokens_back_end_the_engine() -> None:
    steps = Steps()
    results = StepResults(errors={Crop: KernelError("crop", "a", "b", "c")})
    with pytest.raises(KernelError):
        steps.scheduler.apply_results(steps.scheduler.plan(), results)


@pytest.mark.parametrize("limit", [60, 45])
def test_the_youngest_request_goes_back_for_want_of_memory(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("cache_memory", "prompt_queue"):
        monkeypatch.setattr(f"attnmesh.hf.serving.{module}.growth", fake_growth)
    steps = Steps(limit=limit)
    asked = steps.ask(*([100 * n] * 10 for n in range(1, 4)), new=20)
    most = 0
    while steps.scheduler.busy:
        steps.step()
        most = max(most, steps.worker.nbytes)
    assert [one.answer for one in asked] == [answer([100 * n], 20) for n in (1, 2, 3)]
    assert steps.scheduler.counts["preempted"]
    assert most <= limit


def test_guesses_go_before_a_row_does(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("cache_memory", "prompt_queue"):
        monkeypatch.setattr(f"attnmesh.hf.serving.{module}.growth", fake_growth)
    steps = Steps(limit=28, guesser=Guesses())
    asked = steps.ask([100] * 10, [200] * 10, new=6)
    steps.run()
    assert [one.answer for one in asked] == [answer([100 * n], 6) for n in (1, 2)]
    assert steps.scheduler.counts["preempted"] == 0


def test_few_caches_are_kept() -> None:
    """Each prompt is compared with the tokens of all of them."""
    steps = Steps()
    steps.ask(*([100 * n] * 5 for n in range(1, 10)), new=1)
    steps.run()
    steps.scheduler.update_requests()
    assert len(steps.scheduler.memory.kept_caches.kept) == 8  # of four rows


@pytest.mark.parametrize("is_forked", [False, True])
def test_a_request_that_outgrows_the_memory_alone_is_refused(is_forked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """One whose cache may share memory with others is computed again first: alone it may fit."""
    monkeypatch.setattr("attnmesh.hf.serving.cache_memory.growth", fake_growth)
    steps = Steps(limit=20)
    (asked,) = steps.ask(range(15), new=30)
    steps.step()
    asked.is_forked = is_forked
    steps.run()
    assert steps.scheduler.counts["preempted"] == is_forked
    assert len(asked.answer) == 6
    with pytest.raises(TooLong, match="at most 20 bytes a rank, given 21 bytes"):
        list(asked)


def test_a_replay_counts_the_tokens_of_its_prompt_that_a_cache_had() -> None:
    steps = Steps()
    steps.worker.hold(90, range(30))
    steps.scheduler.memory.kept_caches.keep(90, "")
    (asked,) = steps.ask(range(20), answer=[*range(20, 30)], new=12)
    steps.run()
    assert (asked.cached_tokens, steps.scheduler.counts["cached_tokens"]) == (20, 29)


def test_cancelled_requests_end_with_the_next_step() -> None:
    steps = Steps()
    row, waiting = steps.ask(range(9), range(100, 109), new=50)
    steps.step()
    waiting.cancel()
    steps.step()
    row.cancel()
    assert steps.step() == []
    assert (row.finish_reason, waiting.finish_reason) == ("cancelled", "cancelled")
    assert [*steps.scheduler.memory.kept_caches.kept] == [row.cache_id]


def test_caches_of_answers_that_prompts_compute_otherwise_are_not_kept() -> None:
    steps = Steps()
    steps.worker.recomputes_by_token = True
    cancelled, _ = steps.ask(range(9), range(100, 109), new=5)
    for _ in range(3):
        steps.step()
    cancelled.cancel()
    steps.run()
    kept_caches = steps.scheduler.memory.kept_caches
    assert {*kept_caches.kept} == kept_caches.snapshots


def test_all_requests_end_with_the_engine() -> None:
    steps = Steps()
    asked = steps.ask(range(600), range(700, 709), range(800, 809))
    steps.step()
    steps.scheduler.end_all("cancelled")
    assert [one.finish_reason for one in asked] == ["cancelled"] * 3
    assert not steps.scheduler.busy
