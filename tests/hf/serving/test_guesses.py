"""Guesses that are checked: each answer has the tokens of an engine without guesses, however good or bad they are."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

import attnmesh.hf as hf
from attnmesh.hf.serving.guesses import LATER, SOON, StepTimes
from attnmesh.hf.serving.rank_worker import RankWorker
from attnmesh.mesh.shapes import AXES, Shape
from tests.support.models import families
from tests.support.models.tiny_models import Case, build
from tests.support.ranks.pool import Pool, on_each_rank
from tests.support.serving.engines import (
    FEW_BYTES,
    OPTIONS,
    asked,
    greedy,
    guessing,
    ids,
    model_of,
    running,
    storing,
    tokens,
)
from tests.support.truth.mesh_problems import named_mesh
from tests.support.truth.seeds import pairs
from tests.support.truth.tolerances import FLOAT32_MODEL


@on_each_rank
def compare_with_no_guesses(family: str, shape: Shape, changes: dict[str, Any]) -> None:
    """Compare streams that run together, each with other options, with those of an engine without guesses."""
    model, mesh = families.model(family, "attnmesh"), named_mesh(shape, AXES)
    texts = [ids(length, seed=length) for length in (70, 2, 37, 5, 20, 3)]
    asked = [(text, {"max_new_tokens": 12 + 2 * row, **OPTIONS[row]}) for row, text in enumerate(texts)]
    wanted: list[Any] = []
    with running(model, mesh, **changes) as engine:
        if engine is not None:
            wanted = [[*engine.submit(text, **options)] for text, options in asked]
    answers = [text + [token.id for token in answer] for (text, _), answer in zip(asked, wanted, strict=False)]
    with guessing(answers), running(model, mesh, speculate="ngram:6", max_rows=4, **changes) as engine:
        if engine is None:
            return
        streams = [engine.submit(text, **options) for text, options in asked]
        given = [[*stream] for stream in streams]
        assert [[token.id for token in one] for one in given] == [[token.id for token in one] for one in wanted]
        for one, other in zip(given[4], wanted[4], strict=True):
            assert one.logprob == pytest.approx(other.logprob, abs=FLOAT32_MODEL)
        again = engine.submit(texts[1], replay=streams[1].answer[:7], **asked[1][1])
        assert tokens(again) == streams[1].answer[7:]
        stop = wanted[0][8].id
        stream = engine.submit(texts[0], stop_ids=[stop], **asked[0][1])
        assert (tokens(stream), stream.finish_reason) == (answers[0][70 : answers[0].index(stop, 70)], "stop")
        figures = engine.metrics()
        assert 0 < figures["accepted_tokens"] < figures["drafted_tokens"]
        assert figures["steps"] + figures["accepted_tokens"] >= max(map(len, wanted))


@pytest.mark.parametrize(
    ("family", "shape"),
    pairs(["gemma3", "llama4", "llama", "gpt-oss"], [Shape(1, 1, 2), Shape(1, 1, 1), Shape(2, 1, 1)], 1),
)
def test_answers_are_those_without_guesses(family: str, shape: Shape, pool: Pool) -> None:
    pool.run(shape.ranks, compare_with_no_guesses, family, shape, {})


@pytest.mark.parametrize(
    "changes",
    [
        {"storage": "int8", "windows": False},
        pytest.param({"merge": "gather", "block": 4, "checked": True}, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_answers_are_those_without_guesses_with_options_of_caches(changes: dict[str, Any], pool: Pool) -> None:
    pool.run(2, compare_with_no_guesses, "gemma3", Shape(1, 1, 2), changes)


@on_each_rank
def guess_in_shares_of_weights(ranks: int) -> None:
    """Compare ranks that share weights and keys with one rank."""
    prompts = [ids(length, seed=length) for length in (70, 1, 22)]
    wanted = [greedy(families.model("llama", "attnmesh"), text, 20, mesh=None) for text in prompts]
    mesh = named_mesh(Shape(1, 1, ranks), AXES)
    assert mesh is not None
    model = hf.tensor_parallel(families.model("llama", "attnmesh"), mesh["keys"], output="heads")
    answers = [text + answer for text, answer in zip(prompts, wanted, strict=True)]
    with guessing(answers), running(model, mesh, output="heads", speculate="ngram") as engine:
        if engine is not None:
            streams = [engine.submit(text, max_new_tokens=20) for text in prompts]
            assert [tokens(stream) for stream in streams] == wanted
            assert engine.metrics()["accepted_tokens"]


@pytest.mark.long
def test_ranks_that_share_weights_give_the_same(pool: Pool) -> None:
    pool.run(3, guess_in_shares_of_weights, 3)


@on_each_rank
def guess_one_by_one(name: str) -> None:
    """Guess tokens of models whose rows are computed one at a time."""
    model, texts = build(Case(name, name), "attnmesh", torch.float32), [ids(40), ids(9, seed=1)]
    wanted = [greedy(model, text, 16, mesh=None) for text in texts]
    answers = [text + answer for text, answer in zip(texts, wanted, strict=True)]
    with guessing(answers), running(model, None, speculate="ngram") as engine:
        assert engine is not None
        streams = [engine.submit(text, max_new_tokens=16) for text in texts]
        assert [tokens(stream) for stream in streams] == wanted
        assert engine.metrics()["accepted_tokens"]


@pytest.mark.parametrize("name", ["gpt2", pytest.param("deepseek_v32", marks=pytest.mark.long)])
def test_models_whose_rows_are_computed_alone_give_the_same(name: str, pool: Pool) -> None:
    pool.run(1, guess_one_by_one, name)


# --- caches after guesses that did not stand ---


@on_each_rank
def check_kept_prefixes(ranks: int, folder: Path) -> None:
    """Go on after answers whose last guesses did not stand: from a kept cache, and from the store of another engine."""
    model, mesh = model_of("llama"), named_mesh(Shape(1, 1, ranks), AXES)
    first = ids(150)
    answer = greedy(model, first, 40, mesh=mesh)
    turns = [first + answer[:count] + ids(13, seed=count) for count in (40, 33)]
    wanted = [greedy(model, turn, 9, mesh=mesh) for turn in turns]
    wrong = first + answer[:38] + [(token + 1) % 97 for token in answer[38:]] + [5] * 9
    for begun in (True, False):
        with guessing([wrong], seed=1), storing(model, mesh, folder, speculate="ngram:12") as engine:
            if engine is None:
                continue
            if begun:
                assert asked(engine, first, 40)[0] == answer
                assert engine.metrics()["drafted_tokens"] > engine.metrics()["accepted_tokens"]
            for turn, after in zip(turns, wanted, strict=True):
                found, cached = asked(engine, turn, 9)
                assert found == after
                assert cached >= 176  # whole blocks of 16 of the 183 tokens that are the same


@pytest.mark.parametrize("ranks", [2])
def test_what_is_kept_and_stored_has_no_guesses(ranks: int, pool: Pool, tmp_path: Path) -> None:
    pool.run(ranks, check_kept_prefixes, ranks, tmp_path)


@on_each_rank
def check_memory_of_guesses(ranks: int) -> None:
    """Guess with memory for few requests, of which some are put back: caches stay within it."""
    model, mesh, limit = families.model("llama", "attnmesh"), named_mesh(Shape(1, 1, ranks), AXES), FEW_BYTES // ranks
    texts = [ids(length, seed=length) for length in (90, 60, 30, 120, 45, 75)]
    wanted = [greedy(model, text, 60, mesh=None) for text in texts]
    most, run = list[int](), RankWorker.run

    def watched(worker: RankWorker, plan: Any) -> Any:
        results = run(worker, plan)
        most.append(worker.count_bytes())
        return results

    answers = [text + answer for text, answer in zip(texts, wanted, strict=True)]
    options: dict[str, Any] = {"cache_memory": limit, "speculate": "ngram"}
    with patch.object(RankWorker, "run", watched), guessing(answers), running(model, mesh, **options) as engine:
        if engine is not None:
            streams = [engine.submit(text, max_new_tokens=60) for text in texts]
            assert [tokens(stream) for stream in streams] == wanted
            assert engine.metrics()["preempted"] or engine.metrics()["evicted"]
            assert engine.metrics()["accepted_tokens"]
    assert max(most) <= limit


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.long)])
def test_caches_with_guesses_never_take_more_than_their_memory(ranks: int, pool: Pool) -> None:
    pool.run(ranks, check_memory_of_guesses, ranks)


# --- the times of steps ---


def measured_times(seconds: Callable[[int, int], float], *steps: tuple[int, int]) -> StepTimes:
    """Return times of steps of so many rows and guesses, of which none was accepted."""
    times = StepTimes()
    for rows, guesses in steps:
        times.add(rows, guesses, seconds(rows, guesses))
    return times


def chosen_guesses(times: StepTimes, *rates: float, passes: Sequence[float] = ()) -> list[int]:
    return times.choose(rates, [8] * len(rates), passes, tries=False)


def test_guesses_are_checked_where_that_gives_more_tokens_in_a_second() -> None:
    """Steps of 50 ms, 5 ms for each row and 10 ms for a guess: a token of one row takes 55 ms, and of eight 11 ms."""
    steps = [(1, 0), (8, 0), (1, 8), (8, 40), (1, 3)]
    times = measured_times(lambda rows, guesses: 0.05 + 0.005 * rows + 0.01 * guesses, *steps)
    assert times.without_guesses(5) == pytest.approx(0.075)
    assert chosen_guesses(times, 1.0) == [8]
    assert 1 <= chosen_guesses(times, 0.6)[0] <= 3
    assert chosen_guesses(times, 0.2) == [0]
    assert chosen_guesses(times, *[0.7] * 8) == [0] * 8
    assert chosen_guesses(times, *[1.0] * 8) == [8] * 8
    assert chosen_guesses(times, 1.0, *[0.2] * 7) == [8, *[0] * 7]
    assert times.choose([1.0, 0.2, 1.0, *[0.2] * 5], [3, 8, *[0] * 6]) == [3, *[0] * 7]


def test_passes_of_a_draft_model_have_their_price() -> None:
    """A step takes 100 ms and a guess 1 ms: passes of 10 ms are worth it, those of 50 ms for many rows at once."""
    times = measured_times(lambda _, guesses: 0.1 + 0.001 * guesses, (1, 0), (8, 0), (1, 8), (8, 40))
    assert chosen_guesses(times, 0.9, passes=[0, 0.01]) == [8]
    assert 1 <= chosen_guesses(times, 0.6, passes=[0, 0.01])[0] <= 4
    assert chosen_guesses(times, 0.9, passes=[0, 0.2]) == [0]
    shared = [0, *(0.05 + 0.001 * rows for rows in range(1, 9))]
    assert all(chosen_guesses(times, *[0.9] * 8, passes=shared))
    assert chosen_guesses(times, 0.9, *[0.2] * 7, passes=shared) == [0] * 8


def test_a_step_without_guesses_is_measured_first_and_then_now_and_again() -> None:
    times = StepTimes()
    assert times.choose([0.9], [8]) == [0]
    counts = list[int]()
    for _ in range(160):
        counts += times.choose([0.9], [8])
        times.add(1, counts[-1], 0.1 + 0.01 * counts[-1], counts[-1])
    assert counts[:3] == [0, 8, 8]  # a trial shows what a guess takes
    later = SOON + 1 + (LATER + 1)  # each measurement is a step, too
    assert [place for place, count in enumerate(counts) if not count] == [0, SOON + 1, later, later + LATER + 1]
    assert times.choose([0.9, 0.9], [8, 8]) == [0, 0]  # of two rows there was none


@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize("price", [0.001, 0.2])
def test_one_slow_step_turns_guesses_neither_on_nor_off(rows: int, price: float) -> None:
    """One of twelve steps takes ten times as long, the first of each kind among them."""
    pays = price < 0.1
    counts = list[int]()
    times = StepTimes()
    for number in range(240):
        guesses = times.choose([0.9] * rows, [8] * rows)
        counts.append(sum(guesses))
        is_slow = number % 12 == 0 or (number == 1)
        times.add(rows, counts[-1], (0.1 + price * counts[-1]) * (10 if is_slow else 1), sum(guesses) // 2)
    assert sum(map(bool, counts[5:])) >= 190 if pays else sum(map(bool, counts[5:])) <= 12


def lost_share(times: StepTimes, steps: int, price: float) -> tuple[float, list[int]]:
    """Return the share of tokens that four rows lose by guesses of that price, which all stand, and their numbers."""
    seconds, tokens, counts = 0.0, 0, list[int]()
    for _ in range(steps):
        counts.append(sum(times.choose([0.9] * 4, [4] * 4)))
        own = 0.1 + price * counts[-1]
        times.add(4, counts[-1], own, counts[-1])
        seconds, tokens = seconds + own, tokens + 4 + counts[-1]
    return 1 - tokens / seconds / 40, counts


def test_trials_take_a_small_share_and_find_when_guesses_pay() -> None:
    times = StepTimes()
    first, counts = lost_share(times, 24, 0.03)
    assert first < 0.06
    assert sum(map(bool, counts)) == 3
    assert not any(counts[5:])
    later, counts = lost_share(times, 1000, 0.03)
    assert later < 0.012  # TRIAL_TIME_SHARE, and a trial that is not yet made up for
    assert any(counts)
    assert lost_share(times, 600, 0.002)[0] < -1.0
    after, counts = lost_share(times, 600, 0.03)
    assert after < 0.03  # the first steps still guess, as that has paid
    assert not any(counts[8:11])
