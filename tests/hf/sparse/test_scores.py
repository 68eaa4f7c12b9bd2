"""Recorded scores of indexers: those of the same functions, of each key by itself, or refused."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from attnmesh import errors
from attnmesh.hf.sparse.scores import IndexScores


class Source:
    """Keys of an indexer, which count how many were asked for."""

    def select(self, scores: IndexScores, k: int) -> Tensor:
        return torch.tensor(k)


def recorded(function: Callable[[IndexScores], Any]) -> Any:
    return function(IndexScores.keys(torch.randn(2, 5, 8), Source()))


@pytest.mark.parametrize(
    "function",
    [
        lambda keys: keys.softmax(-1),
        lambda keys: keys.sum(1),
        lambda keys: keys.cumsum(1),
        lambda keys: keys[:, :3],
        lambda keys: keys + 1,
        lambda keys: keys.mT,
        lambda keys: keys.topk(3),
        lambda keys: keys.transpose(1, 2).masked_fill(torch.ones(1, dtype=torch.bool), -torch.inf),
        lambda keys: torch.cat((keys, keys), 1),
        lambda keys: keys.tolist(),
    ],
)
def test_functions_that_do_not_score_each_key_by_itself_are_refused(function: Callable[[IndexScores], Any]) -> None:
    with pytest.raises(errors.KernelError, match=r"attnmesh\.hf"):
        recorded(function)


def test_recorded_scores_are_those_of_the_same_functions() -> None:
    q, weights, keys = torch.randn(2, 3, 4, 8), torch.randn(2, 3, 4), torch.randn(2, 7, 8)

    def scored(x: Any) -> Any:
        products = torch.relu(torch.matmul(q, x.transpose(-1, -2).float().unsqueeze(1)) * 0.5)
        return torch.matmul(weights.unsqueeze(-2), products).squeeze(-2)

    scores = recorded(scored)
    torch.testing.assert_close(scores.run(keys, scores.operands), scored(keys))
    some = [x[:, 1:] for x in scores.operands]
    torch.testing.assert_close(scores.run(keys[:, 2:5], some), scored(keys)[:, 1:, 2:5])


def test_scores_of_other_shapes_are_refused() -> None:
    q = torch.randn(2, 4, 3, 8)  # heads before queries
    scores = recorded(lambda keys: torch.matmul(q, keys.transpose(-1, -2).unsqueeze(1)))
    with pytest.raises(errors.KernelError, match="scores of shape"):
        scores.run(torch.randn(2, 7, 8), scores.operands)
