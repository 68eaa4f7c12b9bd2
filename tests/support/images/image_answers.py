"""An engine's answers to prompts with images, as tokens with their log-probabilities, beside those of `generate`."""

from typing import Any

from torch import Tensor

import attnmesh.hf as hf
from attnmesh.hf.serving.engine import Engine
from tests.support.truth.tolerances import FLOAT64_MODEL

NEW = 6


def submit(engine: Engine, batch: dict[str, Tensor], **options: Any) -> Any:
    images = {name: x for name, x in batch.items() if name not in ("input_ids", "attention_mask")}
    return engine.submit(batch["input_ids"][0].tolist(), max_new_tokens=NEW, images=images, logprobs=1, **options)


def answer(stream: Any) -> list[tuple[int, float]]:
    """Return the tokens of a stream and their log-probabilities."""
    return [(token.id, token.logprob) for token in stream]


def generated(model: Any, batch: dict[str, Tensor], mesh: Any) -> list[tuple[int, float]]:
    """Return the same of `generate`."""
    options = {"max_new_tokens": NEW, "do_sample": False, "suppress_tokens": None}
    found = hf.generate(model, **batch, mesh=mesh, return_dict_in_generate=True, output_logits=True, **options)
    ids = found.sequences[0, batch["input_ids"].shape[1] :].tolist()
    return [(token, float(row[0].log_softmax(-1)[token])) for token, row in zip(ids, found.logits, strict=True)]


def alike(found: list[list[tuple[int, float]]], wanted: list[list[tuple[int, float]]]) -> bool:
    """Return whether answers have the same tokens, with the same log-probabilities but for rounding of ropes."""
    pairs = [
        (one, other)
        for mine, theirs in zip(found, wanted, strict=True)
        for one, other in zip(mine, theirs, strict=True)
    ]
    return all(one[0] == other[0] and abs(one[1] - other[1]) < FLOAT64_MODEL for one, other in pairs)
