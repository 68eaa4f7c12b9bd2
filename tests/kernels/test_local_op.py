"""`attend` as an operator: opcheck, gradcheck, torch.compile and activation checkpointing."""

import math

import pytest
import torch
from torch import Tensor

import attnmesh as am
from attnmesh.kernels.local_op import attend_backward_op, attend_op
from tests.support.truth.seeds import in_turn

pytestmark = pytest.mark.quick


def inputs(dtype: torch.dtype = torch.float32, grad: bool = True) -> list[Tensor]:
    return [torch.randn(2, h, 70, w, dtype=dtype, requires_grad=grad) for h, w in ((4, 8), (2, 8), (2, 6))]


MASK = (am.Causal() & am.Documents((30, 40))).to_code()
POSITIONS = torch.randperm(70)
ARGUMENTS = [
    ([None, None, torch.tensor([70, 20]), None], [1, *am.Full().to_code()], [0.3, 2.0], "auto"),
    ([None] * 4, [1, *MASK], [0.3, math.inf], "reference"),
    ([POSITIONS, POSITIONS, torch.tensor([0, 51]), None], [1, *MASK], [0.3, math.inf], "cpu"),
]
"""The tensors of what is visible, and the rest of it as numbers, logits and kernel."""


@pytest.mark.parametrize(
    ("rest", "sinks", "dtype"),
    [
        (rest, bool(number % 2), in_turn((torch.float32, torch.bfloat16), number // 2))
        for number, rest in enumerate(ARGUMENTS)
    ],
)
def test_the_operators_pass_opcheck(rest: tuple[object, ...], sinks: bool, dtype: torch.dtype) -> None:
    scaling = torch.randn(4, dtype=dtype, requires_grad=True) if sinks else None
    checks = torch.library.opcheck(attend_op, (*inputs(dtype), scaling, *rest))
    assert set(checks.values()) == {"SUCCESS"}
    q, k, v = inputs(dtype, grad=False)
    out, lse = attend_op(q, k, v, None, *rest)
    checks = torch.library.opcheck(attend_backward_op, (q, k, v, [out, lse, torch.randn_like(out)], *rest))
    assert set(checks.values()) == {"SUCCESS"}


@pytest.mark.parametrize("fast", [True, pytest.param(False, marks=pytest.mark.long)])
@pytest.mark.parametrize("rest", ARGUMENTS)
def test_the_gradients_pass_gradcheck(rest: tuple[object, ...], fast: bool) -> None:
    """Along random directions; element by element where there is time."""
    tensors = [x[:1, :, :, :3].detach().requires_grad_() for x in inputs(torch.float64)]
    sinks = torch.randn(4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda *x: attend_op(*x, *rest), (*tensors, sinks), fast_mode=fast)


@pytest.mark.parametrize(
    "mask", [pytest.param(am.Causal(), marks=pytest.mark.long), am.Window(9) & am.Documents((30, 40))]
)
def test_a_layer_compiles_to_one_graph_with_its_gradients(mask: am.Mask) -> None:
    sinks = torch.randn(4, requires_grad=True)

    def layer(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
        partial = am.attend(q * 2, k, v, mask=mask)
        merged = am.merge(partial, am.Partial(torch.zeros(1), sinks[:, None]))
        return merged.out + am.attention(q, k, v, mask=mask, sinks=sinks)

    tensors = [*inputs(), sinks]
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    expected, given = layer(*tensors), compiled(*tensors)
    torch.testing.assert_close(given, expected)
    ours, theirs = (torch.autograd.grad(out.sin().sum(), tensors) for out in (given, expected))
    torch.testing.assert_close(ours, theirs)


def test_masks_may_be_made_inside_a_compiled_function() -> None:
    q, k, v = (x.detach() for x in inputs())
    compiled = torch.compile(lambda n: am.attention(q, k, v, mask=am.Window(n)), fullgraph=True, backend="eager")
    for reach in (3, 4, 5):
        torch.testing.assert_close(compiled(reach), am.attention(q, k, v, mask=am.Window(reach)))


def test_unused_results_cost_nothing_and_change_nothing() -> None:
    tensors = inputs(torch.float64)
    partial = am.attend(*tensors)
    only_out = torch.autograd.grad(partial.out.sum(), tensors, retain_graph=True)
    both = torch.autograd.grad(partial.out.sum() + 0 * partial.lse.sum(), tensors)
    torch.testing.assert_close(only_out, both)


@pytest.mark.parametrize("create", [torch.utils.checkpoint.checkpoint])
def test_activation_checkpointing_gives_the_same_gradients(create: object) -> None:
    tensors = inputs()
    plain = torch.autograd.grad(am.attention(*tensors).sum(), tensors)
    again = torch.autograd.grad(create(am.attention, *tensors, use_reentrant=False).sum(), tensors)
    assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))


def test_out_is_contiguous_per_token() -> None:
    out = am.attend(*inputs()).out
    assert out.transpose(1, 2).is_contiguous()
