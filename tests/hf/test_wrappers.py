"""Wrappers that forward some of a batch: the model finds its mesh, or raises. None attends to a shard alone."""

from collections.abc import Callable
from functools import partial
from typing import Any

import peft
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import attnmesh.hf as hf
from attnmesh import errors
from attnmesh.mesh.shapes import AXES, Shape
from tests.support import families
from tests.support.families import prompt
from tests.support.mesh_problems import named_mesh
from tests.support.pool import Pool

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
    "partial": (lambda model: partial(model, use_cache=False), ""),
    "adapters": (with_adapters, ""),
    "adapters, no mask": (lambda model: Picking(with_adapters(model), *BOTH), ""),
    "adapters, ids alone": (lambda model: Picking(with_adapters(model), *IDS), POSITIONS),
    "compiled": (partial(compiled, lambda model: Picking(model, *BOTH, "attention_mask")), ""),
    "compiled, no mask": (partial(compiled, lambda model: Picking(model, *BOTH)), ""),
    "compiled, ids alone": (partial(compiled, lambda model: Picking(model, *IDS)), POSITIONS),
    "compiled, embeddings alone": (partial(compiled, Embedding), POSITIONS),
    "compiled inside, no mask": (partial(compiled_inside, lambda model: Picking(model, *BOTH)), ""),
    "compiled inside, ids alone": (partial(compiled_inside, lambda model: Picking(model, *IDS)), POSITIONS),
}
"""Wrappers of a model, and the error; "" where the model finds its mesh."""


def batch() -> dict[str, Tensor]:
    return {"input_ids": prompt(LENGTH, batch=2)}


def outcomes(names: list[str], shape: Shape) -> list[tuple[float, str]]:
    """Return the largest difference of this rank's logits from those of one device, or the error, of each wrapper."""
    mesh, found = named_mesh(shape, AXES), []
    stock = families.model("llama", "sdpa")
    for name in names:
        model = families.model("llama", "attnmesh")
        wrapped = WRAPPERS[name][0](model)
        part = hf.shard_batch(batch(), mesh)
        arguments = {key: x for key, x in part.items() if key != "use_cache" or not isinstance(wrapped, partial)}
        try:
            logits = wrapped(**arguments).logits.detach()
        except errors.InputError as error:
            found.append((0.0, str(error)))
            continue
        with torch.no_grad():
            expected = stock(**batch()).logits[:, part["attention_mask"].shards.positions()]
        found.append((float((logits - expected).abs().max()), ""))
    return found


def test_wrappers_find_the_mesh_or_raise(pool: Pool) -> None:
    for answers in pool.run(2, outcomes, [*WRAPPERS], Shape(1, 2, 1)):
        for (name, (_, error)), (difference, given) in zip(WRAPPERS.items(), answers, strict=True):
            assert difference < 1e-4, name
            assert error in given if error else not given, (name, given)
