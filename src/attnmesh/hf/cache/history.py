"""The knowledge that a `ShardedCache` has of its tokens, beside their keys and values."""

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from attnmesh.cache.cache import KVCache
from attnmesh.comm.topology import dist_all_gather_ints
from attnmesh.errors import KernelError
from attnmesh.hf.images.inputs import NO_SHIFT, PositionShift, shift_of


@dataclass
class CacheHistory:
    """Record of the tokens of a cache. `CacheHistory()` is the record of an empty cache."""

    ids: Tensor | None = None
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
    is_mixed: bool = False
    """True while sequences are reordered: after an error, layers may have them in different orders."""
    lowest: int = 0
    """`HeldCounts.lowest` of all ranks, after an error left some ranks ahead: those ranks have forgotten more."""

    def check_order(self, subject: str) -> None:
        """Raise if layers may have the sequences in different orders."""
        if self.is_mixed:
            expected, given = "sequences in one order in all layers", "layers of which an error has reordered some"
            raise KernelError(subject, expected, given, "call reset(), and prefill the prompts again")

    @staticmethod
    def of(ids: Tensor | None, config: PreTrainedConfig) -> "CacheHistory":
        """Return the record of a cache that was restored with these tokens."""
        return CacheHistory(ids, shift=shift_of(ids, config))


def gathered_ids(cached_ids: Tensor | None, kv_cache: KVCache) -> Tensor | None:
    """Return the token ids of the cache, from any rank that has them; None if they cover less than the cache.

    Ranks may differ by the newest token, so the ids are cut to the shortest.
    """
    own_ids = torch.zeros(kv_cache.config.batch, 0, dtype=torch.int64, device="cpu")
    if cached_ids is not None and len(cached_ids) == kv_cache.config.batch:
        own_ids = cached_ids
    lengths = [numbers[0] for numbers in dist_all_gather_ints([own_ids.shape[1]], kv_cache.rank_mesh.axes)]
    length = min(filter(None, lengths), default=0)
    if not length or length < kv_cache.length:
        return None
    own_ids = own_ids[:, :length] if own_ids.shape[1] else own_ids.new_zeros(kv_cache.config.batch, length)
    ids_by_rank = dist_all_gather_ints(own_ids.flatten().tolist(), kv_cache.rank_mesh.axes)
    ids = next(rank_ids for rank_ids, count in zip(ids_by_rank, lengths, strict=True) if count)
    return torch.tensor(ids, device="cpu").view(kv_cache.config.batch, length).to(kv_cache.device)
