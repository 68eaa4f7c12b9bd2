"""The pool of ranks: worlds start once, errors come back, and hangs end at their deadline."""

import ast
import inspect
import os
import re
import struct
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from attnmesh.errors import ShapeError
from tests.support.pool import SIZES, Lost, Pool, on_each_rank


@on_each_rank
def total_of_ranks(offset: int) -> int:
    value = torch.tensor([dist.get_rank() + offset])
    dist.all_reduce(value)
    return int(value)


@on_each_rank
def process_id() -> int:
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
def test_a_world_computes_together(pool: Pool, size: int) -> None:
    assert pool.run(size, total_of_ranks, 10) == [size * 10 + size * (size - 1) // 2] * size


def test_a_world_is_started_once(pool: Pool) -> None:
    first = pool.run(3, process_id)
    assert len(set(first)) == 3
    assert pool.run(3, process_id) == first


def test_an_error_comes_back_with_its_type_and_rank_and_the_world_lives_on(pool: Pool) -> None:
    before = pool.run(3, process_id)
    with pytest.raises(ShapeError, match="expected one thing, given another") as caught:
        pool.run(3, refuse_on, 1)
    assert "on rank 1" in caught.value.__notes__[0]
    zero, error, two = pool.ask(3, refuse_on, 1)
    assert (zero, two) == (0, 2)
    assert isinstance(error, ShapeError)
    assert pool.run(3, process_id) == before


def test_a_hang_ends_at_its_deadline_with_each_rank_s_stack(pool: Pool) -> None:
    before = pool.run(2, process_id)
    start = time.monotonic()
    with pytest.raises(Lost, match="stand_still_on: 1 of 2 ranks did not answer") as caught:
        pool.run(2, stand_still_on, 1, deadline=2.0)
    assert time.monotonic() - start < 60
    assert "rank 0 answered None" in str(caught.value)
    assert "in stand_still_on" in str(caught.value)
    assert set(pool.run(2, process_id)).isdisjoint(before)


def test_ranks_left_waiting_for_one_that_raised_do_not_wait_for_the_deadline(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.support.pool.GRACE", 1.0)
    start = time.monotonic()
    with pytest.raises(Lost, match="in barrier") as caught:
        pool.run(2, wait_for_all, 0, deadline=180.0)
    assert time.monotonic() - start < 90
    assert "rank 0 answered KeyError('absent')" in str(caught.value)


@pytest.mark.parametrize("function", [die, die_while_sending])
def test_a_dead_rank_is_named(function: Callable[[], None], pool: Pool) -> None:
    with pytest.raises(Lost, match=r"dead, exit code 3"):
        pool.run(1, function)
    assert len(pool.run(1, process_id)) == 1


SENDERS = re.compile(r"(pool|nccl|world)\.(run|ask)|run_on_ranks|run_on_hosts|world")
"""Calls whose second argument is sent to ranks."""


def test_functions_that_are_sent_to_ranks_are_marked() -> None:
    tests = Path(__file__).parents[1]
    sent, marked = set[tuple[str, str]](), set[tuple[str, str]]()
    for file in tests.rglob("*.py"):
        module, tree = ".".join(("tests", *file.relative_to(tests).with_suffix("").parts)), ast.parse(file.read_text())
        places: dict[str, tuple[str, str]] = {}
        for node in tree.body:
            if isinstance(node, ast.ImportFrom):
                places |= {one.asname or one.name: (str(node.module), one.name) for one in node.names}
            elif isinstance(node, ast.FunctionDef):
                places[node.name] = module, node.name
                marked |= {(module, node.name) for mark in node.decorator_list if ast.unparse(mark) == "on_each_rank"}
        calls = [
            node for node in ast.walk(tree) if isinstance(node, ast.Call) and SENDERS.fullmatch(ast.unparse(node.func))
        ]
        names = {one.id for call in calls for one in call.args[1:2] if isinstance(one, ast.Name)}
        sent |= {places[name] for name in names & places.keys()}
    assert sent & marked
    assert not sorted(one for one in sent - marked if one[0].startswith("tests."))
