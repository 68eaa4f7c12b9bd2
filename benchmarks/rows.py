"""`python -m benchmarks rows`: requests of unequal lengths decoded together, beside one after the other.

Both continue the same prefilled caches, in turns, and return the same tokens.
"""

from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from time import perf_counter, process_time
from typing import Any

import torch
from transformers.utils import logging

from attnmesh import hf
from attnmesh.cli.launch import Send, run_on_ranks
from attnmesh.hf.load import open_model
from attnmesh.mesh.shapes import Shape
from attnmesh.setup.init_mesh import init_mesh
from benchmarks.model import Times
from benchmarks.netns import send_rows
from benchmarks.timing import Timing


@dataclass(frozen=True)
class Row:
    """Steps of so many requests together, and tokens of each by `generate`."""

    requests: int
    together: Timing
    """Milliseconds of a step, which gives each request a token."""
    alone: Timing
    """Milliseconds of one token of one request."""
    cpu: tuple[float, float]
    """Milliseconds of rank 0's CPU for a token, together and alone."""
    same_tokens: bool

    @property
    def rates(self) -> tuple[float, float]:
        """Tokens in a second, together and alone."""
        return self.requests * 1e3 / self.together.median, 1e3 / self.alone.median


@dataclass(frozen=True)
class Request:
    """A model, the text of all prompts, and a mesh."""

    model: str
    ids: tuple[int, ...]
    shape: Shape
    heads: tuple[int, int]
    counts: tuple[int, ...]
    rounds: int


STEPS = 8
"""Tokens of each request in a turn."""


def rows(request: Request, threads: int, add: Send) -> None:
    """Measure each number of requests on ranks that share the threads."""
    share = max(1, threads // request.shape.ranks)
    run_on_ranks(request.shape.ranks, send_rows, _ranks, request, threads=share, on_message=add)


def prompts_of(ids: Sequence[int], count: int) -> list[list[int]]:
    """Return prompts of a half to one and a half times half the text, each of another part of it."""
    length = len(ids) // 2
    sizes = [int(length * (0.5 + (row + 1) / (count + 1))) for row in range(count)]
    return [[*ids[17 * row % length : 17 * row % length + size]] for row, size in enumerate(sizes)]


def _ranks(request: Request) -> Iterator[Row]:
    logging.disable_progress_bar()
    model = open_model(request.model, "auto", torch.device("cpu"))
    model.generation_config.eos_token_id = None
    mesh = init_mesh("cpu", request.shape, *request.heads)
    for count in request.counts:
        texts = prompts_of(request.ids, count)
        caches = [hf.ShardedCache(model.config, mesh) for _ in texts]
        for text, cache in zip(texts, caches, strict=True):
            hf.prefill(model, torch.tensor([text]), cache)
        yield _compared(model, texts, caches, request.rounds)


def _compared(model: Any, texts: list[list[int]], caches: list[hf.ShardedCache], rounds: int) -> Row:
    """Decode together and one after the other, in turns, of which the first is not counted."""
    copies, copy_texts = [deepcopy(cache) for cache in caches], [[*text] for text in texts]
    together: list[float] = []
    alone: list[float] = []
    cpu = [0.0, 0.0]
    for turn in range(rounds + 1):
        if turn == 1:
            together, alone, cpu = [], [], [0.0, 0.0]
        start = process_time()
        for _ in range(STEPS):
            began = perf_counter()
            next_ids = hf.decode_rows(model, [text[-1] for text in texts], caches).argmax(-1).tolist()
            together.append(perf_counter() - began)
            for text, token in zip(texts, next_ids, strict=True):
                text.append(token)
        middle = process_time()
        for row, cache in enumerate(copies):
            times, ids = Times(), torch.tensor([copy_texts[row]])
            options: dict[str, Any] = {
                "attention_mask": torch.ones_like(ids),
                "max_new_tokens": STEPS,
                "do_sample": False,
            }
            output = hf.generate(model, ids, cache=cache, streamer=times, **options)
            copy_texts[row] = output[0].tolist()
            alone += times.seconds
        cpu[0], cpu[1] = cpu[0] + middle - start, cpu[1] + process_time() - middle
    made_tokens = rounds * STEPS * len(texts)
    per_token = 1e3 * cpu[0] / made_tokens, 1e3 * cpu[1] / made_tokens
    return Row(len(texts), Timing.of(together), Timing.of(alone), per_token, texts == copy_texts)
