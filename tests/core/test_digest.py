"""Digests: numbers that differ, by a little or in their order, have another one."""

from itertools import permutations, product

import pytest
import torch

from attnmesh.core.digest import (
    SUM_ELEMENTS,
    bits,
    chained_digest,
    cpu_weights,
    digest,
    digest_each,
    fingerprints,
    wide_bits,
)


def test_small_numbers_in_another_order_are_others() -> None:
    """Masks of padding, orders of beams, prompts of two tokens: with weights of 1, 3, 5, ... many would be the same."""
    orders = [torch.tensor(order) for order in permutations(range(7))]
    masks = [torch.tensor(mask) for mask in product([False, True], repeat=10)]
    pairs = [torch.tensor(pair) for pair in product(range(60), repeat=2)]
    for kind in (orders, masks, pairs):
        assert len({int(digest(x)) for x in kind}) == len(kind)


def test_numbers_far_apart_that_change_places_are_others() -> None:
    x = torch.arange(10_000.0, dtype=torch.float64)
    for other in (1, 2048, 4096, 8192):
        y = x.clone()
        y[0], y[other] = x[other], x[0]
        assert int(digest(x)) != int(digest(y))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int8, torch.bool])
def test_a_digest_depends_on_bits_and_not_on_memory(dtype: torch.dtype) -> None:
    x = torch.arange(24).reshape(4, 6).remainder(5).to(dtype)
    assert int(digest(x)) == int(digest(x.mT.contiguous().mT))
    assert int(digest(x)) != int(digest(x.mT))
    assert torch.equal(bits(x), bits(x.clone()))


def test_zeros_of_both_signs_are_others() -> None:
    assert int(digest(torch.tensor([1.0, 0.0]))) != int(digest(torch.tensor([1.0, -0.0])))


def test_a_change_in_the_highest_bits_of_two_numbers_does_not_cancel() -> None:
    x = torch.zeros(8, dtype=torch.int64)
    y = x.clone()
    y[2] = y[5] = torch.iinfo(torch.int64).min
    assert int(digest(x)) != int(digest(y))


def test_each_number_of_several_sums_counts() -> None:
    x = torch.zeros(2 * SUM_ELEMENTS + 3)
    others = []
    for place in (0, SUM_ELEMENTS - 1, SUM_ELEMENTS, 2 * SUM_ELEMENTS + 2):
        y = x.clone()
        y[place] = 1.0
        others.append(int(digest(y)))
    assert len({int(digest(x)), *others}) == 5


@pytest.mark.parametrize(("width", "dtype"), [(4, torch.int64), (2, torch.int32), (3, torch.int16), (1, torch.int16)])
def test_rows_are_added_up_as_the_widest_integers_that_they_are_made_of(width: int, dtype: torch.dtype) -> None:
    rows = torch.arange(5 * width, dtype=torch.bfloat16).reshape(5, width)
    assert wide_bits(rows).dtype == dtype
    assert torch.equal(wide_bits(rows).view(torch.bfloat16), rows.flatten())


def test_rows_may_begin_between_wide_integers() -> None:
    numbers = torch.arange(9, dtype=torch.bfloat16)
    assert torch.equal(wide_bits(numbers[1:].view(2, 4)), wide_bits(numbers[1:].view(2, 4).clone()))


def test_weights_are_odd_so_that_no_bit_is_lost() -> None:
    assert bool((cpu_weights() % 2 == 1).all())


def test_a_digest_of_each_row_is_that_of_the_row() -> None:
    rows = torch.arange(-6, 6).reshape(3, 4)
    assert digest_each(rows).tolist() == [int(digest(row)) for row in rows]


def test_a_history_depends_on_the_order_and_the_size_of_its_values() -> None:
    one, two = torch.tensor([1, 0]), torch.tensor([0])
    histories = [
        chained_digest(0, two),
        chained_digest(chained_digest(0, two), two),
        chained_digest(chained_digest(0, one), two),
        chained_digest(chained_digest(0, two), one),
    ]
    assert len({0, *histories}) == 5
    assert chained_digest(7, None) == 7


def test_fingerprints_tell_dtype_shape_and_bits() -> None:
    x = torch.ones(2, 3)
    found = fingerprints({"q": x, "k": None, "v": x.bfloat16()})
    assert found == {
        "q": f"torch.float32 [2, 3] of digest {int(digest(x)) % 2**64:x}",
        "v": f"torch.bfloat16 [2, 3] of digest {int(digest(x.bfloat16())) % 2**64:x}",
    }
