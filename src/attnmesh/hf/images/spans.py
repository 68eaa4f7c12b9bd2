"""Spans: runs of image tokens that see each other both ways, in Gemma 3 and PaliGemma."""

from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor

Span = tuple[int, int]
"""Start and stop of a run of tokens."""

Chunk = tuple[int, int, bool]
"""Start and stop of a chunk of a prefill, and whether ranks share its tokens."""


def spans_of(sees_next: Tensor, first: int) -> list[Span]:
    """Return the spans of a sequence, of which each token but the last sees the next one or not.

    >>> import torch
    >>> spans_of(torch.tensor([False, True, True, False, True]), 10)
    [(11, 14), (14, 16)]
    """
    edges = [*(~sees_next).nonzero().flatten().tolist(), len(sees_next)]
    runs = ((start + 1, stop + 1) for start, stop in pairwise([-1, *edges]))
    return [(first + start, first + stop) for start, stop in runs if stop - start > 1]


def uncut(chunks: Sequence[Chunk], spans: Sequence[Span]) -> list[Chunk]:
    """Return chunks of a prefill that cut no span: chunks that share a span are one.

    >>> uncut([(0, 4, False), (4, 16, True), (16, 28, True), (28, 40, True)], [(14, 20)])
    [(0, 4, False), (4, 28, True), (28, 40, True)]
    """
    joined: list[Chunk] = []
    for start, stop, sharded in chunks:
        if joined and any(first < start < last for first, last in spans):
            start, _, before = joined.pop()
            sharded = sharded and before
        joined.append((start, stop, sharded))
    return joined
