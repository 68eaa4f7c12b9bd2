"""Triton, told to interpret: it asks once, when it is imported, and PyTorch's compiler may import it first."""

import importlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from functools import cache, wraps
from importlib.util import find_spec
from inspect import getmembers
from numbers import Number
from typing import Any
from unittest.mock import patch

import pytest
import torch


def _patch_once_a_launch() -> None:
    """Let a launch prepare Triton's language once: each function that its program calls would do it again."""
    interpreter: Any = importlib.import_module("triton.runtime.interpreter")
    patch, modules = interpreter._patch_lang, (interpreter.tl, interpreter.tl.core)
    scopes, done = list[Any](), set[int]()

    @cache
    def languages(function: Any) -> frozenset[int]:
        """Return which modules of the language a function uses."""
        return frozenset(id(x) for x in function.__globals__.values() if any(x is each for each in modules))

    core = interpreter.tl.core
    members = cache(lambda place: [name for name, x in getmembers(place) if core.is_builtin(x)])

    def patch_builtins(place: Any, builder: Any, scope: Any) -> None:
        for name in members(place):
            if core.is_builtin(member := getattr(place, name)):
                interpreter._patch_attr(place, name, member, builder, scope)

    def patched(function: Any) -> Any:
        is_inner = bool(scopes and scopes[0]._changes)  # a launch that has ended has taken its changes back
        if is_inner and languages(function) <= done:
            return scopes[0]
        scope = patch(function)
        if not is_inner:
            scopes[:] = [scope]
            done.clear()
        done.update(languages(function))
        return scope

    for place in (*modules, interpreter.tl.math, core.tensor, core.tensor_descriptor_base):
        members(place)  # while none is patched
    interpreter._patch_lang, interpreter._patch_builtin = patched, patch_builtins


def _describe_types_once() -> None:
    """Let tensors of a shape and a dtype share their description, which the interpreter makes anew for each value."""
    interpreter: Any = importlib.import_module("triton.runtime.interpreter")
    core, numpy_dtype_of = interpreter.tl.core, interpreter._get_np_dtype
    make_block, make_tensor, equal = core.block_type.__init__, core.tensor.__init__, core.dtype.__eq__
    blocks, tensors, dtypes = (dict[Any, Any]() for _ in range(3))

    def block(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = tuple(x.value if isinstance(x, core.constexpr) else x for x in shape)
        key = element_ty.name, getattr(element_ty, "const", None), getattr(element_ty, "address_space", None), sizes
        if key not in blocks:
            make_block(self, element_ty, shape)
            blocks[key] = dict(self.__dict__)
        self.__dict__.update(blocks[key])

    def tensor(self: Any, handle: Any, type: Any) -> None:
        key = tuple(type.shape) if type.is_block() else ()
        if key not in tensors:
            make_tensor(self, handle, type)
            tensors[key] = self.numel, self.shape
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.numel, self.shape = tensors[key]

    def numpy_dtype(type: Any) -> Any:
        name = type.scalar.name
        if name not in dtypes:
            dtypes[name] = numpy_dtype_of(type)
        return dtypes[name]

    core.block_type.__init__, core.tensor.__init__, interpreter._get_np_dtype = block, tensor, numpy_dtype
    core.dtype.__eq__ = lambda self, other: self is other or equal(self, other)


def _leave_out_checks_of_no_effect() -> None:
    """Turn off sums and products in 64 bits beside each one in 32, whose overflow the interpreter asserts to nobody."""
    builder: Any = importlib.import_module("triton.runtime.interpreter").interpreter_builder
    assert not builder.options.debug
    builder.options = replace(builder.options, sanitize_overflow=False)


def _refuse_unknown_keywords() -> None:
    """Let a launch refuse keywords that its program does not take, as a compiled one does."""
    launch: Any = importlib.import_module("triton.runtime.interpreter").GridExecutor
    compiler: Any = importlib.import_module("triton.backends.nvidia.compiler")
    options = {field.name for field in fields(compiler.CUDAOptions)}
    call = launch.__call__

    @wraps(call)
    def checked(self: Any, *arguments: Any, **keywords: Any) -> None:
        if unknown := keywords.keys() - {*self.arg_names} - options:
            raise TypeError(f"the program takes no {', '.join(sorted(unknown))}")
        call(self, *arguments, **keywords)

    launch.__call__ = checked


def _shift_bfloat16() -> None:
    """Let bfloat16 become float32, and float32 be cut to bfloat16, by a shift of bits, which stock takes apart."""
    interpreter: Any = importlib.import_module("triton.runtime.interpreter")
    stock, wide, narrow = interpreter._convert_float, interpreter.tl.float32, interpreter.tl.bfloat16

    @wraps(stock)
    def converted(numbers: Any, given: Any, wanted: Any, rounding: Any) -> Any:
        if (given, wanted) == (narrow, wide):
            return numbers.view("uint16").astype("uint32") << 16
        if (given, wanted, rounding) == (wide, narrow, None):
            return (numbers.view("uint32") >> 16).astype("uint16")
        return stock(numbers, given, wanted, rounding)

    interpreter._convert_float = converted


Change = Callable[[Any, Any], Any]
"""Makes an operand what its operator takes, given Triton's semantic."""


def _change(given: Any, found: Any) -> Change:
    """Return how an operand was changed: a number into a constant, a tensor by a cast and a broadcast."""
    interpreter: Any = importlib.import_module("triton.runtime.interpreter")
    tensor, handle = interpreter.tl.core.tensor, interpreter.TensorHandle
    kind = found.type
    if found is given:
        return lambda _, x: x
    if type(given) is not tensor:
        numbers, dtype = found.handle.data.copy(), found.handle.dtype
        numbers.flags.writeable = False
        return lambda *_: tensor(handle(numbers, dtype), kind)
    casts = given.type.scalar != kind.scalar
    was_block = given.type.is_block()
    shape = [*kind.shape] if kind.is_block() else []
    fits = shape == ([*given.type.shape] if was_block else [])

    def changed(semantic: Any, x: Any) -> Any:
        x = semantic.cast(x, kind.scalar) if casts else x
        if fits:
            return x
        builder = semantic.builder
        spread = builder.create_broadcast(x.handle, shape) if was_block else builder.create_splat(kind, x.handle)
        return tensor(spread, kind)

    return changed


def _remember_operands() -> None:
    """Let operands be cast and broadcast as those of the same types were before, and numbers as the same numbers."""
    core: Any = importlib.import_module("triton.runtime.interpreter").tl.core
    semantic: Any = importlib.import_module("triton.language.semantic").TritonSemantic

    def remembering(stock: Callable[..., tuple[Any, Any]]) -> Callable[..., tuple[Any, Any]]:
        known = dict[Any, tuple[Change, Change]]()

        @wraps(stock)
        def changed(self: Any, lhs: Any, rhs: Any, *flags: bool, **named: bool) -> tuple[Any, Any]:
            key = kind_of(lhs), kind_of(rhs), flags, *named.items()
            if None in key or key not in known:
                found = stock(self, lhs, rhs, *flags, **named)
                known[key] = _change(lhs, found[0]), _change(rhs, found[1])
                return found
            one, other = known[key]
            return one(self, lhs), other(self, rhs)

        return changed

    def kind_of(x: Any) -> Any:
        """Return what decides how an operand is changed; None for what has to be looked at."""
        if type(x) is core.tensor:
            return x.type.name
        return (type(x), repr(x)) if isinstance(x, Number) else None  # 0.0 is no -0.0

    for name in ("binary_op_type_checking_impl", "broadcast_impl_value"):
        setattr(semantic, name, remembering(getattr(semantic, name)))


if find_spec("triton") and not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
    for name in ("attend", "decode", "peers"):
        importlib.import_module(f"attnmesh.kernels.programs.{name}")
    importlib.import_module("triton.experimental.gluon.nvidia.hopper")  # or the first launch of each rank does
    del os.environ["TRITON_INTERPRET"]
    _patch_once_a_launch()
    _describe_types_once()
    _leave_out_checks_of_no_effect()
    _refuse_unknown_keywords()
    _shift_bfloat16()
    _remember_operands()


def _times_by_size(transport: Any, *_: Any) -> list[int]:
    """Return the times of a merge by tree, and direct, without timing them: a tree is faster on even sizes."""
    return [1, 2] if transport.axis.size % 2 == 0 else [2, 1]


@contextmanager
def untimed_merges() -> Iterator[None]:
    """Merges are not timed while the block runs, which takes a quarter of a second for each group of busy ranks."""
    with patch("attnmesh.comm.merge_trials._time_merges", _times_by_size):
        yield


@contextmanager
def interpreting(kernel: str) -> Iterator[None]:
    """Triton's kernel runs on the CPU while the block does, and merges are not timed."""
    if kernel != "triton" or torch.cuda.is_available():
        yield
        return
    os.environ["TRITON_INTERPRET"] = "1"
    try:
        with untimed_merges():
            yield
    finally:
        del os.environ["TRITON_INTERPRET"]


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's programs run in its interpreter, or the test is skipped."""
    if find_spec("triton") is None:
        assert not os.environ.get("CI"), "install Triton: make sets it up"
        pytest.skip("Triton is not installed")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
