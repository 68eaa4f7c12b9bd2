"""What `attnmesh generate` does on each rank: load the model, prefill its share of the prompt, decode, and tell."""

from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel
from transformers.generation.streamers import BaseStreamer
from transformers.utils import logging

from attnmesh import hf
from attnmesh.comm.counters import counted
from attnmesh.comm.failures import set_deadline
from attnmesh.comm.init_mesh import init_mesh
from attnmesh.comm.p2p import all_gather_ints
from attnmesh.hf.load import open_model
from attnmesh.hf.options import Settings
from attnmesh.hf.prefill import CHUNK
from attnmesh.mesh.axes import Mesh, device_type_of
from attnmesh.mesh.shapes import Shape


@dataclass(frozen=True)
class Request:
    """What is asked of all ranks alike."""

    model: str
    ids: tuple[int, ...]
    shape: Shape
    heads: tuple[int, int]
    max_new_tokens: int
    dtype: str = "auto"
    seed: int = 0
    checkpoint: str | None = None
    every: int = 64
    deadline: float | None = None
    cache: dict[str, Any] = field(default_factory=dict)
    """Options of `ShardedCache`."""
    options: dict[str, Any] = field(default_factory=dict)
    """Options of transformers' `generate`."""


@dataclass(frozen=True)
class Loaded:
    """The model is in memory, after so many seconds."""

    seconds: float


@dataclass(frozen=True)
class Resumed:
    """So many tokens, of the prompt and new ones, were in the checkpoint."""

    tokens: int


@dataclass(frozen=True)
class Prefilled:
    """So many tokens of the prompt are in the cache."""

    tokens: int


@dataclass(frozen=True)
class Token:
    """A new token."""

    token: int


@dataclass(frozen=True)
class Answer:
    """The new tokens, and what they took; what each rank held and heard is in order of rank."""

    tokens: list[int]
    prompt_tokens: int
    load_seconds: float
    prefill_seconds: float
    seconds_per_token: float
    merging_share: float
    """Of the time of a token, what merging across ranks takes the rank that comes last and need not wait for others."""
    keys: list[int]
    """Tokens of each layer whose keys and values a rank holds; with a heads axis, of its share of the heads."""
    cache_bytes: list[int]
    bytes_per_token: list[int]
    """That a rank receives for each new token."""


class _Telling(BaseStreamer):  # type: ignore[misc]
    """Says each token as transformers hands it over."""

    def __init__(self, say: Callable[[Any], None], prompt_tokens: int) -> None:
        self.say, self.skip = say, prompt_tokens

    def put(self, value: Tensor) -> None:
        """All that there is comes first, the prompt and what a checkpoint has."""
        for token in value.flatten().tolist()[self.skip :]:
            self.say(Token(token))
        self.skip = 0

    def end(self) -> None:
        pass


@dataclass(frozen=True)
class _Begun:
    """A model, a prompt, and what there is of it to go on from: with a checkpoint perhaps new tokens too."""

    model: PreTrainedModel
    ids: Tensor
    reached: Tensor
    cache: hf.ShardedCache
    options: dict[str, Any]
    load_seconds: float


def answer(say: Callable[[Any], None], request: Request) -> Answer:
    """On a rank: the answer, the same on all; what happens meanwhile rank 0 says."""
    set_deadline(request.deadline)
    first = dist.get_rank() == 0
    told: Callable[[Any], None] = say if first else _nothing
    begun = _begun(told, request)
    prefill_seconds = _prefilled(told, begun)
    return _decoded(begun, prefill_seconds, _Telling(say, begun.ids.shape[1]) if first else None)


def _begun(say: Callable[[Any], None], request: Request) -> _Begun:
    """Load the model, and what a checkpoint has."""
    kind = device_type_of(dist.group.WORLD)
    device = torch.device("cuda", torch.cuda.current_device()) if kind == "cuda" else torch.device("cpu")
    mesh = init_mesh(device.type, request.shape, *request.heads) if dist.get_world_size() > 1 else None
    logging.disable_progress_bar()  # of each rank: there is one to look at
    logging.set_verbosity_error()
    start = perf_counter()
    model = open_model(request.model, request.dtype, device)
    loading = perf_counter() - start
    say(Loaded(loading))
    ids = torch.tensor([request.ids], device=device)
    cache = hf.ShardedCache(model.config, mesh, capacity=ids.shape[1] + request.max_new_tokens, **request.cache)
    torch.manual_seed(request.seed)
    options, reached = {"max_new_tokens": request.max_new_tokens, "do_sample": False, **request.options}, ids
    if request.checkpoint is not None:
        kept = hf.Checkpoint(request.checkpoint, every=request.every)
        reached = kept.begin(model, ids, cache, Settings(model, options))
        options["checkpoint"] = kept
        if cache.get_seq_length():
            say(Resumed(reached.shape[1] if reached is not ids else cache.get_seq_length()))
    return _Begun(model, ids, reached, cache, options, loading)


def _prefilled(say: Callable[[Any], None], begun: _Begun) -> float:
    """Seconds of all but the last token, chunk by chunk as far as there is something to tell."""
    kept, ids = begun.options.get("checkpoint"), begun.reached

    def after(tokens: int) -> None:
        if kept is not None:
            kept.save(begun.cache, ids[:, :tokens])
        say(Prefilled(tokens))

    start = perf_counter()
    hf.prefill(begun.model, ids, begun.cache, chunk_size=CHUNK, after=after)
    say(Prefilled(ids.shape[1]))  # also where there was nothing to compute
    return perf_counter() - start


def _decoded(begun: _Begun, prefill_seconds: float, streamer: _Telling | None) -> Answer:
    """The new tokens, and what ranks held, heard and waited for."""
    ids, cache = begun.ids, begun.cache
    start = perf_counter()
    with counted() as traffic:
        output = hf.generate(begun.model, ids, cache=cache, streamer=streamer, **begun.options)
    seconds = perf_counter() - start
    fresh = max(1, output.shape[1] - begun.reached.shape[1])
    axes = Mesh.of(cache.mesh).axes
    table = all_gather_ints([cache.held, cache.held_bytes, traffic.bytes // fresh], axes)
    merges = all_gather_ints([int(1e9 * merge) for merge in traffic.merges], axes)
    return Answer(
        tokens=output[0, ids.shape[1] :].tolist(),
        prompt_tokens=ids.shape[1],
        load_seconds=begun.load_seconds,
        prefill_seconds=prefill_seconds,
        seconds_per_token=seconds / fresh,
        merging_share=sum(map(min, zip(*merges, strict=True))) / 1e9 / seconds,
        keys=[row[0] for row in table],
        cache_bytes=[row[1] for row in table],
        bytes_per_token=[row[2] for row in table],
    )


def _nothing(_: Any) -> None:
    pass
