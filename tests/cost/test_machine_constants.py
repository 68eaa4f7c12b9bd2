"""The constants that `attnmesh probe` keeps, and `auto` reads: on all ranks alike, or not at all."""

import json
import os
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from attnmesh.cli.launch import run_on_ranks
from attnmesh.comm.topology import agreed_cluster_and_tile
from attnmesh.cost import machine_constants
from attnmesh.cost.cluster import Cluster
from attnmesh.mesh.axes import RankMesh
from attnmesh.mesh.shapes import Shape
from attnmesh.runtime.world import WORLD
from tests.support.process.command import run
from tests.support.ranks.pool import on_each_rank


def cluster(rate: float = 7e9) -> Cluster:
    local = Cluster.preset("local")
    return replace(local, name="measured here", inside=replace(local.inside, rate=rate))


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Name a file for the constants."""
    monkeypatch.setenv("ATTNMESH_MACHINE", str(tmp_path / "folder" / "machine.json"))
    monkeypatch.setattr("attnmesh.errors._warned", set())
    machine_constants.measured_machine.cache_clear()
    return tmp_path / "folder" / "machine.json"


def test_what_is_kept_is_read_again(file: Path) -> None:
    assert machine_constants.measured_machine("cpu") is None
    assert machine_constants.keep_machine(cluster(), "cpu") == file
    machine_constants.measured_machine.cache_clear()
    found = machine_constants.measured_machine("cpu")
    assert found is not None
    assert found[0] == cluster()
    assert machine_constants.measured_machine("cuda") is None
    assert [x.name for x in file.parent.iterdir()] == [file.name]


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "{}", '{"device": "cpu"}', '{"device": "cpu", "cluster": {}}', '{"device": "cpu", "cluster": 3}'],
)
def test_a_damaged_file_is_named_once_and_not_used(file: Path, text: str) -> None:
    file.parent.mkdir()
    file.write_text(text)
    with pytest.warns(UserWarning, match="is not read.*run attnmesh probe, or remove the file"):
        assert machine_constants.measured_machine("cpu") is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert machine_constants.measured_machine("cpu") is None


def test_a_folder_that_cannot_be_written_keeps_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTNMESH_MACHINE", "/proc/nowhere/machine.json")
    assert machine_constants.keep_machine(cluster(), "cpu") is None
    monkeypatch.setenv("ATTNMESH_MACHINE", "")
    assert machine_constants.keep_machine(cluster(), "cpu") is None


def test_machines_of_another_kind_have_another_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("ATTNMESH_MACHINE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    own = machine_constants.machine_file("cpu")
    monkeypatch.setattr(os, "cpu_count", lambda: 1000)
    other = machine_constants.machine_file("cpu")
    assert own is not None
    assert other is not None
    assert own.parent == tmp_path / "attnmesh"
    assert own != other


def test_hosts_without_measured_links_take_the_preset() -> None:
    one = replace(cluster(), hosts=1)
    assert machine_constants.cluster_of(1, 3, one, "local").inside.rate == 7e9
    measured = Cluster.measure(None)  # has no links at all
    assert machine_constants.cluster_of(1, 3, measured, "local") == Cluster.preset("local").sized(1, 3)


def test_ranks_of_a_preset_share_the_cores_of_their_host() -> None:
    preset = Cluster.preset("local")
    assert machine_constants.cluster_of(1, 8, preset, "local", share=0.5).device.alone == 4.0
    assert machine_constants.cluster_of(8, 2, preset, "local", share=0.5) == preset.sized(8, 2)
    crowded, alone = (machine_constants.cluster_of(1, ranks, preset, "local", share=0.5).device for ranks in (8, 2))
    assert (crowded.memory_rate, crowded.call) == (alone.memory_rate / 4, alone.call * 4)
    measured = replace(cluster(), device=replace(cluster().device, alone=2.0))  # by 4 ranks on 2 cores
    device = machine_constants.cluster_of(1, 8, measured, "local", share=0.5).device
    assert (device.alone, device.memory_rate) == (4.0, measured.device.memory_rate / 2)
    device = machine_constants.cluster_of(1, 2, measured, "local", share=0.5).device
    assert (device.alone, device.memory_rate) == (1.0, measured.device.memory_rate * 2)
    assert machine_constants.cluster_of(3, 4, measured, "local", share=0.5).device == measured.device


def test_ranks_of_this_machine_share_its_cores_and_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTNMESH_MACHINE", "")
    monkeypatch.setattr(machine_constants, "cores_here", lambda: 2)
    machine_constants.measured_machine.cache_clear()
    whole, half, quarter = (machine_constants.this_machine(ranks).device for ranks in (1, 2, 4))
    assert (half.memory_rate, quarter.memory_rate) == (whole.memory_rate, whole.memory_rate / 2)
    assert (half.memory, quarter.memory) == (whole.memory / 2, whole.memory / 4)


def test_a_rank_takes_its_threads_of_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(8), raising=False)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert machine_constants.share_of_cores(torch.device("cpu")) == 0.25
    monkeypatch.setattr(torch, "get_num_threads", lambda: 16)
    assert machine_constants.share_of_cores(torch.device("cpu")) == 1.0
    assert machine_constants.share_of_cores(torch.device("cuda")) == 0.0


@on_each_rank
def read_link_rates(cases: list[list[str]]) -> list[float]:
    """On a rank: the rates of the links that "auto" takes, for each rank's files."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("keys",))
    rates = []
    for files in cases:
        os.environ["ATTNMESH_MACHINE"] = files[dist.get_rank()]
        machine_constants.measured_machine.cache_clear()
        WORLD.clear_caches()
        rates.append(agreed_cluster_and_tile(RankMesh.of(mesh), torch.device("cpu"))[0].inside.rate)
    return rates


def test_ranks_take_measured_constants_if_all_have_the_same(file: Path) -> None:
    """In a world of its own, which has few meshes to forget."""
    machine_constants.keep_machine(cluster(), "cpu")
    other = file.with_name("other.json")
    other.write_text(json.dumps({"device": "cpu", "cluster": cluster(8e9).record()}))
    preset = Cluster.preset("local").inside.rate
    cases = [[str(file)] * 3, [str(file), str(file), str(other)], [str(file), "", str(file)]]
    assert run_on_ranks(3, read_link_rates, cases) == [[7e9, preset, preset]] * 3


def test_probe_keeps_the_constants_of_this_machine(file: Path) -> None:
    code, text = run("probe", "--ranks", "1")
    assert code == 0
    assert "reads them from" in text
    assert json.loads(file.read_text())["device"] == "cpu"


@pytest.mark.parametrize(
    ("hosts", "shape", "tile"),
    [
        ((0, 0, 1, 1), Shape(1, 1, 4), Shape(1, 1, 2)),
        ((0, 1, 0, 1), Shape(1, 2, 2), Shape(1, 2, 1)),
        ((0, 1, 0, 1), Shape(1, 1, 4), Shape(1, 1, 1)),  # neighbours are on two hosts
        ((0, 0, 1, 0), Shape(1, 2, 2), Shape(1, 1, 1)),
        ((0, 0, 1), Shape(1, 1, 3), Shape(1, 1, 1)),
    ],
)
def test_a_tile_is_what_each_host_holds(hosts: tuple[int, ...], shape: Shape, tile: Shape) -> None:
    cluster, found = machine_constants.cluster_and_tile(hosts, shape, Cluster.preset("local"), "local")
    assert found == tile
    assert cluster.world == shape.ranks


@pytest.mark.parametrize(
    ("name", "preset"),
    [
        ("NVIDIA A100-SXM4-80GB", "a100x4"),
        ("NVIDIA RTX A1000", "dgx-h100"),
        ("NVIDIA H100 80GB HBM3", "dgx-h100"),
        ("NVIDIA H200", "dgx-h200"),
        ("NVIDIA B200", "dgx-b200"),
        ("NVIDIA GB200", "gb200-nvl72"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("AMD Instinct MI300X", "mi300x"),
        ("AMD Instinct MI300A", "mi300x"),
    ],
)
def test_a_gpu_has_the_preset_of_a_word_of_its_name(monkeypatch: pytest.MonkeyPatch, name: str, preset: str) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: name)
    assert machine_constants.preset_for(torch.device("cuda")) == preset
