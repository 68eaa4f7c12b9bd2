"""Protocols: what layers need of their cache, and what attention needs of a layer's keys."""

from typing import Any, Protocol

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedConfig

from attnmesh.cache.cache import KVCache
from attnmesh.cache.cache_config import CacheConfig
from attnmesh.cache.make_shards import OpenFolder
from attnmesh.hf.cache.history import CacheHistory
from attnmesh.hf.cache.settings import CacheSettings
from attnmesh.kernels.padding import Padding


class LayersCache(Protocol):
    """The part of a `ShardedCache` that layers and their attention read. The module of the cache imports the layers."""

    config: PreTrainedConfig
    mesh: DeviceMesh | None
    settings: CacheSettings
    history: CacheHistory
    stock_window: int | None

    @property
    def folder(self) -> OpenFolder | None:
        """The open folder in which the keys and values are; None if they are in memory."""

    @property
    def attention_layers(self) -> list[Any]:
        """Layers that hold keys and values."""

    @property
    def head_ranks(self) -> int:
        """Ranks that split the heads of an output."""

    def attend(self, q: Tensor, kv_cache: KVCache, **options: Any) -> Tensor:
        """Return attention of the last tokens over all tokens of one layer's cache."""


class StepCache(Protocol):
    """The part of a `KVCache` that the tokens of a step need. The caches of several rows have it, too."""

    @property
    def config(self) -> CacheConfig:
        """Sizes and options over all ranks."""

    @property
    def padding(self) -> Padding | None:
        """Padding of the batch; None if all tokens are real."""

    @property
    def length(self) -> int:
        """Cached tokens of each sequence, or of the longest row."""

    def append(self, k: Tensor, v: Tensor | None = None, *, token_mask: Tensor | None = None) -> None:
        """Add new tokens, equal on all ranks."""
