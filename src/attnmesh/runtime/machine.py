"""This machine: its processor, its versions, and the user's folder of files that can be made again."""

import os
import platform
import shutil
import subprocess
from importlib.metadata import packages_distributions, version
from pathlib import Path
from typing import Any

import torch


def cache_folder() -> Path | None:
    """Return the folder in which attnmesh keeps files between runs; None for a user without a home."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "attnmesh"
    except RuntimeError:
        return None


def cores_here() -> int:
    """Return the cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cpu_facts(*names: str) -> list[str]:
    """Return the lines of `/proc/cpuinfo` that begin with these names, each once; none on systems without the file."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8", "replace").splitlines()
    except OSError:
        return []
    return sorted({line for line in lines if line.startswith(names)})


def cpu_name() -> str:
    """Return the model of the processor, or its architecture."""
    model = cpu_facts("model name")
    return model[0].split(":", 1)[1].strip() if model else platform.machine()


def machine() -> dict[str, Any]:
    """Return versions and the names of CPU and GPU, to be printed beside figures."""
    facts: dict[str, Any] = {
        "attnmesh": version("attnmesh"),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cpu": f"{cpu_name()}, {torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}",
    }
    if torch.cuda.is_available():
        triton = packages_distributions().get("triton")
        facts |= {"gpu": torch.cuda.get_device_name(), "driver": _driver(), "cuda": torch.version.cuda}
        facts |= {"triton": triton and version(triton[0]), "nccl": ".".join(map(str, torch.cuda.nccl.version()))}
    return facts


def _driver() -> str | None:
    """Return the version of NVIDIA's driver; None where `nvidia-smi` is missing or prints nothing."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    command = [tool, "--query-gpu=driver_version", "--format=csv,noheader"]
    lines = subprocess.run(command, capture_output=True, errors="replace", check=False).stdout.splitlines()
    return lines[0] if lines else None


NO_MEMORY_WORDS = (
    *("out of memory", "can't allocate memory", "cannot allocate memory", "not enough memory"),
    "storage size calculation overflowed",
)
"""Words of errors of a machine or a device that is full, in lower case."""


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether the error says that this machine or a device has no room: PyTorch has no one class for it.

    >>> is_out_of_memory(RuntimeError("DefaultCPUAllocator: can't allocate memory")), is_out_of_memory(ValueError("no"))
    (True, False)
    """
    return isinstance(error, MemoryError) or any(words in str(error).lower() for words in NO_MEMORY_WORDS)
