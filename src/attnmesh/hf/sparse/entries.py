"""Entries of DeepSeek-V4 on a mesh: each stands for a block of tokens, of which the model's own compressor makes it.

The compressors and the scorer of the indexer run as subclasses. A cache of shards stores the entries, and returns none.
So the model joins none to its keys, and the attention function reads the entries where they are.
"""

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from attnmesh.errors import KernelError
from attnmesh.hf.models import SUBJECT, Opaque
from attnmesh.hf.shards import ShardPositions

UNPREPARED = (
    f"{SUBJECT} compressor",
    "a compressor that is prepared for a mesh",
    "one that is not",
    "call hf.generate or hf.prefill with the cache",
)
"""Parts of the error for a compressor or an indexer that does not run as a subclass."""


class IndexEntries(Opaque):
    """Keys of an indexer, (batch, entries, dim), which a cache holds in shards: here none of them."""

    def __init__(self, new: Tensor, layer: Any) -> None:
        self.shape, self.layer = (new.shape[0], 0, new.shape[2]), layer

    @staticmethod
    def _raise_read(_: str) -> NoReturn:
        raise KernelError(*UNPREPARED)


class EntryScorer:
    """First base of a subclass of `DeepseekV4IndexerScorer`, whose keys are sharded."""

    @torch.compiler.disable  # type: ignore[untyped-decorator] # it waits for ranks
    def forward(self, q: Tensor, compressed_kv: Any, hidden_states: Tensor) -> Tensor:
        """Return the scores of given keys; of those in a cache of shards none, which selects the best of them."""
        scores: Callable[[Tensor, Tensor, Tensor], Tensor] = super().forward  # type: ignore[misc]
        if not isinstance(compressed_kv, IndexEntries):
            return scores(q, compressed_kv, hidden_states)

        def score(keys: Tensor, operands: Sequence[Tensor]) -> Tensor:
            return scores(operands[0], keys, operands[1])

        compressed_kv.layer.select(score, (q, hidden_states))
        return q.new_zeros(*q.shape[:2], 0)


class EntryCompressor:
    """First base of subclasses of DeepSeek-V4's compressors, whose entries are sharded."""

    @torch.compiler.disable  # type: ignore[untyped-decorator] # it waits for ranks
    def forward(
        self, hidden_states: Tensor, q_residual: Tensor, position_ids: Tensor, past_key_values: Any, layer_idx: int
    ) -> Any:
        """Return what the model's compressor returns, after its layer of the cache knows the shards."""
        layer: Any = None if past_key_values is None else past_key_values.layers[layer_idx]
        if hasattr(layer, "begin_entries"):
            shards = None
            if isinstance(position_ids, ShardPositions) and not position_ids.whole:
                shards = position_ids.shards
            layer.begin_entries(hidden_states.shape[1], shards)
        return super().forward(hidden_states, q_residual, position_ids, past_key_values, layer_idx)  # type: ignore[misc]
