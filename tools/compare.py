"""Comparison of the ranks' results with those of stock transformers on one process."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tests.support.models.checks import Result

TOLERANCES = {torch.float64: 5e-5, torch.float32: 2e-3}
"""Largest relative error by dtype. transformers computes norms and rotary angles in float32, also in float64 models."""


@dataclass(frozen=True)
class Verdict:
    """Verdict on a result, with the relative error and a note."""

    right: bool
    error: float
    note: str = ""


def compare_generation(expected: Result, given: Sequence[Result]) -> Verdict:
    """Return the verdict on the worst rank's tokens."""
    compare = _compare_logits if expected.scores is None else _compare_scores
    verdicts = (compare(expected, result) for result in given)
    return max(verdicts, key=lambda verdict: (not verdict.right, verdict.error))


def _compare_logits(expected: Result, given: Result) -> Verdict:
    """Compare logits up to the first token that differs, as a near-tie of two logits may choose either token."""
    stock_logits, logits = _some(expected.logits), _some(given.logits)
    stock_tokens, tokens = _some(expected.tokens), _some(given.tokens)
    if stock_tokens.shape != tokens.shape:
        return Verdict(False, float("inf"), f"tokens {tuple(tokens.shape)}, not {tuple(stock_tokens.shape)}")
    same = (stock_tokens == tokens).long().cumprod(1)
    same_prefix = torch.nn.functional.pad(same, (1, 0), value=1)[:, :-1].bool()
    gaps = (stock_logits - logits).abs().amax(-1)[same_prefix].nan_to_num(float("inf"))
    error = float(gaps.max()) / max(1.0, float(stock_logits.abs().max()))
    differ = int((same == 0).sum())
    note = f"{differ} of {same.numel()} tokens differ" if differ else ""
    return Verdict(error <= TOLERANCES[expected.dtype], error, note)


def _compare_scores(expected: Result, given: Result) -> Verdict:
    """Compare the scores of beams. Other tokens with the same scores are right."""
    stock_scores, scores = _some(expected.scores), _some(given.scores)
    if stock_scores.shape != scores.shape:
        return Verdict(False, float("inf"), f"{len(scores)} sequences, not {len(stock_scores)}")
    gaps = (stock_scores - scores).abs().nan_to_num(float("inf"))
    error = float((gaps / stock_scores.abs().clamp(min=1)).max())
    same = torch.equal(_some(expected.tokens), _some(given.tokens))
    return Verdict(error <= TOLERANCES[expected.dtype], error, "" if same else "other beams")


def _some(x: Tensor | None) -> Tensor:
    """Return a tensor that the check has."""
    assert x is not None
    return x


def compare_training(expected: Result, given: Sequence[Result]) -> Verdict:
    """Compare the mean of the ranks' losses, and the mean of their gradients of every weight."""
    loss = sum(result.loss for result in given) / len(given)
    errors = {"loss": abs(loss - expected.loss) / max(1.0, abs(expected.loss))}
    largest = float(torch.stack([x.abs().max().double() for x in expected.gradients.values() if x.numel()]).max())
    for name in sorted({name for result in (expected, *given) for name in result.gradients}):
        errors[name] = _gradient_error(name, expected, given, largest)
    worst = max(errors, key=lambda name: errors[name])
    wrong = [name for name, error in errors.items() if not error <= TOLERANCES[expected.dtype]]
    note = f"loss off by {errors['loss']:.0e}, {len(wrong)} of {len(errors)} off, most {worst}" if wrong else ""
    return Verdict(not wrong, errors[worst], note)


def _gradient_error(name: str, expected: Result, given: Sequence[Result], largest: float) -> float:
    """Return the error of a mean gradient, relative to the weight's largest or 1% of the model's largest gradient."""
    parts = [result.gradients[name] for result in given if name in result.gradients]
    reference = expected.gradients.get(name)
    reference = torch.zeros_like(parts[0]) if reference is None else reference
    if not reference.numel():
        return 0.0
    gap = float((sum(parts, torch.zeros_like(reference)) / len(given) - reference).abs().nan_to_num(float("inf")).max())
    return gap / float(reference.abs().max().clamp(min=largest / 100))
