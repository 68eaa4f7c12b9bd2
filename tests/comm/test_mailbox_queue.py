"""Exchanges under way through mailboxes: any number at once, finished in any order, and of any size."""

from random import Random
from threading import Event
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import attnmesh as am
from attnmesh.cli.launch import run_on_ranks
from attnmesh.comm import failures, mailbox_queue
from attnmesh.comm.gather import all_gather_ints
from attnmesh.comm.mailboxes import MESSAGE_BYTES, PeerLostError
from attnmesh.comm.p2p import Channel
from attnmesh.mesh.axes import RankMesh
from attnmesh.mesh.shapes import AXES, Shape
from attnmesh.mesh_attention import executor
from tests.support.ranks.groups import world_axis
from tests.support.ranks.pool import Pool, on_each_rank
from tests.support.truth.mesh_problems import named_mesh
from tests.support.truth.tolerances import FLOAT32_SUMS

CPU = torch.device("cpu")


def _message(number: int, source: int, target: int, size: int) -> torch.Tensor:
    """Return random bytes, which come again after so many that no part of a message is like another in its place."""
    generator = torch.Generator().manual_seed(1000 * number + 10 * source + target)
    few = torch.randint(256, (4093,), generator=generator, dtype=torch.uint8)
    return few.repeat(-(-size // len(few)))[:size]


@on_each_rank
def exchange_in_any_order(seed: int) -> tuple[int, int]:
    """On a rank: messages that came wrong, of exchanges of which up to five are under way; and messages left."""
    axis = world_axis()
    common, own = Random(seed), Random(f"{seed} {axis.index}")
    under_way = []
    wrong = 0
    for number in range(30):
        size = common.choice(
            (0, 1, 100, 5000, MESSAGE_BYTES, MESSAGE_BYTES + 1, 2 * MESSAGE_BYTES, 2 * MESSAGE_BYTES + 1)
        )
        peers = [peer for peer in range(axis.size) if peer != axis.index and common.random() < 2]
        sends = {peer: (_message(number, axis.index, peer, size),) for peer in peers}
        wanted = {peer: (torch.empty(size, dtype=torch.uint8, device="meta"),) for peer in peers}
        under_way.append((number, size, Channel(axis, CPU).begin_messages(sends, wanted, "testing")))
        own.shuffle(under_way)
        while len(under_way) > own.randrange(1, 6) or (under_way and number == 29):
            finished, length, finish = under_way.pop()
            for peer, (x,) in finish().items():
                wrong += not torch.equal(x, _message(finished, peer, axis.index, length))
    return wrong, len(mailbox_queue.PENDING_MESSAGES)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_exchanges_end_in_any_order(ranks: int, pool: Pool) -> None:
    for seed in range(3):
        assert pool.run(ranks, exchange_in_any_order, seed) == [(0, 0)] * ranks


@on_each_rank
def share_numbers_of_all() -> None:
    """On a rank of four: each knows the numbers of all, by shard, also if these do not fit on a board."""
    mesh = RankMesh.of(named_mesh(Shape(1, 2, 2), AXES))
    for count in (1, 6, 3, MESSAGE_BYTES // 64, MESSAGE_BYTES // 16, 7) * 5:
        table = all_gather_ints([mesh.shard_index * count + i for i in range(count)], mesh)
        assert table == [[shard * count + i for i in range(count)] for shard in range(4)], (count, table)


def test_each_rank_knows_the_numbers_of_all_by_shard(pool: Pool) -> None:
    pool.run(4, share_numbers_of_all)


def _inputs(scale: float = 1.0) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
    """On a rank: its shards of q, k and v, and the output for its queries."""
    whole = scale * torch.randn(3, 1, 2, 8 * dist.get_world_size(), 4, generator=torch.Generator().manual_seed(0))
    own = slice(8 * dist.get_rank(), 8 * dist.get_rank() + 8)
    expected = torch.nn.functional.scaled_dot_product_attention(*whole, is_causal=True)
    return tuple(whole[:, :, :, own]), expected[:, :, own]


def _attends(mesh: DeviceMesh, scale: float = 1.0, **options: Any) -> bool:
    """On a rank: whether attention is right."""
    parts, expected = _inputs(scale)
    out = am.attention(*parts, mesh=mesh, layout=am.Contiguous(), exchange="ring", **options)
    return torch.allclose(out, expected, atol=FLOAT32_SUMS)


@on_each_rank
def attend_with_checks_of_one() -> list[str]:
    """On a rank: what comes of calls of which the first is compared by rank 0 alone, and the others by all."""
    mesh, found = named_mesh(Shape(1, 2, 1), AXES), list[str]()
    failures.GRACE_PERIOD = 0.5  # of two ranks each suspects the other, whatever it has noted
    for number in range(3):
        checked = False if number == 1 and dist.get_rank() else None
        try:
            found.append(f"right: {_attends(mesh, 1.0 + number, length=16, checked=checked)}")
        except am.errors.RankFailure as error:
            found.append(str(error))
    return found


def test_a_rank_that_compares_alone_is_noticed_and_nothing_wrong_comes_after() -> None:
    one, other = run_on_ranks(2, attend_with_checks_of_one)
    assert one[0] == other[0] == "right: True"
    assert "it compares its call, while this rank waits for a message of another call" in other[1], other
    assert all("is lost" in text for text in (*one[1:], *other[2:])), (one, other)


@on_each_rank
def fail_and_go_on() -> dict[str, bool]:
    """On a rank: whether a merge and attention are right after a call that failed on all ranks between exchanges."""
    axis = world_axis()
    device_mesh = named_mesh(Shape(1, axis.size, 1), AXES)
    assert _attends(device_mesh)
    with mock.patch.object(executor, "attend_visible", side_effect=MemoryError), pytest.raises(MemoryError):
        _attends(device_mesh, 2.0)
    partial = am.Partial(torch.full((1, 2, 1, 4), float(axis.index)), torch.zeros(1, 2, 1))
    merged = am.merge_across(partial, device_mesh.get_group("queries"), how="tree").out
    right = torch.allclose(merged, torch.full_like(merged, (axis.size - 1) / 2))
    return {"merge": right, "attention": _attends(device_mesh, 3.0)}


@pytest.mark.parametrize("ranks", [2, 4])
def test_calls_after_one_that_was_broken_off_are_right(ranks: int, pool: Pool) -> None:
    assert pool.run(ranks, fail_and_go_on) == [{"merge": True, "attention": True}] * ranks


@on_each_rank
def attend_without_tokens() -> None:
    """On a rank: attention along a new group, not compared, where the second rank has no token."""
    sizes = 10, 0, 10
    mesh = DeviceMesh.from_group(dist.new_group(), "cpu", mesh_dim_names=("queries",))
    x = torch.ones(1, 2, sizes[dist.get_rank()], 8)
    out = am.attention(x, x, x, mesh=mesh, layout=am.Split(sizes), length=20, key_length=20, checked=False)
    dist.barrier()
    torch.testing.assert_close(out, x, rtol=1e-5, atol=1e-8)  # as `torch.allclose` by default


def test_a_rank_without_tokens_meets_the_others(pool: Pool) -> None:
    pool.run(3, attend_without_tokens)


def test_an_error_of_the_thread_that_moves_messages_is_raised() -> None:
    moved = Event()

    def move() -> None:
        moved.set()
        raise PeerLostError(1, "rank 1 does not answer")

    with (
        mock.patch.object(mailbox_queue, "PENDING_MESSAGES", [mock.sentinel.message]),
        mock.patch.object(mailbox_queue, "_move", move),
        pytest.raises(PeerLostError, match="does not answer"),
        mailbox_queue.moved_by_thread(),
    ):
        moved.wait(10)
