"""Kernels that read rows in 8 bits: the native one and Triton's, beside float64 over the stored numbers."""

import math
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import attnmesh as am
from attnmesh.core.band import Band
from attnmesh.core.partial import Partial
from attnmesh.core.scaling import Scaling
from attnmesh.core.selection import Selection
from attnmesh.core.storage import STORAGES
from attnmesh.kernels import quantized
from attnmesh.kernels import selected_keys as reads
from attnmesh.kernels.implementations.native import NATIVE, BoundNative
from attnmesh.kernels.implementations.reference import Reference
from attnmesh.kernels.native.build import library
from attnmesh.kernels.quantized import QuantizedAttention
from attnmesh.kernels.selected_keys import SelectedKeys
from tests.support.emulation.interpreted import interpreting
from tests.support.truth.seeds import rotated
from tests.support.truth.tolerances import FLOAT32, FLOAT32_SUMS

needs_library = pytest.mark.skipif(library().attend is None, reason="there is no C++ compiler")

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class StoredProblem(NamedTuple):
    """Queries, rows of keys and values, and their numbers in float64. Columns of keys to 100 make roundings larger."""

    q: Tensor
    keys: Tensor
    values: Tensor
    k: Tensor
    v: Tensor

    def truth(self, mask: am.Mask = am.Full(), selected: Selection | None = None) -> Partial:  # noqa: B008
        """Return attention in float64 of the last queries of the keys."""
        positions = torch.arange(self.k.shape[2])
        order = {"q_positions": positions[-self.q.shape[2] :], "k_positions": positions, "kernel": "reference"}
        return am.attend(self.q.double(), self.k, self.v, mask=mask, selected=selected, **order)

    def run(self, band: Band | None = None, counts: list[int] | None = None) -> Partial:
        """Return the native kernel's partial."""
        return self.attention.attend(self.q, self.keys, self.values, band, counts)

    @property
    def attention(self) -> QuantizedAttention:
        """Attention by the native kernel."""
        return QuantizedAttention(NATIVE, Scaling(self.q.shape[-1] ** -0.5), self.v.shape[-1])


SIZES = ((128, 128), (64, 64), (64, 32), (96, 96), (192, 128), (256, 256), (40, 18), (6, 150), (576, 512))


def problem(
    storage: str, dtype: torch.dtype, dim: int, value_dim: int, heads: tuple[int, int, int] = (8, 2, 1), keys: int = 700
) -> StoredProblem:
    by, (q_heads, kv_heads, rows) = STORAGES[storage], heads
    q = (torch.randn(2, q_heads, rows, dim) / 100).to(dtype)
    keys_rows = by.quantize(torch.randn(2, kv_heads, keys, dim) * torch.logspace(-3, 2, dim))
    k = by.dequantize(keys_rows, torch.float64)
    if dim == 576:  # latents
        return StoredProblem(q, keys_rows, keys_rows, k, k[..., :value_dim])
    rows_of_values = by.quantize(torch.randn(2, kv_heads, keys, value_dim))
    return StoredProblem(q, keys_rows, rows_of_values, k, by.dequantize(rows_of_values, torch.float64))


def refuse(*_: Any, **__: Any) -> None:
    raise AssertionError("keys were read as a copy")


@needs_library
@pytest.mark.parametrize(("size", "dtype", "storage"), rotated(SIZES, DTYPES, [*STORAGES], every=2))
def test_stored_rows_agree_with_float64(
    storage: str, dtype: torch.dtype, size: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(QuantizedAttention, "_attend_tiles", refuse)
    for heads in ((8, 2, 1), (3, 3, 2), (12, 2, 3)):
        given = problem(storage, dtype, *size, heads)
        positions = torch.arange(given.k.shape[2])
        for mask in (am.Causal(), am.Window(300)):
            band = Band.of(mask, positions[-heads[2] :], len(positions))
            for found, right in zip(given.run(band), given.truth(mask), strict=True):
                torch.testing.assert_close(found.double(), right, rtol=10 * FLOAT32_SUMS, atol=FLOAT32_SUMS)


@needs_library
@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_selected_rows_are_read_in_place(storage: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantized.attend_selected.__module__ + "._numbers", refuse)
    given = problem(storage, dtype, 128, 64)
    indices = torch.stack([torch.randperm(700)[:50] for _ in range(2)]).view(2, 1, 1, 50).int()
    last = torch.full((1,), 699)
    selected = SelectedKeys(Selection(indices), torch.zeros(1, dtype=torch.long), last)
    found = given.attention.attend_selected(given.q, given.keys, given.values, selected)
    picked = indices[:, 0, 0].long()
    k, v = (torch.stack([x[row][:, picked[row]] for row in range(2)]) for x in (given.k, given.v))
    for x, right in zip(found, given._replace(k=k, v=v).truth(), strict=True):
        torch.testing.assert_close(x.double(), right, rtol=10 * FLOAT32_SUMS, atol=FLOAT32_SUMS)


@needs_library
@pytest.mark.parametrize(
    ("dim", "dtype", "storage"), rotated([128, 96, 256], [torch.float32, torch.bfloat16], [*STORAGES], every=2)
)
def test_bits_of_a_row_do_not_depend_on_threads_or_other_rows(storage: str, dtype: torch.dtype, dim: int) -> None:
    given = problem(storage, dtype, dim, dim, (8, 2, 3), 5000)
    before = torch.get_num_threads()
    found = []
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        found.append(given.run())
    torch.set_num_threads(before)
    for other in found[1:]:
        assert torch.equal(other.out, found[0].out)
        assert torch.equal(other.lse, found[0].lse)
    for row in range(3):
        assert torch.equal(given._replace(q=given.q[:, :, row : row + 1]).run().out[:, :, 0], found[0].out[:, :, row])


@needs_library
@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("number", [torch.inf, -torch.inf, torch.nan])
def test_a_key_or_value_that_is_not_finite_gives_nan(storage: str, dtype: torch.dtype, number: float) -> None:
    by, (q, k, v) = STORAGES[storage], torch.randn(3, 1, 2, 600, 64).to(dtype)
    for x in (k, v):
        kept = x[0, 0, 400, 7].clone()
        x[0, 0, 400, 7] = number
        cache = am.KVCache(None, batch=1, kv_heads=2, head_dim=64, capacity=600, dtype=dtype, storage=storage)
        cache.append(k, v)
        seen = am.decode(q[:, :, :1], cache)
        hidden = am.decode(q[:, :, :1], cache, mask=am.Window(100))
        x[0, 0, 400, 7] = kept
        assert bool(seen[0, 0].isnan().all())
        assert bool(seen[0, 1].isfinite().all())
        assert bool(hidden.isfinite().all())
    assert by.largest > 0


@needs_library
@pytest.mark.parametrize("storage", STORAGES)
def test_numbers_of_any_size_are_those_of_the_reference(storage: str) -> None:
    """Values near both ends of float32."""
    for power in (-33, -20, 0, 20, 36):
        given = problem(storage, torch.float32, 128, 128)
        by, factor = STORAGES[storage], 10.0**power
        rows = by.quantize(torch.randn(2, 2, 700, 128) * factor)
        given = given._replace(values=rows, v=by.dequantize(rows, torch.float64))
        out, right = given.run().out.double(), given.truth().out
        torch.testing.assert_close(out, right, rtol=10 * FLOAT32_SUMS, atol=FLOAT32_SUMS * factor)


@needs_library
@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_known_step_is_one_launch(storage: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = am.KVCache(None, batch=2, kv_heads=2, head_dim=64, capacity=600, dtype=dtype, storage=storage)
    k, v = torch.randn(2, 2, 2, 500, 64).to(dtype)
    cache.append(k, v)
    q = torch.randn(2, 8, 1, 64).to(dtype)
    expected = am.decode(q, cache)
    launches = []
    launch = BoundNative.attend

    def count(*arguments: Any) -> bool:
        launches.append(arguments)
        return launch(*arguments)

    monkeypatch.setattr(BoundNative, "attend", count)
    monkeypatch.setattr(QuantizedAttention, "attend", refuse)
    assert torch.equal(am.decode(q, cache), expected)
    assert len(launches) == 1


def test_the_reference_reads_tiles() -> None:
    given = problem("int8", torch.float32, 64, 64, keys=1200)
    attention = QuantizedAttention(Reference(), Scaling(1 / math.sqrt(64)), 64)
    torch.testing.assert_close(
        attention.attend(given.q, given.keys, given.values, None).out.double(), given.truth().out
    )


WIDTHS = [("separate", 8, 8), ("separate", 192, 130), ("prefix", 20, 16)]
"""How values lie, and the columns of keys and of values."""


@pytest.mark.parametrize(
    ("widths", "dtype", "storage"), rotated(WIDTHS, (torch.float32, torch.bfloat16), STORAGES, every=3)
)
def test_triton_agrees_with_float64(
    widths: tuple[str, int, int], dtype: torch.dtype, storage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    values, dim, value_dim = widths
    sizes = {"batch": 2, "kv_heads": 2, "head_dim": dim, "value_dim": value_dim, "capacity": 100, "values": values}
    by, k, v = STORAGES[storage], torch.randn(2, 2, 70, dim).to(dtype), torch.randn(2, 2, 70, value_dim).to(dtype)
    q = torch.randn(2, 4, 2, dim).to(dtype)
    numbers = by.dequantize(by.quantize(k), torch.float64)
    told = numbers[..., :value_dim] if values == "prefix" else by.dequantize(by.quantize(v), torch.float64)
    given, some = StoredProblem(q, k, v, numbers, told), torch.stack([torch.randperm(70)[:40] for _ in range(8)])
    chosen = Selection(some.view(2, 2, 2, 40).int())
    monkeypatch.setattr(NATIVE, "reads_scattered", False)
    calls: list[tuple[dict[str, Any], Tensor]] = [
        ({"kernel": "triton"}, given.truth(am.Causal()).out),
        ({"kernel": "triton", "reproducible": True}, given.truth(am.Causal()).out),
        ({"selected": chosen}, given.truth(am.Causal(), chosen).out),
    ]
    monkeypatch.setattr(reads, "_numbers", refuse)
    for options, right in calls:
        with interpreting("triton"):
            cache = am.KVCache(None, dtype=dtype, storage=storage, **sizes)  # type: ignore[arg-type]
            cache.append(k, None if values == "prefix" else v)
            out = am.decode(q, cache, **options)
        # Half precision rounds by 4e-3.
        torch.testing.assert_close(out.double(), right, rtol=0, atol=2 * FLOAT32 if dtype == torch.float32 else 1e-2)
