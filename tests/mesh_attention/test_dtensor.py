"""DTensors: they are attended where they are, come back with their placements, and others are refused by name."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import attnmesh as am
from attnmesh.mesh.shapes import AXES
from tests.support.ranks.pool import Pool, on_each_rank
from tests.support.truth.tolerances import FLOAT32_SUMS, assert_near


@on_each_rank
def check_dtensors(length: int, sizes: tuple[int, ...], names: tuple[str, ...]) -> None:
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
    torch.manual_seed(0)
    whole = [torch.randn(2, h, length, 8) for h in (4, 2, 2)]
    placements = [Shard(2) if name in AXES else Shard(0) for name in names]
    placed = [distribute_tensor(x, mesh, placements).requires_grad_() for x in whole]
    out = am.attention(*placed, layout=am.Contiguous())
    unsaid = am.attention(*placed)  # their placements say how they are sharded
    gradients = torch.autograd.grad(out.sum(), placed)
    plain = [x.requires_grad_() for x in whole]
    expected = am.attention(*plain, mesh=None)
    wanted = torch.autograd.grad(expected.sum(), plain)
    assert_near(unsaid.to_local(), out.to_local())
    assert out.placements == tuple(placements), out.placements
    for one, other in zip((out, *gradients), (expected, *wanted), strict=True):
        assert_near(one.full_tensor(), other, FLOAT32_SUMS)


@on_each_rank
def check_dtensors_of_two_sequences(mask: am.Mask, key_length: int | None) -> None:
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("queries",))
    torch.manual_seed(0)
    whole = torch.randn(1, 4, 13, 8), *torch.randn(2, 1, 2, 30, 8)
    out = am.attention(*(distribute_tensor(x, mesh, [Shard(2)]) for x in whole), mask=mask, key_length=key_length)
    expected = am.attention(*whole, mesh=None, mask=mask, key_length=30)
    assert_near(out.full_tensor(), expected, FLOAT32_SUMS)


@pytest.mark.parametrize(("mask", "key_length"), [(am.Full(), None), (am.Full(), 30), (am.Causal(), 30)])
def test_dtensors_of_two_lengths_give_what_plain_tensors_give(
    pool: Pool, mask: am.Mask, key_length: int | None
) -> None:
    pool.run(4, check_dtensors_of_two_sequences, mask, key_length)


@pytest.mark.parametrize(
    ("length", "sizes", "names"),
    [
        (13, (4,), ("queries",)),
        (3, (4,), ("keys",)),
        (24, (2, 2), ("queries", "keys")),
        (24, (2, 2), ("data", "queries")),
    ],
)
def test_dtensors_come_out_with_the_values_and_placements_of_one_device(
    pool: Pool, length: int, sizes: tuple[int, ...], names: tuple[str, ...]
) -> None:
    pool.run(4, check_dtensors, length, sizes, names)


@on_each_rank
def catch_refusals_of_dtensors() -> list[str]:
    row = init_device_mesh("cpu", (4,), mesh_dim_names=("queries",))
    square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("keys", "queries"))
    x = torch.randn(1, 4, 24, 8)
    good = distribute_tensor(x, row, [Shard(2)])
    longer = distribute_tensor(torch.randn(1, 4, 48, 8), row, [Shard(2)])
    calls = [
        lambda: am.attention(good, good, good, layout=am.Zigzag()),
        lambda: am.attention(good, good, good, key_layout=am.Striped()),
        lambda: am.attention(*[distribute_tensor(x, row, [Shard(1)])] * 3, layout=am.Contiguous()),
        lambda: am.attention(good, good, x, layout=am.Contiguous()),
        lambda: am.attention(*[distribute_tensor(x, square, [Shard(2)] * 2)] * 3, layout=am.Contiguous()),
        lambda: am.attention(good, good, good, layout=am.Contiguous(), mesh=square),
        lambda: am.attention(good, longer, longer, mask=am.Causal()),
        lambda: am.attention(good, longer, longer, mask="causal"),
        lambda: am.attention(good, good, good, length=25),
        lambda: am.attention(good, longer, longer, mask=am.Full(), key_length=24),
    ]
    said = []
    for call in calls:
        try:
            call()
            said.append("nothing")
        except ValueError as error:
            said.append(f"{type(error).__name__} {error}")
    return said


def test_other_placements_are_refused_by_name(pool: Pool) -> None:
    for zigzag, striped, heads, mixed, order, foreign, cross, mask, length, key_length in pool.run(
        4, catch_refusals_of_dtensors
    ):
        assert (
            "LayoutError attention of DTensors: expected layout=Contiguous(), the layout of Shard(2), given Zig"
            in zigzag
        )
        assert "expected key_layout=Contiguous(), the layout of Shard(2), given Striped(block=1). Fix: leave" in striped
        assert "expected S(2) along axis queries, given S(1). Fix: redistribute" in heads
        assert "expected q, k and v as DTensors of one mesh and one placement, given v Tensor" in mixed
        assert "expected axes in the order heads, queries, keys" in order
        assert "MeshError attention mesh: expected the DTensors' own mesh" in foreign
        assert "expected as many queries as keys under a mask of positions, given 24 queries, 48 keys" in cross
        assert "; append the keys to an am.KVCache of the mesh and call am.decode for the last queries" in cross
        assert "am.attend" not in cross, "which takes no mesh"
        assert "MaskError attention mask: expected Full(), Causal()" in mask
        assert "expected length=24, the tokens of all shards, given length=25. Fix: leave length out" in length
        assert "expected key_length=48, the tokens of all shards, given key_length=24" in key_length
