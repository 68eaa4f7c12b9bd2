"""Measure a cluster briefly: few keys, and few rounds of messages. The figures mean less, and the way is the same."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

from attnmesh.setup import measure_device, measure_link, measure_shares, measured_ranks


@contextmanager
def measuring_briefly() -> Iterator[None]:
    """Measure briefly while the block runs."""
    with ExitStack() as stack:
        stack.enter_context(patch.dict(measure_device.KEYS, cpu=2**10))
        stack.enter_context(patch.dict(measure_shares.MEASURED_TOKENS, cpu=2**10))
        stack.enter_context(patch.object(measure_shares, "READ_SECONDS", 0.05))
        stack.enter_context(patch.multiple(measured_ranks, IN_A_ROW=1, REPETITIONS=1))
        stack.enter_context(patch.multiple(measure_link, IN_A_ROW=1, REPETITIONS=1, LONG_MESSAGE_SECONDS=0.01))
        yield
