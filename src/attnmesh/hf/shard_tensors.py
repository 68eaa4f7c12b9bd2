"""Tensors of one rank's tokens, which a transformers model takes for tensors of the whole sequence.

A model reads its arguments as if they were the whole sequence, but each rank passes only its tokens. So the arguments
are subclasses of `Tensor`, which return what the whole sequence would return, or raise:

    input_ids            `ShardIds`        starts a forward pass when the tokens are embedded
                         `WholeIds`        tokens of a whole sequence with images
    attention_mask       `ShardMask`       passes its `ShardedSequence` to `mask_function`; a model that reads it raises
                         `WholeMask`       padding of a whole sequence with images, which a model may read
    position_ids         `ShardPositions`  returns the maximum of the whole sequence, which scales ropes
    labels               `GuardedLabels`   raises if the model computes its loss from labels, not from shift_labels
    shift_labels         `ShardLabels`     raises in the loss if a layer has not called attnmesh for attention
    num_items_in_batch   `ItemCount`       keeps its precision
"""

from collections.abc import Callable, Iterable
from copy import deepcopy
from typing import Any, Self

import torch
from torch import Tensor
from transformers import PreTrainedModel

from attnmesh.errors import ArgumentError, KernelError
from attnmesh.hf.called_modules import called_modules
from attnmesh.hf.family import USE_SUPPORTED
from attnmesh.hf.models import SUBJECT, check_adapters
from attnmesh.hf.sharded_sequence import ShardedSequence

METADATA_FUNCTIONS = {
    *("__get__", "size", "dim", "ndimension", "stride", "numel", "nelement", "element_size", "storage_offset"),
    *("__len__", "__repr__", "__format__", "__hash__", "is_floating_point", "is_complex", "is_signed", "is_contiguous"),
    *("is_pinned", "is_shared", "get_device", "data_ptr", "untyped_storage", "requires_grad_", "is_conj", "is_neg"),
    *("is_inference", "has_names", "_is_view", "__class__"),
}
"""Functions of PyTorch that read a tensor's metadata and none of its values."""

COPY_FUNCTIONS = {
    *("to", "type", "type_as", "bool", "int", "long", "float", "double", "half", "bfloat16", "cpu", "cuda", "clone"),
    *("contiguous", "detach", "view", "view_as", "reshape", "reshape_as", "expand", "expand_as", "pin_memory"),
    *("__get__", "__deepcopy__", "__copy__", "record_stream"),
}
"""Functions of PyTorch that return all values of a tensor in their order: casts, copies and reshapes."""

VIEW_FUNCTIONS = {
    *COPY_FUNCTIONS,
    *("__getitem__", "unsqueeze", "squeeze", "flatten", "repeat", "select", "narrow", "movedim", "transpose"),
}
"""Functions of PyTorch that return some or all values of a tensor in another shape."""


class DispatchedTensor(Tensor):
    """A tensor whose class decides what functions of PyTorch return: each is passed to `dispatch`."""

    @classmethod
    def of(cls, x: Tensor, **attributes: Any) -> Self:
        """Return the same values as a tensor of this class, with these attributes."""
        wrapped = x.as_subclass(cls)
        vars(wrapped).update(attributes)
        return wrapped

    def wrap(self, result: Any) -> Any:
        """Return a result as a tensor of this class with the same attributes, if it is a tensor."""
        return self.of(result, **vars(self)) if isinstance(result, Tensor) else result

    @classmethod
    @torch.compiler.disable  # type: ignore[untyped-decorator] # compiled graphs take plain tensors only
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Return `dispatch` of the first argument that has this class."""
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if func == vars(torch._C.TensorBase)["_base"].__get__:
                return func(*args)  # torch.compile reads `_base` and needs the tensor with its class
            first = next(x for x in flatten((*args, *kwargs.values())) if isinstance(x, cls))
            return first.dispatch(func.__name__, lambda *other: func(*(other or args), **kwargs), args, kwargs)

    def dispatch(self, name: str, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the result of the function of PyTorch with this name.

        `call` computes it on the plain values, or on other positional arguments.
        """
        return call()

    def plain(self) -> Tensor:
        """Return the same values as a plain tensor."""
        with torch._C.DisableTorchFunctionSubclass():
            return self.as_subclass(Tensor)


class ShardTensor(DispatchedTensor):
    """A tensor of this rank's tokens, with its `ShardedSequence`."""

    sequence: ShardedSequence

    def dispatch(self, name: str, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return views as tensors of this class, and all other results as plain ones."""
        return self.wrap(call()) if name in VIEW_FUNCTIONS else call()

    def check_not_shifted(self, name: str, args: tuple[Any, ...]) -> None:
        """Raise if tokens are shifted by one, as `x[:, 1:]`: the token after a shard's last one is on another rank."""
        index = args[1] if name == "__getitem__" and self.sequence.ranks > 1 else None
        last = index[-1] if isinstance(index, tuple) and len(index) > 1 else None
        shifted = isinstance(last, slice) and last in (slice(1, None), slice(None, -1))
        if shifted:
            expected = "tokens that are shifted before they are cut"
            fix = "pass labels to hf.shard_batch, and compare logits and shift_labels of equal places"
            raise ArgumentError(f"{SUBJECT} labels", expected, "a shard without its first or last token", fix)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self.wrap(deepcopy(self.plain(), memo))


class ShardIds(ShardTensor):
    """This rank's tokens, as `input_ids`. Embedding them begins a forward pass."""

    def dispatch(self, name: str, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the result. `embedding` also clears the record of the last forward pass."""
        if name == "embedding":
            self.sequence.begin()
        self.check_not_shifted(name, args)
        return super().dispatch(name, call, args, kwargs)


class ShardMask(ShardTensor):
    """Padding of this rank's tokens, as `attention_mask`. `mask_function` reads its `sequence`.

    Shape and sum can be read. Any other access raises, because the layer would take the shard for the whole sequence.
    After the last layer a model reads `PassRecord.whole_mask` instead, if there is one.
    """

    def dispatch(self, name: str, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return results that do not depend on the order of tokens, or those of the whole mask. Raise on all others."""
        whole_mask = self.sequence.forward_pass.whole_mask
        if whole_mask is not None and args and args[0] is self:
            return call(whole_mask, *args[1:])
        is_sum = name in ("sum", "count_nonzero") and len(args) == 1 and not kwargs
        if is_sum and self.dtype != torch.bool:  # PyTorch's attention sums bools, and drops the mask if all are True
            return call()
        result = call() if name in METADATA_FUNCTIONS | COPY_FUNCTIONS else None
        if isinstance(result, Tensor) and name in COPY_FUNCTIONS and result.shape == self.shape:
            return self.wrap(result)
        if name in METADATA_FUNCTIONS and not isinstance(result, Tensor):
            return result
        if name == "zeros_like":
            return call()
        if name in ("eq", "__eq__") and type(args[1]) is int and args[1] == 1:
            return ShardMaskIsOne.of(self.plain() == 1, sequence=self.sequence)
        if name == "__getitem__" and _is_whole(args[1], self.shape[1]):
            return self.wrap(self.plain())
        if name == "__getitem__" and not isinstance(args[1], tuple):
            expected, given, fix = "all rows of the batch", "some rows", "call hf.shard_batch with these rows alone"
            raise ArgumentError(f"{SUBJECT} attention_mask", expected, given, fix)
        if name == "cumsum":
            return ShardMaskCumsum.of(self.plain(), sequence=self.sequence)
        raise self.read_error(name)

    @staticmethod
    def read_error(name: str) -> KernelError:
        """Return the error for a model that reads the mask with the function of this name."""
        modules = called_modules()
        if not modules:
            given = f"a call of {name.strip('_')} outside of the model"
            fix = (
                "change the batch before hf.shard_batch; to generate, call hf.generate with the whole prompt and mesh="
            )
            return KernelError(f"{SUBJECT} attention_mask", "that of shard_batch as it is", given, fix)
        for module, *_ in modules:
            if not isinstance(module, PreTrainedModel):
                check_adapters(SUBJECT, module)
        expected = "a model whose layers leave attention_mask to attnmesh"
        given = f"one that reads it with {name.strip('_')}, as recurrent layers and custom attention do"
        fix = f'call model.set_attn_implementation("attnmesh"), or {USE_SUPPORTED}'
        return KernelError(SUBJECT, expected, given, fix)


class WholeIds(ShardTensor):
    """Tokens of a whole sequence with images, as `input_ids` of a model that cuts what its text model gets."""

    def dispatch(self, name: str, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the result. `on_begin` prepares the model before the model reads the shape or a value."""
        if name not in METADATA_FUNCTIONS or name == "__get__":
            self.sequence.forward_pass.on_begin(self.sequence)
        return super().dispatch(name, call, args, kwargs)


class WholeMask(ShardTensor):
    """Padding of a whole sequence with images, as `attention_mask` of a model that cuts what its text model gets."""


class ShardMaskIsOne(ShardTensor):
    """A `ShardMask` compared with 1. transformers drops the mask of recurrent layers if no token is padding.

    Here recurrent layers get the mask in any case, because it carries the `ShardedSequence`.
    """

    def dispatch(self, name: str, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return False for `all`. Raise on all other functions."""
        if name != "all" or len(args) > 1 or kwargs:
            raise ShardMask.read_error("eq")
        return torch.zeros((), dtype=torch.bool, device=self.device)


def _is_whole(index: Any, tokens: int) -> bool:
    """Return whether an index selects all tokens: `[:, -tokens:]`, as transformers cuts a mask to the new tokens."""
    return isinstance(index, tuple) and index == (slice(None), slice(-tokens, None))


class ShardMaskCumsum(ShardTensor):
    """Running sum of a `ShardMask`. transformers compares it with 0 to find the token at which chunks begin.

    Shards count chunks from the first token that is not padding, so the whole sequence counts as unpadded.
    """

    def dispatch(self, name: str, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return False for every token, if the sum is compared with 0. Raise on all other functions."""
        if name in METADATA_FUNCTIONS - {"__get__"}:
            return call()
        if name not in ("__eq__", "eq") or bool(torch.as_tensor(args[1]).any()):
            raise ShardMask.read_error("cumsum")
        return torch.zeros(self.shape, dtype=torch.bool, device=self.device)


class ShardPositions(ShardTensor):
    """Positions of this rank's tokens in the whole sequence, as `position_ids`."""

    last: int
    """Largest position of the whole sequence, on any rank."""
    whole: bool = False
    """True if each rank has all tokens."""
    ids: Tensor | None = None
    """Tokens of the whole sequence if positions count them from 0; None if the batch had position_ids."""

    def dispatch(self, name: str, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the largest position of the whole sequence for `max`, and this rank's result otherwise."""
        if name in METADATA_FUNCTIONS and name not in COPY_FUNCTIONS:
            return call()
        if name in VIEW_FUNCTIONS:
            return self.wrap(call())
        if name == "diff":
            return torch.ones_like(call())  # transformers looks for packed sequences, which `sequence` has
        self.sequence.forward_pass.positions_read = True
        if name in ("max", "amax") and len(args) == 1 and not kwargs:
            return torch.tensor(self.last, dtype=self.dtype, device=self.device)
        padding = kwargs.get("padding_idx") if name == "embedding" else None
        if padding is not None and self.ids is not None:
            _check_no_inner_padding(self.ids, padding)
            return torch.nn.functional.embedding(self + padding + 1, args[1])  # the first position
        return call()


def _check_no_inner_padding(ids: Tensor, padding: int) -> None:
    """Raise if a padding token comes before another token: RoBERTa's positions do not count padding."""
    is_padding = ids == padding
    if bool((is_padding[:, :-1] & ~is_padding[:, 1:]).any()):
        expected, given = "padding at the end of a sequence, if any", f"padding token {padding} before another token"
        raise KernelError(f"{SUBJECT} input_ids", expected, given, "replace it by another token")


def flatten(values: Iterable[Any]) -> Iterable[Any]:
    """Yield the values, and those inside of lists and tuples."""
    for value in values:
        yield from value if isinstance(value, (list, tuple)) else (value,)
