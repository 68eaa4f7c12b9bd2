"""Cross-attention of text over features of images (Mllama): each rank attends its own tokens to all features.

Features do not grow with the text, so their keys and values are whole on every rank, in the cache too.
"""

from collections.abc import Callable
from functools import partial as partial_of
from typing import Any

from torch import Tensor, nn

from attnmesh.hf.models import Opaque
from attnmesh.hf.transformers_names import CacheLayerMixin


class CrossLayer(CacheLayerMixin):  # type: ignore[misc]
    """Keys and values of images in one layer of a `ShardedCache`. They are set anew with each chunk of a prompt."""

    is_croppable = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing: `update` sets all keys at once."""

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Set the keys and values of all images, and return them."""
        self.keys, self.values, self.is_initialized = key_states, value_states, True
        return key_states, value_states

    @property
    def held_bytes(self) -> int:
        """Bytes of keys and values of images, which each rank holds."""
        return sum(x.numel() * x.element_size() for x in (self.keys, self.values) if x is not None)

    def get_seq_length(self) -> int:
        """Return 0: the layer holds no tokens."""
        return 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the number of keys of a mask, the new tokens, and the position of the first."""
        return query_length, 0

    def get_max_length(self) -> int:
        """Return -1, for no limit."""
        return -1

    def crop(self, tokens_to_remove: int) -> None:
        """Do nothing: tokens that are left see the same images."""

    def reset(self) -> None:
        """Drop the images. The model skips the layer then."""
        super().__init__()

    def actions_to_reorder(self, index: Tensor) -> list[Callable[[], Any]]:
        """Return actions that replace sequence b by sequence `index[b]`. The batch may grow or shrink."""
        if not self.is_initialized:
            return []
        index = index.to(self.keys.device)
        tensors = {"keys": self.keys[index], "values": self.values[index]}
        return [partial_of(setattr, self, name, x) for name, x in tensors.items()]


class SomeKeys(Opaque):
    """Keys of a layer that holds tokens: Mllama asks all layers whether they hold some."""

    @staticmethod
    def numel() -> int:
        """Return a number above 0."""
        return 1


def attends_to_images(module: nn.Module) -> bool:
    """Return whether a layer attends to features of images alone."""
    layers = getattr(getattr(module, "config", None), "cross_attention_layers", None) or ()
    return getattr(module, "layer_idx", None) in layers
