"""A profile names attention, exchanges and merges of a step, with the work that each has."""

import pytest
import torch
from torch.profiler import profile

import attnmesh as am
from attnmesh.kernels.native.build import library
from attnmesh.runtime.ranges import ATTENTION_RANGE, EXCHANGE_RANGE, MERGE_RANGE
from tests.support.ranks.pool import Pool, on_each_rank


def ranges(found: profile) -> dict[str, int]:
    names = [event.name for event in found.events()]
    return {name: names.count(name) for name in (ATTENTION_RANGE, EXCHANGE_RANGE, MERGE_RANGE) if name in names}


@on_each_rank
def record_ranges_of_training(exchange: str) -> dict[str, int]:
    """The ranges of a step with its backward pass on this rank."""
    mesh, layout = am.init_mesh("cpu", (1, 2, 1)), am.Contiguous()
    q, k, v = (am.shard(x, mesh, layout=layout).requires_grad_() for x in torch.randn(3, 1, 2, 64, 8).unbind())
    with profile() as found:
        am.attention(q, k, v, mesh=mesh, layout=layout, mask=am.Full(), exchange=exchange).sum().backward()
    return ranges(found)


@on_each_rank
def record_ranges_of_decoding(merge: str) -> dict[str, int]:
    """The ranges of a steady step on this rank."""
    mesh = am.init_mesh("cpu", (1, 1, 2))
    cache = am.KVCache(mesh, batch=1, kv_heads=2, head_dim=8, capacity=64, dtype=torch.float32)
    torch.manual_seed(0)  # other tests leave ranks in unequal states
    cache.append(*torch.randn(2, 1, 2, 40, 8).unbind())
    q = torch.randn(1, 2, 1, 8)
    for _ in range(2):
        am.decode(q, cache, merge=merge)
    with profile() as found:
        am.decode(q, cache, merge=merge)
    return ranges(found)


def test_a_training_step_has_its_steps_and_what_they_wait_for(pool: Pool) -> None:
    for found in pool.run(2, record_ranges_of_training, "bulk"):
        assert found[ATTENTION_RANGE] == 2  # forward and backward
        assert found[EXCHANGE_RANGE] >= 4  # keys of both passes and their gradients, begun and awaited
    for found in pool.run(2, record_ranges_of_training, "ring"):
        assert found[ATTENTION_RANGE] == 4
        assert found[MERGE_RANGE] >= 1


@pytest.mark.parametrize("merge", ["tree", "gather"])
def test_a_decode_step_has_one_attention_and_one_merge(merge: str, pool: Pool) -> None:
    if merge == "tree" and library().attend is None:
        pytest.skip("there is no C++ compiler")
    assert pool.run(2, record_ranges_of_decoding, merge) == [{ATTENTION_RANGE: 1, MERGE_RANGE: 1}] * 2
