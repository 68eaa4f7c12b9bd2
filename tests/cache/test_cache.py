"""A cache by itself: tokens are appended in place, its sizes are checked, and it outlives inference mode."""

from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import attnmesh as am
from attnmesh import errors
from attnmesh.mesh.shapes import AXES, Shape
from attnmesh.store.load_layers import make_alike
from tests.support.ranks.pool import Pool, on_each_rank
from tests.support.truth.mesh_problems import named_mesh
from tests.support.truth.problems import numbers
from tests.support.truth.tolerances import FLOAT32, assert_near


@on_each_rank
def decode_after_changes(q: Tensor, prompt: Tensor, more: Tensor) -> tuple[int, Tensor]:
    """Return the tokens that this rank holds, and a step's output."""
    two_ranks = named_mesh(Shape(1, 1, 2), AXES)  # along keys: each holds every second block of tokens
    cache = am.KVCache(two_ranks, batch=1, kv_heads=4, head_dim=8, capacity=40, dtype=torch.float32, block=4)
    cache.append(*prompt)
    cache.truncate(20)
    cache.append(*more)
    return cache.used, am.decode(q, cache)


def test_a_cache_on_two_ranks_has_the_tokens_that_are_left_and_those_appended(pool: Pool) -> None:
    q, prompt, more = numbers(1, 4, 1, 8), numbers(2, 1, 4, 30, 8, seed=1), numbers(2, 1, 4, 3, 8, seed=2)
    k, v = torch.cat((prompt[:, :, :, :20], more), 3)
    expected = scaled_dot_product_attention(q.double(), k.double(), v.double())  # the last token sees all 23
    for (used, out), held in zip(pool.run(2, decode_after_changes, q, prompt, more), (12, 11), strict=True):
        assert used == held
        assert_near(out.double(), expected, FLOAT32)


@on_each_rank
def record_addresses_over_appends() -> tuple[list[int], list[int]]:
    mesh, sizes = named_mesh(Shape(1, 1, 2), AXES), {"kv_heads": 2, "head_dim": 8, "capacity": 50}
    cache = am.KVCache(mesh, batch=1, dtype=torch.float32, **sizes)
    cache.append(*torch.randn(2, 1, 2, 30, 8).unbind())

    def addresses() -> list[int]:
        return [
            x.data_ptr() for x in (cache.keys, cache.values, cache.own_shard.token_index, cache.own_shard.device_counts)
        ]

    before = addresses()
    for _ in range(20):
        cache.append(*torch.randn(2, 1, 2, 1, 8).unbind())
    return before, addresses()


def test_append_writes_in_place(pool: Pool) -> None:
    for before, after in pool.run(2, record_addresses_over_appends):
        assert before == after


def in_inference_mode() -> bool:
    with torch.inference_mode():
        cache = am.KVCache(None, batch=1, kv_heads=1, head_dim=2, capacity=8, dtype=torch.float32)
        cache.append(*torch.ones(2, 1, 1, 3, 2).unbind(), token_mask=torch.tensor([[False, True, True]]))
        inside = am.decode(torch.ones(1, 1, 1, 2), cache)
    cache.append(*torch.ones(2, 1, 1, 1, 2).unbind())
    cache.truncate(3)
    return torch.equal(am.decode(torch.ones(1, 1, 1, 2), cache), inside)


def test_a_cache_made_in_inference_mode_lives_on_outside() -> None:
    assert in_inference_mode()


def test_caches_are_made_alike_of_a_configuration_that_was_compared() -> None:
    cache = am.KVCache(None, batch=1, kv_heads=1, head_dim=2, capacity=8, dtype=torch.float32)
    assert cache.config.common_config.capacity == 1  # kept beside the fields
    [other] = make_alike(am.KVCache, None, [cache.config])
    assert other.config == cache.config


def test_the_former_name_of_the_configuration_warns_and_reads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(errors, "_warned", set())
    cache = am.KVCache(None, batch=1, kv_heads=1, head_dim=2, capacity=8, dtype=torch.float32)
    with pytest.warns(FutureWarning, match=r"read cache\.config\.$") as caught:
        assert cache.sizes is cache.config
    assert caught[0].filename == __file__


PADDED = torch.tensor([[False] * 3 + [True] * 7, [False] + [True] * 9])
"""Token masks of two sequences."""


def call_rank_one_fails(cache: am.KVCache, kind: str) -> None:
    """Append or reorder with an argument that is wrong on rank 1, and raise there."""
    odd = dist.get_rank() == 1
    new = torch.ones(2, 1, 2, 8, dtype=torch.float64 if odd else torch.float32)
    with pytest.raises(errors.DtypeError) if odd else nullcontext():
        if kind == "reorder":
            cache.reorder(torch.tensor([1, 0], dtype=torch.int32 if odd else torch.int64))
        else:
            cache.append(new, new, token_mask=PADDED[:, 2:4] if kind == "padding" else None)


@on_each_rank
def step_after_a_failed_call(kind: str, first_mask: Tensor | None, left: int) -> None:
    """Ranks go on after a call that rank 1 alone has not done, and a truncation to `left` tokens."""
    k, v, more = torch.randn(3, 2, 1, 10, 8, generator=torch.Generator().manual_seed(1))
    mesh = named_mesh(Shape(1, 1, 2), AXES)
    cache, alone = (
        am.KVCache(one, batch=2, kv_heads=1, head_dim=8, capacity=60, block=4, dtype=torch.float32)
        for one in (mesh, None)
    )
    for each in (cache, alone):
        each.append(k, v, token_mask=first_mask)
        each.reorder(torch.tensor([1, 0]))
    am.decode(torch.ones(2, 1, 1, 8), cache)
    call_rank_one_fails(cache, kind)
    for each in (cache, alone):
        each.truncate(left)
    for mask in (None, PADDED):
        outputs = []
        for each in (cache, alone):
            each.append(more, more, token_mask=mask)
            outputs.append(am.decode(torch.ones(2, 1, 1, 8), each))
        torch.testing.assert_close(*outputs, atol=FLOAT32, rtol=FLOAT32)


@pytest.mark.parametrize(
    ("kind", "first_mask", "left"),
    [
        ("padding", PADDED, 10),
        ("padding", PADDED, 2),
        ("padding", PADDED, 0),
        ("padding", None, 10),  # no token that is left is padding, but one rank has had some
        ("tokens", PADDED, 10),
        ("reorder", PADDED, 0),
    ],
    ids=lambda x: "padded" if isinstance(x, Tensor) else str(x),
)
def test_truncation_undoes_a_call_that_one_rank_has_not_done(
    kind: str, first_mask: Tensor | None, left: int, pool: Pool
) -> None:
    pool.run(2, step_after_a_failed_call, kind, first_mask, left)


@on_each_rank
def step_after_other_padding(left: int) -> str:
    """Return what a step says where the padding of the first tokens differs between ranks, after a truncation."""
    mesh, k = named_mesh(Shape(1, 1, 2), AXES), torch.ones(2, 1, 10, 8)
    cache = am.KVCache(mesh, batch=2, kv_heads=1, head_dim=8, capacity=60, dtype=torch.float32, checked=False)
    cache.append(k, k, token_mask=PADDED if dist.get_rank() else PADDED.flip(0))
    cache.truncate(left)
    try:
        am.decode(torch.ones(2, 1, 1, 8), cache, checked=True)
    except errors.MeshError as error:
        return str(error)
    return "no error"


def test_a_truncation_within_padding_does_not_hide_that_it_differs(pool: Pool) -> None:
    for said in pool.run(2, step_after_other_padding, 9):
        assert "padding and order" in said
    assert pool.run(2, step_after_other_padding, 1) == ["no error"] * 2
