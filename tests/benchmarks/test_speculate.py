"""The prompts of `python -m benchmarks speculate`: a released model answers them alike with guesses and without."""

from typing import Any, NamedTuple

import pytest
import torch

import attnmesh.hf as hf
from attnmesh.cli.launch import run_on_ranks
from attnmesh.hf.load import PACKAGED, locate, open_model, open_tokenizer
from attnmesh.mesh.shapes import mesh_shape
from attnmesh.setup.init_mesh import init_mesh
from benchmarks.speculate import CASES, prompts
from tests.support.process.needs import needs_smollm2
from tests.support.ranks.pool import on_each_rank
from tests.support.serving.engines import priced, running, tokens


class Guessed(NamedTuple):
    """Numbers of answers, and of tokens that were guessed."""

    same: int
    answers: int
    accepted: float
    drafted: float


@on_each_rank
def answer_two_hundred(folder: str) -> Guessed:
    """Answer 200 prompts with guesses and without, 1 to 16 at a time.

    Prompts of a turn are the ends of two, cut at other tokens: most caches are forked from others.
    """
    mesh = init_mesh("cpu", mesh_shape(2, 9, 3), 9, 3)
    model = open_model(folder, "float32", torch.device("cpu"))
    hf.share_weights(model, mesh)
    tokenizer, batches, texts = open_tokenizer(folder), [1, 2, 3, 5, 8, 16, 16, 16, 16, 17], list[list[list[int]]]()
    figures: dict[str, Any] = {}
    for speculate in (None, "ngram"):
        texts.append([])
        with priced(0.05), running(model, mesh, tokens_end=(), speculate=speculate, max_queue=200) as engine:
            if engine is None:
                continue
            for turn, count in enumerate(2 * batches):
                model_of = prompts(tokenizer, CASES[turn % 3], 2, turn)
                streams = []
                for row in range(count):
                    text, options = list(model_of[row % 2].ids[-250:]), dict(model_of[row % 2].options)
                    more = {"seed": row} if "seed" in options else {}
                    streams.append(engine.submit(text[: len(text) - row // 2], max_new_tokens=16, **(options | more)))
                texts[-1] += [tokens(stream) for stream in streams]
            figures = engine.metrics()
    same = sum(one == other for one, other in zip(*texts, strict=True))
    return Guessed(same, len(texts[0]), figures.get("accepted_tokens", 0), figures.get("drafted_tokens", 0))


@pytest.mark.long
@pytest.mark.timeout(2000)
@needs_smollm2
def test_two_hundred_answers_of_a_released_model_are_the_same() -> None:
    """A third copies, a third is drawn from copies, and a third is stories."""
    guessed, _ = run_on_ranks(2, answer_two_hundred, locate(PACKAGED), seconds=3000)
    assert guessed.same == guessed.answers == 200
    assert 700 < guessed.accepted < guessed.drafted
