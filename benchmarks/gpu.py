"""`make gpu`: on one GPU, every kernel proved and then measured, into one dated file; without one, what it would do."""

import subprocess
import sys
import time
from pathlib import Path

import torch

HERE = Path(sys.executable).parent
RESULTS = Path(__file__).parent / "results"


def steps(results: Path) -> dict[str, list[str]]:
    """What is run, one after the other, and why."""
    return {
        "every kernel in every dtype against attention in float64": [str(HERE / "attnmesh"), "check"],
        "the tests that need a GPU": [sys.executable, "-m", "pytest", "-q", "-m", "gpu"],
        "kernels beside PyTorch's and the rate of memory": [
            str(HERE / "attnmesh"),
            *("bench", "kernel", "--out", str(results)),
        ],
    }


def main() -> int:
    """Run the steps, the first that fails being the last."""
    found = torch.cuda.is_available()
    name = torch.cuda.get_device_name() if found else "name-of-the-gpu"
    results = RESULTS / f"kernel_{name.lower().replace(' ', '-')}_{time.strftime('%Y-%m-%d')}.json"
    print(f"on {name}, torch {torch.__version__}:" if found else "PyTorch sees no GPU here. On one, this would run:")
    for why, command in steps(results).items():
        print(f"- {why}: {' '.join(map(str, command))}", flush=True)
        if found and (code := subprocess.run(command, check=False).returncode):
            return code
    return 0


if __name__ == "__main__":
    sys.exit(main())
