"""Files of tensors: other programs read them, and what no file can hold is refused."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from attnmesh.errors import StoreError
from attnmesh.store.save_layers import save_layers
from attnmesh.store.tensor_file import TensorFile, link_or_write
from tests.support.caches.saves import cache_of


def test_files_are_valid_safetensors(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    tensors = {
        "a": torch.randn(3, 5).bfloat16(),
        "empty": torch.zeros(0, 4),
        "b": torch.arange(7),
        "c": torch.ones(2) > 0,
    }
    link_or_write(tmp_path / "ours", tensors)
    others = safetensors.load_file(tmp_path / "ours")
    ours = TensorFile(tmp_path / "ours")
    for name, x in tensors.items():
        assert torch.equal(others[name], x)
        assert torch.equal(ours.read(name), x)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ([1], "tensors by their names, given list"),
        ({"x": [1]}, "tensors by their names, given 'x': list"),
        ({3: torch.ones(2)}, "tensors by their names, given 3: Tensor"),
        ({"x": torch.ones(2, dtype=torch.int32)}, r"dense tensors of bool, .*, given 'x' as torch.int32"),
        ({"x": torch.ones(2).to_sparse()}, r"dense tensors of .*, given 'x' as torch.float32, torch.sparse_coo"),
    ],
)
def test_tensors_that_no_file_can_hold_raise(tmp_path: Path, more: Any, message: str) -> None:
    with pytest.raises(StoreError, match=f"save more: expected {message}"):
        save_layers([cache_of(20)], tmp_path, extra_tensors=more)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("shape", [[0, 1 << 47, 1 << 47], [1 << 43], [(1 << 48) - 1] * 200_000, [1] * 9])
def test_impossible_shapes_raise(tmp_path: Path, shape: list[int]) -> None:
    """The sparse file is as long as its header says, so only a check before the allocation can raise."""
    size = math.prod(shape) if len(shape) < 9 else 1
    header = {"__metadata__": {"x": "0"}, "x": {"dtype": "U8", "shape": shape, "data_offsets": [0, size]}}
    text = json.dumps(header).encode()
    with (tmp_path / "file").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + size)
    with pytest.raises(StoreError):
        TensorFile(tmp_path / "file").read("x")
