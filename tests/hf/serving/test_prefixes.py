"""Prefixes that requests share: ids of kept caches are copied from the device once, and found as often as asked."""

from types import SimpleNamespace
from typing import Any

import torch

from attnmesh.hf.serving.prefixes import Prefixes
from attnmesh.hf.serving.rank_worker import RankWorker
from attnmesh.hf.serving.stream import Sampling, Stream
from tests.support.engines import ids, model_of

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


def prefixes_of(tokens: Any) -> Prefixes:
    """Return prefixes of which one is kept."""
    worker: Any = RankWorker(model_of("llama"), None, {})
    worker.caches[KEPT] = SimpleNamespace(tokens=tokens, restorable_length=lambda length: length)
    prefixes = Prefixes(worker)
    prefixes.kept[KEPT] = ""
    return prefixes


def request(text: list[int]) -> Stream:
    return Stream(text, Sampling(0.0, 1.0, 0, 0.0, 1.0, 0.0, 0.0, (), 0, 0), 1, frozenset())


def test_ids_of_a_kept_cache_are_copied_once() -> None:
    text = ids(100)
    held = DeviceIds(text[:60])
    prefixes = prefixes_of(held)
    for _ in range(3):
        assert prefixes.find(request(text), ())[:2] == (KEPT, 60)
        assert prefixes.parting(request(text), ()) == 60
    assert held.copies == 1


def test_ids_of_a_cache_that_changed_are_copied_anew() -> None:
    text = ids(100)
    prefixes = prefixes_of(DeviceIds(text[:60]))
    prefixes.find(request(text), ())
    prefixes.worker.caches[KEPT].tokens = DeviceIds(text[:30])  # type: ignore[assignment]
    assert prefixes.find(request(text), ())[:2] == (KEPT, 30)
    prefixes.worker.caches[KEPT].tokens = None
    assert prefixes.find(request(text), ())[:2] == (-1, 0)


def test_ids_of_caches_that_are_gone_are_forgotten() -> None:
    prefixes = prefixes_of(DeviceIds(ids(60)))
    prefixes.find(request(ids(100)), ())
    prefixes.remove(KEPT)
    assert not prefixes.ids
