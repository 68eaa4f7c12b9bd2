"""The native kernel: its bits, its threads, calls without its library, and numbers that are not finite."""

import ctypes
import os
import resource
import shutil
import signal
import subprocess
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from threading import Thread
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

import attnmesh as am
from attnmesh.core.band import Band
from attnmesh.core.scaling import Scaling
from attnmesh.errors import KernelError
from attnmesh.kernels import local as attend_module
from attnmesh.kernels.choice import choose
from attnmesh.kernels.implementations import native as kernel
from attnmesh.kernels.kernel import KernelRequest
from attnmesh.kernels.native.build import SOURCES, library
from attnmesh.runtime.memo import Memo
from tests.support.truth.tolerances import FLOAT32_SUMS

HERE = Path(__file__).parent
needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
needs_library = pytest.mark.skipif(library().attend is None, reason="there is no C++ compiler")


@pytest.fixture(autouse=True)
def as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Restore the number of threads, find the library again, and know no kinds of calls that need it."""
    monkeypatch.setattr(attend_module, "PREPARED_LOCAL", Memo())
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
    library.cache_clear()


def problem(dtype: torch.dtype = torch.float32, keys: int = 5000) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (torch.randn(2, h, n, 64, dtype=dtype) for h, n in ((6, 3), (2, keys), (2, keys)))
    return q, k, v


@needs_library
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_bits_do_not_depend_on_the_threads(dtype: torch.dtype) -> None:
    tensors = problem(dtype)
    found = []
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        found.append(am.attend(*tensors, kernel="native"))
    for other in found[1:]:
        assert torch.equal(other.out, found[0].out)
        assert torch.equal(other.lse, found[0].lse)


@needs_library
@pytest.mark.parametrize("banded", [False, True])
def test_parts_of_whole_runs_have_the_bits_of_one_call(banded: bool) -> None:
    q, k, v = problem(keys=3 * kernel.RUN + 77)
    bound = kernel.BoundNative.of(q, k, v, Scaling(0.125))
    whole, found, count = bound.blank(), bound.blank(), k.shape[2]
    low, high = torch.tensor([0, 5, kernel.RUN + 9]), torch.tensor([count - 2, count - 1, count])
    assert bound.attend(q, k, v, whole, Band(low, high) if banded else None)
    sizes, start = (kernel.RUN, 2 * kernel.RUN, 77), 0
    for part, size in zip(bound.parts(sizes), sizes, strict=True):
        seen = Band((low - start).clamp(0, size), (high - start).clamp(0, size)) if banded else None
        assert part.attend(q, k, v, found, seen, start, size)
        start += size
    assert torch.equal(found.out, whole.out)
    assert torch.equal(found.lse, whole.lse)


@needs_library
def test_bits_of_a_row_do_not_depend_on_the_other_rows() -> None:
    q, k, v = problem()
    whole = am.attend(q, k, v, kernel="native")
    for row in range(3):
        one = am.attend(q[:, :, row : row + 1], k, v, kernel="native")
        assert torch.equal(one.out[:, :, 0], whole.out[:, :, row])


@needs_library
@pytest.mark.parametrize("place", ["query", "key", "value", "hidden value", "all keys"])
@pytest.mark.parametrize("number", [torch.inf, -torch.inf, torch.nan])
def test_numbers_that_are_not_finite_are_those_of_the_reference(place: str, number: float) -> None:
    q, k, v = (torch.rand(1, 2, 8, 16) + 0.1 for _ in range(3))
    if place == "query":
        q[0, 0, 3, 2] = number
    elif place == "all keys":
        k[0, 0] = number
    else:
        (k if place == "key" else v)[0, 0, 7 if place == "hidden value" else 2, 5] = number
    expected = am.attend(q, k, v, mask=am.Causal(), kernel="reference")
    for name in ("native", "cpu"):
        for given, right in zip(am.attend(q, k, v, mask=am.Causal(), kernel=name), expected, strict=True):
            torch.testing.assert_close(given, right, equal_nan=True)


@needs_library
def test_several_threads_of_python_may_call_it() -> None:
    torch.set_num_threads(2)
    tensors = problem(keys=20_000)
    expected = am.attend(*tensors, kernel="native").out
    with ThreadPoolExecutor(4) as pool:
        for found in pool.map(lambda _: am.attend(*tensors, kernel="native").out, range(16)):
            assert torch.equal(found, expected)


@needs_library
@needs_fork
@pytest.mark.filterwarnings("ignore:This process")
def test_a_forked_child_does_not_hang() -> None:
    torch.set_num_threads(2)
    tensors = problem(keys=20_000)
    expected = am.attend(*tensors, kernel="native").out
    narrow = [x.bfloat16() for x in tensors]  # a dtype that this process has not read

    def attends() -> bool:
        same = torch.equal(am.attend(*tensors, kernel="native").out, expected)
        near = am.attend(*narrow, kernel="native").out.float() - expected
        return same and bool(near.abs().max() < 0.02)  # inputs were rounded to bfloat16

    assert status_in_child(attends) == 0


def status_in_child(act: Callable[[], bool]) -> int:
    """The status of a forked child: 0 if `act` is true there, and of a signal that has ended it."""
    child = os.fork()
    if not child:
        try:
            os._exit(0 if act() else 1)
        finally:
            traceback.print_exc()
            os._exit(2)
    end = time.monotonic() + 60
    while (done := os.waitpid(child, os.WNOHANG))[0] == 0:
        if time.monotonic() > end:
            os.kill(child, signal.SIGKILL)
        time.sleep(0.02)
    return done[1]


@pytest.fixture(scope="module")
def library_of_little_memory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library, whose allocations fail as `few_allocations` has set."""
    made = tmp_path_factory.mktemp("native") / "native.so"
    flags = ("-std=c++20", "-O0", "-fPIC", "-shared", "-pthread", "-ldl", "-Wl,-Bsymbolic")
    sources = SOURCES[0].with_name("attend.cpp"), HERE / "native_memory.cpp"
    subprocess.run(["c++", *flags, *sources, "-o", made], check=True, timeout=300)
    return made


def with_kernel_of(loaded: ctypes.CDLL) -> Any:
    """A context in which the native kernel is that of another library."""
    loaded.attnmesh_attend.argtypes, loaded.attnmesh_attend.restype = [ctypes.c_char_p], ctypes.c_int64
    changed = library()._replace(attend=loaded.attnmesh_attend)
    return patch.object(kernel, "library", lambda: changed)


@needs_library
@needs_fork
@pytest.mark.filterwarnings("ignore:This process")
def test_an_allocation_that_fails_is_an_error_of_python(library_of_little_memory: Path) -> None:
    """Each allocation of a call fails once, on any of its threads, and the call after them all is right."""
    torch.set_num_threads(2)
    tensors = problem(keys=4000)
    expected = am.attend(*tensors, kernel="reference").out
    memory = ctypes.CDLL(str(library_of_little_memory))

    def fails_and_goes_on() -> bool:
        failures = 0
        with with_kernel_of(memory):
            for allowed in range(100):  # those that succeeded have left their memory for the next call
                memory.few_allocations(allowed)
                try:
                    out = am.attend(*tensors, kernel="native").out
                except MemoryError:
                    failures += 1
                else:
                    return failures >= 3 and torch.allclose(out, expected, atol=FLOAT32_SUMS)
        return False

    assert status_in_child(fails_and_goes_on) == 0


def no_more_threads() -> None:
    """Let no thread start in this process. The limit does not hold for root, so become nobody."""
    if os.geteuid() == 0:
        os.setresuid(65534, 65534, 65534)
    resource.setrlimit(resource.RLIMIT_NPROC, (1, 1))


@needs_library
@needs_fork
@pytest.mark.filterwarnings("ignore:This process")
@pytest.mark.parametrize("threads", ["own", "of OpenMP"])
def test_without_further_threads_one_does_the_work(
    threads: str, library_of_little_memory: Path, tmp_path: Path
) -> None:
    """A child has threads of OpenMP where it has loaded the library itself, and else its own."""
    torch.set_num_threads(2)
    tensors, found = problem(keys=5000), list[bool]()
    expected = am.attend(*tensors, kernel="native").out

    def attend() -> None:
        no_more_threads()
        with pytest.raises(RuntimeError, match="can't start new thread"):
            Thread(target=print).start()
        found.append(torch.allclose(am.attend(*tensors, kernel="native").out, expected, atol=FLOAT32_SUMS))

    def attends() -> bool:
        copy = shutil.copy(library_of_little_memory, tmp_path)
        with nullcontext() if threads == "own" else with_kernel_of(ctypes.CDLL(copy)):
            caller = Thread(target=attend)
            caller.start()
            caller.join()
        return found == [True]

    assert status_in_child(attends) == 0


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"PATH": ""}, "there is no C++ compiler: install g++ or clang++"),
        ({"CXX": "false"}, "false fails: "),
        ({"ATTNMESH_NATIVE": "0"}, "ATTNMESH_NATIVE=0 turns it off"),
        ({"XDG_CACHE_HOME": "/proc/nowhere"}, "the folder /proc/nowhere/attnmesh/native cannot be written"),
    ],
)
def test_without_a_library_others_serve(change: dict[str, str], reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if shutil.which("c++") is None and "XDG_CACHE_HOME" in change:
        pytest.skip("there is no C++ compiler")
    monkeypatch.delenv("ATTNMESH_NATIVE", raising=False)
    for name, value in change.items():
        monkeypatch.setenv(name, value)
    library.cache_clear()
    q, k, v = problem(keys=50)
    assert choose(KernelRequest.of(q, k, v, Scaling(1.0))).name == "cpu"
    torch.testing.assert_close(am.attend(q, k, v).out, am.attend(q, k, v, kernel="reference").out)
    with pytest.raises(KernelError) as raised:
        am.attend(q, k, v, kernel="native")
    assert reason in str(raised.value)


@needs_library
@pytest.mark.long
@pytest.mark.parametrize("kinds", ["address,undefined", "thread"])
def test_sanitizers_find_nothing(kinds: str, tmp_path: Path) -> None:
    flags = ("-std=c++20", "-O1", "-g", "-march=native", "-pthread", f"-I{SOURCES[0].parent}")
    sanitizers = (f"-fsanitize={kinds}", "-fno-sanitize-recover=all")
    words = ["c++", *flags, *sanitizers, str(HERE / "native_main.cpp"), "-o", str(tmp_path / "main")]
    subprocess.run(words, check=True, timeout=300)
    found = {**os.environ, "ASAN_OPTIONS": "detect_leaks=0"}
    done = subprocess.run([tmp_path / "main"], capture_output=True, text=True, timeout=600, check=False, env=found)
    assert done.returncode == 0, done.stdout + done.stderr
