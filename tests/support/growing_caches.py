"""Caches that grow by tokens whose keys and values depend on their positions alone."""

import torch
from torch import Tensor

import attnmesh as am


def rows(start: int, stop: int, batch: int = 1, dim: int = 16) -> tuple[Tensor, Tensor]:
    """Return keys and values of two heads that only depend on the tokens."""
    tokens = torch.arange(start, stop, dtype=torch.float64)[:, None]
    x = (tokens * torch.arange(1, 2 * batch * 2 * dim + 1) * 0.618).sin()
    k, v = x.view(-1, 2, batch, 2, dim).permute(1, 2, 3, 0, 4).float().unbind()
    return k, v


def grow(cache: am.KVCache, more: int) -> None:
    """Append the next tokens."""
    cache.append(*rows(cache.length, cache.length + more, cache.sizes.batch, cache.sizes.head_dim))
