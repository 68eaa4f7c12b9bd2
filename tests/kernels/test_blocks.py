import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import attnmesh as am
from attnmesh.core.band import Band
from attnmesh.core.layout import Layout
from attnmesh.core.mask import Mask
from attnmesh.kernels.blocks import TILE, Block, cut, tiles
from tests.support.problems import draw

pytestmark = pytest.mark.quick


def covered(blocks: list[Block], rows: int, keys: int) -> torch.Tensor:
    """How often each pair is in a block."""
    count = torch.zeros(rows, keys, dtype=torch.long)
    for block in blocks:
        count[block.queries, block.keys] += block.visible()
    return count


def band(mask: Mask, length: int, shards: int = 1, q: int = 0, k: int = 0, layout: Layout = am.Contiguous()) -> Band:
    return Band.of(mask, *(layout.positions(length, shards, index) for index in (q, k)))


@given(st.integers(0, 2**48))
def test_every_visible_pair_is_in_one_block_and_no_other_pair(seed: int) -> None:
    problem = draw(seed)
    total = [
        torch.arange(n) if p is None else p.sort().values
        for p, n in zip((problem.q_positions, problem.k_positions), problem.lengths, strict=True)
    ]
    one = Band.of(problem.mask, *total)
    for blocks in (cut(one), tiles(one, 128, 64), tiles(one, 3, 5)):
        assert torch.equal(covered(blocks, *map(len, total)), problem.mask.visible(*total).long())
        assert [b.queries.start for b in blocks] == sorted(b.queries.start for b in blocks)


def test_keys_in_order_need_no_positions() -> None:
    mask = am.Window(5, 3) & am.Documents((40, 60))
    one, other = Band.of(mask, torch.arange(100), 100), Band.of(mask, torch.arange(100), torch.arange(100))
    assert torch.equal(one.visible(100), other.visible(100))


@pytest.mark.parametrize(
    ("mask", "kinds"),
    [
        (am.Full(), ["full"]),
        (am.Causal(), ["causal"]),
        (am.Documents((300, 100, 624)), ["full"] * 3),
        (am.Causal() & am.Documents((300, 100, 624)), ["causal"] * 3),
        (am.Window(2000), ["causal"]),
        (am.Window(100), ["causal", *["masked"] * 8]),
    ],
)
def test_a_plain_problem_is_few_plain_blocks(mask: Mask, kinds: list[str]) -> None:
    assert [kind(block) for block in cut(band(mask, 1024))] == kinds


def kind(block: Block) -> str:
    return "causal" if block.causal else "full" if block.band is None else "masked"


@pytest.mark.parametrize("layout", [am.Contiguous(), am.Zigzag(), am.Striped()])
def test_shards_of_a_causal_problem_are_few_plain_blocks(layout: Layout) -> None:
    for q in range(4):
        for k in range(4):
            blocks = cut(band(am.Causal(), 4096, 4, q, k, layout))
            assert len(blocks) <= 4
            assert all(block.band is None for block in blocks)


def test_most_pairs_of_many_runs_are_in_blocks_of_many_rows() -> None:
    blocks = cut(Band.of(am.Causal(), am.Striped(128).positions(8192, 2, 1), 8192))
    assert len(blocks) == 2 * 8192 // (2 * 128)  # as many as if each run attended all earlier keys
    rows = {2048: 1, 1024: 2, 512: 4, 256: 8}
    for size, count in rows.items():
        assert [block.queries.stop - block.queries.start for block in blocks].count(size) == count


@pytest.mark.parametrize("mask", [am.Window(256), am.Causal() & am.Documents([4096] * 16)])
def test_work_and_masks_grow_with_the_length_alone(mask: Mask) -> None:
    blocks = cut(band(mask, 65536))
    assert sum((b.queries.stop - b.queries.start) * (b.keys.stop - b.keys.start) for b in blocks) <= 65536 * 4096
    masked = [(b.queries.stop - b.queries.start) * (b.keys.stop - b.keys.start) for b in blocks if b.band is not None]
    assert max(masked, default=0) <= TILE * (TILE + 256)


def test_short_documents_share_tiles() -> None:
    assert len(cut(band(am.Causal() & am.Documents([3] * 1000), 3000))) == -(-3000 // TILE)
