"""The causal convolution of recurrent layers, which takes a halo on shards."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.nn.functional import conv1d, pad

from attnmesh.hf.recurrent.chain import current_chain


class Convolution:
    """Replacement of the convolution of transformers."""

    parameters = ("hidden_states", "weight", "bias", "activation")
    """Parameters of the stock function before its `**kwargs`."""

    @staticmethod
    def of(stock: Any) -> Callable[..., Any]:
        """Return the convolution with a halo."""

        def convolution(hidden_states: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Any:
            size = weight.shape[-1] - 1
            valid = lambda x: stock(x, weight, *args, **kwargs)[:, :, size:]  # noqa: E731
            return current_chain.get().convolve(hidden_states, size, valid)

        return convolution


CONVOLUTION = {"causal_conv1d_fn": Convolution()}
"""Function of a causal convolution, with what replaces it."""

CONVOLUTION_SOURCE = {"causal_conv1d_fn": "a3dae61c0df8"}
"""Digest of the source of that function, which most families share."""


class ShardedConv1d(nn.Conv1d):
    """A causal convolution of each channel by itself, which takes a halo on shards."""

    def forward(self, input: Tensor) -> Tensor:
        """Return the convolution, padded on both sides as `nn.Conv1d` pads."""
        chain = current_chain.get(None)
        size = self.kernel_size[0] - 1
        if chain is None:
            return super().forward(input)
        return chain.convolve(
            input, size, lambda x: conv1d(pad(x, (0, size)), self.weight, self.bias, groups=self.groups)
        )
