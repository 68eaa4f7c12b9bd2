"""Recurrent layers by heads: the rule over the whole sequence for each rank's heads, and the all-to-all around it."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import attnmesh as am
import attnmesh.hf as hf
from attnmesh import errors
from attnmesh.core.layout import Layout
from attnmesh.hf.recurrent.chain import ChainParts, HeadChain
from attnmesh.mesh.axes import Axis
from attnmesh.mesh.shapes import Shape
from attnmesh.recurrent.head_exchange import heads_to_tokens, tokens_to_heads
from tests.support.models.checks import AXES, prompt
from tests.support.models.recurrent import EXCHANGED, TOLERANCE, check_trained, trained
from tests.support.models.tiny_models import Case, build
from tests.support.ranks.pool import Pool, on_each_rank
from tests.support.truth.mesh_problems import named_mesh

PARTS = (
    ([0, 1], [31, 30]),
    ([0, 1, 1, 0], [15, 15, 15, 16]),
    ([1, 0, 0, 1], [0, 3, 0, 5]),
)


@on_each_rank
def check_exchange(owners: list[int], lengths: list[int]) -> dict[str, bool]:
    """Whether all tokens arrive in order and return, and whether gradients are those of the inverse."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    place = Axis(ranks, rank, dist.group.WORLD), owners, lengths
    whole = torch.arange(2.0 * sum(lengths) * ranks * 3).view(2, sum(lengths), ranks, 3)
    mine = [part for owner, part in zip(owners, whole.split(lengths, 1), strict=True) if owner == rank]
    x = torch.cat(mine, 1).requires_grad_()
    found = tokens_to_heads(x, *place)
    back = heads_to_tokens(found, *place)
    back.backward(x.detach() + 1)
    right = {"arrival": torch.equal(found, whole[:, :, rank]), "return": torch.equal(back, x)}
    fake = tokens_to_heads(x.detach().to("meta"), *place)
    right["fake arrival"] = fake.shape == found.shape
    right["fake return"] = heads_to_tokens(fake, *place).shape == x.shape
    return right | {"gradient": x.grad is not None and torch.equal(x.grad, x.detach() + 1)}


@pytest.mark.parametrize(("owners", "lengths"), PARTS)
def test_heads_come_back_to_their_tokens(owners: list[int], lengths: list[int], pool: Pool) -> None:
    for right in pool.run(2, check_exchange, owners, lengths):
        assert right == dict.fromkeys(right, True)


@on_each_rank
def check_dtypes() -> dict[str, bool]:
    """Whether tensors of two dtypes arrive, each with this rank's heads, and return."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    chain = HeadChain("a layer", [ChainParts(Axis(ranks, rank, dist.group.WORLD), [0, 1], [3, 2], [3 - rank])], [5])
    wide = torch.arange(5.0 * 4 * 3).view(1, 5, 4, 3)
    flat = torch.arange(5.0 * 2).view(1, 5, 2).bfloat16()
    mine = slice(0, 3) if rank == 0 else slice(3, 5)
    first, second, narrow, _ = chain.gather(wide[:, mine], wide[:, mine].sin(), flat[:, mine], wide[:, mine].bfloat16())
    heads = slice(2 * rank, 2 * rank + 2)
    return {
        "first": torch.equal(first, wide[:, :, heads]),
        "second": torch.equal(second, wide.sin()[:, :, heads]),
        "one head a rank": torch.equal(narrow, flat[:, :, rank : rank + 1]),
        "return": torch.equal(chain.scatter(first), wide[:, mine]),
        "own heads": torch.equal(chain.own_heads(torch.arange(4)), torch.arange(4)[heads]),
    }


def test_tensors_of_several_dtypes_and_head_counts_are_gathered(pool: Pool) -> None:
    for right in pool.run(2, check_dtypes):
        assert right == dict.fromkeys(right, True)


@on_each_rank
def train_by_heads(name: str, layouts: list[Layout], length: int) -> list[tuple[float, dict[str, Tensor]]]:
    ids = prompt(length, batch=2)
    results = []
    for layout in layouts:
        mesh = named_mesh(Shape(1, 2, 1), AXES)
        batch = hf.shard_batch({"input_ids": ids, "labels": ids}, mesh, layout, exchange="heads")
        results.append(trained(build(EXCHANGED[name], "attnmesh", torch.float64), batch))
    return results


@pytest.mark.parametrize(("name", "length"), [*((name, 61) for name in EXCHANGED), ("qwen3_next", 3)])
def test_loss_and_gradients_are_those_of_one_device(name: str, length: int, pool: Pool) -> None:
    ids, layouts = prompt(length, batch=2), [am.Contiguous(), am.Zigzag()]
    stock = build(EXCHANGED[name], "eager", torch.float64)
    loss, gradients = trained(stock, {"input_ids": ids, "labels": ids, "use_cache": False})
    for results in zip(*pool.run(2, train_by_heads, name, layouts, length), strict=True):
        check_trained([*results], loss, gradients, TOLERANCE)


NEEDS_SCAN = "shard_batch exchange: expected layers of the gated delta rule, KDA or Mamba-2"
REFUSED: dict[str, tuple[str, dict[str, Any], Any, str]] = {
    "no such exchange": (
        "qwen3_next",
        {},
        "states",
        "ArgumentError: shard_batch exchange: expected one of scan, heads",
    ),
    "no name": ("qwen3_next", {}, 1, "ArgumentError: shard_batch exchange: expected one of scan, heads, given 1. "),
    "ranks that differ": ("qwen3_next", {}, None, "MeshError: shard_batch: expected the same call on every rank"),
    "3 value heads": (
        "kimi_linear",
        {"linear_num_heads": 3},
        "heads",
        "ShapeError: shard_batch exchange: expected key heads that 2 ranks divide evenly, given 3 key heads in Kimi",
    ),
    "one group": (
        "bamba",
        {"mamba_n_groups": 1},
        "heads",
        "ShapeError: shard_batch exchange: expected groups that 2 ranks divide evenly, given 1 groups in BambaMixer. ",
    ),
    "Mamba-1": ("mamba", {}, "heads", f"KernelError: {NEEDS_SCAN}"),
    "Lightning": ("minimax", {}, "heads", f"KernelError: {NEEDS_SCAN}"),
    "RG-LRU": ("recurrent_gemma", {}, "heads", f"KernelError: {NEEDS_SCAN}"),
}


@on_each_rank
def catch_refusal(name: str) -> str:
    kind, changes, exchange, _ = REFUSED[name]
    if exchange is None:
        exchange = "heads" if dist.get_rank() else "scan"
    ids, mesh = prompt(12), named_mesh(Shape(1, 1, 2), AXES)
    try:
        batch = hf.shard_batch({"input_ids": ids, "labels": ids}, mesh, am.Contiguous(), exchange=exchange)
        build(Case(kind, kind, changes), "attnmesh", torch.float32)(**batch)
    except errors.InputError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


@pytest.mark.parametrize("name", REFUSED)
def test_what_heads_cannot_do_is_refused_on_all_ranks(name: str, pool: Pool) -> None:
    for error in pool.run(2, catch_refusal, name):
        assert error.startswith(REFUSED[name][-1]), error
        assert "Fix: " in error
