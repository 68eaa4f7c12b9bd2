"""An engine: each stream has the tokens that its request has alone, whatever else runs, and memory is given back."""

from itertools import pairwise
from random import Random
from time import sleep
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from transformers import PreTrainedModel

import attnmesh.hf as hf
from attnmesh import errors
from attnmesh.hf.serving import draws
from attnmesh.hf.serving.engine import Engine
from attnmesh.hf.serving.footprint import Footprint
from attnmesh.hf.serving.rank_worker import RankWorker
from attnmesh.hf.serving.scheduler import StepPlan
from attnmesh.hf.serving.stream import Sampling, Stream
from attnmesh.mesh.shapes import AXES, Shape
from attnmesh.setup import measure_shares
from tests.support import families
from tests.support.engines import FEW_BYTES, SAMPLED, assert_greedy, greedy, ids, running, started, tokens, until
from tests.support.mesh_problems import named_mesh
from tests.support.models.tiny_models import Case, build
from tests.support.pool import Pool, on_each_rank
from tests.support.seeds import pairs
from tests.support.tolerances import FLOAT32_MODEL

SHAPES = [Shape(1, 1, 1), Shape(1, 1, 2), Shape(2, 1, 1)]


def stock_draws(model: PreTrainedModel, text: list[int], new: int, seed: int, **options: Any) -> list[int]:
    """Return the new tokens that `generate` draws."""
    torch.manual_seed(seed)
    return greedy(model, text, new, do_sample=True, **options)


# --- tokens ---


@on_each_rank
def streams_together(shape: Shape, family: str) -> None:
    """Compare streams that join as others run with `generate`, sampled ones with what it draws."""
    model, mesh = families.model(family, "attnmesh"), named_mesh(shape, AXES)
    prompts = [ids(length, seed=length) for length in (150, 1, 37, 5, 90, 3)]
    wanted = [greedy(model, text, 4 + row, mesh=mesh) for row, text in enumerate(prompts)]
    alone = [stock_draws(model, text, 7, mesh=mesh, **SAMPLED) for text in prompts[:3]]
    with running(model, mesh, max_rows=4, max_gap=0.01) as engine:
        if engine is None:
            return
        streams = [engine.submit(text, max_new_tokens=4 + row) for row, text in enumerate(prompts)]
        drawn = [engine.submit(text, max_new_tokens=7, **SAMPLED) for text in prompts[:3]]
        assert [tokens(stream) for stream in streams] == wanted
        assert [tokens(stream) for stream in drawn] == alone
        assert {stream.finish_reason for stream in streams + drawn} == {"length"}
        other = engine.submit(prompts[0], max_new_tokens=7, **(SAMPLED | {"seed": 6}))
        assert tokens(other) != alone[0]


@pytest.mark.parametrize(("family", "shape"), pairs(["gemma3", "llama4", "llama"], SHAPES, 2))
def test_streams_do_not_depend_on_what_else_runs(shape: Shape, family: str, pool: Pool) -> None:
    pool.run(shape.ranks, streams_together, shape, family)


@on_each_rank
def recurrent_together(name: str, ranks: int) -> None:
    model, mesh = build(Case(name, name), "attnmesh", torch.float32), named_mesh(Shape(1, 1, ranks), AXES)
    prompts = [ids(length, seed=length) for length in (37, 2, 22)]
    wanted = [greedy(model, text, 9, mesh=mesh) for text in prompts]
    turn, cache = prompts[0] + wanted[0] + ids(9), hf.ShardedCache(model.config, mesh)
    greedy(model, prompts[0], 9, cache=cache)
    after = greedy(model, turn, 5, cache=cache)  # states of one turn go on in the next
    with running(model, mesh) as engine:
        if engine is None:
            return
        streams = [engine.submit(text, max_new_tokens=9) for text in prompts]
        assert [tokens(stream) for stream in streams] == wanted
        stream = engine.submit(turn, max_new_tokens=5)
        assert (tokens(stream), stream.cached_tokens) == (after, len(prompts[0]) + 8)


@pytest.mark.parametrize(("name", "ranks"), pairs(["qwen3_next", "falcon_h1", "deepseek_v3"], [2, 1], 2))
def test_recurrent_states_and_latents_give_the_text_of_generate(name: str, ranks: int, pool: Pool) -> None:
    pool.run(ranks, recurrent_together, name, ranks)


@on_each_rank
def sharing_weights(keys: int, tp: int) -> None:
    """Serve on ranks that share weights beside the keys axis; with `tp` 0 on ranks that share both."""
    prompts = [ids(length, seed=length) for length in (70, 1, 22)]
    wanted = [greedy(families.model("llama", "attnmesh"), text, 5, mesh=None) for text in prompts]
    whole = init_device_mesh("cpu", (keys, max(tp, 1)), mesh_dim_names=("keys", "tp"))
    mesh, output = whole["keys"], "replicated" if tp else "heads"
    model = hf.tensor_parallel(families.model("llama", "attnmesh"), whole["tp"] if tp else mesh, output=output)
    with running(model, mesh, output=output, max_gap=0.01) as engine:
        if engine is None:
            return
        streams = [engine.submit(text, max_new_tokens=5) for text in prompts]
        drawn = [tokens(engine.submit(prompts[0], max_new_tokens=5, **SAMPLED)) for _ in range(2)]
        assert [tokens(stream) for stream in streams] == wanted
        assert drawn[0] == drawn[1]
        with pytest.raises(errors.InputError, match="submit ids"):
            engine.submit([-1], max_new_tokens=9)


@pytest.mark.parametrize(
    ("keys", "tp"),
    [pytest.param(2, 0, marks=pytest.mark.long), (3, 0), pytest.param(1, 2, marks=pytest.mark.long), (2, 2)],
)
def test_ranks_that_share_weights_give_the_same(keys: int, tp: int, pool: Pool) -> None:
    pool.run(keys * max(tp, 1), sharing_weights, keys, tp)


@on_each_rank
def ends() -> None:
    model = families.model("llama", "attnmesh")
    whole = greedy(model, ids(20), 12, mesh=None)
    end = whole[5]
    expected = whole[: whole.index(end)]
    with running(model, None, tokens_end=[end]) as engine:
        assert engine is not None
        stream = engine.submit(ids(20), max_new_tokens=12)
        assert (tokens(stream), stream.finish_reason) == (expected, "stop")
    with running(model, None) as engine:
        assert engine is not None
        stream = engine.submit(ids(20), max_new_tokens=12, stop_ids=[end])
        assert (tokens(stream), stream.finish_reason) == (expected, "stop")
        for options in ({}, SAMPLED):
            all_new = tokens(engine.submit(ids(20), max_new_tokens=12, **options))
            again = engine.submit(ids(20), max_new_tokens=12, replay=all_new[:7], **options)
            assert tokens(again) == all_new[7:]
        done = engine.submit(ids(20), max_new_tokens=7, replay=whole[:7])
        assert (tokens(done), done.finish_reason) == ([], "length")
        chosen = list(engine.submit(ids(20), max_new_tokens=3, logprobs=2))
        assert [token.top[0] for token in chosen] == [(token.id, token.logprob) for token in chosen]
        logits = model(torch.tensor([ids(20)])).logits[0, -1].detach().log_softmax(-1)
        assert chosen[0].logprob == pytest.approx(float(logits.max()), abs=FLOAT32_MODEL)


def test_ends_replays_and_log_probabilities_are_right(pool: Pool) -> None:
    pool.run(1, ends)


def test_draws_follow_the_distribution() -> None:
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0])

    def first(seed: int, **options: Any) -> int:
        sampling = Sampling(seed=seed, **options)
        return sampling.draw(logits, sampling.generator(3, 4)).id

    drawn = [first(seed, temperature=0.7) for seed in range(4000)]
    share = torch.bincount(torch.tensor(drawn), minlength=4) / 4000
    # 4,000 draws: shares deviate by 0.008.
    torch.testing.assert_close(share, (logits / 0.7).softmax(-1), atol=0.03, rtol=0.0)
    generator = Sampling(temperature=5.0, seed=1).generator(0, 4)
    assert len({Sampling(temperature=5.0).draw(logits, generator).id for _ in range(40)}) == 4
    assert {first(seed, temperature=5.0, top_k=2) for seed in range(50)} == {0, 1}
    assert {first(seed, temperature=1e-38) for seed in range(50)} == {0}
    assert {first(seed, temperature=1.0, top_p=0.6) for seed in range(50)} == {0}


@pytest.mark.parametrize("vocabulary", [1, 2, 97, 5000])
@pytest.mark.parametrize("ratio", [draws.ALIKE, 1.5, float("inf")], ids=["usual", "some alike", "all alike"])
def test_a_token_is_the_one_of_multinomial(vocabulary: int, ratio: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounding decides between tokens that are alike: then PyTorch draws, with the same numbers."""
    monkeypatch.setattr(draws, "ALIKE", ratio)
    own, expected = (torch.Generator().manual_seed(7) for _ in range(2))
    for number in range(300):
        scores = number % 9 * torch.randn(vocabulary, generator=torch.Generator().manual_seed(number))
        scores[1 : number % 4 * vocabulary // 4] = -torch.inf
        probabilities = scores.softmax(-1)
        token = draws.draw_token(probabilities, own)
        assert token == torch.multinomial(probabilities, 1, generator=expected)
    assert own.get_state().equal(expected.get_state())


@pytest.mark.parametrize(("count", "vocabulary"), [(0, 7), (1, 97), (300, 1000), (4095, 64)])
def test_a_generator_goes_on_after_draws_that_it_has_not_made(
    count: int, vocabulary: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn, even = torch.Generator().manual_seed(11), torch.ones(1, vocabulary)
    for _ in range(count):
        torch.multinomial(even, 1, generator=drawn)
    multinomial, made = torch.multinomial, []
    monkeypatch.setattr(torch, "multinomial", lambda *given, **more: made.append(1) or multinomial(*given, **more))
    generator = Sampling(temperature=1.0, seed=11).generator(count, vocabulary)
    assert len(made) <= 1
    assert torch.rand(1500, generator=generator).equal(torch.rand(1500, generator=drawn))


PENALIZED: list[dict[str, Any]] = [
    {"repetition_penalty": 1.3},
    {"repetition_penalty": 0.7},
    {"repetition_penalty": 1.2, "temperature": 0.8, "seed": 3},
    {"min_p": 0.3, "temperature": 1.4, "seed": 4},
    {"repetition_penalty": 1.1, "min_p": 0.1, "temperature": 0.9, "top_p": 0.8, "top_k": 30, "seed": 5},
]


@on_each_rank
def check_penalties() -> None:
    """Compare tokens drawn after a penalty, or with a least probability, with `generate`; also in a replay."""
    model, text = families.model("llama", "attnmesh"), ids(40)
    plain = greedy(model, text, 20, mesh=None)
    with running(model, None) as engine:
        assert engine is not None
        for options in PENALIZED:
            alike = {"top_k": 0, **options, "mesh": None}
            seed = alike.pop("seed", None)
            wanted = greedy(model, text, 20, **alike) if seed is None else stock_draws(model, text, 20, seed, **alike)
            assert wanted != plain
            assert tokens(engine.submit(text, max_new_tokens=20, **options)) == wanted
            assert tokens(engine.submit(text, max_new_tokens=20, replay=wanted[:7], **options)) == wanted[7:]


SHAPED: list[dict[str, Any]] = [
    {"logit_bias": {7: 3.0, 11: -100}},
    {"frequency_penalty": 1.5},
    {"presence_penalty": -2.0},
    {"logit_bias": [[5, 2.5]], "frequency_penalty": 0.7, "presence_penalty": 0.4, "repetition_penalty": 1.2},
]


@on_each_rank
def check_shaped_draws() -> None:
    """Compare the likeliest tokens with those of the formulas in float64, and drawn ones with those of a replay."""
    model, text = families.model("llama", "attnmesh"), ids(40)
    with running(model, None) as engine, torch.no_grad():
        assert engine is not None
        plain = tokens(engine.submit(text, max_new_tokens=20))
        for options in SHAPED:
            wanted: list[int] = []
            for _ in range(20):
                scores = model(torch.tensor([text + wanted])).logits[0, -1].double()
                for token, value in dict(options.get("logit_bias", {})).items():
                    scores[token] += value
                for token in {*text, *wanted}:
                    ratio = options.get("repetition_penalty", 1.0)
                    scores[token] = scores[token] / ratio if scores[token] > 0 else scores[token] * ratio
                for token in {*wanted}:
                    scores[token] -= options.get("frequency_penalty", 0) * wanted.count(token)
                    scores[token] -= options.get("presence_penalty", 0)
                wanted.append(int(scores.argmax()))
            assert wanted != plain
            assert tokens(engine.submit(text, max_new_tokens=20, **options)) == wanted
        drawn = tokens(engine.submit(text, max_new_tokens=20, temperature=1.2, seed=6, **options))
        again = engine.submit(text, max_new_tokens=20, temperature=1.2, seed=6, replay=drawn[:5], **options)
        assert tokens(again) == drawn[5:]
        one = next(iter(engine.submit(text, max_new_tokens=1, logprobs=1, **options)))
        logprobs = model(torch.tensor([text])).logits[0, -1].log_softmax(-1)
        assert one.logprob == pytest.approx(float(logprobs[one.id]), abs=FLOAT32_MODEL)


def test_biases_and_penalties_of_the_answer_shape_tokens_and_no_log_probabilities(pool: Pool) -> None:
    pool.run(1, check_shaped_draws)


def test_penalties_are_those_of_transformers(pool: Pool) -> None:
    pool.run(1, check_penalties)


# --- prefixes ---


@on_each_rank
def turns(shape: Shape) -> None:
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


@pytest.mark.parametrize("shape", SHAPES[:2], ids=str)
def test_kept_prefixes_go_on_and_branch(shape: Shape, pool: Pool) -> None:
    pool.run(shape.ranks, turns, shape)


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
def asked_at_once(name: str) -> None:
    """Ask one question four times."""
    model, text = build(Case(name, name), "attnmesh", torch.float32), ids(300, seed=9)
    wanted, engine = greedy(model, text, 5, mesh=None), Engine(model, None)
    streams = [engine.submit(text, max_new_tokens=5) for _ in range(4)]
    with started(engine):
        assert [tokens(stream) for stream in streams] == [wanted] * 4
    assert engine.scheduler.counts["prompt_tokens"] < 330


@pytest.mark.parametrize("name", ["mistral", "qwen3_next", "llama"])
def test_a_prompt_of_four_choices_is_computed_once(name: str, pool: Pool) -> None:
    pool.run(1, asked_at_once, name)


@pytest.mark.parametrize("name", ["mistral", "gemma3_text", "qwen3_next", "llama"])
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.long)])
def test_a_document_is_used_again_where_questions_part(name: str, ranks: int, pool: Pool) -> None:
    pool.run(ranks, check_questions_on_one_document, name, ranks)


@on_each_rank
def recurrent_replays(ranks: int) -> None:
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
    pool.run(ranks, recurrent_replays, ranks)


# --- memory ---


@on_each_rank
def life(shape: Shape, seed: int, requests: int) -> None:
    """Send random requests, of which some are cancelled, with memory for few of them."""
    model, mesh, random = families.model("llama", "attnmesh"), named_mesh(shape, AXES), Random(seed)
    memory = 213_000 // shape.ranks  # one of the longest requests takes 90,000 bytes on each of two ranks
    texts = [ids(random.randint(1, 120), seed=n) for n in range(8)]
    wanted = {n: greedy(model, text, 16, mesh=mesh) for n, text in enumerate(texts)}
    with running(model, mesh, max_rows=6, max_queue=requests, cache_memory=memory, max_gap=0.01) as engine:
        if engine is None:
            return
        streams: list[tuple[int, int, int, Stream]] = []
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
        until(lambda: max(engine.scheduler.nbytes) <= memory)
        figures = engine.metrics()
        assert figures["evicted"]
        assert figures["running"] == figures["queue"] == figures["filling"] == 0
        assert len(engine.worker.caches) == figures["kept"]
        assert (engine.worker.filling, engine.worker.prompts) == ({}, {})


@pytest.mark.parametrize("shape", [SHAPES[0], pytest.param(SHAPES[1], marks=pytest.mark.long)], ids=str)
def test_a_random_life_ends_within_its_memory(shape: Shape, pool: Pool) -> None:
    pool.run(shape.ranks, life, shape, 0, 50)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(1, 5))
def test_random_lives_end_within_their_memory(seed: int, pool: Pool) -> None:
    pool.run(2, life, Shape(1, 1, 2), seed, 1000)


@on_each_rank
def documents(name: str, changes: dict[str, Any], requests: int) -> None:
    """Send random questions on three documents, with memory for two requests."""
    model, random = build(Case(name, name, changes), "attnmesh", torch.float32), Random(name)
    shared = [ids(length, seed=length) for length in (90, 140, 40)]
    texts = [random.choice(shared)[: random.randint(1, 140)] + ids(random.randint(1, 40), seed=n) for n in range(8)]
    wanted, cache = [greedy(model, text, 16, mesh=None) for text in texts], hf.ShardedCache(model.config)
    greedy(model, ids(180), 2, cache=cache)
    memory, most, run = int(2.2 * Footprint.of(cache)(200)), list[int](), RankWorker.run

    def watched(worker: RankWorker, plan: Any) -> Any:
        results = run(worker, plan)
        most.append(worker.measure())
        return results

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RankWorker, "run", watched)
        with running(model, None, max_rows=6, max_queue=requests, cache_memory=memory) as engine:
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
    pool.run(1, documents, name, changes, 60)


@on_each_rank
def preempted() -> int:
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
    assert pool.run(1, preempted)[0] > 0


@on_each_rank
def within_memory(ranks: int) -> None:
    """Watch the bytes of caches after each step: growth counts before it is allocated."""
    model, mesh, limit = families.model("llama", "attnmesh"), named_mesh(Shape(1, 1, ranks), AXES), FEW_BYTES // ranks
    texts = [ids(length, seed=length) for length in (90, 60, 30, 120, 45, 75)]
    stock = families.model("llama", "sdpa")
    most, run = list[int](), RankWorker.run

    def watched(worker: RankWorker, plan: Any) -> Any:
        results = run(worker, plan)
        most.append(worker.measure())
        return results

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RankWorker, "run", watched)
        with running(model, mesh, cache_memory=limit) as engine:
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
    pool.run(ranks, within_memory, ranks)


@on_each_rank
def by_default(ranks: int) -> list[int]:
    model, mesh = families.model("llama", "attnmesh"), named_mesh(Shape(1, 1, ranks), AXES)
    free = 10**9 + torch.distributed.get_rank()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measure_shares, "free_memory", lambda _: free)
        return [Engine(model, mesh).scheduler.memory, Engine(model, mesh, cache_memory=5).scheduler.memory]


def test_ranks_of_a_host_share_its_free_memory(pool: Pool) -> None:
    assert pool.run(2, by_default, 2) == [[375_000_000, 5]] * 2


# --- rows that fail ---


@on_each_rank
def one_fails() -> None:
    """Serve five requests, one of which fails at its fourth token with those beside it."""
    model = families.model("llama", "attnmesh")
    texts = [ids(20, seed=seed) for seed in range(5)]
    wanted = [greedy(model, text, 12, mesh=None) for text in texts]
    engine = Engine(model, None)
    rows = engine.worker.do_rows

    def failing(chosen: Any, grows: bool) -> Any:
        ids_of = [engine.worker.caches[number].tokens[0, :20].tolist() for number, _ in chosen]
        lengths = [engine.worker.caches[number].get_seq_length() for number, _ in chosen]
        if texts[2] in ids_of and lengths[ids_of.index(texts[2])] >= 23:
            raise errors.ShapeError("KVCache capacity", "tokens that fit the device's memory", "no room", "wait")
        return rows(chosen, grows)

    engine.worker.do_rows = failing  # type: ignore[method-assign]
    streams = [engine.submit(text, max_new_tokens=12) for text in texts]
    with started(engine):
        for number, stream in enumerate(streams):
            if number != 2:
                assert tokens(stream) == wanted[number]
        with pytest.raises(errors.ShapeError, match="KVCache capacity"):
            tokens(streams[2])
        assert wanted[2][:4] == streams[2].answer[:4]
        assert len(streams[2].answer) < 12


def test_a_row_that_cannot_go_on_ends_alone(pool: Pool) -> None:
    pool.run(1, one_fails)


# --- waiting ---


@on_each_rank
def sequential() -> None:
    """Read the plans while a long prompt is computed beside short ones: these are done first, and it goes on."""
    model = families.model("llama", "attnmesh", max_position_embeddings=8192)
    engine, plans = Engine(model, None), list[list[Any]]()
    run = engine.worker.run
    engine.worker.run = lambda plan: plans.append(plan) or run(plan)  # type: ignore[func-returns-value, method-assign]
    long = engine.submit(ids(6000), max_new_tokens=1)
    short = [engine.submit(ids(3 + seed, seed=seed), max_new_tokens=1) for seed in range(2)]
    with started(engine):
        for stream in (*short, long):
            assert len(tokens(stream)) == 1
    chunks = [operation[1] for plan in plans for operation in plan if operation[0] == "fill"]
    last = {stream.number: len(chunks) - chunks[::-1].index(stream.number) for stream in (*short, long)}
    assert max(last[stream.number] for stream in short) < last[long.number]
    between = [number for number, chunk in enumerate(chunks) if chunk == long.number]
    assert max(later - earlier for earlier, later in pairwise(between)) <= 3  # the long one goes on, too


def test_several_prompts_are_computed_in_turn(pool: Pool) -> None:
    pool.run(1, sequential)


@on_each_rank
def waits_in_steps(ranks: int) -> None:
    """Read the plans while a long prompt is computed beside three streams."""
    model = families.model("llama", "attnmesh", max_position_embeddings=8192)
    mesh, plans = named_mesh(Shape(1, 1, ranks), AXES), list[dict[str, Any]]()
    with running(model, mesh) as engine:
        if engine is None:
            return
        planned = engine.scheduler.plan

        def plan() -> StepPlan:
            step = planned()
            plans.append({name: arguments for name, *arguments in step.operations})
            return step

        engine.scheduler.plan = plan  # type: ignore[method-assign]
        streams = [engine.submit(ids(9, seed=seed), max_new_tokens=4000) for seed in range(3)]
        for stream in streams:
            next(iter(stream))
        assert len(tokens(engine.submit(ids(4000, seed=7), max_new_tokens=1))) == 1
        for stream in streams:
            stream.cancel()
    begin = next(number for number, one in enumerate(plans) if "start" in one and len(one["start"][1]) == 4000)
    end = max(number for number, one in enumerate(plans) if "fill" in one)
    assert end - begin >= 8  # the prompt came in parts
    for stream in streams:
        steps = [n for n, one in enumerate(plans) if stream.number in [row for row, _ in one.get("rows", [[]])[0]]]
        during = [begin, *(n for n in steps if begin < n < end), end]
        assert max(later - earlier for earlier, later in pairwise(during)) <= 3


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.long), 2])
def test_no_stream_waits_more_than_three_steps_beside_a_long_prompt(ranks: int, pool: Pool) -> None:
    pool.run(ranks, waits_in_steps, ranks)


# --- refusals ---


@on_each_rank
def refused() -> None:
    model = families.model("llama", "attnmesh", max_position_embeddings=64)
    engine = Engine(model, None, max_queue=2)
    wrong: dict[str, tuple[list[int], dict[str, Any]]] = {
        "submit ids: expected tokens from 0 to 96": ([97], {}),
        "submit ids: expected at most 64 tokens": ([3] * 60, {"max_new_tokens": 5}),
        "submit temperature": ([3], {"temperature": -1.0}),
        "submit top_p": ([3], {"top_p": 2}),
        "submit seed": ([3], {"seed": -1}),
        "submit min_p": ([3], {"min_p": 1.5}),
        "submit repetition_penalty": ([3], {"repetition_penalty": 0}),
        "submit frequency_penalty": ([3], {"frequency_penalty": 2.5}),
        "submit presence_penalty": ([3], {"presence_penalty": True}),
        "submit stop_ids: expected a list of ints": ([3], {"stop_ids": (token for token in "x")}),
        "submit max_new_tokens": ([3], {"max_new_tokens": 0}),
    }
    for message, (text, options) in wrong.items():
        with pytest.raises(errors.InputError, match=message):
            engine.submit(text, **({"max_new_tokens": 3} | options))
    with pytest.raises(errors.InputError, match="submit ids"):
        engine.submit([], max_new_tokens=3)
    for _ in range(2):
        engine.submit([3], max_new_tokens=3)
    with pytest.raises(errors.Busy, match="one of 2 requests that wait"):
        engine.submit([3], max_new_tokens=3)
    engine.submit([3], max_new_tokens=3, replay=[])
    with pytest.raises(errors.TooLong, match="at most 20 tokens"):
        Engine(model, None, capacity=20).submit([3] * 10, max_new_tokens=30)
    with pytest.raises(errors.ArgumentError, match="max_gap"):
        Engine(model, None, max_gap=-1.0)
    with pytest.raises(errors.InputError, match="max_rows"):
        Engine(model, None, max_rows=0)


def test_wrong_requests_are_refused(pool: Pool) -> None:
    pool.run(1, refused)


@on_each_rank
def closed() -> None:
    model = families.model("llama", "attnmesh")
    with running(model, None, max_rows=1) as engine:
        assert engine is not None
        streams = [engine.submit(ids(5, seed=seed), max_new_tokens=1500) for seed in range(3)]
        next(iter(streams[0]))
    for stream in streams:
        tokens(stream)
        assert stream.finish_reason == "cancelled"
    with pytest.raises(errors.Busy, match="closing"):
        engine.submit([3], max_new_tokens=3)


def test_close_ends_open_streams(pool: Pool) -> None:
    pool.run(1, closed)


@on_each_rank
def a_failure() -> None:
    model = families.model("llama", "attnmesh")
    engine = Engine(model, None)
    stream = engine.submit(ids(5), max_new_tokens=5)

    def fails(*_: Any, **__: Any) -> None:
        raise RuntimeError("no such luck")

    model.forward = fails
    with pytest.raises(RuntimeError, match="no such luck"):
        engine.run()
    with pytest.raises(RuntimeError, match="no such luck"):
        tokens(stream)
    with pytest.raises(RuntimeError, match="no such luck"):
        engine.submit(ids(5), max_new_tokens=5)


def test_a_failure_reaches_all_streams(pool: Pool) -> None:
    pool.run(1, a_failure)
