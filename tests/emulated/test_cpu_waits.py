"""When the CPU waits for the GPU: reads of its memory and copies from pageable memory, pinned as numbers.

docs/gpus.md has the same table in words.
"""

from collections import Counter

import pytest

from tests.support.emulation.emulated_nccl import world
from tests.support.emulation.emulated_waits import record_waits, record_waits_of_model

DECODING = {
    "decode, key_lengths on the CPU": ["copy"],
    "decode, documents": ["copy"],  # of a new mask; each step needs one, as documents cover all tokens
    "decode, checked=True": ["read", "read"],
    "decode, gather": ["read", "read"],  # the question after a step that no CPU looked at, and the comparison
    "append with token_mask": ["read"],
}
"""Calls in which the CPU waits. In all others it does not."""


def kinds(waits: list[str]) -> list[str]:
    """Return whether each wait is a read or a copy."""
    return [wait.split()[0] for wait in waits]


@pytest.mark.parametrize(
    ("backend", "shape"),
    [("nccl", (1, 1, 2)), pytest.param("cpu:gloo,cuda:nccl", (2, 1, 2), marks=pytest.mark.long)],
)
def test_steps_and_merges_wait_for_the_gpu_in_the_known_calls_alone(backend: str, shape: tuple[int, int, int]):
    for table in world(shape[0] * shape[2], record_waits, "decode", shape, backend=backend).results():
        assert {name: kinds(waits) for name, waits in table.items() if waits} == DECODING, table


@pytest.mark.parametrize(
    ("backend", "shape"),
    [
        ("nccl", (1, 1, 2)),
        pytest.param("cpu:gloo,cuda:nccl", (1, 2, 1), marks=pytest.mark.long),
        pytest.param("nccl", (2, 1, 1), marks=pytest.mark.long),
    ],
)
def test_attention_copies_nothing_after_the_first_call_of_a_signature(backend: str, shape: tuple[int, int, int]):
    for table in world(2, record_waits, "attention", shape, backend=backend).results():
        assert len(table) == 14
        assert not any(table.values()), table


def test_attention_on_one_gpu_never_waits_for_the_cpu():
    (table,) = world(1, record_waits, "attention", (1, 1, 1)).results()
    assert not any(table.values()), table


@pytest.mark.parametrize("capacity", [None, pytest.param(200, marks=pytest.mark.long)])
def test_a_token_of_a_model_never_waits_for_the_cpu(capacity: int | None):
    for table in world(2, record_waits_of_model, capacity, backend="cpu:gloo,cuda:nccl").results():
        assert table == {"token": []}, Counter(table["token"])
