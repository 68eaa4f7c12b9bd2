"""A cache in files: each rank writes its own tokens; on any number of ranks each reads those dealt to it."""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from attnmesh.deal import Deal
from attnmesh.errors import StoreError
from attnmesh.mesh import Axis
from attnmesh.padding import Padding
from attnmesh.sizes import Sizes
from attnmesh.store import FIX, Stored, write

VERSION = 1

HEADER = "attnmesh cache"

PIECE = 4096
"""Tokens that are saved as one tensor, so that a rank need not read all of another's to find its own."""


class Share(NamedTuple):
    """A rank's tensors, and which part of the whole they are."""

    keys: Tensor
    values: Tensor
    columns: Tensor  # the token in each slot
    sizes: Sizes
    heads: Axis
    tokens: Axis
    deal: Deal


def save(path: str | Path, share: Share, used: int, length: int, padding: Padding | None, ranks: Axis) -> None:
    """Write `used` tokens of this rank; the first rank adds what is said of the whole."""
    here = f"{share.heads.index}.{share.tokens.index}"
    tensors = {f"{here} columns": share.columns[:used]}
    for piece, start in enumerate(range(0, used, PIECE)):
        for name, x in (("keys", share.keys), ("values", share.values)):
            tensors[f"{here} {name} {piece}"] = x[:, :, start : min(start + PIECE, used)]
    if share.heads.index == share.tokens.index == 0:
        place = [padding is not None, length, share.heads.size, share.tokens.size]
        tensors[HEADER] = torch.tensor([VERSION, *share.sizes.encode(), *place])
        if padding is not None:
            tensors["real"] = padding.real[:, :length]
    write(path, tensors, ranks)


class Header(NamedTuple):
    """What is said of the whole."""

    sizes: Sizes
    padded: bool
    length: int
    heads: int
    ranks: int


def opened(path: str | Path) -> tuple[Stored, Header]:
    """A saved cache, and what is said of it."""
    stored = Stored(path)
    (header,) = stored.read([HEADER])
    version, *code = header.tolist()
    if version != VERSION or len(code) != 11:
        fix = "load it with the version of attnmesh that saved it"
        raise StoreError("load", f"a cache of version {VERSION}", f"version {version}", fix)
    padded, length, heads, ranks = code[7:]
    return stored, Header(Sizes.decode(code[:7]), bool(padded), length, heads, ranks)


def fill(share: Share, stored: Stored, header: Header) -> int:
    """Read this rank's tokens, wherever they were; how many they are."""
    held, found = share.deal.count(share.tokens.index, header.length), 0
    for shard, into, of in _shards(share, header):
        found += (into.stop - into.start) * _fill_from(share, stored, shard, into, of)
    own = share.sizes.kv_heads // share.heads.size
    if found != held * own:
        given = f"{found // own} of this rank's {held} tokens in {stored.path}"
        raise StoreError("load", "every token once", given, FIX)
    return held


def _shards(share: Share, header: Header) -> Iterator[tuple[str, slice, slice]]:
    """The saved shards that have some of this rank's heads, and which: by its own counting, and by the shard's."""
    own = _heads(share.sizes.kv_heads, share.heads.size, share.heads.index)
    for h, t in ((h, t) for h in range(header.heads) for t in range(header.ranks)):
        theirs = _heads(share.sizes.kv_heads, header.heads, h)
        both = range(max(own.start, theirs.start), min(own.stop, theirs.stop))
        if both:
            into, of = (slice(both.start - x.start, both.stop - x.start) for x in (own, theirs))
            yield f"{h}.{t}", into, of


def _fill_from(share: Share, stored: Stored, shard: str, into: slice, of: slice) -> int:
    """How many of a saved shard's tokens are dealt to this rank here."""
    (columns,), found, device = stored.read([f"{shard} columns"]), 0, share.keys.device
    for piece, tokens in enumerate(columns.split(PIECE) if len(columns) else ()):
        mine = (share.deal.owner(tokens) == share.tokens.index).nonzero().flatten()
        if len(mine):
            slots = share.deal.slot(tokens[mine]).to(device)
            share.columns[slots] = tokens[mine].to(device)
            read = stored.read([f"{shard} keys {piece}", f"{shard} values {piece}"])
            for held, x in zip((share.keys, share.values), read, strict=True):
                held[:, into].index_copy_(2, slots, x[:, of, mine].to(device))
            found += len(mine)
    return found


def _heads(count: int, axis: int, index: int) -> range:
    """The key heads of a rank along the heads axis."""
    return range(index * count // axis, (index + 1) * count // axis)
