"""Messages along an axis: within a host and between hosts, by the fastest merge, and in rounds of NCCL."""

import socket
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist

import attnmesh as am
from attnmesh.comm import mailboxes
from attnmesh.comm.mailboxes import MESSAGE_BYTES
from attnmesh.comm.merges import P2PMessage, Wait
from attnmesh.comm.rank_merge import RequestedMerge
from attnmesh.comm.topology import agreed_host_mailboxes
from attnmesh.comm.transport import DeviceTransport, agreed_transport
from attnmesh.mesh.axes import Axis
from attnmesh.mesh.reduction_tree import reduction_rounds
from tests.support.ranks.groups import world_axis
from tests.support.ranks.pool import Pool, on_each_rank

CPU = torch.device("cpu")


@on_each_rank
def merge_where_one_cannot_open_the_memory(lacking: int) -> tuple[bool, torch.Tensor]:
    """On a rank: merge in a new group, of which one rank cannot open the memory."""
    group = dist.new_group()
    before = mailboxes.FOLDER
    if dist.get_rank() == lacking:
        mailboxes.FOLDER = Path("/nowhere")
    try:
        axis = Axis(dist.get_world_size(), dist.get_rank(), group)
        found = agreed_host_mailboxes(axis)
        partial = am.Partial(torch.full((1, 2, 1, 4), float(axis.index)), torch.zeros(1, 2, 1))
        return found is None, am.merge_across(partial, group, how="tree").out
    finally:
        mailboxes.FOLDER = before


@pytest.mark.parametrize("lacking", [0, 2])
def test_where_one_rank_cannot_share_memory_none_does(lacking: int, pool: Pool) -> None:
    for none, out in pool.run(3, merge_where_one_cannot_open_the_memory, lacking):
        assert none
        assert torch.allclose(out, torch.ones_like(out))


@on_each_rank
def merge_on_two_hosts(size: int) -> list[torch.Tensor]:
    """On a rank: merge in a new group, whose last rank is alone on a host of its own."""
    group, name = dist.new_group(), socket.gethostname
    if dist.get_rank() == 2:
        socket.gethostname = lambda: "elsewhere"
    try:
        own = am.Partial(torch.full((1, 1, size, 4), float(dist.get_rank())), torch.zeros(1, 1, size))
        return [am.merge_across(own, group, how=how).out for how in ("tree", "direct")]
    finally:
        socket.gethostname = name


@pytest.mark.parametrize("size", [10, MESSAGE_BYTES // 16, 1 << 17])
def test_hosts_with_and_without_a_board_merge_messages_of_any_length(size: int, pool: Pool) -> None:
    for merged in pool.run(3, merge_on_two_hosts, size):
        for out in merged:
            assert torch.allclose(out, torch.ones_like(out)), out


class Names(NamedTuple):
    """Of merges: the fastest, the one chosen for outputs by heads, and the one chosen where it is given."""

    fastest: str
    for_heads: str
    given: str


@on_each_rank
def choose_merges() -> Names:
    place = world_axis()
    return Names(
        agreed_transport(place, CPU).agreed_fastest().name,
        RequestedMerge(place, "auto", "heads").agreed_merge(CPU).name,
        RequestedMerge(place, "gather", "heads").agreed_merge(CPU).name,
    )


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_the_measured_choice_is_the_same_on_all_ranks(ranks: int, pool: Pool) -> None:
    (names,) = set(pool.run(ranks, choose_merges))
    assert names.fastest in ("tree", "direct")
    assert names.for_heads == "direct"
    assert names.given == "gather"


@pytest.mark.parametrize("rank", range(4))
def test_nccl_receives_only_the_messages_of_the_round_that_it_sends(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL ends no message of a batch before all of them: a receive of a later round would wait for itself."""
    batches: list[list[tuple[str, int]]] = []

    def post(self: DeviceTransport, posts: list[P2PMessage], what: str) -> list[Wait]:
        batches.append([(call.__name__, peer) for call, peer, _ in posts])
        return [lambda: None]

    monkeypatch.setattr(DeviceTransport, "post", post)
    message = torch.empty(8, dtype=torch.uint8, device="meta")
    rounds = reduction_rounds([range(4)])[rank]
    DeviceTransport(Axis(4, rank), message.device).reduce(message, rounds, lambda rows: rows[0])
    assert batches == [[("irecv", step.recv), *(("isend", peer) for peer in step.send)] for step in rounds]
