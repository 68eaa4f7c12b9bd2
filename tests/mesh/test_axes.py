"""Axes of a mesh as a rank sees them: by name, in any order of dims, or of a group."""

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from attnmesh import errors
from attnmesh.errors import MeshError
from attnmesh.mesh.axes import (
    MESH_OF_ONE_RANK,
    Axis,
    NotGiven,
    RankMesh,
    attention_dims,
    axis_of,
    device_of,
    given_mesh,
    intersect,
    mesh_of_axis,
)
from attnmesh.mesh.shapes import AXES, Shape
from tests.support.ranks.groups import world_axis
from tests.support.ranks.pool import Pool, on_each_rank
from tests.support.truth.mesh_problems import named_mesh


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        (slice(0, 4), slice(3, 9), (slice(3, 4), slice(0, 1))),
        (slice(3, 9), slice(0, 4), (slice(0, 1), slice(3, 4))),
        (slice(2, 8), slice(4, 6), (slice(2, 4), slice(0, 2))),
    ],
    ids=str,
)
def test_an_overlap_is_within_both_slices(one: slice, other: slice, expected: tuple[slice, slice]) -> None:
    assert intersect(one, other) == expected


def test_slices_that_do_not_meet_overlap_nowhere() -> None:
    for one, other in ((slice(0, 2), slice(5, 7)), (slice(5, 7), slice(0, 2)), (slice(0, 2), slice(2, 4))):
        assert [len(range(10)[part]) for part in intersect(one, other)] == [0, 0]


@pytest.mark.parametrize("count", [0, 1, 5, 8])
@pytest.mark.parametrize("ranks", [1, 3, 4])
def test_ranks_have_all_heads_each_once_and_the_first_most(ranks: int, count: int) -> None:
    slices = [Axis(ranks, rank).slice_of(count) for rank in range(ranks)]
    assert [head for part in slices for head in range(part.start, part.stop)] == [*range(count)]
    sizes = [part.stop - part.start for part in slices]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] - sizes[-1] <= 1


def test_no_mesh_is_one_rank_on_the_cpu() -> None:
    assert RankMesh.of(None) is MESH_OF_ONE_RANK
    assert (MESH_OF_ONE_RANK.shape, MESH_OF_ONE_RANK.ranks, MESH_OF_ONE_RANK.shard_index) == (Shape(1, 1, 1), 1, 0)
    assert MESH_OF_ONE_RANK.device_type == "cpu"
    assert device_of(None) == torch.device("cpu")
    assert mesh_of_axis(Axis(3, 1)).shape == Shape(1, 1, 3)


def test_without_a_group_one_process_is_an_axis() -> None:
    assert axis_of(None, "merge_across") == Axis()


class Place(NamedTuple):
    """A rank's place in a mesh and its shard, and whether names of groups lead back to the same axes."""

    shape: Shape
    indices: tuple[int, int, int]
    shard: int
    is_same_by_names: bool


@on_each_rank
def find_place(shape: Shape, axes: tuple[str, ...]) -> Place:
    mesh = RankMesh.of(named_mesh(shape, axes))
    again = RankMesh.named(mesh.shape, [axis.index for axis in mesh.axes], mesh.group_names)
    assert RankMesh.of(named_mesh(shape, axes)) is mesh, "it is made once"
    heads, queries, keys = (axis.index for axis in mesh.axes)
    return Place(mesh.shape, (heads, queries, keys), mesh.shard_index, again == mesh)


@pytest.mark.parametrize("axes", [AXES, ("keys", "queries", "heads")], ids=str)
def test_shards_are_numbered_by_heads_then_queries_then_keys(axes: tuple[str, ...], pool: Pool) -> None:
    shape = Shape(1, 2, 2)
    found = pool.run(4, find_place, shape, axes)
    assert [place.shard for place in found] == ([0, 1, 2, 3] if axes == AXES else [0, 2, 1, 3])
    for place in found:
        _, query, key = place.indices
        assert place.shape == shape
        assert place.shard == 2 * query + key
        assert place.is_same_by_names


@on_each_rank
def read_shape_of(name: str) -> Shape:
    return RankMesh.of(init_device_mesh("cpu", (2,), mesh_dim_names=(name,))).shape


@pytest.mark.parametrize(
    ("name", "shape"),
    [("heads", Shape(2, 1, 1)), ("queries", Shape(1, 2, 1)), ("keys", Shape(1, 1, 2)), ("cp", Shape(1, 2, 1))],
)
def test_a_single_axis_of_another_name_is_a_queries_axis(name: str, shape: Shape, pool: Pool) -> None:
    assert pool.run(2, read_shape_of, name) == [shape] * 2


@on_each_rank
def read_dims() -> dict[str, int]:
    return attention_dims(init_device_mesh("cpu", (1, 2, 1), mesh_dim_names=("data", "keys", "heads")))


def test_other_axes_of_a_mesh_are_ignored(pool: Pool) -> None:
    assert pool.run(2, read_dims) == [{"keys": 1, "heads": 2}] * 2


# --- refusals ---


def no_mesh_at_all() -> object:
    return RankMesh.of("queries")  # type: ignore[arg-type]


def a_mesh_of_other_axes() -> object:
    return RankMesh.of(init_device_mesh("cpu", (2, 1), mesh_dim_names=("data", "cp")))


def no_group_in_a_world() -> object:
    return axis_of(None, "merge_across")


def a_mesh_of_two_axes_as_a_group() -> object:
    return axis_of(named_mesh(Shape(1, 2, 1), AXES), "merge_across")


GROUP = "a process group that holds this rank, or a mesh of one axis"

REFUSED: list[tuple[Callable[[], object], str]] = [
    (no_mesh_at_all, "mesh: expected a DeviceMesh or None, given str. Fix: make one"),
    (
        a_mesh_of_other_axes,
        "mesh: expected one axis or more of heads, queries, keys, each once, given axes ('data', 'cp')",
    ),
    (
        no_group_in_a_world,
        "merge_across group: expected a process group that holds this rank, or a mesh of one axis, give",
    ),
    (
        a_mesh_of_two_axes_as_a_group,
        "merge_across group: expected a process group that holds this rank, or a mesh of on",
    ),
]


@on_each_rank
def catch_error_of(call: Callable[[], object]) -> str:
    with pytest.raises(MeshError) as caught:
        call()
    return str(caught.value)


@pytest.mark.parametrize(("call", "message"), REFUSED)
def test_what_is_no_axis_is_refused(call: Callable[[], object], message: str, pool: Pool) -> None:
    for found in pool.run(2, catch_error_of, call):
        assert found.startswith(message)


@on_each_rank
def catch_error_outside() -> str:
    """Return the error of a rank that is not in a mesh."""
    first = DeviceMesh("cpu", [0], mesh_dim_names=("queries",))
    try:
        RankMesh.of(first)
    except MeshError as error:
        return str(error)
    return "none"


def test_a_mesh_of_other_ranks_is_refused(pool: Pool) -> None:
    first, second = pool.run(2, catch_error_outside)
    assert first == "none"
    assert second.startswith("mesh: expected a mesh that holds this rank, given DeviceMesh")


# --- a mesh that is left out ---


@on_each_rank
def record_warnings_of(mesh: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert given_mesh(f"test of {mesh!r}", mesh, "each rank attends alone") is None
    return [str(warning.message) for warning in caught]


def test_a_mesh_that_is_left_out_among_ranks_is_warned_of(pool: Pool) -> None:
    for messages in pool.run(2, record_warnings_of, NotGiven.MESH):
        assert messages == [
            "test of None: no mesh= in a process group of 2 ranks, so each rank attends alone, or mesh=None if this is "
            "meant."
        ]


def test_no_mesh_on_purpose_and_on_one_rank_is_not_warned_of(pool: Pool) -> None:
    assert pool.run(2, record_warnings_of, None) == [[], []]
    assert pool.run(1, record_warnings_of, NotGiven.MESH) == [[]]


@on_each_rank
def make_axes_of_groups() -> list[tuple[int, int]]:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    by_mesh, by_group = axis_of(mesh, "merge_across"), axis_of(dist.group.WORLD, "merge_across")
    assert by_group == world_axis(), by_group
    return [(by_mesh.size, by_mesh.index), (by_group.size, by_group.index)]


def test_a_group_and_a_mesh_of_one_axis_are_axes(pool: Pool) -> None:
    assert pool.run(2, make_axes_of_groups) == [[(2, 0)] * 2, [(2, 1)] * 2]


@on_each_rank
def attend_on_unlike_meshes() -> list[object]:
    said: list[object] = []
    for names in (None, ("data", "model"), ("queries", "model")):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
        try:
            said.append(RankMesh.of(mesh).shape)
        except errors.MeshError as error:
            said.append(str(error))
    return said


def test_meshes_with_other_axes_or_none_are_refused(pool: Pool) -> None:
    for unnamed, foreign, mixed in pool.run(4, attend_on_unlike_meshes):
        assert "one axis or more of heads, queries, keys, each once, given axes ()" in unnamed
        assert "given axes ('data', 'model'). Fix: slice the axis that shares a sequence" in foreign
        assert mixed == Shape(1, 2, 1)
