"""The benches: `python -m benchmarks kernel`, `decode`, `prefill`, `model` and others."""

from attnmesh_command import run
from benchmarks.commands import app


def main() -> None:
    """Run a benchmark; an error of the library is one line."""
    run(app)


if __name__ == "__main__":
    main()
