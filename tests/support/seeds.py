"""Seeds of random problems: the first always, all of them where there is time."""

from typing import Any

import pytest


def seeds(few: int, many: int) -> list[Any]:
    """The numbers below `many`, of which those from `few` on are long."""
    return [*range(few), *(pytest.param(seed, marks=pytest.mark.long) for seed in range(few, many))]
