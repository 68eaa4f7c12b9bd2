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

from attnmesh.comm.p2p import meta_like, swap
from attnmesh.mesh.axes import Axis, group_named


def tokens_to_heads(x: Tensor, axis: Axis, owners: Sequence[int], lengths: Sequence[int]) -> Tensor:
    """Return (batch, all tokens, width) of this rank's share, from (batch, own tokens, ranks, width).

    Tokens are in the order of the sequence. Gradients flow back to the ranks that hold the tokens, so each rank uses
    its result in the loss, or none does.
    """
    found: Tensor = tokens_to_heads_op(x, axis.group_name, [axis.size, axis.index], [*owners], [*lengths])
    return found


def heads_to_tokens(x: Tensor, axis: Axis, owners: Sequence[int], lengths: Sequence[int]) -> Tensor:
    """Return (batch, own tokens, ranks, width), from (batch, all tokens, width) of each rank's share."""
    found: Tensor = heads_to_tokens_op(x, axis.group_name, [axis.size, axis.index], [*owners], [*lengths])
    return found


@torch.library.custom_op("attnmesh::tokens_to_heads", mutates_args=())
def tokens_to_heads_op(
    x: Tensor, group: str, place: Sequence[int], owners: Sequence[int], lengths: Sequence[int]
) -> Tensor:
    """Send each share of the heads to its rank. Receive this rank's share of all tokens."""
    axis = Axis(place[0], place[1], group_named(group))
    shares = [(share,) for share in x.unbind(2)]
    counts = [own_tokens(rank, owners, lengths) for rank in range(axis.size)]
    wanted = [(meta_like(shares[0][0], count, dim=1),) for count in counts]
    arrived = [tokens for (tokens,) in swap(shares, wanted, axis)]
    runs = zip(owners, _places(owners, lengths), lengths, strict=True)
    return torch.cat([arrived[owner].narrow(1, first, length) for owner, first, length in runs], 1)


@torch.library.custom_op("attnmesh::heads_to_tokens", mutates_args=())
def heads_to_tokens_op(
    x: Tensor, group: str, place: Sequence[int], owners: Sequence[int], lengths: Sequence[int]
) -> Tensor:
    """Send the tokens of each rank to it. Receive this rank's tokens of all shares of the heads."""
    axis = Axis(place[0], place[1], group_named(group))
    parts: list[list[Tensor]] = [[] for _ in range(axis.size)]
    for owner, tokens in zip(owners, x.split([*lengths], 1), strict=True):
        parts[owner].append(tokens)
    wanted = meta_like(x, own_tokens(axis.index, owners, lengths), dim=1)
    arrived = swap([(torch.cat(tokens, 1),) for tokens in parts], [(wanted,)] * axis.size, axis)
    return torch.stack([share for (share,) in arrived], 2)


@tokens_to_heads_op.register_fake
def _(x: Tensor, _: str, __: Sequence[int], ___: Sequence[int], lengths: Sequence[int]) -> Tensor:
    return x.new_empty(x.shape[0], sum(lengths), x.shape[3])


@heads_to_tokens_op.register_fake
def _(x: Tensor, _: str, place: Sequence[int], owners: Sequence[int], lengths: Sequence[int]) -> Tensor:
    return x.new_empty(x.shape[0], own_tokens(place[1], owners, lengths), place[0], x.shape[2])


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, *ctx.numbers = inputs


tokens_to_heads_op.register_autograd(
    lambda ctx, dx: (heads_to_tokens_op(dx.contiguous(), *ctx.numbers), *[None] * 4),
    setup_context=_save_for_backward,
)
heads_to_tokens_op.register_autograd(
    lambda ctx, dx: (tokens_to_heads_op(dx.contiguous(), *ctx.numbers), *[None] * 4),
    setup_context=_save_for_backward,
)


def own_tokens(rank: int, owners: Sequence[int], lengths: Sequence[int]) -> int:
    """Return the tokens that a rank holds, in all its parts."""
    return sum(length for owner, length in zip(owners, lengths, strict=True) if owner == rank)


def _places(owners: Sequence[int], lengths: Sequence[int]) -> list[int]:
    """Return the index of each part's first token on its rank."""
    return [own_tokens(owner, owners[:part], lengths[:part]) for part, owner in enumerate(owners)]
