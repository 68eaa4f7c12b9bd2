"""`attnmesh serve` under two agents of torchrun, as on two hosts: its front outlives the ranks."""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from socket import socket
from typing import Any
from unittest import mock
from urllib.request import Request, urlopen

import pytest

from attnmesh.cli.launch import LaunchError
from attnmesh.cli.serve_hosts import TorchrunRanks, _address, make_own_folder, replace
from attnmesh.errors import ClusterError
from attnmesh.runtime.processes import RunningProcess
from tests.support.process.command import planned_serve
from tests.support.process.needs import needs_smollm2
from tests.support.serving.fake_engine import SERVE
from tests.support.serving.served import until

ROOT = Path(__file__).parents[2]


class Hosts:
    """Two agents of torchrun with a rank each, and what they have printed."""

    def __init__(self, folder: Path) -> None:
        script = folder / "serve.py"
        script.write_text(SERVE)
        with closing(socket()) as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        small = {"torchrun": "torch.distributed.run", "HEAD:29500": f"127.0.0.1:{port}", "attnmesh": str(script)}
        words = [small.get(word, word) for word in planned_serve("smollm2", "local:2x1")]
        words.remove("-m")  # before the name of the package, in whose place is a script
        words = [sys.executable, "-m", *words, "--port", "0"]
        python_path = os.pathsep.join((str(ROOT), os.environ["PYTHONPATH"]))
        environment = {**os.environ, "TMPDIR": str(folder), "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": python_path}
        pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        self.agents = [subprocess.Popen(words, env=environment, **pipes) for _ in range(2)]
        self.lines: list[str] = []
        self.readers = [threading.Thread(target=self._read, args=(agent,)) for agent in self.agents]
        for reader in self.readers:
            reader.start()

    def _read(self, agent: "subprocess.Popen[str]") -> None:
        assert agent.stdout is not None
        with agent.stdout as lines:
            self.lines.extend(lines)

    @property
    def text(self) -> str:
        return "".join(self.lines)

    def started(self) -> tuple[str, int]:
        """Return the address and the process of the front."""
        pattern = r"serving smollm2 on (http://\S+), mesh queries=2, front (\d+) on "
        until(lambda: re.search(pattern, self.text) or all(agent.poll() is not None for agent in self.agents))
        found = re.search(pattern, self.text)
        assert found, self.text
        return found[1], int(found[2])

    def kill_rank(self, host: int) -> None:
        """Kill the rank of a host."""
        pid = self.agents[host].pid
        (rank,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        os.kill(int(rank), signal.SIGKILL)

    def end(self) -> list[int]:
        """Return the exit codes of the agents."""
        codes = [agent.wait(60) for agent in self.agents]
        for reader in self.readers:
            reader.join(30)
        return codes


@contextmanager
def hosts() -> Iterator[Hosts]:
    with tempfile.TemporaryDirectory() as name:  # pytest's folders have too long a name for a socket
        running = Hosts(Path(name))
        try:
            yield running
        finally:
            for agent in running.agents:
                agent.terminate()
            running.end()
        assert not [*Path(name).glob("attnmesh-*")]


def complete(url: str) -> str:
    body = {"model": "smollm2", "prompt": "Once upon a time", "temperature": 0, "max_tokens": 100}
    request = Request(f"{url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"})
    with urlopen(request, timeout=120) as answer:
        return str(json.load(answer)["choices"][0]["text"])


def figures(url: str) -> bytes:
    with urlopen(f"{url}/metrics", timeout=30) as answer:
        return bytes(answer.read())


@pytest.mark.long
@needs_smollm2
@pytest.mark.parametrize("lost", [0, 1])
def test_a_text_goes_on_when_torchrun_starts_ranks_anew(lost: int) -> None:
    with hosts() as running:
        url, front = running.started()
        undisturbed = complete(url)
        texts: list[str] = []
        thread = threading.Thread(target=lambda: texts.append(complete(url)))
        thread.start()
        until(lambda: b"attnmesh_open_requests 1.0" in figures(url))
        running.kill_rank(lost)
        thread.join()
        assert texts == [undisturbed]
        assert b"attnmesh_restarts_total 1.0" in figures(url)
        os.kill(front, signal.SIGTERM)
        assert running.end() == [0, 0], running.text


@pytest.mark.long
@needs_smollm2
@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGKILL])
def test_the_front_ends_with_torchrun(end: signal.Signals) -> None:
    with hosts() as running:
        _, front = running.started()
        for agent in running.agents:
            agent.send_signal(end)
        until(lambda: not RunningProcess.of(front).is_alive())


def test_ranks_are_lost_with_rank_0(tmp_path: Path) -> None:
    rank = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    errors: list[str] = []

    def run() -> None:
        with pytest.raises(LaunchError) as raised:
            TorchrunRanks(tmp_path, RunningProcess.of(), 2).run("a socket")
        errors.append(str(raised.value))

    thread = threading.Thread(target=run)
    thread.start()
    until(lambda: (tmp_path / "address").exists())
    assert (tmp_path / "address").read_text() == "a socket"
    replace(tmp_path / "rank", str(RunningProcess.of(rank.pid)))
    thread.join(0.5)
    assert thread.is_alive()
    rank.communicate(b"\n")
    thread.join(30)
    assert errors == ["ranks were lost"]
    assert not (tmp_path / "address").exists()


def test_rank_0_alone_is_ended_for_torchrun_to_start_ranks_anew(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as rank:
        ranks = TorchrunRanks(tmp_path, RunningProcess.of(), 2)
        replace(tmp_path / "rank", str(RunningProcess.of(rank.pid)))  # as rank 0 does
        ranks.kill(will_restart=True)
        assert rank.wait(60) == -signal.SIGKILL
        ranks.kill(will_restart=True)  # it has ended: nothing happens


def test_a_front_that_has_ended_is_not_waited_for(tmp_path: Path) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    replace(tmp_path / "front", str(RunningProcess.of(ended.pid)))
    with pytest.raises(ClusterError, match="serve: expected a front that listens within 120 s, given none"):
        _address(tmp_path)


def test_a_folder_that_is_not_of_this_user_alone_is_refused(tmp_path: Path) -> None:
    assert make_own_folder(tmp_path / "made")
    assert not make_own_folder(tmp_path / "made")
    (tmp_path / "link").symlink_to(tmp_path / "made")  # the target is fine, but who made the link?
    (tmp_path / "open").mkdir(mode=0o700)
    (tmp_path / "open").chmod(0o701)
    (tmp_path / "file").touch(mode=0o600)
    for name in ("link", "open", "file"):
        with pytest.raises(ClusterError, match=f"{name} to be of this user alone, given another's. Fix: remove it"):
            make_own_folder(tmp_path / name)
    tmp_path.chmod(0o777)  # others could remove the folder, and make one in its place
    with pytest.raises(ClusterError, match=r"cannot replace files, given .*, where they can\. Fix: set TMPDIR"):
        make_own_folder(tmp_path / "made")
    tmp_path.chmod(0o1777)
    assert not make_own_folder(tmp_path / "made")


def test_a_process_of_a_number_that_is_used_again_is_another_one(tmp_path: Path) -> None:
    """The rank has ended, and its number is that of this process now."""
    agent = RunningProcess.of()
    ranks, taken = TorchrunRanks(tmp_path, agent, 2), RunningProcess(agent.pid, agent.start - 1)
    replace(tmp_path / "front", str(taken))
    with pytest.raises(ClusterError, match="serve: expected a front that listens within 120 s, given none"):
        _address(tmp_path)
    replace(tmp_path / "rank", str(taken))
    with mock.patch.object(Path, "unlink"), pytest.raises(LaunchError, match="ranks were lost"):
        ranks.run("a socket")
    with mock.patch("os.kill") as kill:
        TorchrunRanks(tmp_path, taken, 2).kill()
        ranks.kill(will_restart=True)
    assert not kill.called
