"""Reading caches from a folder: each rank those of its tokens, whoever wrote them."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from attnmesh.decode.cache_config import Sizes
from attnmesh.decode.cache_shard import CacheShard
from attnmesh.decode.checkpoint import MORE, Header, files_of, folder_of, opened
from attnmesh.decode.tensor_file import FIX, Stored, memory
from attnmesh.errors import ShapeError, StoreError
from attnmesh.mesh.axes import Axis, Mesh, overlap


class Found(NamedTuple):
    """A folder of savings, as this rank finds it."""

    header: Header
    path: Path
    sizes: tuple[Sizes, ...]  # of the caches to be filled
    real: Tensor | None
    more: dict[str, Tensor]


def inspect(
    path: object, mesh: Mesh, device: torch.device, layers: int | None, capacity: int | None, copies: int
) -> Found:
    """What is there to be loaded; an error if it cannot be."""
    folder = folder_of("load", path)
    header = opened(folder)
    if layers not in (None, len(header.sizes)):
        given, fix = f"{len(header.sizes)} in {folder}", "load the layers of a model with hf.ShardedCache.load"
        raise StoreError("load", f"a cache of {layers} layer", given, fix)
    sizes = tuple(each if capacity is None else replace(each, capacity=capacity) for each in header.sizes)
    for each in sizes:
        if fault := each.fault(mesh.heads.size):
            raise fault
        if header.length > each.capacity:
            given, fix = f"{header.length} in a capacity of {each.capacity}", "say a larger capacity="
            raise ShapeError("load", "room for the tokens that were saved", given, fix)
    check_memory(sizes, mesh, device, copies, padded=header.padded)
    return Found(header, folder, sizes, *more_of(folder, header))


def check_memory(layers: Sequence[Sizes], mesh: Mesh, device: torch.device, copies: int, *, padded: bool) -> None:
    """A file may say anything: nothing is reserved that the device could not hold."""
    room = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else memory()
    needed = 0
    for sizes in layers:
        tokens = -(-sizes.capacity // (mesh.queries.size * mesh.keys.size)) + sizes.block
        columns = sizes.batch * sizes.kv_heads // mesh.heads.size * (sizes.head_dim + sizes.value_dim)
        needed += copies * tokens * (columns * sizes.dtype.itemsize + 8)
        needed += copies * sizes.batch * (sizes.capacity + 8 * tokens) if padded else 0
    if needed > room:
        given = f"{needed / 1e9:,.1f} GB for a capacity of {layers[0].capacity:,}"
        raise StoreError("load", f"at most this device's {room / 1e9:,.1f} GB", given, "say a smaller capacity=")


def more_of(path: Path, header: Header) -> tuple[Tensor | None, dict[str, Tensor]]:
    """What was saved that belongs to no rank: which tokens are real, if any was not, and what the caller gave."""
    file = path / header.folder / MORE
    if not header.more:
        return None, {}
    stored = Stored(file)
    real = stored.read("real", torch.bool, (header.sizes[0].batch, header.length)) if header.padded else None
    names = [name for name in stored.entries if name.startswith("more ")]
    return real, {name.removeprefix("more "): stored.read(name) for name in names}


def fill(rooms: Sequence[CacheShard], path: Path, header: Header) -> None:
    """Read this rank's tokens, wherever they were."""
    first = rooms[0]
    held = first.block_cyclic.count(first.index, header.length)
    found = torch.zeros(header.heads, held, dtype=torch.bool)  # of those who wrote, by their place along the heads
    for file in files_of(path, header):
        stored = Stored(file.path)
        columns = stored.read("columns", torch.int64, (file.stop - file.start,))
        mine = (first.block_cyclic.owner(columns) == first.index).nonzero().flatten()
        slots = first.block_cyclic.slot(columns[mine])
        if len(columns) and (int(columns.min()) < 0 or int(columns.max()) >= header.length):
            raise StoreError("load", "every token once", f"tokens beyond the last in {file.path}", FIX)
        if bool(found[file.heads, slots].any()) or len(slots.unique()) < len(slots):
            raise StoreError("load", "every token once", f"some twice in {file.path}", FIX)
        found[file.heads, slots] = True
        for layer, room in enumerate(rooms) if len(mine) else ():
            _copy(room, stored, layer, Axis(header.heads, file.heads), mine, slots, len(columns))
        first.token_index[slots.to(first.device)] = columns[mine].to(first.device)
    for room in rooms:
        needed = [_shared(room, Axis(header.heads, h)) is not None for h in range(header.heads)]
        if not bool(found[needed].all()):
            given = f"{int(found[needed].all(0).sum())} of this rank's {held} tokens in {path}"
            raise StoreError("load", "every token once", given, FIX)
        room.token_index[:held] = first.token_index[:held]


def _copy(room: CacheShard, stored: Stored, layer: int, wrote: Axis, mine: Tensor, slots: Tensor, tokens: int) -> None:
    """Of a file that was written at that place along the heads, this rank's heads and tokens."""
    shared = _shared(room, wrote)
    if shared is None:
        return
    into, of = shared
    sizes, heads = room.sizes, wrote.share_of(room.sizes.kv_heads)
    for name, x, width in (("keys", room.keys, sizes.head_dim), ("values", room.values, sizes.value_dim)):
        read = stored.read(f"{name} {layer}", x.dtype, (sizes.batch, heads.stop - heads.start, tokens, width))
        x[:, into].index_copy_(2, slots.to(room.device), read[:, of, mine].to(room.device))


def _shared(room: CacheShard, wrote: Axis) -> tuple[slice, slice] | None:
    """The heads that a rank and one that wrote have in common: which of the one's, and of the other's."""
    into, of = overlap(room.heads.share_of(room.sizes.kv_heads), wrote.share_of(room.sizes.kv_heads))
    return (into, of) if into.start < into.stop else None
