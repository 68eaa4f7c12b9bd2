"""Random problems and histories of caches on emulated GPUs and NCCL, held against float64."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.support.emulation.emulated_nccl import BACKENDS, world
from tests.support.emulation.emulated_problems import Ranks, run_on_gpu
from tests.support.truth import histories
from tests.support.truth.mesh_problems import MeshProblem, check, draw, draw_selected
from tests.support.truth.seeds import in_turn, seeds

SIZES = 2, 3, 4
PROBLEMS, SELECTIONS, HISTORIES = (2, 3, 6), (2, 7), (1, 4, 6)
"""Short ones on two to four ranks, with each backend, each kernel and each value of `checked`."""


def problem_of(seed: int) -> tuple[MeshProblem, str]:
    """Return the problem of a seed, no longer than the interpreter is quick, and the kernel that serves it."""
    problem = draw(seed, SIZES[seed % len(SIZES)])
    kernel = in_turn(("auto", "triton", "reference"), seed // len(SIZES))
    return problem, "auto" if problem.dtype == torch.float64 else kernel


@pytest.mark.parametrize("seed", seeds(PROBLEMS, 120))
def test_random_problems_agree_with_float64(seed: int):
    problem, kernel = problem_of(seed)
    backend = in_turn(BACKENDS, seed)
    checked = in_turn((None, False, True), seed % 5)
    outcome = world(problem.shape.ranks, run_on_gpu, problem, kernel, checked, backend=backend)
    check(problem, outcome.results())


@pytest.mark.parametrize("seed", seeds(SELECTIONS, 120))
def test_random_selections_agree_with_float64(seed: int):
    problem = draw_selected(seed, SIZES[seed % len(SIZES)])
    checked = in_turn((None, False), seed)
    outcome = world(problem.shape.ranks, run_on_gpu, problem, "auto", checked, backend=in_turn(BACKENDS, seed))
    check(problem, outcome.results())


@pytest.mark.parametrize("seed", seeds(HISTORIES, 120))
def test_random_histories_agree_with_float64(seed: int, tmp_path: Path):
    history = histories.draw(seed, sizes=SIZES, kernel="auto", most=8)
    history = replace(history, phases=history.phases[:1])  # saves have threads, in which no GPU is emulated
    histories.check(history, Ranks(in_turn(BACKENDS, seed)), tmp_path)
