"""A request of an engine: its sampling, and its tokens as they come."""

import queue
from collections.abc import Iterator
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from attnmesh.errors import ArgumentError, ModelError
from attnmesh.hf.images.inputs import without_last_text
from attnmesh.hf.serving.draws import draw_token, generator_after
from attnmesh.hf.serving.grammar_masks import GrammarState, apply_mask
from attnmesh.hf.serving.row_guesses import RowGuesses

MOST_BIAS = 100
"""Largest bias of a logit, the limit of OpenAI's interface."""

COLDEST, HOTTEST = 1e-5, 1e6
"""Lowest and highest temperature of draws. At a lower one the likeliest token has all of the probability."""


@dataclass(frozen=True)
class DrawnToken:
    """A new token. `logprob` and the likeliest tokens, `top`, are the model's, before biases, penalties and cuts."""

    id: int
    logprob: float | None = None
    top: list[tuple[int, float]] = field(default_factory=list)


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are drawn: as transformers' `generate` draws them after `torch.manual_seed(seed)`, on the CPU."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    """Share of the likeliest token's probability that others need."""
    repetition_penalty: float = 1.0
    """Divisor of the positive logits of tokens that were there before, and factor of their negative ones."""
    frequency_penalty: float = 0.0
    """Amount that is taken off the logit of a token for each time that it is in the answer."""
    presence_penalty: float = 0.0
    """Amount that is taken off the logit of each token of the answer."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """Tokens, and what is added to the logit of each."""
    seed: int = 0
    logprobs: int = 0
    """Number of the most likely tokens that come with each new token."""

    def check(self) -> None:
        """Raise unless each value is possible."""
        limits: dict[str, tuple[float, float]] = {"temperature": (0.0, HOTTEST), "repetition_penalty": (0.01, 100.0)}
        limits |= {"frequency_penalty": (-2.0, 2.0), "presence_penalty": (-2.0, 2.0)}
        limits |= {"top_p": (0.0, 1.0), "min_p": (0.0, 1.0), "top_k": (0, 2**31), "logprobs": (0, 1000)}
        for name, (least, most) in limits.items():
            value = getattr(self, name)
            kinds = (int,) if isinstance(least, int) else (int, float)
            if not isinstance(value, kinds) or isinstance(value, bool) or not least <= value <= most:
                fix = "pass such a number"
                raise ArgumentError(f"submit {name}", f"{least} to {most}", repr(value), fix)
        biases = [value for _, value in self.logit_bias]
        if not all(type(value) in (int, float) and abs(value) <= MOST_BIAS for value in biases):
            expected = f"numbers from -{MOST_BIAS} to {MOST_BIAS}"
            raise ArgumentError("submit logit_bias", expected, f"{biases!r:.40}", "pass such numbers")
        if type(self.seed) is not int or not 0 <= self.seed < 2**63:
            expected = "an int from 0 to 2^63 - 1"
            raise ArgumentError("submit seed", expected, repr(self.seed), "pass one, or None")

    @property
    def greedy(self) -> bool:
        """True if the likeliest token is taken."""
        return self.temperature < COLDEST

    def generator(self, tokens: int, vocabulary: int) -> torch.Generator:
        """Return the generator as it is after `tokens` tokens of a vocabulary of `vocabulary` were drawn."""
        return generator_after(self.seed, 0 if self.greedy else tokens, vocabulary)

    def draw(
        self,
        logits: Tensor,
        generator: torch.Generator,
        before: Tensor | None = None,
        counts: Tensor | None = None,
        allowed: Tensor | None = None,
    ) -> DrawnToken:
        """Return the next token, from the model's logits, (vocabulary,).

        `before` has the tokens so far, in any order, and `counts`, (vocabulary,), how often each is in the answer.
        `allowed` are the tokens that a grammar lets follow.
        """
        scores = logits.float().cpu()
        if scores.sum().isnan() and scores.isnan().any():  # inf - inf is NaN, too
            raise ModelError("Engine", "logits that are numbers", "NaN", "check the model's weights and dtype")
        penalized = self._penalize(scores[None], before, counts)
        if allowed is not None:  # after biases and penalties, which then bring no other token back
            penalized = apply_mask(penalized, allowed)
        chosen = int(penalized.argmax()) if self.greedy else self._sample(penalized, generator)
        if not self.logprobs:
            return DrawnToken(chosen)
        logprobs = scores.log_softmax(-1)
        values, ids = logprobs.topk(min(self.logprobs, len(logprobs)))
        return DrawnToken(chosen, float(logprobs[chosen]), [*zip(ids.tolist(), values.tolist(), strict=True)])

    def _penalize(self, scores: Tensor, before: Tensor | None, counts: Tensor | None) -> Tensor:
        """Return the scores with the biases, and then with the penalties."""
        if self.logit_bias:
            ids, values = zip(*self.logit_bias, strict=True)
            scores = scores.index_add(1, torch.tensor(ids, device="cpu"), scores.new_tensor([values]))
        if before is not None and self.repetition_penalty != 1:
            scores = RepetitionPenaltyLogitsProcessor(float(self.repetition_penalty))(before[None], scores)
        if counts is not None:
            scores = scores - self.frequency_penalty * counts - self.presence_penalty * (counts > 0)
        return scores

    def _sample(self, scores: Tensor, generator: torch.Generator) -> int:
        scores = TemperatureLogitsWarper(float(self.temperature))(None, scores)
        if self.top_k > 0:
            scores = TopKLogitsWarper(self.top_k)(None, scores)
        if self.top_p < 1:
            scores = TopPLogitsWarper(float(self.top_p))(None, scores)
        if self.min_p > 0:
            scores = MinPLogitsWarper(float(self.min_p))(None, scores)
        return draw_token(scores.softmax(-1)[0], generator)


class Origin(NamedTuple):
    """The cache from which a prompt goes on.

    `tokens` counts the tokens that cache and prompt share. `moves` is true if the prompt takes the cache itself, which
    nothing else needs, and not a fork.
    """

    source: int | None = None
    """Id of the cache; None for a new one."""
    tokens: int = 0
    moves: bool = False


@dataclass(eq=False)
class EngineRequest:
    """A request, whose tokens are read as they come. Any thread may read them, and cancel.

    Fields are, in order: what was asked for, with the answer so far; the cache; how the request ends; the state of the
    draws; the grammar; guesses; and the tokens that wait for their reader.
    """

    prompt: list[int]
    sampling: SamplingParams
    max_new_tokens: int
    all_stop_ids: frozenset[int]
    """Tokens that end the answer. They are not among its tokens."""
    images: dict[str, Any] | None = None
    """Inputs for images, as the model's processor returns them."""
    answer: list[int] = field(default_factory=list)
    """All new tokens so far, those of a replay among them."""
    salt: str = ""
    """Name of those who share prefixes."""
    cache_id: int = -1
    """Id of the request's cache; -1 without one."""
    is_forked: bool = False
    """True if the cache may share memory with a cache that is gone."""
    computed_tokens: int = 0
    """Tokens in the cache so far, while the prompt is computed."""
    fork_points: set[int] = field(default_factory=set)
    """Lengths of the prefixes that other prompts share. The cache is forked when it has one of these lengths."""
    passed_fork_points: set[int] = field(default_factory=set)
    """Fork points that the cache has passed."""
    suspected: bool = False
    """True if a step with this row failed, and no step with it has succeeded since."""
    cached_tokens: int = 0
    """Tokens of the prompt that a kept cache had."""
    finish_reason: str | None = None
    cancelled: bool = False
    generator: torch.Generator | None = None
    """Random numbers of the next token; None before the first."""
    before: Tensor | None = None
    """The tokens so far, each at least once; None before the first draw, and where no penalty needs them."""
    counts: Tensor | None = None
    """How often each token is in the answer; None before the first draw, and where no penalty needs the counts."""
    grammar: GrammarState | None = None
    """The place of the answer in its grammar."""
    held_logits: Tensor | None = None
    """Logits that wait for the grammar's mask, (tokens, vocabulary)."""
    guesses: RowGuesses = field(default_factory=RowGuesses)
    """Guesses of the next tokens."""
    images_digest: bytes | None = None
    """A digest of the images, whatever text follows them; None without images."""
    _ids: Tensor | None = None
    drawn: "queue.SimpleQueue[DrawnToken | BaseException | None]" = field(default_factory=queue.SimpleQueue)

    def __post_init__(self) -> None:
        if self.images:
            digest = sha256()
            for name, value in sorted(without_last_text(self.images).items()):
                digest.update(f"{name} {value.shape if isinstance(value, Tensor) else value}".encode())
                if isinstance(value, Tensor):
                    digest.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
            self.images_digest = digest.digest()

    def __iter__(self) -> Iterator[DrawnToken]:
        while (token := self.drawn.get()) is not None:
            if isinstance(token, BaseException):
                self.drawn.put(token)  # left there for other readers
                raise token
            yield token
        self.drawn.put(None)

    def cancel(self) -> None:
        """End the request at the next step."""
        self.cancelled = True

    @property
    def room(self) -> int:
        """Tokens that the answer may have after its next token."""
        return self.max_new_tokens - len(self.answer) - 1

    @property
    def ids(self) -> list[int]:
        """The prompt and the answer so far."""
        return self.prompt + self.answer

    @property
    def ids_tensor(self) -> Tensor:
        """The prompt and the answer so far, as a tensor that is kept until the answer grows."""
        if self._ids is None or len(self._ids) != len(self.prompt) + len(self.answer):
            self._ids = torch.tensor(self.ids, device="cpu")
        return self._ids

    def add(self, logits: Tensor) -> bool:
        """Draw the next token from its logits, (vocabulary,). Return whether the answer has ended."""
        mask = None if self.grammar is None else self.grammar.mask()
        if mask is not None and mask.is_whole:
            return self.end("stop")
        if self.generator is None:
            self.generator = self.sampling.generator(len(self.answer), len(logits))
        if self.before is None and self.sampling.repetition_penalty != 1:
            self.before = torch.tensor(self.ids, device="cpu").unique()
        if self.counts is None and (self.sampling.frequency_penalty or self.sampling.presence_penalty):
            self.counts = torch.bincount(
                torch.tensor(self.answer, dtype=torch.int64, device="cpu"), minlength=len(logits)
            ).float()
        token = self.sampling.draw(logits, self.generator, self.before, self.counts, mask and mask.allowed)
        if token.id in self.all_stop_ids:
            return self.end("stop")
        self.answer.append(token.id)
        if self.grammar is not None:
            self.grammar.advance(token.id)
        if self.before is not None:
            self.before = torch.cat((self.before, torch.tensor([token.id], device="cpu")))
        if self.counts is not None:
            self.counts[token.id] += 1
        self.drawn.put(token)
        return len(self.answer) >= self.max_new_tokens and self.end("length")

    def end(self, reason: str | BaseException) -> bool:
        """End the request, with a reason or an error, unless it has ended. Return True, as `add` does at an end."""
        if self.finish_reason is None:
            self.finish_reason = "error" if isinstance(reason, BaseException) else reason
            self.drawn.put(reason if isinstance(reason, BaseException) else None)
        return True
