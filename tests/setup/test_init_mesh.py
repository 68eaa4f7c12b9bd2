"""Meshes before there is a process group, where torchrun's variables decide; and among ranks of several versions."""

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import attnmesh as am
from attnmesh.comm.topology import dist_all_gather_ints
from attnmesh.errors import MeshError
from attnmesh.mesh.axes import RankMesh
from attnmesh.mesh.shapes import Shape
from tests.support.process.scripts import run_script
from tests.support.ranks.pool import Pool, on_each_rank


def test_without_torchrun_it_names_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(
        MeshError, match=r"or ranks that torchrun has started, given neither\. Fix: start the script with"
    ):
        am.init_mesh((1, 2, 2))


def test_more_ranks_than_torchrun_has_started_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(MeshError, match=r"expected at most the world's 2 ranks, given 1x2x2\. Fix: start more ranks"):
        am.init_mesh((1, 2, 2))


def plan_mesh() -> Any:
    cluster = am.Cluster.preset("dgx-h100", hosts=1, ranks=dist.get_world_size())
    return am.plan(am.Workload(4, 2, 64, 4096), cluster)[0].init_mesh("cpu")


MESHES: dict[str, Callable[[], Any]] = {
    "init_mesh": lambda: am.init_mesh("cpu", (1, 1, dist.get_world_size())),
    "split_mesh": lambda: am.split_mesh(init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))),
    "Plan.init_mesh": plan_mesh,
}


@on_each_rank
def make_mesh_of_unlike_versions(name: str, package: str) -> str:
    """Make a mesh where the last rank has another version of a package."""
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    version = mock.patch(f"{package}.__version__", "1.9+local" if rank == last else "2.13+local")
    host = mock.patch("attnmesh.setup.init_mesh.gethostname", return_value=f"host-{rank}")
    with version, host, pytest.raises(MeshError) as caught:
        MESHES[name]()
    return str(caught.value)


@pytest.mark.parametrize("package", ["attnmesh", "torch"])
@pytest.mark.parametrize("name", MESHES)
def test_ranks_of_other_versions_are_named_with_their_host_on_all_ranks(pool: Pool, name: str, package: str) -> None:
    error, *others = pool.run(6, make_mesh_of_unlike_versions, name, package)
    assert others == [error] * 5
    head, row, last = error.splitlines()[1:4]
    assert head.split() == ["ranks", "versions", "hosts"]
    assert row.split("  ")[2:][-1] == "host-0, host-1, host-2 and 2 more"
    assert row.strip().startswith("0, 1, 2, 3, 4 ")
    assert last.split()[0] == "5"
    assert last.endswith("host-5")
    assert "1.9" in last
    assert "2.13" in row
    assert error.endswith("Fix: install the same versions of attnmesh and PyTorch on all hosts.")


@on_each_rank
def make_mesh_of_unlike_shapes() -> str:
    """Make meshes of other shapes by equal versions, on a host each."""
    rank = dist.get_rank()
    host = mock.patch("attnmesh.setup.init_mesh.gethostname", return_value=f"host-{rank}")
    with host, pytest.raises(MeshError) as caught:
        am.init_mesh((1, 2, 1) if rank else (1, 1, 2))
    return str(caught.value)


def test_hosts_may_differ_and_are_named_beside_what_may_not(pool: Pool) -> None:
    error, other = pool.run(2, make_mesh_of_unlike_shapes)
    assert error == other
    assert "versions" not in error
    assert "call it alike on all ranks" in error
    assert [row.split()[-1] for row in error.splitlines()[1:4]] == ["hosts", "host-0", "host-1"]


@on_each_rank
def catch_error_of_one(size: int) -> str:
    """Return the error of a mesh that does not fit, on one rank alone, on hosts that share no memory."""
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("cp",))
    last = dist.get_rank() == size - 1
    by_sockets = mock.patch(
        "attnmesh.guard.agreement.all_gather_ints", lambda numbers, mesh: dist_all_gather_ints(numbers, mesh.axes)
    )
    with by_sockets, pytest.raises(MeshError) as caught:
        am.split_mesh(mesh, (1, 1, size - 1) if last else (1, 1, size))
    return str(caught.value)


@pytest.mark.parametrize("size", [4, 6])
def test_ranks_of_a_long_axis_say_as_many_numbers_as_one_that_fails(pool: Pool, size: int) -> None:
    error, *others = pool.run(size, catch_error_of_one, size)
    assert error.startswith(f"split_mesh shape: expected a shape of {size} ranks, given 1x1x{size - 1}.")
    assert others == [error] * (size - 1)


SCRIPT = """
import os
import attnmesh as am
from attnmesh.errors import MeshError
am.__version__ = "0." + os.environ["RANK"]
try:
    am.init_mesh((1, 1, 2))
except MeshError as error:
    print(error)
"""


def test_versions_are_compared_where_the_mesh_makes_the_process_group(tmp_path: Path) -> None:
    script = tmp_path / "versions.py"
    script.write_text(SCRIPT)
    done = run_script(script, ranks=2)
    assert done.stdout.count("Fix: install the same versions of attnmesh and PyTorch on all hosts.") == 2, done


@on_each_rank
def make_meshes_from_tuples() -> list[object]:
    made = [am.init_mesh((1, 2, 2)), am.init_mesh("cpu", [1, 2, 2], 8, 2)]
    return [(RankMesh.of(mesh).shape, mesh.device_type, mesh.mesh_dim_names) for mesh in made]


def test_a_plain_tuple_makes_a_mesh(pool: Pool) -> None:
    ungrouped = Shape(1, 2, 2), "cpu", ("heads", "keys", "queries")  # keys and values weigh as much as queries
    grouped = Shape(1, 2, 2), "cpu", ("heads", "queries", "keys")
    assert pool.run(4, make_meshes_from_tuples) == [[ungrouped, grouped]] * 4
