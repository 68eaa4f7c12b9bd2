"""Traffic between ranks: counts are those of the schedules, and of sums by hand."""

import math
from itertools import cycle, product

import pytest

import attnmesh as am
from attnmesh.core.mask import Mask
from attnmesh.cost.traffic import FLOWS, _count_exchanges, planned_traffic, tiles
from attnmesh.mesh.schedule import Problem, make_schedule
from attnmesh.mesh.shapes import Shape, rank_grid
from tests.support.truth.seeds import pairs

pytestmark = pytest.mark.quick

MASKS = [
    am.Full(),
    am.Causal(),
    am.Window(20),
    am.Causal() & am.Documents([30, 50, 41]),
    am.Causal() & am.Chunks(30),
    am.Spans([(10, 70), (90, 100)], 5),
]
SHAPES = [Shape(1, 4, 1), Shape(1, 2, 3), Shape(2, 2, 2), Shape(1, 1, 4), Shape(1, 3, 3), Shape(1, 5, 1)]


@pytest.mark.parametrize(("mask", "layout"), pairs(MASKS, [am.Zigzag(), am.Contiguous(), am.Striped(2)], 8))
def test_traffic_is_the_sum_over_the_schedules_of_all_ranks(mask: Mask, layout: am.Zigzag) -> None:
    """Counts for all ranks at once equal the sums over schedules, whichever ranks share a host."""
    for shape, key_layout in zip(SHAPES, cycle((layout, am.Striped(5))), strict=False):
        problem = Problem(mask, shape, layout, key_layout, 121, 121)
        places = list(product(range(shape.queries), range(shape.keys)))
        bulk, ring = ([make_schedule(problem, *place, ring) for place in places] for ring in (False, True))
        queries = sum(count for one in bulk for _, count in one.query_step.receive)
        keys = sum(count for one in bulk for _, count in one.key_steps[0].receive)
        hops = sum(count for one in ring for step in one.key_steps for _, count in step.receive)
        back = sum(
            len(tokens)
            for (r, _), one in zip(places, ring, strict=True)
            for step in one.key_steps
            for peer, tokens in step.return_to
            if peer != r
        )
        back += sum(count for one in ring for step in one.gradient_steps if step for _, count in step.receive)
        for tile in tiles(shape, math.gcd(shape.ranks, 2)):
            moves = planned_traffic(problem, tile)
            for flow, count, times in (
                (moves.queries, queries, 1),
                (moves.keys, keys, 1),
                (moves.hop, hops, shape.queries - 1),
                (moves.hop_back, back, shape.queries - 1),
            ):
                assert times * (flow.inside.total + flow.between.total) == pytest.approx(count, abs=1e-2)
                assert flow.inside.rank <= flow.inside.host + 1e-6
            for counted, schedules in ((moves.pairs, [one.bands[0] for one in bulk]),) + tuple(
                (step, [one.bands[t] for one in ring]) for t, step in enumerate(moves.steps)
            ):
                pairs = [float(band.high.sub(band.low).clamp(min=0).sum()) for band in schedules]
                assert counted == (max(pairs), pytest.approx(sum(pairs) / len(pairs)))
            both = [
                sum(count for _, count in one.query_step.receive)
                + sum(len(tokens) for peer, tokens in one.query_step.return_from if peer != c)
                for (_, c), one in zip(places, bulk, strict=True)
            ]
            if tile.keys == 1:
                assert max(both) == moves.both_ways.between.rank


@pytest.mark.parametrize("mask", MASKS[:3], ids=str)
def test_a_long_problem_is_counted_on_a_short_one(mask: Mask) -> None:
    shape = Shape(1, 4, 2)
    one, two = (
        planned_traffic(Problem(m, shape, am.Zigzag(), am.Zigzag(), n, n), Shape(1, 2, 1))
        for m, n in ((mask, 4096), (Mask(min(mask.left * 64, 1 << 60), mask.right), 4096 * 64))
    )
    for name in FLOWS:
        assert getattr(two, name).between.total == pytest.approx(64 * getattr(one, name).between.total, rel=0.03)
    wider = 64 if mask.left > 20 else (64 * 20 + 1) / (20 + 1)
    assert two.pairs == pytest.approx(one.pairs.times(64 * wider), rel=0.03)


@pytest.mark.parametrize(("length", "left"), [(4096, 16), (100_000, 16), (10**6, 100), (10**8, 1024), (10**9, 1024)])
def test_a_short_window_of_a_long_sequence_costs_its_pairs_and_edges(length: int, left: int) -> None:
    """By hand: each query has left + 1 pairs, and left keys cross each of the 3 edges between runs."""
    shape = Shape(1, 4, 1)
    moves = planned_traffic(
        Problem(am.Window(left), shape, am.Contiguous(), am.Contiguous(), length, length), Shape(1, 1, 1)
    )
    assert moves.pairs.most == pytest.approx(length / 4 * (left + 1), rel=0.05)
    assert moves.keys.between.total == pytest.approx(3 * left, rel=0.1)


@pytest.mark.parametrize("length", [10**5, 10**7])
def test_short_documents_of_a_long_sequence_cost_their_pairs_and_edges(length: int) -> None:
    """By hand: a document of 50 has 50 * 51 / 2 pairs; only keys of documents on an edge between runs travel."""
    mask = am.Causal() & am.Documents([50] * (length // 50))
    moves = planned_traffic(
        Problem(mask, Shape(1, 8, 1), am.Contiguous(), am.Contiguous(), length, length), Shape(1, 1, 1)
    )
    assert moves.pairs.most == pytest.approx(length / 50 / 8 * 50 * 51 / 2, rel=0.05)
    assert moves.keys.between.total <= 7 * 50


@pytest.mark.parametrize(
    ("block", "left", "shape"),
    [
        (64, 20, Shape(1, 2, 2)),
        (128, 1000, Shape(1, 4, 1)),
        ((96, 32), 200, Shape(1, 1, 4)),
        (64, 3000, Shape(1, 3, 1)),
    ],
)
def test_windows_over_long_stripes_are_counted_on_some_of_the_turns(
    block: int | tuple[int, ...], left: int, shape: Shape
) -> None:
    """Shrunk to tokens, a window of 20 would see nothing of another block of 64.

    At the ends of a sample, which has 16 windows and turns or more, tokens see and send less.
    """
    layout, tile = am.Striped(block), Shape(1, 1, 1)
    problem = Problem(am.Window(left), shape, layout, layout, 200_000, 200_000)
    found, exact = planned_traffic(problem, tile), _count_exchanges(problem, tile)
    for name in FLOWS:
        assert getattr(found, name).between[:3] == pytest.approx(getattr(exact, name).between[:3], rel=1 / 16)
    assert found.pairs == pytest.approx(exact.pairs, rel=1 / 16)


@pytest.mark.parametrize("left", [16, 1000])
def test_a_long_span_is_counted_as_it_is(left: int) -> None:
    """A query at the start of a span sees its end, however near the keys before it are."""
    shape, tile = Shape(1, 4, 1), Shape(1, 1, 1)
    problem = Problem(am.Spans([(2500, 10_000)], left), shape, am.Contiguous(), am.Contiguous(), 20_000, 20_000)
    found, exact = planned_traffic(problem, tile), _count_exchanges(problem, tile)
    assert found.pairs == pytest.approx(exact.pairs, rel=0.03)
    assert found.keys.between.total == pytest.approx(exact.keys.between.total, rel=0.03)


DOCUMENTS = (3000, 9000, 500, 7500)
PACKED = am.Packed(DOCUMENTS, (1, 2, 2))
UNLIKE = {
    "few keys": (am.Full(), am.Zigzag(), am.Contiguous(), 20_000, 5000),
    "many keys": (am.Full(), am.Contiguous(), am.Zigzag(), 5000, 20_000),
    "packed": (
        am.Causal() & am.Documents(DOCUMENTS),
        PACKED,
        PACKED,
        20_000,
        20_000,
    ),
    "keys packed": (am.Causal() & am.Documents(DOCUMENTS), am.Contiguous(), PACKED, 20_000, 20_000),
    "a window that ends with the keys": (am.Window(16), am.Contiguous(), am.Contiguous(), 40_000, 20_000),
    "a window of the token alone": (am.Window(0), am.Contiguous(), am.Contiguous(), 20_000, 20_000),
    "a window over blocks": (am.Window(16), am.Striped(64), am.Striped(64), 4000, 4000),
}
"""Masks, layouts of queries and of keys, and their lengths, of problems that no part of them stands for."""


@pytest.mark.parametrize("name", UNLIKE)
def test_queries_and_keys_are_counted_by_their_own_lengths_and_layouts(name: str) -> None:
    mask, layout, key_layout, length, key_length = UNLIKE[name]
    problem, tile = Problem(mask, Shape(1, 2, 2), layout, key_layout, length, key_length), Shape(1, 1, 1)
    found, exact = planned_traffic(problem, tile), _count_exchanges(problem, tile)
    assert found.pairs == pytest.approx(exact.pairs, rel=0.05)
    for step, right in zip(found.steps, exact.steps, strict=True):
        assert step == pytest.approx(right, rel=0.05, abs=0.001 * exact.pairs.most)
    for flow in FLOWS:
        given, right = getattr(found, flow).between, getattr(exact, flow).between
        assert given.total == pytest.approx(right.total, rel=0.05, abs=100), flow
        assert given.rank == pytest.approx(right.rank, rel=0.05, abs=100), flow


def test_messages_of_ranks_that_send_tokens_are_counted() -> None:
    """Of 4 runs under a causal mask each goes to the ones after it; around a ring it goes by the ranks in between."""
    problem = Problem(am.Causal(), Shape(1, 4, 1), am.Contiguous(), am.Contiguous(), 400, 400)
    moves = planned_traffic(problem, Shape(1, 2, 1))
    assert (moves.keys.inside.messages, moves.keys.between.messages) == (2, 4)
    hops = [3, 2, 1]  # of runs 0, 1 and 2: from 0 to 1 and from 2 to 3 inside a host
    assert 3 * (moves.hop.inside.messages + moves.hop.between.messages) == pytest.approx(sum(hops))
    assert 3 * moves.hop.between.messages == pytest.approx(2)
    # Gradients of run 0 go on from 1 to 2 to 3, and back to 0; those of 1 from 2 to 3, and back to 1; of 2 from 3 to 2.
    assert (moves.hop_back.inside.total, moves.hop_back.between.total) == (pytest.approx(100), pytest.approx(100))


def test_loads_are_those_of_the_busiest_rank_and_host() -> None:
    """Of 4 runs of 100 under a causal mask, those of the first host go to both ranks of the other one."""
    problem = Problem(am.Causal(), Shape(1, 4, 1), am.Contiguous(), am.Contiguous(), 400, 400)
    load = planned_traffic(problem, Shape(1, 2, 1)).keys.between
    assert (load.total, load.rank, load.host) == (400, 200, 400)
    few = Problem(am.Full(), Shape(1, 4, 1), am.Contiguous(), am.Contiguous(), 1, 400)  # the first rank has the query
    load = planned_traffic(few, Shape(1, 1, 1)).keys.between
    assert (load.total, load.rank) == (300, 300), "the first rank receives more than any other one sends"


def test_a_host_holds_a_tile() -> None:
    for shape, ranks in ((Shape(2, 4, 4), 8), (Shape(1, 6, 2), 4), (Shape(1, 7, 1), 7), (Shape(3, 1, 5), 1)):
        for tile in tiles(shape, ranks):
            grid = rank_grid(shape, tile)
            assert sorted(grid.flatten().tolist()) == list(range(shape.ranks))
            h, r, c = (slice(0, n) for n in tile)
            assert sorted(grid[h, r, c].flatten().tolist()) == list(range(ranks))
