"""`attnmesh serve` under torchrun: ranks on several hosts, and a front beside rank 0 that outlives them.

torchrun starts all ranks anew when one is lost. The first rank 0 starts the front as a process of its own. Later ones
find it by a folder of this torchrun, in which the front writes the address of its socket, and rank 0 its process.
"""

import atexit
import os
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from signal import SIGKILL, SIGTERM
from typing import Any

import torch.distributed as dist

from attnmesh.cli.launch import LaunchError
from attnmesh.errors import ClusterError
from attnmesh.runtime.processes import RunningProcess

FRONT = "ATTNMESH_FRONT"
"""Environment of a front: its folder, the process of torchrun's agent, and the number of ranks."""

LISTENING_SECONDS = 120.0
"""Seconds that a front has to listen."""

HOST_POLL_SECONDS = 0.1
"""Seconds between two looks at a file or a process."""


@dataclass(frozen=True)
class TorchrunRanks:
    """The ranks that torchrun starts, as the front sees them."""

    folder: Path
    agent: RunningProcess
    count: int

    @staticmethod
    def of_front() -> "TorchrunRanks | None":
        """Return the ranks of this front; None in a process that is not one of torchrun's."""
        given = os.environ.get(FRONT)
        if given is None:
            return None
        folder, agent, count = given.rsplit(":", 2)
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        return TorchrunRanks(Path(folder), RunningProcess.parse(agent), int(count))

    def run(self, address: str) -> None:
        """Publish the front's address for the next rank 0. Raise when this rank 0 or torchrun has ended."""
        rank, published = self.folder / "rank", self.folder / "address"
        rank.unlink(missing_ok=True)
        replace(published, address)
        try:
            while self.agent.is_alive() and not rank.exists():
                time.sleep(HOST_POLL_SECONDS)
            while self.agent.is_alive() and RunningProcess.parse(rank.read_text(encoding="utf-8")).is_alive():
                time.sleep(HOST_POLL_SECONDS)
        finally:
            published.unlink(missing_ok=True)
        if not self.agent.is_alive():
            os.kill(os.getpid(), SIGTERM)  # no other ranks will come
        raise LaunchError("ranks were lost")

    def kill(self, *, will_restart: bool = False) -> None:
        """End torchrun, which ends the ranks. With `will_restart` end rank 0: torchrun starts all ranks anew."""
        with suppress(OSError):  # it has ended
            if will_restart:
                rank = RunningProcess.parse((self.folder / "rank").read_text(encoding="utf-8"))
                if rank.is_alive():
                    os.kill(rank.pid, SIGKILL)
            elif self.agent.is_alive():
                os.kill(self.agent.pid, SIGTERM)


def serve_under_torchrun(settings: Any) -> None:
    """Serve as one of torchrun's ranks; rank 0 starts the front, or finds it."""
    from attnmesh.cli.serve_worker import serve_rank

    serve_rank(settings, find_front() if dist.get_rank() == 0 else "")
    dist.destroy_process_group()


def find_front() -> str:
    """Return the address of the front, and start the front if there is none. Rank 0 alone calls this."""
    agent = RunningProcess.of(os.getppid())
    folder = Path(tempfile.gettempdir(), f"attnmesh-serve-{os.getuid()}-{agent}")
    if make_own_folder(folder):
        environment = {name: x for name, x in os.environ.items() if not name.startswith("TORCHELASTIC_")}
        environment[FRONT] = f"{folder}:{agent}:{dist.get_world_size()}"
        command = [sys.executable, "-m", "attnmesh", *sys.argv[1:]]
        front = subprocess.Popen(command, env=environment, start_new_session=True)  # no signal of the terminal's
        replace(folder / "front", str(RunningProcess.of(front.pid)))
    return _address(folder)


def make_own_folder(folder: Path) -> bool:
    """Make a folder of this user alone, or return False if there is one. Raise if others made it, or could replace it.

    Its name can be guessed. A link is refused, whatever it leads to.
    """
    parent = folder.parent.stat()
    if parent.st_mode & stat.S_IWOTH and not parent.st_mode & stat.S_ISVTX:
        expected = "a temporary folder in which others cannot replace files"
        given, fix = f"{folder.parent}, where they can", "set TMPDIR to a folder of yours"
        raise ClusterError("serve", expected, given, fix)
    try:
        folder.mkdir(mode=0o700)
    except FileExistsError:
        entry = folder.lstat()
        is_own = stat.S_ISDIR(entry.st_mode) and entry.st_uid == os.getuid() and not entry.st_mode & 0o077
        if not is_own:
            raise ClusterError("serve", f"{folder} to be of this user alone", "another's", "remove it") from None
        return False
    return True


def _address(folder: Path) -> str:
    """Wait for the front's address, and leave the front the number of this process."""
    end = time.monotonic() + LISTENING_SECONDS
    front, published = folder / "front", folder / "address"
    while time.monotonic() < end:
        if published.exists():
            address = published.read_text(encoding="utf-8")
            replace(folder / "rank", str(RunningProcess.of()))
            return address
        if front.exists() and not RunningProcess.parse(front.read_text(encoding="utf-8")).is_alive():
            break
        time.sleep(HOST_POLL_SECONDS)
    fix = f"read its messages, and remove {folder}"
    raise ClusterError("serve", f"a front that listens within {LISTENING_SECONDS:.0f} s", "none", fix)


def replace(file: Path, text: str) -> None:
    """Write a file that readers find whole, or not."""
    part = file.with_name(f".{file.name}")
    part.write_text(text, encoding="utf-8")
    part.replace(file)
