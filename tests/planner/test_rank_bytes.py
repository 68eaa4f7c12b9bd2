"""Bytes of memory: those of all ranks are those of the workload, and index keys are counted by hand."""

import pytest

import attnmesh as am
from attnmesh.cost.candidate_mesh import CandidateMesh
from attnmesh.mesh.shapes import Shape
from attnmesh.planner.rank_bytes import cache_layouts, cached_bytes, index_memory, turns_of
from attnmesh.planner.workload import Workload

pytestmark = pytest.mark.quick


@pytest.mark.parametrize("shares", [(1, 1, 1, 1), (3, 1, 2, 2)])
def test_shares_of_a_cache_add_up_to_its_bytes(shares: tuple[int, ...]) -> None:
    work = Workload(8, 4, 64, 1 << 20, phase="decode", layers=3)
    layout = cache_layouts(16, shares)[-1]
    candidate = CandidateMesh(Shape(2, 1, 4), Shape(1, 1, 1), layout, "tree")
    found = cached_bytes(candidate, work)
    assert 2 * sum(found) == pytest.approx((1 << 20) * 2 * 4 * 64 * 2 * 3)  # keys and values in bfloat16, of 3 layers
    assert found == pytest.approx([sum(found) * share / sum(shares) for share in shares])


def test_even_shares_have_one_layout() -> None:
    assert cache_layouts(16, (2, 2)) == [am.Striped(16)]
    even, uneven = cache_layouts(8, (3, 1))
    assert even == am.Striped(8)
    assert [turn.width for turn in uneven.turns(2)] == [12, 4]
    of_other_layout = CandidateMesh(Shape(1, 2, 2), Shape(1, 1, 1), am.Zigzag(), "tree")
    assert [turn.width / turn.period for turn in turns_of(of_other_layout)] == [0.25] * 4


def test_index_keys_are_a_share_beside_those_that_arrive() -> None:
    """Of 1,024 tokens on 4 ranks: index keys of 32 columns in bfloat16, 64 indices of 4 bytes for each of 4 heads."""
    selected = am.Selected(k=64, index_heads=4, index_dim=32, heads=4)
    shape, own, arriving, indices = Shape(1, 2, 2), 1024 * 32 * 2 / 4, 1024 * 32 * 2, 1024 / 4 * 4 * 64 * 4
    expected = {"decode": own, "prefill": own + arriving + indices, "training": arriving + indices}
    for phase, size in expected.items():
        assert index_memory(shape, Workload(8, 4, 64, 1024, phase=phase, selected=selected)) == size
    assert index_memory(shape, Workload(8, 4, 64, 1024)) == 0
