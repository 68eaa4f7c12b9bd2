"""The GPU of a rank is the current device before anything is allocated on one."""

from unittest.mock import patch

import pytest
import torch

import attnmesh as am
from attnmesh.setup import init_mesh as module
from tests.support.emulated_gpu import EmulatedGPU
from tests.support.emulated_nccl import BACKENDS, world


def events(gpu: EmulatedGPU, used: bool) -> list[str]:
    """Return in which order `init_mesh` sets the device, compares calls and makes groups."""
    found: list[str] = []
    make = module.init_device_mesh

    class Recorded(module.Agreement):
        def __enter__(self) -> "Recorded":
            found.append("compare")
            return self

    def init(*arguments: object, **named: object) -> object:
        found.append("make groups")
        return make(*arguments, **named)  # type: ignore[arg-type]

    device = {
        "is_initialized": lambda: used,
        "device_count": lambda: 2,
        "set_device": lambda number: found.append(f"set {number}"),
    }
    order = patch.multiple(module, Agreement=Recorded, init_device_mesh=init)
    with patch.multiple(torch.cuda, **device), order:
        am.init_mesh("cuda", (1, 1, 2))
    return found[: found.index("make groups") + 1]


@pytest.mark.parametrize("backend", BACKENDS)
def test_init_mesh_sets_the_device_first(backend: str):
    expected = [["compare", f"set {rank}", "make groups"] for rank in range(2)]
    assert world(2, events, False, backend=backend).results() == expected


def test_init_mesh_leaves_a_device_that_is_in_use():
    assert world(2, events, True).results() == [["compare", "make groups"]] * 2
