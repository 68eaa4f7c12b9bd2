"""Functions as operators of PyTorch: one node of a traced graph, with outputs of the right shape, and gradients."""

from collections.abc import Callable, Sequence
from inspect import signature
from typing import Any

import torch
from torch import Tensor

Gradient = Callable[..., Sequence[Tensor | None]]
"""Returns the gradients of a function's first arguments; the others have none."""


def custom_operator(
    name: str, fake: Callable[..., Any], save: Callable[..., None] | None = None, backward: Gradient | None = None
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Make a function the operator of that name.

    `fake` returns empty outputs for the same arguments. `save` and `backward` are those of a function of autograd.
    """

    def make(run: Callable[..., Any]) -> Callable[..., Any]:
        op = torch.library.custom_op(f"attnmesh::{name}", run, mutates_args=())
        op.register_fake(fake)
        if backward is not None:
            op.register_autograd(_for_all_arguments(run, backward), setup_context=save)
        return op

    return make


def autograd_function(run: Callable[..., Any], save: Callable[..., None], backward: Gradient) -> Callable[..., Any]:
    """Return the function with these gradients, for calls that PyTorch does not trace."""
    methods = {"forward": run, "setup_context": save, "backward": _for_all_arguments(run, backward)}
    function = type("Recorded", (torch.autograd.Function,), {name: staticmethod(f) for name, f in methods.items()})
    apply: Callable[..., Any] = function.apply  # type: ignore[attr-defined]
    return apply


def _for_all_arguments(run: Callable[..., Any], backward: Gradient) -> Gradient:
    count = len(signature(run).parameters)

    def gradients(ctx: Any, *outputs: Any) -> tuple[Tensor | None, ...]:
        grads = backward(ctx, *outputs)
        return *grads, *[None] * (count - len(grads))

    return gradients
