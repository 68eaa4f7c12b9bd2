"""Messages of a merge: what is packed is read again."""

import pytest
import torch
from torch import Tensor

from attnmesh.comm.mailboxes import MESSAGE_BYTES
from attnmesh.comm.message import MessageForm, blank_message
from attnmesh.comm.mismatch import checksum_of
from attnmesh.core.partial import Partial, merge_partials
from tests.support.truth.problems import numbers
from tests.support.truth.tolerances import FLOAT32

SHAPE = (1, 3, 1, 5)
LIKE = torch.empty(0, dtype=torch.float32)
PLAIN = MessageForm(SHAPE, torch.float32, torch.float32)
FORMS = [
    PLAIN,
    MessageForm(SHAPE, torch.float64, torch.float64),
    MessageForm(SHAPE, torch.float32, torch.bfloat16),  # 15 numbers of 2 bytes, and 2 bytes to fill up
    MessageForm(SHAPE, torch.float32, torch.float64),  # 5 numbers of 4 bytes, and 4 bytes before those of 8
    MessageForm((1, 2, 1, 5), torch.float32, torch.float64),
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
    assert PLAIN.fits_native
    assert not FORMS[1].fits_native
    assert not FORMS[2].fits_native
    longest = MessageForm((1, 1, 1, MESSAGE_BYTES // 4 - 3), torch.float32, torch.float32)
    assert longest.size == MESSAGE_BYTES
    assert longest.fits_native
    assert not MessageForm((1, 1, 1, MESSAGE_BYTES // 4 - 2), torch.float32, torch.float32).fits_native
