"""Merging partials across ranks: the same bits everywhere, on any number of ranks, and as one merge would have it."""

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import attnmesh as am
from attnmesh import errors
from attnmesh.comm.merges import MERGES
from attnmesh.comm.topology import agreed_hosts
from attnmesh.mesh.axes import Axis
from attnmesh.runtime.counters import count_traffic
from tests.support.ranks.groups import group_of, world_axis
from tests.support.ranks.pool import Pool, on_each_rank
from tests.support.truth.problems import numbers
from tests.support.truth.seeds import rotated
from tests.support.truth.tolerances import FLOAT32, FLOAT32_SUMS, assert_near, worst


@on_each_rank
def merge_halves(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    positions = torch.arange(12)
    mine = positions.chunk(2)[dist.get_rank()]  # of the keys
    part = am.attend(q, k[:, :, mine], v[:, :, mine], mask=am.Causal(), q_positions=positions, k_positions=mine)
    return am.merge_across(part, dist.group.WORLD).out


def test_two_ranks_with_half_of_the_keys_have_attention_to_all(pool: Pool) -> None:
    q, k, v = numbers(3, 1, 2, 12, 8)
    expected = scaled_dot_product_attention(q.double(), k.double(), v.double(), is_causal=True)
    for out in pool.run(2, merge_halves, q, k, v):
        assert_near(out.double(), expected, FLOAT32)


# --- any partials ---


def partial_of(rank: int, dtype: torch.dtype) -> am.Partial:
    """Rank 1 has seen nothing, and nobody has in the last row."""
    generator = torch.Generator().manual_seed(rank)
    out = torch.randn(2, 9, 3, 8, generator=generator).to(dtype)
    lse = torch.randn(2, 9, 3, generator=generator, dtype=torch.promote_types(dtype, torch.float32)) * 5
    blind = torch.full_like(lse, rank == 1, dtype=torch.bool)
    blind[..., -1] = True
    return am.Partial(out.masked_fill(blind.unsqueeze(-1), 0.0), lse.masked_fill(blind, -torch.inf))


@on_each_rank
def merge_among(ranks: int, dtype: torch.dtype, options: dict[str, object]) -> am.Partial | None:
    group = group_of(ranks)
    if group is None:
        return None
    given = partial_of(dist.get_rank(), dtype)
    before = [x.clone() for x in given]
    result = am.merge_across(given, group, **options)
    assert all(torch.equal(x, y) for x, y in zip(given, before, strict=True))
    return result


@pytest.mark.parametrize(
    ("ranks", "how", "dtype"),
    rotated([*range(1, 9)], ["auto", *MERGES], [torch.float64, torch.float32, torch.bfloat16, torch.float16], every=4),
)
def test_all_ranks_hold_the_merge_and_the_same_bits(pool: Pool, ranks: int, how: str, dtype: torch.dtype) -> None:
    results = [x for x in pool.run(8, merge_among, ranks, dtype, {"how": how}) if x is not None]
    expected = am.merge(*(am.Partial(*(x.double() for x in partial_of(rank, dtype))) for rank in range(ranks)))
    # Ranks merge in float32 and round once, so an element is off by a rounding of its own dtype, and few of float32's.
    tolerance = {
        "rtol": torch.finfo(dtype).eps,
        "atol": 16 * torch.finfo(torch.promote_types(dtype, torch.float32)).eps,
    }
    for out, lse in results:
        assert out.dtype == dtype
        torch.testing.assert_close(out.double(), expected.out, **tolerance)
        torch.testing.assert_close(lse.double(), expected.lse, **tolerance)
        assert torch.equal(out, results[0].out)
        assert torch.equal(lse, results[0].lse)
        assert (out[:, :, -1] == 0).all()


@pytest.mark.parametrize("how", ["auto", *MERGES])
@pytest.mark.parametrize("ranks", [1, 2, 4, 7])
def test_each_rank_keeps_its_heads(pool: Pool, ranks: int, how: str) -> None:
    shares = pool.run(8, merge_among, ranks, torch.float32, {"how": how, "output": "heads"})[:ranks]
    (whole, *_) = pool.run(8, merge_among, ranks, torch.float32, {"how": "direct"})
    for index, place in enumerate(torch.arange(9).tensor_split(ranks)):
        assert Axis(ranks, index).slice_of(9) == slice(int(place[0]), int(place[-1]) + 1)
    for x, y in zip((torch.cat(parts, 1) for parts in zip(*shares, strict=True)), whole, strict=True):
        torch.testing.assert_close(x, y, rtol=FLOAT32, atol=FLOAT32)


@on_each_rank
def check_base_two() -> None:
    out, lse = partial_of(dist.get_rank(), torch.float32)
    natural = am.merge_across(am.Partial(out, lse), dist.group.WORLD)
    two = am.merge_across(am.Partial(out, lse / math.log(2)), dist.group.WORLD, base="2")
    assert_near(two.out, natural.out, FLOAT32_SUMS)
    assert_near(two.lse * math.log(2), natural.lse, FLOAT32_SUMS)


def test_base_two_is_accepted_by_name(pool: Pool) -> None:
    pool.run(3, check_base_two)


@on_each_rank
def count_sent_bytes(wire: torch.dtype | None, options: dict[str, Any]) -> int:
    with count_traffic() as traffic:
        am.merge_across(partial_of(dist.get_rank(), torch.bfloat16), dist.group.WORLD, wire=wire, **options)
    return traffic.bytes


def test_out_travels_in_the_given_dtype(pool: Pool) -> None:
    rows, width = 2 * 9 * 3, 8
    tree = {"how": "tree"}
    assert pool.run(4, count_sent_bytes, None, tree) == [2 * (8 + rows * 4 + rows * width * 4)] * 4
    assert pool.run(4, count_sent_bytes, torch.bfloat16, tree) == [2 * (8 + rows * 4 + rows * width * 2)] * 4


def test_each_rank_is_sent_its_own_heads_alone(pool: Pool) -> None:
    rows, width, heads = 2 * 3 * 3, 8, {"how": "direct", "output": "heads"}
    assert pool.run(3, count_sent_bytes, torch.bfloat16, heads) == [2 * (8 + rows * 4 + rows * width * 2)] * 3
    results = [x for x in pool.run(8, merge_among, 6, torch.bfloat16, {"how": "tree", "wire": torch.bfloat16}) if x]
    assert all(torch.equal(x.out, results[0].out) for x in results)


@on_each_rank
def merge_with_nan(how: str) -> Tensor:
    out, lse = partial_of(dist.get_rank(), torch.float32)
    if dist.get_rank() == 2:
        out, lse = out * torch.nan, lse * torch.nan
    return am.merge_across(am.Partial(out, lse), dist.group.WORLD, how=how).out


@pytest.mark.parametrize("how", ["auto", *MERGES])
def test_nan_on_one_rank_is_nan_on_all(pool: Pool, how: str) -> None:
    for out in pool.run(4, merge_with_nan, how):
        assert out[:, :, :-1].isnan().all()


@on_each_rank
def check_compiled() -> None:
    group = dist.group.WORLD
    partial = partial_of(dist.get_rank(), torch.float32)

    def step(out: Tensor, lse: Tensor) -> Tensor:
        return am.merge_across(am.Partial(out * 1, lse), group, how="tree").out + 1

    assert_near(torch.compile(step, fullgraph=True, backend="aot_eager")(*partial), step(*partial))


def test_a_merge_is_one_node_of_a_graph(pool: Pool) -> None:
    pool.run(2, check_compiled)


@on_each_rank
def merge_unlike_partials(checked: bool | None) -> str:
    """Merge partials of two lengths in a compiled graph. Return the error, or what the result is."""
    partial = partial_of(0, torch.float32)
    own = am.Partial(*(x[:, :, : x.shape[2] - dist.get_rank()] for x in partial))

    def merge(out: Tensor, lse: Tensor) -> Tensor:
        return am.merge_across(am.Partial(out, lse), dist.group.WORLD, checked=checked).out

    try:
        out = torch.compile(merge, fullgraph=True, backend="aot_eager")(*own)
    except errors.MeshError as error:
        return str(error)
    return "NaN" if bool(out.isnan().all()) else "numbers"


@pytest.mark.parametrize(
    ("checked", "found"), [(None, "expected the same call"), (True, "expected the same call"), (False, "NaN")]
)
def test_unlike_merges_in_a_compiled_graph_are_compared_as_outside_of_it(
    checked: bool | None, found: str, pool: Pool
) -> None:
    for said in pool.run(2, merge_unlike_partials, checked):
        assert found in said


@on_each_rank
def find_own_hosts() -> list[list[int]]:
    return agreed_hosts(world_axis())


def test_ranks_of_a_host_know_each_other(pool: Pool) -> None:
    assert pool.run(3, find_own_hosts) == [[[0, 1, 2]]] * 3


@on_each_rank
def catch_error_without_a_group() -> str:
    try:
        am.merge_across(partial_of(0, torch.float32), None)
    except errors.MeshError as error:
        return str(error)
    return "no error"


def test_no_group_is_not_taken_for_one_rank_among_several(pool: Pool) -> None:
    for said in pool.run(2, catch_error_without_a_group):
        assert "given None in a world of 2 ranks. Fix: pass dist.group.WORLD" in said


@on_each_rank
def measure_errors_of_odd_widths(how: str, output: str, wire: torch.dtype) -> list[float]:
    """On a rank: errors of merges in whose messages `out` begins or ends inside a number of the other dtype."""
    group = dist.group.WORLD
    errors_found = []
    for shape, dtype in (((1, 3, 1, 5), torch.float32), ((1, 1, 1, 6), torch.float64), ((1, 3, 1, 1), torch.float64)):
        own = [
            am.Partial(torch.randn(shape, dtype=dtype), torch.randn(shape[:-1], dtype=dtype))
            for _ in range(dist.get_world_size())
        ]
        out, lse = am.merge_across(own[dist.get_rank()], group, how=how, output=output, wire=wire)
        whole = am.merge(*own)
        heads = slice(None) if output == "replicated" else _share(shape[1])
        errors_found += [float((out - whole.out[:, heads]).abs().sum()), float((lse - whole.lse[:, heads]).abs().sum())]
    return errors_found


def _share(heads: int) -> slice:
    shares = torch.arange(heads).tensor_split(dist.get_world_size())[dist.get_rank()]
    return slice(int(shares[0]), int(shares[-1]) + 1) if len(shares) else slice(0, 0)


@pytest.mark.parametrize("wire", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("output", ["replicated", "heads"])
@pytest.mark.parametrize("how", ["tree", "direct", "gather"])
def test_messages_of_any_number_of_elements_are_merged(how: str, output: str, wire: torch.dtype, pool: Pool) -> None:
    for found in pool.run(3, measure_errors_of_odd_widths, how, output, wire):
        assert worst(found) < 0.05  # bfloat16 has 8 bits, and a few elements are summed
