"""Wrappers that forward some of a batch: the model finds its mesh, or raises. None attends to a shard alone."""

from collections.abc import Callable
from functools import partial
from typing import Any

import peft
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import Trainer

import attnmesh.hf as hf
from attnmesh import errors
from attnmesh.mesh.shapes import AXES, Shape
from tests.support.models import families
from tests.support.models.families import prompt
from tests.support.ranks.pool import Pool, on_each_rank
from tests.support.truth.mesh_problems import named_mesh
from tests.support.truth.tolerances import FLOAT32_MODEL

LENGTH = 22


class Picking(nn.Module):
    """A module that passes the arguments of these names on to its model, and drops the others."""

    def __init__(self, model: nn.Module, *names: str) -> None:
        super().__init__()
        self.model, self.names = model, names

    def forward(self, **inputs: Any) -> Any:
        return self.model(**{name: inputs[name] for name in self.names})


class Embedding(Picking):
    """A module that embeds tokens by itself."""

    def forward(self, **inputs: Any) -> Any:
        embedded = self.model.get_input_embeddings()(inputs.pop("input_ids"))
        return self.model(inputs_embeds=embedded, **{name: inputs[name] for name in self.names})


class Replicating(Picking):
    """A module that gives each of its replicas some rows, by name, as `nn.DataParallel` does."""

    def forward(self, **inputs: Any) -> Any:
        rows = [{name: inputs[name][row : row + 1] for name in self.names} for row in range(2)]
        logits = [self.model(**one).logits for one in rows]
        return type("Output", (), {"logits": torch.cat(logits)})


class Checkpointed(Picking):
    """A module that checkpoints its model, and passes it tensors by position alone."""

    def forward(self, **inputs: Any) -> Any:
        mask, ids = inputs["attention_mask"] if "attention_mask" in self.names else None, inputs["input_ids"]
        return checkpoint(self.model, ids, mask, use_reentrant=False)


def with_adapters(model: Any) -> Any:
    settings = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    return peft.get_peft_model(model, settings)


def with_virtual_tokens(model: Any) -> Any:
    settings = peft.PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM")
    return peft.get_peft_model(model, settings)


def compiled(wrap: Callable[[Any], nn.Module], model: Any) -> Any:
    return torch.compile(wrap(model), backend="eager")


def compiled_inside(wrap: Callable[[Any], nn.Module], model: Any) -> Any:
    model.compile(backend="eager")
    return wrap(model)


BOTH, IDS = ("input_ids", "position_ids"), ("input_ids",)
POSITIONS = "attnmesh.hf position_ids: expected those of shard_batch"

WRAPPERS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "all": (lambda model: Picking(model, *BOTH, "attention_mask"), ""),
    "no mask": (lambda model: Picking(model, *BOTH), ""),
    "no mask, no cache": (lambda model: Picking(model, *BOTH, "use_cache"), ""),
    "ids alone": (lambda model: Picking(model, *IDS), POSITIONS),
    "no positions": (lambda model: Picking(model, *IDS, "attention_mask"), POSITIONS),
    "embeddings and positions": (lambda model: Embedding(model, "position_ids"), ""),
    "embeddings alone": (Embedding, POSITIONS),
    "rows": (lambda model: Replicating(model, *BOTH, "attention_mask"), "attention_mask: expected all rows"),
    "rows without a mask": (lambda model: Replicating(model, *BOTH), ""),
    "checkpointed": (lambda model: Checkpointed(model, "attention_mask"), POSITIONS),
    "checkpointed ids": (Checkpointed, POSITIONS),
    "generating": (lambda model: Sampling(model, *BOTH, "attention_mask"), ""),
    "virtual tokens": (
        with_virtual_tokens,
        "attnmesh.hf: expected adapters without virtual tokens, given PromptTuningConfig",
    ),
    "partial": (lambda model: partial(model, use_cache=False), ""),
    "adapters": (with_adapters, ""),
    "adapters, no mask": (lambda model: Picking(with_adapters(model), *BOTH), ""),
    "adapters, ids alone": (lambda model: Picking(with_adapters(model), *IDS), POSITIONS),
    "compiled, no mask": (partial(compiled, lambda model: Picking(model, *BOTH)), ""),
    "compiled, ids alone": (partial(compiled, lambda model: Picking(model, *IDS)), POSITIONS),
    "compiled, embeddings alone": (partial(compiled, Embedding), POSITIONS),
    "compiled inside, ids alone": (partial(compiled_inside, lambda model: Picking(model, *IDS)), POSITIONS),
}
"""Wrappers of a model, and the error; "" where the model finds its mesh."""


class Sampling(Picking):
    """A module that continues the whole batch before it computes the shard, as training by rewards does."""

    def forward(self, **inputs: Any) -> Any:
        with torch.no_grad():
            tokens = self.model.generate(**batch(), max_new_tokens=3, do_sample=False)
        assert (
            tokens.tolist()
            == families.model("llama", "sdpa", num_hidden_layers=1)
            .generate(**batch(), max_new_tokens=3, do_sample=False)
            .tolist()
        )
        return super().forward(**inputs)


def batch() -> dict[str, Tensor]:
    return {"input_ids": prompt(LENGTH, batch=2)}


@on_each_rank
def call_wrappers(names: list[str], shape: Shape) -> list[tuple[float, str]]:
    """Return the largest difference of this rank's logits from those of one device, or the error, of each wrapper."""
    mesh = named_mesh(shape, AXES)
    found = []
    stock = families.model("llama", "sdpa", num_hidden_layers=1)
    for name in names:
        model = families.model("llama", "attnmesh", num_hidden_layers=1)
        wrapped = WRAPPERS[name][0](model)
        part = hf.shard_batch(batch(), mesh)
        arguments = {key: x for key, x in part.items() if key != "use_cache" or not isinstance(wrapped, partial)}
        try:
            logits = wrapped(**arguments).logits.detach()
        except errors.InputError as error:
            found.append((0.0, str(error)))
            continue
        with torch.no_grad():
            expected = stock(**batch()).logits[:, part["attention_mask"].sequence.positions()]
        found.append((float((logits - expected).abs().max()), ""))
    return found


IN_GRAPHS = [name for name in WRAPPERS if name.startswith("compiled")]
KINDS = {"eager": [name for name in WRAPPERS if name not in IN_GRAPHS], "graphs": IN_GRAPHS}


@pytest.mark.parametrize("kind", ["eager", pytest.param("graphs", marks=pytest.mark.long)])
def test_wrappers_find_the_mesh_or_raise(kind: str, pool: Pool) -> None:
    """`make test` compiles a model on a mesh in test_shard_tensors.py, and none of its wrappers."""
    for answers in pool.run(2, call_wrappers, KINDS[kind], Shape(1, 2, 1)):
        for name, (difference, given) in zip(KINDS[kind], answers, strict=True):
            error = WRAPPERS[name][1]
            assert difference < FLOAT32_MODEL, name
            assert error in given if error else not given, (name, given)


@on_each_rank
def call_with_whole_batches() -> list[tuple[str, float]]:
    """Return how far a model on each rank alone is from stock attention, for batches of the rank's own."""
    rank = torch.distributed.get_rank()
    found = []
    ours, stock = (families.model("llama", name, num_hidden_layers=1) for name in ("attnmesh", "sdpa"))
    ids, mask = prompt(LENGTH, batch=2, seed=rank), torch.ones(2, LENGTH, dtype=torch.long)
    mask[1, :5] = 0
    padded = {"input_ids": ids, "attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).masked_fill(mask == 0, 1)}
    packed = {"input_ids": ids[:1], "position_ids": torch.cat((torch.arange(9), torch.arange(13)))[None]}
    for name, given in {"plain": {"input_ids": ids}, "padded": padded}.items():
        found.append((name, gap(ours(**given).logits, stock(**given).logits, mask)))
    expected = stock(**packed, use_cache=False).logits
    found.append(("packed", gap(ours(**hf.shard_batch(packed, None)).logits, expected)))
    first, more = {"input_ids": ids[:, :15]}, {"input_ids": ids[:, 15:]}
    logits = [model(**more, past_key_values=model(**first).past_key_values).logits for model in (ours, stock)]
    found.append(("cached", gap(*logits)))
    generated = [model.generate(ids, attention_mask=mask, max_new_tokens=3, do_sample=False) for model in (ours, stock)]
    found.append(("generated", float(generated[0].ne(generated[1]).sum())))
    return found


def gap(given: Tensor, expected: Tensor, mask: Tensor | None = None) -> float:
    difference = (given - expected).detach().abs()
    return float((difference if mask is None else difference[mask.bool()]).max())


def test_ranks_with_batches_of_their_own_are_served(pool: Pool) -> None:
    """As under data parallelism, and where each rank generates alone."""
    for answers in pool.run(2, call_with_whole_batches):
        assert [name for name, difference in answers if not difference < FLOAT32_MODEL] == []


@on_each_rank
def generate_on_mesh() -> tuple[list[int], list[int]]:
    """Return what a model that a trainer calls on a mesh generates, and what stock transformers does."""
    ours, stock = (families.model("llama", name, num_hidden_layers=1) for name in ("attnmesh", "sdpa"))
    trainer: Any = hf.on_mesh(Trainer, named_mesh(Shape(1, 2, 1), AXES))
    options = {"max_new_tokens": 3, "do_sample": False}
    with trainer._make_sharder(None).active(True, ours):
        given = ours.generate(**batch(), **options)
    return given.tolist(), stock.generate(**batch(), **options).tolist()


def test_a_model_of_a_trainer_on_a_mesh_generates(pool: Pool) -> None:
    for given, expected in pool.run(2, generate_on_mesh):
        assert given == expected


UNKNOWN = {
    "input_ids": "ArgumentError: attnmesh.hf input_ids: expected tokens from 0 to 96, the model's vocabulary, given",
    "labels": "ArgumentError: attnmesh.hf labels: expected tokens from 0 to 96, or -100, given 999. Fix: use the token",
}


@on_each_rank
def go_on_after_unknown_token(name: str) -> tuple[str, float]:
    """Return the error of a batch with a token that one rank alone has, and the loss of the next batch."""
    mesh = named_mesh(Shape(1, 2, 1), AXES)
    model = families.model("llama", "attnmesh", num_hidden_layers=1)
    whole = {"input_ids": prompt(LENGTH, batch=2), "labels": prompt(LENGTH, batch=2)}
    whole[name][0, -1] = 999
    error = ""
    try:
        model(**hf.shard_batch(whole, mesh))
    except Exception as raised:
        error = f"{type(raised).__name__}: {raised}"
    whole[name][0, -1] = 0
    return error, float(model(**hf.shard_batch(whole, mesh)).loss.detach())


@pytest.mark.parametrize("name", UNKNOWN)
def test_a_token_that_no_model_has_raises_on_all_ranks(name: str, pool: Pool) -> None:
    answers = pool.run(2, go_on_after_unknown_token, name)
    for error, loss in answers:
        assert error.startswith(UNKNOWN[name]), error
        assert loss > 0
