"""Prefixes that prompts share: caches that are kept for later requests, and where a cache has to be forked for them."""

from collections import OrderedDict
from collections.abc import Iterable

import torch
from torch import Tensor

from attnmesh.hf.cache.sharded_cache import ShardedCache
from attnmesh.hf.images.inputs import IMAGE_MARK
from attnmesh.hf.serving.engine_request import EngineRequest, Origin
from attnmesh.hf.serving.rank_worker import RankWorker

LEAST_SHARED = 16
"""Fewest tokens that a cache has to share with a prompt: fewer would save little."""


class KeptCaches:
    """Caches of requests that ended, and snapshots of prompts, least recently used first.

    A cache with a window or a state cannot go back to an earlier token. Prompts A and B share 500 tokens: while the
    cache of B has exactly 500, it is forked, and the fork is kept. Prompt C, with the same 500 tokens, goes on from
    this snapshot. Only requests of one salt share caches.
    """

    def __init__(self, worker: RankWorker) -> None:
        self.worker = worker
        self.kept: OrderedDict[int, str] = OrderedDict()
        """Salts of the kept caches by their ids."""
        self.snapshots: set[int] = set()
        self.images_digests: dict[int, bytes] = {}
        """Digests of the images of each cache that has images."""
        self.ids: dict[int, tuple[Tensor | None, Tensor]] = {}
        """Tokens of each cache when it was last looked at, and their copy in CPU memory."""

    def keep(self, cache_id: int, salt: str, *, is_snapshot: bool = False) -> None:
        """Keep a cache for requests of a salt. Those that go on from a snapshot fork it."""
        self.kept[cache_id] = salt
        if is_snapshot:
            self.snapshots.add(cache_id)

    def note_images(self, request: EngineRequest) -> None:
        """Note the images of a request's cache, if it has some."""
        if request.images_digest is not None:
            self.images_digests[request.cache_id] = request.images_digest

    def stop_keeping(self, cache_id: int) -> None:
        """Keep a cache no longer: it is dropped, or is another's now."""
        self.kept.pop(cache_id, None)
        self.snapshots.discard(cache_id)
        self.forget_dropped([cache_id])

    def forget_dropped(self, cache_ids: Iterable[int]) -> None:
        """Forget the images and tokens of caches that are dropped."""
        for cache_id in cache_ids:
            self.images_digests.pop(cache_id, None)
            self.ids.pop(cache_id, None)

    def note_use(self, origin: Origin) -> None:
        """Note that a request goes on from a cache: it takes the cache, or forks it."""
        if origin.source is None:
            return
        if origin.moves:
            self.stop_keeping(origin.source)
        elif origin.source in self.kept:
            self.kept.move_to_end(origin.source)

    def find(self, request: EngineRequest, others: Iterable[EngineRequest]) -> Origin:
        """Return the cache with the longest prefix of a prompt; none if all share fewer than `LEAST_SHARED` tokens.

        Of caches that share equally many, one with the same images is taken. A cache with other images may be returned:
        they are compared when the prompt begins.
        """
        best = (LEAST_SHARED - 1, True)
        origin = Origin()
        ids = request.ids_tensor
        for cache_id in self._caches(request, others):
            cache, cached_ids = self.worker.caches[cache_id], self._ids_of(cache_id)
            common_tokens = self._count_common(cached_ids, ids, pictured=request.images is not None)
            score = common_tokens, self.images_digests.get(cache_id) == request.images_digest
            if score > best and self._serves(cache, common_tokens, len(cached_ids)):
                ended = cache_id in self.kept and cache_id not in self.snapshots
                best = score
                origin = Origin(cache_id, common_tokens, moves=ended and common_tokens >= len(cached_ids) - 1)
        return origin

    def find_parting(self, request: EngineRequest, others: Iterable[EngineRequest]) -> int:
        """Return the most tokens that a prompt shares with a cache, even if this cache cannot go back to their end."""
        ids = request.ids_tensor
        most = 0
        for cache_id in self._caches(request, others) if request.images is None else ():
            most = max(most, self._count_common(self._ids_of(cache_id), ids))
        return most

    def count_shared(self, request: EngineRequest, other: EngineRequest) -> int:
        """Return how many first tokens two prompts share, without those that `request` has to compute itself."""
        differs = request.salt != other.salt or request.prompt[:LEAST_SHARED] != other.prompt[:LEAST_SHARED]
        if differs or request.images is not None or other.images is not None:
            return 0
        return self._count_common(
            other.ids_tensor[: len(other.ids_tensor) - self.worker.left_to_decode], request.ids_tensor
        )

    def _caches(self, request: EngineRequest, others: Iterable[EngineRequest]) -> list[int]:
        """Return the caches of a request's salt whose tokens were computed as those of a prompt are."""
        ended = self.snapshots if self.worker.recomputes_by_token else self.kept
        salts = {cache_id: salt for cache_id, salt in self.kept.items() if cache_id in ended} | {
            other.cache_id: other.salt for other in others
        }
        return [cache_id for cache_id, salt in salts.items() if salt == request.salt and cache_id in self.worker.caches]

    def _ids_of(self, cache_id: int) -> Tensor:
        """Return the tokens of a cache in CPU memory. Only new tokens are copied again: a copy waits for the GPU."""
        ids = self.worker.caches[cache_id].tokens
        if cache_id not in self.ids or self.ids[cache_id][0] is not ids:
            copied = torch.empty(0, device="cpu") if ids is None else ids[0].cpu()
            self.ids[cache_id] = ids, copied
        return self.ids[cache_id][1]

    def _count_common(self, cached_ids: Tensor, ids: Tensor, *, pictured: bool = False) -> int:
        most = max(0, min(len(cached_ids), len(ids) - self.worker.left_to_decode))
        differs = ((cached_ids[:most] != ids[:most]) & ~(pictured & (cached_ids[:most] <= IMAGE_MARK))).nonzero()
        return int(differs[0]) if len(differs) else most

    def _serves(self, cache: ShardedCache, common_tokens: int, cached_length: int) -> bool:
        return (
            common_tokens == cached_length if self.worker.is_recurrent else bool(cache.restorable_length(common_tokens))
        )
