"""Spans: runs of image tokens that see each other both ways, in Gemma 3 and PaliGemma."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from attnmesh.core.mask import Mask
from attnmesh.errors import MaskError

Span = tuple[int, int]
"""Start and stop of a run of tokens."""


class PromptChunk(NamedTuple):
    """Tokens of a prompt that are computed in one forward pass."""

    start: int
    stop: int
    is_sharded: bool
    """True if ranks share the tokens; False if each computes all."""


def spans_of(sees_next: Tensor, first: int) -> list[Span]:
    """Return the spans of a sequence, the maximal runs of True: `sees_next[i]` says whether token i sees token i + 1.

    >>> import torch
    >>> spans_of(torch.tensor([False, True, True, False, True]), 10)
    [(11, 14), (14, 16)]
    """
    edges = [*(~sees_next).nonzero().flatten().tolist(), len(sees_next)]
    runs = ((start + 1, stop + 1) for start, stop in pairwise([-1, *edges]))
    return [(first + start, first + stop) for start, stop in runs if stop - start > 1]


def unsupported_span(sees: Callable[[Tensor, Tensor], Tensor], spans: Sequence[Span], window: int) -> str:
    """Return in words what tokens of spans see, by `sees(query, key)`, that `Spans` does not show; "" for nothing.

    >>> unsupported_span(lambda query, key: query // 10 == key // 10, [(3, 5), (7, 9)], 8)
    'images whose tokens see those of later images'
    """
    starts = [torch.tensor(start, device="cpu") for start, _ in spans]
    if any(sees(earlier, later) for earlier, later in pairwise(starts)):
        return "images whose tokens see those of later images"
    for start, stop in spans:
        if stop - start > window and sees(torch.tensor(stop - 1, device="cpu"), torch.tensor(start, device="cpu")):
            return f"a run of {stop - start} image tokens that see each other beyond the window of {window}"
    return ""


def check_spans_unpadded(rows: Sequence[Mask], token_mask: Tensor) -> None:
    """Raise if tokens of a span see padding, which a mask of positions does not hide."""
    spans = [(row, *span) for row, mask in enumerate(rows) for span in mask.span_pairs]
    unpadded = all(bool(token_mask[row, start:stop].all()) for row, start, stop in spans)
    if not unpadded:
        fix = "pass one sequence at a time, without padding"
        raise MaskError("attention mask", "padding after all spans", "padding in a span", fix)


def join_chunks_at_spans(chunks: Sequence[PromptChunk], spans: Sequence[Span]) -> list[PromptChunk]:
    """Return chunks of a prefill that cut no span: chunks that share a span are joined.

    >>> chunks = [PromptChunk(0, 4, False), PromptChunk(4, 16, True), PromptChunk(16, 28, True)]
    >>> [tuple(chunk) for chunk in join_chunks_at_spans(chunks, [(14, 20)])]
    [(0, 4, False), (4, 28, True)]
    """
    joined: list[PromptChunk] = []
    for start, stop, is_sharded in chunks:
        if joined and any(first < start < last for first, last in spans):
            start, _, was_sharded = joined.pop()
            is_sharded = is_sharded and was_sharded
        joined.append(PromptChunk(start, stop, is_sharded))
    return joined
