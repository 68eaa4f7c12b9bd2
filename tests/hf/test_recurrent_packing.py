"""Recurrent layers under packing: each document has the loss and gradients that it has alone in stock transformers."""

from typing import Any

import pytest
import torch
from torch import Tensor

import attnmesh as am
import attnmesh.hf as hf
from attnmesh.core.layout import Layout
from attnmesh.mesh.shapes import Shape
from tests.hf.test_recurrent import FAMILIES, TOLERANCE, model_of, tokens, trained
from tests.support.mesh_problems import named_mesh
from tests.support.pool import Pool
from tests.tools.checks import AXES, DoublePrecision

DOCUMENTS = (1, 14, 29, 1, 17)
"""Tokens of each document: of one token, begun at the edge of a shard and inside of one, and over several shards."""

LENGTH = sum(DOCUMENTS)

PLACES: tuple[tuple[Shape, Layout], ...] = (
    (Shape(1, 2, 1), am.Zigzag()),  # parts of 15, 16, 15 and 16 tokens
    (Shape(1, 1, 3), am.Contiguous()),  # shards of 21, 21 and 20 tokens
    (Shape(1, 1, 2), am.Contiguous()),
    (Shape(1, 3, 1), am.Zigzag()),
)


def positions(documents: tuple[int, ...]) -> Tensor:
    return torch.cat([torch.arange(n) for n in documents])[None]


def packed(documents: tuple[int, ...]) -> dict[str, Any]:
    """Return a batch of two rows, packed alike. No document learns the first token of the next."""
    ids, places = tokens(sum(documents), batch=2), positions(documents)
    return {"input_ids": ids, "labels": ids.masked_fill(places == 0, -100), "position_ids": places}


def train_on_ranks(family: str, shape: Shape, layout: Layout, exchange: str) -> tuple[float, dict[str, Tensor]]:
    batch = hf.shard_batch(packed(DOCUMENTS), named_mesh(shape, AXES), layout, exchange=exchange)
    return trained(model_of(family), batch)


def trained_alone(family: str) -> tuple[float, dict[str, Tensor]]:
    """Return the loss and gradients of stock transformers over the documents, which it computes one by one."""
    model, batch, loss = model_of(family, "eager"), packed(DOCUMENTS), 0.0
    count = (batch["labels"] != -100).sum()
    for ids, labels in zip(*(batch[name].split(DOCUMENTS, 1) for name in ("input_ids", "labels")), strict=True):
        more, gradients = trained(
            model, {"input_ids": ids, "labels": labels, "num_items_in_batch": count, "use_cache": False}
        )
        loss += more
    return loss, gradients


@pytest.mark.parametrize(("family", "shape", "layout"), [(f, *p) for f in FAMILIES for p in PLACES])
def test_loss_and_gradients_are_those_of_each_document_alone(
    family: str, shape: Shape, layout: Layout, pool: Pool
) -> None:
    loss, gradients = trained_alone(family)
    results = pool.run(shape.ranks, train_on_ranks, family, shape, layout, "scan")
    assert sum(result[0] for result in results) / len(results) == pytest.approx(loss, rel=1e-7)
    largest = max(float(x.abs().max()) for x in gradients.values())
    tolerance = 1e-6 if family == "minimax" else TOLERANCE  # its buffers of decays are made in float32
    for name, expected in gradients.items():
        parts = [result[1].get(name, torch.zeros_like(expected)) for result in results]
        found = torch.stack(parts).mean(0)
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance * largest, msg=lambda text: name + text)
