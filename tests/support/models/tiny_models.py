"""Tiny random models of every causal type of transformers.

Each field of a type's configuration gets a small value by its name. Lists with one entry per layer are cut to one
layer of each kind. `sizes` has the values, and overrides by type.
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

from tests.support.models.sizes import DEPTHS, LAYERS, OVERRIDES, SMALL


@dataclass(frozen=True)
class Case:
    """A model type, with changes to its tiny configuration."""

    name: str
    kind: str
    changes: dict[str, Any] = field(default_factory=dict, hash=False)


def all_types() -> list[str]:
    """Return the model types of `AutoModelForCausalLM`."""
    return list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def tiny_config(case: Case) -> PreTrainedConfig:
    """Return the case's configuration."""
    return _shrunk(CONFIG_MAPPING[case.kind], {**OVERRIDES.get(case.kind, {}), **case.changes})


def _shrunk(kind: type[PreTrainedConfig], changes: dict[str, Any]) -> PreTrainedConfig:
    """Return a configuration with small sizes. Changes of a sub-configuration are a dict under its name."""
    defaults = {entry.name: entry.default for entry in fields(kind)}
    default = _default_fields(kind)
    values = {name: _like(value, defaults[name]) for name, value in SMALL.items() if name in defaults}
    values |= {name: _like(0.0, value) for name, value in defaults.items() if _is_dropout(name, value)}
    values |= _layers(default, set(defaults), changes)
    parts = {name: part for name, part in default.items() if isinstance(part, PreTrainedConfig)}
    for name, part in parts.items():
        values[name] = _shrunk(type(part), {**OVERRIDES.get(part.model_type, {}), **changes.get(name, {})})
    return kind(**{**values, **{name: deepcopy(value) for name, value in changes.items() if name not in parts}})


def _default_fields(kind: type[PreTrainedConfig]) -> dict[str, Any]:
    """Return the fields of the default configuration; none if the class has required arguments."""
    try:
        return dict(vars(kind()))
    except Exception:
        return {}


def _like(value: Any, default: Any) -> Any:
    """Return a number in the type of the field's default."""
    return type(default)(value) if type(default) in (int, float) and type(value) in (int, float) else value


def _is_dropout(name: str, value: object) -> bool:
    return type(value) in (int, float) and any(part in name for part in ("drop", "mask_time_prob"))


def _layers(default: dict[str, Any], names: set[str], changes: dict[str, Any]) -> dict[str, Any]:
    """Return the per-layer lists cut to one layer of each kind, and the number of layers."""
    depth = next((name for name in DEPTHS if name in names), None)
    count = default.get(depth) if depth is not None else None
    lists = {name: value for name, value in default.items() if name in names and _is_per_layer(value, count)}
    if depth is None or depth in changes:
        return {}
    given = next((changes[name] for name in ("layer_types", "layers_block_type") if changes.get(name)), None)
    if given is None and not lists:
        return {}
    chosen = _chosen(list(zip(*lists.values(), strict=True))) if given is None else range(len(given))
    return {depth: len(chosen)} | {name: [value[at] for at in chosen] for name, value in lists.items()}


def _is_per_layer(value: object, count: int | None) -> bool:
    return isinstance(value, (list, tuple)) and len(value) == count and len(value) > 2


def _chosen(rows: list[tuple[Any, ...]]) -> list[int]:
    """Return the first layer of each kind, and the first layer again up to `LAYERS`."""
    first: dict[str, int] = {}
    for number, row in enumerate(rows):
        first.setdefault(str(row), number)
    chosen = list(first.values())[:5]
    return sorted(chosen + chosen[:1] * (LAYERS - len(chosen)))


def build(case: Case, attention: str, dtype: torch.dtype, auto: Any = AutoModelForCausalLM) -> PreTrainedModel:
    """Return the case's model in evaluation mode, with the same weights in every process."""
    config = tiny_config(case)
    config._experts_implementation = "eager"  # the grouped implementation has no float64
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = _from_config(auto, config, attention).to(dtype)
    randomise(model)
    if getattr(model, "generation_config", None) is not None:  # a model that generates
        model.generation_config.eos_token_id = None
        model.generation_config.pad_token_id = 0
    return model.eval()


def _from_config(auto: Any, config: PreTrainedConfig, attention: str) -> PreTrainedModel:
    """Return the model. Set the attention's name afterwards if the class has a fixed table of attentions."""
    try:
        return auto.from_config(config, attn_implementation=attention)
    except KeyError as error:
        if error.args != (attention,):
            raise
    torch.manual_seed(1)  # for the weights of the same model once more
    model = auto.from_config(config, attn_implementation="eager")
    model.config._attn_implementation = attention
    return model


KEEP_SCALE = ("A_log", "dt_", "norm", "Norm", "lambda", "scale", "multiplier", "gain", "decay")
"""Parts of names of weights whose initial values matter, so that only small noise is added."""


def randomise(model: PreTrainedModel) -> None:
    """Set each weight to random values seeded by its name, so large that logits depend on earlier tokens."""
    biases = [(name, x) for name, x in model.named_buffers() if name.endswith(("bias", "scalar")) and x.ndim < 2]
    with torch.no_grad():
        for name, weights in [*model.named_parameters(), *biases]:
            weights.copy_(_random_value(name, weights))


def _random_value(name: str, weights: Tensor) -> Tensor:
    """Return noise, added to the initial values where these matter."""
    noise = torch.randn(weights.shape, generator=torch.Generator().manual_seed(zlib.crc32(name.encode())))
    noise = noise.to(weights.dtype)
    if "sink" in name:
        return noise
    near = weights.ndim < 2 or name.endswith(".D") or any(part in name for part in KEEP_SCALE)
    return weights + 0.2 * noise if near and bool(torch.isfinite(weights).all()) else 0.3 * noise
