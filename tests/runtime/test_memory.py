"""Free memory: of this machine, within the limits of the control groups that a process is in."""

from pathlib import Path
from typing import Any

import pytest
import torch

import attnmesh as am
from attnmesh.runtime import memory
from attnmesh.runtime.memory import HUGE_RUN, free_memory, host_memory

KB, MB = 1 << 10, 1 << 20
CPU = torch.device("cpu")


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


NONE = {"proc/meminfo": f"MemTotal: {900 * KB} kB\nMemAvailable: {500 * KB} kB\n", "proc/self/cgroup": ""}

NESTED = {
    "proc/self/cgroup": "0::/system.slice/serve.service\n",
    "sys/fs/cgroup/system.slice/serve.service/memory.max": "max\n",
    "sys/fs/cgroup/system.slice/memory.max": f"{200 * MB}\n",
    "sys/fs/cgroup/system.slice/memory.current": f"{90 * MB}\n",
    "sys/fs/cgroup/system.slice/memory.stat": f"anon 5\ninactive_file {40 * MB}\n",
}

CONTAINER = {  # whose own group is the root that it sees
    "proc/self/cgroup": "0::/\n",
    "sys/fs/cgroup/memory.max": f"{300 * MB}\n",
    "sys/fs/cgroup/memory.current": f"{100 * MB}\n",
}

FIRST_VERSION = {
    "proc/self/cgroup": "5:cpu,cpuacct:/docker/1f\n4:memory:/docker/1f\n",
    "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{100 * MB}\n",
    "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{30 * MB}\n",
    "sys/fs/cgroup/memory/memory.stat": f"total_inactive_file {10 * MB}\n",
}


@pytest.mark.parametrize(
    ("group", "limit", "free"),
    [({}, None, 500), (NESTED, 200, 150), (CONTAINER, 300, 200), (FIRST_VERSION, 100, 80)],
    ids=["none", "nested", "container", "first version"],
)
def test_a_control_group_limits_memory(group: dict[str, str], limit: int | None, free: int, tmp_path: Path) -> None:
    write(tmp_path, NONE | group)
    assert free_memory(CPU, tmp_path) == free * MB
    assert host_memory(tmp_path) == (host_memory(tmp_path / "nowhere") if limit is None else limit * MB)


def test_a_machine_without_the_files_of_linux_has_memory(tmp_path: Path) -> None:
    assert free_memory(CPU, tmp_path) > 0
    assert 0 < free_memory(CPU) <= host_memory()


def mapping_flags(x: torch.Tensor) -> list[str]:
    """Flags of the mapping that holds the middle of a tensor."""
    inside, middle = False, x.data_ptr() + x.nbytes // 2
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, *rest = line.split()
        if not name.endswith(":"):
            inside = int(name.split("-")[0], 16) <= middle < int(name.split("-")[1], 16)
        elif inside and name == "VmFlags:":
            return rest
    raise AssertionError("no mapping holds it")


def test_keys_of_long_caches_are_in_huge_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages are asked for; which are given depends on others. Memory of before may be in a mapping that has asked."""
    if not Path("/sys/kernel/mm/transparent_hugepage").exists():
        pytest.skip("this machine has no huge pages to ask for")
    advised, libc = list[range](), memory._libc()

    class Libc:
        def madvise(self, first: Any, size: Any, advice: int) -> int:
            advised.append(range(first.value, first.value + size.value))
            return libc.madvise(first, size, advice)

    monkeypatch.setattr(memory, "_libc", Libc)
    sizes = {"batch": 1, "kv_heads": 2, "head_dim": 64, "dtype": torch.float32}
    tokens = HUGE_RUN // (4 * 64)
    am.KVCache(None, capacity=tokens // 2, **sizes)
    assert not advised
    long, grown = (am.KVCache(None, capacity=count, **sizes) for count in (tokens, tokens // 4))
    grown.append(*torch.zeros(2, 1, 2, 8, 64))
    grown.reserve(tokens)
    for keys in (cache.own_shard.view.keys for cache in (long, grown)):
        assert any(keys.data_ptr() + keys.nbytes // 2 in run for run in advised)
        assert "hg" in mapping_flags(keys)
