"""Processes are known by number and start: one that has ended is not alive, though its number may be another's."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from attnmesh.runtime.processes import RunningProcess

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="this system has no /proc")


def test_a_process_is_alive_till_it_ends_and_a_zombie_has_ended() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        known = RunningProcess.of(child.pid)
        assert known.is_alive()
        assert known != RunningProcess.of()
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # it is a zombie, whose number is still its own
        assert not known.is_alive()
        assert RunningProcess.of(child.pid).start == 0
    assert not known.is_alive()
    assert not RunningProcess.of(child.pid).is_alive()


def test_a_text_names_the_process_again() -> None:
    own = RunningProcess.of()
    assert own.pid == os.getpid()
    assert RunningProcess.parse(str(own)) == own
    assert not RunningProcess.parse(str(own._replace(start=own.start + 1))).is_alive()
