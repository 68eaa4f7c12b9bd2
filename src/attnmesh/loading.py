"""Reading caches from a folder: each rank those of its tokens, whoever wrote them."""

import os
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from attnmesh.errors import StoreError
from attnmesh.mesh import Axis, Mesh, overlap
from attnmesh.saved import MORE, Header, Share, files_of
from attnmesh.sizes import Sizes
from attnmesh.store import FIX, Stored


def check_memory(layers: Sequence[Sizes], mesh: Mesh, device: torch.device) -> None:
    """A file may say anything: nothing is reserved that the device could not hold."""
    if device.type == "cuda":
        room = torch.cuda.get_device_properties(device).total_memory
    else:
        room = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    needed = 0
    for sizes in layers:
        tokens = -(-sizes.capacity // (mesh.queries.size * mesh.keys.size)) + sizes.block
        columns = sizes.batch * sizes.kv_heads // mesh.heads.size * (sizes.head_dim + sizes.value_dim)
        needed += tokens * (columns * sizes.dtype.itemsize + 8)
    if needed > room:
        given = f"{needed / 1e9:,.1f} GB for a capacity of {layers[0].capacity:,}"
        raise StoreError("load", f"at most this device's {room / 1e9:,.1f} GB", given, "say a smaller capacity=")


def more_of(path: Path, header: Header) -> dict[str, Tensor]:
    """What was saved that belongs to no rank."""
    file = path / str(header.saving) / MORE
    stored = Stored(file) if file.exists() else None
    more = {} if stored is None else {name: stored.read(name) for name in stored.entries}
    real = more.get("real")
    shape = header.sizes[0].batch, header.length
    if header.padded and (real is None or real.dtype != torch.bool or tuple(real.shape) != shape):
        given = "nothing" if real is None else f"{real.dtype} {tuple(real.shape)}"
        raise StoreError("load", f"which of {shape} tokens are real", f"{given} in {file}", FIX)
    return more


def fill(shares: Sequence[Share], path: Path, header: Header) -> int:
    """Read this rank's tokens, wherever they were; how many they are."""
    share = shares[0]
    held, found = share.deal.count(share.tokens.index, header.length), [0] * len(shares)
    for h, _, _, file in files_of(path, header):
        stored = Stored(file)
        columns = stored.read("columns")
        if columns.dtype != torch.int64 or columns.ndim != 1:
            raise StoreError("load", "the token in each slot", f"{columns.dtype} in {file}", FIX)
        mine = (share.deal.owner(columns) == share.tokens.index).nonzero().flatten()
        slots = share.deal.slot(columns[mine])
        if len(mine) and (int(columns.min()) < 0 or int(slots.max()) >= held):
            raise StoreError("load", "every token once", f"tokens beyond the last in {file}", FIX)
        for layer, each in enumerate(shares) if len(mine) else ():
            found[layer] += len(mine) * _copy(each, stored, layer, Axis(header.heads, h), mine, slots, len(columns))
        share.columns[slots.to(share.columns.device)] = columns[mine].to(share.columns.device)
    for layer, each in enumerate(shares):
        own = each.sizes.kv_heads // each.heads.size
        if found[layer] != held * own:
            given = f"{found[layer] // own} of this rank's {held} tokens in {path}"
            raise StoreError("load", "every token once", given, FIX)
        each.columns[:held] = share.columns[:held]
    return held


def _copy(share: Share, stored: Stored, layer: int, wrote: Axis, mine: Tensor, slots: Tensor, tokens: int) -> int:
    """Of a file that was written at that place along the heads, this rank's heads and tokens; how many heads."""
    sizes, device = share.sizes, share.keys.device
    theirs = wrote.own(sizes.kv_heads)
    into, of = overlap(share.heads.own(sizes.kv_heads), theirs)
    heads: int = into.stop - into.start
    if not heads:
        return 0
    for name, x, width in (("keys", share.keys, sizes.head_dim), ("values", share.values, sizes.value_dim)):
        read, shape = stored.read(f"{name} {layer}"), (sizes.batch, theirs.stop - theirs.start, tokens, width)
        if tuple(read.shape) != shape or read.dtype != x.dtype:
            given = f"{read.dtype} {tuple(read.shape)} in {stored.path}"
            raise StoreError("load", f"{x.dtype} {shape}", given, FIX)
        x[:, into].index_copy_(2, slots.to(device), read[:, of, mine].to(device))
    return heads
