"""The history digest: equal for equal padding and reorders, whatever was appended and removed between."""

import pytest
import torch
from torch import Tensor

from attnmesh.cache.history_digest import HistoryDigest
from attnmesh.runtime.unbroken import unbroken

pytestmark = pytest.mark.quick

CPU = torch.device("cpu")
REAL = torch.ones(2, 3, dtype=torch.bool)
PADDED = torch.tensor([[True, True, True], [False, False, True]])
SWAP = torch.tensor([1, 0])


def after(*changes: Tensor) -> HistoryDigest:
    """Return the digest of a cache after reorders, (batch,), and masks of 3 new tokens, (batch, 3)."""
    history, tokens = HistoryDigest(CPU), 0
    for change in changes:
        if change.ndim == 1:
            unbroken(history.actions_to_add_order(change))
        else:
            history.add_padding(change, tokens)
            tokens += change.shape[1]
    assert int(history.digest_on_device) == history.digest
    return history


def test_real_tokens_leave_it_and_all_else_changes_it() -> None:
    assert after().digest == after(REAL, REAL).digest == 0
    histories = [(), (PADDED,), (REAL, PADDED), (PADDED, PADDED), (SWAP,), (SWAP, SWAP), (PADDED, SWAP), (SWAP, PADDED)]
    digests = [after(*changes).digest for changes in histories]
    assert len({*digests}) == len(digests)
    history = HistoryDigest(CPU)
    history.add_padding(None, 5)
    assert history.digest == 0


def test_a_truncation_undoes_padding_and_no_reorder() -> None:
    for before in ((), (SWAP,), (SWAP, SWAP)):
        history = after(*before, PADDED, PADDED)
        history.truncate(3, PADDED)
        assert history.digest == int(history.digest_on_device) == after(*before, PADDED).digest
        history.truncate(2, PADDED[:, :2])
        assert history.digest == after(*before, PADDED[:, :2]).digest
        history.truncate(0, PADDED[:, :0])
        assert history.digest == 0


def test_a_copy_goes_on_for_itself() -> None:
    one = after(SWAP, PADDED)
    other = one.copied_to(CPU)
    assert (other.digest, int(other.digest_on_device)) == (one.digest, one.digest)
    other.truncate(3, REAL)
    assert other.digest == after(SWAP).digest, "a copy knows the reorders"
    assert int(one.digest_on_device) == one.digest == after(SWAP, PADDED).digest
