"""`init_mesh` before there is a process group: torchrun's variables decide what it may make."""

import pytest

import attnmesh as am
from attnmesh.errors import MeshError


def test_without_torchrun_it_names_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(
        MeshError, match=r"or ranks that torchrun has started, given neither\. Fix: start the script with"
    ):
        am.init_mesh((1, 2, 2))


def test_more_ranks_than_torchrun_has_started_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(MeshError, match=r"expected at most the world's 2 ranks, given 1x2x2\. Fix: start more ranks"):
        am.init_mesh((1, 2, 2))
