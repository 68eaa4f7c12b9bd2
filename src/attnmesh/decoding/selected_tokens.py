"""Attention of a decode step to the tokens that its queries select, of those that this rank holds."""

import torch
from torch import Tensor

from attnmesh.core.partial import Partial, merge_unchecked, with_sinks
from attnmesh.core.selection import NONE, Selection
from attnmesh.kernels.blocks import Kernel
from attnmesh.kernels.cache_view import CacheView, DecodeQuery, Padding
from attnmesh.kernels.selected_keys import SelectedKeys, nan_where_faulty
from attnmesh.kernels.stored import CacheKernel
from attnmesh.mesh.axes import Axis


def selection_of_rank(selection: Selection, heads: Axis) -> Selection:
    """Return the selection of the heads of a rank, its own where each head has one."""
    return selection.of_heads(heads.share_of(selection.heads)) if selection.heads > 1 else selection


def attend_selection(query: DecodeQuery, view: CacheView, selection: Selection, kernel: Kernel) -> Partial:
    """Return the partial of the selected tokens, in float32 or wider. The host reads nothing of a device.

    Rows of indices that are faulty give NaN. Tokens are selected by their number in the cache, padding included; masks
    and `key_lengths` count the real ones.
    """
    wanted = selection if view.padding is None else _positions(selection, view.padding)
    first, last = view.bounds(query.q.shape[2], query.mask)
    parts, run = [], CacheKernel(kernel, query.logits, view.value_dim)
    for part in (*view.shared, view):
        here = part.held()
        if here.padding is None:
            keys = SelectedKeys(wanted, first[0], last[0], here.token_index, query.key_lengths)
            parts.append(run(query.q, here.keys, here.values, keys))
        else:
            parts.append(_attend_sequences(run, query, here, wanted, first, last))
    out, lse = parts[0] if len(parts) == 1 else merge_unchecked(parts)
    return with_sinks(Partial(nan_where_faulty(out, selection, view.state[0]), lse), query.sinks)


def _attend_sequences(
    run: CacheKernel, query: DecodeQuery, here: CacheView, wanted: Selection, first: Tensor, last: Tensor
) -> Partial:
    """Attend each sequence of a padded batch by itself: its tokens have positions of their own."""
    assert here.padding is not None
    places = here.padding.places.cummax(1).values  # a search finds the token before that has this position, not padding
    partials = []
    for row in range(len(query.q)):
        one = slice(row, row + 1)
        lengths = None if query.key_lengths is None else query.key_lengths[one]
        keys = SelectedKeys(Selection(wanted.indices[one]), first[row], last[row], places[row], lengths)
        partials.append(run(query.q[one], here.keys[one], here.values[one], keys))
    out, lse = (torch.cat(x) for x in zip(*partials, strict=True))
    return Partial(out, lse)


def _positions(selection: Selection, padding: Padding) -> Selection:
    """Return the selection by position in each sequence instead of by token, without padding."""
    tokens = selection.positions(selection.indices, slice(0, selection.indices.shape[-1] * selection.block))
    real = padding.token_mask
    positions = (real.cumsum(1) - 1).masked_fill(~real, NONE).to(torch.int32)
    inside = (tokens >= 0) & (tokens < positions.shape[1])
    found = positions[:, None, None].expand(*tokens.shape[:3], -1).gather(-1, tokens.where(inside, 0))
    return Selection(found.where(inside, NONE))
