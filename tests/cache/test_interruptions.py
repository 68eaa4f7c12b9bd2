"""Ctrl-C at any point of a call that changes a cache leaves it as it was before the call, or as it is after it."""

from collections.abc import Callable, Iterator
from functools import cache as cached
from itertools import count

import pytest
import torch
from torch import Tensor

import attnmesh as am
from attnmesh import errors
from tests.support.caches.make import random_cache
from tests.support.process.interrupts import interrupt
from tests.support.truth.problems import numbers
from tests.support.truth.tolerances import FLOAT32

TOKENS = 41

STEPS = [19, pytest.param(7, marks=pytest.mark.long)]
"""Every such point is tried, another first one for each kind and change: with 1, all of them, in a few minutes."""


def with_copy(cache: am.KVCache) -> am.KVCache:
    """Return the cache with a copy of its shard, as one of another rank's would be."""
    cache.local_shards.copy_shards = {0: cache.own_shard.clone()}
    return cache


KINDS: dict[str, Callable[[], am.KVCache]] = {
    "plain": lambda: random_cache(TOKENS - 1, batch=2),
    "padded": lambda: random_cache(TOKENS - 1, batch=2, padding=7),
    "forked": lambda: random_cache(TOKENS - 1, batch=2).fork(),
    "padded fork": lambda: random_cache(TOKENS - 1, batch=2, padding=7).fork(),
    "window": lambda: random_cache(TOKENS - 1, batch=2, mask=am.Window(12), keep=3),
    "padded window": lambda: random_cache(TOKENS - 1, batch=2, padding=7, mask=am.Window(12), keep=3),
    "hot": lambda: random_cache(TOKENS - 1, batch=2, hot=12),
    "forked hot": lambda: random_cache(TOKENS - 1, batch=2, hot=12).fork(),
    "copies": lambda: with_copy(random_cache(TOKENS - 1, batch=2)),
    "padded copies": lambda: with_copy(random_cache(TOKENS - 1, batch=2, padding=7)),
}


def new_tokens(cache: am.KVCache, tokens: int, seed: int = 1) -> tuple[Tensor, Tensor]:
    k, v = numbers(2, cache.config.batch, 2, tokens, 8, seed=seed)
    return k, v


def mask_of(cache: am.KVCache, tokens: int) -> Tensor | None:
    """Return a mask of new tokens with padding, for a batch that has some."""
    if cache.own_shard.padding is None:
        return None
    token_mask = torch.ones(cache.config.batch, tokens, dtype=torch.bool)
    token_mask[-1, :1] = False
    return token_mask


def append(cache: am.KVCache, tokens: int) -> None:
    cache.append(*new_tokens(cache, tokens), token_mask=mask_of(cache, tokens))


def made(kind: str) -> am.KVCache:
    """Return a cache of a kind, to which one token was appended: more tokens of that number take the short way."""
    cache = KINDS[kind]()
    append(cache, 1)
    return cache


def append_shard(cache: am.KVCache) -> None:
    order = torch.arange(9).flip(0)
    k, v = (x[:, :, order] for x in new_tokens(cache, 9))
    if not cache.local_shards.copy_shards:
        cache.append_shard(k, v, cache.length + order, token_mask=mask_of(cache, 9), queries=9)


CHANGES: dict[str, Callable[[am.KVCache], object]] = {
    "append one": lambda cache: append(cache, 1),
    "append some": lambda cache: append(cache, 33),
    "append_shard": append_shard,
    "truncate": lambda cache: cache.truncate(TOKENS - 2),
    "truncate into a fork": lambda cache: cache.truncate(0 if cache.config.mask else 6),
    "truncate to nothing": lambda cache: cache.truncate(0),
    "reorder": lambda cache: cache.reorder(torch.tensor([1, 0])),
    "repeat": lambda cache: cache.reorder(torch.tensor([1, 1])),
    "grow": lambda cache: cache.reorder(torch.tensor([1, 0, 1])),
    "shrink": lambda cache: cache.reorder(torch.tensor([1])),
    "fork": lambda cache: cache.fork(),
    "reserve": lambda cache: cache.reserve(300),
}


def looks(cache: am.KVCache) -> Iterator[Tensor]:
    """Yield what the shards of a cache hold, and what a step reads of them."""
    yield torch.tensor([cache.config.batch, cache.local_shards.counter.length, cache.rewrites])
    for shard in cache.local_shards.shards:
        pieces = [*shard.view.earlier_pieces, shard.view]
        counts = [int(piece.device_counts[1]) for piece in pieces]
        index = torch.cat([piece.token_index[:used] for piece, used in zip(pieces, counts, strict=True)])
        yield torch.tensor([shard.length])
        seen = index >= cache.local_shards.oldest_kept_token(cache.length)
        yield index[seen]
        for rows in ([piece.keys for piece in pieces], [piece.values for piece in pieces]):
            yield torch.cat([x[:, :, :used] for x, used in zip(rows, counts, strict=True)], 2)[:, :, seen]
        if shard.padding is not None:
            yield shard.padding.lengths
            yield shard.padding.token_mask[:, : shard.length]
            positions = [piece.padding.positions[:, :used] for piece, used in zip(pieces, counts, strict=True)]
            yield torch.cat(positions, 1)[:, seen]
    if cache.length:
        mask = cache.config.mask or am.Causal()
        yield am.decode(numbers(1, cache.config.batch, 4, 1, 8, seed=2)[0], cache, mask=mask)


def state(cache: am.KVCache) -> list[Tensor]:
    """Return what a cache holds now, and what it holds once a few more tokens have come, one by one and at once."""
    found = [*looks(cache)]
    for tokens in (1, 30):
        k, v = new_tokens(cache, tokens, seed=3)
        cache.append(k, v, token_mask=mask_of(cache, tokens))
        found += looks(cache)
    return found


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(
        x.shape == y.shape and torch.allclose(x, y, rtol=0, atol=FLOAT32) for x, y in zip(one, other, strict=True)
    )


@cached
def unchanged(kind: str) -> list[Tensor]:
    """Return the state of a cache before all changes."""
    return state(made(kind))


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("step", STEPS)
def test_an_interrupted_call_is_made_or_not(kind: str, change: str, step: int) -> None:
    """A cache that forgets may have forgotten tokens for the call, and then refuses what needs them."""
    after = made(kind)
    CHANGES[change](after)
    wanted = [unchanged(kind), state(after)]
    wrong = []
    for number in count(len(kind + change) % step, step):
        cache = made(kind)
        if (place := interrupt(lambda: CHANGES[change](cache), number)) is None:  # noqa: B023
            break
        try:
            found = state(cache)
            if not any(same(found, expected) for expected in wanted):
                wrong.append((number, *place))
        except errors.InputError as error:
            if cache.config.mask is None or "forgotten" not in str(error):
                wrong.append((number, *place, repr(error)))
        except Exception as error:
            wrong.append((number, *place, repr(error)))
    assert number > 20 or (change == "append_shard")
    assert not wrong
