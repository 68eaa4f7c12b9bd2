"""The benchmarks outside the command: `python -m benchmarks model`, `faults` and `plan`."""

import sys

from attnmesh.cli.generate import show_errors
from benchmarks.commands import app


def main() -> None:
    """Run the command; an error of the library is one line."""
    sys.exit(show_errors(app, verbose=bool({"-v", "--verbose"} & {*sys.argv})))


if __name__ == "__main__":
    main()
