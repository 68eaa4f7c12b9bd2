"""Triton's programs against float64: in its interpreter wherever Triton is installed, compiled where there is a GPU."""

import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import attnmesh as am
from attnmesh.core.mask import Mask
from attnmesh.core.scaling import Scaling
from attnmesh.decoding.prepared_step import new_prepared_step
from attnmesh.decoding.step_arguments import StepInputs, StepOptions, StepSpec
from attnmesh.decoding.step_op import run_in_graph
from attnmesh.errors import KernelError
from attnmesh.kernels import selected_keys as selected
from attnmesh.kernels import stacked_merge as merging
from attnmesh.kernels import triton_runtime
from attnmesh.kernels.implementations import triton as kernel
from attnmesh.kernels.implementations.native import NATIVE
from attnmesh.kernels.rectangles import TILE_ELEMENTS, Rectangle
from attnmesh.mesh.axes import Axis
from attnmesh.mesh.shapes import AXES, Shape
from tests.support.emulation.interpreted import interpreting
from tests.support.ranks.pool import Pool, on_each_rank
from tests.support.truth import histories
from tests.support.truth.dense import truth
from tests.support.truth.mesh_problems import named_mesh
from tests.support.truth.problems import draw, selection
from tests.support.truth.seeds import seeds
from tests.support.truth.tolerances import FLOAT32

pytestmark = pytest.mark.usefixtures("interpreted")

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


SLOW = {0, 2, 14}
"""Problems of many rows and heads, each of a second or more in the interpreter: 6 stands for them."""


@pytest.mark.parametrize("seed", seeds({*range(20)} - SLOW, 100))
def test_random_problems_agree_with_float64(seed: int) -> None:
    draw(seed, ("triton",), DTYPES, longest=33).check()


def refuse(*_: Any) -> None:
    raise AssertionError("rows were gathered")


@pytest.mark.parametrize("seed", seeds(10, 60))
def test_selected_rows_are_read_in_place(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(NATIVE, "reads_scattered", False)
    monkeypatch.setattr(selected, "attend_dense", refuse)
    monkeypatch.setitem(TILE_ELEMENTS, "cpu", 1 << 12)  # so few that queries and selected keys are cut
    drawn = replace(draw(seed, ("auto",), DTYPES, longest=7), scale=None, memory="plain")
    positions = range(drawn.lengths[1]) if drawn.k_positions is None else drawn.k_positions.tolist()
    sizes = (drawn.batch, drawn.heads[1]), drawn.lengths[0], max(positions, default=-1) + 1
    replace(drawn, selected=selection(Random(seed), *sizes)).check()


WIDTHS = ((8, 8), (64, 64), (64, 40), (80, 80), (128, 128), (192, 128), (256, 256), (576, 512))


HISTORIES = (1, 2, 4, 5, 7, 8, 9, 14, 16, 18)
"""The shortest histories that together have each dtype, sinks, and one, two and three ranks."""


@pytest.mark.parametrize("seed", seeds(HISTORIES, 40))
def test_random_histories_of_a_cache_agree_with_float64(pool: Pool, tmp_path: Path, seed: int) -> None:
    """170 steps that read lengths, positions and padding on the device, on one rank or a few."""
    histories.check(histories.draw(seed, (1, 1, 2, 3), DTYPES, "triton", most=7), pool, tmp_path)


@on_each_rank
def decode_reproducibly(shape: tuple[int, ...], dtype: torch.dtype, mask: Mask) -> torch.Tensor:
    with interpreting("triton"):
        cache = am.KVCache(
            named_mesh(Shape(*shape), AXES), batch=2, kv_heads=2, head_dim=8, capacity=200, dtype=dtype, block=16
        )
        cache.append(*torch.randn(2, 2, 2, 150, 8, generator=torch.Generator().manual_seed(0)).to(dtype).unbind())
        q = torch.randn(2, 4, 3, 8, generator=torch.Generator().manual_seed(1)).to(dtype)
        return am.decode(q, cache, mask=mask, sinks=torch.ones(4), reproducible=True, kernel="triton")


@pytest.mark.parametrize(
    ("mask", "dtype"),
    [
        (am.Causal(), torch.float32),
        (am.Window(77), torch.bfloat16),
        pytest.param(am.Causal(), torch.bfloat16, marks=pytest.mark.long),
        pytest.param(am.Window(77), torch.float32, marks=pytest.mark.long),
        pytest.param(am.Window(40), torch.float32, marks=pytest.mark.long),
        pytest.param(am.Window(40), torch.bfloat16, marks=pytest.mark.long),
    ],
)
def test_bits_are_the_same_on_any_power_of_two(pool: Pool, dtype: torch.dtype, mask: Mask) -> None:
    (alone,) = pool.run(1, decode_reproducibly, (1, 1, 1), dtype, mask)
    for shape in ((1, 1, 2), (2, 1, 2)):
        for out in pool.run(Shape(*shape).ranks, decode_reproducibly, shape, dtype, mask):
            assert torch.equal(out, alone)


class NoHostReads(TorchDispatchMode):
    """Fails if the CPU reads a value from the device, which a CUDA graph cannot do."""

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        assert function is not torch.ops.aten._local_scalar_dense.default
        return function(*arguments, **(options or {}))


STEP_MASKS = (am.Causal(), am.Window(9), am.Causal() & am.Documents([40, 60]), am.Causal() & am.Chunks(30))
STEPS = [(mask, False, reproducible) for mask in STEP_MASKS for reproducible in (False, True)]
STEPS += [(mask, True, False) for mask in STEP_MASKS if not mask.ends]
"""Masks, and which steps are padded or reproducible: a padded step is neither reproducible nor of documents."""


@pytest.mark.parametrize(("mask", "padded", "reproducible"), STEPS)
def test_a_step_reads_nothing_from_the_device(mask: Mask, padded: bool, reproducible: bool) -> None:
    cache = am.KVCache(None, batch=2, kv_heads=2, head_dim=8, capacity=150, dtype=torch.float32)
    real = torch.rand(2, 100) < 0.7 if padded else None
    cache.append(*torch.randn(2, 2, 2, 100, 8).unbind(), token_mask=real)
    q, sinks = torch.randn(2, 4, 3, 8), torch.randn(4)
    options = {"mask": mask, "sinks": sinks, "reproducible": reproducible, "kernel": "triton"}
    expected = am.decode(q, cache, **options)
    held, where = cache.own_shard.view, (Axis(), Axis(), 16, 150, 8)
    step_options = StepOptions(mask, 8**-0.5, math.inf, "auto", "replicated", reproducible, "triton")
    spec = StepSpec(*where, step_options)
    with NoHostReads():
        given = run_in_graph(new_prepared_step(q, held, spec, ()), StepInputs(q, (), sinks), held)
    assert torch.equal(given, expected)


@pytest.mark.parametrize("seed", seeds(16, 40))
def test_random_decode_steps_agree_with_float64(seed: int) -> None:
    """Few rows, many keys: split over the keys, the splits merged in a launch of their own."""
    random = Random(seed)
    torch.manual_seed(seed)
    kv_heads, group = random.choice((1, 1, 2)), random.choice((1, 2, 4, 7, 16))
    rows, keys, batch = random.choice((1, 1, 1, 2, 5)), random.choice((1, 15, 64, 100, 257, 500)), random.choice((1, 2))
    width, values = random.choice(WIDTHS)
    mask = random.choice((am.Full(), am.Causal(), am.Window(30), am.Window(0)))
    rows, dtype = min(rows, keys), random.choice(DTYPES)
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
    splits = -(-500 // kernel._split_keys(500, 2, kernel.ProgramTile(16, 16), q.device))
    assert splits > 1
    whole = am.attend(q, k, v, kernel="triton")
    assert torch.allclose(whole.out, am.attend(q, k, v, kernel="reference").out, atol=FLOAT32)


def test_blocks_of_a_reproducible_step_have_the_same_bits_however_many_there_are() -> None:
    q, (k, v) = torch.randn(1, 4, 1, 16), torch.randn(2, 1, 2, 80, 16).unbind()
    blocks = [x.unflatten(2, (5, 16))[0].transpose(0, 1) for x in (k, v)]
    block = Rectangle(slice(0, 1), slice(0, 16))
    five = kernel.TRITON.attend(q.expand(5, -1, -1, -1), *blocks, block, Scaling(0.25))
    for number in range(5):
        one = kernel.TRITON.attend(q, *(x[number : number + 1] for x in blocks), block, Scaling(0.25))
        assert torch.equal(one.out[0], five.out[number])
        assert torch.equal(one.lse[0], five.lse[number])


def test_a_device_on_which_programs_fail_uses_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reason is a warning, except for an old GPU."""
    device, ability = torch.device("cpu"), {"now": (8, 0)}
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: ability["now"])
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "an old GPU")
    assert merging._gpu_fault.__wrapped__(device) is None
    assert kernel._fault.__wrapped__(device) is None
    ability["now"] = (7, 5)
    assert merging._gpu_fault.__wrapped__(device) == "an old GPU has no bfloat16 products"
    ability["now"] = (9, 0)
    monkeypatch.setattr(merging, "launch", lambda *_, **__: None)  # nothing is written
    with pytest.warns(UserWarning, match=r"uses PyTorch's own kernels, since Triton .*: a merge gives a wrong result"):
        assert "a merge gives a wrong result" in merging._gpu_fault.__wrapped__(device)

    def breaks(*_: object, **__: object) -> None:
        raise RuntimeError("no such instruction\nand more")

    monkeypatch.setattr(merging, "launch", breaks)
    monkeypatch.setattr(kernel, "launch", breaks)
    for prove in (merging._gpu_fault, kernel._fault):
        with pytest.warns(UserWarning, match="RuntimeError: no such instruction$"):
            assert prove.__wrapped__(device).endswith("RuntimeError: no such instruction")


def test_sinks_may_have_any_strides() -> None:
    cache = am.KVCache(None, batch=1, kv_heads=2, head_dim=8, capacity=20, dtype=torch.float32)
    cache.append(*torch.randn(2, 1, 2, 20, 8).unbind())
    q = torch.randn(1, 4, 1, 8)
    for sinks in (torch.randn(4, 2)[:, 0], torch.ones(1).expand(4), torch.randn(4).bfloat16()):
        ours, theirs = (am.decode(q, cache, sinks=sinks, kernel=name) for name in ("triton", "cpu"))
        assert torch.allclose(ours, theirs, atol=FLOAT32)


def test_tiles_shrink_until_a_program_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    class OutOfResources(Exception):
        pass

    x = torch.zeros(1, 1, 40, 8)
    tiles = []

    def act(tile: kernel.ProgramTile) -> kernel.ProgramTile:
        tiles.append(tile)
        if tile.rows * tile.keys > 32 * 16:
            raise OutOfResources
        return tile

    monkeypatch.setattr(kernel, "_FITTING_TILES", {})
    monkeypatch.setattr(kernel, "_tile", lambda q, v, rows: kernel.ProgramTile(64, 64))
    for _ in range(2):
        assert kernel._with_fitting_tile("attend", x, x, 40, act)[:2] == (32, 16)
    assert [tile[:2] for tile in tiles] == [(64, 64), (64, 32), (64, 16), (32, 16), (32, 16)]


def test_unsupported_tensors_raise_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    x, wide = torch.zeros(1, 1, 4, 8), torch.zeros(1, 1, 4, 600)
    with pytest.raises(KernelError, match=r"kernel triton.*it does not support torch.float64"):
        am.attend(x.double(), x.double(), x.double(), kernel="triton")
    with pytest.raises(KernelError, match=r"heads are 600 wide, of at most 576"):
        am.attend(wide, wide, wide, kernel="triton")
    monkeypatch.setattr(merging, "installed", lambda: False)
    with pytest.raises(KernelError, match="Triton is not installed"):
        am.attend(x, x, x, kernel="triton")
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(KernelError, match=r"it runs on CUDA, the tensors are on cpu"):
        am.attend(x, x, x, kernel="triton")


COMPILED = """
import sys, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from attnmesh.kernels.programs import attend, decode, peers

POINTERS = {"low": "*i32", "high": "*i32", "begin": "*i32", "finish": "*i32", "bits": "*i16", "other_bits": "*i16"}
POINTERS |= dict.fromkeys(("positions", "token_index", "device_counts", "firsts", "lasts"), "*i64")
POINTERS |= dict.fromkeys(("q", "k", "v", "dout"), "*bf16")
POINTERS |= dict.fromkeys(("out", "lse", "delta", "dq", "dk", "dv", "outs", "lses"), "*fp32")
POINTERS |= dict.fromkeys(("checksum", "checksums", "sinks"), "*fp32") | dict.fromkeys(("scale", "softcap"), "fp32")
POINTERS["left"] = "i64"
TILE = {"ROWS": 64, "KEYS": 64, "PRECISION": "tf32x3", "Q_0": 128, "Q_1": 64, "V_0": 128, "V_1": 0}
POINTERS |= {"message": "*fp32", "memories": "*i64", "counter": "*i32"}
DECODE = {"ROWS": 16, "WIDE": 1024, "MODULUS": 16777213, "SEND": True, "RECEIVE": True}
PLAIN = {"K_ROW": 0, "V_ROW": 0, "FLOAT8": False}
FLAGS = dict.fromkeys(("BOUNDED", "NEAR", "HAS_SINKS", "HAS_CHECKSUMS", "CAPPED"))
capability, flag = int(sys.argv[1]), sys.argv[2] == "True"

def compiled(room, name, stored={}):
    program, given = getattr(room, name + "_program"), TILE | ({} if room is attend else DECODE | PLAIN)
    given = given | dict.fromkeys(FLAGS, flag) | stored
    constants = {name: given[name] for name in program.arg_names if name in given}
    types = POINTERS | dict.fromkeys(("k", "v") if stored else (), "*i8") | dict.fromkeys(constants, "constexpr")
    source = ASTSource(program, {name: types.get(name, "i32") for name in program.arg_names}, constants)
    made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": 8})
    print(name, made.metadata.shared, len(made.asm["cubin"]))

for name in ("attend", "queries_backward", "keys_backward"):
    compiled(attend, name)
for name in ("attend_cache", "merge"):
    compiled(decode, name)
compiled(decode, "attend_cache", {"K_ROW": 192, "V_ROW": 128, "FLOAT8": flag, "KEYS": 32})
compiled(decode, "checksum")
compiled(peers, "one_shot")
"""


@pytest.mark.parametrize(
    ("capability", "flag"),
    [(90, True), *(pytest.param(*kind, marks=pytest.mark.long) for kind in ((90, False), (80, True), (80, False)))],
)
def test_the_programs_compile_for_other_gpus(capability: int, flag: bool) -> None:
    """To machine code, within the memory that a program's tiles share on the smallest of them: 99 kB.

    With the flag masks have bounds, and there are sinks, checksums and caps.
    """
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", COMPILED, str(capability), str(flag)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    assert len(lines) == 8
    for _, shared, size in lines:
        assert int(shared) <= 99 << 10
        assert int(size) > 1000


def test_numbers_that_no_program_is_compiled_for_are_parameters_by_name() -> None:
    """Triton ignores a name that no program has, and would compile anew for values of the number that is meant."""
    programs = [vars(triton_runtime.programs(file)) for file in ("attend", "decode", "peers")]
    taken = {name for each in programs for x in each.values() for name in getattr(x, "arg_names", ())}
    assert {*triton_runtime.programs("tiles").program.keywords["do_not_specialize"]} <= taken
