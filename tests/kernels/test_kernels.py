"""Each kernel, forward and gradients, against float64: random problems, then the inputs that break kernels."""

import math
import weakref
from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch

import attnmesh as am
from attnmesh.core.band import Band
from attnmesh.core.scaling import Scaling
from attnmesh.kernels.choice import KERNELS, choose
from attnmesh.kernels.implementations import cpu
from attnmesh.kernels.implementations.cpu import FlashCPU
from attnmesh.kernels.kernel import KernelRequest
from attnmesh.kernels.rectangles import TILE_ELEMENTS, BackwardInputs, Rectangle, cut, cut_into_tiles
from tests.support.process.resident import peak_memory
from tests.support.truth.dense import COARSE_EXPONENTIAL, truth
from tests.support.truth.problems import DTYPES, draw
from tests.support.truth.tolerances import FLOAT32, FLOAT32_SUMS

pytestmark = pytest.mark.quick

REQUEST = KernelRequest.of(*torch.zeros(3, 1, 1, 1, 8), Scaling(1.0))
SUPPORTED = [kernel.name for kernel in KERNELS if kernel.refusal(REQUEST) is None]
each_kernel = pytest.mark.parametrize("kernel", SUPPORTED)
each_kind = pytest.mark.parametrize(
    ("kernel", "dtype"), [kind for kind in product(SUPPORTED, DTYPES) if kind != ("native", torch.float64)]
)


@pytest.fixture(autouse=True)
def two_threads(request: pytest.FixtureRequest) -> Iterator[None]:
    """A part of the tests have two threads, which wait for each other where others keep the cores at work."""
    given, threads = request.node.callspec.params if hasattr(request.node, "callspec") else {}, torch.get_num_threads()
    if given.get("seed", 1) % 10 == 0 or given.get("mask") == am.Causal():
        torch.set_num_threads(2)
    yield
    torch.set_num_threads(threads)


def sampled_seeds(count: int) -> list[Any]:
    """Return seeds, seven of eight for `make long`."""
    return [pytest.param(seed, marks=[] if seed % 8 == 0 else pytest.mark.long) for seed in range(count)]


@pytest.mark.parametrize("seed", sampled_seeds(400))
def test_random_problems_agree_with_float64(seed: int) -> None:
    draw(seed).check()


@pytest.mark.skipif("native" not in SUPPORTED, reason="there is no C++ compiler")
@pytest.mark.parametrize("seed", sampled_seeds(200))
def test_random_problems_on_the_native_kernel_agree_with_float64(seed: int) -> None:
    draw(seed, kernels=("native",), dtypes=(torch.float32, torch.bfloat16, torch.float16)).check()


@each_kind
@pytest.mark.parametrize(
    "mask",
    [
        pytest.param(am.Full(), marks=pytest.mark.long),
        am.Causal(),
        pytest.param(am.Window(70), marks=pytest.mark.long),
        am.Causal() & am.Documents((150, 250, 200)),
        pytest.param(am.Full() & am.Chunks(130), marks=pytest.mark.long),
    ],
)
def test_longer_problems_agree_with_float64(kernel: str, dtype: torch.dtype, mask: am.Mask) -> None:
    tensors = [torch.randn(1, h, 600, 32, dtype=dtype, requires_grad=True) for h in (4, 2, 2)]
    tokens = torch.arange(600)
    dout = torch.randn(1, 4, 600, 32)
    expected = truth(tensors, mask.visible(tokens, tokens), 32**-0.5, dout)
    out = am.attend(*tensors, mask=mask, kernel=kernel).out
    expected.check("out", out)
    for name, gradient in zip(("dq", "dk", "dv"), torch.autograd.grad(out, tensors, dout.to(dtype)), strict=True):
        expected.check(name, gradient)


@each_kind
@pytest.mark.parametrize(("q_len", "k_len", "batch"), [(0, 5, 1), (5, 0, 1), (0, 0, 2), (5, 7, 0)])
def test_empty_queries_keys_and_batches_give_zeros(
    kernel: str, dtype: torch.dtype, q_len: int, k_len: int, batch: int
) -> None:
    q, k, v = (torch.randn(batch, 2, n, 4, dtype=dtype, requires_grad=True) for n in (q_len, k_len, k_len))
    out, lse = am.attend(q, k, v, kernel=kernel)
    assert out.dtype == dtype
    assert torch.equal(out, torch.zeros(batch, 2, q_len, 4, dtype=dtype))
    assert torch.equal(lse, torch.full_like(lse, -math.inf))
    for gradient in torch.autograd.grad(out.sum(), (q, k, v)):
        assert torch.equal(gradient, torch.zeros_like(gradient))


@each_kind
def test_empty_rows_have_zeros_and_no_gradients(kernel: str, dtype: torch.dtype) -> None:
    q, k, v = (torch.randn(2, 3, 100, 8, dtype=dtype, requires_grad=True) for _ in range(3))
    late, early = torch.arange(50, 150), torch.arange(100)
    out, lse = am.attend(q, k, v, mask=am.Window(3), q_positions=late, k_positions=early, kernel=kernel)
    blind = late > 99 + 3
    assert torch.equal(out[:, :, blind], torch.zeros(2, 3, int(blind.sum()), 8, dtype=dtype))
    assert torch.isneginf(lse[:, :, blind]).all()
    assert torch.isfinite(lse[:, :, ~blind]).all()
    dq, dk, dv = torch.autograd.grad(out.sum() + lse[:, :, ~blind].sum(), (q, k, v))
    assert torch.equal(dq[:, :, blind], torch.zeros_like(dq[:, :, blind]))
    assert not any(x.isnan().any() for x in (dq, dk, dv))


@each_kind
@pytest.mark.parametrize("causal", [False, True])
def test_nan_gives_nan_in_the_rows_that_see_it(kernel: str, dtype: torch.dtype, causal: bool) -> None:
    mask = am.Causal() if causal else am.Full()
    for name in "qkv":
        tensors = {n: torch.randn(1, 2, 90, 8, dtype=dtype) for n in "qkv"}
        tensors[name][0, 0, 40, 3] = math.nan
        out, lse = am.attend(**tensors, mask=mask, kernel=kernel)
        hit = torch.zeros(90, dtype=torch.bool)
        hit[slice(40, 41) if name == "q" else slice(40 if causal else 0, None)] = True
        columns = slice(3, 4) if name == "v" else slice(None)
        assert out[0, 0, hit][:, columns].isnan().all(), name
        assert torch.isfinite(out[0, 1]).all(), f"{name}: another head is touched"
        assert lse[0, 0, hit].isnan().all() == (name != "v")


@each_kind
def test_keys_with_logit_minus_infinity_have_weight_0(kernel: str, dtype: torch.dtype) -> None:
    q, k, v = (torch.randn(1, 2, 70, 8, dtype=dtype) for _ in range(3))
    q[..., 0] = 1.0
    k[:, :, 30:, 0] = -math.inf
    near = am.attend(q, k[:, :, :30], v[:, :, :30], kernel=kernel)
    far = am.attend(q, k, v, kernel=kernel)
    within = {"rtol": 1e-2, "atol": 1e-2} if dtype.itemsize == 2 else {}  # half precision rounds by 4e-3
    torch.testing.assert_close(far, near, **within)
    nothing = am.attend(q, k[:, :, 30:], v[:, :, 30:], kernel=kernel)
    assert torch.equal(nothing.out, torch.zeros_like(nothing.out))
    assert torch.isneginf(nothing.lse).all()


@each_kind
def test_an_infinite_logit_gives_nan_and_never_a_number(kernel: str, dtype: torch.dtype) -> None:
    q, k, v = (torch.randn(1, 2, 70, 8, dtype=dtype) for _ in range(3))
    q[..., 0] = 1.0
    k[:, :, 30, 0] = math.inf
    out, lse = am.attend(q, k, v, kernel=kernel)
    assert out.isnan().all()
    assert not torch.isfinite(lse).any()


@each_kind
def test_infinite_values_stay_infinite(kernel: str, dtype: torch.dtype) -> None:
    q, k, v = (torch.randn(1, 2, 70, 8, dtype=dtype) for _ in range(3))
    v[0, 0, 30, 3] = math.inf
    out, lse = am.attend(q, k, v, kernel=kernel)
    assert not torch.isfinite(out[0, 0, :, 3]).any()
    assert torch.isfinite(out[0, 1]).all()
    assert torch.isfinite(lse).all()


@each_kind
def test_lse_0_is_not_taken_for_an_empty_row(kernel: str, dtype: torch.dtype) -> None:
    """A row that sees one key of logit 0 has lse 0, which some kernels also return for an empty row."""
    q, k, v = (torch.zeros(1, 4, 100, 8, dtype=dtype), *torch.randn(2, 1, 2, 100, 8).to(dtype).unbind())
    out, lse = am.attend(q, k, v, mask=am.Causal(), kernel=kernel)
    expected = torch.arange(1, 101, dtype=lse.dtype).log().expand(1, 4, 100)
    torch.testing.assert_close(lse, expected, rtol=FLOAT32, atol=COARSE_EXPONENTIAL if dtype.itemsize == 2 else 0.0)
    assert torch.equal(out[:, :, 0], v[:, :, 0].repeat_interleave(2, dim=1))


@pytest.mark.parametrize("kernel", [name for name in SUPPORTED if name != "native"])
@pytest.mark.parametrize("size", [1e2, 1e4])
def test_large_logits_stay_exact(kernel: str, size: float) -> None:
    q, k, v = (torch.randn(1, 2, 64, 8, dtype=torch.float64) for _ in range(3))
    out, lse = am.attend(q * size, k, v, mask=am.Causal(), kernel=kernel)
    tokens = torch.arange(64)
    expected = truth([q * size, k, v], am.Causal().visible(tokens, tokens), 8**-0.5, torch.zeros_like(q))
    expected.check("out", out)
    expected.check("lse", lse)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 2, 31, 32, 33])
@pytest.mark.parametrize("mask", [am.Causal(), am.Window(200), am.Full()])
def test_few_queries_at_the_end_of_many_keys(dtype: torch.dtype, rows: int, mask: am.Mask) -> None:
    tensors = [torch.randn(2, h, n, 16, dtype=dtype) for h, n in ((6, rows), (2, 1000), (2, 1000))]
    where = {"q_positions": torch.arange(1000 - rows, 1000)}
    visible = mask.visible(where["q_positions"], torch.arange(1000))
    expected = truth(tensors, visible, 0.25, torch.zeros(2, 6, rows, 16))
    for name, given in am.attend(*tensors, mask=mask, **where)._asdict().items():
        expected.check(name, given)


def test_auto_takes_the_best_supported_kernel() -> None:
    assert choose(REQUEST).name == ("native" if "native" in SUPPORTED else "cpu")
    assert choose(REQUEST._replace(rows=65)).name == "cpu"
    assert choose(REQUEST._replace(dtype=torch.float64)).name == "cpu"
    assert choose(REQUEST._replace(device=torch.device("meta"))).name == "reference"
    assert choose(REQUEST._replace(biased=True)).name == "reference"
    assert choose(REQUEST, "reference").name == "reference"


def test_the_reference_never_holds_the_square() -> None:
    band = Band.of(am.Causal(), torch.arange(10_000), 10_000)
    assert len(cut(band)) == 1
    sizes = [(b.queries.stop - b.queries.start, b.keys.stop - b.keys.start) for b in cut_into_tiles(band, 128, 512)]
    assert max(sizes) == (128, 512)
    x = torch.zeros(1, 1, 3000, 8)
    peak = peak_memory(lambda: am.attend(x, x, x, mask=am.Causal(), kernel="reference"))
    assert peak is None or peak < 20e6  # 3,000 squared in float32 is 36 MB


@each_kind
def test_rows_may_overlap_in_memory(kernel: str, dtype: torch.dtype) -> None:
    """As windows of a signal do. PyTorch's operator reads beyond them if each begins one number after the last."""
    for rows in (2, 5):
        *tensors, dout = (torch.randn(1, 2, rows + 15, dtype=dtype).unfold(-1, 16, 1) for _ in range(4))
        for x in tensors:
            x.requires_grad_()
        expected = truth(tensors, torch.ones(rows, rows, dtype=torch.bool), 0.25, dout)
        out = am.attend(*tensors, kernel=kernel).out
        expected.check("out", out)
        for name, gradient in zip(("dq", "dk", "dv"), torch.autograd.grad(out, tensors, dout), strict=True):
            expected.check(name, gradient)


@each_kernel
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast_changes_no_more_than_what_comes_in(kernel: str, dtype: torch.dtype) -> None:
    q, k, v = (torch.randn(1, 2, 70, 8, dtype=dtype, requires_grad=True) for _ in range(3))
    plain = am.attend(q.bfloat16(), k.bfloat16(), v.bfloat16(), mask=am.Causal(), kernel=kernel)
    with torch.autocast("cpu", torch.bfloat16):
        cast = am.attend(q, k, v, mask=am.Causal(), kernel=kernel)
        zeros = am.attend(q[:, :, :1] * 0, k[:, :, :1], v[:, :, :1], kernel=kernel)
        energies = am.energy(q, k, v, torch.zeros_like(v))
    assert torch.equal(cast.out, plain.out)
    assert torch.equal(cast.lse, plain.lse)
    assert torch.equal(zeros.out, v[:, :, :1].bfloat16())
    torch.testing.assert_close(
        energies, am.attend(q, k, v, kernel="reference").lse, rtol=FLOAT32_SUMS, atol=FLOAT32_SUMS
    )


@each_kernel
def test_gradients_in_float16_neither_overflow_nor_vanish(kernel: str) -> None:
    shape, half = (1, 1, 100, 16), torch.float16
    large = [torch.randn(shape).to(half), torch.randn(shape).to(half), (300 * torch.randn(shape)).to(half)]
    small = [torch.randn(shape).to(half), (1 + 0.3 * torch.randn(shape)).to(half), torch.randn(shape).to(half)]
    for tensors, pull, scale in ((large, 3e3, 0.01), (small, 1e-3, 0.25)):
        q, k, v = (x.requires_grad_() for x in tensors)
        dout = (torch.randn(shape) * pull).to(half)
        expected = truth([q, k, v], torch.ones(100, 100, dtype=torch.bool), scale, dout)
        out = am.attend(q, k, v, scale=scale, kernel=kernel).out
        for name, gradient in zip(("dq", "dk", "dv"), torch.autograd.grad(out, (q, k, v), dout), strict=True):
            expected.check(name, gradient)


@each_kernel
def test_a_loss_scale_on_lse_does_not_overflow_float16(kernel: str) -> None:
    q, k = (torch.randn(1, 1, 512, 16).half().requires_grad_() for _ in range(2))
    dlse = 65536 * torch.randn(1, 1, 512).sign()
    ours = torch.autograd.grad(am.attend(q, k, k.detach(), kernel=kernel).lse, (q, k), dlse)
    exact = [x.detach().double().requires_grad_() for x in (q, k)]
    energy = am.energy(*exact, exact[1].detach(), torch.zeros(1, 1, 512, 16, dtype=torch.float64))
    for given, expected in zip(ours, torch.autograd.grad(energy, exact, dlse.double()), strict=True):
        # Gradients are rounded to float16, by 5e-4.
        torch.testing.assert_close(given.double(), expected, rtol=0, atol=2e-3 * float(expected.abs().max()))


@each_kernel
def test_gradients_of_empty_rows_are_ignored(kernel: str) -> None:
    q, k, v = (torch.randn(1, 2, 200, 8, requires_grad=True) for _ in range(3))
    out, lse = am.attend(q, k, v, mask=am.Causal(), k_positions=torch.arange(200) + 100, kernel=kernel)
    blind = torch.isneginf(lse)
    wanted = torch.autograd.grad(out[~blind].sum() + lse[~blind].square().sum(), (q, k, v), retain_graph=True)
    dout = torch.ones_like(out).masked_fill(blind.unsqueeze(-1), math.nan)
    dlse = torch.where(blind, math.inf, 2 * lse)
    given = torch.autograd.grad((out, lse), (q, k, v), (dout, dlse))
    for one, other in zip(given, wanted, strict=True):
        torch.testing.assert_close(one, other)


@each_kernel
def test_doubtful_rows_are_recomputed_by_tiles(kernel: str) -> None:
    x = torch.rand(1, 1, 3000, 8)
    calls = lambda: am.attend(x, torch.full_like(x, -torch.inf), x, kernel=kernel)  # noqa: E731
    assert torch.isneginf(calls().lse).all()
    peak = peak_memory(calls)
    assert peak is None or peak < 25e6  # 3,000 squared in float32 is 36 MB


@each_kernel
def test_gradients_depend_on_out_by_its_sum_with_dout_alone(kernel: str) -> None:
    backward = next(one for one in KERNELS if one.name == kernel).backward
    q, k, v, dout = torch.randn(4, 1, 2, 70, 8).unbind()
    out, lse = am.attend(q, k, v, scale=0.3)
    other = torch.randn_like(out)
    other -= dout * ((other - out) * dout).sum(-1, keepdim=True) / dout.square().sum(-1, keepdim=True)
    rectangle = Rectangle(slice(0, 70), slice(0, 70))
    given, expected = (backward(q, k, v, BackwardInputs(x, lse, dout), rectangle, Scaling(0.3)) for x in (other, out))
    for one, another in zip(given, expected, strict=True):
        torch.testing.assert_close(one, another, rtol=1e-4, atol=1e-5)


def few_rows(keys: int, dtype: torch.dtype, width: int = 16) -> list[torch.Tensor]:
    shapes = (1, 16, 8, 16), (1, 2, keys, 16), (1, 2, keys, width)
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


@pytest.mark.parametrize(("dtype", "width"), [(torch.float16, 16), (torch.float32, 8)])
def test_few_rows_over_runs_of_keys_agree_with_float64(
    dtype: torch.dtype, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu, "CACHE_BYTES", 1)
    monkeypatch.setitem(TILE_ELEMENTS, "cpu", 1)
    q, k, v = few_rows(700, dtype, width)
    q[..., 0], k[:, :, 130:300, 0] = 1.0, -math.inf  # the second run has no key of finite logit
    out, lse = am.attend(q, k, v, kernel="cpu")
    seen = [x.double() for x in (q, *(torch.cat((x[:, :, :130], x[:, :, 300:]), 2) for x in (k, v)))]
    exact = am.attend(*seen, kernel="reference")
    torch.testing.assert_close(out.double(), exact.out, rtol=0, atol=1e-3 if dtype.itemsize == 2 else 1e-6)
    torch.testing.assert_close(lse.double(), exact.lse, rtol=0, atol=1e-5)


def test_logits_of_few_rows_take_no_memory_for_each_key() -> None:
    """A run takes its logits, their weights and their exponentials: 128 rows of 16,384 keys in float32, 8 MB each."""
    q, k, v = few_rows(240_000, torch.float16)
    peak = peak_memory(lambda: am.attend(q, k, v, kernel="cpu"))
    assert peak is None or peak < 50e6  # logits of all keys would be 123 MB


def test_a_mask_that_is_kept_keeps_the_lower_bounds_it_is_known_by() -> None:
    """Else those of another band with the same upper bounds could get their id, and its mask."""
    high, low = torch.arange(1, 9), torch.zeros(8, dtype=torch.long)
    x, lives = torch.randn(1, 1, 8, 4), weakref.ref(low)
    FlashCPU().attend(x, x, x, Rectangle(slice(0, 8), slice(0, 8), band=Band(low, high)), Scaling(1.0))
    del low
    assert lives() is not None
    del high
    assert lives() is None


def test_results_may_be_written_to() -> None:
    q, k, v = torch.randn(3, 1, 2, 70, 8).unbind()
    out = am.attend(q.requires_grad_(), k, v).out
    expected = 2 * out.detach().clone()
    assert torch.equal(out.mul_(2), expected)
