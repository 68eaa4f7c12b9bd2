"""`make gpu`: on one GPU, every kernel proved and then measured, into one dated file; without one, what it would do."""

import json
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from attnmesh.cli.output import machine

HERE = Path(sys.executable).parent
RESULTS = Path(__file__).parent / "results"


def steps() -> dict[str, tuple[str, list[str]]]:
    """What is run, one after the other, by the name it has in the file, and why."""
    command = str(HERE / "attnmesh")
    return {
        "check": (
            "every kernel in every dtype against attention in float64, and which one serves what",
            [command, "check", "--json"],
        ),
        "tests": (
            "the tests that need a GPU: random problems, a world of one rank, graphs, ranks that share the GPU",
            [sys.executable, "-m", "pytest", "-q", "-m", "gpu"],
        ),
        "bench": (
            "decoding, prefill and a step's overhead beside PyTorch's, FlexAttention, and the rate of memory",
            [command, "bench", "kernel", "--json"],
        ),
    }


def main() -> int:
    """Run the steps; what was measured is written also if one failed."""
    found = torch.cuda.is_available()
    name = torch.cuda.get_device_name() if found else "name-of-the-gpu"
    date = time.strftime("%Y-%m-%d")
    results = RESULTS / f"gpu_{name.lower().replace(' ', '-')}_{date}.json"
    print(f"on {name}, torch {torch.__version__}:" if found else "PyTorch sees no GPU here. On one, this would run:")
    report: dict[str, Any] = {"command": "make gpu", "date": date, "machine": machine()}
    failed = []
    for step, (why, command) in steps().items():
        print(f"- {why}: {' '.join(map(str, command))}", flush=True)
        if not found:
            continue
        start = time.monotonic()
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
        failed += [step] if done.returncode else []
        said: Any = done.stdout.splitlines()[-20:]
        if "--json" in command:
            with suppress(ValueError):
                said = json.loads(done.stdout)
        report[step] = {"seconds": round(time.monotonic() - start, 1), "code": done.returncode, "said": said}
        results.write_text(json.dumps(report, indent=2) + "\n")
        print(f"  {'failed' if done.returncode else 'done'} in {report[step]['seconds']} s", flush=True)
    print(f"and all of it would be written to {results}" if not found else f"written to {results}; failed: {failed}")
    return len(failed)


if __name__ == "__main__":
    sys.exit(main())
