"""Triton's programs against float64: in its interpreter wherever Triton is installed, compiled where there is a GPU."""

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
from attnmesh.comm import peer_memory
from attnmesh.comm.message import MessageForm
from attnmesh.comm.mismatch import MODULUS, checksum_of
from attnmesh.core.digest import digest
from attnmesh.core.mask import Mask
from attnmesh.core.partial import Partial, merge_stack, with_sinks
from attnmesh.core.scaling import Scaling
from attnmesh.decoding.prepared_step import new_prepared_step
from attnmesh.decoding.step_arguments import StepInputs, StepSpec
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

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.fixture(autouse=True)
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    if not triton_runtime.installed():
        assert not os.environ.get("CI"), "install Triton: make sets it up"
        pytest.skip("Triton is not installed")
    monkeypatch.setenv("TRITON_INTERPRET", "1")


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


@pytest.mark.parametrize(
    "mask", [am.Causal(), am.Window(9), am.Causal() & am.Documents([40, 60]), am.Causal() & am.Chunks(30)]
)
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("reproducible", [False, True])
def test_a_step_reads_nothing_from_the_device(mask: Mask, padded: bool, reproducible: bool) -> None:
    if padded and (mask.ends or reproducible):
        return
    cache = am.KVCache(None, batch=2, kv_heads=2, head_dim=8, capacity=150, dtype=torch.float32)
    real = torch.rand(2, 100) < 0.7 if padded else None
    cache.append(*torch.randn(2, 2, 2, 100, 8).unbind(), token_mask=real)
    q, sinks = torch.randn(2, 4, 3, 8), torch.randn(4)
    options = {"mask": mask, "sinks": sinks, "reproducible": reproducible, "kernel": "triton"}
    expected = am.decode(q, cache, **options)
    held, where = cache.own_shard.view, (Axis(), Axis(), 16, 150, 8)
    spec = StepSpec(*where, mask, Scaling(8**-0.5), "auto", "replicated", reproducible, "triton")
    with NoHostReads():
        given, _ = new_prepared_step(q, held, spec, ()).compute(StepInputs(q, (), sinks), [held])
    assert torch.equal(given, expected)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # of what an earlier step left in a box
@pytest.mark.parametrize("seed", seeds(10, 100))
def test_random_messages_are_merged_in_one_launch(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One process plays all ranks: each sends its message to all, then each receives."""
    monkeypatch.setattr(peer_memory, "FLAGS", 3)
    monkeypatch.setattr(peer_memory, "BOX_ELEMENTS", 1 << 12)
    monkeypatch.setattr(peer_memory, "MAX_POLLS", 3)
    random = Random(seed)
    torch.manual_seed(seed)
    ranks = random.choice((2, 2, 3, 5))
    memories = [torch.zeros(peer_memory.memory_size(ranks)) for _ in range(ranks)]
    addresses = torch.tensor([x.data_ptr() for x in memories])
    everyone = [peer_memory.PeerMemory(addresses, rank, torch.zeros(1, dtype=torch.int32)) for rank in range(ranks)]
    for _ in range(random.choice((1, 2, 3))):
        shape = (random.choice((1, 2)), random.choice((1, 3)), random.choice((1, 3)), random.choice((8, 64, 80)))
        partials = Partial(torch.randn(ranks, *shape), 30 * torch.randn(ranks, *shape[:-1]))
        blind = torch.rand(partials.lse.shape) < 0.3
        partials.lse[blind], partials.out[blind] = -torch.inf, 0.0
        fault = random.choice(("none", "none", "none", "another call", "empty message", "no message"))
        form = MessageForm(shape, torch.float32, torch.float32)
        for rank, (out, lse) in enumerate(zip(*partials, strict=True)):
            last = rank == ranks - 1
            number = 18.0 if last and fault == "another call" else 17.0
            if last and fault == "empty message":
                none = MessageForm((1, 0, 0, 1), torch.float32, torch.float32)
                inf = torch.full((2,), torch.inf)
                message = none.pack(inf, Partial(torch.zeros(none.shape), torch.zeros(none.shape[:-1])))
                everyone[rank].merge(message, none.shape, take=False)
            elif last and fault == "no message":
                everyone[rank].steps.add_(1)
            else:
                checksum = torch.tensor([number, -number])
                everyone[rank].merge(form.pack(checksum, Partial(out, lse)), shape, take=False)
        exact = merge_stack(Partial(*(x.double() for x in partials)))
        for rank in range(ranks):
            if rank == ranks - 1 and fault.endswith("message"):
                continue
            checksum, (out, lse) = everyone[rank].merge(torch.zeros(form.size, dtype=torch.uint8), shape, put=False)
            if fault != "none":
                assert out.isnan().all()
                continue
            assert checksum.tolist() == [17.0, -17.0]
            assert torch.allclose(out.double(), exact.out, atol=2 * FLOAT32)
            assert torch.allclose(lse.double(), exact.lse, rtol=FLOAT32)


@pytest.mark.parametrize("seed", seeds(15, 100))
def test_checksums_of_random_calls_agree_with_pytorch(seed: int) -> None:
    random = Random(seed)
    torch.manual_seed(seed)
    tensors = [
        torch.randn(random.randint(1, 3000), dtype=random.choice((*DTYPES, torch.float64)))
        for _ in range(random.choice((1, 2)))
    ]
    call, device_counts, into = random.getrandbits(32), torch.tensor([random.getrandbits(20), 0]), torch.empty(2)
    expected = checksum_of(sum(map(digest, tensors), start=call + device_counts[0]), into)
    assert torch.equal(merging.launch_checksum(tensors, call, device_counts, MODULUS, into), expected)


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


@pytest.mark.parametrize("seed", seeds(15, 100))
def test_random_merges_agree_with_float64(seed: int) -> None:
    """In tensors of their own or packed in messages that are longer than they are, with sinks and checksums or not."""
    random = Random(seed)
    torch.manual_seed(seed)
    shape = random.choice((1, 2, 3, 8, 17)), random.choice((1, 3)), random.choice((1, 4)), random.choice((1, 5, 33))
    partials = Partial(torch.randn(*shape, random.choice((8, 64, 80))), 30 * torch.randn(shape))
    blind = torch.rand(shape) < 0.3
    partials.lse[blind], partials.out[blind] = -torch.inf, 0.0
    sinks = torch.randn(shape[2]) if random.random() < 0.5 else None
    exact = with_sinks(merge_stack(Partial(*(x.double() for x in partials))), sinks)
    if random.random() < 0.5:
        form = MessageForm(tuple(partials.out.shape[1:]), torch.float32, random.choice((torch.float32, torch.bfloat16)))
        agreed = random.random() < 0.7
        numbers = [17.0] * (shape[0] - 1) + [17.0 if agreed else 18.0]
        rows = torch.zeros(shape[0], form.size + 12, dtype=torch.uint8)
        for row, number, out, lse in zip(rows, numbers, *partials, strict=True):
            row[: form.size] = form.pack(torch.tensor([number, -number]), Partial(out, lse))
        checksum, whole = form.partial_views(form.merge_to_message(rows[:, : form.size]))
        assert checksum.tolist() == [max(numbers), -min(numbers)]
        if min(numbers) < max(numbers):
            assert whole.out.isnan().all()
            return
        given, sinks, exact = whole, None, merge_stack(Partial(*(x.double() for x in partials)))
        rounding = 2**-8 if form.out_dtype == torch.bfloat16 else 1e-6
    else:
        given, rounding = merging.merge_stack_on_device(partials, sinks=sinks), 1e-6
    largest = partials.out.abs().max().item()
    assert torch.allclose(given.out.double(), exact.out, rtol=0, atol=2 * rounding * max(1.0, largest))
    assert torch.allclose(given.lse.double(), exact.lse, rtol=FLOAT32)


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
