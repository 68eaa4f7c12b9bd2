"""`attnmesh check`: what is on this machine, and each kernel proved against attention in float64."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from attnmesh.core.energy import energy
from attnmesh.core.mask import Band, Causal, Documents, Full, Mask, Window
from attnmesh.kernels.attend import attend
from attnmesh.kernels.cuda import CUDA, operator_name
from attnmesh.kernels.driver import Kernel
from attnmesh.kernels.select import KERNELS, choose, choose_for_cache

CASES: tuple[Mask, ...] = (Full(), Causal(), Window(40, 7), Causal() & Documents((150, 50, 100)))
"""Each on 300 tokens, and on 3 queries at the end of them: 6 query heads on 2 key heads of 32, values of 24."""

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


LAW = 1e-14
"""What the law may be off by: 45 epsilons of float64, for sums of 300 terms."""


@dataclass(frozen=True)
class Proof:
    """One kernel in one dtype on one device: its errors relative to the largest true value, or why it is not here."""

    kernel: str
    device: str
    dtype: str
    absent: str | None = None
    out_error: float | None = None
    gradient_error: float | None = None
    allowed: float | None = None

    @property
    def holds(self) -> bool:
        """Whether nothing is wrong; an absent kernel is not wrong."""
        errors = (self.out_error, self.gradient_error)
        return self.absent is not None or all(e is not None and e <= (self.allowed or 0.0) for e in errors)


def devices() -> list[torch.device]:
    """The CPU, and the GPU if PyTorch sees one."""
    return [
        torch.device("cpu"),
        *([torch.device("cuda", torch.cuda.current_device())] if torch.cuda.is_available() else []),
    ]


def proofs() -> Iterator[Proof]:
    """Every kernel in every dtype on every device, proved when asked for."""
    for device in devices():
        for kernel in KERNELS:
            yield from (_proof(kernel, device, dtype) for dtype in DTYPES)


@torch.no_grad()
def _error(given: Tensor, expected: Tensor) -> float:
    return float((given.double() - expected).abs().max() / expected.abs().max())


@dataclass(frozen=True)
class Choice:
    """What kernel="auto" comes to on a device, in a dtype: for plain blocks, masked ones, and a step of decoding."""

    device: str
    dtype: str
    plain: str
    masked: str
    decoding: str


def choices() -> Iterator[Choice]:
    """The kernels that serve heads of 128, four query heads on a key head."""
    for device in devices():
        for dtype in DTYPES:
            q, k = (torch.zeros(1, heads, 256, 128, device=device, dtype=dtype) for heads in (4, 1))
            plain, masked = (_taken(q, k, mask) for mask in (Causal(), Window(40)))
            name = str(dtype).removeprefix("torch.")
            yield Choice(device.type, name, plain, masked, choose_for_cache("auto", q, k, k).name)


def _taken(q: Tensor, k: Tensor, mask: Mask) -> str:
    """The kernel, or of PyTorch's for CUDA the operator."""
    kernel = choose("auto", q, k, k)
    if not isinstance(kernel, CUDA):
        return kernel.name
    (block, *_) = kernel.cut(Band.of(mask, torch.arange(q.shape[2]), k.shape[2]), q, k, k)
    return operator_name(q[:, :, block.queries], k[:, :, block.keys], k[:, :, block.keys], block)


def law_error() -> float:
    """How far the reference in float64, with its gradients, is from the energy's: that the yardstick is straight."""
    q, k, v, dout = _problem(torch.float64, torch.device("cpu"), 300)
    source = torch.zeros_like(dout, requires_grad=True)
    (out,) = torch.autograd.grad(energy(q, k, v, source).sum(), source, create_graph=True)
    expected = (out, *torch.autograd.grad(out, (q, k, v), dout))
    return max(map(_error, _answers([q, k, v, dout], Full(), "reference"), expected))


def _proof(kernel: Kernel, device: torch.device, dtype: torch.dtype) -> Proof:
    names = (kernel.name, device.type, str(dtype).removeprefix("torch."))
    reason = kernel.unsupported_reason(*_problem(dtype, device, 300)[:3])
    if reason is not None:
        return Proof(*names, absent=reason)
    errors = [_errors(kernel.name, device, dtype, mask, rows) for mask in CASES for rows in (300, 3)]
    # In half precision the weights, the result and what the backward pass reads of it are each rounded; in float32 and
    # float64 so are sums of hundreds of terms.
    allowed = torch.finfo(dtype).eps * (4 if dtype.itemsize == 2 else 64)
    out_error, gradient_error = (max(error) for error in zip(*errors, strict=True))
    return Proof(*names, out_error=out_error, gradient_error=gradient_error, allowed=allowed)


def _errors(kernel: str, device: torch.device, dtype: torch.dtype, mask: Mask, rows: int) -> tuple[float, float]:
    """Of out, and of the worst gradient."""
    given = _problem(dtype, device, rows)
    exact = [x.detach().cpu().double().requires_grad_() for x in given[:3]]
    ours = _answers(given, mask, kernel)
    truth = _answers([*exact, given[3].cpu().double()], mask, "reference")
    out_error, *errors = (_error(one.cpu(), other) for one, other in zip(ours, truth, strict=True))
    return out_error, max(errors)


def _answers(problem: list[Tensor], mask: Mask, kernel: str) -> tuple[Tensor, ...]:
    """Out and the gradients of q, k and v."""
    q, k, v, dout = problem
    length = k.shape[2]
    out = attend(
        q,
        k,
        v,
        mask=mask,
        q_positions=torch.arange(length - q.shape[2], length),
        k_positions=torch.arange(length),
        kernel=kernel,
    ).out
    return out.detach(), *torch.autograd.grad(out, (q, k, v), dout)


def _problem(dtype: torch.dtype, device: torch.device, rows: int) -> list[Tensor]:
    """q, k, v and dout, always the same."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, 6, rows, 32), (2, 2, 300, 32), (2, 2, 300, 24), (2, 6, rows, 24))
    tensors = [torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes]
    return [*(x.requires_grad_() for x in tensors[:3]), tensors[3]]
