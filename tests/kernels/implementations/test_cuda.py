"""CUDA: anywhere, that PyTorch's operators are called as declared; on a GPU, that the results are right."""

from itertools import product
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import attnmesh as am
from attnmesh.core.band import Band
from attnmesh.core.mask import Mask
from attnmesh.core.partial import Partial
from attnmesh.core.scaling import Scaling
from attnmesh.kernels.implementations import cuda
from attnmesh.kernels.implementations.reference import Reference
from attnmesh.kernels.kernel import KernelRequest
from attnmesh.kernels.rectangles import BackwardInputs, Rectangle, cut
from benchmarks import gpu
from tests.support.emulation.interpreted import interpreting
from tests.support.truth.problems import draw
from tests.support.truth.tolerances import FLOAT32

KINDS = (
    (torch.bfloat16, 128, 128),
    (torch.bfloat16, 64, 64),
    (torch.float16, 20, 16),
    (torch.float32, 64, 64),
)
HALF = (torch.bfloat16, torch.float16)
BLOCKS = {
    "full": am.Full(),
    "causal": am.Causal(),
    "masked": am.Window(3),
}


@pytest.fixture
def eager_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace PyTorch's support checks, which refuse meta tensors, by their results on a recent GPU."""
    monkeypatch.setattr(cuda, "can_use_flash_attention", lambda params: params.query.dtype in HALF)
    monkeypatch.setattr(cuda, "can_use_efficient_attention", lambda params: params.query.dtype != torch.float64)


@pytest.mark.usefixtures("eager_operators")
@pytest.mark.parametrize("dtype", [torch.float32, *HALF])
@pytest.mark.parametrize("kind", BLOCKS)
@pytest.mark.parametrize("width", [20, 64])
def test_the_operators_are_called_as_declared(dtype: torch.dtype, kind: str, width: int) -> None:
    rectangle = cut(Band.of(BLOCKS[kind], torch.arange(100), 100))[-1]
    rows, keys = (part.stop - part.start for part in (rectangle.queries, rectangle.keys))
    q = torch.empty(2, 6, rows, 64, dtype=dtype, device="meta")
    k, v = (torch.empty(2, 2, keys, w, dtype=dtype, device="meta") for w in (64, width))
    out, lse = cuda.CUDA().attend(q, k, v, rectangle, Scaling(0.1))
    assert (out.shape, out.dtype) == ((2, 6, rows, width), dtype)
    assert (lse.shape, lse.dtype) == ((2, 6, rows), torch.float32)
    gradients = cuda.CUDA().backward(q, k, v, BackwardInputs(out, lse, out), rectangle, Scaling(0.1))
    assert [(g.shape, g.dtype) for g in gradients] == [(x.shape, dtype) for x in (q, k, v)]


@pytest.mark.usefixtures("eager_operators")
def test_plain_blocks_of_half_precision_go_to_flash_and_the_rest_to_efficient() -> None:
    full, causal, masked = (cut(Band.of(mask, torch.arange(100), 100))[0] for mask in BLOCKS.values())
    half, single = (torch.empty(1, 2, 100, 64, dtype=dtype) for dtype in (torch.bfloat16, torch.float32))
    taken = [
        type(cuda.operator_of(x, x, x, rectangle))
        for x, rectangle in ((half, full), (half, causal), (half, masked), (single, full), (single, causal))
    ]
    assert taken == [cuda.Flash, cuda.Flash, cuda.Efficient, cuda.Efficient, cuda.Efficient]


@pytest.mark.usefixtures("eager_operators")
@pytest.mark.parametrize(("length", "gradients"), [(100, "cuDNN's"), (60, "flash's")])
def test_cudnn_is_called_as_declared(monkeypatch: pytest.MonkeyPatch, length: int, gradients: str) -> None:
    rectangle = cut(Band.of(am.Causal(), torch.arange(length), length))[0]
    q, k, v = (torch.empty(2, heads, length, 64, dtype=torch.bfloat16, device="meta") for heads in (6, 2, 2))
    out, lse = cuda.Cudnn().attend(q, k, v, rectangle, Scaling(0.1))
    assert (out.shape, lse.shape) == (q.shape, q.shape[:-1])
    assert not cuda.Cudnn().takes(q, k, v, rectangle)  # on recent GPUs only, once checked
    monkeypatch.setattr(cuda, "_is_correct", lambda *_, **__: gradients == "cuDNN's")
    if gradients == "flash's":  # for few tokens
        monkeypatch.setattr(cuda.Cudnn, "gradients", None)
    found = cuda.Cudnn().backward(q, k, v, BackwardInputs(out, lse, out), rectangle, Scaling(0.1))
    assert [g.shape for g in found] == [x.shape for x in (q, k, v)]


def test_a_wrong_operator_is_not_used_and_warned_about() -> None:
    class Wrong(cuda.Cudnn):
        def attend(self, q, k, v, rectangle, scaling):  # type: ignore[no-untyped-def]
            return Partial(q, q[..., 0].float())

    class WithoutLse(cuda.Cudnn):
        def attend(self, q, k, v, rectangle, scaling):  # type: ignore[no-untyped-def]
            out, lse = Reference().attend(q, k, v, rectangle, scaling)
            return Partial(out, lse * torch.nan)

    class Right(cuda.Cudnn):
        def attend(self, q, k, v, rectangle, scaling):  # type: ignore[no-untyped-def]
            return Reference().attend(q, k, v, rectangle, scaling)

        def gradients(self, q, k, v, saved, rectangle, scaling):  # type: ignore[no-untyped-def]
            return Reference().backward(q, k, v, saved, rectangle, scaling)

    class Own(Right):
        def gradients(self, q, k, v, saved, rectangle, scaling):  # type: ignore[no-untyped-def]
            """Return gradients of softmax over the rectangle's own keys, as if there were no others."""
            out, lse = Reference().attend(q, k, v, rectangle, scaling)
            return Reference().backward(q, k, v, BackwardInputs(out, lse, saved.dout), rectangle, scaling)

    where = torch.device("cpu"), torch.bfloat16, 64, True, True
    with pytest.warns(UserWarning, match="does not use PyTorch's wrong operator for torch.bfloat16"):
        assert not cuda._is_correct(Wrong(), *where)
    with pytest.warns(UserWarning, match="does not use PyTorch's withoutlse operator for torch.bfloat16: off by .*nan"):
        assert not cuda._is_correct(WithoutLse(), *where)
    assert cuda._is_correct(Right(), *where)
    assert cuda._is_correct(Right(), *where, gradients=True)
    with pytest.warns(
        UserWarning, match="does not use PyTorch's own operator for gradients for torch.bfloat16: off by"
    ):
        assert not cuda._is_correct(Own(), *where, gradients=True)


@pytest.mark.parametrize("mask", [am.Window(20), am.Causal() & am.Documents([70] * 20)])
def test_masked_and_many_blocks_are_one_launch_of_triton(mask: Mask) -> None:
    x = torch.randn(1, 2, 1400, 16)
    band = Band.of(mask, torch.arange(1400), 1400)
    assert len(cuda.CUDA().cut(band, x, x, x)) > 1  # without Triton: as many calls as there are blocks
    with interpreting("triton"):
        (rectangle,) = cuda.CUDA().cut(band, x, x, x)
        assert cuda.CUDA().operator_name(x, x, x, rectangle) == "triton"
        short, tokens = (
            Rectangle(slice(0, 70), slice(0, 70), band=rectangle.bounds().select_queries(0, 70, 0)),
            x[:, :, :70],
        )
        ours = cuda.CUDA().attend(tokens, tokens, tokens, short, Scaling(0.25))
    theirs = am.attend(tokens, tokens, tokens, mask=Mask(mask.left, mask.right), scale=0.25)
    assert torch.allclose(ours.out, theirs.out, atol=FLOAT32)


def test_float64_and_other_devices_have_a_reason() -> None:
    with FakeTensorMode():
        x = torch.empty(1, 2, 100, 64, dtype=torch.float64, device="cuda")
        assert "float64 of width 64" in str(cuda.CUDA().refusal(KernelRequest.of(x, x, x, Scaling(1.0))))
    x = torch.empty(1, 2, 100, 64)
    assert cuda.CUDA().refusal(KernelRequest.of(x, x, x, Scaling(1.0))) == "it runs on CUDA, the tensors are on cpu"


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(120))
@pytest.mark.parametrize("kernel", ["auto", "triton", "reference"])
def test_random_problems_agree_with_float64_on_the_gpu(seed: int, kernel: str) -> None:
    draw(seed, kernels=(kernel,), kinds=KINDS).check("cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("width", [8, 64, 128, 192, 256])
@pytest.mark.parametrize("lengths", [(1, 1), (1, 300), (64, 64), (65, 130), (999, 63), (1000, 1000)])
def test_gradients_of_plain_blocks_agree_with_float64(lengths: tuple[int, int], width: int) -> None:
    """Beside those of the reference, with an out and an lse that other keys have a part in."""
    queries, keys = lengths
    for causal, dtype, group in product({False, queries == keys}, HALF, (1, 4)):
        shapes = [
            (2, heads, n, width) for heads, n in ((4, queries), (4 // group, keys), (4 // group, keys), (4, queries))
        ]
        q, k, v, dout = (torch.randn(shape, device="cuda").to(dtype) for shape in shapes)
        rectangle, scaling = Rectangle(slice(0, queries), slice(0, keys), causal=causal), Scaling(width**-0.5)
        wide = [x.double() for x in (q, k, v)]
        out, lse = Reference().attend(*wide, rectangle, scaling)
        exact = Reference().backward(*wide, BackwardInputs(out / 2, lse + 0.7, dout.double()), rectangle, scaling)
        saved = BackwardInputs((out / 2).to(dtype), (lse + 0.7).float(), dout)
        for x, y in zip(cuda.CUDA().backward(q, k, v, saved, rectangle, scaling), exact, strict=True):
            assert (x.double() - y).norm() <= 2 * torch.finfo(dtype).eps * y.norm(), (causal, dtype, group)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, *HALF])
def test_empty_rows_and_nan_stay_their_own_on_the_gpu(dtype: torch.dtype) -> None:
    q, k, v = (torch.randn(1, 2, 90, 64, dtype=dtype, device="cuda") for _ in range(3))
    assert torch.isneginf(am.attend(q, k[:, :, :0], v[:, :, :0]).lse).all()
    late = torch.arange(50, 140)
    out, lse = am.attend(q, k, v, mask=am.Window(3), q_positions=late, k_positions=torch.arange(90))
    blind = late > 89 + 3
    assert torch.isneginf(lse[:, :, blind]).all()
    assert (out[:, :, blind] == 0).all()
    k[0, 0, 40, 3] = torch.nan
    out, lse = am.attend(q, k, v)
    assert out[0, 0].isnan().all()
    assert torch.isfinite(out[0, 1]).all()


@pytest.mark.skipif(torch.cuda.is_available(), reason="it runs for minutes where there is a GPU")
def test_without_a_gpu_make_gpu_prints_its_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu.main() == 0
    said = capsys.readouterr().out
    assert said.startswith("PyTorch sees no GPU here. On one, this would run:\n")
    assert [line.split(" ")[1] for line in said.splitlines()[1:]] == ["the", "every", "decoding,", "all"]
    assert "benchmarks/results/gpu_name-of-the-gpu_20" in said


def test_make_gpu_runs_each_file_with_tests_that_need_a_gpu() -> None:
    root = Path(gpu.__file__).parents[1]
    marked = [file for file in (root / "tests").rglob("test_*.py") if "pytest.mark.gpu" in file.read_text("utf-8")]
    run = [root / name for name in gpu.TESTS]
    assert len(marked) > 4
    assert [file for file in marked if not any(file.is_relative_to(each) for each in run)] == []
