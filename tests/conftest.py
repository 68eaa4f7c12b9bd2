import importlib
import os
from collections.abc import Iterator
from importlib.util import find_spec

import hypothesis
import pytest
import torch

from tests.pool import Pool

if find_spec("triton") and not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # Triton asks once, when it is imported: PyTorch's compiler may come first
    for name in ("attend", "decode"):
        importlib.import_module(f"attnmesh.kernel.programs.{name}")
    del os.environ["TRITON_INTERPRET"]

collect_ignore = ["simulated.py"]  # a script for another Python, the system's, which has SimGrid

hypothesis.settings.register_profile("project", deadline=None, print_blob=True)
hypothesis.settings.load_profile("project")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Worlds of ranks that wait for work keep a small machine busy: what needs none of them comes first."""
    items.sort(key=lambda item: "pool" in getattr(item, "fixturenames", ()))


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """The ranks of this test run."""
    pool = Pool()
    yield pool
    pool.close()


@pytest.fixture(autouse=True)
def seed() -> None:
    """Every test draws the same numbers, whichever tests run before it."""
    torch.manual_seed(0)
