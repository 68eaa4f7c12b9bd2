"""`python -m benchmarks storage`: what 8 bits of keys and values cost a language model, by storage and scale's grain.

The prompt is Python's documentation. Its keys are computed once, attended as they are, and stored in several ways.
Then the model reads on: the next tokens of the text, or questions about needles in it, and their answers.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from math import prod
from pydoc_data.topics import topics
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, pad
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.cache_utils import DynamicLayer

from attnmesh import hf
from attnmesh.cache.cache import KVCache
from attnmesh.cli.launch import Send
from attnmesh.core.storage import STORAGES
from attnmesh.hf.load import open_model, open_tokenizer

NEEDLES, DEPTHS = 20, (0.0, 0.25, 0.5, 0.75, 1.0)

PLACES = (
    *("Lima", "Oslo", "Cairo", "Delhi", "Paris", "Tokyo", "Quito", "Accra", "Seoul", "Hanoi"),
    *("Rome", "Bern", "Riga", "Minsk", "Sofia", "Dakar", "Tunis", "Perth", "Dublin", "Kyiv"),
)

Rounding = Callable[[Tensor], Tensor]
"""Function that returns new keys or values, (batch, heads, tokens, columns), as they are stored."""


@dataclass(frozen=True)
class Row:
    """One way to store keys and values."""

    contender: str
    bits: float
    """Bits of a number, scales included."""
    perplexity: float
    beside: float
    """Change of the perplexity relative to bfloat16, in per cent."""
    found: tuple[int, ...] | None = None
    """Answers that are right, of 20 at each depth."""
    same_answers: int | None = None
    """Answers with the tokens of bfloat16, of all."""


@dataclass(frozen=True)
class Request:
    """A model, and the tokens of its context and of the text after it."""

    model: str
    context: int
    after: int


class Grain(NamedTuple):
    """Numbers that share a scale: of so many tokens, heads and columns, 0 for all of them."""

    name: str
    tokens: int
    heads: int
    columns: int

    def round(self, x: Tensor, storage: str) -> Tensor:
        """Return the numbers after they were stored, with scales in float32."""
        number_format, padded = STORAGES[storage], pad(x, (0, 0, 0, -x.shape[2] % max(1, self.tokens)))
        sizes = zip((self.heads, self.tokens, self.columns), padded.shape[1:], strict=True)
        heads, tokens, columns = (size or whole for size, whole in sizes)
        blocks = padded.unflatten(3, (-1, columns)).unflatten(2, (-1, tokens)).unflatten(1, (-1, heads))
        scale = blocks.abs().amax((2, 4, 6), keepdim=True).clamp(min=1e-30) / number_format.largest
        numbers = blocks / scale
        rounded = (numbers.round() if storage == "int8" else numbers).to(number_format.dtype).to(x.dtype) * scale
        kv_tensors: Tensor = rounded.reshape(padded.shape)[:, :, : x.shape[2]]
        return kv_tensors

    def bits(self, shape: Sequence[int]) -> float:
        """Return the bits of a number, with a scale of bfloat16 for each group."""
        group = prod(size or whole for size, whole in zip((self.heads, self.tokens, self.columns), shape, strict=True))
        return 8 + 16 / group


GRAINS = (
    Grain("32 columns", 1, 1, 32),
    Grain("a token's head", 1, 1, 0),
    Grain("a token", 1, 0, 0),
    Grain("16 tokens of a head", 16, 1, 0),
    Grain("a column of 16 tokens", 16, 1, 1),
    Grain("a column of 128 tokens", 128, 1, 1),
    Grain("all tokens", 0, 0, 0),
)


class _Layer(DynamicLayer):  # type: ignore[misc]
    """Keys and values of stock transformers that are rounded when they are stored."""

    def __init__(self, rounds: Rounding) -> None:
        super().__init__()
        self.rounds = rounds

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        updated: tuple[Tensor, Tensor] = super().update(
            self.rounds(key_states), self.rounds(value_states), *args, **kwargs
        )
        return updated


Keys = Sequence[tuple[Tensor, Tensor]]
"""The keys and values of each layer, as they were computed."""

Reader = Callable[[Keys, Tensor], Tensor]
"""Function that stores keys and values, reads on with tokens (1, count), and returns the logits, (count, words)."""


def _stock(model: Any, rounds: Rounding, keys: Keys, ids: Tensor) -> Tensor:
    cache = DynamicCache(config=model.config)
    cache.layers = [_Layer(rounds) for _ in keys]
    for layer, (k, v) in zip(cache.layers, keys, strict=True):
        layer.update(k, v)
    logits: Tensor = model(ids, past_key_values=cache, use_cache=True).logits[0]
    return logits


def _ours(model: Any, storage: str | None, keys: Keys, ids: Tensor) -> Tensor:
    cache, kv_caches = hf.ShardedCache(model.config, storage=storage), []
    for k, v in keys:
        batch, heads, tokens, width = k.shape
        kv_cache = KVCache(
            None,
            batch=batch,
            kv_heads=heads,
            head_dim=width,
            capacity=tokens + ids.shape[1],
            dtype=k.dtype,
            storage=storage,
        )
        kv_cache.append(k, v)
        kv_caches.append(kv_cache)
    cache.set_kv_caches(kv_caches)
    logits: Tensor = model(ids, past_key_values=cache, use_cache=True).logits[0]
    return logits


def _readers(stock: Any, ours: Any, shape: Sequence[int]) -> Iterator[tuple[str, float, Reader, bool]]:
    """Yield (name, bits of a number, reader, whether it looks for needles), bfloat16 first."""
    yield "bfloat16", 16, partial(_stock, stock, lambda x: x.bfloat16().to(x.dtype)), True
    yield "float32", 32, partial(_stock, stock, lambda x: x), True
    for name, number_format in STORAGES.items():
        bits = 8 * number_format.row_width(shape[2]) / shape[2]
        yield f'storage="{name}"', bits, partial(_ours, ours, name), True
    for name in STORAGES:
        for grain in GRAINS:
            rounds = partial(grain.round, storage=name)
            yield f"{name}, {grain.name}", grain.bits(shape), partial(_stock, stock, rounds), False


@torch.no_grad()
def rows(request: Request, add: Send) -> None:
    """Measure each way to store keys and values."""
    tokenizer = open_tokenizer(request.model)
    ours = open_model(request.model, "float32", torch.device("cpu"))  # raises where weights are missing
    stock = AutoModelForCausalLM.from_pretrained(request.model, dtype=torch.float32).eval()
    text = "\n\n".join(topics[name] for name in ("specialnames", "typesmapping", "assignment", "compound"))
    ids = torch.tensor([tokenizer(text)["input_ids"][: request.context + request.after]])
    keys = _computed(stock, ids[:, : request.context])
    contexts = [_Haystack.of(tokenizer, ids[0, : request.context], turn) for turn in range(len(DEPTHS))]
    haystacks = [(each, _computed(stock, each.ids)) for each in contexts]
    plain, answers = 0.0, None
    for name, bits, reader, looks in _readers(stock, ours, keys[0][0].shape[1:]):
        perplexity = _perplexity(reader(keys, ids[:, request.context :]), ids[0, request.context :])
        plain = plain or perplexity
        row = Row(name, round(bits, 3), round(perplexity, 5), round(100 * (perplexity / plain - 1), 3))
        if looks:
            replies = [each.answers(reader(computed, each.questions)) for each, computed in haystacks]
            answers = answers or replies
            right = [each.right(tokens) for each, tokens in zip(contexts, replies, strict=True)]
            found_by_depth = tuple(sum(depths.count(depth) for depths in right) for depth in DEPTHS)
            same_count = sum(one == other for one, other in zip(chain(*replies), chain(*answers), strict=True))
            row = replace(row, found=found_by_depth, same_answers=same_count)
        add(row)


def _computed(model: Any, ids: Tensor) -> Keys:
    """Return the keys and values of a prompt."""
    cache = DynamicCache(config=model.config)
    model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
    return [(layer.keys, layer.values) for layer in cache.layers]


def _perplexity(logits: Tensor, ids: Tensor) -> float:
    """Return the perplexity of the tokens after the first, given the logits of each."""
    return float(cross_entropy(logits[:-1].double(), ids[1:]).exp())


class _Haystack(NamedTuple):
    """A context with needles, the questions with their answers, and where the answers are."""

    ids: Tensor
    questions: Tensor
    spans: tuple[tuple[int, int], ...]
    depths: tuple[float, ...]

    @staticmethod
    def of(tokenizer: Any, text: Tensor, turn: int) -> "_Haystack":
        """Return the context of one turn: over all turns each needle stands once at each depth."""
        numbers = torch.randint(1000, 9999, (NEEDLES,), generator=torch.Generator().manual_seed(turn)).tolist()
        depths = tuple(DEPTHS[(number + turn) % len(DEPTHS)] for number in range(NEEDLES))
        needles = [f"\nThe code of {place} is {code}.\n" for place, code in zip(PLACES, numbers, strict=True)]
        encoded = [tokenizer(needle)["input_ids"] for needle in needles]
        filler = len(text) - sum(map(len, encoded))
        pieces, before = list[Tensor](), 0
        for depth in DEPTHS:
            pieces.append(text[before : round(depth * filler)])
            before = round(depth * filler)
            pieces += [torch.tensor(ids) for ids, its in zip(encoded, depths, strict=True) if its == depth]
        questions, spans = list[int](), list[tuple[int, int]]()
        for place, code in zip(PLACES, numbers, strict=True):
            questions += tokenizer(f"\nThe code of {place} is")["input_ids"]
            answer = tokenizer(f" {code}")["input_ids"]
            spans.append((len(questions), len(questions) + len(answer)))
            questions += [*answer, *tokenizer(".")["input_ids"]]
        return _Haystack(torch.cat(pieces)[None], torch.tensor([questions]), tuple(spans), depths)

    def answers(self, logits: Tensor) -> list[list[int]]:
        """Return the likeliest tokens where the answers stand."""
        likeliest = logits.argmax(-1)
        return [likeliest[start - 1 : stop - 1].tolist() for start, stop in self.spans]

    def right(self, answers: Sequence[list[int]]) -> list[float]:
        """Return the depths of the needles that were found."""
        needles = zip(answers, self.spans, self.depths, strict=True)
        return [depth for answer, (start, stop), depth in needles if answer == self.questions[0, start:stop].tolist()]
