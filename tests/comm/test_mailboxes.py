"""Messages through shared memory: in order, whole, and no rank waits for one that is gone."""

import fcntl
import mmap
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from random import Random

import pytest
import torch
import torch.distributed as dist

from attnmesh.comm import mailboxes
from attnmesh.comm.mailboxes import MESSAGE_BYTES, Mailboxes, mailboxes_size
from attnmesh.comm.topology import agreed_host_mailboxes
from attnmesh.errors import MeshError
from attnmesh.guard.agreement import Agreement
from attnmesh.mesh.axes import Axis, mesh_of_axis
from attnmesh.runtime.processes import RunningProcess
from tests.support.ranks.groups import world_axis
from tests.support.ranks.pool import Pool, on_each_rank

here = pytest.mark.skipif(not mailboxes_size(2), reason="memory cannot be shared here, or stores have no order")


def _message(random: Random, size: int) -> torch.Tensor:
    return torch.frombuffer(bytearray(random.randbytes(size)), dtype=torch.uint8)


def _boards(ranks: int, processes: list[int], timeout: float = 2.0) -> list[Mailboxes]:
    memory = mmap.mmap(-1, mailboxes_size(ranks))
    return [Mailboxes(memory, range(ranks), rank, processes, timeout) for rank in range(ranks)]


@here
def test_messages_come_whole_and_in_order() -> None:
    one, other = _boards(2, [0, 0])
    sizes = Random(0).choices((1, 7, 64, 1000, MESSAGE_BYTES), k=500)

    def write() -> None:
        for number, size in enumerate(sizes):
            one.send(1, _message(Random(number), size))

    writer = threading.Thread(target=write)
    writer.start()
    for number, size in enumerate(sizes):
        into = torch.empty(size, dtype=torch.uint8)
        other.recv(0, into)
        assert torch.equal(into, _message(Random(number), size))
    writer.join()


@here
def test_a_rank_that_is_gone_is_missed() -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    one, _ = _boards(2, [0, ended.pid])
    with pytest.raises(RuntimeError, match="its process"):
        one.recv(1, torch.empty(8, dtype=torch.uint8))


@here
def test_a_zombie_counts_as_lost() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        end = time.monotonic() + 30
        while RunningProcess.of(ended.pid).is_alive():
            assert time.monotonic() < end
            time.sleep(0.01)
        one, _ = _boards(2, [0, ended.pid])
        with pytest.raises(RuntimeError, match="its process"):
            one.recv(1, torch.empty(8, dtype=torch.uint8))


@here
def test_a_process_that_got_the_number_of_a_lost_rank_does_not_stand_for_it() -> None:
    one, _ = _boards(2, [0, os.getpid()], 30.0)
    assert one.processes[1] == RunningProcess.of()
    one.processes[1] = RunningProcess.of()._replace(start=1)  # the rank began long before this process did
    with pytest.raises(RuntimeError, match=f"its process {os.getpid()} has ended"):
        one.recv(1, torch.empty(8, dtype=torch.uint8))


@here
def test_a_silent_rank_is_lost_after_the_timeout_of_its_group() -> None:
    one, _ = _boards(2, [0, os.getpid()], 1.0)
    with pytest.raises(RuntimeError, match="timed out: it has sent nothing for 1 seconds"):
        one.recv(1, torch.empty(8, dtype=torch.uint8))


def _talk(rounds: int) -> int:
    """On a rank: with each other rank, so many messages of sizes that all know; how many came wrong."""
    axis = world_axis()
    return _talk_along(axis, rounds)


@on_each_rank
def talk_in_a_new_group(folder: Path, rounds: int) -> int:
    """On a rank: the same in a new group, whose memory has a folder of its own."""
    before, mailboxes.FOLDER = mailboxes.FOLDER, folder
    try:
        return _talk_along(Axis(dist.get_world_size(), dist.get_rank(), dist.new_group()), rounds)
    finally:
        mailboxes.FOLDER = before


def _talk_along(axis: Axis, rounds: int) -> int:
    own = agreed_host_mailboxes(axis)
    assert own is not None
    wrong = 0
    for number in range(rounds):
        size = Random(number).choice((1, 100, 5000, MESSAGE_BYTES))
        others = [rank for rank in range(axis.size) if rank != axis.index]
        for peer in others:
            own.send(peer, _message(Random(f"{number} {axis.index} {peer}"), size))
        for peer in others:
            into = torch.empty(size, dtype=torch.uint8)
            own.recv(peer, into)
            wrong += not torch.equal(into, _message(Random(f"{number} {peer} {axis.index}"), size))
    return wrong


@here
@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_all_ranks_talk_to_all(ranks: int, pool: Pool) -> None:
    with tempfile.TemporaryDirectory(dir=mailboxes.FOLDER) as folder:
        assert pool.run(ranks, talk_in_a_new_group, Path(folder), 80 // ranks) == [0] * ranks
        assert not list(Path(folder).iterdir())  # no names are left, only memory that is in use


@here
def test_names_that_killed_ranks_left_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mailboxes, "FOLDER", tmp_path)
    left, young, used = (tmp_path / f"attnmesh-{name}" for name in ("left", "young", "used"))
    for path in (left, young, used):
        path.touch()
    for path in (left, used):
        os.utime(path, (0, 0))
    with used.open() as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        memory = mailboxes.open_mailboxes(1, 4096, new=True)
    assert memory is not None
    assert not left.exists()
    assert young.exists()  # its rank may be about to lock it
    assert used.exists()
    os.utime(tmp_path / "attnmesh-0000000000000001", (0, 0))
    assert mailboxes.open_mailboxes(2, 4096, new=True) is not None
    assert mailboxes.open_mailboxes(1, 4096, new=False) is not None  # `memory` holds its lock


@on_each_rank
def talk_after_calls_that_differ() -> int:
    """On a rank: how many messages come wrong after a call of rank 0 whose message nobody has received."""
    axis = world_axis()
    own = agreed_host_mailboxes(axis)
    assert own is not None
    if axis.index == 0:
        own.send(1, _message(Random("lost"), 100))
    with pytest.raises(MeshError, match="the same call on every rank"):
        Agreement(mesh_of_axis(axis), f"call {axis.index == 0}").compare()
    return _talk(10)


@here
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_messages_of_calls_that_differ_are_dropped(ranks: int, pool: Pool) -> None:
    assert pool.run(ranks, talk_after_calls_that_differ) == [0] * ranks


def test_one_rank_and_too_many_ranks_have_no_mailboxes() -> None:
    assert mailboxes_size(1) == 0
    assert mailboxes_size(64) == 0
