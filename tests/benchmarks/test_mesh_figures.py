"""The picture of a mesh: each visible pair in the colour of the one rank that computes it."""

import io
import warnings

import matplotlib
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

import attnmesh as am
from attnmesh import errors
from attnmesh.core.layout import Layout
from attnmesh.errors import InputError
from attnmesh.mesh.schedule import Problem
from benchmarks.mesh_figures import _colours, computed_blocks, draw_mesh, draw_tree, pairs_of_ranks, tree_messages
from tests.support.truth.schedules import problems

MASKS = (am.Full(), am.Causal(), am.Window(5), am.Window(3, 4), am.Causal() & am.Documents([9, 1, 21]))
SHAPES = tuple(am.Shape(*sizes) for sizes in ((1, 1, 1), (1, 2, 2), (1, 3, 1), (1, 1, 4), (2, 2, 3), (3, 1, 2)))
LAYOUTS = (am.Contiguous(), am.Zigzag(), am.Striped(), am.Striped(3))


def places(layout: Layout, shape: am.Shape, length: int) -> Tensor:
    """The r and the c of the rank that holds each token: shards are numbered heads, queries, keys."""
    place = torch.empty(2, length, dtype=torch.long)
    for number in range(shape.ranks):
        r, c = divmod(number % (shape.queries * shape.keys), shape.keys)
        place[:, layout.positions(length, shape.ranks, number)] = torch.tensor([[r], [c]])
    return place


def formula(problem: Problem) -> Tensor:
    """The pair of a query held at (r1, c1) and a key held at (r2, c2) is computed_blocks at (r1, c2)."""
    (r, _), (_, c) = (
        places(layout, problem.shape, length)
        for layout, length in ((problem.layout, problem.length), (problem.key_layout, problem.key_length))
    )
    visible = problem.mask.visible(torch.arange(problem.length), torch.arange(problem.key_length))
    return torch.where(visible, r[:, None] * problem.shape.keys + c, -1)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("mask", MASKS, ids=repr)
def test_a_pair_is_computed_in_its_querys_row_and_its_keys_column(mask: am.Mask, shape: am.Shape) -> None:
    for layout in LAYOUTS:
        problem = Problem(mask, shape, layout, layout, 31, 31)
        assert torch.equal(pairs_of_ranks(problem), formula(problem))


@given(problems())
@settings(max_examples=25)  # tests/mesh/test_schedule.py tries the schedules themselves more often
def test_pairs_of_ranks_follow_the_formula_where_keys_have_another_length(problem: Problem) -> None:
    assert torch.equal(pairs_of_ranks(problem), formula(problem))


@pytest.mark.parametrize("length", [1, 2, 48, 500])
def test_a_figure_has_a_panel_for_each_layout(length: int) -> None:
    matplotlib.use("Agg")
    buffer = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        figure = draw_mesh(am.Causal(), am.Shape(2, 2, 2), [am.Zigzag(), am.Striped()], length)
        figure.savefig(buffer, format="png")
    assert buffer.getvalue().startswith(b"\x89PNG")
    assert [axes.get_title("left") for axes in figure.axes] == ["Zigzag()", "Striped(block=1)"]


@given(problems())
@settings(max_examples=25)  # the schedules themselves are tried more often by their own tests
def test_every_visible_pair_has_one_owner_and_no_other_pair_has_any(problem: Problem) -> None:
    count = torch.zeros(problem.length, problem.key_length, dtype=torch.long)
    for _, queries, keys, visible in computed_blocks(problem):
        count[queries[:, None], keys] += visible
    tokens = torch.arange(problem.length), torch.arange(problem.key_length)
    assert torch.equal(count, problem.mask.visible(*tokens).long())
    assert torch.equal(count > 0, pairs_of_ranks(problem) >= 0)


def test_the_panel_shows_the_owners_and_the_text_their_balance() -> None:
    figure = draw_mesh(am.Causal(), am.Shape(1, 2, 1), [am.Contiguous()], 4)
    (axes,) = figure.axes
    early, late = _colours(am.Shape(1, 2, 1))
    pairs = axes.images[0].get_array().tolist()
    assert (len(pairs), len(pairs[0])) == (4, 4)
    assert pairs[1][0] == pytest.approx(early, abs=1e-6)  # figures have float32
    assert pairs[2][0] == pytest.approx(late, abs=1e-6)  # figures have float32
    assert min(pairs[0][3]) > 0.9  # an invisible pair: nearly white
    assert axes.texts[0].get_text() == "shares 30.0, 70.0 %; busiest rank 1.40 of the mean"
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["rank (0, 0)", "rank (1, 0)"]


@pytest.mark.parametrize("sizes", [(1, 1, 1), (1, 2, 2), (1, 6, 4), (1, 8, 3), (1, 1, 16)])
def test_ranks_differ_in_colour_and_all_are_in_the_legend_in_the_figure(sizes: tuple[int, int, int]) -> None:
    shape = am.Shape(*sizes)
    assert len(set(_colours(shape))) == shape.ranks
    figure = draw_mesh(am.Causal(), shape, [am.Zigzag()], 64)
    figure.canvas.draw()
    (legend,) = figure.legends
    assert len(legend.get_texts()) == shape.ranks
    box, lowest = legend.get_window_extent(), figure.axes[0].get_tightbbox()
    assert lowest is not None
    assert 0 <= box.x0 < box.x1 <= figure.bbox.x1
    assert max(text.get_window_extent().y1 for text in figure.texts) < box.y0 < box.y1 < lowest.y0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"length": 0}, "length: expected a whole number, 1 or more, given 0"),
        ({"shape": am.Shape(1, 0, 2)}, "shape: expected a Shape of 1 or more each way"),
        ({"shape": (1, 2, 2)}, "shape: expected a Shape of 1 or more each way"),
        ({"layouts": []}, "layouts: expected a layout or more"),
        ({"layouts": [am.Zigzag]}, "Fix: make one by calling it"),
        ({"mask": am.Full() & am.Documents([3])}, "documents that add up to 8 tokens"),
    ],
)
def test_bad_arguments_raise(changes: dict[str, object], message: str) -> None:
    arguments = {"mask": am.Causal(), "shape": am.Shape(1, 2, 2), "layouts": [am.Zigzag()], "length": 8}
    with pytest.raises(InputError, match=message):
        draw_mesh(**arguments | changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("hosts", [[[0, 1]], [[0, 1, 2]], [[0, 1, 2, 3], [4, 5, 6, 7]], [[0], [1, 2], [3, 4, 5, 6]]])
def test_the_messages_of_a_tree_reach_every_rank(hosts: list[list[int]]) -> None:
    ranks = sum(map(len, hosts))
    merged = [{rank} for rank in range(ranks)]
    for pairs in tree_messages(hosts):
        merged = [own.union(*(merged[a] for a, b in pairs if b == rank)) for rank, own in enumerate(merged)]
    assert merged == [set(range(ranks))] * ranks
    assert len(draw_tree(hosts).axes[0].texts) >= ranks


def test_a_tree_of_one_rank_raises() -> None:
    with pytest.raises(errors.MeshError, match="draw_tree: expected two ranks or more"):
        draw_tree([[0]])
