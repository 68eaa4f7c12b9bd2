"""Shards of a new cache: in memory, in two memories, or in the files of a folder, in which the cache goes on."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial as partial_of
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from torch.distributed.device_mesh import DeviceMesh

from attnmesh.cache.block_cyclic import BlockCyclic
from attnmesh.cache.cache_config import CacheConfig
from attnmesh.cache.cache_shard import CacheShard
from attnmesh.cache.local_shards import LocalShards
from attnmesh.cache.memory_shard import MemoryShard
from attnmesh.cache.ordered_shard import Fail
from attnmesh.cache.tiered_shard import TieredShard
from attnmesh.comm.transport import agreed_transport
from attnmesh.errors import KernelError, StoreError
from attnmesh.guard.agreement import Agreement, agree_on_merges
from attnmesh.mesh.axes import Axis, RankMesh, agreed_flat_axis
from attnmesh.mesh.shares import check_copies, check_shares
from attnmesh.runtime.late_bound import LateBound
from attnmesh.setup.measure_shares import agreed_shares


class OpenFolder(Protocol):
    """A folder in which caches live, as they know it: a `store.kv_folder.KVFolder`."""

    @property
    def layer_count(self) -> int:
        """Number of layers that have files."""

    def released_on_error(self) -> AbstractContextManager[None]:
        """Let others write to the folder after an error."""

    def shard_maker(self, layer: int, config: CacheConfig, fail: Fail) -> Callable[[int], CacheShard]:
        """Return what opens the shard of a layer, given the rank's index along the tokens axis."""

    def settle(self, layer: int, shards: LocalShards) -> None:
        """Cut a layer to the tokens that all ranks have."""


class FolderLayer(NamedTuple):
    """A layer of a folder that is open: its keys and values are files there."""

    folder: OpenFolder
    layer: int


open_folder = LateBound[..., OpenFolder]("attnmesh.store")
"""Return a folder in which caches live: `store.kv_folder.KVFolder`."""


def check_shards(
    config: CacheConfig,
    device: torch.device,
    ranks: int,
    *,
    copies: int,
    shares: Sequence[float] | str | None,
    folder: str | Path | FolderLayer | None,
) -> None:
    """Raise unless `ranks` ranks can have the shards of a cache with these options."""
    check_copies("KVCache", copies, ranks)
    check_shares("KVCache", shares, ranks)
    if config.hot is not None and copies != 1:
        raise KernelError("KVCache hot", "one rank of each token", f"copies={copies}", "leave copies out, or hot")
    if folder is None:
        return
    subject = "KVCache folder"
    if device.type != "cpu" and config.hot is None:
        expected = "a cache on a CPU, or one whose newest tokens alone are on a device"
        raise KernelError(subject, expected, str(device), 'pass hot=, or device="cpu"')
    if config.mask is not None:
        fix = "leave mask= out, and decode with it"
        raise KernelError(subject, "a cache that keeps all tokens", f"mask={config.mask}", fix)
    check_ranks_in_folder(subject, copies, shares)


def check_ranks_in_folder(subject: str, copies: int, shares: object) -> None:
    """Raise unless a folder can have the tokens of ranks with these `copies` and `shares`."""
    if copies != 1:
        fix = "leave copies out: files outlive their rank"
        raise KernelError(subject, "one rank of each token", f"copies={copies}", fix)
    if shares is not None:
        fix = "leave shares out, or load the folder with shares="
        raise KernelError(subject, "even shares", f"shares={shares!r}", fix)


def agreed_token_axis(device_mesh: DeviceMesh | None, mesh: RankMesh, device: torch.device) -> Axis:
    """Return the axis that tokens are sharded over, ready for merges. Collective at its first call."""
    token_axis = agreed_flat_axis(device_mesh, ("queries", "keys"))
    for axis in (token_axis, mesh.heads):
        agreed_transport(axis, device)
    if token_axis.size > 1 and device.type == "cpu":
        agree_on_merges(token_axis)
    return token_axis


def make_shards(
    config: CacheConfig,
    mesh: RankMesh,
    token_axis: Axis,
    device: torch.device,
    *,
    copies: int,
    shares: Sequence[float] | str | None,
    folder: str | Path | FolderLayer | None,
    fail: Fail,
) -> LocalShards:
    """Return the shards of a cache, empty but for what a folder has. Collective. Arguments were checked."""
    make = _memory_shard_maker(config, mesh, device, shares)
    with _opened(folder, mesh, token_axis) as opened:
        with Agreement(mesh, "KVCache"):
            if opened is not None:
                make = opened.folder.shard_maker(opened.layer, config, fail)
            make = _tiered_shard_maker(make, config, device, fail)
            with config.allocating():
                shards = LocalShards(token_axis, copies, make)
        if opened is not None:
            opened.folder.settle(opened.layer, shards)
    return shards


@contextmanager
def _opened(folder: str | Path | FolderLayer | None, mesh: RankMesh, token_axis: Axis) -> Iterator[FolderLayer | None]:
    """Yield the layer of an open folder, or open a path and yield its only layer. An error releases the path."""
    if folder is None or isinstance(folder, FolderLayer):
        yield folder
        return
    opened = open_folder(folder, mesh, token_axis)
    with opened.released_on_error():
        if opened.layer_count > 1:
            fix = "call hf.ShardedCache(config, mesh, folder=path)"
            raise StoreError("KVCache folder", "a folder of one layer", f"{opened.layer_count} in {folder}", fix)
        yield FolderLayer(opened, 0)


def _memory_shard_maker(
    config: CacheConfig, mesh: RankMesh, device: torch.device, shares: Sequence[float] | str | None
) -> Callable[[int], CacheShard]:
    """Return what makes a shard in memory: on the CPU if the cache has `hot`. Collective, as `_agreed_block_cyclic`."""
    shard_device = device if config.hot is None else torch.device("cpu")
    return partial_of(MemoryShard, config, mesh.heads, _agreed_block_cyclic(config, mesh, device, shares), shard_device)


def _tiered_shard_maker(
    make_cold: Callable[[int], CacheShard], config: CacheConfig, device: torch.device, fail: Fail
) -> Callable[[int], CacheShard]:
    """Return `make_cold`, or with `hot` what makes a tiered shard over the one that `make_cold` returns."""
    return make_cold if config.hot is None else lambda index: TieredShard(make_cold(index), config, device, fail)


def _agreed_block_cyclic(
    config: CacheConfig, mesh: RankMesh, device: torch.device, shares: Sequence[float] | str | None
) -> BlockCyclic:
    """Return the assignment of tokens to ranks. Collective: "auto" measures the shares of all ranks."""
    parts = agreed_shares(mesh, device, config.nbytes) if isinstance(shares, str) else shares
    return BlockCyclic.of(config.block, mesh.queries.size * mesh.keys.size, parts)
