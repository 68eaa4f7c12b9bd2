"""Prefixes that an engine keeps: a request computes no token of its prompt that is in one, and has the same answer."""

from unittest.mock import patch

import pytest
import torch

from attnmesh.hf.serving.engine import Engine
from attnmesh.mesh.shapes import AXES, Shape
from tests.support.models import families
from tests.support.models.tiny_models import Case, build
from tests.support.ranks.pool import Pool, on_each_rank
from tests.support.serving.engines import greedy, ids, running, started, tokens
from tests.support.serving.fake_caches import SamePace
from tests.support.truth.mesh_problems import named_mesh


@on_each_rank
def talk_in_turns(shape: Shape) -> None:
    """Go on with a conversation, branch it, and branch from a request that runs."""
    model, mesh = families.model("llama", "attnmesh"), named_mesh(shape, AXES)
    first = ids(100)
    answer = greedy(model, first, 10, mesh=mesh)
    going_on, branch = first + answer + ids(7, seed=1), first[:60] + ids(30, seed=2)
    wanted = [greedy(model, text, 10, mesh=mesh) for text in (going_on, branch, first)]
    with running(model, mesh) as engine:
        if engine is None:
            return
        assert tokens(engine.submit(first, max_new_tokens=10)) == answer
        stream = engine.submit(branch, max_new_tokens=10)
        assert (tokens(stream), stream.cached_tokens) == (wanted[1], 60)
        stream = engine.submit(going_on, max_new_tokens=10)
        assert (tokens(stream), stream.cached_tokens) == (wanted[0], 109)
        assert engine.metrics()["kept"] == 2  # the first was moved, not copied
        long = engine.submit(first, max_new_tokens=300)
        next(iter(long))
        same = engine.submit(first, max_new_tokens=10)
        assert (tokens(same), same.cached_tokens) == (wanted[2], 99)
        long.cancel()
        assert tokens(long)[:9] == wanted[2][1:]
        assert long.finish_reason in ("cancelled", "length")


@on_each_rank
def check_salts(ranks: int) -> None:
    """Ask for one prompt with several salts: of requests that run, and of those that have ended."""
    model, mesh = families.model("llama", "attnmesh"), named_mesh(Shape(1, 1, ranks), AXES)
    prompt = ids(100)
    wanted = greedy(model, prompt, 10, mesh=mesh)
    with running(model, mesh) as engine:
        if engine is None:
            return
        for salt, cached in (("a", 0), ("", 0), ("b", 0), ("a", 99), ("", 99), ("b", 99)):
            stream = engine.submit(prompt, max_new_tokens=10, salt=salt)
            assert (tokens(stream), stream.cached_tokens) == (wanted, cached), salt
        long = engine.submit(prompt, max_new_tokens=300, salt="c")
        next(iter(long))
        stream = engine.submit(prompt, max_new_tokens=10, salt="d")
        assert (tokens(stream), stream.cached_tokens) == (wanted, 0)
        long.cancel()


def test_a_prefix_of_another_salt_is_not_used(pool: Pool) -> None:
    pool.run(2, check_salts, 2)


@pytest.mark.parametrize("shape", [Shape(1, 1, 1), Shape(1, 1, 2)], ids=str)
def test_kept_prefixes_go_on_and_branch(shape: Shape, pool: Pool) -> None:
    pool.run(shape.ranks, talk_in_turns, shape)


@on_each_rank
def check_questions_on_one_document(name: str, ranks: int) -> None:
    """Ask three questions on one document."""
    model, mesh = build(Case(name, name), "attnmesh", torch.float32), named_mesh(Shape(1, 1, ranks), AXES)
    document, shared = ids(400, seed=3), 400
    asked = [document + ids(9, seed=seed) for seed in range(3)]
    wanted = [greedy(model, text, 5, mesh=mesh) for text in asked]
    with running(model, mesh) as engine:
        if engine is None:
            return
        streams = []
        for text in asked:
            streams.append(engine.submit(text, max_new_tokens=5))
            tokens(streams[-1])
        assert [tokens(stream) or stream.answer for stream in streams] == wanted
        assert streams[2].cached_tokens >= 0.95 * shared


@on_each_rank
def ask_at_once(name: str) -> None:
    """Ask one question four times."""
    model, text = build(Case(name, name), "attnmesh", torch.float32), ids(300, seed=9)
    wanted, engine = greedy(model, text, 5, mesh=None), Engine(model, None)
    streams = [engine.submit(text, max_new_tokens=5) for _ in range(4)]
    with started(engine):
        assert [tokens(stream) for stream in streams] == [wanted] * 4
    assert engine.scheduler.counts["prompt_tokens"] < 330


@pytest.mark.parametrize("name", ["mistral", "qwen3_next", "llama"])
def test_a_prompt_of_four_choices_is_computed_once(name: str, pool: Pool) -> None:
    pool.run(1, ask_at_once, name)


@pytest.mark.parametrize(
    "name", [pytest.param("mistral", marks=pytest.mark.long), "gemma3_text", "qwen3_next", "llama"]
)
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.long)])
def test_a_document_is_used_again_where_questions_part(name: str, ranks: int, pool: Pool) -> None:
    pool.run(ranks, check_questions_on_one_document, name, ranks)


@on_each_rank
def go_on_from_a_row(name: str) -> None:
    """Send a row's answer so far as a prompt. The row decodes its last token before the prompt begins."""
    model = build(Case(name, name), "attnmesh", torch.float32)
    engine = Engine(model, None)
    engine.scheduler.pace = SamePace(None)  # else the row might end before the prompts of a busy machine do
    row = engine.submit(ids(100), max_new_tokens=200)
    left = engine.worker.left_to_decode
    for more, is_same in ((0, True), (left - 1, True), (left, True), (9, True), (9, False)):
        for _ in range(8):
            engine._step()
        last = row.answer[-1] if is_same else (row.answer[-1] + 1) % 97
        text = [*row.ids[:-1], last, *ids(more, seed=8)]
        shared = len(row.ids) if is_same and more >= left else 0
        prompt = engine.submit(text, max_new_tokens=1)
        with patch.object(engine.worker, "do_start", wraps=engine.worker.do_start) as begin:
            while prompt.finish_reason is None:
                engine._step()
        (start,) = begin.call_args.args
        assert (start.source, prompt.cached_tokens) == (row.cache_id if shared else None, shared), (more, is_same)
        assert prompt.answer == greedy(model, text, 1)
        engine.scheduler.memory.keep_at_most(0)


@pytest.mark.parametrize("name", ["mamba", "qwen3_next", "deepseek_v4"])
def test_a_row_with_a_state_lends_it_as_the_step_leaves_it(name: str, pool: Pool) -> None:
    pool.run(1, go_on_from_a_row, name)


@on_each_rank
def replay_recurrent_answers(ranks: int) -> None:
    """Replay answers of a model whose time steps transformers bounds in prompts alone."""
    case = Case("mamba2", "mamba2", {"time_step_limit": (0.0, 0.02)})
    model, mesh = build(case, "attnmesh", torch.float32), named_mesh(Shape(1, 1, ranks), AXES)
    prompts = [ids(length, seed=length) for length in (37, 22, 60)]
    wanted = [greedy(model, text, 24, mesh=mesh) for text in prompts]
    turns = [text + answer[:10] + ids(9) for text, answer in zip(prompts, wanted, strict=True)]
    after = [greedy(model, text, 8, mesh=mesh) for text in turns]
    with running(model, mesh) as engine:
        if engine is None:
            return
        for text, answer in zip(prompts, wanted, strict=True):
            assert tokens(engine.submit(text, max_new_tokens=24)) == answer
            assert tokens(engine.submit(text, max_new_tokens=24, replay=answer[:20])) == answer[20:]
        streams = [engine.submit(text, max_new_tokens=8) for text in turns]
        assert [tokens(stream) for stream in streams] == after
        assert all(stream.cached_tokens >= 16 for stream in streams)  # of the first prompts, not of their answers


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.long)])
def test_answers_are_computed_again_as_they_were(ranks: int, pool: Pool) -> None:
    pool.run(ranks, replay_recurrent_answers, ranks)
