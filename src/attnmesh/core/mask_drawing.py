"""Drawings of masks as text."""

import torch
from torch import Tensor

from attnmesh.core.layout import Layout, Packed, check_layout, checked_shape

RANK_CHARACTERS = "0123456789abcdefghijklmnopqrstuvwxyz"
"""Characters of ranks in a drawing. They begin anew after the last."""


def drawn(visible: Tensor, layout: Layout | None, shape: tuple[int, int, int] | None) -> list[str]:
    """Return a dense mask as text, one line per query; with a layout each pair as the rank that computes it."""
    if layout is None:
        return [" ".join(".#"[seen] for seen in row) for row in visible.tolist()]
    check_layout("draw layout", layout)
    length = len(visible)
    own = layout.shape if isinstance(layout, Packed) else (1, 1, 1)
    heads, query_ranks, key_ranks = own if shape is None else checked_shape("draw shape", shape)
    cells = torch.empty(length, dtype=torch.long, device="cpu")
    for shard in range(heads * query_ranks * key_ranks):
        cells[layout.positions(length, heads * query_ranks * key_ranks, shard)] = shard % (query_ranks * key_ranks)
    ranks = cells[:, None] // key_ranks * key_ranks + cells % key_ranks
    shown = (ranks % len(RANK_CHARACTERS) + 1) * visible
    return [" ".join(f".{RANK_CHARACTERS}"[rank] for rank in row) for row in shown.tolist()]
