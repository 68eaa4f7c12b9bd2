"""Tiny random models of every causal type that transformers has, their configurations derived from each type's own.

A type's configuration class says which sizes there are. Each is given a small value by its name; lists with an entry
for each layer are cut to the layers that show every kind once. What does not follow from names is in `sizes`.
"""

import zlib
from copy import deepcopy
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.tools.sizes import DEPTHS, LAYERS, OVERRIDES, SMALL


@dataclass(frozen=True)
class Case:
    """A model to be tried: a type, and what is changed in its tiny configuration."""

    name: str
    kind: str
    changes: dict[str, Any] = field(default_factory=dict, hash=False)


def all_types() -> list[str]:
    """The model types that `AutoModelForCausalLM` knows."""
    return list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def tiny_config(case: Case) -> PreTrainedConfig:
    """The case's configuration."""
    return _shrunk(CONFIG_MAPPING[case.kind], {**OVERRIDES.get(case.kind, {}), **case.changes})


def _shrunk(kind: type[PreTrainedConfig], changes: dict[str, Any]) -> PreTrainedConfig:
    """A configuration of that class with every size small; changes of a part are given as a dict by the part's name."""
    defaults = {entry.name: entry.default for entry in fields(kind)}
    own = _default(kind)
    made = {name: _like(value, defaults[name]) for name, value in SMALL.items() if name in defaults}
    made |= {name: _like(0.0, value) for name, value in defaults.items() if _is_dropout(name, value)}
    made |= _layers(own, set(defaults), changes)
    parts = {name: part for name, part in own.items() if isinstance(part, PreTrainedConfig)}
    for name, part in parts.items():
        made[name] = _shrunk(type(part), {**OVERRIDES.get(part.model_type, {}), **changes.get(name, {})})
    return kind(**{**made, **{name: deepcopy(value) for name, value in changes.items() if name not in parts}})


def _default(kind: type[PreTrainedConfig]) -> dict[str, Any]:
    """Fields of the class's own configuration, if there is one without being told more."""
    try:
        return dict(vars(kind()))
    except Exception:
        return {}


def _like(value: Any, own: Any) -> Any:
    """A number of the type that the class has there."""
    return type(own)(value) if type(own) in (int, float) and type(value) in (int, float) else value


def _is_dropout(name: str, value: object) -> bool:
    return type(value) in (int, float) and any(part in name for part in ("dropout", "pdrop", "mask_time_prob"))


def _layers(own: dict[str, Any], names: set[str], changes: dict[str, Any]) -> dict[str, Any]:
    """Lists with an entry a layer, cut to the layers that show each kind once, and how many these are."""
    depth = next((name for name in DEPTHS if name in names), None)
    count = own.get(depth) if depth is not None else None
    lists = {name: value for name, value in own.items() if name in names and _is_per_layer(value, count)}
    if depth is None or depth in changes:
        return {}
    told = next((changes[name] for name in ("layer_types", "layers_block_type") if changes.get(name)), None)
    if told is None and not lists:
        return {}
    chosen = _chosen(list(zip(*lists.values(), strict=True))) if told is None else range(len(told))
    return {depth: len(chosen)} | {name: [value[at] for at in chosen] for name, value in lists.items()}


def _is_per_layer(value: object, count: int | None) -> bool:
    return isinstance(value, (list, tuple)) and len(value) == count and len(value) > 2


def _chosen(rows: list[tuple[Any, ...]]) -> list[int]:
    """The first layer of each kind, and more of them until there are `LAYERS`."""
    first: dict[str, int] = {}
    for number, row in enumerate(rows):
        first.setdefault(str(row), number)
    chosen = list(first.values())[:5]
    return sorted(chosen + chosen[:1] * (LAYERS - len(chosen)))


def build(case: Case, attention: str, dtype: torch.dtype) -> PreTrainedModel:
    """The case's model with that attention, for evaluation: the same weights wherever it is made."""
    config = tiny_config(case)
    config._experts_implementation = "eager"  # the grouped one has no float64
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = _made(config, attention).to(dtype)
    randomise(model)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model.eval()


def _made(config: PreTrainedConfig, attention: str) -> PreTrainedModel:
    """Make the model, also where its class has a table of attentions of its own, which no plug-in can enter."""
    try:
        return AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    except KeyError as error:
        if error.args != (attention,):
            raise
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    model.config._attn_implementation = attention
    return model


KEPT_NEAR = ("A_log", "dt_", "norm", "Norm", "lambda", "scale", "multiplier", "gain", "decay")
"""Parts of names of weights that mean something as they are, and are changed but a little."""


def randomise(model: PreTrainedModel) -> None:
    """Give each weight a value by its name, so large that what a token says depends on the tokens before it."""
    biases = [(name, x) for name, x in model.named_buffers() if name.endswith(("bias", "scalar")) and x.ndim < 2]
    with torch.no_grad():
        for name, weights in [*model.named_parameters(), *biases]:
            weights.copy_(_value(name, weights))


def _value(name: str, weights: Tensor) -> Tensor:
    noise = torch.randn(weights.shape, generator=torch.Generator().manual_seed(zlib.crc32(name.encode())))
    noise = noise.to(weights.dtype)
    if "sink" in name:
        return noise
    near = weights.ndim < 2 or name.endswith(".D") or any(part in name for part in KEPT_NEAR)
    return weights + 0.2 * noise if near and bool(torch.isfinite(weights).all()) else 0.3 * noise
