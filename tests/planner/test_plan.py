"""The planner, its clusters and its traffic: laws that hold on any machine, and errors."""

import math
from dataclasses import replace
from itertools import product
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import attnmesh as am
from attnmesh.comm.topology import surroundings
from attnmesh.comm.transport import flat_axis
from attnmesh.core.mask import Mask
from attnmesh.errors import ClusterError, DtypeError, KernelError, MaskError, ShapeError
from attnmesh.mesh.axes import Axis, Mesh
from attnmesh.mesh.candidate import Candidate
from attnmesh.mesh.cluster import PRESETS, Cluster
from attnmesh.mesh.merge_cost import MergeGroup, Payload
from attnmesh.mesh.merges import MERGES
from attnmesh.mesh.rates import Device, Link
from attnmesh.mesh.schedule import Problem, schedule
from attnmesh.mesh.shapes import AXES, Shape, elements, rank_grid
from attnmesh.mesh.traffic import FLOWS, tiles, traffic
from attnmesh.planner.cost import cost
from attnmesh.planner.plan import candidates
from attnmesh.planner.workload import Workload
from attnmesh.setup import measure_shares
from attnmesh.setup.measure import MeasuredRanks, measure_link
from tests.support.pool import Pool
from tests.support.seeds import pairs

pytestmark = pytest.mark.quick

MASKS = [am.Full(), am.Causal(), am.Window(20), am.Causal() & am.Documents([30, 50, 41]), am.Causal() & am.Chunks(30)]
SHAPES = [Shape(1, 4, 1), Shape(1, 2, 3), Shape(2, 2, 2), Shape(1, 1, 4), Shape(1, 3, 3), Shape(1, 5, 1)]


@pytest.mark.parametrize(("mask", "layout"), pairs(MASKS, [am.Zigzag(), am.Contiguous(), am.Striped(2)], 8))
def test_predicted_traffic_is_what_the_executor_sends(mask: Mask, layout: am.Zigzag) -> None:
    """Counts for all ranks at once equal the sums over schedules, whichever ranks share a host."""
    for shape in SHAPES:
        problem = Problem(mask, shape, layout, layout, 121, 121)
        places = list(product(range(shape.queries), range(shape.keys)))
        bulk, ring = ([schedule(problem, *place, ring) for place in places] for ring in (False, True))
        rows = sum(count for one in bulk for _, count in one.query_step.receive)
        columns = sum(count for one in bulk for _, count in one.key_steps[0].receive)
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
            moves = traffic(problem, tile)
            for flow, count, times in (
                (moves.rows, rows, 1),
                (moves.columns, columns, 1),
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
        traffic(Problem(m, shape, am.Zigzag(), am.Zigzag(), n, n), Shape(1, 2, 1))
        for m, n in ((mask, 4096), (Mask(min(mask.left * 64, 1 << 60), mask.right), 4096 * 64))
    )
    for name in FLOWS:
        assert getattr(two, name).between.total == pytest.approx(64 * getattr(one, name).between.total, rel=0.03)
    wider = 64 if mask.left > 20 else (64 * 20 + 1) / (20 + 1)
    assert two.pairs == pytest.approx(one.pairs.times(64 * wider), rel=0.03)


@pytest.mark.parametrize(("length", "left"), [(4096, 16), (100_000, 16), (10**6, 100), (10**8, 1024), (10**9, 1024)])
def test_a_short_window_in_a_long_sequence(length: int, left: int) -> None:
    """By hand: each query has left + 1 pairs, and left keys cross each of the 3 edges between runs."""
    shape = Shape(1, 4, 1)
    moves = traffic(Problem(am.Window(left), shape, am.Contiguous(), am.Contiguous(), length, length), Shape(1, 1, 1))
    assert moves.pairs.most == pytest.approx(length / 4 * (left + 1), rel=0.05)
    assert moves.columns.between.total == pytest.approx(3 * left, rel=0.1)


@pytest.mark.parametrize("length", [10**5, 10**7])
def test_short_documents_in_a_long_sequence(length: int) -> None:
    """By hand: a document of 50 has 50 * 51 / 2 pairs; only keys of documents on an edge between runs travel."""
    mask = am.Causal() & am.Documents([50] * (length // 50))
    moves = traffic(Problem(mask, Shape(1, 8, 1), am.Contiguous(), am.Contiguous(), length, length), Shape(1, 1, 1))
    assert moves.pairs.most == pytest.approx(length / 50 / 8 * 50 * 51 / 2, rel=0.05)
    assert moves.columns.between.total <= 7 * 50


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
    counted = traffic(Problem(mask, best.shape, best.layout, best.layout, *[sum(documents)] * 2), best.tile)
    assert counted.pairs.most < 1.1 * counted.pairs.mean


@pytest.mark.parametrize("exchange", ["bulk", "pipelined", "ring"])
def test_bytes_under_a_full_mask_are_those_of_the_formula(exchange: str) -> None:
    """In float32, where all elements have one width, apart from lse and delta of each row."""
    work, local = Workload(8, 2, 64, 960, dtype="float32", mask=am.Full()), am.Cluster.preset("local")
    for shape in (Shape(1, 4, 4), Shape(2, 3, 2), Shape(1, 1, 8), Shape(1, 6, 1)):
        one = shape.ranks, Shape(1, 1, 1)
        total = cost(Candidate(shape, one[1], am.Contiguous(), exchange), work, local.sized(*(one[0], 1)))
        rows = 4 * 8 * (shape.keys - 1) * 3  # lse forward, lse and delta backward
        formula = 960 * (4 * 64 * sum(elements(shape, 8, 2)) + rows)
        compared = total.between - formula
        assert 0 <= compared < 0.01 * formula


@pytest.mark.parametrize("phase", ["prefill", "training"])
def test_no_plan_is_faster_than_its_bytes(phase: str) -> None:
    """On free devices the time is that of the busiest link, which sends at least the mean of all."""
    free, rate = Link(0.0, 1e18, 1e18), 1e7
    cluster = Cluster("links", 16, 1, Device(*[1e18] * 4), free, Link(0.0, rate, rate))
    work = Workload(24, 24, 64, 4096, dtype="float32", mask=am.Full(), phase=phase)
    found = [(candidate, cost(candidate, work, cluster)) for candidate in candidates(work, cluster)]
    assert {candidate.exchange for candidate, _ in found} == {"bulk", "pipelined", "ring"}
    for candidate, predicted in found:
        assert predicted.seconds >= 0.999 * predicted.between / 16 / rate, candidate


def test_a_host_holds_a_tile() -> None:
    for shape, ranks in ((Shape(2, 4, 4), 8), (Shape(1, 6, 2), 4), (Shape(1, 7, 1), 7), (Shape(3, 1, 5), 1)):
        for tile in tiles(shape, ranks):
            grid = rank_grid(shape, tile)
            assert sorted(grid.flatten().tolist()) == list(range(shape.ranks))
            h, r, c = (slice(0, n) for n in tile)
            assert sorted(grid[h, r, c].flatten().tolist()) == list(range(ranks))


@pytest.mark.parametrize("phase", ["training", "prefill", "decode"])
@pytest.mark.parametrize("world", [(1, 1), (2, 4), (3, 2), (7, 1)])
def test_every_candidate_is_planned_once_and_fastest_comes_first(phase: str, world: tuple[int, int]) -> None:
    work, cluster = Workload(8, 4, 64, 4096, phase=phase), am.Cluster.preset("dgx-h100", *world)
    plans = am.plan(work, cluster)
    found = [(one.shape, one.tile, one.exchange, one.layout) for one in plans]
    assert len(set(found)) == len(found) == len(list(candidates(work, cluster)))
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
    for one in others:
        alike = (one.shape, one.exchange, one.layout) == (best.shape, best.exchange, best.layout)
        assert ("differ only" in one.explain()) is alike


def test_a_plan_prints_one_short_line() -> None:
    one = am.plan(Workload(32, 8, 128, 131072), am.Cluster.preset("dgx-h100"))[0]
    text = f"{one}"
    assert text == repr(one)
    assert text.startswith(f"Plan({one.name}; {one.layout}; ")
    assert text.endswith(" per rank; dgx-h100, 16 hosts of 8 ranks)")
    assert "\n" not in text
    assert len(text) < 180


def test_slower_links_between_hosts_never_help_and_faster_devices_never_hurt() -> None:
    work, cluster = Workload(16, 4, 128, 65536), am.Cluster.preset("dgx-h100", hosts=2)
    slow = replace(cluster, between=replace(cluster.between, rate=1e9, host_rate=8e9))
    fast = replace(cluster, device=replace(cluster.device, forward_rate=1e16, backward_rate=1e16))
    for one in candidates(work, cluster):
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


@pytest.mark.parametrize("how", MERGES)
def test_merges_cost_more_on_more_ranks(how: str) -> None:
    cluster, seconds = am.Cluster.preset("dgx-h100"), []
    for ranks in (2, 8, 16, 64, 128):
        seconds.append(MERGES[how].seconds(MergeGroup(ranks, min(8, ranks)), Payload(128.0, 128), cluster))
    assert seconds == sorted(seconds)


def test_mesh_of_a_plan(pool: Pool) -> None:
    assert pool.run(4, meshes_of_plans) == [[True, True, True]] * 4


def meshes_of_plans() -> list[bool]:
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
    found, tile = surroundings(Mesh.of(mesh), torch.device("cpu"))
    return [
        torch.allclose(out, expected, atol=1e-5),
        torch.allclose(auto, expected, atol=1e-5),
        found.hosts == 1 and tile == best.shape,
    ]


def error_with_few_tokens(length: int) -> float:
    """Return the error of attention where some ranks hold no tokens."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("queries", "keys"))
    torch.manual_seed(0)
    whole = [torch.randn(1, 2, length, 8) for _ in range(3)]
    shards = (am.shard(x, mesh, layout=am.Zigzag()) for x in whole)
    out = am.attention(*shards, mesh=mesh, layout=am.Zigzag(), length=length)
    return float((out - am.shard(am.attention(*whole, mesh=None), mesh, layout=am.Zigzag())).abs().sum())


@pytest.mark.parametrize("length", [1, 2, 3, 5])
def test_auto_is_the_same_exchange_on_ranks_without_tokens(pool: Pool, length: int) -> None:
    assert max(pool.run(4, error_with_few_tokens, length)) < 1e-4


def test_measuring_takes_seconds_and_finds_the_same_on_all_ranks(pool: Pool) -> None:
    found = pool.run(4, measured)
    assert all(one == found[0] for one in found)
    assert (found[0].hosts, found[0].ranks) == (1, 4)
    assert found[0].inside.rate > 1e6
    assert Cluster.of_record(found[0].record()) == found[0]


def measured() -> Cluster:
    """Measure links twice, where rank 0 is in one group more than the others: both have hung."""
    dist.new_group([0])
    mesh = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=AXES)
    measure_link(MeasuredRanks.of(flat_axis(mesh, AXES), torch.device("cpu")), between=False)
    with patch.object(measure_shares, "READ_SECONDS", 0.05):
        return Cluster.measure(mesh)


def test_one_rank_is_measured_too() -> None:
    found = Cluster.measure(None)
    assert found.world == 1
    assert am.plan(Workload(4, 2, 16, 64, dtype="float32"), found)[0].bytes == (0, 0)


@pytest.mark.parametrize("name", [name for name in PRESETS if name != "local"])
def test_presets_name_the_sources_of_their_constants(name: str) -> None:
    sources = dict(PRESETS[name].sources)
    assert {"device", "inside" if PRESETS[name].ranks > 1 else "between", "the rest"} <= set(sources)


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


def test_surroundings_of_one_rank() -> None:
    one = Mesh(Axis(), Axis(), Axis())
    cluster, tile = surroundings(one, torch.device("cpu"))
    assert (cluster.world, tile) == (1, Shape(1, 1, 1))


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
        candidate = Candidate(shape, shape, am.Contiguous(), exchange)
        few, many = (cost(candidate, replace(work, phase="prefill"), cluster) for work in (latents, expanded))
        assert few.inside == pytest.approx(7 * 65536 * 576 * 2, rel=1e-3)
        assert many.inside == pytest.approx(7 * 65536 * 128 * 320 * 2, rel=1e-3)
        assert few.memory < many.memory
        assert few.parts["kernel"] > many.parts["kernel"]  # it expands what arrives
        assert cost(candidate, replace(latents, phase="training"), cluster) == cost(
            candidate, replace(expanded, phase="training"), cluster
        )
