"""Kept caches that requests share: ids of kept caches are copied from the device once, and found as often as asked."""

from types import SimpleNamespace
from typing import Any

import torch

from attnmesh.hf.serving.engine_request import EngineRequest, SamplingParams
from attnmesh.hf.serving.kept_caches import KeptCaches
from attnmesh.hf.serving.rank_worker import RankWorker
from tests.support.serving.engines import ids, model_of

KEPT = 7


class DeviceIds:
    """Ids on a device, of which copies are counted."""

    def __init__(self, ids: list[int]) -> None:
        self.ids, self.copies = ids, 0

    def __getitem__(self, row: int) -> "DeviceIds":
        return self

    def cpu(self) -> torch.Tensor:
        self.copies += 1
        return torch.tensor(self.ids)


def kept_caches_of(tokens: Any) -> KeptCaches:
    """Return caches of which one is kept."""
    worker: Any = RankWorker(model_of("llama"), None, {})
    worker.caches[KEPT] = SimpleNamespace(tokens=tokens, restorable_length=lambda length: length)
    kept_caches = KeptCaches(worker)
    kept_caches.keep(KEPT, "")
    return kept_caches


def request(text: list[int]) -> EngineRequest:
    return EngineRequest(text, SamplingParams(0.0, 1.0, 0, 0.0, 1.0, 0.0, 0.0, (), 0, 0), 1, frozenset())


def test_ids_of_a_kept_cache_are_copied_once() -> None:
    text = ids(100)
    held = DeviceIds(text[:60])
    kept_caches = kept_caches_of(held)
    for _ in range(3):
        assert kept_caches.find(request(text), ())[:2] == (KEPT, 60)
        assert kept_caches.find_parting(request(text), ()) == 60
    assert held.copies == 1


def test_ids_of_a_cache_that_changed_are_copied_anew() -> None:
    text = ids(100)
    kept_caches = kept_caches_of(DeviceIds(text[:60]))
    kept_caches.find(request(text), ())
    kept_caches.worker.caches[KEPT].tokens = DeviceIds(text[:30])  # type: ignore[assignment]
    assert kept_caches.find(request(text), ())[:2] == (KEPT, 30)
    kept_caches.worker.caches[KEPT].tokens = None
    assert kept_caches.find(request(text), ())[:2] == (None, 0)


def test_ids_of_caches_that_are_gone_are_forgotten() -> None:
    kept_caches = kept_caches_of(DeviceIds(ids(60)))
    kept_caches.find(request(ids(100)), ())
    kept_caches.stop_keeping(KEPT)
    assert not kept_caches.ids
