"""The library of the native kernel: found beside the source, or compiled into the user's cache at its first use.

A file of the cache is run, so it is one that this user has written whole: its last bytes are a checksum of the others,
and nobody else may write to it or to its folders. Any other file is compiled anew.
"""

import ctypes
import fcntl
import os
import platform
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Callable
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

import torch

from attnmesh.runtime.machine import cache_folder, cpu_facts
from attnmesh.runtime.private_file import OTHERS_WRITE, is_of_this_user_alone, open_without_links

SOURCES = sorted(Path(__file__).parent.glob("*.cpp"))

HEADERS = sorted(Path(__file__).parent.glob("*.h"))

COMPILER_FLAGS = ("-std=c++20", "-O3", "-fno-math-errno", "-fPIC", "-shared", "-pthread", "-ldl")

MAX_COMPILE_SECONDS = 120
"""Most seconds of a compilation."""

CHECKSUM_SIZE = sha256().digest_size
"""Bytes after a library."""

Function = Callable[[bytes], int]
"""A function of the library. It takes the fields of a C structure."""


class Library(NamedTuple):
    """The functions of the library, or the reason why there is none."""

    attend: Function | None = None
    append: Function | None = None
    append_to_file: Function | None = None
    exchange: Callable[[bytes, int], int] | None = None
    linear: Callable[[bytes, int], int] | None = None
    digest: Callable[[int, int, int, int], int] | None = None
    digest_run: Function | None = None
    reason: str | None = None


@cache
def library() -> Library:
    """Return the library. The first call on a machine compiles it, for some seconds."""
    if os.environ.get("ATTNMESH_NATIVE") == "0":
        return Library(reason="ATTNMESH_NATIVE=0 turns it off")
    try:
        loaded = ctypes.CDLL(str(_shipped() or _built()))
    except _MissingError as missing:
        return Library(reason=str(missing))
    except OSError as error:
        return Library(reason=f"the library does not load: {_line(str(error))}")
    fields, pointer, integer = ctypes.c_char_p, ctypes.c_void_p, ctypes.c_int64
    functions = {name: getattr(loaded, f"attnmesh_{name}") for name in Library._fields[:-1]}
    for function in functions.values():
        function.argtypes, function.restype = [fields], integer
    functions["exchange"].argtypes = functions["linear"].argtypes = [fields, integer]
    functions["digest"].argtypes = [pointer, integer, integer, pointer]
    return Library(**functions)


class _MissingError(Exception):
    """There is no library. The text is the reason."""


def _shipped() -> Path | None:
    """Return the library of the wheel, if it has one that this CPU runs."""
    machine = platform.machine()
    file = Path(__file__).with_name(f"native-{machine}.so")
    runs = machine != "x86_64" or torch.backends.cpu.get_cpu_capability().startswith("AVX")  # AVX2 or AVX512
    return file if runs and file.exists() else None


def _built() -> Path:
    """Return the file of the library for this CPU, compiled if it is not in the cache."""
    compiler = shutil.which(os.environ.get("CXX", "c++")) or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        raise _MissingError("there is no C++ compiler: install g++ or clang++")
    version = _output([compiler, "--version"])
    sources = [source.read_bytes() for source in (*SOURCES, *HEADERS)]
    processor = cpu_facts("model name", "flags", "Features", "CPU part") or [platform.processor()]
    facts = [
        version,
        "\n".join(processor),
        " ".join(COMPILER_FLAGS),
        *platform.libc_ver(),
    ]  # these decide what is compiled
    key = sha256(b"\0".join([*sources, *(fact.encode() for fact in facts)])).hexdigest()[:16]
    kept = cache_folder()
    if kept is None:
        raise _MissingError("there is no home folder to keep the library in: set XDG_CACHE_HOME")
    folder = kept / "native"
    file = folder / f"native-{key}.so"
    try:
        for path in (kept, folder):
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            _keep_others_out(path)
        if not _is_whole(file):
            with (folder / "lock").open("wb") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)  # one of several ranks compiles
                if not _is_whole(file):
                    _compile(compiler, folder, file)
    except OSError as error:
        raise _MissingError(f"the folder {folder} cannot be written: {_line(str(error))}") from None
    return file


def _keep_others_out(folder: Path) -> None:
    """Let only this user write to a folder. Raise if another one owns or may replace it."""
    status = folder.stat()
    parent = folder.parent.stat().st_mode
    replaceable = parent & stat.S_IWOTH and not parent & stat.S_ISVTX
    if {status.st_uid, folder.lstat().st_uid} != {os.geteuid()} or replaceable:
        raise _MissingError(f"the folder {folder} is one of other users: set XDG_CACHE_HOME to one of your own")
    if status.st_mode & OTHERS_WRITE:
        folder.chmod(0o700)


def _is_whole(file: Path) -> bool:
    """Return whether a file is one that this user has compiled, all of it, and that nobody else may write."""
    try:
        with os.fdopen(open_without_links(file), "rb") as opened:
            status = os.fstat(opened.fileno())
            own = is_of_this_user_alone(status) and stat.S_ISREG(status.st_mode)
            content = opened.read() if own else b""
    except OSError:
        return False
    library, checksum = content[:-CHECKSUM_SIZE], content[-CHECKSUM_SIZE:]
    return len(library) > 0 and sha256(library).digest() == checksum


def _compile(compiler: str, folder: Path, file: Path) -> None:
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        library = Path(scratch) / "native.so"
        native = "-mcpu=native" if platform.machine() in ("aarch64", "arm64") else "-march=native"
        _output([compiler, *COMPILER_FLAGS, native, *map(str, SOURCES), "-o", str(library)])
        checksum = sha256(library.read_bytes()).digest()
        with library.open("ab") as opened:
            opened.write(checksum)  # loaders read no further than the sections
            opened.flush()
            os.fsync(opened.fileno())  # or the name could outlive the content, if the machine stops
        library.chmod(0o700)
        os.replace(library, file)


def _output(command: list[str]) -> str:
    """Return what a command prints. Raise with its first error if it fails."""
    try:
        done = subprocess.run(command, capture_output=True, errors="replace", timeout=MAX_COMPILE_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise _MissingError(f"{command[0]} does not run: {_line(str(error))}") from None
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if "error" in line] or [done.stderr]
        raise _MissingError(f"{command[0]} fails: {_line(errors[0])}")
    return done.stdout


def _line(text: str) -> str:
    return (text.strip().splitlines() or ["no message"])[0][:200]
