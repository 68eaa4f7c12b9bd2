"""Work of `attnmesh generate` on each rank: load the model, prefill, decode, and send messages from rank 0."""

from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import StoppingCriteria, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from attnmesh import hf
from attnmesh.cli.generate_prompt import ModelOnMesh, PromptTokens
from attnmesh.cli.launch import Send
from attnmesh.cli.rank_model import load_model
from attnmesh.comm.failures import set_deadline
from attnmesh.comm.topology import dist_all_gather_ints
from attnmesh.hf.chunked_prefill import CHUNK
from attnmesh.hf.images.inputs import images_for_model
from attnmesh.hf.options import GenerationSettings
from attnmesh.hf.shared_weights import weights_in_memory
from attnmesh.runtime.counters import count_traffic
from attnmesh.serve.spelling import Spelling
from attnmesh.serve.text import SentToken, Text
from attnmesh.setup.init_mesh import world_mesh


@dataclass(frozen=True)
class GenerateRequest:
    """A model, a prompt and options, the same on all ranks."""

    model: ModelOnMesh
    prompt: PromptTokens
    max_new_tokens: int
    dtype: str = "auto"
    weights: str = "auto"
    seed: int = 0
    checkpoint: str | None = None
    every: int = 64
    """New tokens between two checkpoints."""
    deadline: float | None = None
    cache: dict[str, Any] = field(default_factory=dict)
    """Options of `ShardedCache`."""
    options: dict[str, Any] = field(default_factory=dict)
    """Options of transformers' `generate`."""
    stops: tuple[str, ...] = ()
    """Texts that end the answer; the model then has its tokenizer."""


@dataclass(frozen=True)
class GenerateResult:
    """New tokens, their times, and lists with one figure per rank."""

    tokens: list[int]
    ended: str
    """Reason for which the tokens end: "stop" at a stop string or at a token that ends answers, or "length"."""
    prompt_tokens: int
    load_seconds: float
    prefill_seconds: float
    seconds_per_token: float
    merging_share: float
    """Share of a token's time in merges, on the last rank to enter each merge, which does not wait there."""
    keys: list[int]
    """Tokens of each layer with keys and values on a rank; with a heads axis, of its share of the heads."""
    cache_bytes: list[int]
    weights: str
    """Ranks that compute the linear layers."""
    weight_bytes: list[int]
    """Bytes of weights in the memory of a rank."""
    bytes_per_token: list[int]
    """Bytes that a rank receives per new token."""


class _TokenSender(BaseStreamer):  # type: ignore[misc]
    """Streamer that sends each new token, but for those that end answers: no text shows them."""

    def __init__(self, send: Send, prompt_tokens: int, ends: list[int]) -> None:
        self.send, self.skip, self.ends = send, prompt_tokens, ends

    def put(self, value: Tensor) -> None:
        """Send tokens; the first call has the prompt, and new tokens of a checkpoint."""
        for token in value.flatten().tolist()[self.skip :]:
            if token not in self.ends:
                self.send(("token", token))
        self.skip = 0

    def end(self) -> None:
        pass


class _StopStrings(StoppingCriteria):  # type: ignore[misc]
    """Criterion that ends generation on all ranks at the token that completes a stop string, which all have."""

    def __init__(self, text: Text, prompt_tokens: int) -> None:
        self.text, self.read = text, prompt_tokens

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        for token in input_ids[0, self.read :].tolist():
            self.text.add(SentToken(token))
        self.read = input_ids.shape[1]
        return torch.tensor([self.text.stopped], device=input_ids.device)


def run_request(send: Send, request: GenerateRequest) -> GenerateResult:
    """Return the result, the same on all ranks. Rank 0 sends messages, each a name and a number.

    "loaded" has the seconds of loading the model, "resumed" the tokens that the checkpoint held, of the prompt and new
    ones, "prefilled" the tokens of the prompt that are in the cache, and "token" a new token.
    """
    set_deadline(request.deadline)
    is_first = dist.get_rank() == 0
    generation = _Generation(send if is_first else lambda _: None, request)
    prefill_seconds = generation.prefill()
    streamer = _TokenSender(send, len(request.prompt.ids), generation.ends) if is_first else None
    return generation.decode(prefill_seconds, streamer)


class _Generation:
    """A model, its cache and a prompt; `reached` is the prompt with new tokens of a checkpoint."""

    def __init__(self, send: Send, request: GenerateRequest) -> None:
        """Load the model, and the state of a checkpoint."""
        start = perf_counter()
        reproducible = bool(request.cache.get("reproducible"))
        self.send = send
        loaded = load_model(request.model, request.dtype, request.weights, reproducible=reproducible)
        self.model, device_mesh, self.weights = loaded
        self.load_seconds = perf_counter() - start
        send(("loaded", self.load_seconds))
        self.ids = self.reached = torch.tensor([request.prompt.ids], device=self.model.device)
        capacity = self.ids.shape[1] + request.max_new_tokens
        output = request.model.mesh.output
        self.cache = hf.ShardedCache(self.model.config, device_mesh, capacity=capacity, output=output, **request.cache)
        torch.manual_seed(request.seed)
        self.options = {"max_new_tokens": request.max_new_tokens, "do_sample": False, **request.options}
        if request.stops:
            stop = _StopStrings(Text(Spelling(request.model.tokenizer), request.stops), self.ids.shape[1])
            self.options["stopping_criteria"] = StoppingCriteriaList([stop])
        if request.checkpoint is not None:
            checkpoint = hf.Checkpoint(request.checkpoint, every=request.every)
            self.reached = checkpoint.begin(
                self.model, self.ids, self.cache, GenerationSettings(self.model, self.options)
            )
            self.options["checkpoint"] = checkpoint
            if cached := self.cache.get_seq_length():
                send(("resumed", cached if self.reached is self.ids else self.reached.shape[1]))
        self.images = images_for_model(request.prompt.images or {}, self.model)

    def prefill(self) -> float:
        """Prefill all but the last token, a message per chunk, and return the seconds."""
        checkpoint = self.options.get("checkpoint")
        ids = self.reached

        def after(tokens: int) -> None:
            if checkpoint is not None:
                checkpoint.save(self.cache, ids[:, :tokens])
            self.send(("prefilled", tokens))

        start = perf_counter()
        hf.prefill(self.model, ids, self.cache, chunk_size=CHUNK, after=after, **self.images)
        self.send(("prefilled", ids.shape[1]))  # also after a checkpoint that holds the whole prompt
        return perf_counter() - start

    def decode(self, prefill_seconds: float, streamer: _TokenSender | None) -> GenerateResult:
        """Decode the new tokens and gather the figures of all ranks."""
        ids, cache = self.ids, self.cache
        start = perf_counter()
        with count_traffic() as traffic:
            output = hf.generate(self.model, ids, cache=cache, streamer=streamer, **self.images, **self.options)
        seconds = perf_counter() - start
        new_ids = output[0, ids.shape[1] :].tolist()
        new_tokens = max(1, output.shape[1] - self.reached.shape[1])
        axes = world_mesh().axes
        rank_figures = cache.held, cache.held_bytes, weights_in_memory(self.model), traffic.bytes // new_tokens
        keys, cache_bytes, weight_bytes, bytes_per_token = map(
            list, zip(*dist_all_gather_ints(rank_figures, axes), strict=True)
        )
        merges = dist_all_gather_ints([int(1e9 * merge) for merge in traffic.merges], axes)
        return GenerateResult(
            tokens=new_ids,
            ended="length"
            if len(new_ids) == self.options["max_new_tokens"] and not self.has_stopped(new_ids)
            else "stop",
            prompt_tokens=ids.shape[1],
            load_seconds=self.load_seconds,
            prefill_seconds=prefill_seconds,
            seconds_per_token=seconds / new_tokens,
            merging_share=sum(map(min, zip(*merges, strict=True))) / 1e9 / seconds,
            keys=keys,
            cache_bytes=cache_bytes,
            weights=self.weights,
            weight_bytes=weight_bytes,
            bytes_per_token=bytes_per_token,
        )

    @property
    def ends(self) -> list[int]:
        """The tokens that end answers."""
        ends = self.model.generation_config.eos_token_id
        return ends if isinstance(ends, list) else [ends]

    def has_stopped(self, ids: list[int]) -> bool:
        """Return whether new tokens end with one that ends answers, or with a stop string."""
        criteria = self.options.get("stopping_criteria", ())
        return ids[-1] in self.ends or any(criterion.text.stopped for criterion in criteria)
