"""Engines that run on ranks: requests and their tokens, guesses at these, and prefixes in a store."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from threading import Thread
from time import monotonic, sleep
from typing import Any
from unittest.mock import patch

import torch
from transformers import PreTrainedModel

import attnmesh.hf as hf
from attnmesh.hf.serving.engine import Engine
from attnmesh.hf.serving.engine_request import EngineRequest
from attnmesh.hf.serving.guesses import StepTimes
from attnmesh.hf.serving.ngram_guesses import RowText
from attnmesh.hf.serving.store_scheduler import StoreScheduler
from tests.support.models.families import prompt
from tests.support.models.tiny_models import Case, build

SAMPLED: dict[str, Any] = {"temperature": 0.8, "top_p": 0.9, "top_k": 20, "seed": 5}


def ids(length: int, seed: int = 0) -> list[int]:
    return prompt(length, seed=seed)[0].tolist()


def tokens(stream: EngineRequest) -> list[int]:
    return [token.id for token in stream]


@contextmanager
def running(model: PreTrainedModel, mesh: Any, **options: Any) -> Iterator[Engine | None]:
    """Run an engine: rank 0 has it, and the others follow until rank 0 leaves the block."""
    engine = Engine(model, mesh, **options)
    if mesh is not None and torch.distributed.get_rank():
        engine.follow()
        yield None
        return
    with started(engine):
        yield engine


@contextmanager
def started(engine: Engine) -> Iterator[None]:
    """Run an engine on rank 0."""
    thread = Thread(target=engine.run)
    thread.start()
    try:
        yield
    finally:
        engine.close()
        thread.join(60)
    assert not thread.is_alive()


def greedy(model: PreTrainedModel, text: list[int], new: int, **options: Any) -> list[int]:
    """Return the new tokens of `generate`."""
    given = torch.tensor([text])
    options = {"attention_mask": torch.ones_like(given), "max_new_tokens": new, "do_sample": False, **options}
    whole = hf.generate(model, given, **options)
    return whole[0, len(text) :].tolist()


def stock_draws(model: PreTrainedModel, text: list[int], new: int, seed: int, **options: Any) -> list[int]:
    """Return the new tokens that `generate` draws."""
    torch.manual_seed(seed)
    return greedy(model, text, new, do_sample=True, **options)


def assert_greedy(model: PreTrainedModel, text: list[int], new: list[int]) -> None:
    """Assert that each new token is the likeliest one after those before it, all in one forward pass."""
    with torch.no_grad():
        logits = model(torch.tensor([text + new[:-1]])).logits[0, len(text) - 1 :]
    assert logits.argmax(-1).tolist() == new


def until(condition: Callable[[], bool]) -> None:
    end = monotonic() + 60
    while not condition():
        assert monotonic() < end
        sleep(0.01)


OPTIONS: list[dict[str, Any]] = [
    {},
    SAMPLED,
    {"repetition_penalty": 1.3},
    {"frequency_penalty": 0.7, "presence_penalty": 0.4, "logit_bias": {7: 2.0}, "temperature": 1.2, "seed": 6},
    {"logprobs": 2},
    {"min_p": 0.1, "temperature": 0.9, "seed": 4},
]
"""Options of requests whose answers must not depend on guesses."""


@contextmanager
def guessing(answers: list[list[int]], seed: int = 0) -> Iterator[None]:
    """Guess tokens of known answers, of which some are wrong, and check a random number of them."""
    random = Random(seed)

    def find_next(text: RowText, most: int) -> list[int]:
        whole = torch.frombuffer(text.token_bytes, dtype=torch.int32).tolist()
        known = next((one for one in answers if one[: len(whole)] == whole), whole)[len(whole) :][: max(most, 0)]
        return [token if random.random() < 0.8 else (token + 1) % 97 for token in known]

    def choose(_: StepTimes, rates: list[float], offered: list[int]) -> list[int]:
        return [random.randint(0, most) for most in offered]

    with patch.object(RowText, "find_next", find_next), patch.object(StepTimes, "choose", choose):
        yield


@contextmanager
def priced(price: float) -> Iterator[None]:
    """Let a step take a second, and a guess a part of one: else a machine's speed chooses."""
    add = StepTimes.add

    def added(times: StepTimes, rows: int, guesses: int, seconds: float, stood: int = 0, guessing: float = 0.0) -> None:
        add(times, rows, guesses, 1 + price * guesses, stood)

    with patch.object(StepTimes, "add", added):
        yield


FEW_BYTES = 185_000
"""Bytes of caches for 722 tokens of the Llama of tests, each of 256 bytes: fewer than some requests need at once."""

PLACE = "prefixes"
"""The folder of the store."""

TEXT, NEW = 150, 9
"""Tokens of a prompt, and those that are asked for after it."""


def model_of(name: str) -> Any:
    """A tiny model. Time steps of Mamba 2 are bounded in prompts alone, as in transformers."""
    changes = {"time_step_limit": (0.0, 0.02)} if name == "mamba2" else {}
    return build(Case(name, name, changes), "attnmesh", torch.float32)


def schedule_of(engine: Engine) -> StoreScheduler:
    found = engine.scheduler.store
    assert isinstance(found, StoreScheduler)
    return found


def until_stored(engine: Engine) -> None:
    """Wait until all that can be stored is on the disk: the engine, which is woken, finds nothing to do three times."""
    store, busy = schedule_of(engine), engine.exchanges

    def is_quiet() -> bool:
        nonlocal busy
        if engine.scheduler.busy or store.is_writing:
            busy = engine.exchanges
        engine.inbox.put(None)
        return engine.exchanges >= busy + 3

    until(is_quiet)


@contextmanager
def storing(model: Any, mesh: Any, folder: Path, **options: Any) -> Iterator[Engine | None]:
    """Run an engine with a store, and wait until it has stored all."""
    given: dict[str, Any] = {name: options.pop(name) for name in ("memory", "disk", "source") if name in options}
    with running(model, mesh, store=hf.PrefixStore(folder / PLACE, **given), **options) as engine:
        yield engine
        if engine is not None:
            until_stored(engine)


def asked(engine: Engine, text: list[int], new: int = NEW, **options: Any) -> tuple[list[int], int]:
    """Return the tokens of a request, and how many of its prompt were not computed."""
    stream = engine.submit(text, max_new_tokens=new, **options)
    return tokens(stream), stream.cached_tokens
