"""Functions of recurrent layers that are replaced on shards. A layer that lacks one of them is refused.

Records of families state what each class of layers must have.
"""

from collections.abc import Callable, Iterator
from functools import cache
from inspect import Parameter, isclass, signature, unwrap
from types import CodeType, FunctionType
from typing import Any

from torch import nn

from attnmesh.errors import KernelError
from attnmesh.hf import transformers_names as upstream
from attnmesh.hf.family import Recurrence, recurrences
from attnmesh.hf.models import SUBJECT

NOTHING = Recurrence()

UNCHANGED = ("apply_mask_to_padding_states", "causal_conv1d_update")
"""Functions that any recurrent layer may call as they are: none of them mixes the tokens of a shard."""

MASKS = ("attention_mask", "conv_mask")
"""Names of the padding among the arguments of recurrent layers."""

PER_TOKEN_ARGUMENTS = ("hidden_states", "input_states", "position_ids", *MASKS)
"""Arguments of recurrent layers with one value per token, along dim 1."""

CACHES = ("cache_params", "past_key_values")
"""Names of the cache among the arguments of recurrent layers."""

LAYER_ARGUMENTS = ("self", "activations", *PER_TOKEN_ARGUMENTS, *CACHES, "position_embeddings", "use_cache", "kwargs")
"""All arguments of recurrent layers."""


def recurrence_of(layer: type) -> Recurrence | None:
    """Return what a class of layers must have on shards; None if it is not recurrent.

    Subclasses of a class of transformers are of its kind. So are copies of one, as models with code of their own have.
    """
    records = recurrences()
    names = (kind.__name__ for kind in layer.__mro__ if kind.__module__.startswith("transformers"))
    return next((records[name] for name in names if name in records), None)


def check_layer(layer: nn.Module) -> None:
    """Raise unless the layer has all that is replaced on shards, and nothing that is unknown."""
    for expected, given, fix in _misfits(layer, recurrence_of(type(layer)) or NOTHING):
        raise KernelError(f"{SUBJECT} {type(layer).__name__}", expected, given, fix)


def _misfits(layer: nn.Module, kind: Recurrence) -> Iterator[tuple[str, str, str]]:
    """Yield what was expected of a layer, what it has, and a fix."""
    installed, fix = upstream.TRANSFORMERS.installed, upstream.TRANSFORMERS.fix
    if "forward" in vars(layer):
        given = "another one on the layer, as kernels and offloading put there"
        yield "the forward of its class", given, "load the model without use_kernels and device_map"
    forward = unwrap(type(layer).forward)
    if not isinstance(forward, FunctionType):
        yield "a forward in Python", f"{installed} with {type(forward).__name__}", fix
        return
    names = _names(forward.__code__)
    called = _functions(forward)
    for name in (name for name in kind.functions if name not in called):
        yield f"a forward that calls {name}", f"{installed}, in which it does not", fix
    for name in (name for name in kind.reads if name not in names):
        yield f"a forward that reads {name}", f"{installed}, in which it does not", fix
    for name in (name for name, replacement in kind.functions.items() if replacement is not None):
        expected = kind.functions[name].parameters
        parameters = _parameters(called[name])
        if parameters != expected:
            yield f"{name}({', '.join(expected)})", f"{installed} with {name}({', '.join(parameters)})", fix
    for name in sorted(called.keys() - {*kind.functions, *kind.unchanged, *UNCHANGED}):
        yield "a forward of known functions", f"{installed}, in which it calls {name}", fix
    for name in sorted(signature(forward).parameters.keys() - {*LAYER_ARGUMENTS}):
        yield "a forward of known arguments", f"{installed}, in which it takes {name}", fix
    if kind.forward is not None:
        for name in sorted({name for name, _ in layer.named_children()} - {*kind.reads}):
            yield "a layer of known parts", f"{installed}, in which it has {name}", fix
    if kind.convolution is not None and not _is_causal(getattr(layer, kind.convolution, None)):
        given = repr(getattr(layer, kind.convolution, None))
        yield f"a causal nn.Conv1d as {kind.convolution}", given, "leave adapters and quantization off it"


def _names(code: CodeType) -> set[str]:
    """Return the names that a function reads, also in the functions inside of it."""
    inner = (_names(constant) for constant in code.co_consts if isinstance(constant, CodeType))
    return {*code.co_names}.union(*inner)


def _functions(forward: FunctionType) -> dict[str, Callable[..., Any]]:
    """Return the functions that a `forward` calls, by their names in its module.

    The package `kernels` puts modules in their place, which call them and have other names.
    """
    values = {name: forward.__globals__.get(name) for name in _names(forward.__code__)}
    return {name: value for name, value in values.items() if callable(value) and not isclass(value)}


def _parameters(function: Callable[..., Any]) -> tuple[str, ...]:
    """Return the names of a function's parameters before its `**kwargs`."""
    forward = type(function).forward if isinstance(function, nn.Module) else function
    parameters = signature(forward).parameters.values()
    return tuple(p.name for p in parameters if p.kind is not Parameter.VAR_KEYWORD and p.name != "self")


def _is_causal(convolution: Any) -> bool:
    """Return whether this is a plain convolution of each channel by itself, over a token and the tokens before it."""
    if type(convolution) is not nn.Conv1d:
        return False
    (size,) = convolution.kernel_size
    steps = convolution.stride + convolution.dilation
    return steps == (1, 1) and convolution.padding == (size - 1,) and convolution.groups == convolution.in_channels


def forward_on_shards(layer: type) -> Callable[..., Any]:
    """Return the `forward` of a class of layers, with its convolutions and rules replaced."""
    return _replace_functions(unwrap(layer.forward), recurrence_of(layer) or NOTHING)  # type: ignore[attr-defined]


@cache
def _replace_functions(forward: FunctionType, kind: Recurrence) -> Callable[..., Any]:
    if kind.forward is not None:
        return kind.forward
    stock = forward.__globals__
    replaced = {name: _no_kernel if one is None else one.of(stock[name]) for name, one in kind.functions.items()}
    names = stock | replaced
    copied = FunctionType(forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__)
    copied.__kwdefaults__ = forward.__kwdefaults__
    return copied


def _no_kernel(*_: Any, **__: Any) -> None:
    """Return None, as a function does whose kernel is missing."""
