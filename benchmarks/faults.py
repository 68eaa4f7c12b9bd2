"""`python -m benchmarks faults`: what it costs to be ready for faults, and to go on after one, with a whole model.

A step whose ranks ask each other whether they agree beside one whose ranks do not; writing while what there is is saved
beside writing alone; and the keys of a lost rank from copies beside a new prefill.
"""

import tempfile
from collections.abc import Callable
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
from attnmesh.cli.bench_row import Row
from attnmesh.cli.launch import run_on_ranks
from attnmesh.cli.timing import Timing, race
from attnmesh.comm.init_mesh import init_mesh
from attnmesh.hf.checkpoint import Checkpoint, TokenCallback
from attnmesh.hf.load import open_model
from benchmarks import model

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Request(model.Request):
    """What is measured."""

    rounds: int = 3
    every: int = 64


def rows(request: Request, threads: int) -> list[Row]:
    """As rank 0 sees them, on ranks that share the threads."""
    found: list[Row] = run_on_ranks(
        request.shape.ranks, _measured, request, threads=max(1, threads // request.shape.ranks), seconds=3600
    )[0]
    return found


def _measured(request: Request) -> list[Row]:
    logging.disable_progress_bar()
    served = open_model(request.model, "auto", CPU)
    mesh, ids = init_mesh("cpu", request.shape, *request.heads), torch.tensor([request.ids])
    options: dict[str, Any] = {"capacity": ids.shape[1] + request.new, "copies": 2}
    cache = hf.ShardedCache(served.config, mesh, **options)
    start = perf_counter()
    hf.prefill(served, ids, cache)
    prefill = perf_counter() - start
    layer = cache.layers[0].kv
    width, q_heads = layer.sizes.head_dim, request.heads[0]
    return [
        _checked(layer, torch.randn(1, q_heads, 1, width).to(layer.sizes.dtype)),
        _saved(served, ids, cache, request),
        _recovered(served, mesh, cache, options, prefill, request.rounds),
    ]


def _checked(cache: am.KVCache, q: Tensor) -> Row:
    """One layer's step: with the checksum looked at, and without."""
    q = _alike(q)
    steps: dict[str, Callable[[], Any]] = {
        "checked": lambda: am.decode(q, cache, checked=True),
        "unchecked": lambda: am.decode(q, cache, checked=False),
    }
    timings = race(steps, CPU, seconds=20.0, rounds=501, before=dist.barrier)
    case = f"a layer's step, {cache.length:,} keys"
    return Row(case, "checked=False", timings["unchecked"], timings["checked"], 0.95)


def _saved(served: Any, ids: Tensor, cache: hf.ShardedCache, request: Request) -> Row:
    """The seconds of all tokens together, a token's share of them, in turns; what waits for the disk included."""
    measured: dict[bool, list[float]] = {False: [], True: []}
    for turn in range(2 * request.rounds + 1):
        saving = turn % 2 == 1
        cache.crop(min(0, ids.shape[1] - 1 - cache.get_seq_length()))
        with tempfile.TemporaryDirectory(prefix="attnmesh-") as folder:
            names = [folder]
            dist.broadcast_object_list(names)
            checkpoint = Checkpoint(f"{names[0]}/kept", every=request.every)
            checkpoint.note = "bench"
            keep = [TokenCallback(partial(checkpoint.keep, cache, prompt=ids.shape[1]))] if saving else []
            dist.barrier()
            start = perf_counter()
            hf.generate(served, ids, cache=cache, max_new_tokens=request.new, do_sample=False, stopping_criteria=keep)
            checkpoint.wait()
            seconds = perf_counter() - start
            dist.barrier()  # before the folder goes
        if turn:
            measured[saving].append(seconds / request.new)
    case = f"a token after {ids.shape[1]:,}, saved every {request.every}"
    return Row(case, "not saved", Timing.of(measured[False]), Timing.of(measured[True]), 0.95)


def _recovered(
    served: Any, mesh: Any, cache: hf.ShardedCache, options: dict[str, Any], prefill: float, rounds: int
) -> Row:
    """What a rank held, from copies, on ranks of which one comes anew."""
    mine = None if dist.get_rank() == 1 else cache
    seconds = []
    for _ in range(rounds + 1):
        dist.barrier()
        start = perf_counter()
        found = hf.ShardedCache.recover(mine, served.config, mesh, **options)
        dist.barrier()
        seconds.append(perf_counter() - start)
        del found
    case = f"{cache.get_seq_length():,} tokens of {len(cache.layers)} layers after a loss"
    return Row(case, "a new prefill", Timing.of([prefill] * 2), Timing.of(seconds[1:]), 5.0)


def _alike(x: Tensor) -> Tensor:
    """As rank 0 has it."""
    dist.broadcast(x, 0)
    return x
