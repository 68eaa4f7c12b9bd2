"""Labels of one rank's tokens, which raise unless a loss is right on shards. See `sharded_sequence`.

What PyTorch computes from labels is followed as far as a loss goes: the losses of tokens, their sum, and its division.
"""

from collections.abc import Callable
from numbers import Real
from typing import Any, NoReturn

from torch import Tensor

from attnmesh.errors import ArgumentError, KernelError
from attnmesh.hf.models import SUBJECT
from attnmesh.hf.shard_tensors import COPY_FUNCTIONS, METADATA_FUNCTIONS, VIEW_FUNCTIONS, ShardTensor

COUNT_ALL = "divide their sum by the batch's num_items_in_batch, or call hf.mean_over_mesh(losses, mask, mesh)"
"""Fix in errors about losses that are weighed by one rank's labels."""

PER_TOKEN_FUNCTIONS = {
    *VIEW_FUNCTIONS,
    *("clamp", "clamp_min", "clip", "masked_fill", "where", "neg", "__neg__", "negative", "mul", "__mul__", "__rmul__"),
    *("multiply", "masked_select", "add", "__add__", "__radd__", "sub", "__sub__", "rsub", "__rsub__", "subtract"),
}
"""Functions of PyTorch that return one value for each token, from one value for each token."""

SUM_FUNCTIONS = {"sum", "nansum", "dot", "inner", "vdot", "matmul", "__matmul__", "mv"}
"""Functions of PyTorch that add values of tokens, weighed or not."""

RANKING_FUNCTIONS = {
    *("max", "min", "amax", "amin", "topk", "kthvalue", "median", "nanmedian", "quantile", "nanquantile", "mode"),
    *("std", "var", "norm", "prod", "logsumexp"),
}
"""Functions of PyTorch whose result over all tokens is no mean of their results over the tokens of each rank."""


class GuardedLabels(ShardTensor):
    """Labels that request a loss from a model. The model must compute it from `shift_labels`."""

    def dispatch(self, name: str, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the labels cast or reshaped. Raise on all other functions."""
        if name in METADATA_FUNCTIONS | VIEW_FUNCTIONS - {"__getitem__", "select", "narrow"}:
            return self.wrap(call())
        expected = "a loss computed from shift_labels, as by ForCausalLMLoss of transformers"
        given = f"one computed from labels ({name}), which are shifted already"
        fix = "pass shift_labels to the model too, or compute the loss from logits and shift_labels"
        raise KernelError(f"{SUBJECT} labels", expected, given, fix)


class ShardLabels(ShardTensor):
    """Target of each of this rank's tokens, the next token of the whole sequence, as `shift_labels`."""

    def dispatch(self, name: str, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the result. A loss raises unless all layers attended over all shards."""
        self.check_not_shifted(name, args)
        if name in ("gather", "take_along_dim", "__getitem__") and not isinstance(args[0], ShardLabels):
            return TokenLosses.of(call(), sequence=self.sequence)
        if name not in ("cross_entropy", "nll_loss"):
            return self.wrap(call()) if name in PER_TOKEN_FUNCTIONS else call()
        self.sequence.check_all_layers_counted()
        reduction = kwargs.get("reduction", "mean")
        if reduction == "sum":
            return LossSum.of(call(), sequence=self.sequence)
        if reduction != "mean":
            return TokenLosses.of(call(), sequence=self.sequence)
        if (args[2] if len(args) > 2 else kwargs.get("weight")) is not None and self.sequence.ranks > 1:
            raise _uneven("a mean over one rank's tokens by weights of classes")
        if not self.sequence.has_even_labels:
            raise _uneven("a mean over one rank's tokens")
        return call()


def _uneven(given: str) -> ArgumentError:
    """Return the error about a loss of one rank's tokens, of which the mean over ranks is not that of all tokens."""
    expected = "a loss that weighs the tokens of all ranks equally"
    return ArgumentError(f"{SUBJECT} num_items_in_batch", expected, given, COUNT_ALL)


class TokenLosses(ShardTensor):
    """Losses of this rank's tokens, or log-probabilities of their labels."""

    is_selected = False
    """True for those of some tokens, as of the ones that have labels."""

    def dispatch(self, name: str, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the result. A mean raises unless it weighs the tokens of all ranks equally."""
        if name in ("mean", "nanmean") and not self._has_even_mean():
            raise _uneven("a mean over one rank's tokens")
        if name in RANKING_FUNCTIONS and self.requires_grad and self.sequence.ranks > 1:
            raise _uneven(f"{name} of one rank's tokens")
        if name in SUM_FUNCTIONS:
            return LossSum.of(call(), sequence=self.sequence)
        result = call()
        if not isinstance(result, Tensor):
            return result
        if name == "masked_select" or (name == "__getitem__" and isinstance(args[1], Tensor)):
            return self.of(result, **{**vars(self), "is_selected": True})
        is_per_token = result.is_floating_point() and result.numel() == self.numel()
        return self.wrap(result) if is_per_token or name in PER_TOKEN_FUNCTIONS else result

    def _has_even_mean(self) -> bool:
        """Return whether a mean divides by an equal number on all ranks: of all tokens, or of those with labels."""
        sequence = self.sequence
        is_even = self.numel() == sequence.own_labels if self.is_selected else sequence.has_even_tokens
        return sequence.ranks == 1 or (sequence.has_even_labels and is_even)


class LossSum(ShardTensor):
    """Sum of losses over this rank's tokens. Models divide it by the number of labels."""

    def dispatch(self, name: str, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the result. A division by `Trainer`'s count of all ranks' labels is multiplied by the ranks.

        Then the mean over ranks is the loss of the whole batch, as it is with the batch's `ItemCount`.
        """
        if name in VIEW_FUNCTIONS | {"neg", "__neg__", "negative", "sum", "mean"}:
            return self.wrap(call())
        if name == "backward" and self.sequence.ranks > 1:
            raise _uneven("a sum over one rank's tokens, which nothing divides")
        if name.strip("_") not in ("div", "true_divide", "divide", "truediv", "itruediv") or self.sequence.ranks == 1:
            return call()
        divisor = args[1] if len(args) > 1 else kwargs["other"]
        count = self.sequence.forward_pass.item_count
        comparable = isinstance(divisor, Tensor | Real) and isinstance(count, Tensor | Real)
        if divisor is count or (comparable and bool(divisor == count)):
            self._check_own_count(divisor)
            return call().mul_(self.sequence.ranks)
        self._check_divisor(divisor)
        return call()

    def _check_own_count(self, count: Any) -> None:
        """Raise if a count that was passed to the model is of one rank's labels."""
        label_counts = self.sequence.label_counts
        fits = count >= sum(label_counts) or count not in label_counts
        if not fits:
            _raise_wrong_count("the labels of one rank")

    def _check_divisor(self, divisor: Any) -> None:
        """Raise unless the divisor is the batch's count: the labels of all ranks divided by the number of ranks."""
        label_counts, given = self.sequence.label_counts, ""
        if isinstance(divisor, Tensor):
            given = "" if isinstance(divisor, ItemCount) else "another tensor"
        elif divisor == sum(label_counts):
            given = "the labels of all ranks, though gradients are averaged over them"
        elif divisor in label_counts and divisor * len(label_counts) != sum(label_counts):
            given = "the labels of one rank"
        # Not an ArgumentError: where an operator raises a TypeError, PyTorch computes it in another way.
        if given:
            _raise_wrong_count(given)


def _raise_wrong_count(given: str) -> NoReturn:
    raise KernelError(f"{SUBJECT} num_items_in_batch", "the count of the batch", given, COUNT_ALL)


class ItemCount(ShardTensor):
    """Number of labels to learn divided by the ranks, as `num_items_in_batch`. Mixed precision must not round it."""

    def dispatch(self, name: str, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the result as a count. Casts move it to another device and keep its dtype."""
        result = call()
        if name in COPY_FUNCTIONS and isinstance(result, Tensor):
            result = self.plain().to(result.device)
        return self.wrap(result)
