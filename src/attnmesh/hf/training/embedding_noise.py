"""Noise that NEFTune adds to the embeddings of a batch, on shards.

transformers adds it in a hook of the embedding, which divides it by the root of the length that it sees: a shard's. It
draws from the generator of the rank, so ranks with one seed would add the same noise to the first token of each shard.
The hook runs as it is, with a strength for the whole length and with numbers of the rank's own.
"""

from collections.abc import Callable
from functools import partial as partial_of
from math import sqrt
from typing import Any

import torch
from torch import Tensor, nn

from attnmesh.hf.random_numbers import own_random_numbers
from attnmesh.hf.shard_tensors import ShardIds
from attnmesh.mesh.axes import RankMesh

NOISE_HOOK = "neftune_post_forward_hook"
"""Name of the hook of transformers, which adds noise to what an embedding returns."""

STRENGTH = "neftune_noise_alpha"
"""Attribute of the embedding with the strength of the noise, which the hook reads."""


def scale_noise(module: nn.Module) -> None:
    """Let the noise hooks of a module add to a shard what they would add to its tokens in the whole sequence."""
    hooks = module._forward_hooks
    for key in [key for key, hook in hooks.items() if getattr(hook, "__name__", "") == NOISE_HOOK]:
        hooks[key] = partial_of(_add_noise, hooks[key])  # the key stays, by which the hook is removed


@torch.compiler.disable  # type: ignore[untyped-decorator] # compiled graphs take plain tensors only
def _add_noise(hook: Callable[..., Any], module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Any:
    """Return embeddings with the noise of a hook: of a shard, if they are of one."""
    sequence = next((x.sequence for x in args if isinstance(x, ShardIds) and x.sequence.ranks > 1), None)
    strength = getattr(module, STRENGTH, None)
    if sequence is None or strength is None or not module.training:
        return hook(module, args, output)
    setattr(module, STRENGTH, strength * sqrt(output.shape[1] / sequence.length))
    try:
        with own_random_numbers(RankMesh.of(sequence.mesh).shard_index, output.device):
            return hook(module, args, output)
    finally:
        setattr(module, STRENGTH, strength)
