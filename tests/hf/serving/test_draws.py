"""Draws: tokens follow their distribution, and penalties, biases and cuts are those of transformers."""

from typing import Any
from unittest.mock import Mock

import pytest
import torch

from attnmesh.hf.serving import draws
from attnmesh.hf.serving.engine_request import SamplingParams
from tests.support.models import families
from tests.support.ranks.pool import Pool, on_each_rank
from tests.support.serving.engines import greedy, ids, running, stock_draws, tokens
from tests.support.truth.tolerances import FLOAT32_MODEL


def test_draws_follow_the_distribution() -> None:
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0])

    def first(seed: int, **options: Any) -> int:
        sampling = SamplingParams(seed=seed, **options)
        return sampling.draw(logits, sampling.generator(3, 4)).id

    drawn = [first(seed, temperature=0.7) for seed in range(4000)]
    share = torch.bincount(torch.tensor(drawn), minlength=4) / 4000
    # 4,000 draws: shares deviate by 0.008.
    torch.testing.assert_close(share, (logits / 0.7).softmax(-1), atol=0.03, rtol=0.0)
    generator = SamplingParams(temperature=5.0, seed=1).generator(0, 4)
    assert len({SamplingParams(temperature=5.0).draw(logits, generator).id for _ in range(40)}) == 4
    assert {first(seed, temperature=5.0, top_k=2) for seed in range(50)} == {0, 1}
    assert {first(seed, temperature=1e-38) for seed in range(50)} == {0}
    assert {first(seed, temperature=1.0, top_p=0.6) for seed in range(50)} == {0}


@pytest.mark.parametrize("vocabulary", [1, 2, 97, 5000])
@pytest.mark.parametrize("ratio", [draws.ROUNDING_RATIO, 1.5, float("inf")], ids=["usual", "some alike", "all alike"])
def test_a_token_is_the_one_of_multinomial(vocabulary: int, ratio: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounding decides between tokens that are alike: then PyTorch draws, with the same numbers."""
    monkeypatch.setattr(draws, "ROUNDING_RATIO", ratio)
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
    multinomial = Mock(wraps=torch.multinomial)
    monkeypatch.setattr(torch, "multinomial", multinomial)
    generator = SamplingParams(temperature=1.0, seed=11).generator(count, vocabulary)
    assert multinomial.call_count <= 1
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
