"""`python -m benchmarks faults`: the cost of checks, checkpoints and recovery with a whole model.

A checked step is compared with an unchecked one, decoding with checkpoints with decoding alone, and the recovery of a
lost rank's keys from copies with a new prefill.
"""

import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers.utils import logging

import attnmesh as am
from attnmesh import hf
from attnmesh.cli.launch import Send, run_on_ranks
from attnmesh.hf.generation_checkpoint import Checkpoint, TokenCallback
from attnmesh.hf.load import open_model
from attnmesh.setup.init_mesh import init_mesh
from benchmarks import model
from benchmarks.netns import send_rows
from benchmarks.timing import Comparison, Timing, race

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Request(model.Request):
    """A model and a prompt, rounds of timing, and the tokens between checkpoints."""

    rounds: int = 3
    every: int = 64


def rows(request: Request, threads: int, add: Send) -> None:
    """Measure on ranks that share the threads; the rows are those of rank 0."""
    ranks = request.shape.ranks
    share = max(1, threads // ranks)
    run_on_ranks(ranks, send_rows, _measured, request, threads=share, seconds=3600, on_message=add)


def _measured(request: Request) -> Iterator[Comparison]:
    logging.disable_progress_bar()
    served = open_model(request.model, "auto", CPU)
    mesh, ids = init_mesh("cpu", request.shape, *request.heads), torch.tensor([request.ids])
    options: dict[str, Any] = {"capacity": ids.shape[1] + request.new, "copies": 2}
    cache = hf.ShardedCache(served.config, mesh, **options)
    start = perf_counter()
    hf.prefill(served, ids, cache)
    prefill = perf_counter() - start
    layer = cache.layers[0].kv_cache
    width, q_heads = layer.config.head_dim, request.heads[0]
    yield _checked(layer, torch.randn(1, q_heads, 1, width).to(layer.config.dtype))
    yield _saved(served, ids, cache, request)
    yield _recovered(served, mesh, cache, options, prefill, request.rounds)


def _checked(cache: am.KVCache, q: Tensor) -> Comparison:
    """Compare a layer's step with the checksum verified, and without."""
    dist.broadcast(q, 0)
    steps: dict[str, Callable[[], Any]] = {
        "checked": lambda: am.decode(q, cache, checked=True),
        "unchecked": lambda: am.decode(q, cache, checked=False),
    }
    timings = race(steps, CPU, seconds=20.0, rounds=501, before=dist.barrier)
    case = f"a layer's step, {cache.length:,} keys"
    return Comparison(case, "checked=False", timings["unchecked"], timings["checked"], 0.95)


def _saved(served: Any, ids: Tensor, cache: hf.ShardedCache, request: Request) -> Comparison:
    """Compare the time per token with and without checkpoints, in turns; waits for the disk are included."""
    measured: dict[bool, list[float]] = {False: [], True: []}
    for turn in range(2 * request.rounds + 1):
        saving = turn % 2 == 1
        cache.crop(min(0, ids.shape[1] - 1 - cache.get_seq_length()))
        with tempfile.TemporaryDirectory(prefix="attnmesh-") as folder:
            names = [folder]
            dist.broadcast_object_list(names)
            checkpoint = Checkpoint(f"{names[0]}/kept", every=request.every)
            checkpoint.note = "bench"
            keep = [TokenCallback(partial(checkpoint.keep, cache, prompt_tokens=ids.shape[1]))] if saving else []
            dist.barrier()
            start = perf_counter()
            hf.generate(served, ids, cache=cache, max_new_tokens=request.new, do_sample=False, stopping_criteria=keep)
            checkpoint.wait()
            seconds = perf_counter() - start
            dist.barrier()  # before the folder is deleted
        if turn:
            measured[saving].append(seconds / request.new)
    case = f"a token after {ids.shape[1]:,}, saved every {request.every}"
    return Comparison(case, "not saved", Timing.of(measured[False]), Timing.of(measured[True]), 0.95)


def _recovered(
    served: Any, mesh: Any, cache: hf.ShardedCache, options: dict[str, Any], prefill: float, rounds: int
) -> Comparison:
    """Compare recovery from copies, with one new rank, to a new prefill."""
    survived = None if dist.get_rank() == 1 else cache
    seconds = []
    for _ in range(rounds + 1):
        dist.barrier()
        start = perf_counter()
        recovered = hf.ShardedCache.recover(survived, served.config, mesh, **options)
        dist.barrier()
        seconds.append(perf_counter() - start)
        del recovered
    case = f"{cache.get_seq_length():,} tokens of {len(cache.layers)} layers after a loss"
    return Comparison(case, "a new prefill", Timing.of([prefill] * 2), Timing.of(seconds[1:]), 5.0)
