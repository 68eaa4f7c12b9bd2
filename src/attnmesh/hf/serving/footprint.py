"""Bytes of caches before their allocation: those of a request by its tokens, and those by which a cache grows."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from attnmesh.cache.cache import KVCache
from attnmesh.cache.cache_config import CacheConfig
from attnmesh.cache.memory_shard import shard_bytes
from attnmesh.core.turns import Turn
from attnmesh.errors import TooLong
from attnmesh.hf.cache.layer import growth_capacity
from attnmesh.hf.cache.sharded_cache import ShardedCache
from attnmesh.mesh.axes import RankMesh
from attnmesh.setup.measure_shares import free_of_ranks

Place = tuple[Turn, int, torch.device]
"""Turn of the rank that holds most tokens of a cache, number of ranks that share its heads, and its device."""

FREE_MEMORY_SHARE = 0.75
"""Share of the free memory that caches take, if no other limit is given. Prefill takes the rest."""


@dataclass(frozen=True)
class Footprint:
    """Bytes of a request's cache on the rank that holds most, as the first cache of the model shows them."""

    layers: list[tuple[CacheConfig, Place, int]]
    """Configuration of each layer's cache, its place, and the tokens that one of its keys stands for."""
    states: int
    grows: bool

    @staticmethod
    def of(cache: ShardedCache) -> "Footprint":
        """Return the footprint of caches like this one."""
        counts = zip(cache.kv_caches, cache.tokens_per_key, strict=False)
        layers = [(kv_cache.config, _place(kv_cache), tokens_per_key) for kv_cache, tokens_per_key in counts]
        states = sum(x.numel() * x.element_size() for x in cache.states.values())
        return Footprint(layers, states, cache.capacity is None)

    def __call__(self, tokens: int, *, shared: int = 0) -> int:
        """Return the bytes of a cache of `tokens` tokens, without the first `shared`, which lie in another's memory."""
        total = self.states
        for config, place, tokens_per_key in self.layers:
            keys = -(-tokens // tokens_per_key)
            whole = replace(config, capacity=growth_capacity(keys) if self.grows else config.capacity)
            total += shard_bytes(whole, *place)
            if shared >= tokens_per_key and config.mask is None:  # a fork copies its window
                total -= shard_bytes(replace(config, capacity=shared // tokens_per_key), *place)
        return total

    def chunk_bytes(self, tokens: int) -> int:
        """Return the bytes that a chunk of `tokens` tokens takes in layers with a window, beside the window."""
        windows = ((config, place) for config, place, _ in self.layers if config.mask is not None)
        return sum(shard_bytes(replace(config, capacity=tokens, mask=None), *place) for config, place in windows)


def growth(cache: ShardedCache, tokens: int) -> int:
    """Return the bytes by which a cache grows with `tokens` more tokens, on the rank that holds most."""
    total = 0
    layers = cache.attention_layers
    if layers and layers[0].is_made and not any(layer.other_kv_caches for layer in layers):
        layers = layers if layers[0].must_grow(layers[0].kv_cache, tokens) else []  # layers grow together
    for layer in layers:
        for kv_cache, tokens_per_key in zip(layer.kv_caches, layer.tokens_per_key, strict=False):
            keys = -(-tokens // tokens_per_key)
            if layer.must_grow(kv_cache, keys):
                larger = replace(kv_cache.config, capacity=growth_capacity(kv_cache.length + keys))
                total += shard_bytes(larger, *_place(kv_cache)) - shard_bytes(kv_cache.config, *_place(kv_cache))
    return total


def memory_share(meshes: tuple[RankMesh, RankMesh], device: torch.device, shares: Sequence[float] | None) -> int:
    """Return the bytes of free memory that caches may take on a rank, the least over a mesh and its peers. Collective.

    With unequal shares of tokens these are the bytes of the rank that holds most: other ranks take less in proportion.
    """
    peers, mesh = meshes
    free = free_of_ranks(mesh, device, min(free_of_ranks(peers, device)))
    ratios = shares or (1.0,)
    most = (max(ratios) / ratios[shard % len(ratios)] * each for shard, each in enumerate(free))
    return max(1, int(FREE_MEMORY_SHARE * min(most)))


def never_fits(needed: int, memory: int) -> TooLong:
    """Return the error of a request that needs more bytes than all caches may take."""
    given, fix = f"{needed:,} bytes for one request", "shorten the prompt, or raise cache_memory"
    return TooLong("submit ids", f"caches of at most {memory:,} bytes a rank", given, fix)


def _place(kv_cache: KVCache) -> Place:
    most = max(kv_cache.own_shard.block_cyclic.turns, key=lambda turn: turn.width)
    return most, kv_cache.rank_mesh.heads.size, kv_cache.device
