"""The interpreter of Triton remembers of operands what it would find out anew, and refuses what a compiler does."""

import importlib
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

from attnmesh.kernels.triton_runtime import launch
from tests.support.emulation.interpreted import interpreting

pytest.importorskip("triton")

TYPES = ("int1", "int32", "uint32", "int64", "float16", "bfloat16", "float32", "pointer")
SHAPES = ((), (4,), (2, 1), (2, 4))
NUMBERS = (True, 0, 1, 3, -2, 2**40, 0.0, -0.5, 1e300, float("inf"), float("nan"))


def operand(name: str, shape: tuple[int, ...]) -> Any:
    """Return a tensor of Triton with numbers of its own."""
    interpreter: Any = importlib.import_module("triton.runtime.interpreter")
    core = interpreter.tl.core
    scalar = core.pointer_type(core.float32) if name == "pointer" else getattr(core, name)
    data = np.random.default_rng(len(name)).integers(0, 2, shape or (1,))
    handle = interpreter.TensorHandle(data.astype(interpreter._get_np_dtype(scalar)), scalar)
    return core.tensor(handle, core.block_type(scalar, [*shape]) if shape else scalar)


def outcome(function: Any, semantic: Any, lhs: Any, rhs: Any, flags: tuple[bool, ...]) -> Any:
    try:
        given = function(semantic, lhs, rhs, *flags)
    except Exception as error:
        return type(error), repr(error)
    return [(x.type.name, x.handle.dtype.name, x.handle.data.dtype, x.handle.data.tolist()) for x in given]


def test_operands_are_changed_as_the_first_time() -> None:
    interpreter: Any = importlib.import_module("triton.runtime.interpreter")
    semantic = interpreter.interpreter_semantic
    ours, seen = type(semantic).binary_op_type_checking_impl, 0
    tensors = [operand(name, shape) for name, shape in product(TYPES, SHAPES)]
    pairs = [*product(tensors, [*tensors, *NUMBERS]), *product(NUMBERS, tensors)]
    for (lhs, rhs), flags in product(pairs, [(), (True, True), (False, False, False), (False, False, True, True)]):
        expected = outcome(ours.__wrapped__, semantic, lhs, rhs, flags)
        for _ in range(2):
            found = outcome(ours, semantic, lhs, rhs, flags)
            assert repr(found) == repr(expected), (lhs, rhs, flags)
        seen += isinstance(expected, list)
    assert seen > len(pairs)


def test_operands_are_broadcast_as_the_first_time() -> None:
    interpreter: Any = importlib.import_module("triton.runtime.interpreter")
    semantic = interpreter.interpreter_semantic
    ours = type(semantic).broadcast_impl_value
    tensors = [operand(name, shape) for name, shape in product(("int1", "float32", "pointer"), (*SHAPES, (8, 4)))]
    for lhs, rhs in product(tensors, tensors):
        expected = outcome(ours.__wrapped__, semantic, lhs, rhs, ())
        assert [outcome(ours, semantic, lhs, rhs, ()) for _ in range(2)] == [expected] * 2


def test_bfloat16_becomes_float32_and_is_cut_from_it_as_by_stock() -> None:
    """Of subnormal numbers stock makes others."""
    interpreter: Any = importlib.import_module("triton.runtime.interpreter")
    ours, narrow, wide = interpreter._convert_float, interpreter.tl.bfloat16, interpreter.tl.float32
    exponents = np.arange(1 << 16) >> 7 & 255
    bits = np.arange(1 << 16, dtype=np.uint16)[(exponents > 0) | (np.arange(1 << 16) << 9 & 0xFFFF == 0)]
    floats = ours(bits, narrow, wide, None)
    assert np.array_equal(floats, ours.__wrapped__(bits, narrow, wide, None))
    numbers = (floats | 0x8765).view(np.float32)[exponents[bits] > 0]
    assert np.array_equal(ours(numbers, wide, narrow, None), ours.__wrapped__(numbers, wide, narrow, None))


def test_numbers_of_one_type_are_changed_each_by_itself() -> None:
    """The handles of a type may differ: a comparison has the handle of what it compares."""
    interpreter: Any = importlib.import_module("triton.runtime.interpreter")
    semantic, core = interpreter.interpreter_semantic, interpreter.tl.core
    wide = operand("int1", (2, 4))
    for dtype in (core.int32, core.float32):
        data = np.array([True])
        narrow = core.tensor(interpreter.TensorHandle(data, dtype), core.int1)
        ours = type(semantic).broadcast_impl_value
        expected = outcome(ours.__wrapped__, semantic, wide, narrow, ())
        assert [outcome(ours, semantic, wide, narrow, ()) for _ in range(2)] == [expected] * 2


def test_a_launch_is_given_what_its_program_takes() -> None:
    """Without a change the interpreter passes over keywords that are unknown, which a GPU refuses."""
    x = torch.zeros(4, dtype=torch.int64)
    given = {"bits": x, "count": 4, "other_bits": x, "other_count": 0, "device_counts": x, "MODULUS": 97, "WIDE": 16}
    checksum = torch.empty(2)
    where = "decode", "checksum", (1,), torch.device("cpu")
    with interpreting("triton"):
        launch(*where, **given, call_hash=5, checksum=checksum, num_warps=4)
        assert checksum.tolist() == [5.0, -5.0]
        with pytest.raises(TypeError, match="the program takes no number, state"):
            launch(*where, **given, call_hash=5, checksum=checksum, number=5, state=x)
