"""Ranks that stop, or raise: the server says so, starts others, and open answers go on."""

import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from signal import SIGKILL, SIGSTOP
from typing import Any

import openai
import pytest

from attnmesh import errors
from attnmesh.cli.generate_prompt import find_model
from attnmesh.cli.mesh_option import MeshOptions
from attnmesh.cli.output import Status
from attnmesh.cli.serve_command import LocalRanks
from attnmesh.cli.serve_worker import ServeSettings
from attnmesh.hf.serving.engine import Engine
from attnmesh.hf.serving.prefix_store import PrefixStore
from attnmesh.hf.serving.rank_store import RankStore
from attnmesh.serve import supervisor
from attnmesh.serve.rank_messages import ToFront
from attnmesh.serve.rank_requests import RankRequests, serve_rank_0
from tests.support.models import families
from tests.support.serving.fake_engine import FakeEngine, ThreadWorld, byte_tokenizer, save_tiny
from tests.support.serving.served import NAME, Served, served, until

NEW, MANY = 40, 120
"""Tokens of an answer, and of one that is not yet whole when a rank is lost."""
ASKED: dict[str, Any] = {"model": NAME, "prompt": "Go on", "temperature": 1, "seed": 3}


def text_of(running: Served, into: list[str], tokens: int = NEW) -> None:
    code, said = running.ask("/v1/completions", ASKED | {"max_tokens": tokens})
    into.append(said["choices"][0]["text"] if code == 200 else str(said))


CALLED: dict[str, Any] = {
    "model": NAME,
    "messages": [{"role": "user", "content": "Go on"}],
    "tools": [
        {
            "type": "function",
            "function": {
                "name": "sum",
                "parameters": {
                    "type": "object",
                    "properties": {"of": {"type": "string", "pattern": "^[a-z]{90,100}$"}, "to": {"enum": ["a", "b"]}},
                    "required": ["of", "to"],
                },
            },
        }
    ],
    "tool_choice": "required",
    "parallel_tool_calls": False,
    "max_tokens": 400,
    "seed": 5,
    "logit_bias": {str(byte_tokenizer()("\n")["input_ids"][0]): -100},
}
"""A call that a grammar makes whole, without lines and their indents."""


def call_of(running: Served, into: list[str]) -> None:
    code, said = running.ask("/v1/chat/completions", CALLED)
    calls = said["choices"][0]["message"]["tool_calls"] if code == 200 else []
    into.append(str(json.loads(calls[0]["function"]["arguments"])) if calls else str(said))


ENDS = [(0, SIGSTOP), (1, SIGSTOP), (0, SIGKILL), (1, SIGKILL)]


@pytest.mark.parametrize("ends", [ENDS[-1:], pytest.param(ENDS, marks=pytest.mark.long)], ids=["one", "each"])
def test_ranks_that_share_layers_are_lost_while_they_answer(
    ends: list[tuple[int, int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is killed is lost at once, one that is stopped after the deadline."""
    monkeypatch.setattr(supervisor, "LONGEST_PAUSE_SECONDS", 0.0)
    found = find_model(save_tiny(tmp_path, hidden_size=288), 2, MeshOptions("keys=2"), Status(""))
    options = {"max_rows": 4, "max_queue": 16, "max_model_len": 1024}
    settings = ServeSettings(found.for_ranks, "auto", "shared", 1.0, options)
    options = {"tokenizer": found.tokenizer, "tool_format": "hermes", "max_restarts": 50, "deadline": 1.0}
    with served(LocalRanks(2, settings), **options) as one:
        undisturbed, texts, lines = list[str](), list[str](), list[str]()
        called, calls = list[str](), list[str]()
        one.front.log = lines.append
        text_of(one, undisturbed, MANY)
        call_of(one, called)
        for rank, number in ends:
            answering = threading.Thread(target=text_of, args=(one, texts, MANY))
            calling = threading.Thread(target=call_of, args=(one, calls))
            tokens = one.figure("attnmesh_tokens_total")
            calling.start()
            until(lambda tokens=tokens: one.figure("attnmesh_tokens_total") > tokens + 40)  # within its arguments
            answering.start()
            until(lambda: len(one.front.open) == 2)
            os.kill(one.children.alive()[rank].pid or 0, number)
            until(lambda: one.ask("/health")[0] == 503)
            until(lambda: one.ask("/health")[0] == 200)
            answering.join()
            calling.join()
    assert texts == undisturbed * len(ends)
    assert "'to'" in called[0], called
    assert calls == called * len(ends)
    assert sum("restart" in line for line in lines) >= len(ends), lines


WRITTEN: dict[str, Any] = {
    "type": "object",
    "properties": {"of": {"type": "string", "pattern": "^(go [a-f] and on ){20,22}$"}, "to": {"enum": ["a", "b"]}},
    "required": ["of", "to"],
}
"""Arguments that repeat themselves but for one letter of twelve: most guesses stand, and some do not."""


def arguments_of(running: Served, into: list[str], options: dict[str, Any]) -> None:
    """Read the arguments of a streamed call, which come once they are whole."""
    asked: dict[str, Any] = {"tools": [{"type": "function", "function": {"name": "sum", "parameters": WRITTEN}}]}
    asked |= {"messages": CALLED["messages"], "model": NAME, "logit_bias": CALLED["logit_bias"], "max_tokens": 500}
    with openai.OpenAI(base_url=running.url + "/v1", api_key="none", max_retries=0, timeout=60) as client:
        for event in client.chat.completions.create(stream=True, parallel_tool_calls=False, **asked, **options):
            for call in event.choices[0].delta.tool_calls or ():
                into.append((call.function and call.function.arguments) or "")


def arguments_together(running: Served, asked: list[dict[str, Any]], then: Callable[[], Any]) -> list[str]:
    """Return the arguments of calls that are made at the same time, while something else is done."""
    texts = [list[str]() for _ in asked]
    pairs = zip(texts, asked, strict=True)
    threads = [threading.Thread(target=arguments_of, args=(running, *pair)) for pair in pairs]
    for thread in threads:
        thread.start()
    then()
    for thread in threads:
        thread.join()
    return ["".join(into) for into in texts]


@pytest.mark.parametrize(
    ("lost", "guesses"),
    [
        ([1], {"speculate": "ngram"}),
        pytest.param([0, 1, 0], {"speculate": "ngram"}, marks=pytest.mark.long),
        pytest.param([0, 1], {"draft_tokens": 4}, marks=pytest.mark.long),
    ],
    ids=["one", "each", "draft"],
)
def test_ranks_that_guess_are_lost_within_a_call_that_a_grammar_makes(
    lost: list[int], guesses: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Greedy and drawn calls are in the same steps as a rank is killed, and both go on with the same arguments."""
    monkeypatch.setattr(supervisor, "LONGEST_PAUSE_SECONDS", 0.0)
    found = find_model(save_tiny(tmp_path, hidden_size=288), 2, MeshOptions("keys=2"), Status(""))
    engine = {"max_rows": 4, "max_queue": 16, "max_model_len": 2048, **guesses}
    draft = str(tmp_path) if "draft_tokens" in guesses else None
    settings = ServeSettings(found.for_ranks, "auto", "shared", 5.0, engine, draft)
    asked: list[dict[str, Any]] = [
        {"temperature": 0, "tool_choice": "required"},
        {"temperature": 1, "seed": 5, "tool_choice": {"type": "function", "function": {"name": "sum"}}},
    ]
    with served(LocalRanks(2, settings), tokenizer=found.tokenizer, tool_format="hermes", max_restarts=9) as one:
        figure = f"attnmesh_engine_{'accepted' if draft is None else 'drafted'}_tokens_total"  # a draft has no grammar
        undisturbed = arguments_together(one, asked, lambda: None)
        for rank in lost:

            def kill(rank: int = rank) -> None:
                """Kill the rank when both are within their arguments, and guesses have stood."""
                until(lambda: sum(len(call.sent) > 100 for call in [*one.front.open.values()]) == len(asked))
                one.kill(rank)
                assert len(one.front.open) == len(asked)

            assert one.figure(figure) > 0
            assert arguments_together(one, asked, kill) == undisturbed
            until(lambda: one.figure(figure) > 0)  # of the ranks that came after
        assert one.figure("attnmesh_restarts_total") == len(lost)
    said = [json.loads(text)["of"] for text in undisturbed]
    assert all(len(text) >= 240 for text in said)
    assert said[0] != said[1]


class Stalled(ThreadWorld):
    """A world whose first engine ends no step, and sees no deadline."""

    def __init__(self) -> None:
        self.free = threading.Event()
        super().__init__(step=self.step)

    def step(self, going: bool) -> bool:
        return self.free.wait() and going

    def kill(self, *, will_restart: bool = False) -> None:
        self.free.set()
        super().kill()


def test_ranks_that_see_no_deadline_are_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "ENDING_SECONDS", 0.2)
    with served(Stalled(), deadline=0.2) as one:
        lines = list[str]()
        one.front.log = lines.append
        until(lambda: one.figure("attnmesh_restarts_total") == 1)
        until(lambda: one.ask("/health")[0] == 200)
    assert "the ranks ended no step within 0.2 s" in lines


class Failing(ThreadWorld):
    """A world of one rank with `hf.Engine`, whose model fails once."""

    def __init__(self, after: int) -> None:
        super().__init__()
        self.model = families.model("llama", "attnmesh", vocab_size=len(byte_tokenizer()))
        self.left, self.forward = after, self.model.forward
        self.model.forward = self.fails
        self.engine: Any = None

    def fails(self, *arguments: Any, **options: Any) -> Any:
        self.left -= 1
        if not self.left:
            raise MemoryError("5 GB")
        return self.forward(*arguments, **options)

    def run(self, address: str) -> None:
        self.engine = Engine(self.model, None, max_rows=4)
        serve_rank_0(self.engine, address, {"max_model_len": 1024})


def test_an_error_on_rank_0_ends_no_answer() -> None:
    with served(Failing(0)) as one:
        undisturbed = list[str]()
        text_of(one, undisturbed)
    world, texts = Failing(10), list[str]()
    with served(world) as one:
        threads = [threading.Thread(target=text_of, args=(one, texts)) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert one.figure("attnmesh_restarts_total") == 1
    assert texts == undisturbed * 3


class Storing(Failing):
    """A world of one rank with `hf.Engine`, whose store cannot copy a block once."""

    def __init__(self, folder: Path) -> None:
        super().__init__(0)
        self.folder = folder

    def run(self, address: str) -> None:
        self.engine = Engine(self.model, None, max_rows=4, store=PrefixStore(self.folder))
        serve_rank_0(self.engine, address, {"max_model_len": 1024})


def test_a_store_that_cannot_copy_a_block_ends_no_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts, lines, copy = list[str](), list[str](), RankStore.do_save
    broken = errors.KernelError("save", "rows that can be copied", "a cache of another layout", "report it")

    def fail_once(store: RankStore, *arguments: Any) -> None:
        monkeypatch.setattr(RankStore, "do_save", copy)
        raise broken

    with served(Storing(tmp_path)) as one:
        text_of(one, texts)
    monkeypatch.setattr(RankStore, "do_save", fail_once)
    with served(Storing(tmp_path / "other")) as one:
        one.front.log = lines.append
        text_of(one, texts)  # whose blocks are copied then
        until(lambda: one.figure("attnmesh_restarts_total") == 1)
        until(lambda: one.ask("/health")[0] == 200)
        text_of(one, texts)
        until(lambda: [*(tmp_path / "other").glob("*-*-*.safetensors")])  # a block of those that came after
    assert texts == texts[:1] * 3
    assert str(broken) in lines[0]


class Collected:
    """A link that keeps what is sent."""

    def __init__(self) -> None:
        self.messages: list[Any] = []

    def send(self, message: ToFront) -> None:
        self.messages.append(message)


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (errors.ArgumentError("submit ids", "ints", "text", "pass ints"), 400, "submit ids"),
        (errors.TooLong("submit ids", "at most 5 bytes a rank", "9", "shorten it"), 400, "at most 5 bytes a rank"),
        (errors.GrammarError("response_format", "masks", "too many", "simplify it"), 400, "response_format"),
        (errors.Busy("submit", "room", "none", "wait"), 429, "submit"),
        (errors.UnforeseenError("rank 1", "no error", "MemoryError at 0x7f", "read it"), 500, "The request failed"),
        (errors.MeshError("decode", "one call", "two", "mend it"), 500, "The request failed"),
        (errors.ModelError("Engine", "numbers", "NaN", "mend it"), 500, "The request failed"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_errors_of_ranks_are_not_the_clients(error: Exception, status: int, said: str) -> None:
    link: Any = Collected()
    RankRequests(FakeEngine(), link).refuse(7, error)  # type: ignore[arg-type]
    (message,) = link.messages
    assert (message.number, message.status) == (7, status)
    assert said in message.text
    assert "0x7f" not in message.text


@pytest.mark.parametrize(("kind", "status"), [(errors.TooLong, 400), (errors.MaskError, 500)])
def test_once_an_answer_has_begun_only_its_length_is_the_clients_fault(kind: Any, status: int) -> None:
    """Nothing else of a request is looked at again."""
    link: Any = Collected()
    RankRequests(FakeEngine(), link).refuse(7, kind("decode", "one", "two", "mend it"), has_begun=True)  # type: ignore[arg-type]
    assert link.messages[0].status == status
