"""Linear layers whose outputs ranks of a host share: exact, of the same bits on all numbers of ranks, never stuck."""

import os
import signal
import time
from pathlib import Path
from threading import Timer

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from attnmesh.comm.host_linear import MAX_SHARED_ROWS, HostLinear
from attnmesh.comm.host_merge import agreed_host_merge
from attnmesh.comm.mailboxes import CHECK_INTERVAL
from attnmesh.comm.merges import MERGES
from attnmesh.comm.mismatch import CallsDifferError
from attnmesh.comm.topology import agreed_axis_mailboxes
from attnmesh.comm.transport import agreed_transport
from attnmesh.errors import InputError
from attnmesh.guard.agreement import Agreement
from attnmesh.mesh.axes import Axis, mesh_of_axis
from attnmesh.mesh.shapes import Shape
from attnmesh.runtime.counters import count_traffic
from tests.support.process.needs import needs_library
from tests.support.ranks import worlds
from tests.support.ranks.groups import world_axis
from tests.support.ranks.pool import Pool, on_each_rank
from tests.support.ranks.worlds import START_TIMEOUT, Job, Ranks
from tests.support.truth.seeds import some
from tests.support.truth.tolerances import FLOAT32_SUMS

pytestmark = needs_library

DTYPES = (torch.float32, torch.bfloat16, torch.float16)

LAYERS = ((64, 1), (64, 7, 3, 129), (32, 5), (1536, 576, 192, 192))
"""Columns and the outputs of layers of one input."""

SECONDS_TO_NAME = 10.0
"""Seconds in which a lost rank is named, on a machine that does other work: half of one is the look after it."""

LARGE = 128, 3 * 2**15 + 1
"""A layer whose outputs go in several pieces."""


def weights(
    columns: int, *outputs: int, dtype: torch.dtype = torch.float32, seed: int = 0
) -> list[tuple[Tensor, Tensor | None]]:
    """Layers, of which every other one has a bias, and a weight whose outputs lie in a row."""
    noise = torch.Generator().manual_seed(seed)
    made = [(torch.randn(n, columns, generator=noise), torch.randn(n, generator=noise)) for n in outputs]
    layers: list[tuple[Tensor, Tensor | None]] = [(weight.to(dtype), None) for weight, _ in made]
    layers[1::2] = [(weight.to(dtype).t().contiguous().t(), bias.to(dtype)) for weight, bias in made[1::2]]
    return layers


def random_rows(rows: int, columns: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows)).to(dtype)


def axis() -> Axis:
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return Axis()
    return world_axis()


@on_each_rank
def compute_rows(columns: int, sizes: tuple[int, ...], dtype: torch.dtype, rows: tuple[int, ...]) -> list[list[Tensor]]:
    along = axis()
    call = HostLinear(3, weights(columns, *sizes, dtype=dtype), along, agreed_axis_mailboxes(along))
    return [[out.clone() for out in call.run(random_rows(count, columns, dtype))] for count in rows]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", LAYERS, ids=str)
def test_outputs_of_shared_layers_are_exact(sizes: tuple[int, ...], dtype: torch.dtype) -> None:
    columns, *layers = sizes
    for rows, found in zip(
        (1, 2, 5, MAX_SHARED_ROWS[dtype]),
        compute_rows(columns, tuple(layers), dtype, (1, 2, 5, MAX_SHARED_ROWS[dtype])),
        strict=True,
    ):
        x = random_rows(rows, columns, dtype).double()
        for (weight, bias), out in zip(weights(columns, *layers, dtype=dtype), found, strict=True):
            exact = x @ weight.double().T + (0 if bias is None else bias.double())
            size = x.abs() @ weight.double().abs().T + 1  # a sum of n numbers rounds to n units of their sizes at most
            unit = torch.finfo(dtype).eps
            error = (out.double() - exact).abs()
            assert bool((error <= size * columns * torch.finfo(torch.float32).eps + exact.abs() * unit).all())


@pytest.mark.parametrize("threads", [1, 2])
def test_bits_depend_on_neither_rows_nor_threads(threads: int) -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        (alone,) = compute_rows(512, (700, 701), torch.float32, (1,))
        call = HostLinear(0, weights(512, 700, 701), Axis(), None)
        several = call.run(torch.cat([random_rows(1, 512), random_rows(6, 512)]))
        assert all(torch.equal(some[:1], one) for some, one in zip(several, alone, strict=True))
        torch.set_num_threads(3 - threads)
        assert all(torch.equal(some, one) for some, one in zip(call.run(random_rows(1, 512)), alone, strict=True))
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_ranks_have_the_bits_of_one(ranks: int, pool: Pool) -> None:
    for dtype in DTYPES:
        for columns, *layers in LAYERS:
            arguments = columns, tuple(layers), dtype, (1, 3)
            expected = compute_rows(*arguments)
            for found in pool.run(ranks, compute_rows, *arguments):
                assert all(
                    torch.equal(a, b)
                    for one, other in zip(found, expected, strict=True)
                    for a, b in zip(one, other, strict=True)
                )


@pytest.mark.parametrize("ranks", [2, 3])
def test_many_outputs_go_in_pieces(ranks: int, pool: Pool) -> None:
    arguments = LARGE[0], LARGE[1:], torch.float32, (1, 7)
    expected = compute_rows(*arguments)
    for found in pool.run(ranks, compute_rows, *arguments):
        assert all(torch.equal(a[0], b[0]) for a, b in zip(found, expected, strict=True))


@on_each_rank
def compute_numbers_not_finite() -> list[Tensor]:
    along, x = axis(), random_rows(2, 64)
    x[1, 5] = torch.nan
    weight = weights(64, 40)
    weight[0][0][7, 3] = torch.inf
    return [HostLinear(0, weight, along, agreed_axis_mailboxes(along)).run(x)[0]]


def test_numbers_that_are_not_finite_pass(pool: Pool) -> None:
    for (found,) in pool.run(2, compute_numbers_not_finite):
        assert bool(found[1].isnan().all())
        assert bool(found[0, 7].isinf())
        assert bool(found[0, :7].isfinite().all())


@on_each_rank
def count_received_bytes() -> int:
    along = axis()
    call = HostLinear(0, weights(64, 600), along, agreed_axis_mailboxes(along))
    with count_traffic() as traffic:
        call.run(random_rows(2, 64))
    return traffic.bytes


def test_outputs_of_others_are_counted(pool: Pool) -> None:
    assert pool.run(3, count_received_bytes) == [2 * 4 * 2 * 600 // 3] * 3


@on_each_rank
def catch_errors_of_odd_calls(mistake: str) -> list[str]:
    """A call that differs on the last rank, and then one on which all agree again."""
    along = axis()
    boxes = agreed_axis_mailboxes(along)
    last = axis().index == axis().size - 1
    said = []
    one, other = (HostLinear(number, weights(64, 40), along, boxes) for number in (0, 1))
    try:
        if mistake == "another layer":
            (other if last else one).run(random_rows(1, 64))
        elif mistake == "other rows":
            one.run(random_rows(2 if last else 1, 64))
        elif mistake == "a merge" and last:
            merge = agreed_host_merge(along, (1, 2, 1, 8), MERGES["tree"])
            assert merge is not None
            message, _, partial = merge.blank_message()
            assert message is not None
            assert partial is not None
            partial.out.zero_()
            partial.lse.zero_()
            if not merge.run(message, 7):
                raise CallsDifferError(0)
        elif mistake == "a pending message" and last:
            transport = agreed_transport(along, torch.device("cpu"))
            for wait in transport.post([(dist.irecv, 0, torch.empty(5, dtype=torch.uint8))], "exchanging"):
                wait()
        elif last:
            Agreement(mesh_of_axis(along), "an error elsewhere").raise_on_all(ValueError("broken"))
        else:
            one.run(random_rows(1, 64))
    except CallsDifferError as error:
        if error.peer == along.index:
            said.append("a rank names itself")
        try:
            Agreement(mesh_of_axis(along), "a layer", {"index": along.index}).raise_unequal()
        except InputError as error:
            said.append(type(error).__name__)
    except ValueError as error:
        said.append(type(error).__name__)
    for rows in (1, 2, 1):
        exact = random_rows(rows, 64) @ weights(64, 40)[0][0].T
        torch.testing.assert_close(one.run(random_rows(rows, 64))[0], exact)
    return said


@pytest.mark.parametrize("mistake", ["another layer", "other rows", "an error", "a merge", "a pending message"])
def test_calls_that_differ_are_found_and_forgotten(mistake: str, pool: Pool) -> None:
    expected = ["UnforeseenError", "UnforeseenError", "ValueError"] if mistake == "an error" else ["MeshError"] * 3
    assert pool.run(3, catch_errors_of_odd_calls, mistake) == [[name] for name in expected]


@on_each_rank
def compute_beside_a_stopped_rank() -> None:
    """A layer after a merge in which rank 1 waited for rank 0, and is stopped before it finds the message."""
    along = axis()
    boxes, merge = agreed_axis_mailboxes(along), agreed_host_merge(along, (1, 2, 1, 8), MERGES["tree"])
    assert boxes is not None
    assert merge is not None
    message = merge.blank_message().message
    assert message is not None
    message.zero_()
    if along.index == 0:
        peer = boxes.processes[1]
        assert peer is not None
        time.sleep(1.5 * CHECK_INTERVAL)  # by now rank 1 says that it waits
        os.kill(peer.pid, signal.SIGSTOP)
        Timer(4 * CHECK_INTERVAL, os.kill, (peer.pid, signal.SIGCONT)).start()
    merge.run(message, 7)
    found = HostLinear(0, weights(64, 40), along, boxes).run(random_rows(1, 64))[0]
    expected = random_rows(1, 64) @ weights(64, 40)[0][0].T
    torch.testing.assert_close(found, expected, rtol=FLOAT32_SUMS, atol=FLOAT32_SUMS)


def test_a_rank_that_stalls_makes_no_other_call(pool: Pool) -> None:
    pool.run(2, compute_beside_a_stopped_rank)


@pytest.mark.parametrize("victim", some(range(3), 0, 1))
def test_a_lost_rank_is_named_by_all_others(victim: int, tmp_path: Path) -> None:
    others = [rank for rank in range(3) if rank != victim]
    with worlds.Testbed(3) as testbed:
        ranks = Ranks(testbed, Job(Shape(1, 1, 3), "sharing", tmp_path, 30.0))
        began = ranks.receive(range(3), START_TIMEOUT)
        assert [report.kind for report in began.values()] == ["at work"] * 3
        ranks.kill(victim)
        start = time.monotonic()
        reports = ranks.receive(others, 30.0)
    assert {rank: (report.kind, report.ranks) for rank, report in reports.items()} == dict.fromkeys(
        others, ("RankFailure", (victim,))
    )
    assert {report.step for report in reports.values()} == {"sharing a layer"}
    assert max(report.seconds for report in reports.values()) - start < SECONDS_TO_NAME
