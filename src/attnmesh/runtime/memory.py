"""Memory of this machine: what there is, what is free within the limits of containers and services, and its pages."""

import ctypes
import mmap
import os
from collections.abc import Collection, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ROOT = Path("/")

HUGE_RUN = 1 << 24
"""Bytes from which memory is in huge pages: the last one of 2 MB, used in part, then wastes an eighth at most."""

CGROUP_FILES = {
    "": ("sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"),
    "memory": ("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}
"""Files of control groups of versions 2 and 1: the limit, the use, and the use that can be given back."""


def host_memory(root: Path = ROOT) -> int:
    """Return the bytes of memory that this process may use at most."""
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min([physical, *(limit for limit, _ in _limits(root))])


def free_memory(device: torch.device, root: Path = ROOT) -> int:
    """Return the bytes that are free on a device; on a CPU those of this machine, or of its control group."""
    if device.type == "cuda":
        reserved = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + reserved
    lines = _text_of(root / "proc/meminfo").splitlines()
    free = [int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")]
    free = free or [os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    return max(0, min([*free, *(limit - used for limit, used in _limits(root))]))


def mapped_files(addresses: Collection[int]) -> dict[int, int]:
    """Return the bytes of each file that is mapped at some of these addresses, by the first address in it.

    A page that several processes map counts for each as its share, as Linux has it. Later addresses in a file count 0.
    """
    bytes_by_address: dict[int, int] = {}
    inside: list[int] = []
    for line in _text_of(ROOT / "proc/self/smaps").splitlines():
        name, *fields = line.split()
        if not name.endswith(":"):
            first, stop = (int(end, 16) for end in name.split("-"))
            inside = (
                [address for address in addresses if first <= address < stop]
                if len(fields) > 4 and fields[4][0] == "/"
                else []
            )
            bytes_by_address |= dict.fromkeys(inside, 0)
        elif name == "Pss:" and inside:
            bytes_by_address[inside[0]] = int(fields[0]) << 10
    return bytes_by_address


def with_huge_pages(x: Tensor, dim: int) -> Tensor:
    """Return x, new memory, which Linux then puts in huge pages if it is long along `dim`: read a sixth faster."""
    plain = type(x) is Tensor and x.is_cpu and hasattr(mmap, "MADV_HUGEPAGE")
    if plain and x[(slice(0, 1),) * dim].nbytes >= HUGE_RUN:
        page = mmap.PAGESIZE
        address = x.data_ptr()
        first = -(-address // page) * page
        size = (address + x.nbytes) // page * page - first
        _libc().madvise(ctypes.c_void_p(first), ctypes.c_size_t(size), mmap.MADV_HUGEPAGE)  # the system may refuse it
    return x


@cache
def _libc() -> Any:
    return ctypes.CDLL(None)


def _limits(root: Path) -> Iterator[tuple[int, int]]:
    """Yield the limit and the use of each control group that this process is in."""
    for line in _text_of(root / "proc/self/cgroup").splitlines():
        _, names, path = line.split(":", 2)
        for name in names.split(","):
            if name in CGROUP_FILES:
                folder, most, used, spare = CGROUP_FILES[name]
                group = root / folder / path.lstrip("/")
                while group != (root / folder).parent:
                    limit = _text_of(group / most).strip()
                    if limit.isdigit():  # else "max", or a group that this process cannot see
                        lines = _text_of(group / "memory.stat").splitlines()
                        freed = [x.split()[1] for x in lines if x.startswith(f"{spare} ")]
                        yield int(limit), int(_text_of(group / used) or 0) - sum(map(int, freed))
                    group = group.parent


def _text_of(file: Path) -> str:
    try:
        return file.read_text("utf-8", "replace")
    except OSError:
        return ""
