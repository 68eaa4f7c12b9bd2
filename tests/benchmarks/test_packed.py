"""The bench of packed batches: what is drawn, and counts that can be checked by hand."""

import json
from pathlib import Path
from random import Random

import pytest

import attnmesh as am
from attnmesh import errors
from benchmarks.packed import contenders, corpora, count, draw

SHAPE = am.Shape(1, 1, 2)


def test_a_batch_is_full_and_has_lengths_of_the_file(tmp_path: Path) -> None:
    file = tmp_path / "lengths.json"
    file.write_text(json.dumps({"[8,16)": 0.9, "[100,101)": 0.1}))
    *documents, last = draw(file, 1000, Random(0))
    assert sum(documents) + last == 1000
    assert {8 <= n < 16 or n == 100 for n in documents} == {True}
    assert documents.count(100) > 2
    assert draw(file, 1000, Random(0)) == [*documents, last]


def test_two_documents_have_the_counts_by_hand() -> None:
    """Documents of 6 and 2 tokens have 21 and 3 pairs. A rank holds 4 tokens."""
    mask = am.Causal() & am.Documents((6, 2))
    # Keys 0 and 1 have 11 pairs, 6 and 7 have 3. Their rank gets queries 2 to 5, and the outputs of none.
    assert count(mask, am.Zigzag(), SHAPE) == pytest.approx((14 / 12, 4 / 8))
    # Keys 0 to 3 have 18 pairs. Their rank gets queries 4 and 5; the other gets their outputs.
    assert count(mask, am.Contiguous(), SHAPE) == pytest.approx((18 / 12, 2 / 8))


def test_documents_of_one_shard_send_nothing() -> None:
    mask = am.Causal() & am.Documents((4, 4))
    assert count(mask, am.Packed((4, 4), SHAPE), SHAPE) == (1.0, 0.0)


def test_contenders_are_on_all_ranks() -> None:
    for ranks in (2, 6, 8, 16):
        found = list(contenders(ranks, [10, 20]))
        assert {shape.ranks for _, shape, *_ in found} == {ranks}
        assert any(name.startswith("packed, 2D") for name, *_ in found)


def test_a_file_of_no_shares_raises(tmp_path: Path) -> None:
    with pytest.raises(errors.ArgumentError, match="--lengths: expected a file of shares by length"):
        corpora([Path("none.json")])
    for text in ("[]", "{}", '{"[4,2)": 1}', '{"x": 1}', '{"[0,1e400)": 1}'):
        file = tmp_path / "lengths.json"
        file.write_text(text)
        with pytest.raises(errors.ArgumentError, match="--lengths: expected an object of shares by length"):
            corpora([file])
