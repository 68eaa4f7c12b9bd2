"""Inputs at the edges of what numbers can hold, and the errors that they make: `python -m tools.numbers`."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

import attnmesh as am
from attnmesh.core.partial import Partial, merge_partials
from tests.support.truth.dense import ROUNDINGS, truth

KEYS = 10_000_000
HALF = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Case:
    """q, k, v and a scale at some edge, in one dtype."""

    name: str
    dtype: torch.dtype
    make: Callable[[Callable[..., Tensor]], tuple[Tensor, Tensor, Tensor, float]]

    def shares(self, kernel: str) -> dict[str, float]:
        """Return by name the share of its allowance that the worst element takes."""
        generator = torch.Generator().manual_seed(0)
        *tensors, scale = self.make(lambda *shape: torch.randn(*shape, generator=generator))
        inputs = [x.to(self.dtype).requires_grad_() for x in tensors]
        out, lse = am.attend(*inputs, mask=am.Causal(), scale=scale, kernel=kernel)
        dout = torch.randn(out.shape, generator=generator).to(self.dtype)
        gradients = torch.autograd.grad((out * dout).sum(), inputs)
        given = dict(zip(("out", "lse", "dq", "dk", "dv"), (out, lse, *gradients), strict=True))
        visible = torch.ones(out.shape[2], out.shape[2]).tril().bool()
        expected = truth(inputs, visible, scale, dout)
        return {name: expected.check(name, x, self) for name, x in given.items()}


def cases() -> Iterator[Case]:
    """Return all cases."""
    for dtype in (torch.float64, torch.float32, *HALF):
        tiny, most = torch.finfo(dtype).tiny, min(torch.finfo(dtype).max, 1e30)
        yield Case("logits up to 10,000", dtype, lambda draw: (*_heads(draw, 50.0, 50.0, 1.0), 1.0))
        yield Case("all logits alike", dtype, lambda draw: (*_heads(draw, 0.0, 1.0, 1.0), 1.0))
        yield Case(
            "values near the largest", dtype, lambda draw, most=most: (*_heads(draw, 1.0, 1.0, most / 8), 16**-0.5)
        )
        yield Case("values that are denormal", dtype, lambda draw, tiny=tiny: (*_heads(draw, 1.0, 1.0, tiny), 16**-0.5))
        yield Case(
            "queries that are denormal", dtype, lambda draw, tiny=tiny: (*_heads(draw, tiny, 1.0, 1.0), 16**-0.5)
        )


def _heads(draw: Callable[..., Tensor], q: float, k: float, v: float) -> tuple[Tensor, Tensor, Tensor]:
    shapes = (1, 4, 130, 16), (1, 2, 130, 16), (1, 2, 130, 16)
    one, two, three = (draw(*shape).clamp(-4, 4).double() * size for shape, size in zip(shapes, (q, k, v), strict=True))
    return one, two, three


def far_apart() -> float:
    """Merges of partials whose lse differ by up to 8,000: the largest relative error of out, and of lse."""
    generator = torch.Generator().manual_seed(0)
    errors = []
    for distance in (0.0, 1.0, 80.0, 90.0, 700.0, 2000.0):
        lses = torch.randn(5, 1, 2, 40, generator=generator) + distance * torch.arange(5.0)[:, None, None, None]
        partials = Partial(torch.randn(5, 1, 2, 40, 8, generator=generator), lses)
        given = merge_partials([Partial(*each) for each in zip(*partials, strict=True)])
        exact = merge_partials([Partial(out.double(), lse.double()) for out, lse in zip(*partials, strict=True)])
        errors += [_relative(given.out, exact.out), _relative(given.lse, exact.lse)]
    return float(torch.tensor(errors, dtype=torch.float64).max())  # Python's max drops a NaN


def many_keys(dtype: torch.dtype, keys: int = KEYS, piece: int = 20_000) -> tuple[float, float]:
    """Attention over `keys` keys, a partial for each `piece` of them: the relative errors of out and of lse."""
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(1, 2, 1, 8, generator=generator).to(dtype)
    partials, top = [], (torch.zeros(1, 2, 1, 8).double(), torch.full((1, 2, 1), -torch.inf).double())
    for _ in range(keys // piece):
        k, v = (torch.randn(1, 1, piece, 8, generator=generator).to(dtype) for _ in range(2))
        v = v + 1  # without it the mean of all values would be nothing but rounding
        out, lse = am.attend(q, k, v)
        partials.append(Partial(out.float() if dtype != torch.float64 else out, lse))
        logits = (q.double() @ k.double().mT) * 8**-0.5
        top = tuple(merge_partials([Partial(*top), Partial(logits.softmax(-1) @ v.double(), logits.logsumexp(-1))]))  # type: ignore
    given = merge_partials(partials)
    return _relative(given.out, top[0]), _relative(given.lse, top[1])


def _relative(given: Tensor, expected: Tensor) -> float:
    finite = torch.isfinite(expected)
    if not finite.any() or not expected[finite].abs().amax():
        return float((given.double()[finite] - expected[finite]).abs().sum())
    return float((given.detach().double() - expected)[finite].abs().amax() / expected[finite].abs().amax())


def main() -> None:
    """The table, as the documentation has it: errors in roundings of the sums of absolute terms."""
    print("| inputs | dtype | out | lse | dq | dk | dv |\n|---|---|---|---|---|---|---|")
    for case in cases():
        figures = " | ".join(f"{ROUNDINGS * share:.1f}" for share in case.shares("auto").values())
        print(f"| {case.name} | {str(case.dtype).removeprefix('torch.')} | {figures} |")
    for dtype in (torch.float32, torch.bfloat16):
        out, lse = many_keys(dtype)
        out, lse = out / torch.finfo(dtype).eps, lse / torch.finfo(torch.float32).eps
        name = str(dtype).removeprefix("torch.")
        print(f"| {KEYS:,} keys by 500 partials | {name} | {out:.1f} | {lse:.1f} | | | |")
    apart = far_apart() / torch.finfo(torch.float32).eps
    print(f"| merges of partials whose lse are up to 8,000 apart | float32 | {apart:.1f} | | | | |")


if __name__ == "__main__":
    main()
