"""The rows of `MergeAgreement` for CPUs; test_odd_rank.py and test_agreement.py of this folder have those for GPUs.

Ranks merge unlike partials, or in unlike ways: all raise an error, or get NaN where nothing is compared.
"""

from unittest import mock

import pytest
import torch
import torch.distributed as dist

import attnmesh as am
from attnmesh.comm.host_merge import HostMerge
from attnmesh.comm.rank_merge import RequestedMerge
from attnmesh.errors import InputError, MeshError
from attnmesh.kernels.native.build import library
from tests.support.ranks.odd_rank import alert, outcome
from tests.support.ranks.pool import Pool, on_each_rank


@on_each_rank
def merge_unlike_partials(checked: bool | None, how: str) -> str:
    out = torch.ones(1, 2, 3 + (dist.get_rank() == 1), 4)
    return outcome(
        lambda: am.merge_across(am.Partial(out, out[..., 0]), dist.group.WORLD, how=how, checked=checked).out
    )


@pytest.mark.parametrize(("checked", "how"), [(None, "tree"), (True, "direct"), (None, "allreduce"), (False, "tree")])
def test_merges_of_unlike_partials_end_alike(pool: Pool, checked: bool | None, how: str) -> None:
    one, two, three = pool.run(3, merge_unlike_partials, checked, how)
    assert one == two == three
    expected = "ranks  out\n    0, 2   [1, 2, 3, 4]\n    1      [1, 2, 4, 4]\nFix"
    assert one == "NaN" if checked is False else expected in one


@on_each_rank
def merge_in_unlike_ways(pairs: list[tuple[str, str]], odd: int) -> list[str]:
    """On a rank: the errors of merges in which one rank has another `how`, each after a merge that is right."""
    rank = dist.get_rank()
    ranks = dist.get_world_size()
    messages = []
    group = dist.new_group()  # on which nothing was measured or merged yet
    parts = [am.Partial(torch.full((1, 2, 1, 4), float(i)), torch.zeros(1, 2, 1)) for i in range(ranks)]
    for one, others in pairs:
        with pytest.raises(InputError) as caught, alert():
            am.merge_across(parts[rank], group, how=one if rank == odd else others)
        messages.append(str(caught.value))
        for how in ("tree", "direct"):
            out = am.merge_across(parts[rank], group, how=how).out
            assert torch.allclose(out, torch.full_like(out, (ranks - 1) / 2)), (one, others, how)
    return messages


EACH_WAY = [
    ("tree", "direct"),
    ("direct", "gather"),
    ("gather", "allreduce"),
    ("allreduce", "tree"),
    ("xx", "allreduce"),
]
"""Pairs, each of which takes 0.1 s: each way is once on the odd rank and once on the others. "xx" is no way.

Ranks that differ are found alike on any number of ranks, so two pairs do for 2 and for 4.
"""


@pytest.mark.parametrize(
    ("ranks", "odd", "pairs"),
    [(2, 1, EACH_WAY[:2]), (3, 1, EACH_WAY), (4, 2, EACH_WAY[:2])],
)
def test_ranks_that_merge_in_other_ways_raise_alike_and_go_on(
    ranks: int, odd: int, pairs: list[tuple[str, str]], pool: Pool
) -> None:
    first, *others = pool.run(ranks, merge_in_unlike_ways, pairs, odd)
    assert all(messages == first for messages in others)


@on_each_rank
def merge_equal_calls_as_if_unequal() -> str:
    cache = am.KVCache(am.init_mesh((1, 1, 2)), batch=1, kv_heads=1, head_dim=4, capacity=8, dtype=torch.float32)
    cache.append(*torch.ones(2, 1, 1, 3, 4))
    q = torch.ones(1, 1, 1, 4)
    expected = am.decode(q, cache)
    poison = mock.patch.object(RequestedMerge, "send_poison", side_effect=AssertionError)
    with poison, mock.patch.object(HostMerge, "run", return_value=False), pytest.raises(MeshError) as caught:
        am.decode(q, cache)
    assert torch.equal(am.decode(q, cache), expected)
    return str(caught.value)


@pytest.mark.skipif(library().exchange is None, reason="there is no C++ compiler")
def test_a_step_of_equal_calls_with_unequal_checksums_raises_without_poison(pool: Pool) -> None:
    one, two = pool.run(2, merge_equal_calls_as_if_unequal)
    assert one == two
    assert "different checksums of equal calls" in one
