"""The machine: the folder of its cache, and errors that say that there is no room."""

from pathlib import Path

import pytest
import torch

from attnmesh.runtime import machine

pytestmark = pytest.mark.quick


def test_the_cache_is_where_the_user_keeps_caches(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert machine.cache_folder() == tmp_path / "attnmesh"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert machine.cache_folder() == tmp_path / "home" / ".cache" / "attnmesh"

    def nowhere(_: Path) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "expanduser", nowhere)
    assert machine.cache_folder() is None


@pytest.mark.parametrize("size", [1 << 55, 1 << 62], ids=["too large", "beyond all sizes"])
def test_pytorch_s_errors_of_memory_are_known(size: int) -> None:
    with pytest.raises(RuntimeError) as raised:
        torch.empty(size, dtype=torch.float64)
    assert machine.is_out_of_memory(raised.value)


def test_pythons_error_of_memory_is_known_and_others_are_not() -> None:
    assert machine.is_out_of_memory(MemoryError())
    with pytest.raises(RuntimeError) as raised:
        torch.zeros(2) @ torch.zeros(3)
    assert not machine.is_out_of_memory(raised.value)


def test_facts_are_each_line_once() -> None:
    facts = machine.cpu_facts("model name", "cpu family")
    assert len({*facts}) == len(facts)
    assert all(line.startswith(("model name", "cpu family")) for line in facts)
    assert machine.cpu_facts("no such fact") == []
    assert machine.cpu_name()
    assert machine.cores_here() >= 1
