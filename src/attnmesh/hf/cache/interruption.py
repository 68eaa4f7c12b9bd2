"""How a `ShardedCache` goes back after an error has interrupted a forward pass, to tokens that all ranks have."""

from collections.abc import Sequence
from typing import NamedTuple

from attnmesh.hf.cache.stored_layers import StoredLayers


class HeldCounts(NamedTuple):
    """Numbers of the tokens that a cache holds: on one rank, or on all of several."""

    shortest: int
    """Tokens in the layer that has the fewest. An interrupted forward pass leaves layers of different lengths."""
    named: int
    """Tokens whose ids are known."""
    lowest: int
    """Fewest tokens to which all layers can go back, besides 0: they can always drop all tokens."""
    is_interrupted: int
    """True if an error broke off a forward pass, or a reorder."""

    @classmethod
    def of_ranks(cls, numbers_by_rank: Sequence[Sequence[int]]) -> "HeldCounts":
        """Return what holds on all ranks, from the numbers of each."""
        shortest, named, lowest, is_interrupted = zip(*numbers_by_rank, strict=True)
        return cls(min(shortest), min(named), max(lowest), max(is_interrupted))


def held_counts(cache: StoredLayers) -> HeldCounts:
    """Return the numbers of the tokens that a cache holds on this rank."""
    counts = {count for layer in cache.attention_layers for count in layer.token_counts} or {cache.get_seq_length()}
    is_mixed = cache.history.is_mixed
    is_interrupted = not cache.history.is_consistent or is_mixed or len(counts) > 1
    if cache.irreversible_layers or is_mixed:
        lowest = min(counts) + is_interrupted
    else:
        all_shards = [kv_cache.local_shards for kv_cache in cache.kv_caches]
        lowest = max((0 if shards.serves(0) else shards.oldest_query for shards in all_shards), default=0)
    named = 0 if cache.tokens is None else cache.tokens.shape[1]
    return HeldCounts(min(counts), named, lowest, is_interrupted)


def truncate_to_shortest(cache: StoredLayers, counts: HeldCounts) -> None:
    """If an error interrupted a rank, truncate all layers to the shortest layer of all ranks.

    If one layer has forgotten what it needs there, all layers drop all tokens. `counts` is of all ranks, so that they
    decide alike. Every rank calls it.
    """
    cache.history.rollback_length = None
    if not counts.is_interrupted:
        return
    if counts.shortest < counts.lowest or not counts.shortest:
        cache.reset()
        return
    _go_back(cache, counts.shortest, counts.named)
    cache.history.lowest = counts.lowest


def length_before_step(cache: StoredLayers) -> int:
    """Return the number of cached tokens, without those of an interrupted step of rows."""
    length = cache.history.rollback_length
    return int(cache.get_seq_length()) if length is None else length


def can_continue(cache: StoredLayers) -> bool:
    """Return True if no error interrupted a cache, or only a step of rows, before which all layers can go back.

    The cache does not learn of an error in the caller's own call of the model. But the last layer then lacks the
    tokens that the first one has.
    """
    length = cache.history.rollback_length
    if cache.history.is_mixed:
        return False
    if length is None:
        layers = cache.attention_layers
        counts = {count for layer in (*layers[:1], *layers[-1:]) for count in layer.token_counts}
        return cache.history.is_consistent and len(counts) < 2
    is_long = all(kv_cache.length >= length for kv_cache in cache.kv_caches)
    serves = not length or all(kv_cache.local_shards.serves(length) for kv_cache in cache.kv_caches)
    return not cache.irreversible_layers and is_long and serves


def take_back_step(cache: StoredLayers) -> None:
    """Remove the tokens of an interrupted step of rows. Every rank calls it."""
    length = cache.history.rollback_length
    if length is not None:
        _go_back(cache, length, length)
        cache.history.rollback_length = None


def _go_back(cache: StoredLayers, length: int, named: int) -> None:
    """Keep the first `length` tokens of all layers, and the first `named` ids, after an error."""
    for kv_cache in cache.kv_caches:
        kv_cache.truncate(length)
    if cache.tokens is not None:
        cache.tokens = cache.tokens[:, :named]
    cache.history.is_consistent = True
