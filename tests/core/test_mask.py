"""Masks equal their definitions, `&` is the intersection, and bounds never decrease."""

import pickle
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, reject
from hypothesis import strategies as st

import attnmesh as am
from attnmesh import Causal, Chunks, Documents, Full, Mask, Spans, Window, errors
from attnmesh.core.mask import FAR

pytestmark = pytest.mark.quick

TOTAL = 40


@st.composite
def masks(draw: st.DrawFn) -> Mask:
    """Intersections of up to four masks over TOTAL tokens."""
    reach = st.integers(0, TOTAL) | st.just(FAR)
    lengths = st.lists(st.integers(0, 12), max_size=6).map(lambda sizes: _filled(sizes))
    one = st.one_of(
        st.builds(Full),
        st.builds(Causal),
        st.builds(Window, reach, reach),
        st.builds(Window, reach),
        lengths.map(Documents),
        st.integers(1, TOTAL + 3).map(Chunks),
        st.builds(Spans, spans, reach),
    )
    mask = Full()
    for part in draw(st.lists(one, max_size=4)):
        mask = joined(mask, part)
    return mask


spans = st.sets(st.integers(0, TOTAL), max_size=8).map(lambda edges: list(pairwise(sorted(edges)))[::2])


def joined(one: Mask, other: Mask) -> Mask:
    """The intersection of two masks, if there is a mask for it."""
    try:
        return one & other
    except errors.MaskError:
        reject()


def clamped_bounds(mask: Mask) -> tuple[torch.Tensor, torch.Tensor]:
    """The first and the last token that each query sees, of TOTAL tokens."""
    first, last = mask.bounds(torch.arange(TOTAL))
    return first, last.clamp(max=TOTAL - 1)


def _filled(sizes: list[int]) -> list[int]:
    """Document lengths that add up to TOTAL."""
    kept: list[int] = []
    for size in sizes:
        kept.append(min(size, TOTAL - sum(kept)))
    return [*kept, TOTAL - sum(kept)]


@given(masks(), masks())
def test_masks_that_are_joined_see_what_both_see(one: Mask, other: Mask) -> None:
    tokens = torch.arange(TOTAL)
    joined(one, other)
    assert torch.equal(
        (one & other).visible(tokens, tokens), one.visible(tokens, tokens) & other.visible(tokens, tokens)
    )
    assert one & other == other & one
    assert hash(one & other) == hash(other & one)


@given(spans, st.integers(0, TOTAL), st.sampled_from([1, 4, 17]))
def test_tokens_of_a_span_see_each_other(ranges: list[tuple[int, int]], left: int, size: int) -> None:
    tokens = range(TOTAL)
    numbers = {token: number for number, pair in enumerate(ranges) for token in range(*pair)}
    expected = [
        [k >= q - left and (k <= q or (q in numbers and numbers[q] == numbers.get(k))) for k in tokens] for q in tokens
    ]
    mask, places = Spans(ranges, left), torch.arange(TOTAL)
    assert mask.visible(places, places).tolist() == expected
    assert (Spans(ranges) & Window(left, FAR)) == mask
    assert Mask.from_code(mask.to_code()) == mask
    inside = mask & Chunks(size)
    assert torch.equal(
        inside.visible(places, places), mask.visible(places, places) & Chunks(size).visible(places, places)
    )


@pytest.mark.parametrize("ranges", [[(3, 2)], [(2, 4), (3, 5)], [(1,)], [(-1, 2)], 4, [("a", "b")], [(1.0, 2.0)]])
def test_spans_are_in_order_and_apart(ranges: Any) -> None:
    with pytest.raises(errors.MaskError, match=r"Spans: expected pairs of start and stop"):
        Spans(ranges)


def test_a_mask_of_spans_is_joined_with_those_that_show_all_later_tokens() -> None:
    assert Spans([(1, 4)]) & Causal() == Causal()
    assert Spans([(1, 4)]) & Documents([2, 5]) == Documents([2, 5]) & Spans([(1, 4)])
    for other in (Window(3, 2), Spans([(1, 5)])):
        with pytest.raises(errors.MaskError, match="the same spans"):
            Spans([(1, 4)]) & other


@given(masks())
def test_bounds_never_decrease(mask: Mask) -> None:
    for bound in mask.bounds(torch.arange(TOTAL)):
        assert (bound.diff() >= 0).all()


@given(masks())
def test_no_row_is_longer_than_its_limits(mask: Mask) -> None:
    first, last = clamped_bounds(mask)
    back, ahead = torch.arange(TOTAL) - first, last - torch.arange(TOTAL)
    assert int(back.max()) < mask.max_causal_keys
    assert max(int(back.max()), int(ahead.max())) <= mask.max_distance
    assert mask.is_causal == (mask.right == 0 and not mask.span_pairs)
    if mask.is_causal:
        assert int(ahead.max()) <= 0
    if not mask.span_pairs:
        assert int((last - first).max()) < mask.max_keys_per_query
    if not mask.depends_on_length:
        assert [mask.first_seen(position) for position in range(TOTAL)] == first.tolist()


def test_documents_are_limits_too() -> None:
    documents = Full() & Documents((3, 5))
    assert (documents.max_causal_keys, documents.max_distance, documents.max_keys_per_query) == (5, 5, 5)


def test_work_is_symmetric_where_queries_see_as_far_ahead_as_back() -> None:
    assert Full().is_symmetric
    assert Window(3, 3).is_symmetric
    assert not Window(3, 4).is_symmetric
    assert not Causal().is_symmetric


@given(masks())
def test_bounds_repeat_after_each_period(mask: Mask) -> None:
    far = torch.arange(TOTAL) + 1000
    if not mask.span_pairs and mask.max_causal_keys < FAR and not mask.depends_on_length:
        for bound, shifted in zip(mask.bounds(far), mask.bounds(far + mask.period), strict=True):
            assert torch.equal(bound, shifted - mask.period)


@given(masks())
def test_a_mask_by_distance_shows_all_within_its_distances(mask: Mask) -> None:
    positions = torch.arange(TOTAL)
    first, last = clamped_bounds(mask)
    if mask.is_by_distance:
        back, ahead = mask.distances(TOTAL)
        assert torch.equal(positions - first, positions.clamp(max=back))
        assert torch.equal(last - positions, positions.flip(0).clamp(max=ahead))


@given(masks())
def test_a_mask_of_any_distance_shows_all(mask: Mask) -> None:
    first, last = clamped_bounds(mask)
    if mask.is_at_any_distance and not mask.chunks and not mask.depends_on_length:
        assert not first.any()
        assert (last == TOTAL - 1).all()


@given(masks())
def test_edges_of_documents_are_those_of_their_lengths(mask: Mask) -> None:
    edges = mask.document_edges(0, TOTAL)
    assert [stop - start for start, stop in pairwise(edges)] == [*(mask.documents or (TOTAL,))]
    for start, stop in pairwise(edges):
        assert mask.document_edges(start, stop) == [start, stop]


@given(masks())
def test_a_cropped_mask_has_the_bounds_of_the_first_tokens(mask: Mask) -> None:
    half = TOTAL // 2
    for bound, expected in zip(mask.cropped(half).bounds(torch.arange(half)), clamped_bounds(mask), strict=True):
        assert torch.equal(bound.clamp(max=half - 1), expected[:half].clamp(max=half - 1))


@given(masks())
def test_repr_and_code_restore_the_mask(mask: Mask) -> None:
    names = {name: getattr(am, name) for name in ("Full", "Causal", "Window", "Documents", "Chunks", "Spans")}
    tokens = torch.arange(TOTAL)
    assert torch.equal(eval(repr(mask), names).visible(tokens, tokens), mask.visible(tokens, tokens))
    assert Mask.from_code(mask.to_code()) == mask


def test_each_mask_equals_its_definition() -> None:
    i, j = torch.arange(TOTAL)[:, None], torch.arange(TOTAL)
    document = torch.tensor([0] * 7 + [1] * 0 + [2] * 33)
    expected = {
        Full(): torch.ones(TOTAL, TOTAL, dtype=torch.bool),
        Causal(): j <= i,
        Window(3): (i - 3 <= j) & (j <= i),
        Window(3, 2): (i - 3 <= j) & (j <= i + 2),
        Documents((7, 0, 33)): document[:, None] == document,
        Chunks(7): i // 7 == j // 7,
        Chunks(6) & Causal() & Chunks(4) & Chunks(12): (i // 6 == j // 6) & (i // 4 == j // 4) & (j <= i),
        Causal() & Window(5, 5) & Documents((7, 33)): (document[:, None] == document) & (j <= i) & (i - 5 <= j),
    }
    for mask, visible in expected.items():
        assert torch.equal(mask.visible(torch.arange(TOTAL), j), visible), mask


def test_a_reach_beyond_every_position_is_no_bound() -> None:
    assert Window(2**63 - 1, 10**30) == Full() & Chunks(10**30) == Full()


def test_chunks_that_smaller_ones_cut_are_left_out() -> None:
    assert (Chunks(6) & Chunks(3)).chunks == (3,)
    assert (Chunks(6) & Chunks(4)).chunks == (4, 6)


def test_a_shorter_problem_has_no_empty_documents_and_spans() -> None:
    documents, spans = (
        mask.scaled(lambda tokens: tokens // 5) for mask in (Documents((1, 30)), Spans([(1, 4), (5, 15)]))
    )
    assert documents.documents == (1, 5)
    assert [*spans.span_pairs] == [(1, 3)]


def test_the_first_tokens_of_one_sequence_are_one_sequence() -> None:
    assert Window(2).cropped(4) == Window(2)


def test_lengths_may_be_any_integers() -> None:
    assert Documents(torch.tensor([3, 5])) == Documents(iter([3, 5])) == Documents((3, 5))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: Mask(right=0, spans=(1, 2, 3)),
            r"Mask: .*ascending ends, chunks and spans, given .*\(1, 2, 3\)\. Fix",
        ),
        (lambda: Window(-1), r"Window left: expected a whole number, 0 or more, given -1\. Fix: count the tokens"),
        (lambda: Window(2, -3), r"Window right: expected a whole number, 0 or more, given -3\. Fix"),
        (lambda: Window(2.0), r"Window left: expected a whole number, 0 or more, given 2\.0\. Fix"),
        (lambda: Window(True), r"Window left: expected a whole number, 0 or more, given True\. Fix"),
        (lambda: Chunks(0), r"Chunks size: expected a whole number, 1 or more, given 0\. Fix: count the tokens"),
        (lambda: Chunks(2.5), r"Chunks size: expected a whole number, 1 or more, given 2\.5\. Fix"),
        (lambda: Documents((3, -2)), r"Documents length: expected a whole number, 0 or more, given -2\. Fix"),
        (lambda: Documents(()), r"Documents: expected at least one token, given lengths \[\]\. Fix: use Full"),
        (lambda: Documents((0, 0)), r"Documents: expected at least one token, given lengths \[0, 0\]\. Fix: use Full"),
        (lambda: Documents(7), r"Documents: expected a list of lengths, given 7\. Fix"),
        (
            lambda: Documents((3, 5)) & Documents((4, 5)),
            r"documents that add up to 8 tokens, given 9 tokens\. Fix: let",
        ),
    ],
)
def test_bad_masks_raise(make: object, message: str) -> None:
    with pytest.raises(errors.MaskError, match=message):
        make()


def test_and_with_another_type_raises() -> None:
    with pytest.raises(TypeError, match="unsupported operand"):
        Causal() & True


@pytest.mark.parametrize("alone", [Documents((3, 5)), Chunks(3), Documents((3, 5)) & Chunks(3)])
def test_documents_and_chunks_alone_ask_whether_later_tokens_are_seen(
    alone: Mask, monkeypatch: pytest.MonkeyPatch
) -> None:
    q, k, v = torch.randn(3, 1, 2, 8, 4).unbind()
    calls: list[Callable[[Mask], Any]] = [
        lambda mask: am.attention(q, k, v, mask=mask),
        lambda mask: am.attend(q, k, v, mask=mask),
        lambda mask: am.shard(q, None, layout="auto", mask=mask),
    ]
    for call in calls:
        monkeypatch.setattr("attnmesh.errors._warned", set())
        which = r"alone shows later tokens.* Say which: am\.Causal\(\) & am\..* hides .* am\.Full\(\) & am\..* shows"
        with pytest.warns(FutureWarning, match=which) as caught:
            call(alone)
        assert caught[0].filename == __file__
        call(alone)  # once: else warnings, which are errors here, would raise
        monkeypatch.setattr("attnmesh.errors._warned", set())
        for said in (Full() & alone, Causal() & alone, alone & Window(1, 1)):
            call(said)
    assert Full() & alone == alone
    assert pickle.loads(pickle.dumps(alone)).is_undirected
    assert alone.scaled(lambda tokens: tokens).is_undirected
    assert replace(alone, left=4).is_undirected
    assert not (Full() & alone).scaled(lambda tokens: tokens).is_undirected
    assert repr(alone).startswith("Full() & ")


def test_the_warning_does_not_depend_on_earlier_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = torch.randn(3, 1, 2, 8, 4).unbind()
    cache = am.KVCache(None, batch=1, kv_heads=2, head_dim=4, capacity=8, dtype=torch.float32)
    cache.append(k, v)
    calls: list[Callable[[Mask], Any]] = [
        lambda mask: am.attention(q, k, v, mask=mask),
        lambda mask: am.attend(q, k, v, mask=mask),
        lambda mask: am.decode(q[:, :, -1:], cache, mask=mask),
    ]
    for call in calls:
        monkeypatch.setattr("attnmesh.errors._warned", set())
        call(Full() & Chunks(5))
        with pytest.warns(FutureWarning, match="Chunks\\(size\\) alone shows later tokens"):
            call(Chunks(5))


@given(masks(), masks())
def test_a_mask_within_another_sees_no_earlier_token(mask: Mask, widest: Mask) -> None:
    positions = torch.arange(TOTAL)
    if mask.sees_no_further_back_than(widest):
        assert bool((mask.bounds(positions)[0] >= widest.bounds(positions)[0]).all())


def test_a_mask_is_within_documents_that_it_has() -> None:
    documents = Documents([3, 5])
    assert not Window(2).sees_no_further_back_than(documents)
    assert (Window(2) & documents).sees_no_further_back_than(documents)
    assert (Window(2) & Documents([1, 2, 5])).sees_no_further_back_than(documents)
    assert documents.sees_no_further_back_than(Full())
