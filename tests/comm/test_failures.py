"""Ranks and hosts come to harm while all are at work: what comes is right, or an error in time that names them."""

import io
import re
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stderr, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import attnmesh as am
from attnmesh.cli.launch import run_on_ranks
from attnmesh.comm import failures
from attnmesh.errors import ClusterError, MeshError, RankFailure
from attnmesh.mesh.shapes import AXES, Shape
from attnmesh.setup import rendezvous
from benchmarks import netns
from tests.support.process.needs import needs_hosts
from tests.support.ranks.pool import on_each_rank
from tests.support.truth.mesh_problems import named_mesh
from tools import chaos
from tools.chaos import FAULTS, Outcome, Scenario


def first_scenarios(ground: str, count: int) -> list[Scenario]:
    """The first troubles on local ranks or on hosts."""
    return [chaos.draw(seed, [ground]) for seed in range(count)]


ON_HOSTS, ON_RANKS = (
    first_scenarios("hosts", len(FAULTS)),
    first_scenarios("ranks", len(chaos.possible_faults(hosts=False))),
)

TROUBLES = [*ON_HOSTS, *ON_RANKS]


def can_make_hosts() -> bool:
    with suppress(ClusterError):
        netns.check_here()
        return True
    return False


def troubles() -> list[Any]:
    """Return all troubles. Of those on local ranks most are long where hosts can be made, which have each as well."""
    long = [trouble for trouble in ON_RANKS if trouble.harm not in ("killed", "stopped")] if can_make_hosts() else []
    return [
        pytest.param(
            trouble,
            id=f"{trouble.work}, {trouble.harm}, {trouble.world}",
            marks=pytest.mark.long if trouble in long else [],
        )
        for trouble in TROUBLES
    ]


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest) -> dict[Scenario, Outcome]:
    """What came of those that were asked for and can be here: a few at a time."""
    items: Any = [item for item in request.session.items if item.path == request.path and hasattr(item, "callspec")]
    asked = [trouble for item in items if (trouble := item.callspec.params.get("trouble")) is not None]
    return dict(chaos.run_scenarios(x for x in asked if isinstance(x.world, int) or can_make_hosts()))


@pytest.mark.timeout(240)
@pytest.mark.parametrize("trouble", troubles())
def test_harm_is_survived_or_named(trouble: Scenario, outcomes: dict[Scenario, Outcome]) -> None:
    if not isinstance(trouble.world, int):
        needs_hosts()
    outcome = outcomes[trouble]
    assert not outcome.failed, (trouble, outcome)
    for what in (what for what in outcome.reports.values() if what.kind == "RankFailure"):
        assert what.step in ("gathering", "returning results", "swapping", "comparing calls", "merging"), (
            trouble,
            what,
        )
        assert what.axis in ("heads", "queries", "keys", "queries x keys"), (trouble, what)


def test_every_harm_is_tried() -> None:
    assert {trouble.harm for trouble in TROUBLES} == set(FAULTS)


def silent_until(done: Callable[[], bool]) -> None:
    """Say nothing until another rank is done, half a minute at most."""
    end = time.monotonic() + 30
    while not done() and time.monotonic() < end:
        time.sleep(0.05)


def wait_briefly() -> None:
    """Wait a second for messages, and half of one for notes: the other rank is silent, and leaves none."""
    am.set_deadline(1.0)
    failures.GRACE_PERIOD = 0.5


@on_each_rank
def find_lost_beside_a_stray_note() -> tuple[int, ...]:
    """The second of two ranks is silent; a rank of that number of another job has left a note that blames the first."""
    mesh = named_mesh(Shape(1, 1, 2), AXES)
    x = torch.zeros(1, 2, 8, 4)
    am.attention(x, x, x, mesh=mesh, layout=am.Contiguous())
    wait_briefly()
    store = dist.distributed_c10d._get_default_store()
    store.set("attnmesh lost 1", "[0]")
    try:
        if dist.get_rank() == 1:
            silent_until(lambda: store.check(["raised"]))
        else:
            am.attention(x, x, x, mesh=mesh, layout=am.Contiguous())
    except RankFailure as error:
        store.set("raised", "")
        return error.ranks
    return ()


def test_a_rank_that_has_strayed_to_the_store_is_not_believed() -> None:
    assert run_on_ranks(2, find_lost_beside_a_stray_note)[0] == (1,)


@on_each_rank
def close_while_another_waits_in_a_barrier() -> tuple[str, str]:
    """Return what the first rank has printed when it closes its connections, and in all; "" on the second."""
    mesh = named_mesh(Shape(1, 1, 2), AXES)
    x = torch.zeros(1, 2, 8, 4)
    am.attention(x, x, x, mesh=mesh, layout=am.Contiguous())
    wait_briefly()
    if dist.get_rank() == 1:
        with suppress(RuntimeError):  # gloo's: "Connection closed by peer"
            dist.barrier()
        return "", ""
    printed, before, close = io.StringIO(), list[str](), failures._close_connections

    def close_after_a_look() -> None:
        before.append(printed.getvalue())
        close()

    with redirect_stderr(printed), mock.patch.object(failures, "_close_connections", close_after_a_look):
        for _ in range(2):
            with suppress(RankFailure):
                am.attention(x, x, x, mesh=mesh, layout=am.Contiguous())
    return before[0], printed.getvalue()


def test_a_rank_that_attends_alone_says_so_before_the_others_end() -> None:
    before, printed = run_on_ranks(2, close_while_another_waits_in_a_barrier)[0]
    assert re.match(
        r"attnmesh: rank 0 waited for rank 1 along the keys axis, comparing calls: timed out: .*\n$", before
    )
    assert printed == before  # once, though the second call fails, too


@on_each_rank
def find_lost_on(backend: str | None, store: str) -> tuple[tuple[int, ...], bool]:
    """The second of two ranks is silent, in a world of that backend: whom the first misses, and whether in time."""
    place = {"rank": dist.get_rank(), "world_size": 2}
    rendezvous.leave()
    dist.init_process_group(backend, init_method=f"file://{store}", **place)
    mesh = named_mesh(Shape(1, 1, 2), AXES)
    x = torch.zeros(1, 2, 8, 4)
    am.attention(x, x, x, mesh=mesh, layout=am.Contiguous())
    wait_briefly()
    start, raised = time.monotonic(), Path(f"{store} raised")
    try:
        if dist.get_rank() == 1:
            silent_until(raised.exists)
        else:
            am.attention(x, x, x, mesh=mesh, layout=am.Contiguous())
    except RankFailure as error:
        raised.touch()
        return error.ranks, time.monotonic() - start < 20
    return (), True


def test_the_deadline_holds_however_the_group_was_made(tmp_path: Path) -> None:
    """PyTorch makes groups with a backend for each kind of device, unless it is told which."""
    backends = None, "cpu:gloo", "cpu:gloo,cuda:gloo"
    with ThreadPoolExecutor() as threads:
        worlds = [threads.submit(run_on_ranks, 2, find_lost_on, name, str(tmp_path / f"{name}")) for name in backends]
    assert [each.result()[0] for each in worlds] == [((1,), True)] * len(backends)


@pytest.mark.parametrize("given", [0, -1.0, True, "soon", float("nan"), float("inf")])
def test_deadlines_that_are_none_are_refused(given: Any) -> None:
    with pytest.raises(MeshError, match="set_deadline: expected more than 0 seconds"):
        am.set_deadline(given)


@on_each_rank
def compile_too_long(store: str) -> str:
    """The second of two ranks compiles until the first has given it up; both then say so."""
    mesh = named_mesh(Shape(1, 1, 2), AXES)
    x, raised = torch.zeros(1, 2, 8, 4), Path(f"{store} raised")
    compiler: Any = SimpleNamespace(counters={"stats": {"unique_graphs": 1}})  # PyTorch's own takes seconds to import
    sys.modules["torch._dynamo.utils"] = compiler
    am.attention(x, x, x, mesh=mesh, layout=am.Contiguous())
    am.set_deadline(1.0)
    if dist.get_rank() == 1:
        silent_until(raised.exists)
    try:
        am.attention(x, x, x, mesh=mesh, layout=am.Contiguous())
    except RankFailure as error:
        raised.touch()
        return str(error)
    return ""


def test_a_rank_that_compiles_for_too_long_is_lost_by_compilation(tmp_path: Path) -> None:
    waiting, late = run_on_ranks(2, compile_too_long, str(tmp_path / "late"))
    for error in (waiting, late):
        assert error.startswith("rank 1 is lost along the keys axis, "), error
        assert "compilation by torch.compile may take longer than the deadline, see set_deadline" in error
    assert "the other ranks had given this one up at their deadline" in late
    assert "given this one up" not in waiting
