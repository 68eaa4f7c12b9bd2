"""Scores of an indexer, which no rank computes whole.

A model's indexer scores all keys for each query and takes the best. Its cache returns `IndexScores` for the keys: they
record the functions that the model calls on them, and `topk` runs these on the keys of a rank, a tile at a time.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from attnmesh.errors import KernelError
from attnmesh.hf.family import USE_SUPPORTED
from attnmesh.hf.models import SUBJECT, Opaque
from attnmesh.hf.shard_tensors import METADATA_FUNCTIONS, DispatchedTensor

RECORDED_KEYS = 2**31
"""Length of the dim of keys while scores are recorded: no other dim is as long, so `topk` can tell the keys."""

KEYWISE = {"transpose", "float", "unsqueeze", "squeeze", "matmul", "mul", "relu"}
"""Functions of PyTorch after which the score of a key depends on no other key."""


class KeySource(Protocol):
    """Holder of the keys of an indexer."""

    def select(self, scores: "IndexScores", k: int) -> Tensor:
        """Return the best k keys of each query, (batch, queries, k) of int32."""


class TopK(NamedTuple):
    """Result of `topk` for a model."""

    indices: Tensor


class IndexMask(Opaque):
    """A layer's mask without its dim of heads, `mask[:, 0]`, by which an indexer hides keys."""

    dtype = torch.bool

    def __init__(self, layer_mask: Any) -> None:
        self.layer_mask = layer_mask
        """A `LayerMask`, whose file imports this one."""

    def __invert__(self) -> "IndexMask":
        return self

    @property
    def recognised(self) -> Any:
        """The mask as a `RecognisedMask`."""
        return self.layer_mask.recognised()

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Return scores of one device with -inf where a query does not see a key. Raise for other functions."""
        if func.__name__ != "masked_fill" or type(args[0]) is not Tensor:
            cls.raise_read(func.__name__)
        scores, mask, value = args
        if mask.layer_mask.sequence is not None:
            given = "one that scores the keys of a shard alone"
            raise KernelError(f"{SUBJECT} indexer", "an indexer that keeps its keys in the cache", given, USE_SUPPORTED)
        return scores.masked_fill(~mask.layer_mask.seen(scores.shape[-1]).to(scores.device), value)


class IndexScores(DispatchedTensor):
    """Keys of an indexer, (batch, keys, dim), or scores of them, on no device."""

    operands: tuple[Tensor, ...] = ()
    """Tensors of the queries that were recorded, (batch, queries, ...)."""
    recorded: Callable[[Tensor, Sequence[Tensor]], Any]
    """Return what was recorded, computed for some keys and for the queries of some operands."""
    source: KeySource
    block = 1
    """Keys per index."""
    whole = False
    """True if each rank passes the keys of all ranks' tokens."""
    recognised: Any = None
    """The `RecognisedMask` that hides keys; None before it is applied."""

    @classmethod
    def keys(cls, new: Tensor, source: KeySource) -> "IndexScores":
        """Return a record of keys with the width and dtype of `new`, (batch, tokens, dim)."""
        blank = torch.empty(new.shape[0], RECORDED_KEYS, new.shape[2], dtype=new.dtype, device="meta")
        return cls.of(blank, source=source, recorded=lambda keys, _: keys)

    def dispatch(self, name: str, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Record a function that scores each key by itself. Raise for all others."""
        if name in METADATA_FUNCTIONS and not isinstance(result := call(), Tensor):
            return result
        if (
            name == "masked_fill"
            and self.recognised is None
            and isinstance(args[1], IndexMask)
            and args[2] == -torch.inf
        ):
            return self.of(self.plain(), **{**vars(self), "recognised": args[1].recognised})
        if (
            name == "topk"
            and self.recognised is not None
            and self.ndim == 3
            and self.shape[2] == RECORDED_KEYS
            and _is_last(kwargs)
        ):
            return TopK(self.source.select(self, args[1]))
        if name not in KEYWISE or any(isinstance(x, Tensor) for x in kwargs.values()):
            Opaque.raise_read(name.strip("_"))
        result = call(*(x.plain() if isinstance(x, IndexScores) else _describe(x) for x in args))
        operands, slots = _operands(args, result)

        def score(keys: Tensor, query_operands: Sequence[Tensor]) -> Any:
            return call(*(_argument(x, slot, keys, query_operands) for x, slot in zip(args, slots, strict=True)))

        return self.of(result, **{**vars(self), "operands": operands, "recorded": score})

    def run(self, keys: Tensor, operands: Sequence[Tensor]) -> Tensor:
        """Return the scores (batch, queries, keys) of some keys (batch, keys, dim) for the queries of operands."""
        scores: Tensor = self.recorded(keys, operands)
        expected = len(keys), operands[0].shape[1], keys.shape[1]
        if scores.shape != expected:
            given = f"those of shape {tuple(scores.shape)}"
            raise KernelError(f"{SUBJECT} indexer", f"scores of shape {expected}", given, USE_SUPPORTED)
        return scores


def _is_last(options: dict[str, Any]) -> bool:
    """Return whether `topk` was asked for the highest of the last dim."""
    return options.get("dim", -1) == -1 and options.keys() <= {"dim", "sorted"}


def _describe(x: Any) -> Any:
    """Return a tensor's shape and dtype, as a tensor on no device."""
    return torch.empty_like(x, device="meta") if isinstance(x, Tensor) else x


def _operands(args: Sequence[Any], result: Tensor) -> tuple[tuple[Tensor, ...], list[slice | int | None]]:
    """Return the tensors of queries among the arguments of a function, and their places for each argument.

    Queries are dim 1 of the function's result, and of each argument with as many dims.
    """
    operands: list[Tensor] = []
    slots: list[slice | int | None] = []
    for x in args:
        first = len(operands)
        if isinstance(x, IndexScores):
            operands += x.operands
            slots.append(slice(first, len(operands)))
        elif isinstance(x, Tensor) and x.ndim == result.ndim == 4 and x.shape[1] == result.shape[1]:
            operands.append(x)
            slots.append(first)
        else:
            slots.append(None)
    return tuple(operands), slots


def _argument(x: Any, slot: slice | int | None, keys: Tensor, operands: Sequence[Tensor]) -> Any:
    """Return an argument of a recorded function for some keys and queries. Tensors of queries are in `operands`."""
    if slot is None:
        return x
    return x.recorded(keys, operands[slot]) if isinstance(slot, slice) else operands[slot]
