"""Timing and memory of calls."""

import subprocess
import sys
from functools import partial

import pytest
import torch

from benchmarks.timing import CLEAR_REFS, race


def test_rivals_take_turns_in_an_order_drawn_anew() -> None:
    calls: list[str] = []
    timings = race({name: partial(calls.append, name) for name in "abc"}, torch.device("cpu"), seconds=0, rounds=6)
    rounds = ["".join(calls[at : at + 3]) for at in range(0, len(calls), 3)]
    assert len(rounds) == 6
    assert {"".join(sorted(each)) for each in rounds} == {"abc"}
    assert len({each[0] for each in rounds}) > 1
    assert all(t.low <= t.median <= t.high for t in timings.values())


@pytest.mark.parametrize(("repeat", "calls_of_a_turn"), [(1, 1), (3, 3), (10, 12)])
def test_a_turn_is_several_calls_in_a_row(repeat: int, calls_of_a_turn: int) -> None:
    calls: list[str] = []
    both = {name: partial(calls.append, name) for name in "ab"}
    race(both, torch.device("cpu"), seconds=0, rounds=2, repeat=repeat)
    turns = ["".join(calls[at : at + calls_of_a_turn]) for at in range(0, len(calls), calls_of_a_turn)]
    assert len(turns) == 6
    assert all(len(set(turn)) == 1 for turn in turns)


MEASURED = """
import torch
from benchmarks.timing import peak_memory
print(peak_memory(lambda: torch.ones(16 * 2**20).amax(), torch.device("cpu")))
"""


def test_peak_memory_sees_what_a_call_holds() -> None:
    """In a process of its own: what this one holds grows and shrinks with the tests before."""
    said = subprocess.run([sys.executable, "-W", "ignore", "-c", MEASURED], capture_output=True, text=True, check=True)
    assert 60e6 < int(said.stdout) < 90e6 if CLEAR_REFS.exists() else said.stdout == "None\n"
