"""Caches that grow by tokens whose keys and values depend on their positions alone."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import attnmesh as am
from attnmesh.store.layer_files import PIECE_TOKENS


def rows(start: int, stop: int, batch: int = 1, dim: int = 16) -> tuple[Tensor, Tensor]:
    """Return keys and values of two heads that only depend on the tokens."""
    tokens = torch.arange(start, stop, dtype=torch.float64)[:, None]
    x = (tokens * torch.arange(1, 2 * batch * 2 * dim + 1) * 0.618).sin()
    k, v = x.view(-1, 2, batch, 2, dim).permute(1, 2, 3, 0, 4).float().unbind()
    return k, v


def grow(cache: am.KVCache, more: int) -> None:
    """Append the next tokens."""
    cache.append(*rows(cache.length, cache.length + more, cache.config.batch, cache.config.head_dim))


SIZES: dict[str, Any] = {
    "batch": 1,
    "kv_heads": 2,
    "head_dim": 16,
    "capacity": 4 * PIECE_TOKENS,
    "dtype": torch.float32,
}


def in_memory(length: int, mesh: Any = None, **sizes: Any) -> am.KVCache:
    cache = am.KVCache(mesh, **{**SIZES, **sizes})
    grow(cache, length)
    return cache


def decoded(cache: am.KVCache, queries: int = 1, **options: Any) -> torch.Tensor:
    """Return the output of fixed queries."""
    generator = torch.Generator().manual_seed(1)
    q = torch.randn(cache.config.batch, 4, queries, 16, generator=generator).to(cache.config.dtype)
    return am.decode(q, cache, **options)


def same_outputs(one: am.KVCache, other: am.KVCache, queries: int = 1) -> bool:
    return one.length == other.length and torch.equal(decoded(one, queries), decoded(other, queries))


def opened(path: Path, **sizes: Any) -> am.KVCache:
    return am.KVCache(None, **{**SIZES, **sizes}, folder=path)


def flip(file: Path, place: int) -> None:
    content = bytearray(file.read_bytes())
    content[place] ^= 4
    file.write_bytes(content)


@contextmanager
def full_journal(cache: am.KVCache) -> Iterator[None]:
    """Let no record be written."""
    journal, kept = cache.own_shard.journal, cache.own_shard.journal.handle
    journal.handle = os.open("/dev/full", os.O_RDWR)
    try:
        yield
    finally:
        os.close(journal.handle)
        journal.handle = kept
