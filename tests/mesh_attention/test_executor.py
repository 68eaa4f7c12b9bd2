"""The executor: exact for each exchange, on tensors that it may write to, with the next exchange under way."""

from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import attnmesh as am
from attnmesh.comm.p2p import Channel
from attnmesh.core.partial import Partial, merge_partials
from attnmesh.kernels.rectangles import BackwardInputs
from attnmesh.mesh.schedule import EXCHANGE_MODES
from attnmesh.mesh.shapes import Shape
from attnmesh.mesh_attention import executor
from attnmesh.mesh_attention.executor import PendingReturns, backward, forward
from attnmesh.mesh_attention.head_swap import HeadTensors
from attnmesh.runtime.tensors import Tensors
from tests.support.ranks.pool import Pool, on_each_rank
from tests.support.truth.dense import Truth, truth
from tests.support.truth.tasks import ALONE, LENGTH, MASK, SCALING, Rank, whole_tensors


def truth_of(mask: am.Mask = MASK) -> Truth:
    tensors, dout = whole_tensors()
    first, last = mask.bounds(torch.arange(LENGTH))
    keys = torch.arange(LENGTH)
    return truth(tensors, (first[:, None] <= keys) & (keys <= last[:, None]), SCALING.scale, dout)


def check(truth: Truth, rank: Rank, **given: Tensor) -> None:
    """Assert that this rank's part is right."""
    for name, x in given.items():
        own = Truth(
            {name: rank.own(truth.values[name])},
            {name: rank.own(truth.allowances[name].expand_as(truth.values[name]))},
        )
        own.check(name, x)


@on_each_rank
def check_output_and_gradients(shape: Shape, exchange: str) -> None:
    """Compare this rank's output and gradients with dense attention."""
    rank, expected = Rank(shape, exchange), truth_of()
    memory = rank.memory()
    out, lse = forward(rank.q, (rank.k, rank.v), rank.task, rank.sinks, memory)
    check(expected, rank, out=out, lse=lse)
    if rank.axes.heads.size == 1:  # nothing is swapped, so nothing is written: the caller has q, k and v
        memory = HeadTensors((rank.q,), (rank.k, rank.v))
    dq, dk, dv = backward(memory, BackwardInputs(out, lse, rank.dout), rank.task)
    check(expected, rank, dq=dq, dk=dk, dv=dv)


@pytest.mark.parametrize("exchange", EXCHANGE_MODES)
def test_one_rank_computes_dense_attention(exchange: str) -> None:
    check_output_and_gradients(ALONE, exchange)


@pytest.mark.parametrize("exchange", EXCHANGE_MODES)
@pytest.mark.parametrize("shape", [Shape(2, 1, 1), Shape(1, 2, 1), Shape(1, 1, 2), Shape(1, 3, 1)], ids=str)
def test_ranks_compute_dense_attention(shape: Shape, exchange: str, pool: Pool) -> None:
    pool.run(shape.ranks, check_output_and_gradients, shape, exchange)


# --- when exchanges begin and end ---


@on_each_rank
def record_events_of(shape: Shape, exchange: str) -> list[str]:
    """Return the order in which exchanges of keys begin and arrive, and kernels run, in a forward pass."""
    events: list[str] = []
    rank = Rank(shape, exchange, am.Full())
    real_gather, real_attend = Channel.begin_gather, executor._attend_step

    def gather(channel: Channel, tensors: Tensors, step: Any) -> Callable[[], Tensors]:
        finish = real_gather(channel, tensors, step)
        if channel.axis is not rank.axes.queries or not step.receive:
            return finish
        number = sum(event.startswith("begin") for event in events)
        events.append(f"begin {number}")

        def finished() -> Tensors:
            events.append(f"arrive {number}")
            return finish()

        return finished

    def attend(*args: Any) -> Partial:
        events.append("attend")
        return real_attend(*args)

    with mock.patch.object(Channel, "begin_gather", gather), mock.patch.object(executor, "_attend_step", attend):
        forward(rank.q, (rank.k, rank.v), rank.task)
    return events


def test_the_next_keys_of_a_ring_are_under_way_while_a_kernel_runs(pool: Pool) -> None:
    for events in pool.run(3, record_events_of, Shape(1, 3, 1), "ring"):
        assert events == ["begin 0", "attend", "arrive 0", "begin 1", "attend", "arrive 1", "attend"]


def test_keys_that_arrive_at_once_are_attended_once(pool: Pool) -> None:
    for events in pool.run(3, record_events_of, Shape(1, 3, 1), "bulk"):
        assert events == ["begin 0", "arrive 0", "attend"]


def test_the_next_heads_are_under_way_while_a_kernel_runs(pool: Pool) -> None:
    for events in pool.run(2, record_events_of, Shape(1, 2, 1), "pipelined"):
        assert events == ["begin 0", "begin 1", "arrive 0", "attend", "arrive 1", "attend"]


def test_results_go_on_by_one_exchange_when_further_ones_set_out() -> None:
    done: list[str] = []

    def exchange(name: str, steps: int) -> Iterator[None]:
        for step in range(steps):
            done.append(f"{name}{step}")
            yield
        done.append(f"{name} ends")

    pending = PendingReturns()
    pending.add(exchange("a", 2))
    pending.add(exchange("b", 1))
    pending.add(exchange("c", 0))
    assert done == ["a0", "a1", "b0", "a ends", "b ends", "c ends"]
    pending.add(exchange("d", 2))
    pending.finish()
    assert done[6:] == ["d0", "d1", "d ends"]
    assert pending.under_way == []


# --- parts of results ---


@pytest.mark.parametrize("tokens", [[2, 3, 4], [0, 2, 5]], ids=["a run", "apart"])
def test_partials_of_some_queries_are_merged_in_place(tokens: list[int]) -> None:
    generator = torch.Generator().manual_seed(0)
    total, part = (
        Partial(torch.randn(1, 2, count, 4, generator=generator), torch.randn(1, 2, count, generator=generator))
        for count in (6, 3)
    )
    before = Partial(*(x.clone() for x in total))
    index = torch.tensor(tokens)
    executor._merge_returned([(index, part)], total)
    expected = merge_partials([Partial(*(x[:, :, index] for x in before)), part])
    others = [token for token in range(6) if token not in tokens]
    for x, right, old in zip(total, expected, before, strict=True):
        torch.testing.assert_close(x[:, :, index], right)
        assert torch.equal(x[:, :, others], old[:, :, others])


def test_gradients_of_some_keys_are_added() -> None:
    totals = (torch.ones(1, 1, 4, 1), torch.zeros(1, 1, 4, 1))
    part = torch.tensor([10.0, 20.0])[None, None, :, None]
    executor._add_returned([(torch.tensor([0, 3]), (part, 2 * part)), (torch.tensor([3, 1]), (part, part))], totals)
    assert [x.flatten().tolist() for x in totals] == [[11, 21, 1, 31], [20, 20, 0, 50]]


def test_an_equivalent_out_has_the_same_product_with_its_gradient() -> None:
    generator = torch.Generator().manual_seed(0)
    out, dout = torch.randn(2, 1, 2, 9, 5, generator=generator, dtype=torch.float64)
    dout *= torch.logspace(-150, 150, 9, dtype=torch.float64)[:, None]  # their squares are 0 and infinite
    dout[:, :, 4] = 0.0
    delta = (out * dout).sum(-1)
    found = executor._equivalent_out(dout, delta)
    torch.testing.assert_close((found * dout).sum(-1), delta, rtol=1e-13, atol=0.0)  # some roundings of 1e-16
    assert bool((found.norm(dim=-1) <= out.norm(dim=-1) * (1 + 1e-13)).all())
