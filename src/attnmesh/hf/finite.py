"""Logits that are no numbers: noticed without a wait for the device, reported once with the layer they come from."""

import warnings
from functools import partial as partial_of
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor, PreTrainedModel

from attnmesh.hf.tensor_parallel import tp_mesh

PROBE_TOKENS = 16
"""Tokens of the forward pass that looks for the layer: few, because every rank computes all of them."""


class NanWatch(LogitsProcessor):  # type: ignore[misc]
    """Logits processor that changes nothing and remembers, on the device, whether any logit was NaN."""

    def __init__(self) -> None:
        self.seen: Tensor | None = None

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return the scores."""
        is_nan = scores.isnan().any()
        self.seen = is_nan if self.seen is None else self.seen | is_nan
        return scores

    def report(self, model: PreTrainedModel, ids: Tensor, *, first: bool) -> None:
        """Warn on the first rank if a logit was NaN. Every rank looks for the layer."""
        if self.seen is None or not bool(self.seen):
            return
        source = find_nan(model, ids[:, :PROBE_TOKENS])
        if first:
            text = f"generate: some logits are NaN, and the tokens after them mean nothing. {source}"
            warnings.warn(text, stacklevel=4)


def find_nan(model: PreTrainedModel, ids: Tensor) -> str:
    """Return a sentence about the weights or the layer in which numbers that are not finite begin."""
    damaged = next((name for name, x in model.named_parameters() if not bool(x.isfinite().all())), None)
    if damaged is not None:
        return f"The weights {damaged} are not finite. Fix: load the model again, or download it again."
    layer = None if tp_mesh(model) is not None else _first_layer(model, ids)
    fix = "look for weights of extreme size, and on several ranks pass ShardedCache(checked=True) to find unequal calls"
    if model.dtype == torch.float16:
        fix = "use a dtype of a wider range, such as bfloat16"
    source = (
        "No layer makes them from the first tokens alone" if layer is None else f"They begin in the output of {layer}"
    )
    return f"{source}. Fix: {fix}."


def _first_layer(model: PreTrainedModel, ids: Tensor) -> str | None:
    """Return the first module whose output is not finite in a forward pass of these tokens."""
    layers: list[str] = []

    def note(name: str, _module: Any, _inputs: Any, output: Any) -> None:
        out = output[0] if isinstance(output, tuple) and output else output
        if not layers and isinstance(out, Tensor) and out.is_floating_point() and not bool(out.isfinite().all()):
            layers.append(name)

    leaves = [(name, module) for name, module in model.named_modules() if not next(module.children(), None)]
    hooks = [module.register_forward_hook(partial_of(note, name)) for name, module in leaves]
    try:
        with torch.no_grad():
            model(input_ids=ids, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return layers[0] if layers else None
