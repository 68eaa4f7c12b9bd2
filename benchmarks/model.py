"""`python -m benchmarks model`: a whole model on one process with stock transformers, and over ranks.

All return the same tokens. The ranks decode from one prefilled cache by tree, by the three all-reduces of the Tree
Attention paper, and by a ring that passes keys and values on.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.generation.streamers import BaseStreamer
from transformers.utils import logging

from attnmesh import hf
from attnmesh.cache.cache import KVCache
from attnmesh.cli.launch import Send, run_on_ranks
from attnmesh.comm.topology import all_gather_ints
from attnmesh.core.partial import with_sinks
from attnmesh.hf.load import open_model
from attnmesh.mesh.axes import Mesh
from attnmesh.mesh.shapes import Shape
from attnmesh.setup.init_mesh import init_mesh
from benchmarks.decode import ring
from benchmarks.netns import World, run_on, send_rows
from benchmarks.timing import Timing, resident


@dataclass(frozen=True)
class Row:
    """One way to decode, with the memory of the largest rank."""

    contender: str
    tokens: list[int]
    timing: Timing
    """Milliseconds per token."""
    prefill_seconds: float
    cache_megabytes: float
    """Keys and values on the fullest rank."""
    resident_megabytes: float
    """Resident memory of the largest process, shared weights included."""


@dataclass(frozen=True)
class Request:
    """A model, a prompt and a mesh, the same for all contenders."""

    model: str
    ids: tuple[int, ...]
    new: int
    shape: Shape
    heads: tuple[int, int]
    chunk: int | None = None
    """Tokens at a time of a prompt that is read once more, in chunks."""


ROUNDS = 4
"""Turns of stock transformers and attnmesh on one process."""


def rows(request: Request, threads: int, world: World, add: Send, *, alone: bool = False) -> None:
    """Measure one process with all threads, then ranks that share them; ranks on hosts have one thread each.

    With `alone`, attnmesh on that process takes turns with stock transformers, and one process has one thread.
    """
    run_on_ranks(1, send_rows, _one_process, request, "1 process", alone, threads=threads, on_message=add)
    if alone:
        run_on_ranks(1, send_rows, _one_process, request, "1 thread", False, threads=1, on_message=add)
    share = max(1, threads // request.shape.ranks)
    run_on(world, send_rows, _ranks, request, threads=share, on_message=add)


class Times(BaseStreamer):  # type: ignore[misc]
    """Times at which tokens arrive; the first is that of the prompt."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: Tensor) -> None:
        """Note the time of a token."""
        self.times += [perf_counter()] * (value.numel() if self.times else 1)

    def end(self) -> None:
        """Do nothing."""

    @property
    def seconds(self) -> list[float]:
        """Seconds of each new token after the first, whose step ends the prefill."""
        return [later - earlier for earlier, later in zip(self.times[1:], self.times[2:], strict=False)]


def _one_process(request: Request, title: str, both: bool) -> list[Row]:
    """Return the row of stock transformers, and with `both` that of attnmesh, which takes turns with it."""
    logging.disable_progress_bar()
    ids = torch.tensor([request.ids])
    models = {"stock transformers": AutoModelForCausalLM.from_pretrained(request.model).eval()}
    caches: dict[str, Any] = {name: DynamicCache(config=model.config) for name, model in models.items()}
    if both:
        models["attnmesh"] = open_model(request.model, "auto", torch.device("cpu"))
        caches["attnmesh"] = hf.ShardedCache(models["attnmesh"].config, None, capacity=ids.shape[1] + request.new)
    prefills = {}
    for name, model in models.items():
        start = perf_counter()
        with torch.no_grad():
            model(ids[:, :-1], past_key_values=caches[name], use_cache=True, logits_to_keep=1)
        prefills[name] = round(perf_counter() - start, 2)
    seconds: dict[str, list[float]] = {name: [] for name in models}
    tokens: dict[str, list[int]] = {}
    for _ in range(ROUNDS if both else 1):
        for name, model in models.items():
            cache, times = caches[name], Times()
            options = {"max_new_tokens": request.new, "do_sample": False, "streamer": times}
            made = model.generate(ids, past_key_values=cache, **options)
            tokens[name] = made[0, ids.shape[1] :].tolist()
            seconds[name] += times.seconds
            cache.crop(ids.shape[1] - 1 - cache.get_seq_length())
    held = 2 * sum(x.nbytes for x in [layer.keys for layer in caches["stock transformers"].layers]) / 1e6
    return [
        Row(f"{title}, {name}", tokens[name], Timing.of(found), prefills[name], held, resident("VmRSS") / 1e6)
        for name, found in seconds.items()
    ]


class _RingCache(hf.ShardedCache):
    """Decodes single tokens by ring."""

    def attend(self, q: Tensor, kv: KVCache, **layer: Any) -> Tensor:
        if q.shape[2] > 1 or layer["softcap"] is not None:
            return super().attend(q, kv, **layer)
        counts = [kv.shard.block_cyclic.count(rank, kv.length) for rank in range(kv.tokens.size)]
        held = [x[:, :, : kv.used].contiguous() for x in (kv.keys, kv.values)]
        return with_sinks(ring(q, held, counts), layer["sinks"]).out.to(q.dtype)


def _ranks(request: Request) -> Iterator[Row]:
    logging.disable_progress_bar()
    device, ids = torch.device("cpu"), torch.tensor([request.ids])
    ranks, shape = request.shape.ranks, request.shape
    model = open_model(request.model, "auto", device)
    mesh = init_mesh("cpu", shape, *request.heads)
    capacity = ids.shape[1] + request.new
    merges = {"tree": "tree", "three all-reduces": "allreduce"}
    caches: dict[str, Callable[[], hf.ShardedCache]] = {
        f"{ranks} ranks, {name}": partial(
            hf.ShardedCache, model.config, mesh, capacity=capacity, merge=merge, checked=False
        )
        for name, merge in merges.items()
    }
    if shape.heads == 1:
        caches[f"{ranks} ranks, ring"] = lambda: _RingCache(model.config, mesh, capacity=capacity)
    chunked = f"{ranks} ranks, tree, read in chunks of {request.chunk}"
    if request.chunk is not None:
        caches[chunked] = lambda: hf.ShardedCache(model.config, mesh, capacity=capacity, checked=False)
    prefill, first = 0.0, None
    for name, make in caches.items():
        cache = make()
        if first is None or name == chunked:
            dist.barrier()
            start = perf_counter()
            hf.prefill(model, ids, cache, chunk_size=request.chunk if name == chunked else None)
            prefill = perf_counter() - start
        else:  # the keys and values of the first cache
            first.crop(ids.shape[1] - 1 - first.get_seq_length())
            cache.layers, first.layers = first.layers, cache.layers
            cache.tokens = first.tokens
            for layer in cache.layers:
                layer.cache = cache
        first, times = cache, Times()
        dist.barrier()
        made = hf.generate(model, ids, cache=cache, max_new_tokens=request.new, do_sample=False, streamer=times)
        timing = Timing.of(times.seconds)
        held, most = _largest(mesh, cache.held_bytes, resident("VmRSS"))
        tokens = made[0, ids.shape[1] :].tolist()
        yield Row(name, tokens, timing, round(prefill, 2), held / 1e6, most / 1e6)


def _largest(mesh: Any, *numbers: int) -> list[int]:
    return [max(column) for column in zip(*all_gather_ints(numbers, Mesh.of(mesh).axes), strict=True)]
