"""Proofs of `attnmesh check`: each kernel against attention in float64, and the kernels that "auto" chooses."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from attnmesh.cache.cache import KVCache
from attnmesh.core.band import Band
from attnmesh.core.mask import Causal, Documents, Full, Mask, Window
from attnmesh.core.scaling import Scaling
from attnmesh.core.storage import STORAGES, Storage
from attnmesh.decoding.decode_call import decode
from attnmesh.kernels import choice
from attnmesh.kernels.kernel import Kernel, KernelRequest
from attnmesh.kernels.local import attend
from attnmesh.kernels.partials import energy

CASES: tuple[Mask, ...] = (Full(), Causal(), Window(40, 7), Causal() & Documents((150, 50, 100)))
"""Masks on 300 tokens, and on their last 3 queries: 6 query heads, 2 key heads of 32, values of 24."""

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)

LOGITS = Scaling(1.0)

LAW_TOLERANCE = 1e-14
"""Largest error of the energy law: 45 epsilons of float64, for sums of 300 terms."""


@dataclass(frozen=True)
class Proof:
    """Errors of a kernel relative to the largest true value, or `absent`: the reason why it is unsupported.

    The dtype may be that of a cache in 8 bits, which has no gradients.
    """

    kernel: str
    device: str
    dtype: str
    absent: str | None = None
    out_error: float | None = None
    gradient_error: float | None = None
    allowed: float | None = None
    is_elsewhere: bool = False
    """True for a kernel of other devices, such as those of GPUs on a CPU."""

    @property
    def holds(self) -> bool:
        """True if the errors are allowed, and for an unsupported kernel."""
        errors = [error for error in (self.out_error, self.gradient_error) if error is not None]
        return self.absent is not None or (bool(errors) and all(error <= (self.allowed or 0.0) for error in errors))


def devices() -> list[torch.device]:
    """Return the CPU, and the current GPU if PyTorch sees one."""
    gpus = [torch.device("cuda", torch.cuda.current_device())] if torch.cuda.is_available() else []
    return [torch.device("cpu"), *gpus]


def proofs() -> Iterator[Proof]:
    """Yield the proof of every kernel in every dtype on every device."""
    for device in devices():
        for kernel in choice.KERNELS:
            yield from (_proof(kernel, device, dtype) for dtype in DTYPES)
            yield from (_quantized_proof(kernel, device, storage) for storage in STORAGES.values())


@torch.no_grad()
def _error(given: Tensor, expected: Tensor) -> float:
    return float((given.double() - expected).abs().max() / expected.abs().max())


def _worst(errors: Iterable[float]) -> float:
    """Return the largest error, NaN if one is: Python's `max` drops a NaN that is not the first."""
    return float(torch.tensor([*errors], dtype=torch.float64, device="cpu").max())


@dataclass(frozen=True)
class Choice:
    """Kernels that "auto" chooses on a device, in a dtype: for plain blocks, masked blocks, and a decode step."""

    device: str
    dtype: str
    plain: str
    masked: str
    decoding: str


def choices() -> Iterator[Choice]:
    """Yield the choices for heads of 128, four query heads per key head."""
    for device in devices():
        for dtype in DTYPES:
            q, k = (torch.zeros(1, heads, 256, 128, device=device, dtype=dtype) for heads in (4, 1))
            plain, masked = (_choose_name(q, k, mask) for mask in (Causal(), Window(40)))
            name = str(dtype).removeprefix("torch.")
            step = KernelRequest.of(q[:, :, -1:], k, k, LOGITS)._replace(cached=True)
            yield Choice(device.type, name, plain, masked, choice.choose(step).name)


def _choose_name(q: Tensor, k: Tensor, mask: Mask) -> str:
    """Return the name of the kernel, or of PyTorch's CUDA operator."""
    kernel = choice.choose(KernelRequest.of(q, k, k, LOGITS))
    (rectangle, *_) = kernel.cut(Band.of(mask, torch.arange(q.shape[2], device="cpu"), k.shape[2]), q, k, k)
    return kernel.operator_name(*rectangle.slices(q, k, k), rectangle)


def law_error() -> float:
    """Return the error of the reference in float64 against gradients of the energy: the reference is checked first."""
    q, k, v, dout = _problem(torch.float64, torch.device("cpu"), 300)
    source = torch.zeros_like(dout, requires_grad=True)
    (out,) = torch.autograd.grad(energy(q, k, v, source).sum(), source, create_graph=True)
    expected = (out, *torch.autograd.grad(out, (q, k, v), dout))
    return _worst(map(_error, _outputs([q, k, v, dout], Full(), "reference"), expected))


def _proof(kernel: Kernel, device: torch.device, dtype: torch.dtype) -> Proof:
    names = (kernel.name, device.type, str(dtype).removeprefix("torch."))
    q, k, v, _ = _problem(dtype, device, 300)
    if (reason := kernel.refusal(KernelRequest.of(q, k, v, LOGITS))) is not None:
        return Proof(*names, absent=reason, is_elsewhere=kernel.is_elsewhere(device))
    errors = [_errors(kernel.name, device, dtype, mask, queries) for mask in CASES for queries in (300, 3)]
    # Half precision rounds the weights, the result and its copy for the backward pass. In float32 and float64 sums of
    # hundreds of terms dominate.
    allowed = torch.finfo(dtype).eps * (4 if dtype.itemsize == 2 else 64)
    out_error, gradient_error = map(_worst, zip(*errors, strict=True))
    return Proof(*names, out_error=out_error, gradient_error=gradient_error, allowed=allowed)


def _quantized_proof(kernel: Kernel, device: torch.device, storage: Storage) -> Proof:
    """Return the proof of decoding from a cache in 8 bits: attention in float64 over the numbers that it stores."""
    names = (kernel.name, device.type, storage.name)
    q, k, v, _ = (x.detach() for x in _problem(torch.float32, device, 3))
    if (reason := kernel.refusal(KernelRequest.of(q, k, v, LOGITS))) is not None:
        return Proof(*names, absent=reason, is_elsewhere=kernel.is_elsewhere(device))
    numbers = [storage.dequantize(storage.quantize(x.cpu()), torch.float64) for x in (k, v)]
    errors = []
    for mask in (Causal(), Window(40, 7)):
        sizes = {"batch": 2, "kv_heads": 2, "head_dim": 32, "value_dim": 24, "capacity": 300, "storage": storage.name}
        cache = KVCache(None, device=device, dtype=torch.float32, **sizes)  # type: ignore[arg-type]
        cache.append(k, v)
        positions = torch.arange(300, device="cpu")
        operands = (q.cpu().double(), *numbers)
        truth = attend(*operands, mask=mask, q_positions=positions[-3:], k_positions=positions, kernel="reference").out
        errors.append(_error(decode(q, cache, mask=mask, kernel=kernel.name).cpu(), truth))
    return Proof(*names, out_error=_worst(errors), allowed=torch.finfo(torch.float32).eps * 64)


def _errors(kernel: str, device: torch.device, dtype: torch.dtype, mask: Mask, queries: int) -> tuple[float, float]:
    """Return the error of out, and that of the worst gradient."""
    problem = _problem(dtype, device, queries)
    exact = [x.detach().cpu().double().requires_grad_() for x in problem[:3]]
    ours = _outputs(problem, mask, kernel)
    truth = _outputs([*exact, problem[3].cpu().double()], mask, "reference")
    out_error, *errors = (_error(x.cpu(), other) for x, other in zip(ours, truth, strict=True))
    return out_error, _worst(errors)


def _outputs(problem: list[Tensor], mask: Mask, kernel: str) -> tuple[Tensor, ...]:
    """Return out and the gradients of q, k and v."""
    q, k, v, dout = problem
    keys = torch.arange(k.shape[2], device="cpu")
    out = attend(q, k, v, mask=mask, q_positions=keys[-q.shape[2] :], k_positions=keys, kernel=kernel).out
    return out.detach(), *torch.autograd.grad(out, (q, k, v), dout)


def _problem(dtype: torch.dtype, device: torch.device, queries: int) -> list[Tensor]:
    """Return q, k, v and dout from a fixed seed."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, 6, queries, 32), (2, 2, 300, 32), (2, 2, 300, 24), (2, 6, queries, 24))
    tensors = [torch.randn(shape, generator=generator, dtype=dtype, device="cpu").to(device) for shape in shapes]
    return [*(x.requires_grad_() for x in tensors[:3]), tensors[3]]
