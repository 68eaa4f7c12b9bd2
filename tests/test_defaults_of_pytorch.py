"""Calls have the same bits whatever the default device and dtype of PyTorch are, and under inference mode."""

import ast
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import attnmesh as am
from attnmesh.mesh.shapes import AXES, Shape
from tests.support.ranks.pool import Pool, on_each_rank
from tests.support.truth.mesh_problems import named_mesh
from tools.rooms import FILES, PACKAGES

MAKERS = {
    "arange",
    "empty",
    "eye",
    "full",
    "linspace",
    "ones",
    "rand",
    "randint",
    "randn",
    "randperm",
    "tensor",
    "zeros",
}
"""Functions of PyTorch that make a tensor on the default device."""

FLOATS = {"eye", "linspace", "ones", "rand", "randn", "zeros"}
"""Those of them whose numbers have the default dtype."""


def made_tensors() -> Iterator[tuple[str, str, set[str | None]]]:
    """Yield the place, the function and the keywords of each call in the package that makes a tensor."""
    for file in {**FILES, **PACKAGES}.values():
        for call in ast.walk(ast.parse(file.read_text())):
            match call:
                case ast.Call(func=ast.Attribute(value=ast.Name("torch"), attr=name)) if name in MAKERS:
                    yield f"{file.name}:{call.lineno}", name, {keyword.arg for keyword in call.keywords}


def test_each_tensor_that_is_made_names_its_device_and_dtype() -> None:
    """`**` stands for keywords that a table has."""
    made = [*made_tensors()]
    assert len(made) > 100
    assert not [place for place, _, keywords in made if not keywords & {"device", "out", None}]
    assert not [place for place, name, keywords in made if name in FLOATS and not keywords & {"dtype", "out", None}]


@contextmanager
def other_defaults() -> Iterator[None]:
    """Make bfloat16 and the device that holds no numbers the defaults."""
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.bfloat16)
        with torch.device("meta"):
            yield
    finally:
        torch.set_default_dtype(before)


def results(shape: Shape, folder: Path, whole: list[Tensor], rows: Tensor) -> list[Tensor]:
    """Return what each kind of call returns on a mesh: sharding, attention, its gradients, a prefill and steps."""
    mesh, documents = named_mesh(shape, AXES), am.Causal() & am.Documents([9, 20, 2])
    q, k, v = (am.shard(x, mesh, layout="auto", mask=documents).requires_grad_() for x in whole)
    out = am.attention(q, k, v, mesh=mesh, mask=documents, layout="auto")
    found = [am.unshard(out.detach(), mesh, layout="auto", mask=documents), *torch.autograd.grad(out.sum(), (q, k, v))]
    striped = [am.shard(x, mesh, layout=am.Striped(2)) for x in whole]
    lengths = whole[0].new_tensor([17], dtype=torch.int64)
    for exchange in ("bulk", "ring"):
        found.append(am.attention(*striped, mesh=mesh, layout=am.Striped(2), key_lengths=lengths, exchange=exchange))
    sizes = {"batch": 1, "kv_heads": 2, "head_dim": 8, "capacity": 64, "dtype": torch.float32, "block": 4}
    for options in ({}, {"folder": folder}, {"storage": "int8"}, {"hot": 8}):
        cache = am.KVCache(mesh, **sizes, **options)
        positions = cache.layout.positions(31, shape.ranks, dist.get_rank() if dist.is_initialized() else 0)
        cache.append_shard(*(x[:, :, positions] for x in whole[1:]), positions)
        cache.append(*(x[:, :, :3] for x in whole[1:]))
        for reproducible in [False] if shape.ranks == 3 else [False, True]:
            found.append(am.decode(rows, cache, reproducible=reproducible))
        found.append(am.decode(rows, cache, mask=am.Window(9)))
        cache.truncate(30)
        found.append(am.decode(rows[:, :, :1], cache))
    return found


@on_each_rank
def compare_defaults(shape: Shape, folder: Path) -> list[int]:
    """Return the numbers of the results that other defaults change."""
    generator = torch.Generator().manual_seed(0)
    whole = [torch.randn(1, heads, 31, 8, generator=generator) for heads in (4, 2, 2)]
    rows = torch.randn(1, 4, 3, 8, generator=generator)
    with other_defaults():
        given = results(shape, folder / "one", whole, rows)
    wanted = results(shape, folder / "other", whole, rows)
    return [number for number, pair in enumerate(zip(given, wanted, strict=True)) if not torch.equal(*pair)]


@pytest.mark.parametrize("shape", [Shape(1, 1, 1), Shape(1, 2, 1), Shape(2, 1, 2), Shape(1, 1, 3)])
def test_no_default_changes_a_result(pool: Pool, tmp_path: Path, shape: Shape) -> None:
    assert pool.run(shape.ranks, compare_defaults, shape, tmp_path) == [[]] * shape.ranks
