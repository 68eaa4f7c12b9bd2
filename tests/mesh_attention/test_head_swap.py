"""The swap of tokens for heads, and back: each rank gets its heads of all tokens."""

from typing import NamedTuple

import torch
import torch.distributed as dist

from attnmesh.mesh.schedule import HeadSlices, groups_of_heads
from attnmesh.mesh.shapes import Shape
from attnmesh.mesh_attention.head_swap import HeadTensors, empty_tokens
from tests.support.ranks.pool import Pool, on_each_rank
from tests.support.truth.tasks import ALONE, DIM, HEADS, KV_HEADS, Rank, whole_tensors


def test_some_heads_are_views_and_all_heads_the_tensors_themselves() -> None:
    q, k = torch.randn(1, HEADS, 3, DIM), torch.randn(1, KV_HEADS, 3, DIM)
    tensors = HeadTensors((q,), (k,))
    (some_q,), (some_k,) = tensors.some_heads(HeadSlices(slice(2, 4), slice(1, 2)))
    assert torch.equal(some_q, q[:, 2:4])
    assert torch.equal(some_k, k[:, 1:2])
    assert some_q.untyped_storage().data_ptr() == q.untyped_storage().data_ptr()
    (all_q,), (all_k,) = tensors.some_heads(HeadSlices(slice(0, 4), slice(0, 2)))
    assert all_q is q
    assert all_k is k


def test_new_memory_has_the_tokens_of_all_heads_together() -> None:
    x = empty_tokens(torch.zeros(2, 4, 3, 5, dtype=torch.bfloat16), heads=2, tokens=7)
    assert (x.shape, x.dtype) == ((2, 2, 7, 5), torch.bfloat16)
    assert x.transpose(1, 2).is_contiguous()
    assert empty_tokens(torch.zeros(2, 4, 3), heads=2, tokens=7).transpose(1, 2).is_contiguous()


class Swapped(NamedTuple):
    """Whether what was swapped in is heads, in the memory for it, and what was swapped out is the tokens again."""

    are_heads: bool
    are_back: bool
    in_memory: bool


@on_each_rank
def swap_heads() -> Swapped:
    """Swap tokens for heads, and heads for tokens again."""
    rank = Rank(Shape(2, 1, 1), "bulk")
    (group,) = groups_of_heads(HEADS, KV_HEADS, 2, 1)
    swaps, memory, tokens = rank.task.along_heads, rank.memory(), HeadTensors((rank.q,), (rank.k, rank.v))
    swapped = swaps.swap_in(tokens, group, memory)()
    (q,), (k, v) = swapped
    heads = group[dist.get_rank()]
    tensors, _ = whole_tensors()
    whole = [x[:, part] for x, part in zip(tensors, (heads.q_heads, heads.kv_heads, heads.kv_heads), strict=False)]
    are_heads = all(torch.equal(x, y) for x, y in zip((q, k, v), whole, strict=True))
    results = HeadTensors(*(tuple(map(torch.zeros_like, some)) for some in tokens))
    for _ in swaps.swap_out(swapped, results, group):
        assert not bool(results.query_tensors[0].any()), "they are still on their way"
    are_back = all(torch.equal(x, y) for x, y in zip(sum(results, ()), sum(tokens, ()), strict=True))
    return Swapped(are_heads, are_back, q is memory.query_tensors[0])


def test_heads_that_were_swapped_in_come_back_as_tokens(pool: Pool) -> None:
    for swapped in pool.run(2, swap_heads):
        assert swapped.are_heads
        assert swapped.are_back
        assert swapped.in_memory


def test_a_rank_alone_swaps_nothing() -> None:
    rank = Rank(ALONE, "bulk")
    (group,) = groups_of_heads(HEADS, KV_HEADS, 1, 1)
    (q,) = rank.task.along_heads.swap_in(HeadTensors((rank.q,)), group)().query_tensors
    assert q is rank.q
