"""Exchanges along an axis: what arrives, in which order, as views or copies, and how it is counted."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from attnmesh.comm import p2p
from attnmesh.comm.mismatch import CallsDifferError
from attnmesh.comm.p2p import (
    LONG_MESSAGE_BYTES,
    Channel,
    all_to_all,
    all_to_all_tokens,
    is_run,
    meta_like,
    select_tokens,
)
from attnmesh.errors import RankFailure
from attnmesh.mesh.axes import Axis
from attnmesh.mesh.schedule import GatherStep
from attnmesh.runtime.counters import count_traffic
from tests.support.ranks.groups import world_axis
from tests.support.ranks.pool import Pool, on_each_rank

CPU = torch.device("cpu")
POSITIONS = ([0, 2, 5], [1, 3, 4, 6])
"""Positions of the tokens of two ranks."""


def world_channel() -> Channel:
    return Channel(world_axis(), CPU)


def indices(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int64)


def tokens_at(positions: Sequence[int], heads: int = 2) -> tuple[Tensor, Tensor]:
    """Return vectors and scalars of tokens, whose numbers tell the position and the head."""
    numbers = torch.tensor(positions, dtype=torch.float64) + 100 * torch.arange(heads)[:, None]
    return numbers[None, :, :, None].expand(1, heads, len(positions), 3).contiguous(), numbers[None].contiguous()


def nothing_but(keep: Tensor) -> GatherStep:
    return GatherStep((), (), keep, None, keep, (), ())


def step_of(rank: int, of_ranks: Sequence[Sequence[int]] = POSITIONS) -> GatherStep:
    """Return the step in which each of two ranks sends all its tokens to the other, and keeps them."""
    own, other = of_ranks[rank], of_ranks[1 - rank]
    order = indices(*own, *other).argsort()
    whole = sorted([*own, *other])
    own_places, other_places = (indices(*map(whole.index, positions)) for positions in (own, other))
    mine = torch.arange(len(own))
    return GatherStep(
        send=((1 - rank, mine),),
        receive=((1 - rank, len(other)),),
        keep=mine,
        permutation=order,
        positions=indices(*whole),
        return_to=((rank, own_places), (1 - rank, other_places)),
        return_from=((rank, mine), (1 - rank, mine)),
    )


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [([3], True), ([3, 4, 5], True), ([3, 5], False), ([0, 1, 3], False), ([], False)],
    ids=str,
)
def test_a_run_is_consecutive_and_not_empty(tokens: list[int], expected: bool) -> None:
    assert is_run(indices(*tokens)) is expected


def test_tokens_of_a_run_are_views() -> None:
    x, y = tokens_at(range(6))
    for tensor, part in zip((x, y), select_tokens((x, y), indices(2, 3, 4)), strict=True):
        assert torch.equal(part, tensor[:, :, 2:5])
        assert part.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
    assert select_tokens((x,), torch.arange(6))[0] is x


def test_tokens_that_are_no_run_are_copies() -> None:
    (x,) = select_tokens(tokens_at(range(6))[1:], indices(0, 2, 5))
    assert x[0, 0].tolist() == [0, 2, 5]
    (reversed_tokens,) = select_tokens(tokens_at(range(3))[1:], indices(2, 1, 0), ascending=False)
    assert reversed_tokens[0, 0].tolist() == [2, 1, 0]
    (none,) = select_tokens(tokens_at(range(3))[1:], indices())
    assert none.shape == (1, 2, 0)


def test_shapes_to_receive_take_no_memory() -> None:
    x = torch.zeros(2, 3, 4, 5, dtype=torch.bfloat16)
    assert meta_like(x, 7).shape == (2, 3, 7, 5)
    assert meta_like(x, 7, dim=1).shape == (2, 7, 4, 5)
    assert (meta_like(x, 7).dtype, meta_like(x, 7).device.type) == (torch.bfloat16, "meta")


def test_a_rank_alone_keeps_its_tokens() -> None:
    tensors = tokens_at(range(5))
    (x, y) = Channel(Axis(), CPU).begin_gather(tensors, nothing_but(indices(1, 2)))()
    assert (x[0, 0, :, 0].tolist(), y[0, 1].tolist()) == ([1, 2], [101, 102])
    assert x.untyped_storage().data_ptr() == tensors[0].untyped_storage().data_ptr()
    (own,) = all_to_all([tensors], [tensors], Axis())
    assert own is tensors


@on_each_rank
def gather_tokens(rank_that_keeps_none: int | None) -> tuple[list[int], list[int]]:
    rank = dist.get_rank()
    step = step_of(rank)
    if rank == rank_that_keeps_none:
        step = GatherStep(step.send, step.receive, indices(), None, indices(*POSITIONS[1 - rank]), (), ())
    x, y = world_channel().begin_gather(tokens_at(POSITIONS[rank]), step)()
    assert torch.equal(x[..., 0], y)
    assert torch.equal(y[0, 1], y[0, 0] + 100)
    return y[0, 0].int().tolist(), step.positions.tolist()


def test_tokens_of_all_ranks_arrive_by_position(pool: Pool) -> None:
    assert pool.run(2, gather_tokens, None) == [([*range(7)], [*range(7)])] * 2


def test_a_rank_may_receive_tokens_and_keep_none(pool: Pool) -> None:
    first, second = pool.run(2, gather_tokens, 0)
    assert first == (POSITIONS[1], POSITIONS[1])
    assert second == ([*range(7)], [*range(7)])


@on_each_rank
def gather_beside_an_idle_rank() -> list[int]:
    """Rank 2 has no message in the first exchange along an axis, which makes the axis' transport on all ranks."""
    rank, group = dist.get_rank(), dist.new_group()
    axis = Axis(3, rank, group)
    step = nothing_but(indices(0)) if rank == 2 else step_of(rank)
    tokens = [7] if rank == 2 else POSITIONS[rank]
    (gathered,) = Channel(axis, CPU).begin_gather(tokens_at(tokens)[1:], step)()
    return gathered[0, 0].int().tolist()


def test_a_rank_without_messages_makes_the_transport_with_the_others(pool: Pool) -> None:
    assert pool.run(3, gather_beside_an_idle_rank, deadline=60) == [[*range(7)], [*range(7)], [7]]


class Counted(NamedTuple):
    """What a rank receives."""

    vectors: int
    scalars: int
    bytes: int


@on_each_rank
def count_gathered_bytes() -> Counted:
    with count_traffic() as traffic:
        world_channel().begin_gather(tokens_at(POSITIONS[dist.get_rank()]), step_of(dist.get_rank()))()
    return Counted(traffic.vectors, traffic.scalars, traffic.bytes)


def test_what_a_rank_receives_is_counted(pool: Pool) -> None:
    """Two heads, of vectors of 3 and one scalar each, in float64."""
    for tokens, counted in zip((4, 3), pool.run(2, count_gathered_bytes), strict=True):
        assert counted.vectors == tokens * 2 * 3
        assert counted.scalars == tokens * 2
        assert counted.bytes == tokens * 2 * 4 * 8


@on_each_rank
def return_results(of_ranks: Sequence[Sequence[int]]) -> tuple[list[tuple[list[int], list[int]]], bool]:
    """Return the tokens and results that come back, and whether this rank's own results keep all others alive."""
    rank = dist.get_rank()
    results = (tokens_at(range(7))[1] + 1000 * (rank + 1),)
    parts = world_channel().begin_return(results, step_of(rank, of_ranks))()
    own = parts[0][1][0]
    keeps_all = own.untyped_storage().nbytes() == results[0].untyped_storage().nbytes()
    return [(tokens.tolist(), x[0, 0].int().tolist()) for tokens, (x,) in parts], keeps_all


@pytest.mark.parametrize("of_ranks", [POSITIONS, ([0, 1, 2], [3, 4, 5, 6])], ids=["apart", "runs"])
def test_results_return_to_the_owners_of_their_tokens(of_ranks: Sequence[Sequence[int]], pool: Pool) -> None:
    for rank, (parts, keeps_all) in enumerate(pool.run(2, return_results, of_ranks)):
        own = of_ranks[rank]
        senders = (rank, 1 - rank)
        assert parts == [([*range(len(own))], [1000 * (sender + 1) + x for x in own]) for sender in senders]
        assert not keeps_all


@on_each_rank
def swap_two_dtypes() -> list[tuple[list[float], list[int]]]:
    """Swap messages of two dtypes, of which rank p gets p + 1 numbers from each rank."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    parts = [(torch.full((p + 1,), rank + 0.5), torch.full((3,), 10 * rank + p)) for p in range(ranks)]
    shapes = [(torch.empty(rank + 1, device="meta"), torch.empty(3, dtype=torch.int64, device="meta"))] * ranks
    return [(x.tolist(), y.tolist()) for x, y in all_to_all(parts, shapes, world_axis())]


@pytest.mark.parametrize("ranks", [2, 3])
def test_each_rank_gets_its_part_of_every_rank(ranks: int, pool: Pool) -> None:
    for rank, arrived in enumerate(pool.run(ranks, swap_two_dtypes)):
        assert arrived == [([sender + 0.5] * (rank + 1), [10 * sender + rank] * 3) for sender in range(ranks)]


@on_each_rank
def swap_tokens(dim: int) -> list[tuple[tuple[int, ...], float]]:
    """Send the same tokens to all ranks: none on rank 0, 2 on rank 1, 4 on rank 2."""
    shape = [1, 2, 2, 2]
    shape[dim] = 2 * dist.get_rank()
    own = torch.full(shape, float(dist.get_rank()))
    counts = [2 * rank for rank in range(dist.get_world_size())]
    arrived = all_to_all_tokens([own] * len(counts), counts, world_axis(), dim)
    return [(tuple(x.shape), float(x.sum())) for x in arrived]


@pytest.mark.parametrize("dim", [1, 2])
def test_ranks_may_swap_uneven_tokens(dim: int, pool: Pool) -> None:
    expected = []
    for rank in range(3):
        shape = [1, 2, 2, 2]
        shape[dim] = 2 * rank
        expected.append((tuple(shape), 8.0 * rank * rank))
    assert pool.run(3, swap_tokens, dim) == [expected] * 3


@on_each_rank
def exchange_odd_dtypes() -> list[Tensor]:
    """Exchange tensors whose bytes would not be aligned if they were packed in their order."""
    rank = dist.get_rank()
    tensors = (
        torch.tensor([True, False, bool(rank)]),
        torch.tensor([1.5, rank], dtype=torch.bfloat16),
        torch.tensor([[7, rank]], dtype=torch.int64),
        torch.tensor(rank + 0.25, dtype=torch.float32),
        torch.empty(0, 4, dtype=torch.float64),
    )
    finish = world_channel().begin_messages({1 - rank: tensors}, {1 - rank: tensors}, "testing")
    return [*finish()[1 - rank]]


def test_tensors_of_several_dtypes_are_one_message(pool: Pool) -> None:
    for rank, arrived in enumerate(pool.run(2, exchange_odd_dtypes)):
        peer = 1 - rank
        flags, halves, ints, scalar, empty = arrived
        assert flags.tolist() == [True, False, bool(peer)]
        assert (halves.dtype, halves.tolist()) == (torch.bfloat16, [1.5, peer])
        assert ints.tolist() == [[7, peer]]
        assert (scalar.shape, scalar.item()) == ((), peer + 0.25)
        assert (empty.shape, empty.dtype) == ((0, 4), torch.float64)


@on_each_rank
def exchange_dtypes_of_one_width() -> list[Tensor]:
    rank = dist.get_rank()
    tensors = torch.tensor([0.1, rank]), torch.tensor([(1 << 24) + 1, rank], dtype=torch.int32)
    finish = world_channel().begin_messages({1 - rank: tensors}, {1 - rank: tensors}, "testing")
    return [*finish()[1 - rank]]


def test_tensors_of_one_width_keep_their_dtypes(pool: Pool) -> None:
    for rank, (floats, ints) in enumerate(pool.run(2, exchange_dtypes_of_one_width)):
        assert torch.equal(floats, torch.tensor([0.1, 1 - rank]))
        assert torch.equal(ints, torch.tensor([(1 << 24) + 1, 1 - rank], dtype=torch.int32))


@on_each_rank
def exchange_long_messages(one_at_a_time: bool) -> list[float]:
    """Return one number of each rank's message, of which each is too long to go out of turn."""
    rank, axis = dist.get_rank(), world_axis()
    parts = [(torch.full((LONG_MESSAGE_BYTES,), 10.0 * rank + peer),) for peer in range(axis.size)]
    arrived = [x for (x,) in Channel(axis, CPU, one_at_a_time).begin_all_to_all(parts, parts)()]
    assert all(bool((x == x[0]).all()) for x in arrived)
    return [x[0].item() for x in arrived]


@pytest.mark.parametrize("one_at_a_time", [False, True])
def test_long_messages_arrive_at_once_or_in_turn(one_at_a_time: bool, pool: Pool) -> None:
    for rank, arrived in enumerate(pool.run(4, exchange_long_messages, one_at_a_time)):
        assert arrived == [10.0 * sender + rank for sender in range(4)]


class BrokenOff:
    """A transport whose first peer compares its call instead of sending. It notes whether messages have fixed sizes."""

    def __init__(self) -> None:
        self.fixed: list[bool] = []

    def sends_in_turn(self, peer: int, message: Tensor) -> bool:
        return True

    def post(self, posts: Sequence[object], activity: str, *, is_fixed_size: bool = False) -> list[Callable[[], None]]:
        self.fixed.append(is_fixed_size)

        def wait() -> None:
            raise CallsDifferError(1)

        return [wait if len(posts) > 1 else lambda: None for _ in posts]


def test_a_peer_that_compares_its_call_ends_an_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages have no checksum, so mailboxes look at their sizes, also of those that are sent in turn."""
    transport = BrokenOff()
    monkeypatch.setattr(p2p, "agreed_transport", lambda *_: transport)
    monkeypatch.setattr(
        p2p,
        "disconnect_and_diagnose",
        lambda axis, activity, peer, error: RankFailure([peer], activity, axis.name, str(error)),
    )
    part = (torch.zeros(LONG_MESSAGE_BYTES),)
    finish = Channel(Axis(4, 0, name="keys"), CPU, True).begin_all_to_all([part] * 4, [part] * 4)
    with pytest.raises(RankFailure, match=r"rank 1 is lost.*it compares its call, while this rank waits for a message"):
        finish()
    assert transport.fixed == [True] * 4
