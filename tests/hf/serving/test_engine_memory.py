"""The memory of an engine's caches: whatever runs, a rank holds no more, and what had to go is computed again."""

from collections.abc import Iterator
from contextlib import contextmanager
from random import Random
from time import sleep
from typing import Any
from unittest.mock import patch

import pytest
import torch

import attnmesh.hf as hf
from attnmesh import errors
from attnmesh.hf.serving.engine import Engine
from attnmesh.hf.serving.engine_request import EngineRequest
from attnmesh.hf.serving.footprint import Footprint
from attnmesh.hf.serving.rank_worker import RankWorker
from attnmesh.mesh.shapes import AXES, Shape
from attnmesh.setup import measure_shares
from tests.support.models import families
from tests.support.models.tiny_models import Case, build
from tests.support.ranks.pool import Pool, on_each_rank
from tests.support.serving.engines import FEW_BYTES, assert_greedy, greedy, ids, running, started, tokens, until
from tests.support.truth.mesh_problems import named_mesh


@on_each_rank
def send_random_requests(shape: Shape, seed: int, requests: int) -> None:
    """Send random requests, of which some are cancelled, with memory for few of them."""
    model, mesh, random = families.model("llama", "attnmesh"), named_mesh(shape, AXES), Random(seed)
    memory = 213_000 // shape.ranks  # one of the longest requests takes 90,000 bytes on each of two ranks
    texts = [ids(random.randint(1, 120), seed=n) for n in range(8)]
    wanted = {n: greedy(model, text, 16, mesh=mesh) for n, text in enumerate(texts)}
    with running(model, mesh, max_rows=6, max_queue=requests, cache_memory=memory, max_gap=0.01) as engine:
        if engine is None:
            return
        streams: list[tuple[int, int, int, EngineRequest]] = []
        for _ in range(requests):
            number, new = random.randrange(len(texts)), random.randint(1, 16)
            sent = random.choice([0, 0, 0, random.randrange(new)])
            replay = wanted[number][:sent]
            streams.append((number, new, sent, engine.submit(texts[number], max_new_tokens=new, replay=replay)))
            if random.random() < 0.3:
                random.choice(streams)[3].cancel()
            sleep(random.choice([0, 0, 0.002]))
        for number, new, sent, stream in streams:
            given = tokens(stream)
            assert given == wanted[number][sent:new][: len(given)]
            assert stream.finish_reason == ("cancelled" if stream.cancelled and len(given) < new - sent else "length")
            assert stream.cancelled or len(given) == new - sent
        until(lambda: not engine.scheduler.busy)
        until(lambda: max(engine.scheduler.memory.nbytes) <= memory)
        figures = engine.metrics()
        assert figures["evicted"]
        assert figures["running"] == figures["queue"] == figures["filling"] == 0
        assert len(engine.worker.caches) == figures["kept"]
        assert (engine.worker.prefills, engine.worker.prompts) == ({}, {})


@pytest.mark.parametrize("shape", [Shape(1, 1, 1), pytest.param(Shape(1, 1, 2), marks=pytest.mark.long)], ids=str)
def test_a_random_life_ends_within_its_memory(shape: Shape, pool: Pool) -> None:
    pool.run(shape.ranks, send_random_requests, shape, 0, 50)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(1, 5))
def test_random_lives_end_within_their_memory(seed: int, pool: Pool) -> None:
    pool.run(2, send_random_requests, Shape(1, 1, 2), seed, 1000)


@contextmanager
def measured_steps() -> Iterator[list[int]]:
    """Note the bytes of a rank's caches after each step."""
    most, run = list[int](), RankWorker.run

    def measured(worker: RankWorker, plan: Any) -> Any:
        results = run(worker, plan)
        most.append(worker.count_bytes())
        return results

    with patch.object(RankWorker, "run", measured):
        yield most


@on_each_rank
def question_documents(name: str, changes: dict[str, Any], requests: int) -> None:
    """Send random questions on three documents, with memory for two requests."""
    model, random = build(Case(name, name, changes), "attnmesh", torch.float32), Random(name)
    shared = [ids(length, seed=length) for length in (90, 140, 40)]
    texts = [random.choice(shared)[: random.randint(1, 140)] + ids(random.randint(1, 40), seed=n) for n in range(8)]
    wanted, cache = [greedy(model, text, 16, mesh=None) for text in texts], hf.ShardedCache(model.config)
    greedy(model, ids(180), 2, cache=cache)
    memory = int(2.2 * Footprint.of(cache)(200))
    options: dict[str, Any] = {"max_rows": 6, "max_queue": requests, "cache_memory": memory}
    with measured_steps() as most, running(model, None, **options) as engine:
        assert engine is not None
        asked = [(random.randrange(8), random.randrange(16)) for _ in range(requests)]
        streams = [engine.submit(texts[n], max_new_tokens=16, replay=wanted[n][:sent]) for n, sent in asked]
        for (number, sent), stream in zip(asked, streams, strict=True):
            assert tokens(stream) == wanted[number][sent:]
    slack = 1.5 if name in ("mistral", "gemma3_text") else 1.0  # windows move within a step, by more than is foreseen
    assert max(most) <= slack * memory


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "changes"),
    [*((name, {}) for name in ("mistral", "gemma3_text", "qwen3_next")), ("mamba2", {"time_step_limit": (0.0, 0.02)})],
)
def test_questions_on_documents_end_within_their_memory(name: str, changes: dict[str, Any], pool: Pool) -> None:
    pool.run(1, question_documents, name, changes, 60)


@on_each_rank
def preempt_requests() -> int:
    model, stock = families.model("llama", "attnmesh"), families.model("llama", "sdpa")
    texts = [ids(40, seed=seed) for seed in range(4)]
    engine = Engine(model, None, cache_memory=166_000, max_gap=60.0)  # prompts come whole, on a slow machine too
    streams = [engine.submit(text, max_new_tokens=150) for text in texts]  # all wait, however slow this thread is
    with started(engine):
        given = [tokens(stream) for stream in streams]
        with pytest.raises(errors.TooLong, match="bytes for one request"):
            tokens(engine.submit(ids(1500), max_new_tokens=10))
        assert tokens(engine.submit(texts[0], max_new_tokens=5)) == given[0][:5]
        count = engine.metrics()["preempted"]
    for text, new in zip(texts, given, strict=True):
        assert len(new) == 150
        assert_greedy(stock, text, new)
    assert isinstance(count, int)
    return count


def test_the_youngest_request_is_computed_again(pool: Pool) -> None:
    assert pool.run(1, preempt_requests)[0] > 0


@on_each_rank
def watch_memory(ranks: int) -> None:
    """Watch the bytes of caches after each step: growth counts before it is allocated."""
    model, mesh, limit = families.model("llama", "attnmesh"), named_mesh(Shape(1, 1, ranks), AXES), FEW_BYTES // ranks
    texts = [ids(length, seed=length) for length in (90, 60, 30, 120, 45, 75)]
    stock = families.model("llama", "sdpa")
    with measured_steps() as most, running(model, mesh, cache_memory=limit) as engine:
        if engine is not None:
            streams = [engine.submit(text, max_new_tokens=60) for text in texts]
            for text, stream in zip(texts, streams, strict=True):
                given = tokens(stream)
                assert len(given) == 60
                assert_greedy(stock, text, given)
            assert engine.metrics()["preempted"] or engine.metrics()["evicted"]
            expected = rf"at most {limit:,} bytes a rank, given .* bytes for one request"
            with pytest.raises(errors.TooLong, match=expected):
                engine.submit(ids(1500), max_new_tokens=10)
    assert max(most) <= limit


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.long)])
def test_caches_never_take_more_than_their_memory(ranks: int, pool: Pool) -> None:
    pool.run(ranks, watch_memory, ranks)


@on_each_rank
def return_default_limits(ranks: int) -> list[int]:
    model, mesh = families.model("llama", "attnmesh"), named_mesh(Shape(1, 1, ranks), AXES)
    free = 10**9 + torch.distributed.get_rank()
    with patch.object(measure_shares, "free_memory", lambda _: free):
        return [Engine(model, mesh, **one).scheduler.memory.limit for one in ({}, {"cache_memory": 5})]


def test_ranks_of_a_host_share_its_free_memory(pool: Pool) -> None:
    assert pool.run(2, return_default_limits, 2) == [[375_000_000, 5]] * 2
