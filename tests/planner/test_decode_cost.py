"""Prices of a decode step by hand: what a rank reads, computes and sends, of several queries and sequences."""

from dataclasses import replace

import pytest

import attnmesh as am
from attnmesh.cost.candidate_mesh import CandidateMesh, Cost
from attnmesh.cost.cluster import Cluster
from attnmesh.cost.rates import Device, Link
from attnmesh.mesh.shapes import Shape
from attnmesh.planner.decode_cost import Experts, SharedLayers, add_outputs, add_results, add_small_calls, decode_cost
from attnmesh.planner.workload_cost import index_cost

pytestmark = pytest.mark.quick

CALL, WAIT = 1e-5, 3e-5
READS = Device(1e15, 1e15, 1e9, 1e12, copy_rate=5e8, call=CALL, wait=WAIT)
"""A device whose products take no time beside what it reads."""
COMPUTES = replace(READS, forward_rate=1e9, memory_rate=1e15)
INSIDE = Link(1e-6, 1e9, 4e9, short=2e-6)
BETWEEN = Link(1e-3, 1e6, 2e6, short=2e-3, message=1e-4)

BATCH, QUERIES, Q_HEADS, KV_HEADS, WIDTH, VALUE_WIDTH, LENGTH = 3, 5, 8, 4, 16, 12, 1000
ROWS = BATCH * QUERIES * Q_HEADS
"""Rows of queries of all heads."""
SIZES = {"value_dim": VALUE_WIDTH, "batch": BATCH, "q_len": QUERIES, "layers": 2, "phase": "decode"}
STEP = am.Workload(Q_HEADS, KV_HEADS, WIDTH, LENGTH, **SIZES)


def cluster_of(hosts: int, ranks: int, device: Device = READS, collectives: str = "tree") -> Cluster:
    return Cluster("by hand", hosts, ranks, device, INSIDE, BETWEEN, short_collectives=collectives)


def on_mesh(shape: tuple[int, int, int], tile: tuple[int, int, int], merge: str = "direct") -> CandidateMesh:
    return CandidateMesh(Shape(*shape), Shape(*tile), am.Striped(), merge)


def test_a_rank_reads_its_keys_once_and_multiplies_them_with_each_query() -> None:
    """Of 2 heads x 4 keys: a quarter of the tokens, and half of the heads."""
    mesh = on_mesh((2, 1, 4), (2, 1, 4))
    tokens, columns = LENGTH / 4, WIDTH + VALUE_WIDTH
    read = BATCH * tokens * (KV_HEADS / 2) * columns * 2  # bytes of bfloat16
    assert decode_cost(mesh, STEP, cluster_of(1, 8)).parts["kernel"] == pytest.approx(CALL + read / 1e9, rel=1e-3)
    products = 2 * tokens * ROWS / 2 * columns
    found = decode_cost(mesh, STEP, cluster_of(1, 8, COMPUTES)).parts["kernel"]
    assert found == pytest.approx(CALL + products / 1e9, rel=1e-3)


@pytest.mark.parametrize(("queries", "seen"), [(1, 10), (5, 14)])
def test_queries_see_the_windows_of_all_of_them(queries: int, seen: int) -> None:
    """Where a block has more tokens than they see, one rank has all of these."""
    work = am.Workload(1, 1, WIDTH, LENGTH, q_len=queries, phase="decode", mask=am.Window(9), dtype="float32")
    for layout, tokens in ((am.Striped(), -(-seen // 2)), (am.Striped(64), seen)):
        mesh = CandidateMesh(Shape(1, 1, 2), Shape(1, 1, 2), layout, "direct")
        found = decode_cost(mesh, work, cluster_of(1, 2)).parts["kernel"]
        assert found == pytest.approx(CALL + tokens * 2 * WIDTH * 4 / 1e9)


def test_each_query_reads_the_tokens_that_it_selects() -> None:
    work = replace(STEP, selected=am.Selected(16, 2, 8, block=4))
    mesh, cluster = on_mesh((1, 1, 4), (1, 1, 4)), cluster_of(1, 4)
    token = BATCH * KV_HEADS * (WIDTH + VALUE_WIDTH) * 2
    found = decode_cost(mesh, work, cluster).parts["kernel"]
    assert found == pytest.approx(CALL + QUERIES * 16 * 4 / 4 * token / 1e9)
    few = replace(work, length=40, q_len=1)  # fewer than are selected
    assert decode_cost(mesh, few, cluster).parts["kernel"] == pytest.approx(CALL + 40 / 4 * token / 1e9)


def test_partials_of_all_rows_are_merged_along_the_keys_by_each_rank_of_the_heads() -> None:
    """Two hosts have 4 ranks each. Of 4 ranks that merge, 2 are on each, and 2 groups merge at once."""
    found = decode_cost(on_mesh((2, 1, 4), (2, 1, 2)), STEP, cluster_of(2, 4))
    size = ROWS / 2 * (VALUE_WIDTH + 1) * 4 + 8
    shared = ROWS / 2 * VALUE_WIDTH * 2  # outputs of a rank's heads, in bfloat16
    assert found.inside == pytest.approx(2 * 4 * size + 8 * shared)
    assert (found.between, found.messages) == (pytest.approx(2 * 4 * 2 * size), 2 * 4 * 2)
    leaving = 2 * 2 * 2 * size  # to 2 ranks away, of 2 ranks of each of 2 groups
    assert found.parts["merge"] == pytest.approx(2e-3 + 2 * 1e-4 + leaving / 2e6 + CALL + WAIT)
    assert found.parts["heads"] == pytest.approx(2 * CALL + 2e-6 + 1e-6 + shared / 1e9)


def test_heads_of_other_hosts_are_gathered_between_hosts() -> None:
    """Each of 2 hosts has 2 of 4 ranks along the heads. To each other rank go a comparison and the outputs."""
    found = decode_cost(on_mesh((4, 1, 1), (2, 1, 1)), STEP, cluster_of(2, 2))
    outputs = ROWS / 4 * VALUE_WIDTH * 2
    assert (found.inside, found.between, found.messages) == (4 * outputs, 4 * 2 * outputs, 2 * 4 * 2)
    leaving = 2 * 2 * outputs
    seconds = 2e-3 + 1e-3 + 2 * 2 * 1e-4 + max(3 * outputs / 1e6, leaving / 2e6)
    assert found.parts["heads"] == pytest.approx(2 * CALL + seconds)
    assert "merge" not in found.parts
    crowded = decode_cost(on_mesh((2, 1, 4), (1, 1, 4)), STEP, cluster_of(2, 4))  # 4 ranks of a host send at once
    assert crowded.parts["heads"] == pytest.approx(2 * CALL + 3e-3 + 4 * (ROWS / 2 * VALUE_WIDTH * 2) / 2e6)


@pytest.mark.parametrize(
    ("merge", "compares"), [("tree", False), ("direct", False), ("gather", True), ("allreduce", True)]
)
def test_ranks_compare_before_a_merge_that_shows_no_difference(merge: str, compares: bool) -> None:
    found = decode_cost(on_mesh((1, 1, 4), (1, 1, 4), merge), STEP, cluster_of(1, 4))
    assert ("agree" in found.parts) == compares


@pytest.mark.parametrize(("merge", "times"), [("tree", 2), ("direct", 1)])
def test_on_cpus_each_exchange_between_hosts_is_many_small_calls(merge: str, times: int) -> None:
    mesh = on_mesh((1, 1, 8), (1, 1, 2), merge)  # along a tree, hosts exchange in 2 of 3 rounds
    gpus, cpus = (decode_cost(mesh, STEP, cluster_of(4, 2, collectives=kind)) for kind in ("tree", "ring"))
    assert cpus.parts["merge"] - gpus.parts["merge"] == pytest.approx(times * 15 * CALL)


def test_an_indexer_scores_keys_of_all_sequences_and_merges_candidates_of_all_queries() -> None:
    selected = am.Selected(16, 2, 8, heads=KV_HEADS, indexers=1)
    work, mesh = replace(STEP, selected=selected), on_mesh((1, 1, 4), (1, 1, 2))
    found = index_cost(mesh, work, cluster_of(2, 2))
    keys = BATCH * LENGTH / 4
    assert found.parts["score"] == pytest.approx(CALL + keys * 8 * 2 / 1e9)
    candidates = BATCH * QUERIES * KV_HEADS * 16 * 8
    assert (found.inside, found.between, found.messages) == (4 * candidates, 4 * candidates, 4)
    computed = index_cost(mesh, work, cluster_of(2, 2, COMPUTES)).parts["score"]
    assert computed == pytest.approx(CALL + 2 * QUERIES * 2 * keys * 8 / 1e9)


def test_outputs_of_shared_layers_are_those_of_all_tokens() -> None:
    shared, tokens, total = SharedLayers(0, (100, 300), 32, 15, 1 << 20), 6, Cost()
    add_outputs(shared, 2, tokens, cluster_of(1, 2, collectives="ring"), total)
    received = 4 * tokens * 400 / 2
    assert total.parts["outputs"] == pytest.approx(2 * 2e-6 + received / 5e8)
    assert (total.inside, total.between) == (2 * received, 0)
    total = Cost()
    add_outputs(shared, 2, tokens, cluster_of(2, 1, collectives="ring"), total)
    assert (total.inside, total.between, total.messages) == (0, 2 * (received + 2 * 8), 2 * 2)


@pytest.mark.parametrize(("hosts", "seconds"), [(1, 2e-6 + 500 / 5e8), (2, 2e-3 + 500 / 1e6)])
def test_results_of_experts_go_by_memory_in_a_host_and_by_links_between_hosts(hosts: int, seconds: float) -> None:
    total = Cost()
    add_results(Experts(0, 8, 2, shareable_layers=3), 2, 1000.0, cluster_of(hosts, 2 // hosts), total)
    assert total.parts["results"] == pytest.approx(3 * (16 * CALL + seconds))
    assert (total.inside, total.between) == ((3000.0, 0.0) if hosts == 1 else (0.0, 3000.0))


@pytest.mark.parametrize(("collectives", "calls"), [("ring", 4 * 29), ("tree", 0)])
def test_small_calls_take_time_on_cpus_alone(collectives: str, calls: int) -> None:
    total = Cost()
    add_small_calls(4, cluster_of(1, 1, collectives=collectives), total)
    assert total.seconds == pytest.approx(calls * CALL)
