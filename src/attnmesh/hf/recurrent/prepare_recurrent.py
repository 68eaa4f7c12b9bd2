"""Recurrent layers of transformers models on shards: their convolutions and states go across ranks.

`prepare_layers` gives each recurrent layer of a model a subclass of its class. The subclass runs the layer's own
`forward`, in which two kinds of functions are replaced: causal convolutions, which take a halo, and rules of the
recurrence, which take the state that earlier ranks leave. On tokens that are no shards it does what the layer's class
does. `restore` gives the layers their classes back. Nothing outside the model is changed.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial as partial_of
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from attnmesh.errors import KernelError
from attnmesh.hf.family import Recurrence, families
from attnmesh.hf.layer_checks import compare_weights
from attnmesh.hf.models import SUBJECT, num_mixing_calls, num_recurrent_layers
from attnmesh.hf.pins import check_family
from attnmesh.hf.recurrent.chain import Chain, HeadChain, document_lengths_of, parts_of, running
from attnmesh.hf.recurrent.convolution import ShardedConv1d
from attnmesh.hf.recurrent.functions import (
    CACHES,
    MASKS,
    NOTHING,
    PER_TOKEN_ARGUMENTS,
    check_layer,
    forward_on_shards,
    recurrence_of,
)
from attnmesh.hf.recurrent.prefill_states import PrefillStates
from attnmesh.hf.shard_tensors import ShardPositions, ShardTensor
from attnmesh.hf.sharded_sequence import ShardedSequence
from attnmesh.hf.shared_weights import restore_shared
from attnmesh.hf.sparse.prepare_indexer import restore_indexer
from attnmesh.hf.transformers_names import TRANSFORMERS, stock_of, subclass


class RecurrentLayer:
    """First base of the subclasses that `prepare_layers` makes: a recurrent layer that can run on shards."""

    sequence_hook: "SequenceHook"
    """The hook of the model, which has the sequence of its present call."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the layer on this rank's part of each chain of the layout."""
        layer: Any = self
        stock = stock_of(layer)
        bound = signature(stock.forward).bind(layer, *args, **kwargs)
        further = bound.arguments.pop("kwargs", {})
        arguments = {**bound.arguments, **further}
        arguments.pop("self")
        sequence = next((x for x in map(_sequence_of, arguments.values()) if x is not None), None)
        if sequence is None and next(iter(arguments.values())).shape[1] == 1:
            sequence = self.sequence_hook.sequence  # transformers passes no mask with one token
        if sequence is None:
            return stock.forward(layer, *args, **kwargs)
        sequence.count_layer(type(layer).__name__, self.sequence_hook.layers, recurrent=True)
        if not sequence.cached:
            compare_weights(layer, sequence, next(iter(arguments.values())).device)
        arguments = {name: x.plain() if isinstance(x, ShardTensor) else x for name, x in arguments.items()}
        run = partial_of(forward_on_shards(stock), layer)
        if sequence.cached:
            return _prefill(run, layer, arguments, sequence)
        arguments[_mask_name(arguments)] = None  # padding is on the right
        train = _train_by_heads if sequence.exchange == "heads" else _train
        return train(run, layer, arguments, sequence)


class SequenceHook:
    """Hook before `forward` of a model and of the models inside of it, to keep the sequence of their call."""

    def __init__(self, models: Sequence[nn.Module], layers: int) -> None:
        self.layers = layers
        """Layers of the model that mix tokens."""
        self.sequence: ShardedSequence | None = None
        """The sequence of the shard that the model was called with; None for a call without shards."""
        self._hooks = [model.register_forward_pre_hook(self._before, with_kwargs=True) for model in models]

    def remove_hooks(self) -> None:
        """Remove the hook from the models."""
        for hook in self._hooks:
            hook.remove()

    def _before(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.sequence = next((x for x in map(_sequence_of, (*args, *kwargs.values())) if x is not None), None)


def _train(run: Callable[..., Any], layer: Any, arguments: dict[str, Any], sequence: ShardedSequence) -> Any:
    """Return the layer's output for this rank's tokens: of a zigzag layout the early part, then the late one."""
    entering = None
    outputs = []
    first = 0
    per_token = _kind(layer).outputs
    for parts in parts_of(sequence.layout, sequence.length, sequence.mesh, sequence.documents):
        with running(Chain(parts, entering)) as chain:
            outputs.append(_run_part(run, arguments, first, chain.tokens, per_token))
        first = first + chain.tokens
        entering = chain.leaving
    if isinstance(outputs[0], Tensor):
        return torch.cat(outputs, 1)
    joined = (torch.cat(parts, 1) for parts in zip(*(out[:per_token] for out in outputs), strict=True))
    return *joined, *outputs[0][per_token:]


def _train_by_heads(run: Callable[..., Any], layer: Any, arguments: dict[str, Any], sequence: ShardedSequence) -> Any:
    """Return the layer's output for this rank's tokens. Its rule runs over the whole sequence for this rank's heads."""
    parts = parts_of(sequence.layout, sequence.length, sequence.mesh, sequence.documents)
    with running(HeadChain(type(layer).__name__, parts, document_lengths_of(sequence.documents, 0, sequence.length))):
        return run(**arguments)


def _prefill(run: Callable[..., Any], layer: Any, arguments: dict[str, Any], sequence: ShardedSequence) -> Any:
    """Return the layer's output for this rank's tokens. Every rank's cache gets the state after the last part."""
    (parts,) = parts_of(sequence.layout, sequence.length, sequence.mesh)
    name = next(name for name in CACHES if name in arguments)
    states = (_kind(layer).states or PrefillStates)(arguments[name], layer)
    mask = None if sequence.token_mask is None else sequence.token_mask[:, sequence.positions() - sequence.start]
    arguments |= {name: states, _mask_name(arguments): mask}
    with running(Chain(parts, states.entering(), kept_tokens=1)) as chain:
        out = _run_part(run, arguments, 0, chain.tokens, _kind(layer).outputs)
    states.store(chain)
    return out


def _run_part(run: Callable[..., Any], arguments: dict[str, Any], first: int, tokens: int, per_token: int) -> Any:
    """Return the layer's output for some of this rank's tokens. A rank without tokens computes one, to exchange."""
    part = dict(arguments)
    for name in (name for name in PER_TOKEN_ARGUMENTS if isinstance(arguments.get(name), Tensor)):
        x = arguments[name]
        part[name] = x[:, first : first + tokens] if tokens else x.new_zeros(len(x), 1, *x.shape[2:])
    out = run(**part)
    if tokens:
        return out
    return out[:, :0] if isinstance(out, Tensor) else (*(x[:, :0] for x in out[:per_token]), *out[per_token:])


def _mask_name(arguments: dict[str, Any]) -> str:
    """Return the name of the padding among a layer's arguments."""
    return next((name for name in MASKS if name in arguments), MASKS[0])


def _kind(layer: Any) -> Recurrence:
    return recurrence_of(type(layer)) or NOTHING


def _sequence_of(value: object) -> ShardedSequence | None:
    """Return the sequence of a mask or of token ids. Positions tell nothing: they have one in every prefill."""
    if isinstance(value, ShardPositions):
        return None
    sequence = getattr(value, "sequence", None)
    return sequence if isinstance(sequence, ShardedSequence) else None


def prepare_layers(model: nn.Module) -> list[SequenceHook]:
    """Make the recurrent layers of a model able to run on shards, unless they are. It may contain several models.

    Returns:
        A hook for each model that was not prepared before.

    Raises:
        KernelError: A model cannot run on shards. None of its layers is changed.
    """
    outer: list[Any] = []
    for module in model.modules():
        if isinstance(module, PreTrainedModel) and all(module not in set(other.modules()) for other in outer):
            outer.append(module)
    return [hook for outermost in outer or [model] if (hook := _prepare_model(outermost)) is not None]


def _prepare_model(model: Any) -> SequenceHook | None:
    if isinstance(model, PreTrainedModel):
        check_family(model.config)
    layers = [layer for layer in model.modules() if recurrence_of(type(layer))]
    new = [layer for layer in layers if not _is_prepared(layer)]
    for layer in new:
        check_layer(layer)
    known_layers = sum(_kind(layer).base is None for layer in layers)
    expected = num_recurrent_layers(model.config) if isinstance(model, PreTrainedModel) else 0
    if known_layers < expected:
        given = f"{known_layers} of {expected} of them in the {type(model).__name__} of {TRANSFORMERS.installed}"
        raise KernelError(SUBJECT, "recurrent layers of known classes", given, TRANSFORMERS.fix)
    if not new:
        return None
    models = [x for x in model.modules() if x is model or isinstance(x, PreTrainedModel)]
    hook = SequenceHook(models, num_mixing_calls(model.config) if isinstance(model, PreTrainedModel) else 1)
    for family in families().values():
        if family.prepare is not None:
            family.prepare(model)
    for layer in new:
        stock: type = type(layer)
        kind = _kind(layer)
        layer.__class__, layer.sequence_hook = subclass(stock, kind.base or RecurrentLayer), hook
        if kind.convolution is not None:
            getattr(layer, kind.convolution).__class__ = ShardedConv1d
    return hook


def _is_prepared(layer: Any) -> bool:
    """Return whether a layer has a subclass that `prepare_layers` gave it."""
    return isinstance(vars(layer).get("sequence_hook"), SequenceHook)


def restore(model: nn.Module) -> None:
    """Give the recurrent layers, the indexers and the shared layers of a model their own classes back.

    A forward pass on shards gives them subclasses, which behave as before on tokens that are no shards, or hooks; so
    does `share_weights`. Call this before the whole model is copied or pickled.

    Args:
        model: A model that was called with a batch of `shard_batch`, by `generate`, or by `share_weights`.

    >>> from transformers import AutoModelForCausalLM, MambaConfig
    >>> model = AutoModelForCausalLM.from_config(MambaConfig(vocab_size=9, hidden_size=8, num_hidden_layers=1))
    >>> restore(model)
    """
    for module in model.modules():
        restore_indexer(module)
    restore_shared(model)
    _restore_layers(model)


def _restore_layers(model: nn.Module) -> None:
    modules: list[Any] = [*model.modules()]
    undo = [family.restore for family in families().values() if family.restore is not None]
    for module in modules:
        for restore_module in undo:
            restore_module(module)
        if type(module) is ShardedConv1d:
            module.__class__ = nn.Conv1d  # type: ignore[assignment]
        elif _is_prepared(module):
            module.__class__ = stock_of(module)
            module.sequence_hook.remove_hooks()
            del module.sequence_hook


@contextmanager
def prepared(model: nn.Module) -> Iterator[None]:
    """Run the model's recurrent layers on shards in this context. Then they get their own classes back."""
    was_prepared = any(isinstance(module, RecurrentLayer) for module in model.modules())
    prepare_layers(model)
    try:
        yield
    finally:
        if not was_prepared:
            _restore_layers(model)
