"""Latents: absorbed queries over latents give what expanded keys and values give."""

import pytest
import torch

import attnmesh as am
from attnmesh.attention import latent
from attnmesh.attention.latent import Projection
from attnmesh.core.mask import Band
from attnmesh.kernels.driver import choose
from tests.support.dense import dense

HEADS, COLUMNS, VALUES, RANK, ROTATED, TOKENS = 6, 5, 3, 7, 2, 11


def drawn() -> tuple[torch.Tensor, torch.Tensor, Projection]:
    """Return queries, latents and a projection."""
    q, latents = torch.randn(2, HEADS, TOKENS, COLUMNS + ROTATED), torch.randn(2, 1, TOKENS, RANK + ROTATED)
    projection = Projection(torch.randn(HEADS, COLUMNS, RANK), torch.randn(HEADS, VALUES, RANK))
    return q.double(), latents.double(), projection.to(torch.float64)


def test_absorbed_queries_give_what_expanded_keys_give() -> None:
    q, latents, projection = drawn()
    visible = am.Causal().visible(torch.arange(TOKENS), torch.arange(TOKENS))
    expected, lse, _ = dense(q, *projection.expand(latents), visible, 0.3)
    sums, same_lse, _ = dense(projection.absorb(q), latents, latents[..., :RANK], visible, 0.3)
    torch.testing.assert_close(projection.project(sums), expected)
    torch.testing.assert_close(same_lse, lse)


@pytest.mark.parametrize("size", [1, 2 * 11 * 10 * 8 * 4, 1 << 20])
def test_heads_are_expanded_in_groups(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(latent, "EXPANDED_BYTES", size)
    q, latents, projection = drawn()
    band = Band.of(am.Window(4), torch.arange(TOKENS), TOKENS)
    visible = am.Window(4).visible(torch.arange(TOKENS), torch.arange(TOKENS))
    expected, lse, _ = dense(q, *projection.expand(latents), visible, 0.3)
    partial = projection.attend(choose("auto", q, *projection.expand(latents)), q, latents, band, 0.3)
    torch.testing.assert_close(partial.out, expected)
    torch.testing.assert_close(partial.lse, lse)
