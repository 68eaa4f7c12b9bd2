"""The history digest of a cache: one number for its padding and reorders so far, which ranks compare."""

from functools import partial as partial_of

import torch
from torch import Tensor

from attnmesh.core.digest import chained_digest
from attnmesh.runtime.unbroken import Action


class HistoryDigest:
    """The `digest` on the CPU, and its copy `digest_on_device`, which graphs read.

    A truncation undoes padding, but no reorder: it makes the digest anew, from that of the reorders alone.
    """

    def __init__(self, device: torch.device, digest: int = 0, order_digest: int = 0) -> None:
        self.digest, self._order_digest = digest, order_digest
        with torch.inference_mode(False):  # memory that can be written to in any mode
            self.digest_on_device = torch.full((), digest, dtype=torch.int64, device=device)

    def copied_to(self, device: torch.device) -> "HistoryDigest":
        """Return a copy in memory of a device."""
        return HistoryDigest(device, self.digest, self._order_digest)

    def add_padding(self, token_mask: Tensor | None, start: int) -> None:
        """Add the padding of tokens that follow the first `start`.

        Real tokens are left out: a rank on which an append has failed may not know that the batch had padding.
        """
        if token_mask is None:
            return
        places = (~token_mask).nonzero()  # few, and faster to add up than a mask of all tokens
        if len(places):
            self._set(chained_digest(self.digest + start, places))

    def actions_to_add_order(self, index: Tensor) -> list[Action]:
        """Return actions that add a reorder."""
        order_digest, digest = chained_digest(self._order_digest, index), chained_digest(self.digest, index)
        return [partial_of(setattr, self, "_order_digest", order_digest), partial_of(self._set, digest)]

    def truncate(self, length: int, token_mask: Tensor | None) -> None:
        """Keep the reorders, and the padding of the first `length` tokens. An empty cache keeps neither.

        The digest is computed from `token_mask`, of the tokens that are left: an append that the truncation undoes
        may have failed on all ranks but this one.
        """
        self._order_digest = self._order_digest if length else 0
        self._set(self._order_digest)
        self.add_padding(token_mask, 0)

    def _set(self, digest: int) -> None:
        if digest != self.digest:
            self.digest_on_device.fill_(digest)
            self.digest = digest  # after the copy: Ctrl-C between would leave it another one
