"""Judgement on what ranks made, held against what stock transformers made on one process."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tests.tools.checks import Made

TOLERANCES = {torch.float64: 5e-5, torch.float32: 2e-3}
"""By the largest number compared: norms and rotary angles are float32 in transformers, whatever the model's dtype."""


@dataclass(frozen=True)
class Judged:
    """A judgement: whether what was made is right, the size of the error, and what is to be said of it."""

    right: bool
    error: float
    note: str = ""


def judge_generation(expected: Made, given: Sequence[Made]) -> Judged:
    """Judge by the worst rank's tokens."""
    judge = _judge_logits if expected.scores is None else _judge_scores
    return max((judge(expected, made) for made in given), key=lambda judged: (not judged.right, judged.error))


def _judge_logits(expected: Made, given: Made) -> Judged:
    """Hold logits against each other until a near-tie of them makes one choose another token, and no longer."""
    assert expected.tokens is not None
    assert given.tokens is not None
    assert expected.logits is not None
    assert given.logits is not None
    if expected.tokens.shape != given.tokens.shape:
        return Judged(False, float("inf"), f"tokens {tuple(given.tokens.shape)}, not {tuple(expected.tokens.shape)}")
    same = (expected.tokens == given.tokens).long().cumprod(1)
    alike = torch.nn.functional.pad(same, (1, 0), value=1)[:, :-1].bool()  # steps after the same tokens
    gaps = (expected.logits - given.logits).abs().amax(-1)[alike].nan_to_num(float("inf"))
    error = float(gaps.max()) / max(1.0, float(expected.logits.abs().max()))
    differ = int((same == 0).sum())
    note = f"{differ} of {same.numel()} tokens differ" if differ else ""
    return Judged(error <= TOLERANCES[expected.dtype], error, note)


def _judge_scores(expected: Made, given: Made) -> Judged:
    """Hold the beams' tokens against each other; others will do if their scores are as good."""
    assert expected.tokens is not None
    assert given.tokens is not None
    assert expected.scores is not None
    assert given.scores is not None
    if expected.scores.shape != given.scores.shape:
        return Judged(False, float("inf"), f"{len(given.scores)} sequences, not {len(expected.scores)}")
    gaps = (expected.scores - given.scores).abs().nan_to_num(float("inf"))
    error = float((gaps / expected.scores.abs().clamp(min=1)).max())
    same = torch.equal(expected.tokens, given.tokens)
    return Judged(error <= TOLERANCES[expected.dtype], error, "" if same else "other beams")


def judge_training(expected: Made, given: Sequence[Made]) -> Judged:
    """Judge the mean of the ranks' losses, and that of their gradients of every weight."""
    loss = sum(made.loss for made in given) / len(given)
    errors = {"loss": abs(loss - expected.loss) / max(1.0, abs(expected.loss))}
    largest = max(float(x.abs().max()) for x in expected.gradients.values() if x.numel())
    for name in sorted({name for made in (expected, *given) for name in made.gradients}):
        errors[name] = _gradient_error(name, expected, given, largest)
    worst = max(errors, key=lambda name: errors[name])
    wrong = [name for name, error in errors.items() if not error <= TOLERANCES[expected.dtype]]
    note = f"loss off by {errors['loss']:.0e}, {len(wrong)} of {len(errors)} off, most {worst}" if wrong else ""
    return Judged(not wrong, errors[worst], note)


def _gradient_error(name: str, expected: Made, given: Sequence[Made], largest: float) -> float:
    """Measure how far the mean is off, by that weight's largest gradient or a hundredth of the largest of all."""
    parts = [made.gradients[name] for made in given if name in made.gradients]
    truth = expected.gradients.get(name)
    truth = torch.zeros_like(parts[0]) if truth is None else truth
    if not truth.numel():
        return 0.0
    gap = float((sum(parts, torch.zeros_like(truth)) / len(given) - truth).abs().nan_to_num(float("inf")).max())
    return gap / max(float(truth.abs().max()), largest / 100)
