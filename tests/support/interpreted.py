"""Triton, told to interpret: it asks once, when it is imported, and PyTorch's compiler may import it first."""

import importlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from inspect import getmembers
from typing import Any
from unittest.mock import patch

import numpy as np
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
    make_block, make_tensor = core.block_type.__init__, core.tensor.__init__
    blocks, tensors, dtypes, known = (dict[Any, Any]() for _ in range(4))

    def block(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = known.get(id(shape)) or tuple(x.value if isinstance(x, core.constexpr) else x for x in shape)
        key = element_ty.name, getattr(element_ty, "const", None), getattr(element_ty, "address_space", None), sizes
        if key not in blocks:
            make_block(self, element_ty, shape)
            blocks[key] = {**self.__dict__, "sizes": sizes}
            known[id(self.shape)] = sizes
        self.__dict__.update(blocks[key])

    def tensor(self: Any, handle: Any, type: Any) -> None:
        key = type.sizes if type.is_block() else ()
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


def _check_operands_once() -> None:
    """Let binary operators find the dtype and the shape of a result once.

    Sums and products of integers are checked by numpy. The interpreter looks for an overflow with six operations of its
    own, and says nothing of what it finds.
    """
    interpreter: Any = importlib.import_module("triton.runtime.interpreter")
    core, semantic = interpreter.tl.core, interpreter.interpreter_semantic
    check_types, dtype_of = semantic.binary_op_type_checking_impl, semantic.computation_type_impl
    spread = semantic.broadcast_impl_value
    integers = frozenset(core.dtype.SINT_TYPES + core.dtype.UINT_TYPES)
    exact, dtypes = {"add": np.add, "sub": np.subtract, "mul": np.multiply}, dict[Any, Any]()

    def types(lhs: Any, rhs: Any, *pointers: bool, **options: bool) -> Any:
        if not options and isinstance(lhs, core.tensor) and isinstance(rhs, core.tensor):
            if lhs.dtype.name == rhs.dtype.name and not lhs.dtype.is_ptr() and lhs.shape == rhs.shape:
                return lhs, rhs
        return check_types(lhs, rhs, *pointers, **options)

    def broadcast(lhs: Any, rhs: Any) -> Any:
        sizes = [getattr(x.type, "sizes", None) for x in (lhs, rhs)]
        if sizes[0] == sizes[1]:
            return lhs, rhs
        if None in sizes or len(sizes[0]) != len(sizes[1]):
            return spread(lhs, rhs)
        shape = np.broadcast_shapes(*sizes)
        return tuple(x if size == shape else widened(x, shape) for x, size in zip((lhs, rhs), sizes, strict=True))

    def widened(x: Any, shape: tuple[int, ...]) -> Any:
        return core.tensor(semantic.builder.create_broadcast(x.handle, shape), core.block_type(x.dtype, shape))

    def dtype(a: Any, a_is_scalar: bool, b: Any, b_is_scalar: bool, div_or_mod: bool) -> Any:
        key = a.name, a_is_scalar, b.name, b_is_scalar, div_or_mod
        if key not in dtypes:
            dtypes[key] = dtype_of(a, a_is_scalar, b, b_is_scalar, div_or_mod)
        return dtypes[key]

    def sanitize(lhs: Any, rhs: Any, operator: Any) -> None:
        if lhs.dtype.int_bitwidth < 64:
            wide = exact[operator.__name__](*(x.handle.data.astype(np.int64) for x in (lhs, rhs)))
            least, most = lhs.dtype.get_int_min_value(), lhs.dtype.get_int_max_value()
            assert wide.min() >= least and wide.max() <= most, f"{lhs.dtype} overflows in {operator.__name__}"

    core.dtype.is_int = lambda self: self.name in integers
    semantic.binary_op_type_checking_impl, semantic.computation_type_impl = types, dtype
    semantic.broadcast_impl_value, semantic.binary_op_sanitize_overflow_impl = broadcast, sanitize


if find_spec("triton") and not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
    for name in ("attend", "decode", "peers"):
        importlib.import_module(f"attnmesh.kernels.programs.{name}")
    del os.environ["TRITON_INTERPRET"]
    _patch_once_a_launch()
    _describe_types_once()
    _check_operands_once()


@contextmanager
def interpreting(kernel: str) -> Iterator[None]:
    """Triton's kernel runs on the CPU while the block does, and merges are timed once, on short messages."""
    if kernel != "triton" or torch.cuda.is_available():
        yield
        return
    os.environ["TRITON_INTERPRET"] = "1"
    try:
        with patch.multiple("attnmesh.comm.transport", TRIAL_BATCHES=(1,), TRIALS=2, TRIAL_CALLS=1):
            yield
    finally:
        del os.environ["TRITON_INTERPRET"]
