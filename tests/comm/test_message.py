"""Messages of a merge: what is packed is read again, and checksums tell calls apart."""

import pytest
import torch
from torch import Tensor

from attnmesh.comm.mailboxes import MESSAGE_BYTES
from attnmesh.comm.message import MessageForm, blank_message
from attnmesh.comm.mismatch import MODULUS, POISON, call_checksum, checksum_of, question_like
from attnmesh.core.partial import Partial, merge_partials
from tests.support.truth.problems import numbers
from tests.support.truth.tolerances import FLOAT32

SHAPE = (1, 3, 1, 5)
LIKE = torch.empty(0, dtype=torch.float32)
COUNTS = torch.tensor([30, 12])
PLAIN = MessageForm(SHAPE, torch.float32, torch.float32)
FORMS = [
    PLAIN,
    MessageForm(SHAPE, torch.float64, torch.float64),
    MessageForm(SHAPE, torch.float32, torch.bfloat16),  # 15 numbers of 2 bytes, and 2 bytes to fill up
    MessageForm((0, 3, 1, 5), torch.float32, torch.float32),
]


def partial_of(form: MessageForm, seed: int = 0) -> Partial:
    """Return a partial whose numbers bfloat16 holds exactly."""
    out = numbers(*form.shape, seed=seed).bfloat16().to(form.lse_dtype)
    return Partial(out, numbers(*form.shape[:-1], seed=seed + 50).to(form.lse_dtype))


def call(number: int, form: MessageForm = PLAIN) -> Tensor:
    return checksum_of(number, LIKE.to(form.lse_dtype))


def assert_equal(found: Partial, expected: Partial) -> None:
    assert torch.equal(found.out, expected.out)
    assert torch.equal(found.lse, expected.lse)


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_a_message_holds_the_checksum_and_the_partial(form: MessageForm) -> None:
    partial = partial_of(form)
    message = form.pack(call(7, form), partial)
    assert (message.dtype, len(message)) == (torch.uint8, form.size)
    checksum, found = form.unpack(message)
    assert checksum.tolist() == [7, -7]
    assert_equal(found, partial)


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_several_messages_are_read_at_once(form: MessageForm) -> None:
    partials = [partial_of(form, seed) for seed in range(3)]
    messages = torch.stack([form.pack(call(seed, form), partial) for seed, partial in enumerate(partials)])
    checksums, (outs, lses) = form.read(messages)
    assert checksums.tolist() == [[0, 0], [1, -1], [2, -2]]
    for out, lse, partial in zip(outs, lses, partials, strict=True):
        assert_equal(Partial(out.to(form.lse_dtype), lse), partial)


@pytest.mark.parametrize("form", FORMS[:2], ids=str)
def test_messages_merge_to_the_highest_checksum_and_the_merge_of_partials(form: MessageForm) -> None:
    partials = [partial_of(form, seed) for seed in range(3)]
    messages = torch.stack([form.pack(call(seed, form), partial) for seed, partial in enumerate(partials)])
    expected = merge_partials(partials)
    for checksum, found in (form.merge(messages), form.unpack(form.merge_to_message(messages))):
        assert checksum.tolist() == [2, 0]
        for x, right in zip(found, expected, strict=True):
            torch.testing.assert_close(x, right, atol=FLOAT32, rtol=FLOAT32)


def test_what_is_written_into_a_blank_message_is_in_it() -> None:
    message, checksum, partial = blank_message(SHAPE, torch.float32, torch.device("cpu"))
    assert message is not None
    assert checksum is not None
    assert partial is not None
    wanted = partial_of(PLAIN)
    for into, x in zip((checksum, *partial), (call(3), *wanted), strict=True):
        into.copy_(x)
    assert torch.equal(message, PLAIN.pack(call(3), wanted))


def test_short_messages_in_float32_alone_are_native() -> None:
    assert PLAIN.is_native
    assert not FORMS[1].is_native
    assert not FORMS[2].is_native
    longest = MessageForm((1, 1, 1, MESSAGE_BYTES // 4 - 3), torch.float32, torch.float32)
    assert longest.size == MESSAGE_BYTES
    assert longest.is_native
    assert not MessageForm((1, 1, 1, MESSAGE_BYTES // 4 - 2), torch.float32, torch.float32).is_native


# --- checksums ---


def agree(*checksums: Tensor) -> bool:
    """Return whether ranks with these checksums find their calls equal."""
    return torch.stack(checksums).amax(0).sum().item() == 0


def test_ranks_agree_if_all_have_one_number() -> None:
    assert agree(call(7), call(7), call(7))
    assert not agree(call(7), call(7), call(8))
    assert not agree(call(0), call(MODULUS - 1))


@pytest.mark.parametrize("number", [0, 1, MODULUS - 1, MODULUS, MODULUS + 5, -3, 2**62])
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
