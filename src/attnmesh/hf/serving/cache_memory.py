"""The memory of an engine's caches: how much is free, and which kept caches go for others."""

from collections.abc import Collection, Sequence

from attnmesh.hf.serving.engine_request import EngineRequest
from attnmesh.hf.serving.footprint import Footprint, growth
from attnmesh.hf.serving.guesses import Guesser
from attnmesh.hf.serving.kept_caches import KeptCaches
from attnmesh.hf.serving.rank_worker import RankWorker
from attnmesh.hf.serving.step_plan import StepPlan


class CacheMemory:
    """The caches of an engine, which take at most `limit` bytes on each rank.

    Bytes that a step promises to a cache count as taken before the cache allocates them. These methods alone change
    `drops`, `nbytes` and a step's `promised`.
    """

    def __init__(self, worker: RankWorker, limit: int, guesser: Guesser) -> None:
        self.worker = worker
        self.limit = limit
        self.guesser = guesser
        self.kept_caches = KeptCaches(worker)
        self.footprint: Footprint | None = None
        self.drops: list[int] = []
        """Caches that the next step drops."""
        self.nbytes: list[int] = [0]
        """Bytes of caches by rank, as of the last exchange."""
        self.evicted = 0

    def learn_footprint(self, cache_id: int) -> None:
        """Let the first cache that has tokens show the bytes of all."""
        if self.footprint is None:
            self.footprint = Footprint.of(self.worker.caches[cache_id])

    def bytes_of(self, tokens: int, shared: int = 0) -> int:
        """Return the bytes of a cache of `tokens` tokens; 0 before the first cache is computed."""
        return 0 if self.footprint is None else self.footprint(tokens, shared=shared)

    def growth(self, request: EngineRequest, tokens: int) -> int:
        """Return the bytes by which the cache of a request grows with `tokens` more tokens."""
        cache = self.worker.caches[request.cache_id]
        return growth(cache, tokens) if cache.get_seq_length() else self.bytes_of(tokens)

    def free(self, step: StepPlan) -> int:
        """Return the bytes that are left on the fullest rank, once the step has dropped caches and grown others."""
        held_bytes = self.worker.count_bytes(self.drops) if self.drops else self.worker.nbytes
        most = max(self.nbytes)
        ratio = self.worker.fullest_ratio
        return int(self.limit - ratio * held_bytes - max(0.0, most - ratio * self.nbytes[0]) - step.promised)

    def reserve(self, step: StepPlan, more: int, *, beside: int = 0, spared: Collection[int] = ()) -> bool:
        """Make room for `more` bytes and `beside` others, and promise `more` to a step. Return whether they fit."""
        fits = self.make_room(step, more + beside, spared)
        step.promised += more if fits else 0
        return fits

    def reserve_free(self, step: StepPlan, more: int) -> bool:
        """Promise `more` bytes to a step, if they are free without an eviction. Return whether they are."""
        fits = self.free(step) >= more
        step.promised += more if fits else 0
        return fits

    def make_room(self, step: StepPlan, more: int, spared: Collection[int] = ()) -> bool:
        """Drop kept caches, least recently used first, until `more` bytes are free. Return whether they are.

        Caches of the guesser go after all kept caches. Those named by `spared` stay.
        """
        while self.free(step) < more:
            oldest = next(
                (cache_id for cache_id in self.kept_caches.kept if cache_id not in {*spared, *step.spared}), None
            )
            if oldest is not None:
                self.evict(oldest)
            elif not self.guesser.release():
                return False
        return True

    def keep_at_most(self, count: int) -> None:
        """Drop kept caches, least recently used first, until `count` are left."""
        while len(self.kept_caches.kept) > count:
            self.evict(next(iter(self.kept_caches.kept)))

    def evict(self, cache_id: int) -> None:
        """Drop a kept cache with the next step."""
        self.kept_caches.stop_keeping(cache_id)
        self.drop(cache_id)
        self.evicted += 1

    def drop(self, *cache_ids: int) -> None:
        """Drop caches with the next step."""
        self.drops += cache_ids

    def note_bytes(self, nbytes: Sequence[int]) -> None:
        """Note the bytes of caches by rank, as an exchange has reported them."""
        self.nbytes = [*nbytes]

    def pop_drops(self) -> list[int]:
        """Return the caches that this step drops, and forget them."""
        drops = self.drops
        self.kept_caches.forget_dropped(drops)
        self.drops = []
        return drops
