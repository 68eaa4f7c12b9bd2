"""Windows that forget: which tokens of a cache later queries see under its mask.

A cache with `mask=` keeps a ring of blocks over the ranks: blocks enter at its end, round robin, and leave at its start
once no later query sees them. Slots stay in the order of their tokens. A shard with no free slot moves the tokens that
are left to new memory with some slots to spare, about eight moves per token.
"""

from typing import NamedTuple

from torch import Tensor

from attnmesh.core.mask import Mask, check_mask
from attnmesh.errors import MaskError, ShapeError, check_int


class WindowStart(NamedTuple):
    """The oldest token that a cache keeps, and the oldest query that it serves.

    The cache has forgotten what earlier queries see.
    """

    oldest_kept_token: int = 0
    oldest_query: int = 0


def check_window(mask: Mask | None, keep: int) -> None:
    """Raise unless a cache can forget tokens by this mask, and keep this many for truncation."""
    check_int("KVCache keep", keep, 0, "count the tokens to go back as an int")
    if mask is None:
        if keep != 0:
            fix = "pass mask= too, or leave keep out: truncate goes back to any token"
            raise ShapeError("KVCache keep", "0 without mask=", repr(keep), fix)
        return
    check_mask("KVCache mask", mask)
    if mask.depends_on_length:
        expected = "a mask that does not depend on the length"
        fix = "pass the mask without documents, and decode with mask & Documents(lengths)"
        raise MaskError("KVCache mask", expected, repr(mask), fix)


def oldest_kept_token(mask: Mask, query: int, block: int, token_mask: Tensor | None) -> int:
    """Return the start of the first block with a token that token `query`, or a later one, sees.

    Positions count the tokens that are real by `token_mask`, (batch, tokens).
    """
    if token_mask is None or not query:
        return mask.first_seen(query) // block * block
    positions = token_mask.cumsum(1)  # position of the token after each one
    first = (positions <= mask.bounds(positions[:, query - 1])[0][:, None]).sum(1)
    return min(int(first.min()), query) // block * block
