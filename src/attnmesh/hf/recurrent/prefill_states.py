"""States of a recurrent layer while a prompt is computed on shards."""

from functools import partial as partial_of
from typing import Any

import torch.distributed as dist
from torch import Tensor

from attnmesh.comm.failures import run_collective
from attnmesh.hf.recurrent.chain import Chain


class PrefillStates:
    """Stand-in for the cache in a recurrent layer on shards: states pass along the chain, and are stored at its end."""

    def __init__(self, cache: Any, layer: Any) -> None:
        self.cache, self.layer = cache, layer
        self.index = getattr(layer, "conv_idx", 0)
        """Index of the states among those of the layer."""
        self.conv: dict[str, Any] | None = None
        """Arguments of the cache's `update_conv_state`."""
        self.state: Tensor | None = None

    def entering(self) -> list[Tensor] | None:
        """Return the cached states, in the order in which the layer reads them; None if there are none."""
        conv = self.cache.get_conv_state(self.layer.layer_idx, state_idx=self.index)
        state = self.cache.get_recurrent_state(self.layer.layer_idx, state_idx=self.index)
        return None if conv is None else [conv, *([] if state is None else self.read(state))]

    def read(self, state: Tensor) -> list[Tensor]:
        """Return a state as the layer reads it."""
        return [state]

    def get_conv_state(self, *_: Any, **__: Any) -> None:
        """Return no state: the convolution takes a halo."""

    def get_recurrent_state(self, *_: Any, **__: Any) -> None:
        """Return no state: the rule takes it from the chain."""

    def is_recording_past(self, *_: Any, **__: Any) -> bool:
        """Return False: the past is not kept."""
        return False

    def update_conv_state(self, x: Tensor, layer_idx: int, **options: Any) -> Tensor:
        """Return the new tokens alone."""
        self.conv = options
        return x

    def update_recurrent_state(self, state: Tensor, layer_idx: int, **_: Any) -> None:
        """Keep the state after this rank's tokens."""
        self.state = state

    def store(self, chain: Chain) -> None:
        """Store the states after the last part in the cache of every rank. Collective."""
        if self.conv is not None:
            tail = broadcast_last(chain.leaving[0], chain)
            self.cache.update_conv_state(tail, self.layer.layer_idx, **self.conv)
        if self.state is not None:
            self.cache.update_recurrent_state(broadcast_last(self.state, chain), self.layer.layer_idx)


def broadcast_last(x: Tensor, chain: Chain) -> Tensor:
    """Return the tensor of the rank with the last part. Collective."""
    x = x.contiguous()
    if chain.axis.group is not None:
        run_collective(chain.axis, "sending states", partial_of(dist.broadcast, group_src=chain.owners[-1]), x)
    return x
