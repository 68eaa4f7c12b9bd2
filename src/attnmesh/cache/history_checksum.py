"""The history checksum of a cache: one number for its padding and reorders so far, which ranks compare."""

import torch
from torch import Tensor

from attnmesh.core.digest import chained_checksum


class HistoryChecksum:
    """The `checksum` on the CPU, and its copy `checksum_on_device`, which graphs read.

    A truncation undoes padding, but no reorder: it makes the checksum anew, from that of the reorders alone.
    """

    def __init__(self, device: torch.device, checksum: int = 0, order_checksum: int = 0) -> None:
        self.checksum, self._order_checksum = checksum, order_checksum
        with torch.inference_mode(False):  # memory that can be written to in any mode
            self.checksum_on_device = torch.full((), checksum, dtype=torch.int64, device=device)

    def copied_to(self, device: torch.device) -> "HistoryChecksum":
        """Return a copy in memory of a device."""
        return HistoryChecksum(device, self.checksum, self._order_checksum)

    def add_padding(self, token_mask: Tensor | None, start: int) -> None:
        """Add the padding of tokens that follow the first `start`.

        Real tokens are left out: a rank on which an append has failed may not know that the batch had padding.
        """
        if token_mask is None:
            return
        places = (~token_mask).nonzero()  # few, and faster to add up than a mask of all tokens
        if len(places):
            self._set(chained_checksum(self.checksum + start, places))

    def add_order(self, index: Tensor) -> None:
        """Add a reorder."""
        self._order_checksum = chained_checksum(self._order_checksum, index)
        self._set(chained_checksum(self.checksum, index))

    def truncate(self, length: int, token_mask: Tensor | None) -> None:
        """Keep the reorders, and the padding of the first `length` tokens. An empty cache keeps neither.

        The checksum is computed from `token_mask`, of the tokens that are left: an append that the truncation undoes
        may have failed on all ranks but this one.
        """
        self._order_checksum = self._order_checksum if length else 0
        self._set(self._order_checksum)
        self.add_padding(token_mask, 0)

    def _set(self, checksum: int) -> None:
        if checksum != self.checksum:
            self.checksum = checksum
            self.checksum_on_device.fill_(checksum)
