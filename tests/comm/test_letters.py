"""Exchanges under way through mailboxes: any number at once, finished in any order, and of any size."""

from random import Random

import pytest
import torch
import torch.distributed as dist

import attnmesh as am
from attnmesh.cli.launch import run_on_ranks
from attnmesh.comm.p2p import exchange_messages
from attnmesh.comm.shared_memory import SLOT
from attnmesh.comm.topology import share_numbers
from attnmesh.mesh.axes import Axis, Mesh
from attnmesh.mesh.shapes import AXES, Shape
from attnmesh.runtime.world import WORLD
from tests.support.mesh_problems import named_mesh
from tests.support.pool import Pool

CPU = torch.device("cpu")


def _message(number: int, source: int, target: int, size: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * number + 10 * source + target)
    return torch.randint(256, (size,), generator=generator, dtype=torch.uint8)


def _exchange_in_any_order(seed: int) -> tuple[int, int]:
    """On a rank: messages that came wrong, of exchanges of which up to five are under way; and letters left."""
    axis = Axis(dist.get_world_size(), dist.get_rank(), dist.group.WORLD)
    common, own = Random(seed), Random(f"{seed} {axis.index}")
    under_way, wrong = [], 0
    for number in range(30):
        size = common.choice((0, 1, 100, 5000, SLOT, SLOT + 1))
        peers = [peer for peer in range(axis.size) if peer != axis.index and common.random() < 2]
        sends = {peer: (_message(number, axis.index, peer, size),) for peer in peers}
        wanted = {peer: (torch.empty(size, dtype=torch.uint8, device="meta"),) for peer in peers}
        under_way.append((number, size, exchange_messages(sends, wanted, axis, CPU, "testing")))
        own.shuffle(under_way)
        while len(under_way) > own.randrange(1, 6) or (under_way and number == 29):
            finished, length, finish = under_way.pop()
            for peer, (x,) in finish().items():
                wrong += not torch.equal(x, _message(finished, peer, axis.index, length))
    return wrong, len(WORLD.letters)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_exchanges_end_in_any_order(ranks: int, pool: Pool) -> None:
    for seed in range(3):
        assert pool.run(ranks, _exchange_in_any_order, seed) == [(0, 0)] * ranks


def _share() -> bool:
    """On a rank of four: whether each knows the numbers of all, by shard, also if these do not fit on a board."""
    mesh = Mesh.of(named_mesh(Shape(1, 2, 2), AXES))
    right = True
    for count in (1, 6, 3, SLOT // 64, SLOT // 16, 7) * 5:
        table = share_numbers([mesh.shard * count + i for i in range(count)], mesh)
        right &= table == [[shard * count + i for i in range(count)] for shard in range(4)]
    return right


def test_numbers_of_all_ranks_by_shard(pool: Pool) -> None:
    assert pool.run(4, _share) == [True] * 4


def _attend_with_checks_of_one() -> str:
    """On a rank: the error where rank 0 compares its call of attention, and the other does not."""
    mesh, x = named_mesh(Shape(1, 2, 1), AXES), torch.ones(1, 2, 8, 4)
    options = {"mesh": mesh, "layout": am.Zigzag(), "length": 16}
    am.attention(x, x, x, **options)
    try:
        am.attention(x, x, x, checked=None if dist.get_rank() == 0 else False, **options)
    except am.errors.RankFailure as error:
        return str(error)
    return "no error"


def test_a_rank_that_compares_alone_is_noticed() -> None:
    one, other = run_on_ranks(2, _attend_with_checks_of_one)
    assert "it compares its call, while this rank waits for a message of another call" in other, other
    assert "is lost" in one
