"""Entries on a mesh: keys that each stand for a block of tokens, made by the model's own compressor.

A cache of shards stores the entries, and returns none. So the model joins none to its keys, and the attention function
reads the entries where they are.
"""

from typing import Any, NoReturn

from torch import Tensor

from attnmesh.errors import KernelError
from attnmesh.hf.models import SUBJECT, Opaque

UNPREPARED = (
    f"{SUBJECT} compressor",
    "a compressor that is prepared for a mesh",
    "one that is not",
    "call hf.generate or hf.prefill with the cache",
)
"""Parts of the error for a compressor or an indexer that does not run as a subclass."""


class IndexEntries(Opaque):
    """Stand-in without entries for the keys of an indexer, (batch, entries, dim), which a cache holds in shards."""

    def __init__(self, new: Tensor, layer: Any) -> None:
        self.shape = (new.shape[0], 0, new.shape[2])
        self.layer = layer

    @staticmethod
    def raise_read(_: str) -> NoReturn:
        """Raise for a model whose compressor or indexer is not prepared."""
        raise KernelError(*UNPREPARED)
