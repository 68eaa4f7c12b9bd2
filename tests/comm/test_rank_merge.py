"""Merges between ranks that have checked their calls: results, checksums, and what a rank with an error sends."""

from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from attnmesh.comm.gather import all_gather_ints, announce_comparison, drop_unreceived
from attnmesh.comm.merges import MERGES, OUTPUTS, Merge
from attnmesh.comm.mismatch import checksum_of
from attnmesh.comm.rank_merge import RequestedMerge, highest_checksum, nan_unless_equal
from attnmesh.comm.transport import agreed_transport
from attnmesh.core.partial import Partial, merge_partials
from attnmesh.errors import KernelError
from attnmesh.mesh.axes import Axis, mesh_of_axis
from tests.support.ranks.groups import world_axis
from tests.support.ranks.pool import Pool, on_each_rank
from tests.support.truth.tolerances import FLOAT32, FLOAT32_SUMS

CPU = torch.device("cpu")
SHAPE = (2, 5, 3, 8)
"""Of a partial: 5 heads are no multiple of the ranks."""

LONG = (1, 8, 600, 64)
"""Of a partial whose message is too long to be received in place of a shorter one."""


def partials(shape: tuple[int, ...] = SHAPE, ranks: int = 3) -> list[Partial]:
    """Return the partials of all ranks. The last rank sees no key of the first sequence."""
    generator = torch.Generator().manual_seed(0)
    made = []
    for rank in range(ranks):
        out, lse = torch.randn(shape, generator=generator), 3 * torch.randn(shape[:-1], generator=generator)
        if rank == ranks - 1:
            out[0], lse[0] = 0.0, -torch.inf
        made.append(Partial(out, lse))
    return made


def like() -> Tensor:
    return torch.empty(0, dtype=torch.float32)


def call(number: int) -> Tensor:
    """Return the checksum of a call."""
    return checksum_of(number, like())


def test_one_rank_merges_nothing() -> None:
    partial, checksum = partials()[0], call(7)
    merged, highest = RequestedMerge(Axis(), "tree", "replicated").run(partial, checksum)
    assert merged is partial
    assert highest is checksum


def test_out_is_nan_unless_checksums_are_equal() -> None:
    partial = partials()[0]
    assert torch.equal(nan_unless_equal(partial, call(7)).out, partial.out)
    highest = torch.stack((call(7), call(8))).amax(0)
    unequal = nan_unless_equal(partial, highest)
    assert bool(unequal.out.isnan().all())
    assert torch.equal(unequal.lse, partial.lse)


@on_each_rank
def merge_with_checksum(merge: str, output: str, reproducible: bool, wire: torch.dtype | None) -> tuple[Partial, float]:
    axis = world_axis()
    own = partials(SHAPE, axis.size)[axis.index]
    result, checksum = RequestedMerge(axis, merge, output, wire, reproducible).run(own, call(7))
    return result, checksum.sum().item()


@pytest.mark.parametrize("output", OUTPUTS)
@pytest.mark.parametrize(
    ("ranks", "merge", "reproducible"), [*((3, name, False) for name in ("auto", *MERGES)), (4, "tree", True)], ids=str
)
def test_every_merge_gives_the_merge_of_all_partials(
    ranks: int, merge: str, reproducible: bool, output: str, pool: Pool
) -> None:
    expected = merge_partials([Partial(*(x.double() for x in partial)) for partial in partials(SHAPE, ranks)])
    for rank, (found, checksum) in enumerate(pool.run(ranks, merge_with_checksum, merge, output, reproducible, None)):
        heads = Axis(ranks, rank).slice_of(SHAPE[1]) if output == "heads" else slice(None)
        assert checksum == 0
        for given, right in zip(found, expected, strict=True):
            torch.testing.assert_close(given.double(), right[:, heads], atol=FLOAT32_SUMS, rtol=FLOAT32_SUMS)


def test_partials_may_travel_in_half_precision(pool: Pool) -> None:
    expected = merge_partials(partials())
    first, *others = pool.run(3, merge_with_checksum, "direct", "replicated", False, torch.bfloat16)
    for found, _ in (first, *others):
        assert found.out.dtype == torch.float32
        torch.testing.assert_close(found.lse, expected.lse, atol=FLOAT32_SUMS, rtol=FLOAT32_SUMS)  # it is not rounded
        torch.testing.assert_close(found.out, expected.out, atol=3e-2, rtol=0)  # outputs of 4, rounded by 2^-8
        assert not torch.allclose(found.out, expected.out, atol=FLOAT32)
        assert torch.equal(found.out, first[0].out)


class Unlike(NamedTuple):
    """What becomes of a merge whose ranks call otherwise, and of the next one."""

    out_is_nan: bool
    checksum_tells: bool
    next_is_finite: bool


@on_each_rank
def merge_with_another_call(merge: str, output: str, shape: tuple[int, ...], wire: torch.dtype | None = None) -> Unlike:
    rank, axis = dist.get_rank(), world_axis()
    own = partials(shape, 2)[rank]
    requested = RequestedMerge(axis, merge, output, wire)
    result, checksum = requested.run(own, call(7 + rank))
    again, _ = requested.run(own, call(7))
    return Unlike(bool(result.out.isnan().all()), checksum.sum().item() != 0, bool(again.out.isfinite().all()))


@pytest.mark.parametrize("output", OUTPUTS)
@pytest.mark.parametrize("shape", [SHAPE, LONG], ids=["short", "long"])
@pytest.mark.parametrize("merge", MERGES)
def test_ranks_with_other_calls_get_nan(merge: str, shape: tuple[int, ...], output: str, pool: Pool) -> None:
    for unlike in pool.run(2, merge_with_another_call, merge, output, shape):
        assert unlike.out_is_nan
        assert unlike.checksum_tells
        assert unlike.next_is_finite


@pytest.mark.parametrize(("merge", "output"), [("tree", "replicated"), ("direct", "replicated"), ("direct", "heads")])
def test_ranks_with_other_calls_get_nan_where_no_native_call_merges(merge: str, output: str, pool: Pool) -> None:
    assert pool.run(2, merge_with_another_call, merge, output, SHAPE, torch.bfloat16) == [Unlike(True, True, True)] * 2


@on_each_rank
def merge_with_poison(
    merge: str, output: str, shape: tuple[int, ...], reproducible: bool = False
) -> tuple[bool, float]:
    """Rank 1 has an error. Return whether this rank has no result, and what its checksums add up to."""
    requested = RequestedMerge(world_axis(), merge, output, reproducible=reproducible)
    if dist.get_rank() == 1:
        return True, requested.send_poison().sum().item()
    result, checksum = requested.run(partials(shape)[0], call(7))
    return bool(result.out.isnan().all()), checksum.sum().item()


@pytest.mark.parametrize("shape", [SHAPE, LONG], ids=["short", "long"])
@pytest.mark.parametrize(("merge", "output"), [("tree", "replicated"), ("direct", "heads"), ("auto", "replicated")])
def test_poison_reaches_all_ranks(merge: str, output: str, shape: tuple[int, ...], pool: Pool) -> None:
    first, (_, poisoned_sum), third = pool.run(3, merge_with_poison, merge, output, shape)
    assert first == third == (True, float("inf"))
    assert poisoned_sum > 0, "the rank that sends poison does not take its own merge for one of equal calls"


def test_poison_goes_by_the_rounds_of_a_reproducible_merge(pool: Pool) -> None:
    first, (_, poisoned_sum), *others = pool.run(4, merge_with_poison, "auto", "replicated", SHAPE, True, deadline=60)
    assert [first, *others] == [(True, float("inf"))] * 3
    assert poisoned_sum > 0


@on_each_rank
def merge_heads_with_poison() -> bool:
    """Rank 1 has an error. The fastest merge is another one than that of heads, which "auto" takes."""
    axis = Axis(dist.get_world_size(), dist.get_rank(), dist.new_group())
    requested = RequestedMerge(axis, "auto", "heads")
    with mock.patch.object(type(agreed_transport(axis, CPU)), "agreed_fastest", return_value=MERGES["tree"]):
        if axis.index == 1:
            return requested.send_poison().sum().item() != 0
        return bool(requested.run(partials(SHAPE)[0], call(7))[0].out.isnan().all())


def test_poison_goes_by_the_merge_of_heads(pool: Pool) -> None:
    assert pool.run(3, merge_heads_with_poison, deadline=60) == [True] * 3


@on_each_rank
def choose_merges_that_differ() -> str:
    """Ask for "auto" on rank 0 and for a name on rank 1, in a group whose merges are not timed yet."""
    axis = Axis(2, dist.get_rank(), dist.new_group())
    return RequestedMerge(axis, "gather" if axis.index else "auto", "heads").agreed_merge(CPU).name


def test_ranks_time_merges_together_whatever_each_asks_for(pool: Pool) -> None:
    assert pool.run(2, choose_merges_that_differ, deadline=60) == ["direct", "gather"]


@on_each_rank
def merge_by_a_wrong_name(name: Any) -> Tensor:
    """Rank 1 was given what names no merge and no output. It takes part all the same, in the merge of "auto"."""
    axis = world_axis()
    if dist.get_rank() == 1:
        return RequestedMerge(axis, name, "none").send_poison()
    return RequestedMerge(axis, "auto", "replicated").run(partials()[0], call(7))[0].out


@pytest.mark.parametrize("name", ["best", ["tree"]], ids=["unknown", "list"])
def test_a_rank_with_a_wrong_name_sends_poison_too(name: Any, pool: Pool) -> None:
    merged, found = pool.run(2, merge_by_a_wrong_name, name)
    assert merged.isnan().all(), merged
    assert found.sum() != 0, found


@on_each_rank
def compare_while_merges_are_timed() -> list[list[int]]:
    """Return the ranks that have compared: rank 1 instead of a merge that rank 0 would have timed first."""
    axis = world_axis()
    mesh = mesh_of_axis(axis)
    transport = agreed_transport(axis, CPU)

    def timed(*_: object, **__: object) -> Merge:
        message = torch.zeros(64, dtype=torch.uint8)
        transport.all_to_all([message] * axis.size)
        raise AssertionError("rank 1 has sent nothing")

    if axis.index == 0:
        with mock.patch.object(RequestedMerge, "agreed_merge", timed):
            merged, checksum = RequestedMerge(axis, "auto", "heads").run(partials()[0], call(7))
        assert float(checksum.sum()) != 0
        assert bool(merged.out.isnan().all())
        assert (merged.out.shape[1], merged.lse.shape[1]) == (3, 3), "of 5 heads"
    announce_comparison(mesh)
    compared = all_gather_ints([axis.index], mesh)
    drop_unreceived(mesh)
    all_gather_ints([0], mesh)
    return compared


def test_a_rank_that_times_merges_compares_with_one_that_does(pool: Pool) -> None:
    assert pool.run(2, compare_while_merges_are_timed) == [[[0], [1]]] * 2


@on_each_rank
def find_highest_checksums() -> tuple[list[float], list[float]]:
    axis = world_axis()
    own = torch.tensor([float(axis.index), -float(axis.index)])
    merged = RequestedMerge(axis, "tree", "replicated").merge_checksums(own)
    return highest_checksum(own, axis).tolist(), merged.tolist()


def test_each_rank_gets_the_maximum_of_both_numbers(pool: Pool) -> None:
    assert pool.run(3, find_highest_checksums) == [([2.0, 0.0], [2.0, 0.0])] * 3


@on_each_rank
def choose_merge(merge: str, output: str, reproducible: bool) -> str:
    return RequestedMerge(world_axis(), merge, output, reproducible=reproducible).agreed_merge(CPU).name


@pytest.mark.parametrize("name", MERGES)
def test_a_merge_is_chosen_by_its_name(name: str, pool: Pool) -> None:
    assert pool.run(2, choose_merge, name, "replicated", False) == [name] * 2


def test_a_reproducible_merge_is_a_tree(pool: Pool) -> None:
    for name in ("auto", "direct", "gather"):
        (found,) = set(pool.run(2, choose_merge, name, "heads", True))
        assert found == "tree"


class Names(NamedTuple):
    """Of merges: those chosen for each output, and the fastest."""

    replicated: str
    heads: str
    fastest: str


@on_each_rank
def choose_by_auto() -> Names:
    axis = world_axis()
    names = [RequestedMerge(axis, "auto", output).agreed_merge(CPU).name for output in OUTPUTS]
    return Names(*names, agreed_transport(axis, CPU).agreed_fastest().name)


def test_auto_is_the_fastest_or_sends_heads_to_their_ranks(pool: Pool) -> None:
    for names in pool.run(2, choose_by_auto):
        assert names.replicated == names.fastest
        assert names.heads == "direct"


@on_each_rank
def catch_error_of_wrong_merge() -> str:
    with pytest.raises(KernelError) as caught:
        RequestedMerge(world_axis(), "best", "replicated").agreed_merge(CPU)
    return str(caught.value)


def test_an_unknown_merge_is_refused_by_name(pool: Pool) -> None:
    for message in pool.run(2, catch_error_of_wrong_merge):
        assert message.startswith(f"merge: expected auto or one of {', '.join(MERGES)}, given 'best'")
