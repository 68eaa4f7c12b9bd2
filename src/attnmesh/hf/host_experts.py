"""Experts shared by the ranks of a host: in a step of decoding, each rank computes some of those that tokens choose.

One rank computes all tokens of an expert, and no other rank reads the expert's weights. The ranks exchange the results,
one for each token and expert. Each rank adds the results of a token in the order in which the token chose its experts,
so the sum does not depend on the number of ranks.
"""

from collections.abc import Callable, Iterable
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from attnmesh.comm.p2p import all_to_all_tokens
from attnmesh.mesh.axes import Axis

LEAST_EXPERT_BYTES = 1 << 20
"""Bytes of an expert that is shared: a smaller one is read sooner than its results are exchanged."""

EXPERT_ARGUMENTS = "hidden_states top_k_index top_k_weights", "hidden_states router_indices routing_weights"
"""Arguments of experts in transformers: tokens, the experts that each token has chosen, and weights of the experts."""


def host_experts_of(modules: Iterable[Any]) -> list[nn.Module]:
    """Return the experts that ranks can share among some modules."""
    return [module for module in modules if hasattr(module, "_is_expert_parallel") and _is_shared(module)]


def _is_shared(experts: Any) -> bool:
    if " ".join(signature(experts.forward).parameters) not in EXPERT_ARGUMENTS:
        return False
    weights = list(experts.parameters())
    is_plain = all(
        type(weight) is Parameter and (weight.is_cpu or weight.is_meta) and weight.is_floating_point()
        for weight in weights
    )
    is_whole = is_plain and not experts._is_expert_parallel and "forward" not in vars(experts)
    return is_whole and sum(weight.nbytes for weight in weights) >= LEAST_EXPERT_BYTES * experts.num_experts


class HostExperts:
    """The forward function of experts, in place of `forward`, which computes them on one rank.

    `shares_step` returns whether the ranks share the step that this thread runs.
    """

    def __init__(self, forward: Callable[..., Tensor], axis: Axis, shares_step: Callable[[], bool]) -> None:
        self.forward, self.axis, self.shares_step = forward, axis, shares_step

    def __call__(self, hidden_states: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Return the sum of the chosen experts' outputs for each token."""
        if not self.shares_step() or hidden_states.dim() != 2 or torch.compiler.is_compiling():
            return self.forward(hidden_states, chosen, weights)
        experts, order = chosen.flatten().sort(stable=True)
        _, choice_counts = experts.unique_consecutive(return_counts=True)
        edges = [0, *choice_counts.cumsum(0).tolist()]
        parts = [Axis(self.axis.size, rank).slice_of(len(choice_counts)) for rank in range(self.axis.size)]
        counts = [edges[part.stop] - edges[part.start] for part in parts]
        own_part = parts[self.axis.index]
        own_choices = order[edges[own_part.start] : edges[own_part.stop]]
        results = hidden_states.new_empty(0, hidden_states.shape[1])
        if len(own_choices):  # each choice as a token of its own
            routing = (x.flatten()[own_choices, None] for x in (chosen, weights))
            results = self.forward(hidden_states[own_choices // chosen.shape[1]], *routing)
        if self.axis.size > 1:
            results = torch.cat(all_to_all_tokens([results] * self.axis.size, counts, self.axis, 0))
        by_choice = torch.empty_like(results).index_copy_(0, order, results)
        return by_choice.view(*chosen.shape, hidden_states.shape[1]).sum(1)
