"""The knowledge that a `ShardedCache` has of its tokens, beside their keys and values."""

from dataclasses import dataclass

from torch import Tensor
from transformers import PreTrainedConfig

from attnmesh.hf.images.inputs import NO_SHIFT, PositionShift, shift_of


@dataclass
class CacheHistory:
    """Record of the tokens of a cache. That of an empty cache is `CacheHistory()`."""

    tokens: Tensor | None = None
    """`tokens` of the cache."""
    image_fingerprints: dict[str, Tensor] | None = None
    """Fingerprints of the images among the tokens; None if there are none, or if they are unknown."""
    shift: PositionShift | None = NO_SHIFT
    """The shift of the positions of the text after images; None if unknown."""
    rope_regime: tuple[int, ...] | None = None
    """`rope_regime` of the cached keys; None if they were not cached by `attnmesh.hf.generate`."""
    is_consistent: bool = True
    """False while the model runs: after an error, recurrent states may be ahead of the tokens."""
    rollback_length: int | None = None
    """Tokens before a call of `decode_rows` that has not ended."""

    @staticmethod
    def of(tokens: Tensor | None, config: PreTrainedConfig) -> "CacheHistory":
        """Return the record of a cache that was restored with these tokens."""
        return CacheHistory(tokens, shift=shift_of(tokens, config))
