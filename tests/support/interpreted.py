"""Triton, told to interpret: it asks once, when it is imported, and PyTorch's compiler may import it first."""

import importlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from typing import Any

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

    interpreter._patch_lang = patched


if find_spec("triton") and not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
    for name in ("attend", "decode", "peers"):
        importlib.import_module(f"attnmesh.kernels.programs.{name}")
    del os.environ["TRITON_INTERPRET"]
    _patch_once_a_launch()


@contextmanager
def interpreting(kernel: str) -> Iterator[None]:
    """Triton's kernel runs on the CPU while the block does."""
    if kernel != "triton" or torch.cuda.is_available():
        yield
        return
    os.environ["TRITON_INTERPRET"] = "1"
    try:
        yield
    finally:
        del os.environ["TRITON_INTERPRET"]
