"""The planner: laws that hold on any machine, and errors."""

from dataclasses import replace

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import attnmesh as am
from attnmesh.comm.topology import agreed_cluster_and_tile
from attnmesh.cost.candidate_mesh import CandidateMesh
from attnmesh.cost.cluster import Cluster
from attnmesh.cost.rates import Device, Link
from attnmesh.cost.traffic import planned_traffic
from attnmesh.errors import ClusterError, DtypeError, KernelError, MaskError, ShapeError
from attnmesh.mesh.axes import RankMesh
from attnmesh.mesh.schedule import Problem
from attnmesh.mesh.shapes import Shape, elements
from attnmesh.planner.plan import all_candidates
from attnmesh.planner.workload import Workload
from attnmesh.planner.workload_cost import cost
from tests.support.ranks.pool import Pool, on_each_rank
from tests.support.truth.tolerances import FLOAT32_SUMS, worst

pytestmark = pytest.mark.quick


@pytest.mark.parametrize("cluster", ["dgx-h100", "local"])
def test_documents_of_unequal_lengths_are_packed(cluster: str) -> None:
    documents = [30_000, 9_000, 7_000, *[500] * 70, *[100] * 500]
    mask = am.Causal() & am.Documents(documents)
    workload = Workload(32, 8, 128, sum(documents), mask=mask, phase="training")
    plans = am.plan(workload, am.Cluster.preset(cluster, hosts=2, ranks=8))
    best, *others = (one for one in plans if one.shape.heads == 1)
    assert best.layout == am.Packed(documents, best.shape)
    zigzag = next(one for one in others if one.shape == best.shape and one.layout == am.Zigzag())
    assert zigzag.seconds > 1.3 * best.seconds
    counted = planned_traffic(Problem(mask, best.shape, best.layout, best.layout, *[sum(documents)] * 2), best.tile)
    assert counted.pairs.most < 1.1 * counted.pairs.mean


@pytest.mark.parametrize("exchange", ["bulk", "pipelined", "ring"])
def test_bytes_under_a_full_mask_are_those_of_the_formula(exchange: str) -> None:
    """In float32, where all elements have one width, apart from lse and delta of each row."""
    work, local = Workload(8, 2, 64, 960, dtype="float32", mask=am.Full()), am.Cluster.preset("local")
    for shape in (Shape(1, 4, 4), Shape(2, 3, 2), Shape(1, 1, 8), Shape(1, 6, 1)):
        candidate = CandidateMesh(shape, Shape(1, 1, 1), am.Contiguous(), exchange)
        total = cost(candidate, work, local.sized(shape.ranks, 1))
        rows = 4 * 8 * (shape.keys - 1) * 3  # lse forward, lse and delta backward
        formula = 960 * (4 * 64 * sum(elements(shape, 8, 2)) + rows)
        compared = total.between - formula
        assert 0 <= compared < 0.01 * formula  # ranks compare little beside these


@pytest.mark.parametrize("phase", ["prefill", "training"])
def test_no_plan_is_faster_than_its_bytes(phase: str) -> None:
    """On free devices the time is that of the busiest link, which sends at least the mean of all."""
    free, rate = Link(0.0, 1e18, 1e18), 1e7
    cluster = Cluster("links", 16, 1, Device(*[1e18] * 4), free, Link(0.0, rate, rate))
    work = Workload(24, 24, 64, 4096, dtype="float32", mask=am.Full(), phase=phase)
    found = [(candidate, cost(candidate, work, cluster)) for candidate in all_candidates(work, cluster)]
    assert {candidate.exchange_or_merge for candidate, _ in found} == {"bulk", "pipelined", "ring"}
    for candidate, predicted in found:
        assert predicted.seconds >= 0.999 * predicted.between / 16 / rate, candidate


@pytest.mark.parametrize("phase", ["training", "prefill", "decode"])
@pytest.mark.parametrize("world", [(1, 1), (2, 4), (3, 2), (7, 1)])
def test_every_way_is_planned_once_and_fastest_comes_first(phase: str, world: tuple[int, int]) -> None:
    work, cluster = Workload(8, 4, 64, 4096, phase=phase), am.Cluster.preset("dgx-h100", *world)
    plans = am.plan(work, cluster)
    found = [(one.shape, one.tile, one.exchange, one.layout) for one in plans]
    assert len(set(found)) == len(found) == len(list(all_candidates(work, cluster)))
    assert [one.seconds for one in plans] == sorted(one.seconds for one in plans)
    assert all(one.shape.ranks == cluster.world and one.tile.ranks == cluster.ranks for one in plans)
    assert all(sum(dict(one.parts).values()) == pytest.approx(one.seconds) for one in plans)


def test_explanations_name_the_runner_up() -> None:
    plans = am.plan(Workload(32, 8, 128, 131072), am.Cluster.preset("a100x4"))
    explained = plans[0].explain()
    assert explained.startswith(f"On a100x4, 16 hosts of 4 ranks:\n{plans[0].name}")
    other = next(one for one in plans if one.shape != plans[0].shape)
    assert other.name in explained
    assert plans[0].runner_up == other
    assert "times as fast" in explained
    assert plans[-1].explain().count(plans[0].name) >= 1
    assert all(one.runner_up == plans[0] for one in plans[1:])
    alone = am.plan(Workload(1, 1, 64, 100), am.Cluster.preset("h100x1", hosts=1))
    assert "one device" in alone[0].explain()


def test_the_note_on_placement_is_for_plans_that_differ_in_nothing_else() -> None:
    best, *others = am.plan(Workload(32, 8, 128, 131072), am.Cluster.preset("dgx-h100", hosts=2))
    alike = [(one.shape, one.exchange, one.layout) == (best.shape, best.exchange, best.layout) for one in others]
    assert {*alike} == {True, False}
    assert ["differ only" in one.explain() for one in others] == alike


def test_a_plan_prints_one_short_line() -> None:
    one = am.plan(Workload(32, 8, 128, 131072), am.Cluster.preset("dgx-h100", 2))[0]
    text = f"{one}"
    assert text == repr(one)
    assert text.startswith(f"Plan({one.name}; {one.layout}; ")
    assert text.endswith(" per rank; dgx-h100, 2 hosts of 8 ranks)")
    assert "\n" not in text
    assert len(text) < 180


def test_slower_links_between_hosts_never_help_and_faster_devices_never_hurt() -> None:
    work, cluster = Workload(16, 4, 128, 65536), am.Cluster.preset("dgx-h100", hosts=2)
    slow = replace(cluster, between=replace(cluster.between, rate=1e9, host_rate=8e9))
    fast = replace(cluster, device=replace(cluster.device, forward_rate=1e16, backward_rate=1e16))
    for one in all_candidates(work, cluster):
        seconds = cost(one, work, cluster).seconds
        assert cost(one, work, slow).seconds >= seconds >= cost(one, work, fast).seconds


def test_on_slow_links_the_fastest_placement_sends_little_between_hosts() -> None:
    """The fastest placement of a shape and exchange is not the one that sends most between hosts."""
    cluster = am.Cluster.preset("dgx-h100", hosts=4, ranks=4)
    slow = replace(cluster, between=replace(cluster.between, rate=1e8, host_rate=4e8))
    plans = [one for one in am.plan(Workload(16, 16, 64, 16384), slow) if one.shape == (1, 4, 4)]
    assert {one.tile for one in plans} == {Shape(1, 1, 4), Shape(1, 2, 2), Shape(1, 4, 1)}
    for exchange in ("bulk", "pipelined"):
        sent = [one.bytes.between for one in plans if one.exchange == exchange and one.layout == am.Zigzag()]
        assert sent[0] < max(sent)


def test_a_plan_makes_its_mesh(pool: Pool) -> None:
    for right in pool.run(4, attend_on_meshes_of_plans):
        assert right == dict.fromkeys(right, True)


@on_each_rank
def attend_on_meshes_of_plans() -> dict[str, bool]:
    """Run attention on the mesh of a plan, with its exchange and with "auto"; all ranks share one host."""
    work = Workload(4, 2, 16, 64, dtype="float32")
    best = am.plan(work, am.Cluster.preset("local"))[0]
    mesh = best.init_mesh("cpu")
    torch.manual_seed(0)
    whole = [torch.randn(1, heads, 64, 16) for heads in (4, 2, 2)]
    shards = [am.shard(x, mesh, layout=best.layout) for x in whole]
    out = am.attention(*shards, mesh=mesh, layout=best.layout, exchange=best.exchange)
    auto = am.attention(*shards, mesh=mesh, layout=best.layout)
    expected = am.shard(am.attention(*whole, mesh=None), mesh, layout=best.layout)
    found, tile = agreed_cluster_and_tile(RankMesh.of(mesh), torch.device("cpu"))
    return {
        "the plan's exchange": torch.allclose(out, expected, atol=FLOAT32_SUMS),
        "auto": torch.allclose(auto, expected, atol=FLOAT32_SUMS),
        "one host": found.hosts == 1 and tile == best.shape,
    }


@on_each_rank
def measure_error_with_few_tokens(length: int) -> float:
    """Return the error of attention where some ranks hold no tokens."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("queries", "keys"))
    torch.manual_seed(0)
    whole = [torch.randn(1, 2, length, 8) for _ in range(3)]
    shards = (am.shard(x, mesh, layout=am.Zigzag()) for x in whole)
    out = am.attention(*shards, mesh=mesh, layout=am.Zigzag(), length=length)
    return float((out - am.shard(am.attention(*whole, mesh=None), mesh, layout=am.Zigzag())).abs().sum())


@pytest.mark.parametrize("length", [1, 2, 3, 5])
def test_auto_is_the_same_exchange_on_ranks_without_tokens(pool: Pool, length: int) -> None:
    assert worst(pool.run(4, measure_error_with_few_tokens, length)) < 1e-4  # a sum of all errors


DEVICE, LINK = Device(1e12, 1e12, 1e12, 1e9), Link(1e-6, 1e9, 1e9)

INVALID = [
    (lambda: Cluster("c", 0, 8, DEVICE, LINK, LINK), ClusterError, "Cluster hosts: expected a whole number"),
    (lambda: Cluster("c", 1, True, DEVICE, LINK, LINK), ClusterError, "Cluster ranks"),
    (
        lambda: Cluster.preset("h100"),
        ClusterError,
        "one of dgx-h100, dgx-h200, dgx-b200, h100x1, a100x4, mi300x, rtx4090",
    ),
    (lambda: Cluster.preset("dgx-h100", hosts=0), ClusterError, "Cluster hosts"),
    (lambda: Cluster.preset("dgx-h100", ranks=9), ClusterError, "at most 8 ranks a host, given 9"),
    (lambda: Link(1e-6, 0, 1e9), ClusterError, "Link rate: expected a rate or size of 1 to 1e+30, given 0"),
    (lambda: Link(1e-6, 1e9, float("nan")), ClusterError, "Link host_rate"),
    (lambda: Link(-1, 1e9, 1e9), ClusterError, "Link latency: expected seconds, 0 to 86,400, given -1"),
    (lambda: Device(1e12, 1e12, 0, 1e9), ClusterError, "Device memory_rate"),
    (lambda: Cluster.preset([1]), ClusterError, "one of dgx-h100"),
    (lambda: am.plan(Workload(8, 8, 64, 10), Cluster.preset("local", 10**9)), ClusterError, "at most 2,048 ranks"),
    (lambda: Cluster.preset("h100x1").sized(2, 8), ClusterError, "links in a host for 8 of them, given none"),
    (lambda: Cluster("c", 1, 1, None, LINK, LINK), ClusterError, "Cluster device: expected a Device, given NoneType"),
    (lambda: replace(Cluster.preset("local"), short_collectives="x"), ClusterError, "tree or ring, given 'x'"),
    (lambda: Device(1e12, 1e12, 1e12, 1e9, call=float("nan")), ClusterError, "Device call: expected seconds"),
    (
        lambda: Device(1e12, 1e12, 1e12, None),
        ClusterError,
        "Device memory: expected a rate or size",
    ),
    (lambda: Link(float("inf"), 1e9, 1e9), ClusterError, "Link latency: expected seconds"),
    (lambda: Link(0.0, float("inf"), 1e9), ClusterError, "Link rate: expected a rate or size of 1 to 1e+30, given inf"),
    (lambda: Link(0.0, 1e-300, 1e9), ClusterError, "Link rate: expected a rate or size of 1 to 1e+30, given 1e-300"),
    (
        lambda: Device(1e9, 1e9, 1e9, 10**400),
        ClusterError,
        "Device memory: expected a rate or size of 1 to 1e+30",
    ),
    (lambda: replace(Cluster.preset("local"), name="\x1b[2J"), ClusterError, "each on one line, given ('\\x1b[2J'"),
    (lambda: replace(Cluster.preset("local"), sources="abc"), ClusterError, "pairs of a constant and its source"),
    (
        lambda: Workload(8, 8, 64, 100, phase="decode", mask=am.Causal() & am.Documents([10, 10])),
        MaskError,
        "Workload mask: expected documents that add up to 100 tokens, given 20 tokens",
    ),
    (lambda: Workload(8, 8, 64, 10**20), ClusterError, "no more than 1e+15, given a larger number"),
    (lambda: Cluster.of_record([]), ClusterError, "a JSON object that probe wrote"),
    (lambda: Cluster.of_record({"name": "x"}), ClusterError, "the fields that probe writes"),
    (lambda: Workload(8, 3, 64, 100), ShapeError, "whole groups of query heads, given 8 query heads on 3 key heads"),
    (lambda: Workload(8, 8, 64, 0), ClusterError, "Workload length: expected a whole number, 1 or more, given 0"),
    (lambda: Workload(8, 8, 64.0, 10), ClusterError, "Workload head_dim"),
    (lambda: Workload(8, 8, 64, 10, dtype="int8"), DtypeError, "Workload dtype"),
    (lambda: Workload(8, 8, 64, 10, phase="train"), KernelError, "one of training, prefill, decode, given 'train'"),
    (lambda: Workload(8, 8, 64, 10, q_len=4), ShapeError, "q_len in decode only"),
    (
        lambda: Workload(8, 8, 64, 10, mask=am.Full() & am.Documents([4])),
        MaskError,
        "documents that add up to 10 tokens",
    ),
    (
        lambda: am.plan(Workload(8, 8, 64, 10), "dgx-h100"),
        ClusterError,
        "given Workload and str",
    ),
]


@pytest.mark.parametrize(("call", "kind", "message"), INVALID)
def test_invalid_arguments_raise(call: object, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind) as caught:
        call()  # type: ignore[operator]
    assert message in str(caught.value)


def test_too_little_memory_raises_with_the_missing_gigabytes() -> None:
    work = Workload(64, 64, 128, 10_000_000, layers=64, phase="decode")
    with pytest.raises(ClusterError, match=r"at most 80\.0 GB a rank, given 2,621\.4 GB .*, 2,541\.4 GB"):
        am.plan(work, am.Cluster.preset("dgx-h100", hosts=1))
    with pytest.raises(ClusterError, match="take about 33 hosts"):
        am.plan(work, am.Cluster.preset("dgx-h100", hosts=1))
    assert am.plan(work, am.Cluster.preset("dgx-h100", hosts=33))
    work = Workload(32, 8, 128, 10**8)
    with pytest.raises(ClusterError, match="take about 200 hosts"):
        am.plan(work, am.Cluster.preset("h100x1", hosts=2))
    assert am.plan(work, am.Cluster.preset("h100x1", hosts=200))
    with pytest.raises(ClusterError, match="Fix: take fewer tokens"):
        am.plan(Workload(32, 8, 128, 10**12), am.Cluster.preset("h100x1", hosts=2))


def test_a_prefill_keeps_keys_and_values_alone() -> None:
    work, cluster = Workload(64, 8, 128, 10**6, layers=80, phase="prefill"), am.Cluster.preset("dgx-h100", hosts=2)
    least = min(one.memory for one in am.plan(work, cluster))
    assert work.kept_bytes / 16 < least < 2 * work.kept_bytes / 16


def test_a_decode_step_under_a_window_holds_and_reads_the_window() -> None:
    cluster, mask = am.Cluster.preset("dgx-h100", hosts=1), am.Window(1023)
    near, far = (Workload(16, 8, 256, n, layers=40, phase="decode", mask=mask) for n in (2048, 10**5))
    whole = Workload(16, 8, 256, 10**5, layers=40, phase="decode")
    assert near.kept_bytes == far.kept_bytes == whole.kept_bytes * 1024 / 10**5
    one, other, more = (min(am.plan(work, cluster), key=lambda plan: plan.seconds) for work in (near, far, whole))
    assert (one.memory, one.seconds) == (other.memory, other.seconds)
    assert more.memory > 90 * one.memory
    chunks = Workload(16, 8, 256, 10**5, phase="decode", q_len=5, mask=am.Causal() & am.Chunks(512))
    assert chunks.kept == 516
    assert Workload(16, 8, 256, 10**5, phase="prefill", mask=mask).kept == 10**5


def test_latents_have_the_bytes_and_the_memory_of_one_head() -> None:
    cluster, shape = am.Cluster.preset("dgx-h100", hosts=1), Shape(1, 8, 1)
    latents = Workload(128, 128, 192, 65536, value_dim=128, latent=(512, 64), phase="decode", mask=am.Full())
    expanded = replace(latents, latent=None)
    assert latents.kept_bytes == 65536 * 576 * 2
    plans = am.plan(latents, cluster)
    assert {plan.shape.heads for plan in plans} == {1}  # a heads axis has nothing to split
    assert plans[0].memory == latents.kept_bytes / 8
    assert dict(plans[0].parts)["kernel"] < dict(am.plan(expanded, cluster)[0].parts)["kernel"] / 10
    for exchange in ("bulk", "ring"):
        candidate = CandidateMesh(shape, shape, am.Contiguous(), exchange)
        few, many = (cost(candidate, replace(work, phase="prefill"), cluster) for work in (latents, expanded))
        # Beside what ranks compare:
        assert few.inside == pytest.approx(7 * 65536 * 576 * 2, rel=1e-3)
        assert many.inside == pytest.approx(7 * 65536 * 128 * 320 * 2, rel=1e-3)
        assert few.memory < many.memory
        assert few.parts["kernel"] > many.parts["kernel"]  # it expands what arrives
        assert cost(candidate, replace(latents, phase="training"), cluster) == cost(
            candidate, replace(expanded, phase="training"), cluster
        )
