"""`make gpu`: prove and measure every kernel on one GPU, into a dated file; without one, print the commands."""

import json
import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from attnmesh.runtime.machine import machine

TESTS = [
    "tests/kernels",
    "tests/hf/test_step_graph.py",
    "tests/cli/test_generate_command.py",
    "tests/diffusers/test_family_plans.py",
]
"""Folders and files with tests that need a GPU."""

WORKERS = str(min(12, os.cpu_count() or 1))
"""Processes of pytest: most of the time is Triton's compiler, on the CPU."""

RESULTS = Path(__file__).parent / "results"


def steps() -> dict[str, tuple[str, list[str]]]:
    """Return the purpose and the command of each step, by its name in the file."""
    return {
        "tests": (
            "the tests that need a GPU: random problems, a world of one rank, graphs, ranks that share the GPU",
            [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-n", WORKERS, "--dist", "worksteal", *TESTS],
        ),
        "check": (
            "every kernel in every dtype against attention in float64, and which one serves what",
            [sys.executable, "-m", "attnmesh", "check", "--json"],
        ),
        "bench": (
            "decoding, prefill and a token of a model beside PyTorch's, FlexAttention, and the rate of memory",
            [sys.executable, "-m", "benchmarks", "gpu-kernels", "--json"],
        ),
    }


def main() -> int:
    """Run the steps and write their results, also if a step failed. Return the number of failures."""
    has_gpu = torch.cuda.is_available()
    name = torch.cuda.get_device_name() if has_gpu else "name-of-the-gpu"
    date = time.strftime("%Y-%m-%d")
    path = RESULTS / f"gpu_{name.lower().replace(' ', '-')}_{date}.json"
    print(f"on {name}, torch {torch.__version__}:" if has_gpu else "PyTorch sees no GPU here. On one, this would run:")
    report: dict[str, Any] = {"command": "make gpu", "date": date, "machine": machine()}
    failed = []
    for step, (purpose, command) in steps().items():
        print(f"- {purpose}: {' '.join(map(str, command))}", flush=True)
        if not has_gpu:
            continue
        start = time.monotonic()
        process = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
        failed += [step] if process.returncode else []
        output: Any = process.stdout.splitlines()[-20:]
        if "--json" in command:
            with suppress(ValueError):
                output = json.loads(process.stdout)
        report[step] = {"seconds": round(time.monotonic() - start, 1), "code": process.returncode, "said": output}
        path.write_text(json.dumps(report, indent=2) + "\n")
        print(f"  {'failed' if process.returncode else 'done'} in {report[step]['seconds']} s", flush=True)
    print(f"and all of it would be written to {path}" if not has_gpu else f"written to {path}; failed: {failed}")
    return len(failed)


if __name__ == "__main__":
    sys.exit(main())
