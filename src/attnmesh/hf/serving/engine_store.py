"""The store of an engine as rank 0 schedules it, and a stand-in for engines without a store."""

from collections.abc import Callable, Collection, Iterator, Sequence

from attnmesh.guard.agreement import Agreement
from attnmesh.hf.serving.engine_request import EngineRequest, Origin
from attnmesh.hf.serving.operations import Operation, StepResults
from attnmesh.hf.serving.prefix_store import PrefixStore, open_store
from attnmesh.hf.serving.rank_report import RankReport
from attnmesh.hf.serving.rank_store import RankStore
from attnmesh.hf.serving.rank_worker import RankWorker
from attnmesh.hf.serving.store_scheduler import StoreScheduler
from attnmesh.store.block_folder import STORE_SUBJECT


class NoStore:
    """A store of nothing, with the calls of `StoreScheduler`."""

    busy = is_writing = holds_memory = False

    def name_blocks(self, request: EngineRequest) -> None:
        """Name no blocks."""

    def keep(self, request: EngineRequest, cache_id: int, rejected: int = 0) -> None:
        """Store nothing."""

    def begin_loading(
        self, request: EngineRequest, common_tokens: int, new_cache_ids: Iterator[int], reserve: Callable[[], bool]
    ) -> bool:
        """Return that no cache is loaded for a request."""
        return False

    def holds_up(self, request: EngineRequest) -> bool:
        """Return that a request waits for no prefix."""
        return False

    def origin_of(self, request: EngineRequest) -> Origin | None:
        """Return no cache."""
        return None

    def note_begun(self, request: EngineRequest) -> None:
        """Note nothing."""

    def operations_before(self, drops: Collection[int], seconds: float | None) -> list[Operation]:
        """Return no operations."""
        return []

    def operations_after(self) -> list[Operation]:
        """Return no operations."""
        return []

    def receive_reports(self, reports: Sequence[RankReport]) -> list[int]:
        """Return no caches."""
        return []

    def apply_results(self, results: StepResults) -> None:
        """Apply nothing."""

    def metrics(self) -> dict[str, float]:
        """Return no figures."""
        return {}


EngineStore = NoStore | StoreScheduler
"""The store to which the scheduler's calls go."""


def begin_store(settings: PrefixStore | None, worker: RankWorker) -> EngineStore:
    """Open the store of an engine, and return the scheduler of its blocks. Collective over the ranks of the mesh.

    Rank 0 schedules the blocks of all ranks; the other ranks get a `NoStore`.
    """
    if settings is None:
        return NoStore()
    opened = open_store(settings, worker.model, worker.template)
    try:
        with Agreement(worker.mesh, STORE_SUBJECT):  # rank 0 reads the folder, which may fail
            is_first = not worker.mesh.shard_index
            scheduler: EngineStore = StoreScheduler(settings, opened, worker) if is_first else NoStore()
        worker.store = RankStore(opened, worker.mesh, worker.caches)
    except BaseException:
        opened.lock.release()
        raise
    return scheduler
