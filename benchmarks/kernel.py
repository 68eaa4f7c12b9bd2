"""`python -m benchmarks kernel`: one device's kernels beside PyTorch's SDPA and the read rate of memory."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa

import attnmesh as am
from attnmesh.core.mask import Mask
from attnmesh.core.storage import STORAGES
from benchmarks.timing import Call, Comparison, Timing, peak_memory, race

Heads = tuple[Tensor, Tensor, Tensor]

MASKS = {
    "window of 256": am.Window(256),
    "16 documents": am.Causal() & am.Documents([1024] * 16),
}

MANY = 100
"""Calls in a row, where one is too short to be timed."""


@dataclass(frozen=True)
class Memory:
    """Peak extra megabytes of one call, at three lengths; None where they are unknown."""

    case: str
    lengths: tuple[int, ...]
    megabytes: tuple[float | None, ...]


def rows(device: torch.device) -> Iterator[Comparison]:
    """Yield every comparison when it is measured; the goals are those of a CPU."""
    limits = Limits.on(device)
    for case in DECODING:
        for dtype, goal in zip((torch.float32, torch.bfloat16), case.goals, strict=True):
            yield _decode(device, dtype, goal, case, limits)
    yield from (_stored(device, storage, limits) for storage in STORAGES)
    del limits
    yield from _small(device)
    for dtype in (torch.float32, torch.bfloat16):
        yield from _prefill(device, dtype)
    for dtype in (torch.float32, torch.bfloat16):
        yield from _capped(device, dtype)
    for (name, mask), goal in zip(MASKS.items(), (8.0, 6.0), strict=True):
        yield from _sparse(device, name, mask, goal)


def memory(device: torch.device) -> Iterator[Memory]:
    """Yield the peak extra memory of masked calls, forward and backward; it should grow linearly with the length."""
    lengths = (16_384, 32_768, 65_536)
    for name in MASKS:
        peaks = [_peak(_heads(device, torch.float32, length), _stretched(name, length)) for length in lengths]
        yield Memory(
            f"{name}, forward + backward", lengths, tuple(None if p is None else round(p / 1e6, 1) for p in peaks)
        )


class Limits(NamedTuple):
    """Tensors that are read, and multiplied, at the rates that bound a decode step."""

    read: Tensor
    factor: Tensor

    @staticmethod
    def on(device: torch.device) -> "Limits":
        """Return 512 MB to read, and a matrix of 1,024 x 1,024 to multiply with itself."""
        return Limits(torch.ones(1 << 27, device=device), torch.randn(1024, 1024, device=device))

    @property
    def calls(self) -> dict[str, Call]:
        """The two operations, to be timed beside a step."""
        return {"read": self.read.amax, "product": lambda: self.factor @ self.factor}

    def milliseconds(self, size: int, flops: int, timings: dict[str, Timing]) -> float:
        """Return how long a step takes at least that reads so many bytes and computes so much."""
        products = 2 * len(self.factor) ** 3
        return max(size / self.read.nbytes * timings["read"].median, flops / products * timings["product"].median)


class Decoding(NamedTuple):
    """A decode step: heads, query rows, keys, columns of keys and values, and the ratios to reach in two dtypes."""

    name: str
    q_heads: int
    kv_heads: int
    rows: int
    keys: int
    width: int
    value_width: int
    goals: tuple[float | None, float | None]


DECODING = (
    Decoding("32/8 heads of 128", 32, 8, 1, 65_536, 128, 128, (5.0, 15.0)),
    Decoding("32 heads of 128", 32, 32, 1, 16_384, 128, 128, (None, None)),
    Decoding("32/8 heads of 128, 4 queries", 32, 8, 4, 65_536, 128, 128, (None, None)),
    Decoding("32 heads on a latent of 512 + 64", 32, 1, 1, 16_384, 576, 512, (None, None)),
    Decoding("32/8 heads of 128", 32, 8, 1, 1_024, 128, 128, (None, None)),
)


def _decode(device: torch.device, dtype: torch.dtype, goal: float | None, case: Decoding, limits: Limits) -> Comparison:
    """Return decoding beside SDPA, and its share of the limit: the time to read the keys, or to multiply with them."""
    _, q_heads, kv_heads, queries, length, width, value_width, _ = case
    q = torch.randn(1, q_heads, queries, width, device=device, dtype=dtype)
    k = torch.randn(1, kv_heads, length, width, device=device, dtype=dtype)
    latent = value_width < width  # values are columns of the keys
    v = k[..., :value_width] if latent else torch.randn_like(k)
    name = f"decode {_name(dtype)}: {case.name}, {length:,} keys"
    calls: dict[str, Call] = {"SDPA": lambda: sdpa(q, k, v, enable_gqa=True), "ours": lambda: am.attend(q, k, v)}
    timings = race(calls | limits.calls, device)
    size = k.nbytes if latent else k.nbytes + v.nbytes
    flops = 2 * q_heads * queries * length * (width + value_width)
    ours = timings["ours"]
    share = limits.milliseconds(size, flops, timings) / ours.median
    return Comparison(name, "SDPA", timings["SDPA"], ours, _goal(goal, device), size / ours.median / 1e6, share)


def _stored(device: torch.device, storage: str, limits: Limits) -> Comparison:
    """Return a step on a cache in 8 bits beside one in bfloat16, and its share of the limit."""
    _, q_heads, kv_heads, queries, length, width, _, _ = case = DECODING[0]
    q = torch.randn(1, q_heads, queries, width, device=device, dtype=torch.bfloat16)
    sizes = {"batch": 1, "kv_heads": kv_heads, "head_dim": width, "capacity": length, "dtype": q.dtype}
    plain, stored = (am.KVCache(None, device=device, storage=x, **sizes) for x in (None, storage))  # type: ignore[arg-type]
    for _ in range(0, length, length // 8):
        k, v = torch.randn(2, 1, kv_heads, length // 8, width, device=device, dtype=q.dtype)
        for cache in (plain, stored):
            cache.append(k, v)
    calls: dict[str, Call] = {"bfloat16": lambda: am.decode(q, plain), "ours": lambda: am.decode(q, stored)}
    timings = race(calls | limits.calls, device)
    ours, flops = timings["ours"], 4 * q_heads * queries * length * width
    share = limits.milliseconds(stored.nbytes, flops, timings) / ours.median
    name, goal = f"decode {storage}: {case.name}, {length:,} keys", _goal(1.54, device)
    return Comparison(name, "bfloat16", timings["bfloat16"], ours, goal, stored.nbytes / ours.median / 1e6, share)


def _small(device: torch.device) -> Iterator[Comparison]:
    """Yield calls on 16 keys, whose time is that of their Python."""
    q, (k, v) = torch.randn(1, 32, 1, 128, device=device), torch.randn(2, 1, 8, 16, 128, device=device)
    sizes = {"batch": 1, "kv_heads": 8, "head_dim": 128, "capacity": 1 << 16, "dtype": torch.float32}
    cache = am.KVCache(None, device=device, **sizes)  # type: ignore[arg-type]
    cache.append(k, v)

    def step() -> None:
        am.decode(q, cache, k=k[:, :, :1], v=v[:, :, :1])
        if cache.length >= 32:
            cache.truncate(16)

    calls: dict[str, tuple[float, Call]] = {
        "attend": (0.33, lambda: am.attend(q, k, v)),
        "attention": (0.25, lambda: am.attention(q, k, v, mesh=None, mask=am.Full())),
        "append and decode": (0.2, step),
    }
    for name, (goal, call) in calls.items():
        case = f"{name}, float32: 32/8 heads of 128, 16 keys"
        yield _row(case, "SDPA", goal, device, lambda: sdpa(q, k, v, enable_gqa=True), call, repeat=MANY)


def _prefill(device: torch.device, dtype: torch.dtype) -> Iterator[Comparison]:
    case = f"causal {_name(dtype)}: 4,096 tokens, 8 heads of 64"
    return _beside_causal(case, "SDPA", 0.95, _heads(device, dtype, 4096), am.Causal())


def _sparse(device: torch.device, name: str, mask: Mask, goal: float) -> Iterator[Comparison]:
    case = f"{name} float32: 16,384 tokens, 8 heads of 64"
    return _beside_causal(case, "SDPA full causal", goal, _heads(device, torch.float32, 16_384), mask)


def _capped(device: torch.device, dtype: torch.dtype) -> Iterator[Comparison]:
    """Yield soft-capped logits beside the same call without a cap; backward in float32 alone, which is fast without."""
    for q_heads, kv_heads, width in ((8, 8, 128), (16, 8, 256)):
        shapes = [(1, heads, 4096, width) for heads in (q_heads, kv_heads, kv_heads)]
        q, k, v = (torch.randn(shape, device=device, dtype=dtype, requires_grad=True) for shape in shapes)
        case = f"soft cap of 50, causal {_name(dtype)}: 4,096 tokens, {q_heads}/{kv_heads} heads of {width}"
        theirs, ours = (partial(am.attention, q, k, v, softcap=softcap) for softcap in (None, 50.0))
        with torch.no_grad():
            yield _row(f"{case}, forward", "without a cap", 0.67, device, theirs, ours)
        if dtype != torch.float32:
            continue
        calls = [_backward(call(), (q, k, v)) for call in (theirs, ours)]
        yield _row(f"{case}, backward", "without a cap", 0.67, device, *calls)


def _backward(out: Tensor, heads: Heads) -> Call:
    dout = torch.randn_like(out)
    return lambda: torch.autograd.grad(out, heads, dout, retain_graph=True)


def _beside_causal(case: str, rival: str, goal: float, heads: Heads, mask: Mask) -> Iterator[Comparison]:
    """Yield ours under the mask beside PyTorch's causal attention, forward, and forward with backward."""
    q, k, v = heads

    def theirs() -> Tensor:
        return sdpa(q, k, v, is_causal=True)

    def ours() -> Tensor:
        return am.attention(q, k, v, mask=mask)

    with torch.no_grad():
        yield _row(f"{case}, forward", rival, goal, q.device, theirs, ours)
    calls = (_differentiated(call, heads) for call in (theirs, ours))
    yield _row(f"{case}, forward + backward", rival, goal, q.device, *calls)


def _row(
    case: str, rival: str, goal: float | None, device: torch.device, theirs: Call, ours: Call, *, repeat: int = 1
) -> Comparison:
    timings = race({"theirs": theirs, "ours": ours}, device, repeat=repeat)
    return Comparison(case, rival, timings["theirs"], timings["ours"], _goal(goal, device))


def _goal(goal: float | None, device: torch.device) -> float | None:
    """Return a goal for CPUs alone."""
    return goal if device.type == "cpu" else None


def _heads(device: torch.device, dtype: torch.dtype, length: int) -> Heads:
    q, k, v = (torch.randn(1, 8, length, 64, device=device, dtype=dtype, requires_grad=True) for _ in range(3))
    return q, k, v


def _differentiated(call: Callable[[], Tensor], heads: Heads) -> Call:
    dout = torch.randn_like(heads[0])
    return lambda: torch.autograd.grad(call(), heads, dout)


def _peak(heads: Heads, mask: Mask) -> int | None:
    return peak_memory(_differentiated(lambda: am.attention(*heads, mask=mask), heads), heads[0].device)


def _stretched(name: str, length: int) -> Mask:
    """Return the mask for this length; documents of 1,024 tokens are repeated to fill it."""
    return MASKS[name] if not MASKS[name].ends else am.Causal() & am.Documents([1024] * (length // 1024))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
