"""Labels of one rank's tokens, which raise unless the model's loss is right on shards. See `shards`."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from attnmesh.errors import ArgumentError, KernelError, require
from attnmesh.hf.models import SUBJECT
from attnmesh.hf.shards import COPY_FUNCTIONS, METADATA_FUNCTIONS, VIEW_FUNCTIONS, ShardTensor


class GuardedLabels(ShardTensor):
    """Labels that request a loss from a model. The model must compute it from `shift_labels`."""

    def dispatch(self, name: str, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the labels cast or reshaped. Raise on all other functions."""
        if name in METADATA_FUNCTIONS | VIEW_FUNCTIONS - {"__getitem__", "select", "narrow"}:
            return self.wrap(call())
        expected = "a loss computed from shift_labels, as by ForCausalLMLoss of transformers"
        given = f"one computed from labels ({name}), which are shifted already"
        raise KernelError(f"{SUBJECT} labels", expected, given, "compute the loss from logits and shift_labels")


class ShardLabels(ShardTensor):
    """Target of each of this rank's tokens, the next token of the whole sequence, as `shift_labels`."""

    def dispatch(self, name: str, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the result. `cross_entropy` raises unless all layers attended over all shards."""
        if name != "cross_entropy":
            return super().dispatch(name, call, args, kwargs)
        self.shards.check_all_layers_counted()
        reduction = kwargs.get("reduction", "mean")
        expected, given = "a loss that weighs the tokens of all ranks equally", "a mean over one rank's tokens"
        fix = "divide a loss of reduction='sum' by the batch's num_items_in_batch"
        weighed = reduction != "mean" or self.shards.even
        require(weighed, ArgumentError, f"{SUBJECT} num_items_in_batch", expected, given, fix)
        return LossSum.of(call(), shards=self.shards) if reduction == "sum" else call()


class LossSum(ShardTensor):
    """Sum of losses over this rank's tokens. Models divide it by the number of labels."""

    def dispatch(self, name: str, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the result. A division by `Trainer`'s count of all ranks' labels is multiplied by the ranks.

        Then the mean over ranks is the loss of the whole batch, as it is with the batch's `ItemCount`.
        """
        if name in ("__get__", "to", "float", "double"):
            return self.wrap(call())
        if name.strip("_") not in ("div", "true_divide", "divide", "truediv", "itruediv") or self.shards.ranks == 1:
            return call()
        divisor, count = args[1], self.shards.forward_pass.item_count
        if divisor is count or (isinstance(divisor, Tensor) and isinstance(count, Tensor) and bool(divisor == count)):
            return call().mul_(self.shards.ranks)
        is_count = isinstance(divisor, ItemCount) or not isinstance(divisor, Tensor)
        subject, fix = f"{SUBJECT} num_items_in_batch", "pass it to shard_batch(..., num_items_in_batch=)"
        require(is_count, ArgumentError, subject, "the count of the batch", "another tensor", fix)
        return call()


class ItemCount(ShardTensor):
    """Number of labels to learn divided by the ranks, as `num_items_in_batch`. Mixed precision must not round it."""

    def dispatch(self, name: str, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the result as a count. Casts move it to another device and keep its dtype."""
        result = call()
        if name in COPY_FUNCTIONS and isinstance(result, Tensor):
            result = self.plain().to(result.device)
        return self.wrap(result)
