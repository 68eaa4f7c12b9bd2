"""Worlds are entered by handshake, also by way of a store that has seen others; who does not come is named."""

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from torch.distributed import HashStore

from attnmesh.errors import ArgumentError, RankFailure
from attnmesh.setup import rendezvous


def enter_all(store: HashStore, ranks: int, present: list[int], seconds: float = 20.0) -> list[str | tuple[int, ...]]:
    """Return what each present rank finds: the name of the world, or the missing ranks."""

    def enter(rank: int) -> str | tuple[int, ...]:
        try:
            return rendezvous._name(store, rank, ranks, seconds)
        except RankFailure as error:
            return error.ranks

    with ThreadPoolExecutor(ranks) as threads:
        return list(threads.map(enter, present))


def test_a_store_serves_one_world_after_another() -> None:
    store = HashStore()
    names = [enter_all(store, ranks, list(range(ranks))) for ranks in (3, 3, 2, 4)]
    assert all(len(set(each)) == 1 for each in names)
    assert len({each[0] for each in names}) == 4


@pytest.mark.parametrize("used", [False, True])
@pytest.mark.parametrize("lost", [0, 2])
def test_who_does_not_come_is_named(lost: int, used: bool) -> None:
    store = HashStore()
    if used:
        enter_all(store, 3, [0, 1, 2])
    present = [rank for rank in range(3) if rank != lost]
    assert enter_all(store, 3, present, seconds=0.5) == [(lost,)] * 2


def test_half_of_a_place_is_refused() -> None:
    with pytest.raises(ArgumentError, match=r"a rank and how many there are, or none of them, given <"):
        rendezvous.enter("gloo", HashStore(), 0)


def test_the_time_to_come_holds_for_the_store_too(monkeypatch: pytest.MonkeyPatch) -> None:
    given = list[timedelta]()

    def nobody(_: str, timeout: timedelta) -> None:
        given.append(timeout)
        raise TimeoutError

    monkeypatch.setattr(rendezvous, "rendezvous", nobody)
    with pytest.raises(TimeoutError):
        rendezvous.enter("gloo", seconds=3.0)
    assert given == [timedelta(seconds=3)]
