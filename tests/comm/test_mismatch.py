"""Checksums tell calls apart: their maximum over the ranks adds up to 0 if all ranks make the same call."""

import pytest
import torch
from torch import Tensor

from attnmesh.comm.mismatch import MODULUS, POISON, call_checksum, checksum_of, question_like
from tests.support.truth.problems import numbers

pytestmark = pytest.mark.quick

LIKE = torch.empty(0, dtype=torch.float32)
COUNTS = torch.tensor([30, 12])


def call(number: int) -> Tensor:
    return checksum_of(number, LIKE)


def agree(*checksums: Tensor) -> bool:
    """Return whether ranks with these checksums find their calls equal."""
    return torch.stack(checksums).amax(0).sum().item() == 0


def test_calls_of_the_digests_5_and_7_have_maxima_whose_sum_is_2() -> None:
    assert call(5).tolist() == [5, -5]
    assert torch.stack((call(5), call(7))).amax(0).tolist() == [7, -5]
    assert not agree(call(5), call(7))


def test_ranks_agree_if_all_have_one_number() -> None:
    assert agree(call(7), call(7), call(7))
    assert not agree(call(7), call(7), call(8))
    assert not agree(call(0), call(MODULUS - 1))


@pytest.mark.parametrize("number", [0, 1, MODULUS - 1, MODULUS, MODULUS + 5, -3, 2**62, 2**62 + 3])
def test_a_number_has_one_checksum_on_the_cpu_and_on_a_device(number: int) -> None:
    assert torch.equal(checksum_of(number, LIKE), checksum_of(torch.tensor(number), LIKE))
    assert 0 <= checksum_of(number, LIKE)[0].item() < MODULUS


def test_a_question_is_the_checksum_of_no_call() -> None:
    question = question_like(LIKE)
    assert agree(question, question)
    assert not any(agree(question, call(number)) for number in (0, 1, MODULUS - 1, MODULUS))


def test_poison_is_infinite_beside_any_checksum() -> None:
    poison = LIKE.new_full((2,), POISON)
    for other in (poison, call(7), question_like(LIKE)):
        assert torch.stack((poison, other)).amax(0).sum().item() == float("inf")


def test_a_call_is_told_from_others_by_its_length_text_and_tensors() -> None:
    def checksum(tensors: list[Tensor], call_hash: int = 11, length: int = 30) -> Tensor:
        return call_checksum(tensors, call_hash, torch.tensor([length, 12]), LIKE, None)

    x = numbers(2, 3)
    changed = x.clone()
    changed[1, 2] = torch.nextafter(changed[1, 2], torch.tensor(9.0))
    same = checksum([x])
    assert torch.equal(checksum([x.clone()]), same)
    for other in (checksum([x], length=31), checksum([x], call_hash=12), checksum([changed]), checksum([x, x])):
        assert not agree(same, other)
    assert agree(same, call_checksum([x], 11, torch.tensor([30, 13]), LIKE, None)), "ranks hold other numbers of tokens"


def test_a_checksum_is_written_where_it_is_asked_for() -> None:
    into = torch.zeros(2)
    assert call_checksum([], 11, COUNTS, LIKE, into) is into
    assert into.tolist() == [41, -41]
