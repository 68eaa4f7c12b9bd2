"""Checks that run on a rank: generation and training, with attnmesh or with stock transformers."""

import functools
import sys
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, redirect_stdout
from dataclasses import dataclass, field
from io import StringIO
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import DynamicCache, PreTrainedModel

import attnmesh.hf as hf
from attnmesh.errors import InputError
from attnmesh.hf import host_experts, shared_weights
from attnmesh.hf.models import is_recurrent
from attnmesh.mesh.shapes import Shape
from tests.support.models.sizes import VOCABULARY
from tests.support.models.tiny_models import Case, build
from tests.support.ranks.pool import on_each_rank
from tests.support.truth.mesh_problems import named_mesh

AXES = ("heads", "queries", "keys")

DTYPES = (torch.float64, torch.float32)
"""Dtypes to compute in, the first that works: some models of transformers cannot run in float64."""

LENGTH = 37
"""Tokens of a prompt. No number of ranks, window or block divides it."""

NEW = 12

Generate = Callable[..., Any]
"""(input_ids, **options) -> the dict that transformers' `generate` returns."""


class Failed(Exception):
    """Any error as its class name, message and line. Many errors cannot be pickled."""


@dataclass(frozen=True)
class Result:
    """Result of a check: new tokens with their logits, or a loss with gradients."""

    dtype: torch.dtype
    tokens: Tensor | None = None
    """(sequences, steps) of all calls, concatenated."""
    logits: Tensor | None = None
    """(sequences, steps, vocabulary); None with beams."""
    scores: Tensor | None = None
    """Score of each sequence, with beams."""
    loss: float = 0.0
    gradients: dict[str, Tensor] = field(default_factory=dict)
    reach: float = 0.0
    """Change of the last logits when the token ten places before is replaced, in standard deviations."""


def guarded(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function with output suppressed, and with errors other than attnmesh's raised as `Failed`."""

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
    """Return the first and last line of a message."""
    lines = [line.strip() for line in text.splitlines() if line.strip()] or [""]
    return lines[0] if len(lines) == 1 else f"{lines[0]} ... {lines[-1]}"


def _where(error: BaseException) -> str:
    """Return the innermost lines of attnmesh and of transformers in the traceback."""
    inner = {}
    for frame in traceback.extract_tb(error.__traceback__):
        for package in ("attnmesh", "transformers"):
            if (place := frame.filename.rpartition(f"/{package}/")[2]) != frame.filename:
                inner[package] = f"{package}/{place}:{frame.lineno} {frame.name}"
    return "; ".join(inner.values())


def prompt(length: int = LENGTH, batch: int = 1, seed: int = 0) -> Tensor:
    """Return random token ids without padding."""
    return torch.randint(2, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))


def plain(generate: Generate) -> list[Any]:
    return [generate(prompt(), max_new_tokens=NEW)]


def padded(generate: Generate) -> list[Any]:
    """Generate from three sequences, two of them padded on the left, one by more than a window."""
    ids = prompt(batch=3)
    mask = torch.ones_like(ids)
    for row, count in ((1, 9), (2, 22)):
        ids[row, :count], mask[row, :count] = 0, 0
    return [generate(ids, attention_mask=mask, max_new_tokens=NEW)]


def chunked(generate: Generate) -> list[Any]:
    return [generate(prompt(), max_new_tokens=NEW, prefill_chunk_size=8)]


def conversation(generate: Generate) -> list[Any]:
    """Generate twice. The second prompt begins with the first prompt and its new tokens."""
    first = generate(prompt(), max_new_tokens=5)
    ids = torch.cat((first.sequences, prompt(11, seed=1)), 1)
    return [first, generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=5)]


def beams(generate: Generate) -> list[Any]:
    return [generate(prompt(batch=2), max_new_tokens=6, num_beams=3)]


def rows(generate: Generate) -> list[Any]:
    """Generate from prompts of unequal lengths."""
    return [generate(ids, max_new_tokens=NEW) for ids in prompts_of_rows()]


def prompts_of_rows() -> list[Tensor]:
    return [prompt(length, seed=length) for length in (LENGTH, 9, 22)]


GENERATIONS: dict[str, Callable[[Generate], list[Any]]] = {
    check.__name__: check for check in (plain, padded, chunked, conversation, beams, rows)
}

GENERATIONS["shared"] = plain

WITH_CACHE = dict.fromkeys(("chunked", "conversation"), ("fresh", "alike", "uncached"))

REFERENCES = {**dict.fromkeys(GENERATIONS, ("fresh", "uncached")), **WITH_CACHE}
"""Ways to run stock transformers as the reference, in order of preference.

"fresh" computes each prompt as a whole. "alike" uses the same chunks, or one cache for both prompts. "uncached"
computes all tokens again for each new one, because in some models the stock cache changes the results.
"""


@functools.lru_cache(maxsize=3)
def _model(case: Case, attention: str, dtype: torch.dtype) -> PreTrainedModel:
    return build(case, attention, dtype)


def _options(options: dict[str, Any]) -> dict[str, Any]:
    """Return options for greedy decoding or beams, with the logits or scores in the output."""
    beams = "num_beams" in options
    return {
        "do_sample": False,
        "return_dict_in_generate": True,
        "output_scores": beams,
        "output_logits": not beams,
    } | options


@on_each_rank
@guarded
def generate_by_stock(case: Case, check: str, reference: str, dtype: torch.dtype) -> Result:
    """Return what stock transformers generates."""
    # Layers are shared in a new model, so that its dynamic ropes have grown as little as this one's.
    model = (build if check == "shared" else _model)(case, "eager", dtype)
    more: dict[str, Any] = {"use_cache": False} if reference == "uncached" else {}
    if check == "conversation" and reference == "alike":
        more["past_key_values"] = DynamicCache(config=model.config)

    def generate(ids: Tensor, **options: Any) -> Any:
        if reference != "alike":
            options.pop("prefill_chunk_size", None)
        return model.generate(ids, **{"attention_mask": torch.ones_like(ids), **_options(options), **more})

    with precisely(model, dtype):
        return check_finite(_run_generation(check, generate, dtype))


@on_each_rank
@guarded
def generate_by_attnmesh(case: Case, check: str, dtype: torch.dtype, shape: Shape | None) -> Result:
    """Return what attnmesh generates on this rank."""
    mesh = None if shape is None else named_mesh(shape, AXES)
    model = _shared_model(case, dtype, mesh) if check == "shared" else _model(case, "attnmesh", dtype)
    if check == "rows":
        with precisely(model, dtype):
            return _decode_rows(model, mesh, dtype)
    target: dict[str, Any] = {"mesh": mesh}
    if check in ("chunked", "conversation"):  # small blocks, so that a short prompt has several chunks
        target = {"cache": hf.ShardedCache(model.config, mesh, block=4)}

    def generate(ids: Tensor, **options: Any) -> Any:
        return hf.generate(model, ids, **target, **_options(options))

    with precisely(model, dtype):
        return _run_generation(check, generate, dtype)


def _shared_model(case: Case, dtype: torch.dtype, mesh: Any) -> PreTrainedModel:
    """A model whose layers the ranks share, the smallest too."""
    small = patch.object(shared_weights, "LEAST_LAYER_BYTES", 0), patch.object(host_experts, "LEAST_EXPERT_BYTES", 0)
    with small[0], small[1]:
        return hf.share_weights(build(case, "attnmesh", dtype), mesh)  # type: ignore[no-any-return]


@torch.no_grad()
def _decode_rows(model: PreTrainedModel, mesh: Any, dtype: torch.dtype) -> Result:
    """Decode prompts of unequal lengths together, after the first token of each."""
    caches = [hf.ShardedCache(model.config, mesh) for _ in prompts_of_rows()]
    logits = []
    for ids, cache in zip(prompts_of_rows(), caches, strict=True):
        first = hf.generate(model, ids, cache=cache, **_options({"max_new_tokens": 1}))
        logits.append([first.logits[0]])
    for _ in range(NEW - 1):
        tokens = [int(row[-1].argmax()) for row in logits]
        for row, step in zip(logits, hf.decode_rows(model, tokens, caches), strict=True):
            row.append(step[None])
    steps = torch.cat([torch.stack(row, 1) for row in logits], 1)
    return Result(dtype, steps.argmax(-1), steps.double())


def _run_generation(check: str, generate: Generate, dtype: torch.dtype) -> Result:
    lengths: list[int] = []

    def counting(ids: Tensor, **options: Any) -> Any:
        lengths.append(ids.shape[1])
        return generate(ids, **options)

    outputs = GENERATIONS[check](counting)
    tokens = torch.cat([output.sequences[:, length:] for output, length in zip(outputs, lengths, strict=True)], 1)
    if check == "beams":
        return Result(dtype, tokens, scores=outputs[0].sequences_scores.double())
    logits = torch.cat([torch.stack(output.logits, 1).double() for output in outputs], 1)
    return Result(dtype, tokens, logits)


def check_finite(result: Result) -> Result:
    """Return the result. Raise if it has a NaN."""
    numbers = [x for x in (result.logits, result.scores, torch.tensor(result.loss)) if x is not None]
    if any(bool(x.isnan().any()) for x in [*numbers, *result.gradients.values()]):
        raise ArithmeticError("stock transformers gives NaN")
    return result


AS_THEY_ARE = ("attnmesh.core.candidates", "attnmesh.cost.traffic")
"""Modules that compute in float32 whatever the model: with the bits of numbers, and with counts of tokens."""


class DoublePrecision(TorchFunctionMode):
    """Compute in float64 what a float64 model casts to float32.

    Rules of recurrent layers compute in float32 in any model. Their errors there are as large as those allowed here.
    """

    def __torch_function__(self, func: Any, _: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in ("__get__", "view") or sys._getframe(1).f_globals.get("__name__") in AS_THEY_ARE:
            return func(*args, **(kwargs or {}))  # attributes and views cast nothing
        doubled = lambda x: torch.float64 if x is torch.float32 else x  # noqa: E731
        kwargs = {name: doubled(value) for name, value in (kwargs or {}).items()}
        if name == "float" and args[0].is_floating_point():
            return args[0].double()
        return func(*map(doubled, args), **kwargs)


def precisely(model: PreTrainedModel, dtype: torch.dtype) -> AbstractContextManager[object]:
    """Return `DoublePrecision` for float64 models with recurrent layers."""
    return DoublePrecision() if dtype == torch.float64 and is_recurrent(model.config) else nullcontext()


def batch() -> dict[str, Tensor]:
    """Return two sequences whose first tokens have no labels."""
    ids = prompt(batch=2)
    labels = ids.clone()
    labels[0, :3], labels[1, :11] = -100, -100
    return {"input_ids": ids, "labels": labels}


def loss_and_gradients(model: torch.nn.Module, batch: dict[str, Any]) -> tuple[float, dict[str, Tensor]]:
    """Return the loss, and the gradients of all weights, to which are added those that the model has."""
    loss = model.train()(**batch).loss
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@on_each_rank
@guarded
def train_by_stock(case: Case, dtype: torch.dtype) -> Result:
    """Return the loss and gradients of stock transformers."""
    model = _model(case, "eager", dtype)
    return check_finite(train_once(model, {**batch(), "use_cache": False}, dtype, _measured_reach(model)))


@on_each_rank
@guarded
def train_by_attnmesh(case: Case, dtype: torch.dtype, shape: Shape) -> Result:
    """Return the loss and gradients of attnmesh on this rank's shard."""
    model = _model(case, "attnmesh", dtype)
    return train_once(model, hf.shard_batch(batch(), named_mesh(shape, AXES)), dtype)


def train_once(model: PreTrainedModel, arguments: dict[str, Any], dtype: torch.dtype, reach: float = 0.0) -> Result:
    """Return the loss and gradients of a batch."""
    model.train()
    model.zero_grad()
    try:
        with precisely(model, dtype):
            loss = model(**arguments).loss
            loss.backward()
    finally:
        model.eval()
    gradients = {name: weights.grad for name, weights in model.named_parameters() if weights.grad is not None}
    return Result(dtype, loss=loss.item(), gradients=gradients, reach=reach)


def _measured_reach(model: PreTrainedModel) -> float:
    """Return `Result.reach` of a model."""
    ids = prompt()
    other = ids.clone()
    other[0, -11] = 2 + (other[0, -11] + 3) % (VOCABULARY - 2)
    with torch.no_grad():
        logits, changed = (model(input_ids=x, use_cache=False).logits[0, -1].double() for x in (ids, other))
    return float((logits - changed).abs().max() / logits.std())


@on_each_rank
@guarded
def check_in_step() -> None:
    """Raise unless an all-reduce over the ranks gives their number."""
    total = torch.ones(1)
    dist.all_reduce(total)
    if total.item() != dist.get_world_size():
        raise ArithmeticError(f"ranks add up to {total.item()}")
