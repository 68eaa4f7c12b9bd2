"""Merges of ranks of one host by one native call: exact, the same bits on all ranks, and nobody is left asleep."""

import time

import pytest
import torch
import torch.distributed as dist

import attnmesh as am
from attnmesh.comm import topology
from attnmesh.comm.host_merge import agreed_host_merge
from attnmesh.comm.merges import MERGES
from attnmesh.comm.mismatch import checksum_of
from attnmesh.comm.rank_merge import RequestedMerge
from attnmesh.comm.topology import agreed_host_mailboxes
from attnmesh.errors import InputError, KernelError
from attnmesh.kernels.native.build import Library, library
from attnmesh.mesh.axes import Axis
from tests.support.ranks.groups import world_axis
from tests.support.ranks.pool import Pool, on_each_rank
from tests.support.truth.tolerances import FLOAT32, FLOAT32_SUMS

CPU = torch.device("cpu")

needs_library = pytest.mark.skipif(library().exchange is None, reason="there is no C++ compiler")


def partials(ranks: int, shape: tuple[int, ...], seed: int) -> list[am.Partial]:
    """Return the partials of all ranks, some of whose rows are empty."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for rank in range(ranks):
        out, lse = torch.randn(shape, generator=generator), 5 * torch.randn(shape[:-1], generator=generator)
        empty = torch.rand(shape[:-1], generator=generator) < (1.0 if rank == seed % (ranks + 1) else 0.2)
        found.append(am.Partial(out.masked_fill(empty[..., None], 0.0), lse.masked_fill(empty, -torch.inf)))
    return found


@on_each_rank
def merge_twice_each(how: str, shapes: list[tuple[int, ...]]) -> list[am.Partial]:
    """On a rank: merge twice each, the second time as a known kind."""
    found = []
    for seed, shape in enumerate(shapes):
        own, other = (partials(dist.get_world_size(), shape, number)[dist.get_rank()] for number in (seed, seed + 100))
        first, _, again = (am.merge_across(x, dist.group.WORLD, how=how) for x in (own, other, own))
        assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True))
        # What PyTorch computes from it can have other bits for another alignment, so other bits than on other ranks.
        assert {x.out.data_ptr() % 64 for x in (first, again)} == {0}
        found.append(again)
    return found


@pytest.mark.parametrize("how", ["tree", "direct", "auto"])
@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_merges_are_exact_and_alike(ranks: int, how: str, pool: Pool) -> None:
    shapes = [(1, 32, 1, 128), (3, 5, 7, 1), (2, 1, 1, 33), (1, 1, 1, 1), (1, 64, 4, 128), (1, 64, 9, 128)]
    results = pool.run(ranks, merge_twice_each, how, shapes)
    for seed, shape in enumerate(shapes):
        wide = [am.Partial(out.double(), lse.double()) for out, lse in partials(ranks, shape, seed)]
        expected = am.merge(*wide)
        for mine in results:
            torch.testing.assert_close(mine[seed].out.double(), expected.out, atol=FLOAT32, rtol=FLOAT32_SUMS)
            torch.testing.assert_close(mine[seed].lse.double(), expected.lse, atol=FLOAT32, rtol=FLOAT32)
            for one, other in zip(mine[seed], results[0][seed], strict=True):
                assert torch.equal(one, other)


@on_each_rank
def ask_if_native(shape: tuple[int, ...]) -> bool:
    return agreed_host_merge(world_axis(), shape, MERGES["tree"]) is not None


@needs_library
def test_short_messages_in_float32_are_one_native_call(pool: Pool) -> None:
    assert pool.run(2, ask_if_native, (1, 32, 1, 128)) == [True, True]
    assert pool.run(2, ask_if_native, (1, 64, 16, 128)) == [False, False]  # longer than a mailbox


@on_each_rank
def merge_after_the_late_one(rank: int, seconds: float) -> tuple[bool, float]:
    """On a rank: merge after the late one. Return whether it is right, and the share of time that the rank was busy."""
    own = am.Partial(torch.full((1, 2, 1, 4), float(dist.get_rank())), torch.zeros(1, 2, 1))
    am.merge_across(own, dist.group.WORLD, how="tree")
    start, busy = time.monotonic(), time.process_time()
    if dist.get_rank() == rank:
        time.sleep(seconds)
    out = am.merge_across(own, dist.group.WORLD, how="tree").out
    share = (time.process_time() - busy) / (time.monotonic() - start)
    return bool((out == (dist.get_world_size() - 1) / 2).all()), share


@needs_library
@pytest.mark.parametrize("late", [0, 2])
def test_ranks_that_wait_sleep_and_are_woken(late: int, pool: Pool) -> None:
    for right, share in pool.run(4, merge_after_the_late_one, late, 1.0):
        assert right
        assert share < 0.5  # a rank that polls is busy all the time


@on_each_rank
def merge_unlike_calls(odd: int, checked: bool | None) -> str:
    """On a rank: merge a known kind, of which one rank then makes another call."""
    own = am.Partial(torch.ones(1, 2, 1, 4), torch.zeros(1, 2, 1))
    other = am.Partial(torch.ones(1, 2, 2, 4), torch.zeros(1, 2, 2))
    for partial in (own, other):
        am.merge_across(partial, dist.group.WORLD, how="tree", checked=checked)
    try:
        out = am.merge_across(other if dist.get_rank() == odd else own, dist.group.WORLD, how="tree", checked=checked)
    except InputError as error:
        text = str(error)
    else:
        text = "NaN" if bool(out.out.isnan().all()) else "numbers"
    am.merge_across(own, dist.group.WORLD, how="tree")  # all go on
    return text


@pytest.mark.parametrize("odd", [0, 1, 2])
def test_known_calls_that_differ_raise_alike_or_are_nan(odd: int, pool: Pool) -> None:
    (text,) = set(pool.run(3, merge_unlike_calls, odd, None))
    assert "merge_across" in text
    assert "[1, 2, 2, 4]" in text
    assert set(pool.run(3, merge_unlike_calls, odd, False)) == {"NaN"}


@on_each_rank
def merge_where_one_lacks_the_library(rank: int) -> tuple[bool, torch.Tensor]:
    """On a rank: merge in a new group, of which one rank has no library."""
    group, before = dist.new_group(), topology.library
    if dist.get_rank() == rank:
        topology.library = Library  # type: ignore[assignment]
    try:
        place = Axis(dist.get_world_size(), dist.get_rank(), group)
        found = agreed_host_mailboxes(place)
        own = partials(place.size, (1, 4, 1, 8), 9)[place.index]
        return found is not None, am.merge_across(own, group, how="tree").out
    finally:
        topology.library = before


def test_where_one_rank_has_no_library_none_uses_it(pool: Pool) -> None:
    expected = am.merge(*partials(3, (1, 4, 1, 8), 9)).out
    for native, out in pool.run(3, merge_where_one_lacks_the_library, 1):
        assert not native
        torch.testing.assert_close(out, expected)


@on_each_rank
def merge_by_star() -> list[str]:
    """Merge partials of float32, which the native library takes, and of float64 by a name that nobody wrote."""
    said = []
    for dtype in (torch.float32, torch.float64):
        partial = am.Partial(torch.zeros(1, 2, 1, 4, dtype=dtype), torch.zeros(1, 2, 1, dtype=dtype))
        with pytest.raises(KernelError, match=r"auto or one of tree, direct, .*, given 'star'") as caught:
            RequestedMerge(world_axis(), "star", "replicated").run(partial, checksum_of(0, partial.lse))
        said.append(str(caught.value))
    return said


def test_a_merge_that_nobody_wrote_raises(pool: Pool) -> None:
    assert [len(said) for said in pool.run(2, merge_by_star)] == [2, 2]
