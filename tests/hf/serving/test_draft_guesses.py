"""A draft model guesses: each answer has the tokens of an engine without one, however good or bad its guesses are."""

from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from transformers import PreTrainedModel

import attnmesh.hf as hf
from attnmesh.errors import InputError
from attnmesh.hf.serving.draft_guesses import DraftGuesser
from attnmesh.hf.serving.engine import Engine
from attnmesh.hf.serving.guesses import LEAST_RATE, StepTimes
from attnmesh.hf.serving.rank_worker import RankWorker
from attnmesh.mesh.shapes import AXES, Shape
from tests.support.models import families
from tests.support.models.tiny_models import Case, build
from tests.support.ranks.pool import Pool, on_each_rank
from tests.support.serving.engines import OPTIONS, asked, greedy, ids, model_of, priced, running, storing, tokens
from tests.support.truth.mesh_problems import named_mesh
from tests.support.truth.tolerances import FLOAT32_MODEL

LENGTHS = (70, 2, 37, 5, 91)


@contextmanager
def at_any_price() -> Iterator[None]:
    """Check all guesses of rows whose guesses stand now and then: a draft as large as its model is never worth it."""

    def choose(times: StepTimes, rates: list[float], offered: list[int], passes: Any, *, tries: bool) -> list[int]:
        times.pays = True
        return [most if rate >= LEAST_RATE else 0 for rate, most in zip(rates, offered, strict=True)]

    with patch.object(StepTimes, "choose", choose):
        yield


def near(model: PreTrainedModel, noise: float) -> PreTrainedModel:
    """A model whose tokens are often, but not always, those of another."""
    other = deepcopy(model)
    weight = other.get_output_embeddings().weight
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(3)
        weight += noise * weight.std() * torch.randn_like(weight)
    return other


@on_each_rank
def compare_with_a_plain_engine(family: str, shape: Shape, noise: float) -> None:
    """Compare streams that run together, 1 to 5 of them, each with other options, with those of a plain engine."""
    model, mesh = families.model(family, "attnmesh"), named_mesh(shape, AXES)
    draft = near(model, noise) if noise else model
    texts = [ids(length, seed=length) for length in LENGTHS]
    wanted_of = [(text, {"max_new_tokens": 14 + 2 * row, **OPTIONS[row]}) for row, text in enumerate(texts)]
    wanted: list[Any] = []
    with running(model, mesh) as engine:
        if engine is not None:
            wanted = [[*engine.submit(text, **options)] for text, options in wanted_of]
    with at_any_price(), running(model, mesh, draft=draft, draft_tokens=5) as engine:
        if engine is None:
            return
        for count in (1, 5):
            streams = [engine.submit(text, **options) for text, options in wanted_of[:count]]
            for stream, other in zip(streams, wanted, strict=False):
                given = [*stream]
                assert [token.id for token in given] == [token.id for token in other]
                for one, expected in zip(given, other, strict=True):
                    assert one.logprob == (
                        None if expected.logprob is None else pytest.approx(expected.logprob, abs=FLOAT32_MODEL)
                    )
        again = engine.submit(texts[1], replay=streams[1].answer[:9], **wanted_of[1][1])
        assert tokens(again) == streams[1].answer[9:]
        figures = engine.metrics()
        assert figures["draft_passes"]
        assert figures["accepted_tokens"]
        if noise:
            assert figures["accepted_tokens"] < figures["drafted_tokens"]


@pytest.mark.parametrize(
    ("family", "shape", "noise"),
    [
        ("llama", Shape(1, 1, 2), 0.0),
        ("gemma3", Shape(1, 1, 1), 0.1),
        pytest.param("gemma3", Shape(1, 1, 2), 0.1, marks=pytest.mark.long),
        pytest.param("gpt-oss", Shape(1, 1, 3), 0.1, marks=pytest.mark.long),
        pytest.param("llama4", Shape(2, 1, 1), 0.1, marks=pytest.mark.long),
    ],
)
def test_answers_are_those_without_a_draft(family: str, shape: Shape, noise: float, pool: Pool) -> None:
    pool.run(shape.ranks, compare_with_a_plain_engine, family, shape, noise)


def answer_and_metrics(model: PreTrainedModel, draft: Any, **options: Any) -> tuple[list[int], dict[str, Any]]:
    with running(model, None, draft=draft, draft_tokens=None if draft is None else 4) as engine:
        assert engine is not None
        answer = tokens(engine.submit(ids(20), max_new_tokens=61, **options))
        return answer, engine.metrics()


@pytest.mark.parametrize(
    "options", [{}, {"temperature": 0.9, "seed": 4, "frequency_penalty": 0.5}], ids=["greedy", "drawn"]
)
def test_guesses_of_the_model_itself_all_stand(options: dict[str, Any]) -> None:
    """Guesses are drawn with the random numbers of the row: a step of four guesses gives five tokens."""
    model = families.model("llama", "attnmesh")
    plain, without = answer_and_metrics(model, None, **options)
    with at_any_price():
        drafted, figures = answer_and_metrics(model, model, **options)
    assert drafted == plain
    assert without["steps"] == 60
    if "frequency_penalty" not in options:  # those of the guesses before count from the next step on
        assert figures["accepted_tokens"] == figures["drafted_tokens"]
        assert figures["steps"] <= 16
    assert figures["steps"] <= 40
    assert figures["draft_prompt_tokens"] == 20  # the last token is of the first pass


def test_a_draft_whose_guesses_do_not_stand_is_turned_off() -> None:
    model = families.model("llama", "attnmesh")
    draft = near(model, 3.0)
    answer, figures = answer_and_metrics(model, draft)
    assert answer == answer_and_metrics(model, None)[0]
    assert figures["drafted_tokens"] <= 8
    assert figures["accepted_tokens"] <= 2
    assert figures["steps"] >= 58


@pytest.mark.parametrize(("price", "read", "drafted"), [(1.0, 1, (4, 6)), (0.01, 4, (60, 200))])
def test_a_draft_reads_no_row_whose_guesses_are_not_worth_it(price: float, read: int, drafted: tuple[int, int]) -> None:
    """One row is read to find what guesses take; the others if they pay."""
    model = families.model("llama", "attnmesh")
    texts = [ids(50, seed=row) for row in range(4)]
    with priced(price), running(model, None, draft=model, draft_tokens=4) as engine:
        assert engine is not None
        streams = [engine.submit(text, max_new_tokens=40) for text in texts]
        answers, figures = [tokens(stream) for stream in streams], engine.metrics()
    assert answers == [greedy(model, text, 40, mesh=None) for text in texts]
    assert read * 50 <= figures["draft_prompt_tokens"] <= read * 60
    assert drafted[0] <= figures["drafted_tokens"] <= drafted[1]


# --- requests that begin alike, end early, are put back, or are found in a store ---


@on_each_rank
def share_keys_of_alike_requests(ranks: int) -> None:
    """Answer one prompt several times, cancel some, and go on from an answer."""
    model, mesh = families.model("llama", "attnmesh"), named_mesh(Shape(1, 1, ranks), AXES)
    draft, text = near(model, 0.1), ids(90)
    wanted: list[list[int]] = []
    drawn = [{"max_new_tokens": 40, "temperature": 1, "seed": seed} for seed in range(4)]
    turn = text + greedy(model, text, 40, mesh=mesh) + ids(11, seed=2)
    after = greedy(model, turn, 20, mesh=mesh)
    with running(model, mesh) as engine:
        if engine is not None:
            wanted = [tokens(engine.submit(text, **options)) for options in drawn]
    with at_any_price(), running(model, mesh, draft=draft, max_rows=3) as engine:
        if engine is None:
            return
        streams = [engine.submit(text, **options) for options in drawn]
        gone = engine.submit(text, max_new_tokens=400)
        next(iter(gone))
        gone.cancel()
        assert [tokens(stream) for stream in streams] == wanted
        read = engine.metrics()["draft_prompt_tokens"]
        assert read < 3 * len(text)  # most go on from the cache of one that begins alike
        assert tokens(engine.submit(text, max_new_tokens=40)) == turn[90:130]
        assert tokens(engine.submit(turn, max_new_tokens=20)) == after
        assert engine.metrics()["draft_prompt_tokens"] < read + 60


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.long)])
def test_requests_that_begin_alike_share_their_keys(ranks: int, pool: Pool) -> None:
    pool.run(ranks, share_keys_of_alike_requests, ranks)


@on_each_rank
def check_memory_of_guesses(ranks: int) -> None:
    """Guess with memory for few requests: caches stay within it, those of the draft too, which gives its own back."""
    model, mesh, limit = families.model("llama", "attnmesh"), named_mesh(Shape(1, 1, ranks), AXES), 400_000 // ranks
    texts = [ids(length, seed=length) for length in (90, 60, 30, 120, 45, 75)]
    wanted = [greedy(model, text, 60, mesh=None) for text in texts]
    most, run = list[int](), RankWorker.run

    def watched(worker: RankWorker, plan: Any) -> Any:
        results = run(worker, plan)
        if worker.draft_worker is not None:
            most.append(worker.count_bytes() - worker.draft_worker.nbytes + worker.draft_worker.count_bytes())
        return results

    options: dict[str, Any] = {"cache_memory": limit, "draft": model}
    releases, release = list[bool](), DraftGuesser.release

    def released(guesses: DraftGuesser) -> bool:
        releases.append(release(guesses))
        return releases[-1]

    patched = patch.object(RankWorker, "run", watched), patch.object(DraftGuesser, "release", released)
    with patched[0], patched[1], at_any_price(), running(model, mesh, **options) as engine:
        if engine is not None:
            streams = [engine.submit(text, max_new_tokens=60) for text in texts]
            assert [tokens(stream) for stream in streams] == wanted
            assert engine.metrics()["accepted_tokens"]
            assert any(releases)
    assert max(most) <= limit


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.long)])
def test_caches_of_both_models_never_take_more_than_their_memory(ranks: int, pool: Pool) -> None:
    pool.run(ranks, check_memory_of_guesses, ranks)


@on_each_rank
def find_prefixes_in_a_store(ranks: int, folder: Path) -> None:
    """Go on from a kept cache, and from the store of another engine, in which no guess is."""
    model, mesh = model_of("llama"), named_mesh(Shape(1, 1, ranks), AXES)
    first = ids(150)
    answer = greedy(model, first, 40, mesh=mesh)
    turn = first + answer[:33] + ids(13, seed=3)
    wanted = greedy(model, turn, 19, mesh=mesh)
    for begun in (True, False):
        with at_any_price(), storing(model, mesh, folder, draft=model) as engine:
            if engine is None:
                continue
            if begun:
                assert asked(engine, first, 40)[0] == answer
            found, cached = asked(engine, turn, 19)
            assert found == wanted
            assert cached >= 176  # whole blocks of 16 of the 183 tokens that are the same
            assert engine.metrics()["accepted_tokens"]


def test_prefixes_are_found_in_a_store_beside_a_draft(pool: Pool, tmp_path: Path) -> None:
    pool.run(1, find_prefixes_in_a_store, 1, tmp_path)


@on_each_rank
def guess_in_shares_of_weights(ranks: int) -> None:
    """Let ranks that share the model's weights and keys have a whole draft each."""
    texts = [ids(length, seed=length) for length in (70, 1, 22)]
    whole = families.model("llama", "attnmesh")
    wanted = [greedy(whole, text, 20, mesh=None) for text in texts]
    mesh = named_mesh(Shape(1, 1, ranks), AXES)
    assert mesh is not None
    model = hf.tensor_parallel(families.model("llama", "attnmesh"), mesh["keys"], output="heads")
    with at_any_price(), running(model, mesh, output="heads", draft=whole) as engine:
        if engine is not None:
            streams = [engine.submit(text, max_new_tokens=20) for text in texts]
            assert [tokens(stream) for stream in streams] == wanted
            assert engine.metrics()["accepted_tokens"]


@pytest.mark.long
def test_ranks_that_share_weights_give_the_same(pool: Pool) -> None:
    pool.run(3, guess_in_shares_of_weights, 3)


# --- what a draft cannot do ---


def test_a_draft_of_a_shorter_context_guesses_as_far_as_it_reads() -> None:
    model = families.model("llama", "attnmesh")
    draft = families.model("llama", "attnmesh", max_position_embeddings=48)
    with at_any_price():
        answer, figures = answer_and_metrics(model, draft)
    assert answer == answer_and_metrics(model, None)[0]
    assert 18 <= figures["accepted_tokens"] <= 28


def test_a_draft_that_raises_guesses_no_more() -> None:
    model, draft = families.model("llama", "attnmesh"), families.model("llama", "attnmesh")
    with torch.no_grad():
        draft.get_output_embeddings().weight[5] = torch.nan
    answer, figures = answer_and_metrics(model, draft)
    assert answer == answer_and_metrics(model, None)[0]
    assert (figures["drafted_tokens"], figures["draft_cache_bytes"]) == (0, 0)


@pytest.mark.parametrize(
    ("draft", "options", "expected"),
    [
        ("qwen3_next", {}, "hf.Engine draft: expected a model whose caches take tokens back, given one with recurrent"),
        ("llama", {"speculate": "ngram"}, "hf.Engine draft: expected no speculate= beside it, given both"),
        ("llama", {"draft_tokens": 65}, "hf.Engine draft_tokens: expected at most 64, given 65"),
        ("llama", {"draft_tokens": 0}, "hf.Engine draft_tokens: expected"),
        ("llama", {"reproducible": True}, "hf.Engine draft: expected no reproducible=True beside it"),
        (None, {"draft_tokens": 4}, "hf.Engine draft_tokens: expected a draft= beside it, given 4"),
        ("words", {}, "hf.Engine draft: expected a model of the same 97 tokens, given one of 300"),
        ("text", {}, "hf.Engine draft: expected a causal language model of transformers, given str"),
        ("sdpa", {}, "hf.Engine draft: expected a model with attn_implementation 'attnmesh', given 'sdpa'"),
    ],
)
def test_what_cannot_draft_is_refused_by_name(draft: str | None, options: dict[str, Any], expected: str) -> None:
    model = families.model("llama", "attnmesh")
    drafts: dict[str | None, Any] = {None: None, "llama": model, "text": "llama"}
    if draft == "qwen3_next":
        drafts[draft] = build(Case(draft, draft), "attnmesh", torch.float32)
    elif draft == "words":
        drafts[draft] = families.model("llama", "attnmesh", vocab_size=300)
    elif draft == "sdpa":
        drafts[draft] = families.model("llama", "sdpa")
    with pytest.raises(InputError, match=expected):
        Engine(model, None, draft=drafts[draft], **options)
