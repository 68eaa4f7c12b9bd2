"""Test what attnmesh adds to other packages, on their oldest allowed versions and on the pinned ones.

`python -m tools.versions [package ...] [--workers 2]` installs the floors of `pyproject.toml` into a folder of
their own, without what they depend on, and runs the tests with that folder in front. Then it runs them without it.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
TESTS = {
    "transformers": ["tests/hf", "tests/refusals", "src/attnmesh/hf"],
    "accelerate": [
        "tests/hf/training/test_accelerator.py",
        "tests/hf/training/test_trainer.py",
        "src/attnmesh/hf/training/accelerator.py",
    ],
    "trl": [f"tests/hf/training/test_{name}.py" for name in ("trainer", "finetune", "rollouts", "grpo_example")],
    "peft": ["tests/hf/training/test_trainer.py"],
    "diffusers": ["tests/diffusers", "src/attnmesh/diffusers"],
}
"""Tests of each package."""


def requirements() -> dict[str, str]:
    """Return the range of versions of each package in `TESTS`, as in ">=5.23,<5.24"."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    lines = {line for lines in extras.values() for line in lines}
    found = [(name, line.removeprefix(name)) for name in TESTS for line in lines if line.startswith(f"{name}>")]
    if len(found) != len(TESTS):
        raise SystemExit(f"each of {', '.join(TESTS)} has one range in pyproject.toml, and these are {sorted(found)}")
    return dict(found)


def floor(package: str) -> str:
    """Return the oldest version that is allowed."""
    return requirements()[package].split(",")[0].removeprefix(">=")


def run_tests(packages: list[str], workers: int, folder: str = "") -> bool:
    """Run the tests of the packages, with those in the folder in front. Return whether they passed."""
    paths = list(dict.fromkeys(test for package in packages for test in TESTS[package]))
    environment = dict(os.environ)
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (folder, os.environ.get("PYTHONPATH"))))
    shown = f"from importlib.metadata import version; print(*(f'{{x}} {{version(x)}}' for x in {packages!r}))"
    subprocess.run([sys.executable, "-c", shown], env=environment, check=True)
    options = ["-q", "-m", "not gpu and not long", *(["-n", str(workers), "--dist", "loadfile"] if workers > 1 else [])]
    return not subprocess.run([sys.executable, "-m", "pytest", *options, *paths], cwd=ROOT, env=environment).returncode


def main() -> None:
    """Run the tests on both sets of versions."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("packages", nargs="*", choices=[*TESTS, []], help="all if none is given")
    parser.add_argument("--workers", type=int, default=1)
    options = parser.parse_args()
    packages = options.packages or [*TESTS]
    oldest = [f"{package}=={floor(package)}" for package in packages]
    with tempfile.TemporaryDirectory() as folder:
        install = ["install", "--quiet", "--disable-pip-version-check", "--no-deps", "--target", folder, *oldest]
        subprocess.run([sys.executable, "-m", "pip", *install], check=True)
        passed = run_tests(packages, options.workers, folder)
    sys.exit(not (run_tests(packages, options.workers) and passed))


if __name__ == "__main__":
    main()
