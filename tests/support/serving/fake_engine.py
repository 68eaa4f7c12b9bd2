"""An engine without a model: its text is known from the prompt, and each token comes at a step of all ranks."""

import queue
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from tokenizers import Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from attnmesh.cli.serve_worker import ServeSettings
from attnmesh.errors import Busy, InputError, TooLong
from attnmesh.serve.rank_requests import serve_rank_0
from attnmesh.serve.routes import SAMPLED
from tests.support.ranks.pool import on_each_rank

SAID = "The cafés of Zürich open at 7 😀, and close late. "
"""The text of each answer, from a place that depends on the prompt on; it goes round."""

TEMPLATE = (
    "{% if tools %}[{{ tools | length }} tools]{% endif %}"
    "{% for m in messages %}{% if m.role == 'developer' %}{{ raise_exception('no developers') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
)
CALLS_OF_QWEN = (
    "{% for c in m.tool_calls or [] %}{% if not loop.first or m.content %}{{ '\\n' }}{% endif %}"
    '<tool_call>\n{"name": "{{ c.function.name }}", "arguments": '
    "{% if c.function.arguments is string %}{{ c.function.arguments }}"
    "{% else %}{{ c.function.arguments | tojson }}{% endif %}}\n</tool_call>{% endfor %}"
)
HERMES = (
    "{% if tools %}<tools>{% for t in tools %}{{ t | tojson }}{% endfor %}</tools>{% endif %}"
    "{% for m in messages %}{% if m.role == 'tool' %}<|tool|>{{ m.content }}<|end|>\n"
    "{% else %}<|{{ m.role }}|>{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}"
    "{{ m.content }}" + CALLS_OF_QWEN + "<|end|>\n{% endif %}{% endfor %}<|assistant|>"
)
"""A template in the style of Qwen's."""

LONGEST = 400
POISON = 255
"""A prompt that begins with this token fails alone."""


def byte_tokenizer(template: str | None = TEMPLATE) -> Any:
    """Return a tokenizer with a token for each byte, and one for the end."""
    signs = sorted(pre_tokenizers.ByteLevel.alphabet())
    model = Tokenizer(BPE({sign: i for i, sign in enumerate(signs)}, []))
    model.pre_tokenizer, model.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=model, eos_token="<end>")
    tokenizer.chat_template = template
    return tokenizer


def save_tiny(folder: Path, template: str | None = TEMPLATE, **sizes: int) -> str:
    """Save a small model with random weights, and its tokenizer. Return the folder."""
    from tests.support.models import families  # which ranks without a model need not import

    tokenizer = byte_tokenizer(template)
    families.model("llama", "sdpa", vocab_size=len(tokenizer), **sizes).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@dataclass
class Token:
    id: int
    logprob: float | None
    top: list[tuple[int, float]]


@dataclass
class Stream:
    ids: list[int]
    options: dict[str, Any]
    given: list[int]
    """Tokens so far, those that are replayed among them."""
    script: list[int] | None = None
    """All tokens of the answer, after which it ends by itself."""
    failure: BaseException | None = None
    """Ends the answer after its script."""
    out: "queue.Queue[Token | BaseException | None]" = field(default_factory=queue.Queue)
    cached_tokens: int = 0
    finish_reason: str | None = None
    cancelled: bool = False

    def __iter__(self) -> Iterator[Token]:
        if self.ids[0] == POISON:
            raise InputError("prompt", "no poison", "some", "leave it out")
        while (token := self.out.get()) is not None:
            if isinstance(token, BaseException):
                raise token
            yield token

    def cancel(self) -> None:
        self.cancelled = True


def said(ids: list[int], options: dict[str, Any], text: list[int]) -> Callable[[int], int]:
    """Return the token of each place of an answer; greedy ones do not depend on the seed."""
    start = sum(ids) + (0 if options["temperature"] == 0 else 7 * options["seed"])
    return lambda place: text[(start + place) % len(text)]


class FakeEngine:
    """Gives each running request one token a step; `step` takes part with all ranks and returns whether to go on."""

    def __init__(self, step: Callable[[bool], bool] = bool, *, rows: int = 4, waiting: int = 4, pause: float = 0.002):
        self.step, self.rows, self.waiting, self.pause = step, rows, waiting, pause
        self.text: list[int] = byte_tokenizer()(SAID)["input_ids"]
        self.streams: list[Stream] = []
        self.scripts: list[str | tuple[str, BaseException]] = []
        """Texts of the next answers, each of which ends by itself, or by an error."""
        self.lock, self.closed = threading.Lock(), False
        self.tokens, self.steps = 0, 0
        self.error: BaseException | None = None

    def submit(self, ids: list[int], *, replay: list[int] | None = None, **options: Any) -> Stream:
        assert options.keys() - {"grammar"} == {*SAMPLED, "logit_bias", "max_new_tokens", "seed", "logprobs", "salt"}
        if len(ids) + options["max_new_tokens"] > LONGEST:
            raise TooLong("prompt", f"at most {LONGEST} tokens", str(len(ids)), "shorten it")
        with self.lock:
            if replay is None and len(self.streams) >= self.rows + self.waiting:
                raise Busy("submit", "a queue with room", "a full one", "submit later")
            stream = Stream(ids, options, [*(replay or ())], cached_tokens=len(ids) // 2)
            if self.scripts:
                script = self.scripts.pop(0)
                text, stream.failure = (script, None) if isinstance(script, str) else script
                stream.script = byte_tokenizer()(text)["input_ids"]
            self.streams.append(stream)
            return self.streams[-1]

    def run(self) -> None:
        try:
            while self.step(not self.closed):
                time.sleep(self.pause)
                self.steps += 1
                with self.lock:
                    for stream in self.streams[: self.rows]:
                        self.advance(stream)
                    self.streams = [stream for stream in self.streams if stream.finish_reason is None]
        except BaseException as error:  # as `hf.Engine` ends
            self.error = error
            for stream in self.streams:
                stream.out.put(error)
            raise

    def advance(self, stream: Stream) -> None:
        place = len(stream.given)
        if place == stream.options["max_new_tokens"] or stream.cancelled:
            stream.finish_reason = "cancelled" if stream.cancelled else "length"
            stream.out.put(None)
            return
        if stream.script is not None and place == len(stream.script):
            stream.finish_reason = "stop"
            stream.out.put(stream.failure)
            return
        script = stream.script
        id = script[place] if script is not None else said(stream.ids, stream.options, self.text)(place)
        stream.given.append(id)
        count = stream.options["logprobs"]
        stream.out.put(Token(id, -0.5 if count else None, [((id + n) % 256, -0.5 - n) for n in range(count)]))
        self.tokens += 1

    def follow(self) -> None:
        while self.step(True):
            pass

    def close(self) -> None:
        self.closed = True

    def metrics(self) -> dict[str, Any]:
        return {
            "running": float(len(self.streams)),
            "tokens": float(self.tokens),
            "cache_bytes": [10.0, 12.0],
            "merge_share": 0.25,
            "exchanges": float(self.steps),
        }


def together(going: bool) -> bool:
    """A step of all ranks: rank 0 says whether it is not the last."""
    flag = torch.tensor(int(going))
    dist.broadcast(flag, 0)
    return bool(flag.item())


@on_each_rank
def serve_as_rank(address: str, pause: float) -> None:
    """Serve as one of several ranks."""
    engine = FakeEngine(together, pause=pause)
    if dist.get_rank() == 0:
        serve_rank_0(engine, address, {"max_model_len": LONGEST})
    else:
        engine.follow()


class ThreadWorld:
    """A world of one rank in a thread, for tests of what comes before ranks."""

    def __init__(self, engine_sizes: Any = MappingProxyType({}), **options: Any) -> None:
        self.options, self.engine_sizes = options, {"max_model_len": LONGEST, **engine_sizes}
        self.engine = FakeEngine(**options)

    def made(self) -> FakeEngine:
        return FakeEngine(**self.options)

    def run(self, address: str) -> None:
        self.engine = self.made()
        serve_rank_0(self.engine, address, self.engine_sizes)

    def kill(self, *, again: bool = False) -> None:
        self.engine.close()


def answer(ids: list[int], options: dict[str, Any], count: int) -> str:
    """The text of an answer of `count` tokens."""
    tokenizer = byte_tokenizer()
    token = said(ids, options, tokenizer(SAID)["input_ids"])
    text: str = tokenizer.decode([token(place) for place in range(count)], skip_special_tokens=True)
    return text


def fake_model_rank(settings: ServeSettings, address: str) -> None:
    """Stand in for `serve_rank` of the command, without weights."""
    engine = FakeEngine(together, pause=0.02)
    if dist.get_rank() == 0:
        serve_rank_0(engine, address, {"max_model_len": settings.engine["max_model_len"]})
    else:
        engine.follow()


def sentencepiece_tokenizer() -> Any:
    """Return a tokenizer of SentencePiece's kind: words begin with their space, and other signs are bytes."""
    special = ["<s>", "</s>", "<unk>", "<|channel|>", "<pad>"]
    signs = [f"<0x{byte:02X}>" for byte in range(256)]
    words = ["▁", *"abcdefghijklmnopqrstuvwxyzTPé.", "▁is", "is", "▁Paris", "Paris", "▁The", "▁a"]
    parts = ["P a", "Pa r", "Par i", "Pari s", "▁ Paris", "i s", "▁ is", "T h", "Th e", "▁ The", "▁ a"]
    words += [one.replace(" ", "") for one in parts if one.replace(" ", "") not in words]
    vocabulary = {sign: place for place, sign in enumerate([*special, *signs, *words])}
    merges = [tuple(one.split(" ")) for one in parts]
    model = Tokenizer(BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True))
    model.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    decoding = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    model.decoder = decoders.Sequence(decoding)
    begin = ("<s>", vocabulary["<s>"])
    model.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[begin])
    marks = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=model, **marks, extra_special_tokens={"channel_token": "<|channel|>"}
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer


SERVE = """
import sys
import attnmesh.cli.serve_worker as worker
from tests.support.serving.fake_engine import fake_model_rank
worker.serve_rank = fake_model_rank
sys.argv = ["attnmesh", *sys.argv[1:]]
from attnmesh_command import main
main()
"""
