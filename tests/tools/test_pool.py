"""The pool of ranks: teams start once, errors come back, and hangs end at their deadline."""

import inspect
import os
import struct
import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from attnmesh.errors import ShapeError
from tests.support.emulation.emulated_nccl import world
from tests.support.ranks.pool import SIZES, Lost, Pool, on_each_rank


@on_each_rank
def add_up_ranks(offset: int) -> int:
    value = torch.tensor([dist.get_rank() + offset])
    dist.all_reduce(value)
    return int(value)


@on_each_rank
def return_process_id() -> int:
    return os.getpid()


@on_each_rank
def refuse_on(rank: int) -> int:
    if dist.get_rank() == rank:
        raise ShapeError("here", "one thing", "another", "change it")
    return dist.get_rank()


@on_each_rank
def stand_still_on(rank: int) -> None:
    if dist.get_rank() == rank:
        time.sleep(1000)


@on_each_rank
def wait_for_all(absent: int) -> None:
    if dist.get_rank() == absent:
        raise KeyError("absent")
    dist.barrier()


@on_each_rank
def die() -> None:
    os._exit(3)


@on_each_rank
def die_while_sending() -> None:
    connection = next(info.frame.f_locals["connection"] for info in inspect.stack() if info.function == "_serve")
    os.write(connection.fileno(), struct.pack("!i", 1000) + b"begun")
    os._exit(3)


@pytest.mark.parametrize("size", SIZES)
def test_a_team_computes_together(pool: Pool, size: int) -> None:
    assert pool.run(size, add_up_ranks, 10) == [size * 10 + size * (size - 1) // 2] * size


def test_a_team_is_started_once(pool: Pool) -> None:
    first = pool.run(3, return_process_id)
    assert len(set(first)) == 3
    assert pool.run(3, return_process_id) == first


def test_an_error_comes_back_with_its_type_and_rank_and_the_team_lives_on(pool: Pool) -> None:
    before = pool.run(3, return_process_id)
    with pytest.raises(ShapeError, match="expected one thing, given another") as caught:
        pool.run(3, refuse_on, 1)
    assert "on rank 1" in caught.value.__notes__[0]
    zero, error, two = pool.ask(3, refuse_on, 1)
    assert (zero, two) == (0, 2)
    assert isinstance(error, ShapeError)
    assert pool.run(3, return_process_id) == before


def test_a_hang_ends_at_its_deadline_with_each_rank_s_stack(pool: Pool) -> None:
    before = pool.run(2, return_process_id)
    start = time.monotonic()
    with pytest.raises(Lost, match="stand_still_on: 1 of 2 ranks did not answer") as caught:
        pool.run(2, stand_still_on, 1, deadline=2.0)
    assert time.monotonic() - start < 60
    assert "rank 0 answered None" in str(caught.value)
    assert "in stand_still_on" in str(caught.value)
    assert set(pool.run(2, return_process_id)).isdisjoint(before)


def test_ranks_left_waiting_for_one_that_raised_do_not_wait_for_the_deadline(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.support.ranks.pool.GRACE", 1.0)
    start = time.monotonic()
    with pytest.raises(Lost, match="in barrier") as caught:
        pool.run(2, wait_for_all, 0, deadline=180.0)
    assert time.monotonic() - start < 90
    assert "rank 0 answered KeyError('absent')" in str(caught.value)


@pytest.mark.parametrize("function", [die, die_while_sending])
def test_a_dead_rank_is_named(function: Callable[[], None], pool: Pool) -> None:
    with pytest.raises(Lost, match=r"dead, exit code 3"):
        pool.run(1, function)
    assert len(pool.run(1, return_process_id)) == 1


def return_nothing() -> None: ...


def test_a_function_without_the_mark_is_not_sent(pool: Pool) -> None:
    with pytest.raises(TypeError, match=r"return_nothing: expected .* Fix: decorate it with @on_each_rank"):
        pool.run(1, return_nothing)
    with pytest.raises(TypeError, match="Fix: decorate it with @on_each_rank"):
        world(1, return_nothing)
