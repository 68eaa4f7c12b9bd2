"""Recurrent layers of transformers models on shards: their convolutions and states go across ranks.

`prepare` gives each recurrent layer of a model a subclass of its class. The subclass runs the layer's own `forward`, in
which two kinds of functions are replaced: causal convolutions, which take a halo, and rules of the recurrence, which
take the state that earlier ranks leave. On tokens that are no shards it does what the layer's class does. `restore`
gives the layers their classes back. Nothing outside the model is changed.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from inspect import signature, unwrap
from types import FunctionType
from typing import Any
from weakref import WeakSet, finalize

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from transformers import PreTrainedModel

from attnmesh.core.checks import require
from attnmesh.core.mask import Full
from attnmesh.errors import MaskError
from attnmesh.hf.chain import Chain, HeadChain, current_chain, parts_of, running
from attnmesh.hf.checks import check_same_weights
from attnmesh.hf.head_rules import HEAD_RULES, run_by_heads
from attnmesh.hf.models import RECURRENT_MODELS, SUBJECT, mixing_layers
from attnmesh.hf.recurrent_layers import ShardedConv1d, ShardedRglru, lightning, run_link
from attnmesh.hf.recurrent_prefill import PrefillStates
from attnmesh.hf.recurrent_rules import RULES
from attnmesh.hf.shards import ForwardPass, ShardIds, ShardPositions, Shards, ShardTensor

PER_TOKEN = ("hidden_states", "input_states", "position_ids", "attention_mask")
"""Arguments of recurrent layers with one value per token, along dim 1."""

CODE = [
    f"transformers.models.{name}.modeling_{name}"
    for name in sorted({x.removesuffix("_text") for x in RECURRENT_MODELS})
]
"""Modules of transformers with the code of models with recurrent layers."""

CACHES = ("cache_params", "past_key_values")
"""Names of the cache among the arguments of recurrent layers."""

WHOLE = {"MiniMaxLightningAttention": lightning, "RecurrentGemmaRecurrentBlock": None}
"""Layers whose recurrence is no function, with the `forward` that replaces theirs, if any."""

FUSED = ("mamba2_split_conv1d_scan_combined", "mamba_inner_fn", "mamba_split_conv1d_scan_combined")
"""Functions of a convolution and a rule together. They return None where there is no such kernel."""


class ShardedLayer:
    """First base of the subclasses that `prepare` makes: a recurrent layer that can run on shards."""

    layers_of_model: int
    """Layers of the model that mix tokens."""

    call: "ModelCall"
    """The present call of the model."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the layer on this rank's part of each chain of the layout."""
        layer: Any = self
        stock: Any = type(layer).__mro__[2]
        bound = signature(stock.forward).bind(layer, *args, **kwargs)
        named = {**bound.arguments, **bound.arguments.pop("kwargs", {})}
        named.pop("self")
        shards = next((x for x in map(_shards_of, named.values()) if x is not None), None)
        if shards is None and next(iter(named.values())).shape[1] == 1:
            shards = self.call.shards  # transformers passes no mask with one token
        if shards is None:
            return stock.forward(layer, *args, **kwargs)
        _check_shards(shards)
        shards.count_layer(type(layer).__name__, self.layers_of_model, recurrent=True)
        if not shards.cached:
            check_same_weights(layer, shards, next(iter(named.values())).device)
        named = {name: x.plain() if isinstance(x, ShardTensor) else x for name, x in named.items()}
        run = partial(_own_forward(stock), layer)
        if shards.cached:
            return _prefill(run, layer, named, shards)
        named["attention_mask"] = None  # padding is on the right
        return _train_by_heads(run, layer, named, shards) if shards.exchange == "heads" else _train(run, named, shards)


class ModelCall:
    """The present call of a model, as hooks before its `forward` and that of the models inside of it find it."""

    def __init__(self, models: Sequence[nn.Module]) -> None:
        self.shards: Shards | None = None
        """The shards that the model was called with."""
        self._hooks = [model.register_forward_pre_hook(self._before, with_kwargs=True) for model in models]

    def remove_hooks(self) -> None:
        """Forget the model."""
        for hook in self._hooks:
            hook.remove()

    def _before(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.shards = next((x for x in map(_shards_of, (*args, *kwargs.values())) if x is not None), None)


def _train(run: Callable[..., Any], named: dict[str, Any], shards: Shards) -> Any:
    """Return the layer's output for this rank's tokens: of a zigzag layout the early part, then the late one."""
    entering, outputs, first = None, [], 0
    for axis, owners, lengths in parts_of(shards.layout, shards.length, shards.mesh):
        with running(Chain(axis, owners, lengths, entering)) as chain:
            outputs.append(_run_part(run, named, first, chain.tokens))
        first, entering = first + chain.tokens, chain.leaving
    if isinstance(outputs[0], Tensor):
        return torch.cat(outputs, 1)
    return torch.cat([out[0] for out in outputs], 1), *outputs[0][1:]


def _train_by_heads(run: Callable[..., Any], layer: Any, named: dict[str, Any], shards: Shards) -> Any:
    """Return the layer's output for this rank's tokens. Its rule runs over the whole sequence for this rank's heads."""
    with running(HeadChain(type(layer).__name__, parts_of(shards.layout, shards.length, shards.mesh))):
        return run(**named)


def _prefill(run: Callable[..., Any], layer: Any, named: dict[str, Any], shards: Shards) -> Any:
    """Return the layer's output for this rank's tokens. Every rank's cache gets the state after the last one's."""
    ((axis, owners, lengths),) = parts_of(shards.layout, shards.length, shards.mesh)
    name = next(name for name in CACHES if name in named)
    states = PrefillStates(named[name], layer)
    mask = None if shards.token_mask is None else shards.token_mask[:, shards.positions() - shards.start]
    named |= {name: states, "attention_mask": mask}
    with running(Chain(axis, owners, lengths, states.entering(), kept=1)) as chain:
        out = _run_part(run, named, 0, chain.tokens)
    states.store(chain)
    return out


def _run_part(run: Callable[..., Any], named: dict[str, Any], first: int, tokens: int) -> Any:
    """Return the layer's output for some of this rank's tokens. Without tokens, all ranks still exchange."""
    part = dict(named)
    for name in (name for name in PER_TOKEN if isinstance(named.get(name), Tensor)):
        x = named[name]
        part[name] = x[:, first : first + tokens] if tokens else x.new_zeros(len(x), 1, *x.shape[2:])
    out = run(**part)
    if tokens:
        return out
    return out[:, :0] if isinstance(out, Tensor) else (out[0][:, :0], *out[1:])


def _shards_of(value: object) -> Shards | None:
    """Return the shards of a mask or of token ids. Positions have them in any prefill."""
    if isinstance(value, ShardPositions):
        return None
    shards = getattr(value, "shards", None)
    return shards if isinstance(shards, Shards) else None


def _check_shards(shards: Shards) -> None:
    """Raise unless a state can pass through the whole sequence."""
    expected, fix = "one sequence per row, for a model with recurrent layers", "leave out position_ids, and pad"
    fits = shards.documents == Full()
    require(fits, MaskError, f"{SUBJECT} position_ids", expected, "packed sequences", fix)


def prepare(model: nn.Module) -> None:
    """Make the recurrent layers of a model able to run on shards, unless they are. It may contain several models."""
    outer: list[Any] = []
    for module in model.modules():
        if isinstance(module, PreTrainedModel) and all(module not in set(other.modules()) for other in outer):
            outer.append(module)
    for one in outer or [model]:
        modules: list[Any] = [*one.modules()]
        layers = [x for x in modules if _base(x.__class__) and not isinstance(x, (ShardedLayer, ShardedRglru))]
        if layers:
            count = mixing_layers(one.config) if isinstance(one, PreTrainedModel) else 1
            _prepare_layers(
                layers, ModelCall([x for x in modules if x is one or isinstance(x, PreTrainedModel)]), count
            )


def _prepare_layers(layers: list[Any], call: "ModelCall", count: int) -> None:
    for layer in layers:
        kind: Any = type(layer)
        layer.__class__ = _subclass(kind, _base(kind))
        layer.layers_of_model, layer.call = count, call
        children: list[Any] = [child for child in layer.children() if type(child) is nn.Conv1d]
        for child in children:
            child.__class__ = ShardedConv1d


def restore(model: nn.Module) -> None:
    """Give the recurrent layers of a model their own classes back.

    A forward pass on shards gives them subclasses, which behave as before on tokens that are no shards. Call this
    before the whole model is pickled.

    Args:
        model: A model that was called with a batch of `shard_batch`.

    >>> from transformers import AutoModelForCausalLM, MambaConfig
    >>> model = AutoModelForCausalLM.from_config(MambaConfig(vocab_size=9, hidden_size=8, num_hidden_layers=1))
    >>> restore(model)
    """
    modules: list[Any] = [*model.modules()]
    for module in modules:
        PREPARATION.forget(module)
        if type(module) is ShardedConv1d:
            module.__class__ = nn.Conv1d  # type: ignore[assignment]
        elif issubclass(type(module), (ShardedLayer, ShardedRglru)):
            module.__class__ = type(module).__mro__[2]
            module.call.remove_hooks()
            del module.call, module.layers_of_model


@contextmanager
def prepared(model: nn.Module) -> Iterator[None]:
    """Run the model's recurrent layers on shards. They get the classes back that they had."""
    was_prepared = any(isinstance(module, ShardedLayer) for module in model.modules())
    prepare(model)
    try:
        yield
    finally:
        if not was_prepared:
            restore(model)


class Preparation:
    """Prepares the models that are called with batches of `shard_batch`.

    While there is such a batch, a hook on all modules prepares each model when it is first called. Models without
    recurrent layers need no hook: it is set only if transformers has loaded the code of one with such layers.
    """

    def __init__(self) -> None:
        self._hook: Any = None
        self._batches = 0
        self._seen = WeakSet[nn.Module]()
        self._new: list[ModelCall] = []  # of models whose own hooks run from their next call on

    def begin(self, batch: ForwardPass) -> None:
        """Prepare the models that are called while the batch is in use."""
        self._batches += 1
        finalize(batch, self._end)
        batch.on_begin = self._listen
        self._listen()

    def _listen(self) -> None:
        if self._hook is None and any(name in sys.modules for name in CODE):
            self._hook = register_module_forward_pre_hook(self._before)

    def _end(self) -> None:
        self._batches -= 1
        if not self._batches and self._hook is not None:
            self._hook.remove()
            self._hook, self._seen, self._new = None, WeakSet(), []

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _before(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if module not in self._seen:
            prepare(module)
            self._seen.update(module.modules())
            self._new = [x.call for x in module.modules() if isinstance(x, ShardedLayer)]
        if self._new and isinstance(module, nn.Embedding) and args and isinstance(args[0], ShardIds):
            for call in self._new:
                call.shards = call.shards or args[0].shards
            self._new = []

    def forget(self, module: nn.Module) -> None:
        """Prepare the module again when it is called."""
        self._seen.discard(module)


PREPARATION = Preparation()


@cache
def _base(layer: Any) -> type | None:
    """Return the first base of the subclass that runs on shards; None for layers that are not recurrent."""
    if layer.__name__ == "RecurrentGemmaRglru":
        return ShardedRglru
    return ShardedLayer if layer.__name__ in WHOLE or _replaced(layer) else None


@cache
def _subclass(layer: type, base: type) -> type:
    return type(layer.__name__, (base, layer), {"__module__": layer.__module__})


@cache
def _own_forward(layer: type) -> Callable[..., Any]:
    """Return the layer's own `forward`, with its convolutions and rules replaced."""
    if WHOLE.get(layer.__name__) is not None:
        return WHOLE[layer.__name__]  # type: ignore[return-value]
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
        valid = lambda x: stock(x, weight, *args, **kwargs)[:, :, size:]  # noqa: E731
        return current_chain.get().convolve(hidden_states, size, valid)

    return convolution


def _rule(name: str, stock: Any) -> Callable[..., Any]:
    """Return the rule with the state that earlier parts leave, or by heads."""
    rule = RULES[name]

    def run(*args: Any, **kwargs: Any) -> Any:
        chain = current_chain.get()
        if isinstance(chain, HeadChain) and name in HEAD_RULES:
            return run_by_heads(name, stock, chain, *args, **kwargs)
        out, leaving = run_link(rule(stock, *args, **kwargs), rule.from_stock)
        return rule.returned(out, leaving, bool(kwargs.get(rule.returns_state)))

    return run
