"""The native kernel: its bits, its library, its threads, and numbers that are not finite."""

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import Tensor

import attnmesh as am
from attnmesh.attention import attend as attend_module
from attnmesh.errors import KernelError
from attnmesh.kernels.driver import choose
from attnmesh.kernels.native import build
from attnmesh.kernels.native.build import SOURCES, library
from attnmesh.runtime.kept import Kinds

HERE = Path(__file__).parent
needs_library = pytest.mark.skipif(library().attend is None, reason="there is no C++ compiler")


@pytest.fixture(autouse=True)
def as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Restore the number of threads, find the library again, and know no kinds of calls that need it."""
    monkeypatch.setattr(attend_module, "PLANS", Kinds())
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
    tensors, found = problem(dtype), []
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        found.append(am.attend(*tensors, kernel="native"))
    for other in found[1:]:
        assert torch.equal(other.out, found[0].out)
        assert torch.equal(other.lse, found[0].lse)


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
@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.filterwarnings("ignore:This process")
def test_a_forked_child_does_not_hang() -> None:
    torch.set_num_threads(2)
    tensors = problem(keys=20_000)
    expected = am.attend(*tensors, kernel="native").out
    narrow = [x.bfloat16() for x in tensors]  # a dtype that this process has not read
    child = os.fork()
    if not child:
        same = torch.equal(am.attend(*tensors, kernel="native").out, expected)
        near = am.attend(*narrow, kernel="native").out.float() - expected
        os._exit(0 if same and near.abs().max() < 0.02 else 1)
    end = time.monotonic() + 60
    while (done := os.waitpid(child, os.WNOHANG))[0] == 0:
        if time.monotonic() > end:
            os.kill(child, signal.SIGKILL)
        time.sleep(0.02)
    assert done[1] == 0


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
    assert choose("auto", q, k, v).name == "cpu"
    torch.testing.assert_close(am.attend(q, k, v).out, am.attend(q, k, v, kernel="reference").out)
    with pytest.raises(KernelError) as raised:
        am.attend(q, k, v, kernel="native")
    assert reason in str(raised.value)


@needs_library
def test_it_is_compiled_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(build, "SOURCES", [source for source in build.SOURCES if source.name == "cache.cpp"])
    first = build._built()
    made = first.stat().st_mtime_ns
    assert build._built() == first
    assert first.stat().st_mtime_ns == made
    assert {file.name for file in first.parent.iterdir()} == {first.name, "lock"}


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
