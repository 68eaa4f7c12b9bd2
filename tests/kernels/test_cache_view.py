"""Views of caches and the queries of a step: parts of them, without a copy of what others see."""

from typing import Any

import pytest
import torch
from torch import Tensor

import attnmesh as am
from attnmesh.core.partial import Partial
from attnmesh.core.scaling import Scaling
from attnmesh.core.storage import INT8
from attnmesh.kernels.cache_view import CacheView, DecodeQuery
from attnmesh.kernels.padding import Padding
from tests.support.truth.problems import numbers

DIM, VALUE_DIM = 8, 6
PADDED = Padding(
    token_mask=torch.tensor([[False, True, True, True, True], [True, False, True, True, True]]),
    positions=torch.tensor([[-1, 0, 1, 0, 0], [0, -1, 1, 0, 0]]),
    lengths=torch.tensor([3, 3]),
)
"""Padding of two sequences of 4 tokens, of which 3 are real, in a cache of 5; a shard has the first three."""


def view_of(padding: Padding | None = None, **options: Any) -> CacheView:
    """Return a view of a shard with three of four tokens, and two free slots."""
    keys, values = numbers(2, 1, 5, DIM, seed=1), numbers(2, 1, 5, VALUE_DIM, seed=2)
    return CacheView(keys, values, torch.tensor([0, 1, 2, 0, 0]), torch.tensor([4, 3]), padding, VALUE_DIM, **options)


def test_the_query_of_a_sequence_has_its_own_tensors() -> None:
    q, lengths = numbers(3, 1, 2, DIM), torch.tensor([4, 5, 6])
    partial = Partial(numbers(3, 1, 2, DIM), numbers(3, 1, 2))
    options = {"into": partial, "key_lengths": lengths, "other_partial": partial}
    query = DecodeQuery(q, am.Causal(), Scaling(1.0), 50, **options).sequence(1)
    assert query.q.equal(q[1:2])
    assert query.key_lengths is not None
    assert query.key_lengths.tolist() == [5]
    for part in (query.into, query.other_partial):
        assert part is not None
        assert part.out.equal(partial.out[1:2])
        assert part.lse.equal(partial.lse[1:2])


def test_the_result_of_a_sequence_is_written_into_that_of_the_batch() -> None:
    into = Partial(torch.zeros(3, 1, 2, DIM), torch.zeros(3, 1, 2))
    query = DecodeQuery(numbers(3, 1, 2, DIM), am.Causal(), Scaling(1.0), 50, into=into).sequence(2)
    assert query.into is not None
    query.into.out.fill_(1.0)
    assert into.out.sum((1, 2, 3)).tolist() == [0, 0, 2 * DIM]


def test_positions_are_tokens_unless_there_is_padding() -> None:
    assert view_of().positions().tolist() == [[0, 1, 2, 0, 0]]
    assert view_of(PADDED).positions().tolist() == [[-1, 0, 1, 0, 0], [0, -1, 1, 0, 0]]


@pytest.mark.parametrize("padding", [None, PADDED], ids=["plain", "padded"])
def test_slots_without_tokens_are_left_out_on_a_cpu(padding: Padding | None) -> None:
    filled = view_of(padding).without_free_slots()
    assert filled.keys.shape == (2, 1, 3, DIM)
    assert filled.values.shape == (2, 1, 3, VALUE_DIM)
    assert filled.token_index.tolist() == [0, 1, 2]
    assert filled.positions().shape[1] == 3


def test_the_first_slots_come_with_the_one_after_them() -> None:
    """Kernels read one slot more than they are told, so that a shard without tokens has memory."""
    view = view_of()
    first = view.first(2)
    assert first.device_counts.tolist() == [4, 2]
    assert torch.equal(first.keys, view.keys[:, :, :3])
    assert torch.equal(first.values, view.values[:, :, :3])
    assert first.keys.untyped_storage().data_ptr() == view.keys.untyped_storage().data_ptr()


def bounds(view: CacheView, queries: int, mask: am.Mask) -> tuple[list[Any], list[Any]]:
    first, last = view.bounds(queries, mask)
    return first.tolist(), last.tolist()


def test_the_last_queries_see_by_their_tokens() -> None:
    assert bounds(view_of(), 2, am.Window(1)) == ([[1, 2]], [[2, 3]])


def test_queries_before_the_first_token_see_what_it_sees() -> None:
    assert bounds(view_of(), 6, am.Window(1)) == ([[0, 0, 0, 0, 1, 2]], [[0, 0, 0, 1, 2, 3]])


def test_queries_that_are_padding_see_nothing() -> None:
    """Their last position is -1, before all keys."""
    _, last = bounds(view_of(PADDED), 4, am.Causal())
    assert last == [[-1, 0, 1, 2], [0, -1, 1, 2]]


def rows_in_8_bits() -> tuple[Tensor, CacheView]:
    keys = numbers(1, 2, 3, DIM)
    rows = INT8.quantize(keys)
    return keys, CacheView(rows, rows, torch.arange(3), torch.tensor([3, 3]), None, VALUE_DIM)


def test_keys_in_8_bits_are_seen_without_their_scales() -> None:
    keys, view = rows_in_8_bits()
    numbers_alone, values_alone = view.unscaled
    assert view.keys.shape[-1] == DIM + 2
    assert numbers_alone.shape == keys.shape
    assert values_alone.shape == (1, 2, 3, VALUE_DIM)
    assert numbers_alone.untyped_storage().data_ptr() == view.keys.untyped_storage().data_ptr()


def test_a_kernel_for_keys_in_8_bits_is_chosen_by_wide_keys_without_memory() -> None:
    keys, view = rows_in_8_bits()
    wide_keys, wide_values = view.attended(torch.bfloat16)
    assert (wide_keys.shape, wide_values.shape) == (keys.shape, (1, 2, 3, VALUE_DIM))
    assert wide_keys.dtype == torch.float32
    assert wide_keys.untyped_storage().nbytes() == 4, "one number"


def test_a_kernel_for_plain_keys_is_chosen_by_themselves() -> None:
    view = view_of()
    assert [x is y for x, y in zip(view.attended(torch.bfloat16), (view.keys, view.values), strict=True)] == [True] * 2


def test_a_cache_on_the_cpu_has_one_tier() -> None:
    view = view_of(earlier_pieces=(view_of(),))
    assert view.cpu_part is None


def test_the_older_tier_of_a_cache_on_a_device_is_its_last_pieces_on_the_cpu() -> None:
    first, second = view_of(), view_of()
    on_device = CacheView(*(x.to("meta") if isinstance(x, Tensor) else x for x in view_of()))
    tiers = on_device._replace(earlier_pieces=(first, on_device, second))
    assert tiers.cpu_part is not None
    assert tiers.cpu_part.keys is second.keys
    assert [piece.keys for piece in tiers.cpu_part.earlier_pieces] == [first.keys]
    assert [piece.keys.device.type for piece in tiers.device_part.earlier_pieces] == ["meta"]
    assert on_device.cpu_part is None
