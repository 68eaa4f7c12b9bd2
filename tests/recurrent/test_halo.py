"""The tokens before a shard, also where they come from several ranks, and their gradients."""

from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import attnmesh as am
from attnmesh.mesh.axes import Axis
from attnmesh.recurrent.halo import halo_of_parts
from tests.support.ranks.groups import group_of
from tests.support.ranks.pool import Pool, on_each_rank

CASES = ([4, 2, 4], [0, 0, 3, 1, 0, 2], [5], [1] * 7, [3, 0, 0, 0, 9], [0, 0])


def sequence(length: int, size: int) -> tuple[Tensor, Tensor]:
    """The padded sequence, and a weight of each of its tokens in each halo."""
    generator = torch.Generator().manual_seed(length)
    tokens = torch.randn(2, length, 3, generator=generator, dtype=torch.float64)
    return torch.cat([tokens.new_zeros(2, size, 3), tokens], 1), torch.randn(size, generator=generator).double()


@on_each_rank
def take_halo(lengths: list[int], size: int) -> tuple[Tensor, Tensor] | None:
    group, rank = group_of(len(lengths)), dist.get_rank()
    if group is None:
        return None
    padded, weights = sequence(sum(lengths), size)
    start = size + sum(lengths[:rank])
    own = padded[:, start : start + lengths[rank]].clone().requires_grad_()
    result = am.halo(own, size, group, dim=1)
    (result * weights[:, None]).sum().backward()
    return result.detach(), own.grad


@pytest.mark.parametrize("size", [0, 1, 3, 7])
@pytest.mark.parametrize("lengths", CASES, ids=str)
def test_a_halo_is_what_comes_before_the_shard(pool: Pool, lengths: list[int], size: int) -> None:
    padded, weights = sequence(sum(lengths), size)
    grads = torch.zeros_like(padded)
    results = [x for x in pool.run(8, take_halo, lengths, size) if x is not None]
    for rank, (found, _) in enumerate(results):
        start = sum(lengths[:rank])
        assert torch.equal(found, padded[:, start : start + size])
        grads[:, start : start + size] += weights[:, None]
    torch.testing.assert_close(torch.cat([grad for _, grad in results], 1), grads[:, size:])


@on_each_rank
def take_halos_of_zigzag(length: int, size: int, dim: int) -> Tensor:
    """The difference from the tokens before each of this rank's two parts."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    edges = [part * length // (2 * ranks) for part in range(2 * ranks + 1)]
    owners = [*range(ranks), *reversed(range(ranks))]
    lengths = [stop - start for start, stop in pairwise(edges)]
    padded, _ = sequence(length, size)
    own = torch.cat([padded[:, size + edges[p] : size + edges[p + 1]] for p in (rank, 2 * ranks - 1 - rank)], 1)
    axis = Axis(ranks, rank, dist.group.WORLD)
    found = halo_of_parts(own.transpose(1, dim), size, axis, owners, lengths, dim=dim).transpose(1, dim)
    right = torch.cat([padded[:, edges[p] : edges[p] + size] for p in (rank, 2 * ranks - 1 - rank)], 1)
    return found - right


@pytest.mark.parametrize(("length", "size", "dim"), [(16, 3, 1), (61, 3, 2), (5, 4, 1), (0, 3, 1)])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_both_parts_of_a_zigzag_shard_get_a_halo(pool: Pool, ranks: int, length: int, size: int, dim: int) -> None:
    for difference in pool.run(ranks, take_halos_of_zigzag, length, size, dim):
        assert not difference.any()


@on_each_rank
def differentiate_twice() -> Tensor:
    own = torch.arange(3.0, dtype=torch.float64)[None].requires_grad_()
    result = am.halo(own, 2, dist.group.WORLD)
    (grad,) = torch.autograd.grad((result**3).sum(), own, create_graph=True)
    return torch.autograd.grad(grad.sum(), own)[0]


def test_gradients_have_gradients(pool: Pool) -> None:
    zero, sent = torch.zeros(1, 3, dtype=torch.float64), torch.tensor([[0.0, 6.0, 12.0]], dtype=torch.float64)
    for found, right in zip(pool.run(3, differentiate_twice), (sent, sent, zero), strict=True):
        torch.testing.assert_close(found, right)
