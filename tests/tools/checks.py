"""Checks as they run on a rank: a model generates and learns, by attnmesh or by stock transformers."""

import functools
import traceback
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from io import StringIO
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

import attnmesh.hf as hf
from attnmesh.errors import InputError
from attnmesh.mesh.shapes import Shape
from tests.support.mesh_problems import named_mesh
from tests.tools.sizes import VOCABULARY
from tests.tools.tiny_models import Case, build

AXES = ("heads", "queries", "keys")

DTYPES = (torch.float64, torch.float32)
"""What is tried in turn: not every model of transformers can compute in float64."""

LENGTH = 37
"""Tokens of a prompt: no number of ranks, window or block divides it."""

NEW = 12

Generate = Callable[..., Any]
"""(input_ids, **options) -> what transformers' `generate` returns as a dict."""


class Failed(Exception):
    """An error of any kind as its name, its words and where it was raised: many kinds cannot be pickled."""


@dataclass(frozen=True)
class Made:
    """Results of a call: new tokens and the logits that they were chosen by, or a loss and gradients."""

    dtype: torch.dtype
    tokens: Tensor | None = None
    """(sequences, steps), those of several calls in a row."""
    logits: Tensor | None = None
    """(sequences, steps, vocabulary); None with beams."""
    scores: Tensor | None = None
    """Of each sequence that beams found."""
    loss: float = 0.0
    gradients: dict[str, Tensor] = field(default_factory=dict)
    reach: float = 0.0
    """How far the last token's logits move, by their deviation, if a token ten places before it is another."""


def guarded(function: Callable[..., Any]) -> Callable[..., Any]:
    """Raise what is no error of attnmesh as a `Failed`, and print nothing."""

    @functools.wraps(function)
    def run(*arguments: Any) -> Any:
        try:
            with redirect_stdout(StringIO()):
                return function(*arguments)
        except InputError:
            raise
        except Exception as error:
            raise Failed(type(error).__name__, _first_and_last(str(error)), _where(error)) from None

    return run


def _first_and_last(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()] or [""]
    return lines[0] if len(lines) == 1 else f"{lines[0]} ... {lines[-1]}"


def _where(error: BaseException) -> str:
    """The innermost line of attnmesh and of transformers."""
    inner = {}
    for frame in traceback.extract_tb(error.__traceback__):
        for package in ("attnmesh", "transformers"):
            if (place := frame.filename.rpartition(f"/{package}/")[2]) != frame.filename:
                inner[package] = f"{package}/{place}:{frame.lineno} {frame.name}"
    return "; ".join(inner.values())


def prompt(length: int = LENGTH, batch: int = 1, seed: int = 0) -> Tensor:
    """Token ids, none of which is padding."""
    return torch.randint(2, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))


def plain(generate: Generate) -> list[Any]:
    return [generate(prompt(), max_new_tokens=NEW)]


def padded(generate: Generate) -> list[Any]:
    """Three sequences, two of them padded on the left: one beyond a window."""
    ids = prompt(batch=3)
    mask = torch.ones_like(ids)
    for row, count in ((1, 9), (2, 22)):
        ids[row, :count], mask[row, :count] = 0, 0
    return [generate(ids, attention_mask=mask, max_new_tokens=NEW)]


def chunked(generate: Generate) -> list[Any]:
    return [generate(prompt(), max_new_tokens=NEW, prefill_chunk_size=8)]


def turns(generate: Generate) -> list[Any]:
    """Two turns: what was generated, and more, is the beginning of another prompt."""
    first = generate(prompt(), max_new_tokens=5)
    ids = torch.cat((first.sequences, prompt(11, seed=1)), 1)
    return [first, generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=5)]


def beams(generate: Generate) -> list[Any]:
    return [generate(prompt(batch=2), max_new_tokens=6, num_beams=3)]


GENERATIONS: dict[str, Callable[[Generate], list[Any]]] = {
    check.__name__: check for check in (plain, padded, chunked, turns, beams)
}

WITH_CACHE = dict.fromkeys(("chunked", "turns"), ("fresh", "alike", "uncached"))

REFERENCES = {**dict.fromkeys(GENERATIONS, ("fresh", "uncached")), **WITH_CACHE}
"""How stock transformers is asked, in the order in which its answers count.

A prompt as a whole is "fresh", in the same chunks or on one cache as here "alike". "uncached", each new token is
computed with all tokens before it: in some models the stock cache changes what they say.
"""


@functools.lru_cache(maxsize=3)
def _model(case: Case, attention: str, dtype: torch.dtype) -> PreTrainedModel:
    return build(case, attention, dtype)


def _options(given: dict[str, Any]) -> dict[str, Any]:
    many = "num_beams" in given
    return {
        "do_sample": False,
        "return_dict_in_generate": True,
        "output_scores": many,
        "output_logits": not many,
    } | given


@guarded
def stock_generation(case: Case, check: str, reference: str, dtype: torch.dtype) -> Made:
    """Generate by stock transformers."""
    model = _model(case, "eager", dtype)
    more: dict[str, Any] = {"use_cache": False} if reference == "uncached" else {}
    if check == "turns" and reference == "alike":
        more["past_key_values"] = DynamicCache(config=model.config)

    def generate(ids: Tensor, **options: Any) -> Any:
        if reference != "alike":
            options.pop("prefill_chunk_size", None)
        return model.generate(ids, **{"attention_mask": torch.ones_like(ids), **_options(options), **more})

    return _finite(_generated(check, generate, dtype))


@guarded
def our_generation(case: Case, check: str, dtype: torch.dtype, shape: Shape | None) -> Made:
    """Generate by attnmesh, on a rank."""
    model, mesh = _model(case, "attnmesh", dtype), None if shape is None else named_mesh(shape, AXES)
    where: dict[str, Any] = {"mesh": mesh}
    if check in ("chunked", "turns"):  # blocks that make several pieces of so short a prompt
        where = {"cache": hf.ShardedCache(model.config, mesh, block=4)}

    def generate(ids: Tensor, **options: Any) -> Any:
        return hf.generate(model, ids, **where, **_options(options))

    return _generated(check, generate, dtype)


def _generated(check: str, generate: Generate, dtype: torch.dtype) -> Made:
    lengths: list[int] = []

    def counting(ids: Tensor, **options: Any) -> Any:
        lengths.append(ids.shape[1])
        return generate(ids, **options)

    outputs = GENERATIONS[check](counting)
    tokens = torch.cat([made.sequences[:, length:] for made, length in zip(outputs, lengths, strict=True)], 1)
    if check == "beams":
        return Made(dtype, tokens, scores=outputs[0].sequences_scores.double())
    logits = torch.cat([torch.stack(made.logits, 1).double() for made in outputs], 1)
    return Made(dtype, tokens, logits)


def _finite(made: Made) -> Made:
    numbers = [x for x in (made.logits, made.scores, torch.tensor(made.loss)) if x is not None]
    if any(bool(x.isnan().any()) for x in [*numbers, *made.gradients.values()]):
        raise ArithmeticError("stock transformers gives NaN")
    return made


def batch() -> dict[str, Tensor]:
    """Two rows to learn from, with beginnings that are not to be learned."""
    ids = prompt(batch=2)
    labels = ids.clone()
    labels[0, :3], labels[1, :11] = -100, -100
    return {"input_ids": ids, "labels": labels}


@guarded
def stock_training(case: Case, dtype: torch.dtype) -> Made:
    """Learn by stock transformers."""
    model = _model(case, "eager", dtype)
    return _finite(_learned(model, {**batch(), "use_cache": False}, dtype, _reach(model)))


@guarded
def our_training(case: Case, dtype: torch.dtype, shape: Shape) -> Made:
    """Learn by attnmesh from a rank's shard."""
    model = _model(case, "attnmesh", dtype)
    return _learned(model, hf.shard_batch(batch(), named_mesh(shape, AXES)), dtype)


def _learned(model: PreTrainedModel, arguments: dict[str, Any], dtype: torch.dtype, reach: float = 0.0) -> Made:
    model.train()
    model.zero_grad()
    try:
        loss = model(**arguments).loss
        loss.backward()
    finally:
        model.eval()
    gradients = {name: weights.grad for name, weights in model.named_parameters() if weights.grad is not None}
    return Made(dtype, loss=loss.item(), gradients=gradients, reach=reach)


def _reach(model: PreTrainedModel) -> float:
    ids = prompt()
    other = ids.clone()
    other[0, -11] = 2 + (other[0, -11] + 3) % (VOCABULARY - 2)
    with torch.no_grad():
        here, there = (model(input_ids=x, use_cache=False).logits[0, -1].double() for x in (ids, other))
    return float((here - there).abs().max() / here.std())


@guarded
def in_step() -> None:
    """Raise unless the ranks still understand each other."""
    total = torch.ones(1)
    dist.all_reduce(total)
    if total.item() != dist.get_world_size():
        raise ArithmeticError(f"ranks add up to {total.item()}")
