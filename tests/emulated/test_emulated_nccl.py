"""The emulated NCCL delivers messages, and reports those that would hang or differ."""

import re
import time
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import attnmesh as am
from tests.support.emulation.emulated_gpu import EmulatedGPU
from tests.support.emulation.emulated_nccl import BACKENDS, world
from tests.support.ranks.pool import on_each_rank


@on_each_rank
def exchange_numbers(gpu: EmulatedGPU, counts: dict[int, tuple[int, int]]) -> list[float]:
    """Send so many numbers to the other of two ranks, and receive so many."""
    rank = dist.get_rank()
    sent, received = counts[rank]
    x, box = torch.full((sent,), float(rank)).cuda(), torch.zeros(received).cuda()
    posts = [dist.P2POp(dist.isend, x, 1 - rank), dist.P2POp(dist.irecv, box, 1 - rank)]
    for work in dist.batch_isend_irecv(posts):
        work.wait()
    return box.tolist()


@pytest.mark.parametrize("backend", BACKENDS)
def test_messages_of_both_directions_arrive(backend: str):
    assert world(2, exchange_numbers, {0: (3, 2), 1: (2, 3)}, backend=backend).results() == [
        [1.0, 1.0],
        [0.0, 0.0, 0.0],
    ]


def test_messages_of_two_sizes_are_reported():
    outcome = world(2, exchange_numbers, {0: (3, 3), 1: (2, 3)})
    assert any(re.search("send to rank 0 of 2 torch.float32.*recv from rank 1 of 3", x) for x in outcome.mismatches)
    with pytest.raises(AssertionError, match="rank 0: waits for"):
        outcome.results()


class Collected(NamedTuple):
    """What collectives make of the numbers of ranks."""

    gathered: list[int]
    total: int
    most: int
    of_rank_1: int


@on_each_rank
def run_collectives(gpu: EmulatedGPU, dtypes: tuple[torch.dtype, torch.dtype]) -> Collected:
    """Gather, add, maximize and broadcast this rank's number."""
    rank = dist.get_rank()
    x = torch.tensor([rank + 1], dtype=dtypes[rank], device="cuda")
    tables, total, most, first = [torch.empty_like(x) for _ in range(2)], x.clone(), x.clone(), x.clone()
    dist.all_gather(tables, x)
    dist.all_reduce(total)
    work = dist.all_reduce(most, dist.ReduceOp.MAX, async_op=True)
    work.wait()
    dist.broadcast(first, src=1)
    return Collected([int(table) for table in tables], int(total), int(most), int(first))


def test_collectives_give_every_rank_its_result():
    expected = Collected(gathered=[1, 2], total=3, most=2, of_rank_1=2)
    assert world(2, run_collectives, (torch.int64, torch.int64)).results() == [expected] * 2


def test_collectives_of_two_types_are_reported():
    outcome = world(2, run_collectives, (torch.int64, torch.int32))
    assert outcome.mismatches == ["all_gather of 1 torch.int64; all_gather of 1 torch.int32"]
    assert outcome.hang is not None


@on_each_rank
def cross_groups(gpu: EmulatedGPU, names: tuple[str, str]) -> None:
    """Run a collective on the groups of these two axes, the other way round on rank 1."""
    mesh = init_device_mesh("cuda", (2, 1), mesh_dim_names=("keys", "queries"))
    groups = {"keys": mesh.get_group("keys"), "world": dist.group.WORLD}
    for name in names[:: 1 if dist.get_rank() == 0 else -1]:
        dist.all_reduce(torch.ones(1).cuda(), group=groups[name])


def test_communicators_in_two_orders_are_a_hang_that_is_reported_at_once():
    began = time.monotonic()
    outcome = world(2, cross_groups, ("keys", "world"))
    assert time.monotonic() - began < 30
    assert outcome.hang is not None
    assert outcome.hang.count("joins") == 2
    world(2, cross_groups, ("keys", "keys")).results()


@on_each_rank
def receive_before_sending(gpu: EmulatedGPU) -> None:
    """Receive on both ranks before either sends."""
    rank = dist.get_rank()
    for operation in (dist.irecv, dist.isend):
        for work in dist.batch_isend_irecv([dist.P2POp(operation, torch.ones(1).cuda(), 1 - rank)]):
            work.wait()


def test_receives_before_sends_are_a_hang():
    outcome = world(2, receive_before_sending)
    assert outcome.hang is not None
    assert "rank 0: waits for" in outcome.hang
    assert "recv from rank 1 of 1 torch.float32" in outcome.hang


@on_each_rank
def exchange_on_two_of_three(gpu: EmulatedGPU) -> None:
    """Exchange on two of three ranks, as the first operation of the group."""
    rank = dist.get_rank()
    if rank < 2:
        posts = [dist.P2POp(op, torch.ones(1).cuda(), 1 - rank) for op in (dist.isend, dist.irecv)]
        for work in dist.batch_isend_irecv(posts):
            work.wait()


def test_a_communicator_that_one_rank_never_joins_is_a_hang():
    outcome = world(3, exchange_on_two_of_three)
    assert outcome.hang is not None
    assert "rank 0: joins" in outcome.hang
    assert "as have [0, 1] of [0, 1, 2]" in outcome.hang
    assert "rank 2: answered" in outcome.hang


@on_each_rank
def raise_alone(gpu: EmulatedGPU) -> int:
    """Raise on rank 1."""
    if dist.get_rank() == 1:
        raise am.errors.InputError("decode q", "a tensor", "None", "pass one")
    return 7


def test_errors_come_back_as_they_are():
    outcome = world(2, raise_alone)
    assert outcome.answers[0] == 7
    assert isinstance(outcome.answers[1], am.errors.InputError)
    with pytest.raises(AssertionError, match="decode q: expected a tensor"):
        outcome.results()


@on_each_rank
def gather_on_cpu(gpu: EmulatedGPU) -> list[int]:
    """Gather numbers of the CPU."""
    x = torch.tensor([dist.get_rank()])
    tables = [torch.empty_like(x) for _ in range(2)]
    dist.all_gather(tables, x)
    return [int(table) for table in tables]


def test_tensors_of_the_host_need_gloo():
    assert world(2, gather_on_cpu, backend="cpu:gloo,cuda:nccl").results() == [[0, 1], [0, 1]]
    outcome = world(2, gather_on_cpu, backend="nccl")
    assert all("No backend type associated with device type cpu" in str(x) for x in outcome.answers)


@on_each_rank
def die(gpu: EmulatedGPU) -> None:
    """End this process on rank 0, and wait for it on rank 1."""
    if dist.get_rank() == 0:
        raise SystemExit(1)
    dist.all_reduce(torch.ones(1).cuda())


def test_a_rank_that_waits_for_one_that_has_ended_hangs():
    outcome = world(2, die)
    assert outcome.hang is not None
    assert "rank 1: joins" in outcome.hang
