"""Draw new random problems for as long as asked: `python -m tests.fuzz --seconds 600`."""

import argparse
import random
import time

from tests.problems import draw


def main() -> None:
    """Check problems until the time is over; a wrong one ends the run with its seed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, help="check this one problem only")
    options = parser.parse_args()
    end, count = time.monotonic() + options.seconds, 0
    while count == 0 or (options.seed is None and time.monotonic() < end):
        seed = random.getrandbits(48) if options.seed is None else options.seed
        try:
            draw(seed).check()
        except Exception:
            print(f"\nwrong: python -m tests.fuzz --seed {seed}")
            raise
        count += 1
        if count % 100 == 0:
            print(f"\r{count} problems, none wrong, {max(0, end - time.monotonic()):.0f} s left  ", end="", flush=True)
    print(f"\r{count} problems against float64, forward and gradients: none wrong")


if __name__ == "__main__":
    main()
