"""Triton's programs against float64: in its interpreter wherever Triton is installed, compiled where there is a GPU."""

import inspect
import os
import subprocess
import sys
from random import Random

import pytest
import torch

import attnmesh as am
from attnmesh.errors import KernelError
from attnmesh.kernel import triton as kernel
from attnmesh.kernel.blocks import Block
from attnmesh.partial import Partial, collapse
from tests.dense import truth
from tests.problems import draw

SERVED = (torch.float32, torch.bfloat16, torch.float16)


@pytest.fixture(autouse=True)
def interpreted(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if "gpu" in request.keywords:
        return
    if not kernel.installed():
        assert not os.environ.get("CI"), "install Triton: make sets it up"
        pytest.skip("Triton is not installed")
    monkeypatch.setenv("TRITON_INTERPRET", "1")


@pytest.mark.parametrize("seed", range(100))
def test_random_problems_agree_with_float64(seed: int) -> None:
    draw(seed, ("triton",), SERVED, longest=33).check()


WIDTHS = ((8, 8), (64, 64), (64, 40), (80, 80), (128, 128), (192, 128), (256, 256), (576, 512))


@pytest.mark.parametrize("seed", range(100))
def test_random_decode_steps_agree_with_float64(seed: int) -> None:
    """Few rows, many keys: split over the keys, the splits merged in a launch of their own."""
    random = Random(seed)
    torch.manual_seed(seed)
    kv_heads, group = random.choice((1, 1, 2)), random.choice((1, 2, 4, 7, 16))
    rows, keys, batch = random.choice((1, 1, 1, 2, 5)), random.choice((1, 15, 64, 100, 257, 500)), random.choice((1, 2))
    width, values = random.choice(WIDTHS)
    mask = random.choice((am.Full(), am.Causal(), am.Window(30), am.Window(0)))
    rows, dtype = min(rows, keys), random.choice(SERVED)
    q = torch.randn(batch, kv_heads * group, rows, width, dtype=dtype)
    k, v = (torch.randn(batch, kv_heads, keys, n, dtype=dtype) for n in (width, values))
    at = torch.arange(keys - rows, keys)
    given = am.attend(q, k, v, mask=mask, q_positions=at, kernel="triton")
    visible = mask.visible(at, torch.arange(keys))
    expected = truth([x.requires_grad_() for x in (q, k, v)], visible, width**-0.5, torch.zeros_like(given.out))
    expected.check("out", given.out)
    expected.check("lse", given.lse)


def test_a_step_over_many_keys_is_split() -> None:
    q, (k, v) = torch.randn(1, 2, 1, 16), torch.randn(2, 1, 2, 500, 16).unbind()
    spans = -(-500 // kernel._span(500, 2, 64, q.device))
    assert spans > 1
    whole = am.attend(q, k, v, kernel="triton")
    assert torch.allclose(whole.out, am.attend(q, k, v, kernel="reference").out, atol=1e-6)


@pytest.mark.parametrize("seed", range(100))
def test_random_partials_merge_as_the_law_says(seed: int) -> None:
    random = Random(seed)
    torch.manual_seed(seed)
    shape = random.choice((1, 2, 3, 8, 17)), random.choice((1, 3)), random.choice((1, 4)), random.choice((1, 5, 33))
    partials = Partial(torch.randn(*shape, random.choice((8, 64, 80))), 30 * torch.randn(shape))
    blind = torch.rand(shape) < 0.3
    partials.lse[blind], partials.out[blind] = -torch.inf, 0.0
    given, expected = kernel.merged(partials), collapse(Partial(*(x.double() for x in partials)))
    assert torch.allclose(given.out.double(), expected.out, atol=1e-6)
    assert torch.allclose(given.lse.double(), expected.lse, rtol=1e-6)


def test_blocks_of_a_reproducible_step_have_the_same_bits_however_many_there_are() -> None:
    q, (k, v) = torch.randn(1, 4, 1, 16), torch.randn(2, 1, 2, 80, 16).unbind()
    blocks = [x.unflatten(2, (5, 16))[0].transpose(0, 1) for x in (k, v)]
    block = Block(slice(0, 1), slice(0, 16))
    five = kernel.Triton().attend(q.expand(5, -1, -1, -1), *blocks, block, 0.25)
    for number in range(5):
        one = kernel.Triton().attend(q, *(x[number : number + 1] for x in blocks), block, 0.25)
        assert torch.equal(one.out[0], five.out[number])
        assert torch.equal(one.lse[0], five.lse[number])


def test_what_it_does_not_serve_is_refused_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    x, wide = torch.zeros(1, 1, 4, 8), torch.zeros(1, 1, 4, 600)
    with pytest.raises(KernelError, match=r"kernel triton.*it knows no torch.float64"):
        am.attend(x.double(), x.double(), x.double(), kernel="triton")
    with pytest.raises(KernelError, match=r"heads are 600 wide, of at most 576"):
        am.attend(wide, wide, wide, kernel="triton")
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(KernelError, match=r"it runs on CUDA, the tensors are on cpu"):
        am.attend(x, x, x, kernel="triton")
    monkeypatch.setattr(kernel, "installed", lambda: False)
    with pytest.raises(KernelError, match="Triton is not installed"):
        am.attend(x, x, x, kernel="triton")


COMPILED = """
import sys, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from attnmesh.kernel import programs

NUMBERS = {"low": "*i32", "high": "*i32", "begin": "*i32", "finish": "*i32", "scale": "fp32"}
NUMBERS |= dict.fromkeys(("out", "lse", "delta", "dq", "dk", "dv", "outs", "lses"), "*fp32")
parts = dict(zip(("Q_0", "Q_1", "V_0", "V_1"), (128, 64, 128, 0)))
capability = int(sys.argv[1])
for name in ("attend", "queries_backward", "keys_backward", "merge"):
    program = getattr(programs, f"{name}_program")
    given = {"ROWS": 64, "KEYS": 64, "PRECISION": "ieee", **parts}
    constants = {name: given[name] for name in program.arg_names if name in given}
    types = NUMBERS | dict.fromkeys(("q", "k", "v", "dout"), "*bf16") | dict.fromkeys(constants, "constexpr")
    source = ASTSource(program, {name: types.get(name, "i32") for name in program.arg_names}, constants)
    made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": 8})
    print(name, made.metadata.shared, len(made.asm["cubin"]))
"""


@pytest.mark.parametrize("capability", [90, pytest.param(80, marks=pytest.mark.long)])
def test_the_programs_compile_for_gpus_that_are_not_here(capability: int) -> None:
    """To machine code, within the memory that a program's tiles share on the smallest of them: 99 kB."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", COMPILED, str(capability)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    assert len(lines) == 4
    for _, shared, size in lines:
        assert int(shared) <= 99 << 10
        assert int(size) > 1000


def test_each_program_is_given_what_it_takes() -> None:
    """A compiled program refuses other arguments, which the interpreter lets pass."""
    q, k, v = torch.randn(1, 2, 5, 16), torch.randn(1, 1, 7, 16), torch.randn(1, 1, 7, 16)
    call = kernel._call(q, k, v, Block(slice(0, 5), slice(0, 7)), 0.25, kernel.Tile(16, 16))
    backward = {"dout", "delta", "lse"}
    own = {
        "attend_program": {"out", "lse", "span"},
        "queries_backward_program": {"dq", *backward},
        "keys_backward_program": {"dk", "dv", "begin", "finish", *backward},
    }
    for name, more in own.items():
        taken = inspect.signature(getattr(kernel.programs(), name).fn).parameters
        assert {*taken} == {*call, *more} - {"num_warps", "num_stages"}


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(200))
def test_random_problems_on_a_gpu_agree_with_float64(seed: int) -> None:
    draw(seed, ("triton",), SERVED).check("cuda")
