"""All-to-all between a rank's tokens with all heads and all tokens with a share of the heads.

The sequence is cut into parts, in order; `owners` are the ranks that hold them, by index of the axis. A rank holds its
parts one after the other. Three ranks, each with one part:

    (own tokens, 3 shares of the heads)        (all tokens, own share)
    rank 0   t0 h0 | t0 h1 | t0 h2             t0 h0, t1 h0, t2 h0
    rank 1   t1 h0 | t1 h1 | t1 h2      <->    t0 h1, t1 h1, t2 h1
    rank 2   t2 h0 | t2 h1 | t2 h2             t0 h2, t1 h2, t2 h2

Each direction is the gradient of the other.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from attnmesh.comm.p2p import all_to_all_tokens
from attnmesh.mesh.axes import Axis, group_named
from attnmesh.runtime.operators import custom_operator


def tokens_to_heads(x: Tensor, axis: Axis, owners: Sequence[int], lengths: Sequence[int]) -> Tensor:
    """Return (batch, all tokens, width) of this rank's share, from (batch, own tokens, ranks, width).

    Tokens are in the order of the sequence. Gradients flow back to the ranks that hold the tokens, so each rank uses
    its result in the loss, or none does.
    """
    share: Tensor = heads_op(x, False, axis.group_name, [axis.size, axis.index], [*owners], [*lengths])
    return share


def heads_to_tokens(x: Tensor, axis: Axis, owners: Sequence[int], lengths: Sequence[int]) -> Tensor:
    """Return (batch, own tokens, ranks, width), from (batch, all tokens, width) of each rank's share."""
    own: Tensor = heads_op(x, True, axis.group_name, [axis.size, axis.index], [*owners], [*lengths])
    return own


def _fake_heads(
    x: Tensor, to_tokens: bool, _: str, size_and_index: Sequence[int], owners: Sequence[int], lengths: Sequence[int]
) -> Tensor:
    if to_tokens:
        return x.new_empty(
            x.shape[0], own_token_count(size_and_index[1], owners, lengths), size_and_index[0], x.shape[2]
        )
    return x.new_empty(x.shape[0], sum(lengths), x.shape[3])


def _keep_numbers(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, ctx.to_tokens, *ctx.numbers = inputs


def _exchange_backward(ctx: Any, dout: Tensor) -> list[Tensor]:
    return [heads_op(dout.contiguous(), not ctx.to_tokens, *ctx.numbers)]


@custom_operator("heads", _fake_heads, _keep_numbers, _exchange_backward)
def heads_op(
    x: Tensor, to_tokens: bool, group: str, size_and_index: Sequence[int], owners: Sequence[int], lengths: Sequence[int]
) -> Tensor:
    """Send each share of the heads to its rank, for this rank's share of all tokens; or back, if `to_tokens`."""
    axis = Axis(size_and_index[0], size_and_index[1], group_named(group))
    token_counts = [own_token_count(rank, owners, lengths) for rank in range(axis.size)]
    if to_tokens:
        parts: list[list[Tensor]] = [[] for _ in range(axis.size)]
        for owner, part in zip(owners, x.split([*lengths], 1), strict=True):
            parts[owner].append(part)
        own_lengths = [token_counts[axis.index]] * axis.size
        return torch.stack(all_to_all_tokens([torch.cat(owned, 1) for owned in parts], own_lengths, axis, dim=1), 2)
    shares = all_to_all_tokens(x.unbind(2), token_counts, axis, dim=1)
    runs = zip(owners, first_indices(owners, lengths), lengths, strict=True)
    return torch.cat([shares[owner].narrow(1, first, length) for owner, first, length in runs], 1)


def own_token_count(rank: int, owners: Sequence[int], lengths: Sequence[int]) -> int:
    """Return how many tokens a rank holds, in all its parts."""
    return sum(length for owner, length in zip(owners, lengths, strict=True) if owner == rank)


def first_indices(owners: Sequence[int], lengths: Sequence[int]) -> list[int]:
    """Return the index of each part's first token on its rank."""
    counts = dict.fromkeys(owners, 0)
    indices = []
    for owner, length in zip(owners, lengths, strict=True):
        indices.append(counts[owner])
        counts[owner] += length
    return indices
