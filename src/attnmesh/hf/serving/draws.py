"""Draws of tokens. The seed of an answer and a token's place in it alone decide the random numbers of the token.

PyTorch draws on CPUs by MT19937, whose words are a linear recurrence over bits. The state after a jump is a sum of
states that begin at some of the first words: those whose powers of t are in the remainder of t^jump by the
recurrence's polynomial.
"""

from functools import cache

import numpy as np
import torch
from numpy.lib.stride_tricks import sliding_window_view
from torch import Tensor

STATE_WORDS, MIDDLE, TWIST = 624, 397, 0x9908B0DF
"""Words of the state, the word that is added to the first, and the coefficients of the twist."""

FEW = 1 << 18
"""Words up to which drawing all words takes less time than a jump over them."""

DEGREE = 19937
"""Bits of the state."""

ROUNDING_RATIO = 1 + 1e-5
"""Ratio of the two largest quotients below which rounding may decide. PyTorch then draws the token itself."""

STATE = slice(24, 24 + 8 * STATE_WORDS)
"""Bytes of the words in the state of PyTorch's generator, after seed and counters."""


def generator_after(seed: int, draws: int, vocabulary: int) -> torch.Generator:
    """Return the generator of a seed, as it is after `draws` tokens of a vocabulary of `vocabulary` were drawn."""
    generator = torch.Generator().manual_seed(seed)
    words = _words_of_draw(vocabulary)
    if not words:
        for _ in range(draws):
            _draw(vocabulary, generator)
        return generator
    if draws * words <= FEW:
        return _skip(draws * words, generator)
    state = generator.get_state()
    values = state[STATE].numpy().view(np.uint64)
    jumped = values.astype(np.uint32)
    for power in range(draws.bit_length()):
        if draws >> power & 1:
            jumped = _apply_jump(jumped, _select_words(words, power))
    values[:] = jumped
    return generator.set_state(state)


def draw_token(probabilities: Tensor, generator: torch.Generator) -> int:
    """Return the token, of probabilities (vocabulary,), that `torch.multinomial` draws, in less of its time.

    The token has the largest quotient of its probability and a random number of the exponential distribution. The
    numbers are computed at once here, and one after the other by PyTorch.
    """
    if _draws_exponentials(len(probabilities)):
        before = generator.get_state()
        (first, second), (token, _) = (probabilities / _exponentials(len(probabilities), generator)).topk(2)
        if first > ROUNDING_RATIO * second:
            return int(token)
        generator.set_state(before)
    return int(torch.multinomial(probabilities, 1, generator=generator))


def _exponentials(count: int, generator: torch.Generator) -> Tensor:
    uniform = torch.empty(count, dtype=torch.float64, device="cpu").uniform_(generator=generator)
    return uniform.neg_().log1p_().neg_().float()


@cache
def _draws_exponentials(vocabulary: int) -> bool:
    """Return whether PyTorch draws a token of a vocabulary by the numbers of `_exponentials`."""
    direct, replayed, drawn = (torch.Generator().manual_seed(0) for _ in range(3))
    expected = torch.empty(vocabulary, dtype=torch.float32, device="cpu").exponential_(generator=direct)
    same = torch.allclose(_exponentials(vocabulary, replayed), expected, rtol=1e-6, atol=0.0)
    _draw(vocabulary, drawn)
    return vocabulary > 1 and same and all(direct.get_state().equal(x.get_state()) for x in (replayed, drawn))


def _skip(words: int, generator: torch.Generator) -> torch.Generator:
    torch.empty(words, dtype=torch.int32, device="cpu").random_(generator=generator)
    return generator


def _draw(vocabulary: int, generator: torch.Generator) -> None:
    torch.multinomial(torch.ones(1, vocabulary, dtype=torch.float32, device="cpu"), 1, generator=generator)


@cache
def _words_of_draw(vocabulary: int) -> int:
    """Return how many of the generator's words a token takes; 0 if the number is none of those tried here."""
    drawn = torch.Generator().manual_seed(0)
    _draw(vocabulary, drawn)
    for words in (2 * vocabulary, vocabulary, 2, 1):
        if drawn.get_state().equal(_skip(words, torch.Generator().manual_seed(0)).get_state()):
            return words
    return 0


def _apply_jump(state: np.ndarray, selected: np.ndarray) -> np.ndarray:
    """Return the words of a state after a jump: sums of the words at the selected places."""
    words = np.empty(DEGREE + STATE_WORDS, np.uint32)
    words[:STATE_WORDS] = state
    step = STATE_WORDS - MIDDLE
    for first in range(0, DEGREE, step):
        size = min(step, DEGREE - first)
        high, low = words[first : first + size], words[first + 1 : first + 1 + size]
        joined = high & 0x80000000 | low & 0x7FFFFFFF
        new = joined >> 1 ^ (joined & 1) * np.uint32(TWIST) ^ words[first + MIDDLE : first + MIDDLE + size]
        words[first + STATE_WORDS : first + STATE_WORDS + size] = new
    jumped: np.ndarray = np.bitwise_xor.reduce(sliding_window_view(words, STATE_WORDS)[selected], axis=0)
    return jumped


@cache
def _select_words(words: int, power: int) -> np.ndarray:
    """Return the places whose words add up to the state after 2^power draws of `words` words each."""
    bits = np.frombuffer(_jump(words, power).to_bytes(DEGREE // 8 + 1, "little"), np.uint8)
    return np.flatnonzero(np.unpackbits(bits, bitorder="little"))


@cache
def _jump(words: int, power: int) -> int:
    """Return t^(words 2^power), reduced. Bit i of a polynomial is the coefficient of t^i."""
    if power:
        return _reduce(_square(_jump(words, power - 1)))
    jump = 1
    for bit in f"{words:b}":
        jump = _reduce(_square(jump) << int(bit))
    return jump


@cache
def _polynomial() -> tuple[int, ...]:
    """Return the exponents of the recurrence's polynomial below the highest.

    It is UV^31 + a_0 UV^30 + ... + a_30 U + a_31, where U = t^624 + t^397, V = U / t, and a_i are the twist's bits.
    """
    u = 1 << STATE_WORDS | 1 << MIDDLE
    total = TWIST >> 31 & 1
    term = u
    for power in range(32):
        total ^= term if power == 31 or TWIST >> (30 - power) & 1 else 0
        term = term << STATE_WORDS - 1 ^ term << MIDDLE - 1
    return tuple(place for place in range(DEGREE) if total >> place & 1)


def _reduce(polynomial: int) -> int:
    """Return the remainder by the recurrence's polynomial."""
    while high := polynomial >> DEGREE:
        polynomial ^= high << DEGREE
        for place in _polynomial():
            polynomial ^= high << place
    return polynomial


def _square(polynomial: int) -> int:
    """Return the square, by a zero after each coefficient: over bits the mixed terms cancel."""
    return int("0".join(f"{polynomial:b}"), 2)
