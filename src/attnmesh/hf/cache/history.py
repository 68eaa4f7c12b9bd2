"""The knowledge that a `ShardedCache` has of its tokens, beside their keys and values."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor
from transformers import PreTrainedConfig

from attnmesh.hf.images.inputs import NO_SHIFT, PositionShift, shift_of


@dataclass
class CacheHistory:
    """Record of the tokens of a cache. `CacheHistory()` is the record of an empty cache."""

    tokens: Tensor | None = None
    """Ids of the tokens, as `ShardedCache.tokens` has them."""
    image_fingerprints: dict[str, Tensor] | None = None
    """Fingerprints of the images among the tokens; None if there are none, or if they are unknown."""
    shift: PositionShift | None = NO_SHIFT
    """The shift of the positions of the text after images; None if unknown."""
    rope_regime: tuple[int, ...] | None = None
    """`rope_regime` of the cached keys; None if they were not cached by `attnmesh.hf.generate`."""
    is_consistent: bool = True
    """False while the model runs: after an error, recurrent states may be ahead of the tokens."""
    rollback_length: int | None = None
    """Tokens before a call of `decode_rows` that has not ended; None if there is no such call."""
    lowest: int = 0
    """`HeldTokens.lowest` of all ranks, after an error left some ranks ahead: those ranks have forgotten more."""

    @staticmethod
    def of(tokens: Tensor | None, config: PreTrainedConfig) -> "CacheHistory":
        """Return the record of a cache that was restored with these tokens."""
        return CacheHistory(tokens, shift=shift_of(tokens, config))


class HeldTokens(NamedTuple):
    """Numbers of the tokens that a cache holds: on one rank, or on all of several."""

    shortest: int
    """Tokens in the layer that has the fewest. An interrupted forward pass leaves layers of different lengths."""
    named: int
    """Tokens whose ids are known."""
    lowest: int
    """Fewest tokens to which all layers can go back, besides 0: they can always drop all tokens."""
    is_interrupted: int
    """True if an error broke off a forward pass."""

    @classmethod
    def of_ranks(cls, numbers_by_rank: Sequence[Sequence[int]]) -> "HeldTokens":
        """Return what holds on all ranks, from the numbers of each."""
        shortest, named, lowest, is_interrupted = zip(*numbers_by_rank, strict=True)
        return cls(min(shortest), min(named), max(lowest), max(is_interrupted))
