"""Ids of the tokens of a folder: what is read is what was written last, of which only the changes are written."""

import os
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from attnmesh.errors import StoreError
from attnmesh.store import token_ids
from attnmesh.store.token_ids import TokenIds

pytestmark = pytest.mark.quick


def read(folder: Path, batch: int) -> Tensor:
    """Return the ids that a reader finds."""
    found = TokenIds(folder).read(batch)
    assert found is not None
    return found


def test_ids_are_read_as_they_were_written_and_begin_where_they_differ(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert TokenIds(tmp_path).read(2) is None
    places: list[tuple[int, int]] = []
    pwrite = os.pwrite

    def noted(handle: int, data: bytes, offset: int) -> int:
        if Path(f"/proc/self/fd/{handle}").readlink() == tmp_path / "tokens.ids":
            places.append((offset, len(data)))
        return pwrite(handle, data, offset)

    monkeypatch.setattr(os, "pwrite", noted)
    ids = TokenIds(tmp_path)
    first = torch.tensor([[1, 2, 3], [4, 5, 6]])
    for tokens in (first, first, torch.tensor([[1, 2, 3, 7], [4, 5, 6, 8]]), torch.tensor([[1, 2], [4, 9]])):
        ids.write(tokens)
        assert torch.equal(read(tmp_path, 2), tokens)
    row = 2 * 8  # two sequences of 8 bytes an id
    assert places == [(0, 3 * row), (3 * row, row), (row, row)]


@pytest.mark.parametrize("seed", range(4))
def test_random_changes_are_read_as_the_last_ids(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_ids, "MAX_RECORDS", 3)
    random, batch = Random(seed), 1 + seed % 3
    tokens, ids = torch.ones(batch, 1, dtype=torch.int64), TokenIds(tmp_path)
    ids.write(tokens)
    for _ in range(25):
        kept = tokens[:, : random.randint(0, tokens.shape[1])] if random.random() < 0.4 else tokens
        new = [[random.randint(0, 2) for _ in range(random.randint(0, 4))]] * batch
        tokens = torch.cat((kept, torch.tensor(new, dtype=torch.int64)), 1)
        ids.write(tokens)
        assert torch.equal(read(tmp_path, batch), tokens)


def test_one_process_goes_on_with_the_ids_of_another(tmp_path: Path) -> None:
    TokenIds(tmp_path).write(torch.tensor([[1, 2, 3]]))
    again = TokenIds(tmp_path)
    again.read(1)
    again.write(torch.tensor([[1, 2, 5, 6]]))
    assert read(tmp_path, 1).tolist() == [[1, 2, 5, 6]]


def test_no_ids_were_written_yet(tmp_path: Path) -> None:
    ids = TokenIds(tmp_path)
    ids.write(torch.empty(2, 0, dtype=torch.int64))
    assert read(tmp_path, 2).shape == (2, 0)
    ids.write(torch.tensor([[1, 2], [3, 4]]))
    assert read(tmp_path, 2).tolist() == [[1, 2], [3, 4]]


def removed(content: bytes, file: Path) -> None:
    file.unlink()


def changed(content: bytes, file: Path) -> None:
    file.write_bytes(bytes([content[0] ^ 1]) + content[1:])


def cut(content: bytes, file: Path) -> None:
    file.write_bytes(content[:-1])


@pytest.mark.parametrize(("act", "said"), [(removed, "no .*tokens.ids"), (changed, "damage"), (cut, "damage")])
def test_ids_that_are_not_as_they_were_written_are_refused(act: Any, said: str, tmp_path: Path) -> None:
    TokenIds(tmp_path).write(torch.tensor([[1, 2, 3]]))
    file = tmp_path / "tokens.ids"
    act(file.read_bytes(), file)
    with pytest.raises(StoreError, match=f"the ids of all tokens, given {said}"):
        TokenIds(tmp_path).read(1)
