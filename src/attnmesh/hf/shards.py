"""Tensors of one rank's tokens, which travel through a model of transformers and answer for the whole sequence.

A model takes each argument for that of a whole sequence. On a mesh every rank passes only its own tokens, so the
arguments are tensors of these classes:

    input_ids            `ShardIds`        a forward pass begins where they are embedded
    attention_mask       `ShardMask`       goes to attnmesh as it is; a model that reads it raises
    position_ids         `ShardPositions`  its maximum is that of the whole sequence, by which ropes scale
    labels               `OtherLabels`     a model that makes its loss from these, and not from shift_labels, raises
    shift_labels         `ShardLabels`     their loss raises if no layer has asked attnmesh for its attention
    num_items_in_batch   `ItemCount`       keeps its precision
"""

from collections.abc import Callable, Iterable
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from attnmesh.core.layout import Layout
from attnmesh.core.mask import Full, Mask
from attnmesh.errors import ArgumentError, KernelError
from attnmesh.hf.opaque import FAMILIES
from attnmesh.mesh.axes import Mesh

SUBJECT = "attnmesh in transformers"

QUESTIONS = {
    *("__get__", "size", "dim", "ndimension", "stride", "numel", "nelement", "element_size", "storage_offset"),
    *("__len__", "__repr__", "__format__", "__hash__", "is_floating_point", "is_complex", "is_signed", "is_contiguous"),
    *("is_pinned", "is_shared", "get_device", "data_ptr", "untyped_storage", "requires_grad_", "is_conj", "is_neg"),
    *("is_inference", "is_nonzero_static", "has_names", "_is_view", "__class__"),
}
"""Functions of PyTorch that ask what a tensor is, and read none of its numbers."""

MOVES = {
    *("to", "type", "type_as", "bool", "int", "long", "float", "double", "half", "bfloat16", "cpu", "cuda", "clone"),
    *(
        "contiguous",
        "detach",
        "view",
        "view_as",
        "reshape",
        "reshape_as",
        "expand",
        "expand_as",
        "pin_memory",
        "__get__",
    ),
    *("__deepcopy__", "__copy__", "record_stream"),
}
"""Functions of PyTorch that move a tensor or its dims, and change none of its numbers."""

VIEWS = {*MOVES, "__getitem__", "unsqueeze", "squeeze", "flatten", "repeat", "select", "narrow", "movedim", "transpose"}
"""Functions of PyTorch that give some or all of a tensor's numbers in another shape."""


class Uses:
    """What a model has done with its shards in this forward pass.

    It is no dataclass: FSDP copies those among a layer's arguments, and all layers have to count in one place.
    """

    def __init__(self) -> None:
        self.count: object = None
        """The `num_items_in_batch` that the model was called with, where that is not the batch's."""
        self.begin()

    def begin(self) -> None:
        """Begin a forward pass."""
        self.calls = 0
        """Layers that have asked attnmesh for their attention."""
        self.layers = 1
        """Layers of the model, as its config counts them."""
        self.positions = False


@dataclass(frozen=True)
class Shards:
    """The tokens of a forward pass that this rank passes to its model, and the sequence that they are cut from."""

    mesh: DeviceMesh | None
    layout: Layout
    length: int
    """Tokens of all ranks."""
    documents: Mask = Full()
    start: int = 0
    """Tokens before these, in a cache."""
    real: Tensor | None = None
    """(batch, tokens of all ranks), False for padding; None if there is none."""
    cached: bool = False
    """Whether their keys go to a cache, in generation."""
    even: bool = True
    """Whether all ranks learn from as many tokens."""
    uses: Uses = field(default_factory=Uses, compare=False)

    @property
    def ranks(self) -> int:
        """Ranks that share the sequence."""
        return Mesh.of(self.mesh).shape.ranks

    @property
    def has_prefix(self) -> bool:
        """Whether attention reads the cache, for the tokens before these or for padding."""
        return self.start > 0 or self.real is not None

    def check_layer(self, layer: str, layers: int) -> None:
        """Count a layer that asks attnmesh for its attention, one of so many. Raise if the model takes no positions."""
        self.uses.calls, self.uses.layers = self.uses.calls + 1, layers
        if not self.uses.positions and self.ranks > 1:
            expected = "a model that takes the positions of its tokens from position_ids"
            raise KernelError(SUBJECT, expected, f"a {layer} that counts them from 0 on each shard", FAMILIES)


class ShardTensor(Tensor):
    """A tensor with the `Shards` that it is of. Functions of PyTorch get their results from `answer`."""

    shards: Shards

    @classmethod
    def of(cls, x: Tensor, shards: Shards) -> Self:
        """Return the same numbers as a tensor of this class."""
        made = x.as_subclass(cls)
        made.shards = shards
        return made

    @classmethod
    @torch.compiler.disable  # type: ignore[untyped-decorator] # its graphs take tensors of PyTorch alone
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Answer for this class, with plain tensors as results unless `answer` says otherwise."""
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if func == vars(torch._C.TensorBase)["_base"].__get__:
                return func(*args)  # torch.compile follows it to a tensor of its own class
            own = next(x for x in _flat((*args, *kwargs.values())) if isinstance(x, cls))
            return own.answer(func.__name__, lambda: func(*args, **kwargs), args, kwargs)

    def answer(self, name: str, call: Callable[[], Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the result of a function of PyTorch by its name."""
        return call()

    def like(self, result: Any) -> Any:
        """Return a result as a tensor of this class, if it is a tensor."""
        return type(self).of(result, self.shards) if isinstance(result, Tensor) else result

    def plain(self) -> Tensor:
        """Return the same numbers as a tensor of PyTorch's own class."""
        with torch._C.DisableTorchFunctionSubclass():
            return self.as_subclass(Tensor)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self.like(deepcopy(self.plain(), memo))


class ShardIds(ShardTensor):
    """This rank's tokens, as the model's `input_ids`. A forward pass begins where they are embedded."""

    def answer(self, name: str, call: Callable[[], Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return what is asked for, and forget what another forward pass has done."""
        if name in VIEWS:
            return self.like(call())
        if name == "embedding":
            self.shards.uses.begin()
        return call()


class ShardMask(ShardTensor):
    """Which of this rank's tokens are real, as the model's `attention_mask`; `mask_function` reads its `shards`.

    It tells its shape, and how many tokens are real. Any other look at it raises: a layer that reads it would take the
    shard for the whole sequence.
    """

    def answer(self, name: str, call: Callable[[], Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return what does not depend on the order of tokens, or raise."""
        counted = name in ("sum", "count_nonzero") and len(args) == 1 and not kwargs
        if counted and self.dtype != torch.bool:  # PyTorch's own attention counts them as bools, to leave the mask out
            return call()
        result = call() if name in QUESTIONS | MOVES else None
        if isinstance(result, Tensor) and name in MOVES and result.shape == self.shape:
            return self.like(result)
        if name in QUESTIONS and not isinstance(result, Tensor):
            return result
        expected = "a model whose layers leave their attention_mask to attnmesh"
        given = f"one that reads it by {name.strip('_')}, as recurrent layers and attention of its own do"
        raise KernelError(SUBJECT, expected, given, FAMILIES)


class ShardPositions(ShardTensor):
    """Positions of tokens in the whole sequence, as the model's `position_ids`."""

    last: int
    """The largest position of the whole sequence."""
    ids: Tensor | None = None
    """The tokens of the whole sequence, where positions are their numbers; None where positions were given."""

    @classmethod
    def within(cls, x: Tensor, shards: Shards, last: int, ids: Tensor | None = None) -> Self:
        """Return positions of which the largest, on whatever rank, is `last`."""
        made = cls.of(x, shards)
        made.last, made.ids = last, ids
        return made

    def like(self, result: Any) -> Any:
        """Return a result as positions of the same sequence."""
        return self.within(result, self.shards, self.last, self.ids) if isinstance(result, Tensor) else result

    def answer(self, name: str, call: Callable[[], Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the largest position of the whole sequence for `max`, and what is asked for anything else."""
        if name in QUESTIONS and name not in MOVES:
            return call()
        if name in VIEWS:
            return self.like(call())
        self.shards.uses.positions = True
        if name in ("max", "amax") and len(args) == 1 and not kwargs:
            return torch.tensor(self.last, dtype=self.dtype, device=self.device)
        padding = kwargs.get("padding_idx") if name == "embedding" else None
        if padding is not None and self.ids is not None:
            _check_unpadded(self.ids, padding)
            return torch.nn.functional.embedding(self + padding + 1, args[1])  # as RoBERTa counts them
        return call()


def _check_unpadded(ids: Tensor, padding: int) -> None:
    """Raise where positions do not count some tokens: those of padding, unless they end a sequence."""
    pads = ids == padding
    if bool((pads[:, :-1] & ~pads[:, 1:]).any()):
        expected, given = "padding at the end of a sequence, if any", f"token {padding}, which is padding, inside of it"
        raise KernelError(f"{SUBJECT}: input_ids", expected, given, "replace it by another token")


class OtherLabels(ShardTensor):
    """Labels that tell a model to make a loss, which it has to make from `shift_labels`."""

    def answer(self, name: str, call: Callable[[], Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return these labels moved, or raise."""
        if name in QUESTIONS | VIEWS - {"__getitem__", "select", "narrow"}:
            return self.like(call())
        expected = "a loss made from shift_labels, as transformers' ForCausalLMLoss makes it"
        given = f"one made from labels ({name}), which were shifted before they were cut"
        raise KernelError(f"{SUBJECT}: labels", expected, given, "make the loss from logits and shift_labels yourself")


class ShardLabels(ShardTensor):
    """The token that each of this rank's tokens is to foretell, as the model's `shift_labels`."""

    def answer(self, name: str, call: Callable[[], Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the loss once it is known that attention was computed over all shards."""
        if name in VIEWS:
            return self.like(call())
        if name == "cross_entropy":
            _check_attended(self.shards)
            reduction = kwargs.get("reduction", "mean")
            if reduction == "mean" and not self.shards.even:
                given, fix = "a mean over its own", "divide a loss of reduction='sum' by the batch's num_items_in_batch"
                expected = "a loss in which the tokens of all ranks weigh alike"
                raise ArgumentError(f"{SUBJECT}: num_items_in_batch", expected, given, fix)
            return LossSum.of(call(), self.shards) if reduction == "sum" else call()
        return call()


class LossSum(ShardTensor):
    """The sum of losses over this rank's tokens, about to be divided by the number of tokens that are learned."""

    def answer(self, name: str, call: Callable[[], Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return this rank's part of the mean loss, also where `Trainer` passes a count of the tokens of all ranks."""
        if name in ("__get__", "to", "float", "double"):
            return self.like(call())
        if name.strip("_") not in ("div", "true_divide", "divide", "truediv", "itruediv") or self.shards.ranks == 1:
            return call()
        divisor, count = args[1], self.shards.uses.count
        if divisor is count or (isinstance(divisor, Tensor) and isinstance(count, Tensor) and bool(divisor == count)):
            return call().mul_(self.shards.ranks)
        if isinstance(divisor, Tensor) and not isinstance(divisor, ItemCount):
            expected, fix = "the count of the batch", "pass it to shard_batch(..., num_items_in_batch=)"
            raise ArgumentError(f"{SUBJECT}: num_items_in_batch", expected, "another tensor", fix)
        return call()


class ItemCount(ShardTensor):
    """A rank's share of the number of tokens to learn from, which mixed precision must not round."""

    def answer(self, name: str, call: Callable[[], Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return results as shares too, in the precision that the count has."""
        result = call()
        if name in MOVES and isinstance(result, Tensor):
            result = self.plain().to(result.device)
        return self.like(result)


def _check_attended(shards: Shards) -> None:
    """Raise unless every layer has asked for its attention: another layer mixed tokens of this shard alone, or none."""
    uses = shards.uses
    if uses.calls < uses.layers and shards.ranks > 1:
        expected = "a model whose layers all ask attnmesh for their attention"
        given = f"one of which {uses.calls} of {uses.layers} layers do" if uses.calls else "one of which no layer does"
        raise KernelError(SUBJECT, expected, f"{given}, as recurrent models and attention of its own", FAMILIES)


def _flat(values: Iterable[Any]) -> Iterable[Any]:
    for value in values:
        yield from value if isinstance(value, (list, tuple)) else (value,)
