"""Operations of a step on a rank: their results, and how long they take."""

from collections.abc import Sequence
from time import sleep

from attnmesh.errors import StoreError
from attnmesh.hf.serving.operations import BlockToSave, SaveBlocks
from attnmesh.hf.serving.rank_worker import RankWorker
from tests.support.serving.engines import model_of


class TwoSaves:
    """A store of which the first save of a step fails."""

    def do_save(self, cache_id: int, _: Sequence[BlockToSave]) -> None:
        sleep(0.05)
        if not cache_id:
            raise StoreError("save", "a", "b", "c")


def test_operations_of_one_name_count_together() -> None:
    worker = RankWorker(model_of("llama"), None, {})
    worker.store = TwoSaves()  # type: ignore[assignment]
    results = worker.run([SaveBlocks(0, []), SaveBlocks(1, [])])
    assert results.seconds[SaveBlocks] >= 0.1
    assert isinstance(results.error_of(SaveBlocks), StoreError)
