"""Threads that make tokens of prompts: short ones never wait for long ones, and what cannot fit is not encoded."""

import asyncio
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from functools import partial as partial_of
from typing import Any, TypeVar

from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from attnmesh.serve.refused import Refused

T = TypeVar("T")

LONG_BODY_BYTES = 1 << 16
"""Bytes of a body from which on its prompt counts as long. A prompt with images is long, too."""

COMPOSED = 4
"""Most characters that NFC and NFKC compose into one."""

KEEPING = {"Prepend", "NFD", "NFKD", "Lowercase", "ByteLevel", "Metaspace", "Digits", "UnicodeScripts", "FixedLength"}
"""Steps of tokenizers that never shorten a text."""


class PromptEncoders:
    """Two copies of a tokenizer, or of a processor, each with a thread of its own.

    A tokenizer cannot be used in two threads at once. Long prompts go to one thread, short ones to the other.
    """

    def __init__(self, processing_class: Any) -> None:
        self.characters = characters_a_token(getattr(processing_class, "tokenizer", processing_class))
        self._short, self._long = ((ThreadPoolExecutor(1), deepcopy(processing_class)) for _ in range(2))

    async def run(self, encode: Callable[..., T], value: Any, is_long: bool, longest: int) -> T:
        """Return what `encode` makes of a value; raise on a text that has `longest` tokens or more for certain."""
        pool, processing_class = self._long if is_long else self._short
        check = partial_of(self._check, longest)
        values = [value]
        del value
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(pool, lambda: encode(processing_class, values.pop(), check))
        except asyncio.CancelledError:  # the thread's queue keeps the error and its frames until the thread is free
            values.clear()
            raise asyncio.CancelledError from None

    def close(self) -> None:
        """End the threads."""
        for pool, _ in (self._short, self._long):
            pool.shutdown(wait=False, cancel_futures=True)

    def _check(self, longest: int, text: str) -> None:
        if self.characters is not None and len(text) > self.characters * (longest - 1):
            raise too_long(f"{len(text):,} characters, of which a token has at most {self.characters},", longest)


def too_long(given: str, longest: int) -> Refused:
    """Return the refusal of a prompt that does not fit."""
    text = f"The prompt has {given} and the server's longest context is {longest} tokens with the answer."
    return Refused(400, text, None, "context_length_exceeded")


def characters_a_token(tokenizer: Any) -> int | None:
    """Return how many characters of a text one token stands for at most; None if that has no limit that is known.

    Unknown characters may be dropped, or be one token together. Spaces beside tokens may be dropped, too.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or not isinstance(backend.model, BPE):
        return None
    vocabulary = tokenizer.get_vocab()
    steps = [
        json.loads(step.__getstate__()) for step in (backend.normalizer, backend.pre_tokenizer) if step is not None
    ]
    spelled: set[str] = set()  # signs that any text can be spelled with
    if '"ByteLevel"' in json.dumps(steps):
        spelled = {*ByteLevel.alphabet()}
    elif backend.model.byte_fallback:
        spelled = {f"<0x{byte:02X}>" for byte in range(256)}
    strips = any(token.lstrip or token.rstrip for token in tokenizer.added_tokens_decoder.values())
    factor = _shrinks({"type": "Sequence", "normalizers": steps})
    if strips or not spelled or not spelled <= vocabulary.keys() or factor is None:
        return None
    return max(map(len, vocabulary)) * factor


def _shrinks(step: dict[str, Any]) -> int | None:
    """Return how many characters a step of a tokenizer may join into one; None if it may drop characters."""
    match step:
        case {"type": "Sequence", **inner}:
            factor = 1
            for inner_step in inner.get("normalizers") or inner.get("pretokenizers") or ():
                inner_factor = _shrinks(inner_step)
                if inner_factor is None:
                    return None
                factor *= inner_factor
            return factor
        case {"type": "NFC" | "NFKC"}:
            return COMPOSED
        case {"type": "Replace", "pattern": {"String": old}, "content": new}:
            return 1 if len(new) >= len(old) else None
        case {"type": "Split" | "Punctuation", "behavior": behavior}:
            return None if behavior == "Removed" else 1
        case {"type": kind}:
            return 1 if kind in KEEPING else None
    return None
