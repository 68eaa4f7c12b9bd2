"""Settings and fixtures of all tests. README.md beside this file says which helper of `support` does what."""

import os
from collections.abc import Iterator

os.environ.pop("COLUMNS", None)  # pytest-xdist sets it, and a table takes its width once, when it is imported
os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # a process that has asked CUDA itself cannot be forked any more
os.environ["ATTNMESH_MACHINE"] = ""  # the choices of "auto" do not depend on what was measured here
os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # of two threads neither keeps a core from others while it waits
os.environ["PYTHONPATH"] = os.pathsep.join(  # what each process imports that a test starts
    filter(None, (os.path.join(os.path.dirname(__file__), "support", "process", "start"), os.environ.get("PYTHONPATH")))
)

import signal
from pathlib import Path

import hypothesis
import pytest
import torch

import tests.support.emulation.interpreted
import tests.support.process.compiler_settings
import tests.support.process.gc_settings
from attnmesh.cli.launch import Processes
from attnmesh.kernels.native.build import library
from attnmesh.runtime.world import WORLD
from tests.support.emulation.interpreted import interpreted  # noqa: F401 (a fixture)
from tests.support.ranks.pool import PRELOADED, Pool
from tests.support.serving.browser import browser  # noqa: F401 (a fixture)

collect_ignore = [
    "support/planning/simulated.py",  # for the Python that has SimGrid
    "support/process/warm_up.py",  # for ranks alone
]

hypothesis.settings.register_profile("project", deadline=None, print_blob=True, max_examples=50)
hypothesis.settings.load_profile("project")


TESTS = Path(__file__).parent
LONGEST = TESTS / "tools"
"""A turn of hostile clients, which is not for the end."""
WAITING = (LONGEST, *(TESTS / room for room in ("serve", "cli", "comm", "runtime", "setup", "store")))
"""Folders of tests that wait more than they compute."""


def pytest_configure(config: pytest.Config) -> None:
    """Start the process that all ranks are forked from, while tests are collected: it imports what most ranks need.

    Interrupts are heard, also by what tests start, where a shell runs the tests in the background and ignores them.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
    library()  # compiled here, or the first rank to need it would be silent for some seconds
    if getattr(config.option, "numprocesses", None) and not hasattr(config, "workerinput"):
        return  # of several workers each has its own, and whoever hands out the tests runs none
    Processes().preload(PRELOADED)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Deal files that wait evenly among the others: two of them at once would leave cores idle.

    The other files are dealt from the last one on: the first ones are short, so that all workers end at once.
    """
    gone = [folder for folder in WAITING if not folder.is_dir()]
    if gone:
        raise pytest.UsageError(f"{__file__}: expected folders in WAITING, given {gone}. Fix: name the ones that wait.")
    files = [path for path in dict.fromkeys(item.path for item in items) if path.name.startswith("test_")]
    files.sort(key=lambda path: path.parent != LONGEST)
    place: dict[Path, float] = {}
    for waits in (True, False):
        group = [path for path in files if (path.parent in WAITING) == waits][:: 1 if waits else -1]
        place |= {path: number / len(group) for number, path in enumerate(group)}
    items.sort(key=lambda item: place.get(item.path, 0.0))


def pytest_collection_finish() -> None:
    """Search for garbage fast."""
    tests.support.process.gc_settings.keep_what_is_left()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """Search for garbage fast in the next file, too: what files leave behind, as compiled graphs, adds up."""
    yield
    if nextitem is None or nextitem.path != item.path:
        tests.support.process.gc_settings.keep_what_is_left()


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """The ranks of this test run."""
    pool = Pool()
    yield pool
    pool.close()


@pytest.fixture(autouse=True)
def deadline() -> Iterator[None]:
    """A command that a test runs in this process sets no deadline for the tests after it."""
    before = WORLD.deadline
    yield
    WORLD.deadline = before


@pytest.fixture(autouse=True)
def seed() -> None:
    """Every test draws the same numbers, whichever tests run before it."""
    torch.manual_seed(0)
