"""Triton, told to interpret: it asks once, when it is imported, and PyTorch's compiler may import it first."""

import importlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec

import torch

if find_spec("triton") and not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
    for name in ("attend", "decode", "peers"):
        importlib.import_module(f"attnmesh.kernels.programs.{name}")
    del os.environ["TRITON_INTERPRET"]


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
