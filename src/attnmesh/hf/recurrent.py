"""Recurrent layers of transformers models on shards: their convolutions and states go across ranks.

`prepare` gives each recurrent layer of a model a subclass of its class. The subclass runs the layer's own `forward`, in
which two kinds of functions are replaced: causal convolutions, which take a halo, and rules of the recurrence, which
take the state that earlier ranks leave. On tokens that are no shards it does what the layer's class does. `restore`
gives the layers their classes back. Nothing outside the model is changed.
"""

from collections.abc import Callable
from functools import cache
from inspect import signature, unwrap
from types import FunctionType
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from transformers import PreTrainedModel

from attnmesh.core.checks import require
from attnmesh.core.mask import Full
from attnmesh.errors import MaskError
from attnmesh.hf.chain import Chain, current_chain, parts_of, running
from attnmesh.hf.checks import check_same_weights
from attnmesh.hf.models import SUBJECT, mixing_layers
from attnmesh.hf.recurrent_rules import RULES
from attnmesh.hf.shards import ShardIds, Shards

PER_TOKEN = ("hidden_states", "input_states", "position_ids", "attention_mask")
"""Arguments of recurrent layers with one value per token, along dim 1."""

FUSED = ("mamba2_split_conv1d_scan_combined", "mamba_inner_fn", "mamba_split_conv1d_scan_combined")
"""Functions of a convolution and a rule together. They return None where there is no such kernel."""


class ShardedLayer:
    """First base of the subclasses that `prepare` makes: a recurrent layer that can run on shards."""

    layers_of_model: int
    """Layers of the model that mix tokens."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the layer on this rank's part of each chain of the layout."""
        layer: Any = self
        stock = type(layer).__mro__[2]
        bound = signature(stock.forward).bind(layer, *args, **kwargs)
        named = {**bound.arguments, **bound.arguments.pop("kwargs", {})}
        named.pop("self")
        shards = next((x for x in map(_shards_of, named.values()) if x is not None), None)
        if shards is None:
            return stock.forward(layer, *args, **kwargs)
        _check_shards(shards)
        shards.count_layer(type(layer).__name__, self.layers_of_model, recurrent=True)
        check_same_weights(layer, shards, bound.arguments[next(iter(named))].device)
        run = lambda arguments: _on_shards(stock)(layer, **arguments)  # noqa: E731
        entering, outputs, first = None, [], 0
        for axis, owners, lengths in parts_of(shards.layout, shards.length, shards.mesh):
            with running(Chain(axis, owners, lengths, entering)) as chain:
                outputs.append(_run_part(run, named, first, chain.tokens))
            first, entering = first + chain.tokens, chain.leaving
        if isinstance(outputs[0], Tensor):
            return torch.cat(outputs, 1)
        return torch.cat([out[0] for out in outputs], 1), *outputs[0][1:]


def _run_part(run: Callable[[dict[str, Any]], Any], named: dict[str, Any], first: int, tokens: int) -> Any:
    """Return the layer's output for some of this rank's tokens. Without tokens, all ranks still exchange."""
    part = dict(named)
    for name in (name for name in PER_TOKEN if isinstance(named.get(name), Tensor)):
        x = named[name].plain() if hasattr(named[name], "shards") else named[name]
        part[name] = x[:, first : first + tokens] if tokens else torch.zeros_like(x[:, :1])
    part["attention_mask"] = None  # in training, padding is on the right
    out = run(part)
    if tokens:
        return out
    return out[:, :0] if isinstance(out, Tensor) else (out[0][:, :0], *out[1:])


def _shards_of(value: object) -> Shards | None:
    shards = getattr(value, "shards", None)
    return shards if isinstance(shards, Shards) else None


def _check_shards(shards: Shards) -> None:
    """Raise unless a state can pass through the whole sequence."""
    expected, fix = "one sequence per row, for a model with recurrent layers", "leave out position_ids, and pad"
    fits = shards.documents == Full()
    require(fits, MaskError, f"{SUBJECT} position_ids", expected, "packed sequences", fix)


def prepare(model: nn.Module) -> None:
    """Make the recurrent layers of a model able to run on shards."""
    configs = (module.config for module in model.modules() if isinstance(module, PreTrainedModel))
    config = next(configs, None)
    for module in model.modules():
        if not isinstance(module, ShardedLayer) and is_recurrent_layer(type(module)):
            module.__class__ = _subclass(type(module))
            module.layers_of_model = 1 if config is None else mixing_layers(config)


def restore(model: nn.Module) -> None:
    """Give the recurrent layers of a model their own classes back."""
    for module in model.modules():
        if isinstance(module, ShardedLayer):
            module.__class__ = type(module).__mro__[2]  # type: ignore[assignment]


def prepare_next_model() -> None:
    """Prepare the modules that are called until a forward pass on shards begins, where tokens are embedded."""
    if _hook is None:
        _listen()


_hook: Any = None


def _listen() -> None:
    global _hook
    seen = WeakSet[nn.Module]()

    def before(module: nn.Module, args: tuple[Any, ...]) -> None:
        global _hook
        if any(isinstance(x, ShardIds) for x in args) and isinstance(module, nn.Embedding):
            _hook.remove()
            _hook = None
        elif module not in seen:
            seen.update(module.modules())
            prepare(module)

    _hook = register_module_forward_pre_hook(before)


@cache
def is_recurrent_layer(layer: type) -> bool:
    """Return whether the class is a recurrent layer that can run on shards."""
    return bool(_replaced(layer))


@cache
def _subclass(layer: type) -> type:
    return type(layer.__name__, (ShardedLayer, layer), {"__module__": layer.__module__})


@cache
def _on_shards(layer: type) -> Callable[..., Any]:
    """Return the layer's own `forward`, with its convolutions and rules replaced."""
    forward = unwrap(layer.forward)  # type: ignore[attr-defined]
    names = {**forward.__globals__, **_replaced(layer)}
    copied = FunctionType(forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__)
    copied.__kwdefaults__ = forward.__kwdefaults__
    return copied


def _replaced(layer: type) -> dict[str, Callable[..., Any]]:
    """Return the functions that replace those of the layer's `forward`, by name."""
    forward = unwrap(getattr(layer, "forward", None) or len)
    if not isinstance(forward, FunctionType):
        return {}
    used = {name: forward.__globals__.get(name) for name in forward.__code__.co_names}
    found: dict[str, Callable[..., Any]] = {}
    for name, function in used.items():
        known = getattr(unwrap(function), "__name__", "") if callable(function) else ""
        if known == "causal_conv1d_fn":
            found[name] = _convolution(function)
        elif known in RULES:
            found[name] = _rule(known, function)
        elif known in FUSED:
            found[name] = lambda *_, **__: None
    return found


def _convolution(stock: Any) -> Callable[..., Any]:
    """Return the convolution with a halo."""

    def convolution(hidden_states: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Any:
        size = weight.shape[-1] - 1
        before = current_chain.get().halo(hidden_states, size, dim=2)
        return stock(torch.cat([before, hidden_states], 2), weight, *args, **kwargs)[:, :, size:]

    return convolution


def _rule(name: str, stock: Any) -> Callable[..., Any]:
    """Return the rule with the state that earlier parts leave."""
    return lambda *args, **kwargs: RULES[name](current_chain.get().enter, stock, *args, **kwargs)
