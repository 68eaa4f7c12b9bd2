"""Recurrent layers in the planner: bytes counted by hand, hosts, decoding, and errors."""

from dataclasses import replace

import pytest

import attnmesh as am
from attnmesh.cost.candidate_mesh import CandidateMesh, Cost
from attnmesh.cost.cluster import Cluster
from attnmesh.cost.rates import Device, Link
from attnmesh.errors import ClusterError, KernelError, ShapeError
from attnmesh.mesh.shapes import Shape
from attnmesh.planner.recurrent_cost import RecurrentCost, recurrent_cost
from attnmesh.planner.workload_cost import cost

pytestmark = pytest.mark.quick

DELTANET = am.Recurrent(4, 16, 8, layers=3, conv_channels=96, conv_width=4)
MAP_BYTES = 4 * (4 * 16 * 16 + 4 * 16 * 8)
HALO_BYTES = 2 * 3 * 96
WORK = am.Workload(8, 4, 64, 4096, batch=2, phase="prefill", recurrent=DELTANET)
PHASES = {"training": 2, "prefill": 1, "decode": 0}
INSIDE, BETWEEN = Link(1e-6, 1e9, 4e9, message=1e-7), Link(5e-6, 1e8, 2e8, message=1e-7)
CHIP = Device(1e12, 1e12, 1e12, 1e12, call=3e-6)


def cluster(hosts: int, ranks: int) -> Cluster:
    return Cluster("test", hosts, ranks, CHIP, INSIDE, BETWEEN)


def recurrent_price(work: am.Workload, hosts: int, ranks: int, layout: am.Zigzag | am.Contiguous) -> RecurrentCost:
    """Return the cost on a mesh of queries, with consecutive ranks on each host."""
    candidate = CandidateMesh(Shape(1, hosts * ranks, 1), Shape(1, ranks, 1), layout, "bulk")
    return recurrent_cost(candidate, work, cluster(hosts, ranks))


def all_bytes(one: Cost) -> float:
    return one.inside + one.between


def sent_messages(ranks: int) -> list[int]:
    """Run a scan on lists of shards. Return the messages that each rank sends; each message holds a rank's total."""
    totals, prefixes = [[rank] for rank in range(ranks)], [list[int]() for _ in range(ranks)]
    sent, step = [0] * ranks, 1
    while step < ranks:
        before = [list(total) for total in totals]
        last = 2 * step >= ranks
        for rank in range(ranks):
            peer = rank ^ step
            if peer >= ranks or (last and peer > rank):
                continue
            sent[peer] += 1
            if peer < rank:
                prefixes[rank] = before[peer] + prefixes[rank]
            totals[rank] = sorted(before[peer] + totals[rank])
        step *= 2
    assert prefixes == [[*range(rank)] for rank in range(ranks)]
    return sent


@pytest.mark.parametrize("ranks", range(1, 10))
@pytest.mark.parametrize("phase", PHASES)
def test_bytes_are_those_of_a_scan_run_by_hand(ranks: int, phase: str) -> None:
    work, sent = replace(WORK, phase=phase), sent_messages(ranks)
    for layout, scans in ((am.Contiguous(), 1), (am.Zigzag(), 2)):
        times = PHASES[phase] * scans * DELTANET.layers * WORK.batch
        one = recurrent_price(work, ranks, 1, layout)
        assert all_bytes(one.scan) == times * MAP_BYTES * sum(sent)
        assert all_bytes(one.halo) == times * HALO_BYTES * (ranks - 1)
        assert work.scan_bytes(ranks, layout) == times * MAP_BYTES * max(sent)
        busiest = min(scans, ranks - 1)  # zigzag shards have a neighbour on both sides
        assert work.halo_bytes(ranks, layout) == times // scans * HALO_BYTES * busiest
        assert one.memory == work.state_bytes == 2 * 3 * (4 * 4 * 16 * 8 + HALO_BYTES)


@pytest.mark.parametrize(("transition", "numbers"), [("matrix", 16 * 16), ("diagonal", 16), ("scalar", 1)])
def test_messages_have_the_linear_map_and_the_bias(transition: str, numbers: int) -> None:
    work = replace(WORK, recurrent=replace(DELTANET, transition=transition))
    assert work.scan_bytes(5, am.Contiguous()) == 3 * 3 * 2 * 4 * 4 * (numbers + 16 * 8)
    sum_itemsize = replace(work, dtype="float64")
    assert sum_itemsize.scan_bytes(5, am.Contiguous()) == 2 * work.scan_bytes(5, am.Contiguous())
    assert sum_itemsize.halo_bytes(5, am.Zigzag()) == 4 * work.halo_bytes(5, am.Zigzag())


def test_nothing_depends_on_the_length_and_kinds_add_up() -> None:
    other = am.Recurrent(0, 0, 0, layers=5, conv_channels=32, conv_width=3)
    both = replace(WORK, recurrent=[DELTANET, other])
    for layout in (am.Contiguous(), am.Zigzag()):
        one, two, sum_of_both = (
            recurrent_price(replace(WORK, recurrent=x), 2, 3, layout) for x in (DELTANET, other, both.recurrent)
        )
        assert recurrent_price(replace(both, length=10**9), 2, 3, layout) == sum_of_both
        assert all_bytes(two.scan) == two.scan.seconds == 0
        for name in ("scan", "halo"):
            parts = [getattr(cost, name) for cost in (one, two, sum_of_both)]
            assert parts[0].seconds + parts[1].seconds == pytest.approx(parts[2].seconds)
            assert all_bytes(parts[0]) + all_bytes(parts[1]) == all_bytes(parts[2])


def test_rounds_across_hosts_take_the_bytes_and_seconds_by_hand() -> None:
    """Two hosts of 4 ranks: rounds of 1 and 2 stay inside, 4 messages of the last round leave a host."""
    size = WORK.batch * MAP_BYTES
    one = recurrent_price(WORK, 2, 4, am.Contiguous()).scan
    assert (one.inside, one.between, one.messages) == (3 * 16 * size, 3 * 4 * size, 3 * 4)
    inside = 1e-6 + max(size / 1e9, 4 * size / 4e9) + 3e-6
    between = 5e-6 + max(size / 1e8, 4 * size / 2e8) + 3e-6
    assert one.seconds == pytest.approx(3 * (2 * inside + between))
    both = recurrent_price(WORK, 2, 4, am.Zigzag()).scan
    assert (both.inside, both.between, both.seconds) == pytest.approx(
        (2 * one.inside, 2 * one.between, 2 * one.seconds)
    )


def test_halos_go_both_ways_at_once_in_zigzag() -> None:
    size = WORK.batch * HALO_BYTES
    one, both = (recurrent_price(WORK, 2, 2, layout).halo for layout in (am.Contiguous(), am.Zigzag()))
    assert (one.inside, one.between, one.messages) == (3 * 2 * size, 3 * size, 3)
    assert one.seconds == pytest.approx(3 * (5e-6 + size / 1e8 + 3e-6))
    assert (both.inside, both.between, both.messages) == (3 * 4 * size, 3 * 2 * size, 6)
    assert both.seconds == pytest.approx(3 * (5e-6 + size / 1e8 + 3e-6))


def test_shards_follow_the_mesh_and_hosts_its_tile() -> None:
    """On 1x2x2 with a host per column, shards 0 to 3 are on hosts 0, 1, 0, 1, so only rounds of 2 stay inside."""
    candidate = CandidateMesh(Shape(1, 2, 2), Shape(1, 2, 1), am.Contiguous(), "bulk")
    one, size = recurrent_cost(candidate, WORK, cluster(2, 2)).scan, 3 * WORK.batch * MAP_BYTES
    assert (one.inside, one.between) == (2 * size, 4 * size)


@pytest.mark.parametrize("phase", PHASES)
def test_plans_include_recurrent_layers(phase: str) -> None:
    work, machines = replace(WORK, phase=phase), am.Cluster.preset("a100x4", hosts=2)
    for one in am.plan(work, machines):
        candidate = CandidateMesh(one.shape, one.tile, one.layout, one.exchange)
        without, added = cost(candidate, replace(work, recurrent=()), machines), one.recurrent
        assert one.memory - without.memory == pytest.approx(work.state_bytes)
        assert one.seconds - without.seconds == pytest.approx(added.scan.seconds + added.halo.seconds)
        assert sum(one.bytes) - all_bytes(without) == pytest.approx(all_bytes(added.scan) + all_bytes(added.halo))
        assert sum(dict(one.parts).values()) == pytest.approx(one.seconds)


def test_explanations_have_one_line_on_recurrent_layers() -> None:
    machines = am.Cluster.preset("a100x4", hosts=2)
    lines = am.plan(WORK, machines)[0].explain().splitlines()
    assert lines[2].startswith("Recurrent layers (3) are included: scans send ")
    assert ", halos send " in lines[2]
    assert lines[2].endswith("; each rank holds 15.7 kB of states.")
    for work, size in ((replace(WORK, phase="decode"), machines), (WORK, machines.sized(1, 1))):
        assert (
            "Recurrent layers (3) send nothing; each rank holds 15.7 kB of states." in am.plan(work, size)[0].explain()
        )
    assert "ecurrent" not in am.plan(replace(WORK, recurrent=()), machines)[0].explain()


def test_titles_name_recurrent_layers() -> None:
    assert WORK.title.endswith("batch of 2, 3 recurrent layers of 4 states of 16x8")
    assert am.Recurrent(1, 8, 1).title == "1 recurrent layer of 1 state of 8x1"
    assert am.Recurrent(0, 0, 0, conv_channels=8, conv_width=3).title == "1 recurrent layer of a convolution of 8x3"


INVALID = [
    (lambda: am.Recurrent(4, 16, 8, transition="dense"), KernelError, "one of matrix, diagonal, scalar, given 'dense'"),
    (lambda: am.Recurrent(-1, 16, 8), ClusterError, "Recurrent heads: expected a whole number, 0 or more, given -1"),
    (lambda: am.Recurrent(4, 16.0, 8), ClusterError, "Recurrent key_dim: expected a whole number, 0 or more"),
    (lambda: am.Recurrent(4, 16, 8, layers=0), ClusterError, "Recurrent layers: expected a whole number, 1 or more"),
    (lambda: am.Recurrent(4, 16, 10**20), ClusterError, "Recurrent value_dim: expected no more than 1e+15"),
    (
        lambda: am.Recurrent(4, 0, 8),
        ShapeError,
        "1 or more in each count, or 0 in all, given 4 heads of 0 x 8. Fix: pass",
    ),
    (lambda: am.Recurrent(4, 8, 8, conv_width=4), ShapeError, "or neither, given 0 x 4. Fix: pass both or neither"),
    (lambda: am.Recurrent(4, 8, 8, conv_channels=4), ShapeError, "or neither, given 4 x 1. Fix: pass both or neither"),
    (lambda: am.Recurrent(0, 0, 0), ShapeError, "a state or a convolution, given neither. Fix: pass heads"),
    (lambda: replace(WORK, recurrent=4), ClusterError, "Workload recurrent: expected a Recurrent, or a tuple of them"),
    (
        lambda: replace(WORK, recurrent=(DELTANET, None)),
        ClusterError,
        "Fix: pass recurrent=am.Recurrent(heads, key_dim",
    ),
    (lambda: WORK.scan_bytes(0, am.Zigzag()), ClusterError, "scan_bytes ranks: expected a whole number, 1 or more"),
    (
        lambda: WORK.halo_bytes(2, am.Striped()),
        ShapeError,
        "one or two runs of tokens per rank, given Striped. Fix: pass",
    ),
    (
        lambda: am.plan(replace(WORK, recurrent=am.Recurrent(64, 10**4, 10**4)), Cluster.preset("rtx4090")),
        ClusterError,
        "Fix: take fewer sequences or smaller states.",
    ),
]


@pytest.mark.parametrize(("call", "kind", "message"), INVALID)
def test_invalid_arguments_raise(call: object, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind) as caught:
        call()  # type: ignore[operator]
    assert message in str(caught.value)
