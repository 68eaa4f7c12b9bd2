"""Dialogues of agents, by OpenAI's client and by Pydantic AI: calls, their results and answers, over several turns.

Each dialogue has a script of what its model says, which a grammar makes random weights say. So prompts, tokens and the
keys that are found again are those of a model that calls tools well.
"""

import asyncio
import json
import re
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from random import Random
from typing import Any

import openai
import pytest
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider
from tokenizers import AddedToken

from attnmesh.hf.serving.engine import Engine
from attnmesh.hf.serving.engine_request import EngineRequest
from attnmesh.hf.serving.grammar_masks import Grammar, GrammarTokens
from attnmesh.serve.rank_requests import serve_rank_0
from attnmesh.serve.tool_grammars import literal
from tests.support.models import families
from tests.support.serving.fake_engine import HERMES, ThreadWorld, byte_tokenizer
from tests.support.serving.served import NAME, Served, served

DIALOGUES = 30
SIZES = {"num_hidden_layers": 1, "max_position_embeddings": 4096}
TEXTS = ("Zürich", "</tool_call>", 'a "b" \\', "😀\n", '{"name": 1}', "", "null")
MARKS = ('<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>", "<think>\n", "\n</think>\n\n", "<|end|>\n")
"""Texts that are a token each, so that dialogues are short."""
SYSTEM = "Look it up, with the tools that you have, and be brief."


@dataclass(frozen=True)
class Dialogue:
    """What a model says in one dialogue: each answer, and the calls in it with their arguments as text."""

    number: int
    answers: tuple[str, ...]
    calls: tuple[tuple[str, str], ...]

    @property
    def question(self) -> str:
        return f"#{self.number}: how warm is it?"


def dialogue(number: int) -> Dialogue:
    """Return a dialogue of one or two answers with one or two calls each, some after thoughts or text, and a last."""
    draw, answers, calls = Random(number), list[str](), list[tuple[str, str]]()
    for _ in range(draw.randrange(1, 3)):
        written = [call(draw, number % len(WAYS) < 4) for _ in range(draw.randrange(1, 3))]
        calls += written
        said = draw.choice(["", "", "I look.", "<think>\nHm, é.\n</think>\n\nSo?", "<think>\nHm.\n</think>\n\n"])
        marked = "\n".join(
            f'<tool_call>\n{{"name": "{name}", "arguments": {text}}}\n</tool_call>' for name, text in written
        )
        answers.append(f"{said}{chr(10) if said and not said.endswith(chr(10)) else ''}{marked}")
    return Dialogue(number, (*answers, f"It is {number} °C."), tuple(calls))


COMPACT: dict[str, Any] = {"ensure_ascii": False, "separators": (",", ":")}
"""Options of JSON as Pydantic AI writes the arguments of earlier calls, whatever the model has written."""


def call(draw: Random, is_any: bool) -> tuple[str, str]:
    """Return the name and the arguments of a call, in any of the ways in which models write JSON, or compactly."""
    city = {"city": draw.choice(TEXTS)} | draw.choice([{}, {"note": None}, {"note": draw.choice(TEXTS)}])
    name, arguments = draw.choice([("weather", city), ("total", {"amounts": [1, -2.5, draw.randrange(9)]})])
    options: dict[str, Any] = draw.choice([{}, COMPACT, {"ensure_ascii": False}]) if is_any else COMPACT
    return name, json.dumps(arguments, **options)


def weather(city: str, note: str | None = None) -> str:
    """Say how warm it is."""
    return f"{len(city)} degrees é {note!r}"


def total(amounts: list[float]) -> str:
    """Add numbers."""
    return str(sum(amounts))


FUNCTIONS: dict[str, Callable[..., str]] = {"weather": weather, "total": total}
PARAMETERS: dict[str, Any] = {
    "weather": {"city": {"type": "string"}, "note": {"type": ["string", "null"]}},
    "total": {"amounts": {"type": "array", "items": {"type": "number"}}},
}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "name": name, "parameters": {"type": "object", "properties": one}}
    for name, one in PARAMETERS.items()
]
OF_CHATS: list[Any] = [
    {"type": "function", "function": {key: tool[key] for key in ("name", "parameters")}} for tool in TOOLS
]


class Scripted(ThreadWorld):
    """A world of one rank with `hf.Engine`, whose model says what the dialogue of a prompt has there."""

    def __init__(self, dialogues: dict[int, Dialogue]) -> None:
        super().__init__({"max_model_len": 4096})
        self.tokenizer, self.dialogues = byte_tokenizer(HERMES), dialogues
        self.prompts: dict[int, list[str]] = defaultdict(list)
        self.tokenizer.add_tokens([AddedToken(mark, normalized=False) for mark in MARKS])
        self.marks = [(id, 100) for id in self.tokenizer.convert_tokens_to_ids(list(MARKS))]
        self.grammar_tokens = GrammarTokens(self.tokenizer)
        self.model = families.model("llama", "attnmesh", vocab_size=len(self.tokenizer), **SIZES)

    def run(self, address: str) -> None:
        made = Engine(self.model, None, max_rows=DIALOGUES, tokens_end=[256], grammars=self.grammar_tokens)
        self.engine: Any = made
        self.submit, made.submit = made.submit, self.submit_scripted  # type: ignore[method-assign]
        serve_rank_0(made, address, self.engine_sizes)

    def submit_scripted(self, ids: list[int], **options: Any) -> EngineRequest:
        prompt = self.tokenizer.decode(ids)
        number = int(re.findall(r"<\|user\|>#(\d+)", prompt)[0])
        self.prompts[number].append(prompt)
        answer = self.dialogues[number].answers[prompt.count("<|assistant|>") - 1]
        options |= {"grammar": Grammar(f"start: {literal(answer)}"), "logit_bias": self.marks, "temperature": 0}
        return self.submit(ids, **options)


@dataclass
class Held:
    """What a client has of a dialogue: calls, the last text, and the counts of tokens of each answer."""

    calls: list[tuple[str, str]]
    text: str
    usage: list[tuple[int, int, int]]
    """Tokens of the prompt, those of them that were found again, and those of the answer."""


async def hold_chat(client: openai.AsyncOpenAI, question: str, *, stream: bool) -> Held:
    """Hold a dialogue by chat completions."""
    held = Held([], "", [])
    messages: list[Any] = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
    while not held.text:
        asked: Any = {"model": NAME, "messages": messages, "tools": OF_CHATS}
        if stream:
            async with client.chat.completions.stream(**asked, stream_options={"include_usage": True}) as events:
                whole: Any = await events.get_final_completion()
        else:
            whole = await client.chat.completions.create(**asked)
        message, usage = whole.choices[0].message, whole.usage
        held.usage.append((usage.prompt_tokens, usage.prompt_tokens_details.cached_tokens, usage.completion_tokens))
        messages.append(message)
        for one in message.tool_calls or []:
            found = FUNCTIONS[one.function.name](**json.loads(one.function.arguments))
            held.calls.append((one.function.name, one.function.arguments))
            messages.append({"role": "tool", "tool_call_id": one.id, "content": found})
        assert whole.choices[0].finish_reason == ("tool_calls" if message.tool_calls else "stop")
        held.text = "" if message.tool_calls else message.content
    return held


async def hold_responses(client: openai.AsyncOpenAI, question: str, *, stream: bool) -> Held:
    """Hold a dialogue by responses."""
    held = Held([], "", [])
    items: list[Any] = [{"role": "user", "content": question}]
    while not held.text:
        asked: Any = {"model": NAME, "input": items, "instructions": SYSTEM, "tools": TOOLS}
        if stream:
            async with client.responses.stream(**asked) as events:
                whole: Any = await events.get_final_response()
        else:
            whole = await client.responses.create(**asked)
        usage = whole.usage
        held.usage.append((usage.input_tokens, usage.input_tokens_details.cached_tokens, usage.output_tokens))
        items += whole.output
        calls = [one for one in whole.output if one.type == "function_call"]
        for one in calls:
            found = FUNCTIONS[one.name](**json.loads(one.arguments))
            held.calls.append((one.name, one.arguments))
            items.append({"type": "function_call_output", "call_id": one.call_id, "output": found})
        held.text = "" if calls else whole.output_text
    return held


async def hold_agent(client: openai.AsyncOpenAI, question: str, *, stream: bool, of_chats: bool) -> Held:
    """Hold a dialogue by an agent."""
    model = OpenAIChatModel if of_chats else OpenAIResponsesModel
    agent = Agent(
        model(NAME, provider=OpenAIProvider(openai_client=client)), instructions=SYSTEM, tools=[weather, total]
    )

    async def read(_: Any, events: AsyncIterator[Any]) -> None:
        async for _ in events:
            pass

    run = await agent.run(question, event_stream_handler=read if stream else None)
    answers = [one for one in run.all_messages() if one.kind == "response"]
    calls = [(one.tool_name, one.args) for answer in answers for one in answer.tool_calls]
    counts = [(one.usage.input_tokens, one.usage.cache_read_tokens, one.usage.output_tokens) for one in answers]
    return Held(calls, run.output, counts)


WAYS: list[Callable[[openai.AsyncOpenAI, str], Any]] = [
    lambda client, question: hold_chat(client, question, stream=False),
    lambda client, question: hold_chat(client, question, stream=True),
    lambda client, question: hold_responses(client, question, stream=False),
    lambda client, question: hold_responses(client, question, stream=True),
    lambda client, question: hold_agent(client, question, stream=False, of_chats=True),
    lambda client, question: hold_agent(client, question, stream=True, of_chats=True),
    lambda client, question: hold_agent(client, question, stream=False, of_chats=False),
    lambda client, question: hold_agent(client, question, stream=True, of_chats=False),
]


@pytest.fixture(scope="module")
def scripted() -> Iterator[Scripted]:
    made = Scripted({number: dialogue(number) for number in range(DIALOGUES)})
    yield made
    made.grammar_tokens.close()


@pytest.fixture(scope="module")
def running(scripted: Scripted) -> Iterator[Served]:
    with served(scripted, tokenizer=scripted.tokenizer, max_requests=2 * DIALOGUES) as one:
        yield one


@pytest.mark.parametrize("count", [8, pytest.param(DIALOGUES, marks=pytest.mark.long)])
def test_dialogues_with_tools_end_and_go_on_from_their_keys(running: Served, scripted: Scripted, count: int) -> None:
    async def hold() -> list[Held]:
        async with openai.AsyncOpenAI(base_url=running.url + "/v1", api_key="none", max_retries=0) as client:
            return await asyncio.gather(*(WAYS[one.number % len(WAYS)](client, one.question) for one in said))

    said = [*scripted.dialogues.values()][:count]
    scripted.prompts.clear()
    for one, held in zip(said, asyncio.run(hold()), strict=True):
        assert held.text == one.answers[-1], one
        assert held.calls == [*one.calls], one
        prompts = scripted.prompts[one.number]
        assert len(prompts) == len(held.usage) == len(one.answers), one
        for before, answer, after in zip(prompts, one.answers, prompts[1:], strict=False):
            assert after.startswith(f"{before}{answer}<|end|>\n<|tool|>"), (one, after)
        results = [FUNCTIONS[name](**json.loads(text)) for name, text in one.calls]
        assert re.findall(r"<\|tool\|>(.*?)<\|end\|>", prompts[-1], re.DOTALL) == results
        for (tokens, _, made), (_, found, _) in zip(held.usage, held.usage[1:], strict=False):
            assert found >= 0.99 * (tokens + made), (one, held.usage)
