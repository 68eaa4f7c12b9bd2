"""Latents: absorbed queries over latents give what expanded keys and values give."""

import pytest
import torch

import attnmesh as am
from attnmesh.core.band import Band
from attnmesh.core.scaling import Scaling
from attnmesh.kernels.choice import choose
from attnmesh.kernels.kernel import KernelRequest
from attnmesh.mesh.axes import RankMesh
from attnmesh.mesh.shapes import AXES, Shape
from attnmesh.mesh_attention import latents as latent
from attnmesh.mesh_attention.attention import attend_shards
from attnmesh.mesh_attention.attention_arguments import AttentionArguments
from attnmesh.mesh_attention.latents import Latents, Projection
from attnmesh.runtime.counters import count_traffic
from tests.support.ranks.pool import Pool, on_each_rank
from tests.support.truth.dense import dense
from tests.support.truth.mesh_problems import call_options, named_mesh

HEADS, COLUMNS, VALUES, LATENT_RANK, ROTATED, TOKENS = 6, 5, 3, 7, 2, 11


def random_latents() -> tuple[torch.Tensor, torch.Tensor, Projection]:
    """Return queries, latents and a projection."""
    q, latents = torch.randn(2, HEADS, TOKENS, COLUMNS + ROTATED), torch.randn(2, 1, TOKENS, LATENT_RANK + ROTATED)
    projection = Projection(torch.randn(HEADS, COLUMNS, LATENT_RANK), torch.randn(HEADS, VALUES, LATENT_RANK))
    return q.double(), latents.double(), projection.to(torch.float64)


def test_absorbed_queries_give_what_expanded_keys_give() -> None:
    q, latents, projection = random_latents()
    visible = am.Causal().visible(torch.arange(TOKENS), torch.arange(TOKENS))
    expected, lse, _ = dense(q, *projection.expand(latents), visible, 0.3)
    sums, same_lse, _ = dense(projection.absorb(q), latents, latents[..., :LATENT_RANK], visible, 0.3)
    torch.testing.assert_close(projection.project(sums), expected)
    torch.testing.assert_close(same_lse, lse)


@pytest.mark.parametrize("size", [1, 2 * 11 * 10 * 8 * 4, 1 << 20])
def test_heads_are_expanded_in_groups(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(latent, "EXPANDED_BYTES", size)
    q, latents, projection = random_latents()
    band = Band.of(am.Window(4), torch.arange(TOKENS), TOKENS)
    visible = am.Window(4).visible(torch.arange(TOKENS), torch.arange(TOKENS))
    expected, lse, _ = dense(q, *projection.expand(latents), visible, 0.3)
    partial = projection.attend(
        choose(KernelRequest.of(q, *projection.expand(latents), Scaling(0.3))), q, latents, band, Scaling(0.3)
    )
    torch.testing.assert_close(partial.out, expected)
    torch.testing.assert_close(partial.lse, lse)


@on_each_rank
def count_received_elements(shape: Shape) -> int:
    """Return the elements that a rank receives, besides one value per row."""
    mesh, n = named_mesh(shape, AXES), TOKENS
    q, k, v = torch.randn(1, HEADS, n, COLUMNS + ROTATED), *torch.randn(2, 1, HEADS, n, COLUMNS + ROTATED)
    projection = Projection(torch.randn(HEADS, COLUMNS, LATENT_RANK), torch.randn(HEADS, VALUES, LATENT_RANK))
    lengths = dict.fromkeys(("length", "key_length"), n * shape.ranks)
    layouts = dict.fromkeys(("layout", "key_layout"), am.Zigzag())
    options = call_options(mask=am.Full(), exchange="bulk", **layouts, **lengths)
    rows = torch.randn(1, 1, n, LATENT_RANK + ROTATED)
    with count_traffic() as traffic:
        attend_shards(
            AttentionArguments(q, k, v[..., :VALUES], None, None, options),
            RankMesh.of(mesh),
            None,
            Latents(rows, projection),
        )
    return traffic.vectors


@pytest.mark.parametrize("shape", [Shape(1, 4, 1), Shape(1, 1, 4), Shape(1, 2, 2)])
def test_latents_travel_along_columns_and_queries_along_rows(shape: Shape, pool: Pool) -> None:
    latents = (shape.queries - 1) * TOKENS * (LATENT_RANK + ROTATED)
    queries = (shape.keys - 1) * TOKENS * HEADS * (COLUMNS + ROTATED + VALUES)
    assert pool.run(4, count_received_elements, shape) == [latents + queries] * 4
