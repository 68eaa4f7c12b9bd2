"""`python -m benchmarks model`: a whole model on one process with stock transformers, and over ranks.

All return the same tokens. The ranks decode from one prefilled cache by tree, by the three all-reduces of the Tree
Attention paper, by a ring that passes keys and values on, and by tree with weights that they share. One process and the
ranks take turns. Beside the times by tree and by all-reduces are those that the planner foretells, from constants that
are measured on the same ranks before.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.generation.streamers import BaseStreamer
from transformers.utils import logging

from attnmesh import hf
from attnmesh.cache.cache import KVCache
from attnmesh.cli.launch import Send, run_on_ranks
from attnmesh.comm.topology import dist_all_gather_ints
from attnmesh.comm.transport import agreed_transport
from attnmesh.core.partial import with_sinks
from attnmesh.cost.cluster import Cluster
from attnmesh.errors import InputError
from attnmesh.hf.load import open_model
from attnmesh.hf.model_size import model_size
from attnmesh.hf.shared_weights import weights_in_memory
from attnmesh.mesh.axes import Axis, RankMesh
from attnmesh.mesh.shapes import Shape
from attnmesh.planner.decode_cost import OUTPUT_BYTES
from attnmesh.planner.plan import plan
from attnmesh.planner.serving import ModelSizes, choose_plan, over_hosts, serving_plans, why_not_shared
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
    """Resident memory of the largest process, pages included that others map too."""
    weight_megabytes: float = 0.0
    """Weights in the memory of a rank, its share of pages that ranks map."""
    foretold_ms: float | None = None
    """Milliseconds per token by the planner, from constants of these ranks; None where it has no price."""


class Measured(NamedTuple):
    """One turn of one way."""

    contender: str
    tokens: list[int]
    seconds: list[float]
    prefill_seconds: float
    bytes: tuple[int, int, int]
    """Bytes of keys and values, of the process, and of weights."""
    foretold: float | None = None
    """Seconds of a token by the planner."""


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


TURNS = 4
"""Turns of stock transformers and attnmesh on one process."""


def rows(request: Request, threads: int, world: World, add: Send, rounds: int, *, alone: bool = False) -> Cluster:
    """Measure one process with all threads and ranks that share them in turns; ranks on hosts have one thread each.

    Return the constants of the ranks.

    With `alone`, attnmesh on that process takes turns with stock transformers, and one process has one thread.
    """
    by_contender: dict[str, list[Measured]] = {}

    clusters: list[Cluster] = []

    def note(measured: Measured | Cluster) -> None:
        if isinstance(measured, Cluster):
            clusters.append(measured)
        else:
            by_contender.setdefault(measured.contender, []).append(measured)

    for _ in range(rounds):
        run_on_ranks(1, send_rows, _one_process, request, "1 process", alone, threads=threads, on_message=note)
        if alone:
            run_on_ranks(1, send_rows, _one_process, request, "1 thread", False, threads=1, on_message=note)
        share = max(1, threads // request.shape.ranks)
        run_on(world, send_rows, _ranks, request, threads=share, on_message=note)
    for turns in by_contender.values():
        add(_row_of(turns))
    return clusters[-1]


def _row_of(turns: list[Measured]) -> Row:
    """Return the row of a way from its turns. Tokens that differ between turns are none of any other way."""
    same = all(turn.tokens == turns[0].tokens for turn in turns)
    timing = Timing.of([second for turn in turns for second in turn.seconds])
    prefill = round(median(turn.prefill_seconds for turn in turns), 2)
    held, resident, weights = (max(sizes) / 1e6 for sizes in zip(*(turn.bytes for turn in turns), strict=True))
    foretold = None if turns[0].foretold is None else round(1e3 * median(turn.foretold or 0.0 for turn in turns), 1)
    return Row(turns[0].contender, turns[0].tokens if same else [], timing, prefill, held, resident, weights, foretold)


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


def _one_process(request: Request, title: str, with_attnmesh: bool) -> list[Measured]:
    """Return the turn of stock transformers, and with `with_attnmesh` that of attnmesh, which takes turns with it."""
    logging.disable_progress_bar()
    ids = torch.tensor([request.ids])
    models = {"stock transformers": AutoModelForCausalLM.from_pretrained(request.model).eval()}
    caches: dict[str, Any] = {name: DynamicCache(config=model.config) for name, model in models.items()}
    if with_attnmesh:
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
    for _ in range(TURNS if with_attnmesh else 1):
        for name, model in models.items():
            cache, times = caches[name], Times()
            options = {"max_new_tokens": request.new, "do_sample": False, "streamer": times}
            output = model.generate(ids, past_key_values=cache, **options)
            tokens[name] = output[0, ids.shape[1] :].tolist()
            seconds[name] += times.seconds
            cache.crop(ids.shape[1] - 1 - cache.get_seq_length())
    cache_bytes = 2 * sum(x.nbytes for x in [layer.keys for layer in caches["stock transformers"].layers])
    return [
        Measured(
            f"{title}, {name}",
            tokens[name],
            token_seconds,
            prefills[name],
            (cache_bytes, resident("VmRSS"), weights_in_memory(models[name])),
        )
        for name, token_seconds in seconds.items()
    ]


class _RingCache(hf.ShardedCache):
    """Cache that decodes single tokens by ring."""

    def attend(self, q: Tensor, kv_cache: KVCache, **layer: Any) -> Tensor:
        if q.shape[2] > 1 or layer["softcap"] is not None:
            return super().attend(q, kv_cache, **layer)
        counts = [
            kv_cache.own_shard.block_cyclic.count(rank, kv_cache.length) for rank in range(kv_cache.token_axis.size)
        ]
        held = [x[:, :, : kv_cache.used].contiguous() for x in (kv_cache.keys, kv_cache.values)]
        return with_sinks(ring(q, held, counts), layer["sinks"]).out.to(q.dtype)


def _ranks(request: Request) -> Iterator[Measured | Cluster]:
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
    shared = f"{ranks} ranks, tree, shared weights"
    cluster, length = Cluster.measure(mesh), ids.shape[1] + request.new // 2
    yield cluster
    size = model_size(model.config, str(model.dtype).removeprefix("torch."), length=length, phase="decode")
    prices = {f"{ranks} ranks, {name}": foretold(size, cluster, shape, merge, False) for name, merge in merges.items()}
    prices[shared] = foretold(size, cluster, shape, "tree", True)
    caches[shared] = partial(hf.ShardedCache, model.config, mesh, capacity=capacity, checked=False)
    prefill, first_cache = 0.0, None
    for name, make in caches.items():
        cache = make()
        if first_cache is None or name == chunked:
            dist.barrier()
            start = perf_counter()
            hf.prefill(model, ids, cache, chunk_size=request.chunk if name == chunked else None)
            prefill = perf_counter() - start
        else:  # the keys and values of the first cache
            first_cache.crop(ids.shape[1] - 1 - first_cache.get_seq_length())
            cache.layers, first_cache.layers = first_cache.layers, cache.layers
            cache.tokens = first_cache.tokens
            for layer in cache.layers:
                layer.sharded_cache = cache
        first_cache, times = cache, Times()
        if name == shared and not _shares(model, mesh):
            continue
        dist.barrier()
        output = hf.generate(model, ids, cache=cache, max_new_tokens=request.new, do_sample=False, streamer=times)
        sizes = cache.held_bytes, resident("VmRSS"), weights_in_memory(model)
        cache_bytes, resident_bytes, weights = map(
            max, zip(*dist_all_gather_ints(sizes, RankMesh.of(mesh).axes), strict=True)
        )
        tokens, rank_bytes = output[0, ids.shape[1] :].tolist(), (cache_bytes, resident_bytes, weights)
        yield Measured(name, tokens, times.seconds, round(prefill, 2), rank_bytes, prices.get(name))
    away = over_hosts(size, cluster)
    if away is not None and size.shared is not None:
        name, price = f"{ranks} ranks, outputs of shared layers sent alone", dict(away.parts)["outputs"]
        seconds = _outputs_sent(
            size.shared.outputs, max(RankMesh.of(mesh).axes, key=lambda axis: axis.size), request.new
        )
        yield Measured(name, tokens, seconds, round(prefill, 2), rank_bytes, price)


def _outputs_sent(outputs: Sequence[int], axis: Axis, turns: int) -> list[float]:
    """Return the seconds in which ranks send each other the outputs of each call of a step, in so many turns."""
    transport, seconds = agreed_transport(axis, torch.device("cpu")), []
    messages = [torch.zeros(-(-count // axis.size) * OUTPUT_BYTES, dtype=torch.uint8) for count in outputs]
    for _ in range(turns):
        dist.barrier()
        start = perf_counter()
        for message in messages:
            transport.all_to_all([message] * axis.size)
        seconds.append(perf_counter() - start)
    return seconds


def foretold(model: ModelSizes, cluster: Cluster, shape: Shape, merge: str, layers_shared: bool) -> float | None:
    """Return the seconds of a token by the planner, with this merge; None where ranks cannot share layers."""
    if layers_shared and why_not_shared(model, cluster) is not None:
        return None
    way = choose_plan(serving_plans(model, cluster, shape), shape.ranks, layers_shared=layers_shared)
    attention = way.attention_plan
    steps = [one for one in plan(attention.workload, cluster) if one.shape.heads == shape.heads]
    merged = next((one for one in steps if one.exchange == merge), attention)
    return way.seconds - attention.seconds + merged.seconds


def _shares(model: Any, mesh: Any) -> bool:
    """Let the ranks share the model's weights. Return False where they cannot, as on several hosts."""
    try:
        hf.share_weights(model, mesh)
    except InputError:
        return False
    return True
