"""Rows of an engine that follow grammars: which tokens may come next, and what they change for rows beside them.

Models have random weights, so that nothing but the grammar makes an answer valid.
"""

import threading
import time
from collections.abc import Iterator
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from attnmesh.errors import GrammarError
from attnmesh.hf.serving.engine import Engine
from attnmesh.hf.serving.engine_request import EngineRequest
from attnmesh.hf.serving.grammar_masks import Grammar, GrammarState, GrammarTokens, TokenMask
from attnmesh.serve.tool_grammars import Rules
from tests.support.models import families
from tests.support.serving.engines import guessing, started
from tests.support.serving.grammars import BYTES, END, NO_LINES, SIGNS, allowed, ids_of, is_valid, walk


def random_schema(draw: Random, depth: int = 3) -> dict[str, Any]:
    """Return a schema whose values end soon, also where each token is as likely as the others."""
    least = draw.randrange(4)
    kinds = ["string", "integer", "number", "boolean", "null", "enum", "const", "pattern", "format"]
    match draw.choice(kinds + 3 * ["object", "array", "anyOf", "$ref"] if depth else kinds):
        case "string":
            return {"type": "string", "minLength": least, "maxLength": least + draw.randrange(6)}
        case "integer":
            return {"type": "integer", "minimum": -draw.randrange(1000), "exclusiveMaximum": draw.randrange(1, 10**6)}
        case "number":
            return {"type": "number", "minimum": 0, "maximum": draw.randrange(1, 9)}
        case "enum":
            return {"enum": draw.sample(["a", 1, None, True, "é\n", [1], {"b": 2}, 2.5], draw.randrange(1, 5))}
        case "const":
            return {"const": draw.choice(["x", 7, {"y": [None]}])}
        case "pattern":
            return {"type": "string", "pattern": draw.choice(["^[a-f]{2,5}$", "^(yes|no)+!?$", "^\\d{3}-\\d{4}$"])}
        case "format":
            return {"type": "string", "format": draw.choice(["date", "time", "uuid", "ipv4", "date-time"])}
        case "object":
            names = draw.sample(["a", "b c", "é", 'q"', "d\\", "$ref"], draw.randrange(5))
            properties = {name: random_schema(draw, depth - 1) for name in names}
            required = draw.sample(names, draw.randrange(len(names) + 1))
            return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
        case "array":
            return {"type": "array", "items": random_schema(draw, depth - 1), "minItems": least, "maxItems": least + 2}
        case "anyOf":
            return {"anyOf": [random_schema(draw, depth - 1) for _ in range(draw.randrange(1, 4))]}
        case "$ref":
            inner = random_schema(draw, depth - 1)
            inner = {"allOf": [inner]} if "$defs" in inner else inner
            return {"$defs": {"One": inner}, "$ref": "#/$defs/One"} if depth == 3 else inner
        case kind:
            return {"type": kind}


@pytest.fixture(scope="module")
def tokens() -> Iterator[GrammarTokens]:
    made = GrammarTokens(BYTES)
    yield made
    made.close()


@pytest.fixture(scope="module")
def engine(tokens: GrammarTokens) -> Iterator[Engine]:
    model = families.model("llama", "attnmesh", vocab_size=len(BYTES), initializer_range=0.1)
    made = Engine(model, None, max_rows=16, max_queue=2000, tokens_end=[END], grammars=tokens)
    thread = threading.Thread(target=made.run)
    thread.start()
    yield made
    made.close()
    thread.join()


def text_of(stream: EngineRequest) -> str:
    return str(BYTES.decode([token.id for token in stream], skip_special_tokens=True))


def test_answers_of_random_weights_follow_random_schemas(engine: Engine) -> None:
    found = []
    for seed in range(30):
        schema = random_schema(Random(seed))
        grammar = Grammar(Rules({}).alone(schema))
        options: dict[str, Any] = {"max_new_tokens": 1500, "temperature": 1, "seed": seed, "logit_bias": NO_LINES}
        found.append((schema, engine.submit([5, 6], grammar=grammar, **options)))
    for schema, stream in found:
        text = text_of(stream)
        assert stream.finish_reason == "stop", (schema, text)
        assert is_valid(text, schema)


@pytest.mark.long
def test_random_tokens_follow_a_thousand_schemas(tokens: GrammarTokens) -> None:
    for seed in range(1000, 2000):
        schema = random_schema(Random(seed))
        text = walk(tokens, Grammar(Rules({}).alone(schema)), BYTES, Random(seed))
        assert is_valid(text, schema)


def test_ends_are_allowed_once_the_grammar_is_whole(tokens: GrammarTokens) -> None:
    state = tokens.begin(Grammar('start: "ab" "c"?'), [END])
    assert allowed(state) == {"a"}
    for sign, more in (("a", {"b"}), ("b", {"c", "END"}), ("c", {"END"})):
        state.advance(*ids_of(sign))
        assert allowed(state) == more
    assert state.mask().is_whole
    assert allowed(tokens.begin(Grammar('start: "ab" "c"?'), [END], ids_of("ab"))) == {"c", "END"}


def test_a_grammar_begins_after_a_thought(tokens: GrammarTokens) -> None:
    grammar = Grammar('start: "<b>"', thought_begin=tuple(ids_of("<t>")), thought_end=tuple(ids_of("</t>")))
    everything = {*SIGNS.values()} - {"END"}
    state = tokens.begin(grammar, [END])
    steps = [("<", {"t", "b"}), ("t", {">"}), (">", everything), ("x", everything), ("<", everything)]
    steps += [("/", everything), ("t", everything), (">", {"<"}), ("<", {"b"}), ("b", {">"}), (">", {"END"})]
    assert allowed(state) == {"<"}
    for place, (sign, more) in enumerate(steps, 1):
        state.advance(*ids_of(sign))
        assert allowed(state) == more, (sign, place)
        replayed = tokens.begin(grammar, [END], ids_of("".join(one for one, _ in steps[:place])))
        assert allowed(replayed) == more, place
    assert allowed(tokens.begin(grammar, [END], ids_of("<b"))) == {">"}  # without a thought


def test_a_grammar_that_asks_too_much_ends_its_answer_alone(engine: Engine) -> None:
    easy = engine.submit([5, 6], max_new_tokens=40, grammar=Grammar("start: /[a-z]{30}/"))
    for bad in ('start: "a', 'start: %json {"$ref": "#"}', "start: other"):
        with pytest.raises(GrammarError, match="response_format: expected"):
            list(engine.submit([5, 6], max_new_tokens=40, grammar=Grammar(bad, "response_format")))
    assert len(text_of(easy)) == 30


def test_no_row_waits_for_the_mask_of_another(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    made, free, slow = GrammarState._mask, threading.Event(), Grammar("start: /[a-z]{10}/", "slow")

    def masked(state: GrammarState) -> TokenMask:
        if state.grammar is slow:
            assert free.wait(60)
        return made(state)

    monkeypatch.setattr(GrammarState, "_mask", masked)
    late = engine.submit([5, 6], max_new_tokens=40, grammar=slow)
    others = [engine.submit([5, 6, i], max_new_tokens=40, grammar=Grammar("start: /[a-z]{20}/")) for i in range(3)]
    assert [len(text_of(one)) for one in others] == [20] * 3
    assert len([*engine.submit([5, 7], max_new_tokens=30)]) == 30
    assert late.answer == []
    free.set()
    assert len(text_of(late)) == 10


def test_a_grammar_changes_no_row_beside_it(engine: Engine) -> None:
    options: dict[str, Any] = {"max_new_tokens": 30, "temperature": 1, "seed": 3}
    alone = [token.id for token in engine.submit([5, 6], **options)]
    streams = [engine.submit([5, 6], **options, grammar=Grammar(f"start: /[a-z]{{{size}}}/")) for size in range(5, 25)]
    beside = [token.id for token in engine.submit([5, 6], **options)]
    assert beside == alone
    assert [len(text_of(stream)) for stream in streams] == [*range(5, 25)]


def test_guesses_follow_a_grammar(engine: Engine, tokens: GrammarTokens) -> None:
    """Guess the tokens of answers that follow grammars, with errors: answers are those without guesses."""
    asked: list[dict[str, Any]] = [
        {"max_new_tokens": 30, "temperature": seed % 2, "seed": seed, "grammar": Grammar(f"start: /[a-z]{{{size}}}/")}
        for seed, size in enumerate((5, 24, 40, 9))
    ]
    streams = [engine.submit([5, 6], **options) for options in asked]
    wanted = [[token.id for token in stream] for stream in streams]
    with guessing([[5, 6, *answer] for answer in wanted]):
        made = Engine(engine.model, None, speculate="ngram", tokens_end=[END], grammars=tokens)
        with started(made):
            again = [made.submit([5, 6], **options) for options in asked]
            assert [[token.id for token in stream] for stream in again] == wanted
        assert [one.finish_reason for one in again] == [one.finish_reason for one in streams]
        assert 0 < made.metrics()["accepted_tokens"] < made.metrics()["drafted_tokens"]


def test_biases_penalties_and_cuts_leave_a_grammar(engine: Engine) -> None:
    digit, letter = ids_of("7")[0], ids_of("x")[0]
    options: dict[str, Any] = {"logit_bias": {digit: 100, letter: 100, END: 100}, "presence_penalty": 2.0}
    options |= {"frequency_penalty": 2.0, "repetition_penalty": 1.3, "min_p": 0.3, "top_p": 0.5, "top_k": 2}
    for seed in range(5):
        grammar = Grammar("start: /[0-9]{12}/")
        options |= {"max_new_tokens": 40, "temperature": 1, "seed": seed, "logprobs": 3}
        stream = engine.submit([5, 6], grammar=grammar, **options)
        drawn = [*stream]
        assert BYTES.decode([token.id for token in drawn]) == "7" * 12
        assert all(len(token.top) == 3 and token.logprob is not None for token in drawn)
    top = {id for token in drawn for id, _ in token.top}
    assert not top <= {*ids_of("0123456789")}, "log-probabilities are the model's, before masks"


def test_the_limit_of_tokens_ends_an_answer_that_is_not_whole(engine: Engine) -> None:
    stream = engine.submit([5, 6], max_new_tokens=9, grammar=Grammar("start: /[a-z]{20}/"))
    assert len(text_of(stream)) == 9
    assert stream.finish_reason == "length"


def test_an_engine_without_grammars_says_so() -> None:
    made = Engine(families.model("llama", "attnmesh"), None)
    with pytest.raises(GrammarError, match="GrammarTokens"):
        made.submit([5, 6], max_new_tokens=9, grammar=Grammar('start: "a"'))


def test_a_grammar_is_compiled_once_and_answers_are_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    counted, llguidance = list[str](), pytest.importorskip("llguidance")
    made = llguidance.LLMatcher

    def count(tokens: Any, text: str, **options: Any) -> Any:
        counted.append(text)
        return made(tokens, text, **options)

    monkeypatch.setattr(llguidance, "LLMatcher", count)
    tokens, grammar = GrammarTokens(BYTES), Grammar('start: "ab" | "cd"')
    states = [tokens.begin(grammar, [END]) for _ in range(3)]
    assert all(allowed(state) == {"a", "c"} for state in states)  # an answer goes on once its mask is made
    states[0].advance(*ids_of("a"))
    states[1].advance(*ids_of("c"))
    assert [allowed(state) for state in states] == [{"b"}, {"d"}, {"a", "c"}]
    assert allowed(tokens.begin(grammar, [END])) == {"a", "c"}
    assert len(counted) == 1
    tokens.close()


def test_an_answer_that_nothing_can_follow_is_an_error() -> None:
    tokens = GrammarTokens(BYTES)
    state = tokens.begin(Grammar('start: "a" "b"', "response_format"), [END])
    state.matcher = SimpleNamespace(
        is_stopped=lambda: False, is_accepting=lambda: False, is_error=lambda: False, compute_bitmask=lambda: bytes(40)
    )
    with pytest.raises(GrammarError, match="response_format: expected an answer that can go on"):
        state._mask()
    tokens.close()


def test_rows_wait_for_masks_together(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    made, free = GrammarState._mask, threading.Event()

    def masked(state: GrammarState) -> TokenMask:
        assert state.grammar.field != "slow" or free.wait(60)
        return made(state)

    monkeypatch.setattr(GrammarState, "_mask", masked)
    slow = [engine.submit([5, 6, i], max_new_tokens=9, grammar=Grammar("start: /[a-z]/", "slow")) for i in range(8)]
    while len(engine.scheduler.requests.rows) < 8:
        time.sleep(0.001)
    waits = []
    for _ in range(3):
        start = time.perf_counter()
        engine.scheduler._draw_held()
        waits.append(time.perf_counter() - start)
    free.set()
    assert [len(text_of(one)) for one in slow] == [1] * 8
    assert min(waits) < 0.05
