"""Answers of the server beside those of stock `generate`: the same text, places, bytes and log-probabilities.

Sampled ones are those that stock `generate` draws after `torch.manual_seed(seed)`: request or model name `top_k`.
"""

import codecs
import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.convert_slow_tokenizer import bytes_to_unicode

from attnmesh.cli.generate_prompt import find_model
from attnmesh.cli.mesh_option import MeshOptions
from attnmesh.cli.output import Status
from attnmesh.cli.serve_command import LocalRanks
from attnmesh.cli.serve_worker import ServeSettings
from attnmesh.hf.load import open_generation_config
from attnmesh.serve.model_defaults import read_model_defaults, tokens_that_end
from tests.support.models import families
from tests.support.serving.fake_engine import byte_tokenizer, sentencepiece_tokenizer
from tests.support.serving.served import NAME, Served, served

KINDS = {"pieces": sentencepiece_tokenizer, "bytes": byte_tokenizer}

DEFAULTS: dict[str, dict[str, Any]] = {
    "pieces": {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "repetition_penalty": 1.1},
    "bytes": {"temperature": 0.9, "top_k": 25, "min_p": 0.02},
}
"""What the models' generation_config has for requests that name nothing."""

LESSON = (
    "The café is a zoo. Paris is a 😀 town, and the é of Zoé is a letter.\nThe capital is Paris. "
    "A ship is a 🚢 of wood; 東京 is a town.  Zürich is, too: ñ, ü and ß are letters. "
)
"""What the models have learned, so that most of what they draw is text."""

ROUNDING = 1e-4
"""Ranks add keys in another order. Logits to 20 are rounded by 1e-6, and a softmax of few layers adds ten of these."""

PROMPTS = [
    *(
        "The capital is",
        "The café",
        "Paris ",
        " a",
        "a",
        " ",
        "\n",
        "東京 is a",
        "A ship is a 🚢",
        "😀",
        "Zoé,  is\n\n",
    ),
    "The é is a town. 😀 " * 20,
]

SETTINGS: list[dict[str, Any]] = [
    {"temperature": 0, "logprobs": 3},
    {"temperature": 1.3, "top_k": 0, "top_p": 1, "min_p": 0.05, "logprobs": 5, "stream": True},
    {"top_p": 0.6, "repetition_penalty": 1.4, "n": 2, "logprobs": 1},
    {"temperature": 0, "stop": ["is", "é"], "logprobs": 0, "stream": True},
    {"chat": True, "logprobs": True, "top_logprobs": 4, "stream": True},
    {"chat": True, "temperature": 1.5, "top_k": 0, "top_p": 0.95, "logprobs": True, "top_logprobs": 20},
    {},
    {"temperature": 0, "repetition_penalty": 1, "max_tokens": 40, "logprobs": 1},
    {"temperature": 0.5, "top_k": 3, "logprobs": 2, "max_tokens": 24, "stream": True},
    {"temperature": 2.0, "top_k": 0, "top_p": 1, "min_p": 0, "repetition_penalty": 1, "logprobs": 5},
    {"min_p": 0.2, "stop": ["é ", " a", "wn", "😀"], "logprobs": 0, "stream": True},
    {"top_k": 1, "seed": 1 << 62, "logprobs": 0},
    {"temperature": 0, "max_tokens": 1, "logprobs": 5},
    {"chat": True, "temperature": 0, "stop": ". ", "logprobs": True},
    {"chat": True, "temperature": 0, "repetition_penalty": 1.2, "stream": True},
    {"chat": True, "top_p": 0.3, "n": 3, "stream": True},
    {"chat": True, "top_p": 0, "logprobs": True},
    {"chat": True, "min_p": 0.5, "top_k": 0, "top_p": 1},
    {"chat": True, "max_completion_tokens": 3, "logprobs": True, "top_logprobs": 0, "stream": True},
    {"chat": True, "stop": ["T", "P", "z", "."], "logprobs": True, "stream": True},
]
"""Fields of requests. The first six are in the suite."""

NEW = 9
"""New tokens of a request that names no other number."""

SHORTER, WHOLE = 6, 300


@dataclass
class Answer:
    """One choice; each token has its bytes, log-probability, place in completions, and the likeliest ones."""

    text: str
    reason: str
    data: list[bytes] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    places: list[int] = field(default_factory=list)
    top: list[dict[bytes, float]] = field(default_factory=list)


def taught(tokenizer: Any) -> Any:
    """Return a model that has learned the lesson roughly."""
    model = families.model("llama", "sdpa", vocab_size=len(tokenizer), num_hidden_layers=2, initializer_range=0.1)
    lesson = torch.tensor(tokenizer(LESSON * 3, add_special_tokens=False)["input_ids"])
    steps = torch.optim.Adam(model.parameters(), lr=4e-3)
    for first in range(60):
        ids = lesson[first : first + len(lesson) // 2][None]
        model(ids, labels=ids).loss.backward()
        steps.step()
        steps.zero_grad()
    return model


def save(kind: str, folder: Path) -> None:
    """Save a model, its tokenizer and its generation_config."""
    tokenizer = KINDS[kind]()
    model = taught(tokenizer)
    ends = [tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("z")]
    model.generation_config = GenerationConfig(
        do_sample=True, eos_token_id=ends, pad_token_id=ends[0], **DEFAULTS[kind]
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


class Reference:
    """Stock transformers, and the bytes of its tokens by what the vocabulary spells."""

    def __init__(self, kind: str, folder: Path, tokenizer: Any) -> None:
        self.kind, self.tokenizer = kind, tokenizer
        self.model = AutoModelForCausalLM.from_pretrained(folder).eval()
        self.ends = self.model.generation_config.eos_token_id
        self.silent = {tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id}
        self.signs = {sign: byte for byte, sign in bytes_to_unicode().items()}

    def bytes_of(self, id: int) -> bytes:
        sign = self.tokenizer.convert_ids_to_tokens(id)
        if id in self.silent:
            return sign.encode() if self.kind == "pieces" else b"<end>"
        if self.kind == "bytes":
            return bytes(self.signs[one] for one in sign)
        byte = re.fullmatch("<0x(..)>", sign)
        return bytes.fromhex(byte[1]) if byte else sign.replace("▁", " ").encode()

    def ids(self, prompt: str, chat: bool) -> list[int]:
        if not chat:
            return list(self.tokenizer(prompt)["input_ids"])
        messages = [{"role": "user", "content": prompt}]
        return list(self.tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"])

    def decoded(self, ids: list[int]) -> str:
        said = [id for id in ids if id not in self.silent]
        return str(self.tokenizer.decode(said, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def text(self, prompt: list[int], new: list[int], data: bytes) -> str:
        """Return the tokenizer's text after the prompt."""
        if self.kind == "pieces" and not is_text(data):  # it spoils the whole characters beside half ones
            return data.decode(errors="replace") if prompt else data.decode(errors="replace").removeprefix(" ")
        return self.decoded(prompt + new).removeprefix(self.decoded(prompt))

    def generated(self, ids: list[int], fields: dict[str, Any], seed: int) -> tuple[list[int], list[torch.Tensor]]:
        """Return the tokens of `generate` with the fields that a request names, and log-probabilities of all."""
        options = {name: fields[name] for name in DRAWN if name in fields}
        if options.get("temperature") == 0:
            options = {name: options[name] for name in options.keys() & {"repetition_penalty"}} | {"do_sample": False}
        options["max_new_tokens"] = fields.get("max_completion_tokens") or fields["max_tokens"]
        torch.manual_seed(seed)
        given, kept = torch.tensor([ids]), {"return_dict_in_generate": True, "output_logits": True}
        found = self.model.generate(given, attention_mask=torch.ones_like(given), **options, **kept)
        return found.sequences[0, len(ids) :].tolist(), [one[0].log_softmax(-1) for one in found.logits]

    def answer(self, prompt: str, chat: bool, fields: dict[str, Any], seed: int) -> Answer:
        """Return what the server ought to say."""
        ids = self.ids(prompt, chat)
        new, logprobs = self.generated(ids, fields, seed)
        ended = new[-1] in self.ends
        new = new[:-1] if ended else new
        data = [b"" if id in self.silent else self.bytes_of(id) for id in new]
        text = self.text([] if chat else ids, new, b"".join(data))
        starts = [0, *accumulate(map(len, data))][: len(data)]
        places = [character_at(b"".join(data), start) for start in starts]
        said = cut(text, fields.get("stop", []))
        if said is not None:
            dropped = len(b"".join(data).decode(errors="replace")) - len(text)  # the space of a message's first word
            new = [id for id, place in zip(new, places, strict=True) if max(0, place - dropped) < len(said)]
        answer = Answer(text if said is None else said, "length" if said is None and not ended else "stop")
        if "logprobs" not in fields or fields["logprobs"] is False:
            return answer
        count = fields.get("top_logprobs", 0) if chat else fields["logprobs"]
        answer.data, answer.places = [self.bytes_of(id) for id in new], [] if chat else places[: len(new)]
        answer.logprobs = [float(logprobs[place][id]) for place, id in enumerate(new)]
        for place, id in enumerate(new):
            likeliest = logprobs[place].topk(count).indices.tolist()
            shown = {self.bytes_of(one): float(logprobs[place][one]) for one in reversed(likeliest)}
            answer.top.append(shown if chat else shown | {self.bytes_of(id): answer.logprobs[place]})
        return answer


DRAWN = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def is_text(data: bytes) -> bool:
    return "\ufffd" not in data.decode(errors="replace")


def character_at(data: bytes, place: int) -> int:
    """Return the number of the character that a byte belongs to, where broken ones are characters, too."""
    broken: list[tuple[int, int]] = []

    def note(error: UnicodeError) -> tuple[str, int]:
        assert isinstance(error, UnicodeDecodeError)
        broken.append((error.start, error.end))
        return "\ufffd", error.end

    codecs.register_error("noted", note)
    data.decode(errors="noted")
    inside = {byte for start, end in broken for byte in range(start + 1, end)}
    known = {byte for start, end in broken for byte in range(start, end)}
    inside |= {byte for byte in range(len(data)) if 0x80 <= data[byte] < 0xC0 and byte not in known}
    return (
        sum(byte not in inside for byte in range(place + 1)) - 1
        if place < len(data)
        else len(data.decode(errors="replace"))
    )


def cut(text: str, stops: str | list[str]) -> str | None:
    """Return the text before the stop string that ends first; None without one."""
    found = [one for one in ([stops] if isinstance(stops, str) else stops) if one in text]
    if not found:
        return None
    ends = min(text.find(one) + len(one) for one in found)
    return text[: min(place for one in found if (place := text[:ends].find(one)) >= 0)]


def written(token: str) -> bytes:
    """Return the bytes of a token as completions write it."""
    if token.startswith("bytes:"):
        return bytes.fromhex(token.removeprefix("bytes:").replace("\\x", ""))
    return token.encode()


def likeliest(entries: list[dict[str, Any]]) -> dict[bytes, float]:
    return {bytes(entry["bytes"] or entry["token"].encode()): entry["logprob"] for entry in reversed(entries)}


def ask(one: Served, prompt: str, chat: bool, fields: dict[str, Any]) -> list[Answer]:
    """Return the server's choices."""
    content = {"messages": [{"role": "user", "content": prompt}]} if chat else {"prompt": prompt}
    status, found = one.ask("/v1/chat/completions" if chat else "/v1/completions", fields | content | {"model": NAME})
    assert status == 200, found
    events = [found]
    if fields.get("stream"):
        lines = [line.removeprefix("data: ") for line in found.split("\n\n") if line.startswith("data: ")]
        assert lines.pop() == "[DONE]"
        events = [json.loads(line) for line in lines]
    answers = [Answer("", "") for _ in range(fields.get("n", 1))]
    for choice in (choice for one in events for choice in one["choices"]):
        read_choice(choice, answers[choice["index"]], chat)
    return answers


def read_choice(choice: dict[str, Any], answer: Answer, chat: bool) -> None:
    """Add what a choice, or a part of it, says."""
    said = choice.get("delta", choice.get("message", {})).get("content", "") if chat else choice["text"]
    answer.text, answer.reason = answer.text + said, choice["finish_reason"] or answer.reason
    shown = choice["logprobs"]
    if shown and chat:
        answer.data += [bytes(one["bytes"] or one["token"].encode()) for one in shown["content"]]
        answer.logprobs += [one["logprob"] for one in shown["content"]]
        answer.top += [likeliest(one["top_logprobs"]) for one in shown["content"]]
    elif shown:
        answer.data += map(written, shown["tokens"])
        answer.logprobs, answer.places = answer.logprobs + shown["token_logprobs"], answer.places + shown["text_offset"]
        answer.top += [{written(name): value for name, value in one.items()} for one in shown["top_logprobs"]]


def compare(found: Answer, wanted: Answer) -> None:
    """Compare two answers, and an answer's bytes with its text."""
    assert (found.text, found.reason) == (wanted.text, wanted.reason)
    assert (found.data, found.places) == (wanted.data, wanted.places)
    assert found.logprobs == pytest.approx(wanted.logprobs, abs=ROUNDING)
    for one, other in zip(found.top, wanted.top, strict=True):
        both = one.keys() & other.keys()
        assert {token: one[token] for token in both} == pytest.approx({t: other[t] for t in both}, abs=ROUNDING)
        # Either of two tokens that are as likely to rounding may be the last that is listed.
        ties = [sorted(top[token] for token in top.keys() - both) for top in (one, other)]
        assert ties[0] == pytest.approx(ties[1], abs=ROUNDING)


def prompts(count: int) -> list[str]:
    """Return texts with signs of one to four bytes, and spaces at the ends."""
    draw, words = (
        Random(1),
        ["The", "é", "東京", "🚢", "  ", "\n", "is", "Zürich", ",", "a", "ﬁ", "e\u0301", "👩‍🚀", "<", "\t"],
    )
    made = [
        "".join(draw.choice(["", " "]) + draw.choice(words) for _ in range(draw.randint(1, 40)))
        for _ in range(count - len(PROMPTS))
    ]
    return PROMPTS + made


@pytest.fixture(scope="module", params=KINDS)
def running(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Served, Reference]]:
    folder = tmp_path_factory.mktemp("model")
    save(request.param, folder)
    found = find_model(str(folder), 2, MeshOptions("keys=2"), Status(""))
    config = open_generation_config(found.path)
    engine = {"max_rows": 8, "max_queue": 32, "tokens_end": tokens_that_end(config, found.tokenizer)}
    settings = ServeSettings(found.for_ranks, "auto", "auto", 60.0, engine | {"max_model_len": 2048})
    defaults = read_model_defaults(config)
    with served(LocalRanks(2, settings), tokenizer=found.tokenizer, max_requests=40, defaults=defaults) as one:
        yield one, Reference(request.param, folder, found.tokenizer)


def compare_all(
    running: tuple[Served, Reference], texts: list[str], settings: list[dict[str, Any]], every: int = 1
) -> None:
    """Ask for each text with each setting, or with one in `every` of them in turn, many at once."""
    one, reference = running
    asked = []
    for place, setting in enumerate(settings):
        fields = {"max_tokens": NEW, "seed": place, **setting}
        chat = fields.pop("chat", False)
        if "max_completion_tokens" in fields:
            del fields["max_tokens"]
        asked += [
            (text, chat, fields | {"seed": fields["seed"] + number})
            for number, text in enumerate(texts)
            if (place + number) % every == 0
        ]
    with ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(lambda given: ask(one, *given), asked))
    unlike = []
    valid = 0
    for (text, chat, fields), choices in zip(asked, answers, strict=True):
        for index, found in enumerate(choices):
            wanted = reference.answer(text, chat, fields, fields["seed"] + index)
            valid += "\ufffd" not in wanted.text
            try:
                compare(found, wanted)
            except AssertionError as error:
                unlike.append((text[:40], fields, found, wanted, str(error)))
    assert not unlike, f"{len(unlike)} answers, the first: {unlike[0]}"
    assert valid > len(asked) / 2


def test_answers_are_those_of_generate(running: tuple[Served, Reference]) -> None:
    compare_all(running, PROMPTS, SETTINGS[:SHORTER], every=6)


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_all_answers_are_those_of_generate(running: tuple[Served, Reference]) -> None:
    compare_all(running, prompts(WHOLE), SETTINGS)
