"""Compile the native kernel into the wheel, where there is a compiler. Without one the wheel is pure Python.

With `ATTNMESH_NATIVE=0` it is, too. A pure wheel compiles the kernel at its first use.
"""

import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

FOLDER = Path(__file__).parent / "src" / "attnmesh" / "kernels" / "native"
BASELINES = {"x86_64": ["-march=x86-64-v3"], "aarch64": []}
"""Flags of the oldest CPU that the library of a wheel runs on, by machine."""


class NativeHook(BuildHookInterface):
    """Adds the library to a wheel."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile, and name the platform in the wheel's tag."""
        machine, compiler = platform.machine(), shutil.which("c++") or shutil.which("g++")
        wanted = version != "editable" and os.environ.get("ATTNMESH_NATIVE") != "0"
        if not wanted:
            return
        if compiler is None or machine not in BASELINES or sys.platform != "linux":
            self.say_pure(
                "there is no compiler" if compiler is None else f"{sys.platform} on {machine} has no baseline"
            )
            return
        self.folder = tempfile.TemporaryDirectory()
        library = Path(self.folder.name) / "native.so"
        flags = ["-std=c++20", "-O3", "-fno-math-errno", "-fPIC", "-shared", "-pthread", "-ldl", *BASELINES[machine]]
        done = subprocess.run([compiler, *flags, *map(str, FOLDER.glob("*.cpp")), "-o", str(library)], check=False)
        if done.returncode:
            self.folder.cleanup()
            self.say_pure(f"{compiler} fails with {done.returncode}")
            return
        build_data["force_include"][str(library)] = f"attnmesh/kernels/native/native-{machine}.so"
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"

    def say_pure(self, why: str) -> None:
        """Say in one line that the wheel has no library."""
        self.app.display_warning(
            f"attnmesh: a wheel without the native kernel, which is compiled at its first use: {why}"
        )
