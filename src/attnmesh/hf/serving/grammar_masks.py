"""Grammars of answers on rank 0: the place of each answer in its grammar, and the tokens that may come next.

Threads of rank 0 make masks while ranks compute. Other ranks need no masks: rank 0 alone draws tokens.
"""

from collections.abc import Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from dataclasses import dataclass
from importlib.util import find_spec
from threading import Lock
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from attnmesh.errors import GrammarError
from attnmesh.runtime.memo import Memo

THREADS = 4
"""Masks that are made at the same time."""

COMPILED = 8
"""Grammars that stay compiled for later answers: further choices of a request have the same grammar."""

LIMITS: dict[str, Any] = {"max_grammar_size": 200_000, "step_lexer_fuel": 200_000, "verbose_errors": False}
"""Limits of llguidance: symbols of a grammar, and work for one mask, which is then about 15 ms."""

INSTALL = 'run pip install "attnmesh[grammar]"'


@dataclass(frozen=True)
class Grammar:
    """Form that an answer has to have after its thought, if the model thinks first.

    A thought has marks at its beginning and end. The grammar holds from its end on.
    """

    text: str
    """A grammar of llguidance, in its variant of Lark."""
    field: str = "submit grammar"
    """Name of the grammar in errors."""
    thought_begin: tuple[int, ...] = ()
    """Tokens that begin a thought; none if the answer cannot begin with one, or the prompt has begun it."""
    thought_end: tuple[int, ...] = ()
    """Tokens that end the thought."""
    is_thinking: bool = False
    """True if the prompt has begun a thought."""


class TokenMask(NamedTuple):
    """The tokens that may come next, (tokens,), and whether the answer is whole and nothing may follow."""

    allowed: Tensor
    is_whole: bool


def has_grammars() -> bool:
    """Return whether the library that reads grammars is installed."""
    return find_spec("llguidance") is not None


class GrammarTokens:
    """The tokens of a tokenizer, as grammars read them, and threads that make masks.

    >>> from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    >>> from transformers import PreTrainedTokenizerFast
    >>> letters = {sign: place for place, sign in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    >>> tokenizer = Tokenizer(models.BPE(letters, []))
    >>> tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(), decoders.ByteLevel()
    >>> grammar_tokens = GrammarTokens(PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>"))
    >>> state = grammar_tokens.begin(Grammar('start: "yes" | "no"'), ends=[256])
    >>> allowed = state.mask().allowed.nonzero().flatten().tolist()
    >>> sorted(grammar_tokens.tokenizer.decode_str([id]) for id in allowed)
    ['n', 'y']
    >>> grammar_tokens.close()
    """

    def __init__(self, tokenizer: Any) -> None:
        if not has_grammars():
            raise GrammarError("grammars", "llguidance", "no such package", INSTALL)
        from llguidance import LLParserLimits
        from llguidance.hf import from_tokenizer

        try:
            self.tokenizer = from_tokenizer(tokenizer)
        except Exception as error:  # the tokenizer is of another library, or llguidance cannot read it
            expected, fix = "a tokenizer with tokenizer.json", "use a model that has one"
            raise GrammarError("grammars", expected, f"{type(tokenizer).__name__}, {error}"[:200], fix) from None
        self.limits = LLParserLimits(**LIMITS)
        self.pool = ThreadPoolExecutor(THREADS, thread_name_prefix="grammar")
        self._compiled = Memo[Any](COMPILED)
        self._lock = Lock()

    def begin(self, grammar: Grammar, ends: Iterable[int], replay: Sequence[int] = ()) -> "GrammarState":
        """Return the state of an answer after the tokens of `replay`. Raise if the text is no grammar.

        `ends` are the tokens that end an answer.
        """
        return GrammarState(self, grammar, [*ends], replay)

    def matcher(self, text: str) -> Any:
        """Return a matcher of a grammar. The grammar is compiled once. The matcher has an error if it is none."""
        from llguidance import LLMatcher

        with self._lock:
            if (compiled := self._compiled.find(text)) is not None:
                return compiled.deep_copy()
        made = LLMatcher(self.tokenizer, text, log_level=0, limits=self.limits)
        if made.is_error():
            return made
        with self._lock:
            return self._compiled.keep(text, made).deep_copy()

    def close(self) -> None:
        """End the threads."""
        self.pool.shutdown(wait=False, cancel_futures=True)


class GrammarState:
    """The place of one answer in its grammar."""

    def __init__(self, grammar_tokens: GrammarTokens, grammar: Grammar, ends: list[int], replay: Sequence[int]) -> None:
        self.grammar_tokens = grammar_tokens
        self.grammar = grammar
        self.ends = ends
        self.matcher = grammar_tokens.matcher(grammar.text)
        self._check("a grammar that is possible")
        self.opening_matched: int | None = 0 if grammar.thought_begin else None
        """Tokens of the thought's first mark that the answer has so far; None if the answer has begun without it."""
        self.is_thinking = grammar.is_thinking
        self.last = list[int]()
        self.is_off = False
        """True if the tokens so far may begin a thought, and cannot begin an answer by the grammar."""
        for token in replay:
            self._follow(token)
        self._next: Future[TokenMask] = grammar_tokens.pool.submit(self._mask)

    def advance(self, token: int) -> None:
        """Follow a token of the answer, and make the next mask in a thread."""
        self._next = self.grammar_tokens.pool.submit(self._step, token)

    def is_ready(self, seconds: float = 0.0) -> bool:
        """Return whether the next mask is made. Wait for it for `seconds` at most."""
        return self._next.done() or bool(wait_for((self._next,), seconds).done)

    def mask(self) -> TokenMask:
        """Return the next mask, once it is made. Raise if it took too much work."""
        return self._next.result()

    def _step(self, token: int) -> TokenMask:
        self._follow(token)
        return self._mask()

    def _follow(self, token: int) -> None:
        begin, end = self.grammar.thought_begin, self.grammar.thought_end
        if self.is_thinking:
            self.last = [*self.last, token][-len(end) :]
            self.is_thinking = tuple(self.last) != end
            return
        if self.opening_matched is not None:
            self.opening_matched = self.opening_matched + 1 if token == begin[self.opening_matched] else None
            if self.opening_matched == len(begin):
                self.is_thinking = True
                self.opening_matched = None
                self.is_off = False
                self.matcher.reset()
                return
            self.is_off = self.is_off or not self.matcher.validate_tokens([token])
            if self.is_off:
                return
        self.matcher.consume_token(token)
        self._check("an answer that follows it")

    def _mask(self) -> TokenMask:
        size = self.grammar_tokens.tokenizer.vocab_size
        if self.is_thinking:
            allowed = torch.ones(size, dtype=torch.bool, device="cpu")
            allowed[self._within(size)] = False
            return TokenMask(allowed, False)
        if self.is_off:
            allowed = torch.zeros(size, dtype=torch.bool, device="cpu")
            is_whole = False
        else:
            is_whole = self.matcher.is_stopped()
            bits = np.frombuffer(self.matcher.compute_bitmask(), np.uint8)
            allowed = torch.from_numpy(np.unpackbits(bits, bitorder="little")[:size].view(np.bool_).copy())
            self._check("masks that are made in time")
            allowed[self._within(size)] = self.matcher.is_accepting()
        if self.opening_matched is not None:
            allowed[self.grammar.thought_begin[self.opening_matched]] = True
        if not is_whole and not allowed.any():
            raise GrammarError(self.grammar.field, "an answer that can go on", "one that no token follows", "change it")
        return TokenMask(allowed, is_whole)

    def _within(self, size: int) -> list[int]:
        return [token for token in self.ends if token < size]

    def _check(self, expected: str) -> None:
        """Raise if the grammar has failed."""
        if self.matcher.is_error():
            raise GrammarError(self.grammar.field, expected, grammar_fault(self.matcher.get_error()), "simplify it")


def grammar_fault(error: str) -> str:
    """Return the line of an error of llguidance that tells its cause. A pattern's stands after the pattern.

    >>> grammar_fault("at 3(5): regex parse error:\\n    (\\n    ^\\nerror: unclosed group\\n  1 | start: r0")
    'at 3(5): regex parse error: unclosed group'
    """
    first, *more = error.strip().splitlines() or ["another"]
    causes = [line.removeprefix("error:") for line in more if line.startswith("error:")]
    return (first + causes[0] if first.endswith(":") and causes else first)[:200]


def wait_for_any(states: Iterable[GrammarState], seconds: float) -> None:
    """Wait until the next mask of one of several answers is made, for `seconds` at most."""
    wait_for([state._next for state in states], seconds, FIRST_COMPLETED)


def apply_mask(scores: Tensor, allowed: Tensor) -> Tensor:
    """Return scores, (1, tokens), with minus infinity for tokens that `allowed` leaves out. It may be shorter.

    >>> apply_mask(torch.zeros(1, 4), torch.tensor([True, False, True]))
    tensor([[0., -inf, 0., -inf]])
    """
    missing = scores.shape[1] - len(allowed)
    if missing > 0:
        allowed = torch.cat((allowed, allowed.new_zeros(missing)))
    return scores.masked_fill(~allowed[: scores.shape[1]], -torch.inf)
