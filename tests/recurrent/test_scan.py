"""The scan of affine maps across ranks is the sequential fold, on any number of ranks, with its gradients."""

import math
import random

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import attnmesh as am
from attnmesh.mesh.axes import Axis
from attnmesh.recurrent.scan import scan
from attnmesh.runtime.counters import count_traffic
from tests.support.ranks.groups import group_of
from tests.support.ranks.pool import Pool, on_each_rank
from tests.support.truth.seeds import some

FORMS = ("scalar", "diagonal", "matrix")


def linear_shape(form: str, state: tuple[int, ...]) -> tuple[int, ...]:
    return {"scalar": state[:2], "diagonal": state[:3], "matrix": (*state[:3], state[2])}[form]


def element(seed: int, form: str, state: tuple[int, ...], dtype: torch.dtype = torch.float64) -> am.AffineMap:
    generator = torch.Generator().manual_seed(seed)
    linear, bias = (torch.randn(n, generator=generator, dtype=dtype) for n in (linear_shape(form, state), state))
    return am.AffineMap(linear.requires_grad_(), bias.requires_grad_())


def identity(like: am.AffineMap) -> am.AffineMap:
    linear, bias = like
    matrix = linear.ndim == bias.ndim
    eye = torch.eye(linear.shape[-1], dtype=linear.dtype).expand_as(linear) if matrix else torch.ones_like(linear)
    return am.AffineMap(eye, torch.zeros_like(bias))


def fold(elements: list[am.AffineMap]) -> list[am.AffineMap]:
    """The exclusive prefixes, one composition after another."""
    prefixes = [identity(elements[0])]
    for each in elements[:-1]:
        prefixes.append(each.after(prefixes[-1]))
    return prefixes


def loss(result: am.AffineMap, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 + seed)
    weights = [torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x.dtype) for x in result]
    return sum(((x * weight).sum() for x, weight in zip(result, weights, strict=True)), start=torch.zeros(()))


@on_each_rank
def scan_with_gradients(
    ranks: int, problems: list[tuple[int, str, tuple[int, ...], bool]]
) -> list[list[Tensor]] | None:
    """Prefix and gradients of each problem on this rank."""
    group, rank = group_of(ranks), dist.get_rank()
    if group is None:
        return None
    found = []
    for seed, form, state, reverse in problems:
        own = element(seed + rank, form, state)
        result = am.scan_across(*own, group, reverse=reverse)
        grads = torch.autograd.grad(loss(result, rank), tuple(own))
        found.append([x.detach() for x in (*result, *grads)])
    return found


def expected(ranks: int, seed: int, form: str, state: tuple[int, ...], reverse: bool) -> list[list[Tensor]]:
    elements = [element(seed + rank, form, state) for rank in range(ranks)]
    prefixes = fold(elements[::-1])[::-1] if reverse else fold(elements)
    total = torch.stack([loss(prefix, rank) for rank, prefix in enumerate(prefixes)]).sum()
    inputs = [x for each in elements for x in each]
    grads = torch.autograd.grad(total, inputs, allow_unused=True, materialize_grads=True) if ranks > 1 else ()
    grads = grads or tuple(torch.zeros_like(x) for x in inputs)
    return [[*prefixes[rank], *grads[2 * rank : 2 * rank + 2]] for rank in range(ranks)]


def check(pool: Pool, ranks: int, problems: list[tuple[int, str, tuple[int, ...], bool]]) -> None:
    results = [x for x in pool.run(8, scan_with_gradients, ranks, problems) if x is not None]
    assert len(results) == ranks
    for index, problem in enumerate(problems):
        for rank, tensors in enumerate(expected(ranks, *problem)):
            for got, right in zip(results[rank][index], tensors, strict=True):
                torch.testing.assert_close(got, right.detach())


@pytest.mark.parametrize("ranks", some(range(1, 9), 1, 2, 3, 8))
def test_the_scan_is_the_sequential_fold_with_its_gradients(pool: Pool, ranks: int) -> None:
    check(pool, ranks, [(7, form, (2, 3, 4, 5), reverse) for form in FORMS for reverse in (False, True)])


@pytest.mark.parametrize("number", [25, pytest.param(250, marks=pytest.mark.long)])
@pytest.mark.parametrize("ranks", some([2, 3, 5, 8], 2, 5))
def test_random_problems_agree_with_a_fold(pool: Pool, ranks: int, number: int) -> None:
    """Sizes of 1 are among them, and states without columns."""
    draw = random.Random(ranks)
    sizes = [tuple(draw.choice((1, 2, 3, 5)) for _ in range(3)) + (draw.choice((0, 1, 2, 4)),) for _ in range(number)]
    check(pool, ranks, [(i, draw.choice(FORMS), size, draw.random() < 0.5) for i, size in enumerate(sizes)])


@pytest.mark.parametrize("form", FORMS)
def test_composition_is_associative(form: str) -> None:
    one, two, three = (element(seed, form, (2, 2, 3, 4)) for seed in range(3))
    left, right = three.after(two).after(one), three.after(two.after(one))
    for x, y in zip(left, right, strict=True):
        torch.testing.assert_close(x, y)
    state = torch.randn(2, 2, 3, 4, dtype=torch.float64)
    torch.testing.assert_close(three(two(one(state))), left(state))


@on_each_rank
def step_along_a_direction(form: str) -> tuple[float, float]:
    """Difference of the loss of all ranks along a random direction, and what the gradients say."""
    own, rank = element(dist.get_rank(), form, (1, 2, 3, 2)), dist.get_rank()
    direction = element(50 + rank, form, (1, 2, 3, 2))

    def shifted(by: float) -> Tensor:
        moved = [(x + by * d).detach() for x, d in zip(own, direction, strict=True)]
        return loss(am.scan_across(*moved, dist.group.WORLD), rank)

    grads = torch.autograd.grad(loss(am.scan_across(*own, dist.group.WORLD), rank), tuple(own))
    slope = sum((g * d).sum() for g, d in zip(grads, direction, strict=True))
    both = torch.stack([(shifted(1e-5) - shifted(-1e-5)) / 2e-5, torch.as_tensor(slope)]).detach()
    dist.all_reduce(both)
    return float(both[0]), float(both[1])


@pytest.mark.parametrize("form", FORMS)
def test_gradients_are_those_of_differences(pool: Pool, form: str) -> None:
    for measured, said in pool.run(3, step_along_a_direction, form):
        assert measured == pytest.approx(said, rel=1e-6)  # central differences of 1e-5 in float64


@on_each_rank
def scan_with_resets(resets: list[int]) -> tuple[Tensor, Tensor]:
    """Return the state before this rank of eight, and the gradient of its bias.

    The bias of the first rank is NaN, and the gradient of the last one's state.
    """
    rank, axis = dist.get_rank(), Axis(8, dist.get_rank(), dist.group.WORLD)
    linear, bias = (x.detach() for x in element(rank, "matrix", (1, 2, 3, 2)))
    own = am.AffineMap(linear * (1 - resets[rank]), (bias * math.nan if rank == 0 else bias).requires_grad_())
    state = scan(own, axis, range(8), linear_needs_grad=False, resets=resets).bias
    return state.detach(), torch.autograd.grad(state.sum() * (math.nan if rank == 7 else 1), own.bias)[0]


@pytest.mark.parametrize("first", range(1, 8))
def test_nothing_is_computed_from_a_state_that_is_dropped(first: int, pool: Pool) -> None:
    second = (first + 5) % 8
    resets = [int(rank in (0, first, second)) for rank in range(8)]
    elements = [element(rank, "matrix", (1, 2, 3, 2)) for rank in range(8)]
    zero = torch.zeros(1, 2, 3, 2, dtype=torch.float64)
    states = []
    for rank in range(8):
        state = elements[rank - 1](states[-1]) if rank else zero
        states.append(elements[rank - 1].bias if rank and resets[rank - 1] else state)
    grads = torch.autograd.grad(torch.stack(states).sum(), [each.bias for each in elements], materialize_grads=True)
    for rank, (state, grad) in enumerate(pool.run(8, scan_with_resets, resets)):
        from_first = 0 < rank <= min(first, second or 8)
        to_last = max(r for r in range(7) if resets[r]) <= rank < 7
        torch.testing.assert_close(state, states[rank] * (math.nan if from_first else 1), equal_nan=True)
        torch.testing.assert_close(grad, grads[rank] * (math.nan if to_last else 1), equal_nan=True)


@on_each_rank
def differentiate_twice(form: str) -> list[Tensor]:
    own, rank = element(dist.get_rank(), form, (1, 2, 2, 2)), dist.get_rank()
    squared = loss(am.scan_across(*own, dist.group.WORLD), rank) ** 2  # gradients of the result depend on it
    grads = torch.autograd.grad(squared, tuple(own), create_graph=True)
    return list(torch.autograd.grad(sum((x * x).sum() for x in grads), tuple(own)))


@pytest.mark.parametrize("form", FORMS)
def test_gradients_have_gradients(pool: Pool, form: str) -> None:
    elements = [element(rank, form, (1, 2, 2, 2)) for rank in range(3)]
    total = torch.stack([loss(prefix, rank) ** 2 for rank, prefix in enumerate(fold(elements))]).sum()
    inputs = [x for each in elements for x in each]
    kept = {"allow_unused": True, "materialize_grads": True}
    grads = torch.autograd.grad(total, inputs, create_graph=True, **kept)
    expected = torch.autograd.grad(torch.stack([(x * x).sum() for x in grads]).sum(), inputs, **kept)
    for rank, found in enumerate(pool.run(3, differentiate_twice, form)):
        for got, right in zip(found, expected[2 * rank : 2 * rank + 2], strict=True):
            torch.testing.assert_close(got, right)


@on_each_rank
def count_received_bytes(ranks: int, form: str) -> tuple[int, int] | None:
    """Bytes received in the forward and in the backward pass."""
    group = group_of(ranks)
    if group is None:
        return None
    own = element(dist.get_rank(), form, (2, 3, 4, 5), torch.float32)
    with count_traffic() as forward:
        result = am.scan_across(*own, group, checked=False)
    with count_traffic() as backward:
        loss(result, 0).backward()
    return forward.bytes, backward.bytes


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("ranks", [2, 3, 4, 7, 8])
def test_a_round_receives_one_map_at_most(pool: Pool, ranks: int, form: str) -> None:
    sizes = [x for x in pool.run(8, count_received_bytes, ranks, form) if x is not None]
    linear, rounds = math.prod(linear_shape(form, (2, 3, 4, 5))), math.ceil(math.log2(ranks))
    extra = {"scalar": 6, "diagonal": 24, "matrix": 96}[form]  # the gradient of the linear part is scanned too
    rounds -= ranks == 3  # rank 1 receives in the first round alone, and rank 2 in the second
    assert max(forward for forward, _ in sizes) == rounds * 4 * (linear + 120)
    assert max(backward for _, backward in sizes) == rounds * 4 * (linear + 120 + extra)


def dtypes_of(dtype: torch.dtype) -> list[torch.dtype]:
    linear, bias = (x.detach().to(dtype) for x in element(0, "diagonal", (1, 2, 3, 4)))
    return [x.dtype for x in am.scan_across(linear, bias, None)]


def test_low_precision_is_scanned_in_float32() -> None:
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        assert dtypes_of(dtype) == [torch.float32] * 2
    assert dtypes_of(torch.float64) == [torch.float64] * 2
