"""`python -m benchmarks masks`: the time of a grammar's masks beside the steps of a model, and the gaps of answers."""

import json
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from time import perf_counter, thread_time
from typing import Any

import torch

from attnmesh import hf
from attnmesh.hf.load import locate, open_model, open_tokenizer
from attnmesh.hf.serving.engine_request import EngineRequest
from attnmesh.hf.serving.grammar_masks import GrammarState, TokenMask
from attnmesh.serve.tool_formats import FORMATS_BY_NAME
from attnmesh.serve.tool_grammars import Rules, find_shape
from benchmarks.timing import Timing

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "born": {"type": "string", "format": "date"},
        "height": {"type": "number", "minimum": 0, "maximum": 3},
        "friends": {"type": "array", "items": {"type": "string"}, "maxItems": 9},
        "kind": {"enum": ["person", "ship", "storm"]},
    },
    "required": ["name", "born", "height", "friends", "kind"],
    "additionalProperties": False,
}


@dataclass(frozen=True)
class MaskRow:
    """Answers of one grammar, or of none."""

    case: str
    first: Timing
    """Milliseconds to make a grammar and its first mask."""
    mask: Timing
    gap: Timing
    step: Timing
    """Milliseconds between tokens of answers without a grammar, in turns with these."""

    @property
    def share(self) -> float:
        """Time of a mask over that of a step."""
        return self.mask.median / self.step.median


def cases() -> dict[str, str]:
    """Return grammars by name."""
    rules = {name: Rules({}) for name in ("an object", "a schema", "a call", "text or calls")}
    shape, tools = find_shape("hermes", ""), [("f", {"name": "person", "parameters": PERSON})]
    assert shape is not None
    starts = {
        "an object": rules["an object"].json({"type": "object"}),
        "a schema": rules["a schema"].json(PERSON),
        "a call": rules["a call"].calls(shape, tools, several=True),
        "text or calls": rules["text or calls"].calls_in_text(
            shape, tools, FORMATS_BY_NAME["hermes"].begins, several=True
        ),
    }
    return {name: rules[name].write(start) for name, start in starts.items()}


class TimedState(GrammarState):
    """A state that keeps the time of its thread for each mask."""

    def __init__(self, *arguments: Any) -> None:
        self.seconds = list[float]()
        super().__init__(*arguments)

    def _step(self, token: int) -> TokenMask:
        start = thread_time()
        mask = super()._step(token)
        self.seconds.append(thread_time() - start)
        return mask


class TimedTokens(hf.GrammarTokens):
    """Tokens whose states keep times."""

    def begin(self, grammar: hf.Grammar, ends: Iterable[int], replay: Sequence[int] = ()) -> TimedState:
        """Return a state."""
        return TimedState(self, grammar, [*ends], replay)


def rows(name: str, tokens: int, rounds: int) -> Iterator[MaskRow]:
    """Measure each grammar in turns with answers that have none."""
    path = locate(name)
    tokenizer = open_tokenizer(path)
    model = open_model(path, "auto", torch.device("cpu"))
    grammars = TimedTokens(tokenizer)
    engine = hf.Engine(model, None, grammars=grammars, tokens_end=[tokenizer.eos_token_id])
    thread = threading.Thread(target=engine.run)
    thread.start()
    ids = tokenizer("Write a person as JSON, with friends: " + json.dumps(PERSON))["input_ids"]
    try:
        for case, text in cases().items():
            firsts, masks, gaps, steps = list[float](), list[float](), list[float](), list[float]()
            for turn in range(rounds + 1):
                start = perf_counter()
                grammars.begin(hf.Grammar(text), ()).mask()
                first_seconds = perf_counter() - start
                stream = engine.submit(ids, max_new_tokens=tokens, grammar=hf.Grammar(text))
                between = _gaps(stream)
                plain = _gaps(engine.submit(ids, max_new_tokens=tokens))
                if turn:  # the first is warm-up
                    assert isinstance(stream.grammar, TimedState)
                    firsts, masks = [*firsts, first_seconds], masks + stream.grammar.seconds
                    gaps, steps = gaps + between, steps + plain
            yield MaskRow(case, Timing.of(firsts), Timing.of(masks), Timing.of(gaps), Timing.of(steps))
    finally:
        engine.close()
        thread.join()
        grammars.close()


def _gaps(stream: EngineRequest) -> list[float]:
    """Return the seconds between the tokens of an answer."""
    times = [perf_counter() for _ in stream]
    return [after - before for before, after in pairwise(times)]
