"""Chunks of a prompt: the tokens of each forward pass, and whether ranks share them."""

from itertools import pairwise

from transformers import PreTrainedConfig

from attnmesh.hf.cache.sharded_cache import ShardedCache
from attnmesh.hf.families.family import family_of
from attnmesh.hf.images.spans import Chunk
from attnmesh.hf.latent_states import latent_widths
from attnmesh.hf.models import is_recurrent

CHUNK = 8192
"""Tokens per chunk after cached tokens or with padding. There, every rank attends the queries of all ranks."""

LATENT_CHUNK = 1024
"""The same in latent attention, whose queries of cached latents are wide."""


def default_size(config: PreTrainedConfig) -> int:
    """Return the tokens of such a chunk of a model."""
    return CHUNK if latent_widths(config) is None else LATENT_CHUNK


def left_to_decode(config: PreTrainedConfig) -> int:
    """Return the tokens of a prompt that are left to the first forward pass of decoding.

    Two in models that compute one token by another rule than several: transformers bounds time steps in one of them.
    """
    family = family_of(config)
    return 2 if family.recurrences and not family.begins_at_zero else 1


def chunks_of(cache: ShardedCache, start: int, stop: int, size: int) -> list[Chunk]:
    """Return chunks of a prompt (first, stop, sharded)."""
    if cache.shares > 1:  # ranks that share weights compute the same tokens
        return [(first, last, False) for first, last in pairwise([*range(start, stop, size), stop])]
    if is_recurrent(cache.config):
        return _split_evenly(start, stop, cache.ranks, size, family_of(cache.config).begins_at_zero)
    return _split_prompt(start, stop, cache.block * cache.ranks, size)


def _split_evenly(start: int, stop: int, ranks: int, size: int, steps_alone: bool) -> list[Chunk]:
    """Return chunks with equally many tokens on each rank, and the rest, which all ranks compute.

    The rest is one token at a time with `steps_alone`, and otherwise more than one: then a single token is left out.

    >>> _split_evenly(0, 11, 4, 8, False), _split_evenly(0, 9, 4, 8, False), _split_evenly(0, 10, 4, 8, True)
    ([(0, 8, True), (8, 11, False)], [(0, 4, True), (4, 9, False)], [(0, 8, True), (8, 9, False), (9, 10, False)])
    """
    even = (stop - start) // ranks * ranks
    if not steps_alone and stop - start - even == 1:
        even = max(even - ranks, 0)
    size, edge = max(size // ranks, 1) * ranks, start + even
    chunks = [(first, last, True) for first, last in pairwise([*range(start, edge, size), edge])]
    if steps_alone:
        return chunks + [(token, token + 1, False) for token in range(edge, stop)]
    return chunks + [(edge, stop, False)] * (stop - edge > 1)


def _split_prompt(start: int, stop: int, unit: int, size: int) -> list[Chunk]:
    """Return chunks (first, stop, sharded). Sharded chunks begin at multiples of `unit`, a full round of blocks.

    >>> _split_prompt(0, 100, 32, 64), _split_prompt(20, 100, 32, 100)
    ([(0, 64, True), (64, 100, True)], [(20, 32, False), (32, 100, True)])
    """
    aligned, size = -(-start // unit) * unit, max(size // unit, 1) * unit
    if stop - aligned < unit:
        return [(start, stop, False)] if stop > start else []
    edges = [*range(aligned, stop - unit + 1, size), stop]
    head = [(start, aligned, False)] if aligned > start else []
    return head + [(first, last, True) for first, last in pairwise(edges)]
