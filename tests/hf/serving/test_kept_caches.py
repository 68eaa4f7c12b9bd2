"""Kept caches that requests share: ids of kept caches are copied from the device once, and found as often as asked."""

from types import SimpleNamespace
from typing import Any

import torch

from attnmesh.hf.serving.engine_request import EngineRequest, Origin, SamplingParams
from attnmesh.hf.serving.kept_caches import KeptCaches
from attnmesh.hf.serving.rank_worker import RankWorker
from tests.support.serving.engines import ids, model_of

KEPT, OTHER = 7, 8


class DeviceIds:
    """Ids on a device, of which copies are counted."""

    def __init__(self, ids: list[int]) -> None:
        self.ids, self.copies = ids, 0

    def __getitem__(self, row: int) -> "DeviceIds":
        return self

    def cpu(self) -> torch.Tensor:
        self.copies += 1
        return torch.tensor(self.ids)


def kept_caches_of(*tokens: Any) -> KeptCaches:
    """Return caches that are kept, the first of them as number `KEPT`."""
    worker: Any = RankWorker(model_of("llama"), None, {})
    kept_caches = KeptCaches(worker)
    for cache_id, held in enumerate(tokens, KEPT):
        worker.caches[cache_id] = SimpleNamespace(tokens=held, restorable_length=lambda length: length)
        kept_caches.keep(cache_id, "")
    return kept_caches


def request(text: list[int], **fields: Any) -> EngineRequest:
    sampling = SamplingParams(0.0, 1.0, 0, 0.0, 1.0, 0.0, 0.0, (), 0, 0)
    return EngineRequest(text, sampling, 1, frozenset(), **fields)


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


def test_nothing_is_left_of_caches_that_are_gone() -> None:
    """Of caches that are moved to a request, kept no longer, or dropped as those of other requests are."""
    for let_go in (
        lambda kept_caches: kept_caches.note_use(Origin(KEPT, 60, moves=True)),
        lambda kept_caches: kept_caches.stop_keeping(KEPT),
        lambda kept_caches: kept_caches.forget_dropped([KEPT]),
    ):
        kept_caches = kept_caches_of(DeviceIds(ids(60)))
        kept_caches.keep(KEPT, "", is_snapshot=True)
        kept_caches.note_images(request([], images={"pixels": torch.ones(1)}, cache_id=KEPT))
        kept_caches.find(request(ids(100)), ())
        let_go(kept_caches)
        assert not kept_caches.ids
        assert not kept_caches.images_digests
        assert kept_caches.snapshots == {*kept_caches.kept}


def test_a_cache_that_a_request_goes_on_from_is_the_last_used() -> None:
    kept_caches = kept_caches_of(DeviceIds(ids(60)), DeviceIds(ids(60, seed=1)))
    kept_caches.note_use(Origin(KEPT, 30, moves=False))
    assert [*kept_caches.kept] == [OTHER, KEPT]


def test_a_kept_cache_moves_to_a_request_that_has_its_tokens_but_the_last() -> None:
    """Of a prompt that is asked again the last token has to be computed."""
    text = ids(60)
    kept_caches = kept_caches_of(DeviceIds(text))
    assert kept_caches.find(request(text), ()) == Origin(KEPT, 59, moves=True)
    assert kept_caches.find(request(text[:59]), ()) == Origin(KEPT, 58, moves=False)


def test_caches_of_prompts_alone_serve_models_that_compute_answers_otherwise() -> None:
    kept_caches = kept_caches_of(DeviceIds(ids(60)))
    kept_caches.worker.recomputes_by_token = True
    assert kept_caches.find(request(ids(100)), ()) == Origin()
    kept_caches.keep(KEPT, "", is_snapshot=True)
    assert kept_caches.find(request(ids(100)), ()).source == KEPT


def test_a_few_tokens_are_not_worth_a_cache() -> None:
    kept_caches, other = kept_caches_of(DeviceIds(ids(60))), ids(60, seed=1)
    assert kept_caches.find(request([*ids(60)[:16], *other]), ()).tokens == 16
    assert kept_caches.find(request([*ids(60)[:15], *other]), ()) == Origin()


def test_of_caches_with_equal_tokens_one_with_the_same_images_is_taken() -> None:
    text = ids(60)
    pixels = [{"pixels": torch.full((1,), number)} for number in range(2)]
    kept_caches = kept_caches_of(DeviceIds(text), DeviceIds(text))
    for cache_id, images in zip((KEPT, OTHER), pixels, strict=True):
        kept_caches.note_images(request(text, images=images | types_of(text), cache_id=cache_id))
    for asked in (text, text + text):  # again, and in a later turn
        found = [kept_caches.find(request(asked, images=images | types_of(asked)), ()).source for images in pixels]
        assert found == [KEPT, OTHER]


def types_of(text: list[int]) -> dict[str, torch.Tensor]:
    """Return the types of a text in which 4 tokens are of an image."""
    return {"token_type_ids": (torch.arange(len(text))[None] // 4 == 2).long()}


def test_images_at_other_places_are_others() -> None:
    digests = {
        request([], images={"token_type_ids": torch.tensor([types])}).images_digest
        for types in ([0, 1, 0], [0, 1, 1, 0], [1, 0, 0], [0, 1, 0, 1, 0])
    }
    assert len(digests) == 4


def test_tokens_are_shared_by_requests_of_one_salt_without_images() -> None:
    text = ids(60)
    kept_caches, pixels = kept_caches_of(DeviceIds(text)), {"pixels": torch.ones(1)}
    one = request(text)
    others = request(text), request(text, salt="a"), request(text, images=pixels)
    assert [kept_caches.count_shared(one, other) for other in others] == [59, 0, 0]
    assert [kept_caches.find_parting(other, ()) for other in others] == [59, 0, 0]
    assert [kept_caches.find(other, ()).tokens for other in others] == [59, 0, 59]
