"""What ranks do again and again: each work is made once, and every step of it gives the same answer."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import attnmesh as am
from attnmesh.decode import checkpoint
from attnmesh.errors import StoreError

LENGTHS = 2000, 2050, 2300
"""Tokens that the cache has when it is saved, in turn: the number of a saving tells how many it should hold."""

Step = Callable[[], Sequence[Tensor]]


def _shards() -> list[Tensor]:
    generator = torch.Generator().manual_seed(dist.get_rank())
    return [torch.randn(1, heads, 64, 16, generator=generator) for heads in (4, 2, 2)]


def _prefill(mesh: Any, _: Path, __: dict[str, Any]) -> Step:
    q, k, v = _shards()
    where = {"mesh": mesh, "layout": am.Zigzag()}
    return lambda: [am.attention(q, k, v, **where, exchange=name) for name in ("bulk", "pipelined", "ring")]


def _training(mesh: Any, _: Path, __: dict[str, Any]) -> Step:
    heads = [x.requires_grad_() for x in _shards()]

    def step() -> Sequence[Tensor]:
        out = am.attention(*heads, mesh=mesh, layout=am.Zigzag())
        return out.detach(), *torch.autograd.grad(out.square().sum(), heads)

    return step


def _decoding(mesh: Any, _: Path, __: dict[str, Any]) -> Step:
    cache = _cache(mesh, 60)
    return lambda: [am.decode(_query(), cache, merge=merge) for merge in ("tree", "direct", "gather")]


def _saving(mesh: Any, folder: Path, told: dict[str, Any]) -> Step:
    """Decoding, with a saving after each; where one is refused, the one before it is loaded and has to be right."""
    cache, answers, last = _cache(mesh, LENGTHS[0]), {}, [0]

    def step() -> Sequence[Tensor]:
        for length in LENGTHS:
            cache.truncate(min(cache.length, length))
            cache.append(*_tokens()[:, :, :, cache.length : length])
            answers[length] = am.decode(_query(), cache)
            try:
                cache.save(folder)
                told["saved"] += 1
                last[0] = length
            except StoreError as error:
                told["refused"] = str(error)
                again = am.KVCache.load(folder, mesh)
                if again.length != last[0]:
                    raise AssertionError(f"{again.length} tokens, and not {last[0]}") from error
                answers[again.length] = am.decode(_query(), again)
        return [answers[length] for length in LENGTHS]

    return step


def _loading(mesh: Any, folder: Path, told: dict[str, Any]) -> Step:
    """First decoding with a cache that was never saved, then with the one in the folder."""
    header = checkpoint.read_manifest(folder)
    told["saved"] = header.saving
    caches = [_cache(mesh, header.length), am.KVCache.load(folder, mesh)]
    return lambda: [am.decode(_query(), caches.pop(0) if len(caches) > 1 else caches[0])]


WORKS = {"prefill": _prefill, "training": _training, "decoding": _decoding, "saving": _saving, "loading": _loading}


def length_of(number: int) -> int:
    """Tokens that the saving of that number holds."""
    return LENGTHS[(number - 1) % len(LENGTHS)]


def _tokens() -> Tensor:
    return torch.randn(2, 1, 2, max(LENGTHS), 16, generator=torch.Generator().manual_seed(0))


def _query() -> Tensor:
    return torch.randn(1, 4, 1, 16, generator=torch.Generator().manual_seed(1))


def _cache(mesh: Any, length: int) -> am.KVCache:
    cache = am.KVCache(mesh, batch=1, kv_heads=2, head_dim=16, capacity=max(LENGTHS), dtype=torch.float32)
    cache.append(*_tokens()[:, :, :, :length])
    return cache
