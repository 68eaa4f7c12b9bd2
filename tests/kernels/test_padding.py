"""Padding of a batch: real tokens and their positions are those of lists, whatever is appended, removed or moved."""

from random import Random

import pytest
import torch

from attnmesh.kernels.padding import Padding

pytestmark = pytest.mark.quick

CAPACITY = 24


def positions_of(real: list[bool]) -> list[int]:
    """Return the position of each token in its sequence, -1 for padding."""
    return [sum(real[:place]) if is_real else -1 for place, is_real in enumerate(real)]


def check(padding: Padding, sequences: list[list[bool]], slots: list[int]) -> None:
    """Compare with lists of real tokens; `slots` are the tokens that this rank has, in order."""
    tokens = len(sequences[0])
    for row, real in enumerate(sequences):
        assert padding.token_mask[row, :tokens].tolist() == real
        assert bool(padding.token_mask[row, tokens:].all()), "places without a token count as real"
        assert padding.positions[row, : len(slots)].tolist() == [positions_of(real)[token] for token in slots]
    assert padding.lengths.tolist() == [sum(real) for real in sequences]


def test_real_tokens_count_and_padding_does_not() -> None:
    padding = Padding.none(2, 5, torch.arange(5), torch.tensor(0))
    new = torch.arange(3)
    padding.add(torch.tensor(0), torch.tensor([[True, True, True], [False, True, True]]), new, new)
    assert padding.positions[:, :3].tolist() == [[0, 1, 2], [-1, 0, 1]]
    real, positions = padding.last(torch.tensor([1, 2]))
    assert real.all()
    assert positions.tolist() == [[1, 2], [0, 1]]


@pytest.mark.parametrize("seed", range(6))
def test_random_histories_are_those_of_lists(seed: int) -> None:
    """This rank has every second token, as one of two has in blocks of one token."""
    random = Random(seed)
    padding = Padding.none(3, CAPACITY, torch.zeros(CAPACITY // 2, dtype=torch.int64), torch.tensor(0))
    sequences: list[list[bool]] = [[], [], []]
    for _ in range(14):
        before = len(sequences[0])
        kind = random.choice(("add", "add", "cut", "reorder"))
        if kind == "add" and before < CAPACITY:
            count = random.randint(1, min(5, CAPACITY - before))
            masks = [[random.random() < 0.7 for _ in range(count)] for _ in sequences]
            mine = [token for token in range(before, before + count) if token % 2 == 0]
            new = torch.tensor([token - before for token in mine], dtype=torch.int64)
            slots = torch.tensor([token // 2 for token in mine], dtype=torch.int64)
            padding.add(torch.tensor(before), torch.tensor(masks), new, slots)
            sequences = [real + mask for real, mask in zip(sequences, masks, strict=True)]
        elif kind == "cut":
            length = random.randint(0, before)
            padding.cut(length)
            sequences = [real[:length] for real in sequences]
        elif kind == "reorder":
            order = [random.randrange(3) for _ in range(3)]
            padding = padding.reordered(torch.tensor(order))
            sequences = [sequences[index] for index in order]
        tokens = len(sequences[0])
        check(padding, sequences, [*range(0, tokens, 2)])
        last = [*range(max(0, tokens - 3), tokens)]
        real, positions = padding.last(torch.tensor(last, dtype=torch.int64))
        assert real.tolist() == [[mask[token] for token in last] for mask in sequences]
        for row, mask in enumerate(sequences):
            given = [
                place for place, is_real in zip(positions[row].tolist(), real[row].tolist(), strict=True) if is_real
            ]
            assert given == [positions_of(mask)[token] for token in last if mask[token]]


def test_another_capacity_keeps_the_tokens() -> None:
    padding = Padding.none(1, 3, torch.arange(3), torch.tensor(0))
    padding.add(torch.tensor(0), torch.tensor([[False, True]]), torch.arange(2), torch.arange(2))
    for capacity in (6, 2):
        made = padding.resized(capacity, padding.positions[:, :2])
        assert made.token_mask.tolist() == [[False, True] + [True] * (capacity - 2)]
        assert (made.lengths.tolist(), made.positions.tolist()) == ([1], [[-1, 0]])
