"""DeepSeek-V4, whose layers attend to entries of compressed tokens.

Its compressors and the scorer of its indexer run as subclasses.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from attnmesh.hf.family import ATTENTION_FIELDS, Family, LayerKind, SubclassedModule
from attnmesh.hf.shard_tensors import ShardPositions
from attnmesh.hf.sparse.entries import IndexEntries


class EntryScorer:
    """First base of a subclass of `DeepseekV4IndexerScorer`, whose keys are sharded."""

    @torch.compiler.disable  # type: ignore[untyped-decorator] # it waits for ranks
    def forward(self, q: Tensor, compressed_kv: Any, hidden_states: Tensor) -> Tensor:
        """Return the scores of given keys; none for a cache of shards, which selects the best of its keys."""
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
        """Tell the layer of the cache its sequence, and return what the model's compressor returns."""
        layer: Any = None if past_key_values is None else past_key_values.layers[layer_idx]
        if hasattr(layer, "begin_entries"):
            sequence = None
            if isinstance(position_ids, ShardPositions) and not position_ids.whole:
                sequence = position_ids.sequence
            layer.begin_entries(hidden_states.shape[1], sequence)
        return super().forward(hidden_states, q_residual, position_ids, past_key_values, layer_idx)  # type: ignore[misc]


_COMPRESSES = ("self", "hidden_states", "q_residual", "position_ids", "past_key_values", "layer_idx")
_STORES = ("store_compression_weights", "update_compressor_states")

FAMILIES = (
    Family(
        "deepseek_v4",
        f"{ATTENTION_FIELDS} head_dim intermediate_size moe_intermediate_size n_routed_experts num_experts_per_tok "
        "num_local_experts output_router_logits qk_rope_head_dim rope_parameters sliding_window",
        stores={"DeepseekV4Attention": "layer_type"},
        sources={
            "DeepseekV4HCACache.store_compression_weights": "b3c4a0ab7120",
            "DeepseekV4HCACache.update_compressor_states": "31daa140ccdb",
            "DeepseekV4CSACache.update_overlap_state": "100869943a39",
            "DeepseekV4CSACompressor.forward": "6c2176729af2",
            "DeepseekV4HCACompressor.forward": "313738e0064a",
            "DeepseekV4IndexerScorer.forward": "540b8b5d4166",
        },
        layers={
            "compressed_sparse_attention": LayerKind(entries={"compressor": "prefix", "indexer": "none"}),
            "heavily_compressed_attention": LayerKind(entries={"compressor": "prefix"}),
        },
        subclassed={
            "DeepseekV4CSACompressor": SubclassedModule(
                EntryCompressor, arguments=_COMPRESSES, reads=(*_STORES, "update_overlap_state", "indexer", "new_full")
            ),
            "DeepseekV4HCACompressor": SubclassedModule(EntryCompressor, arguments=_COMPRESSES, reads=_STORES),
            "DeepseekV4IndexerScorer": SubclassedModule(
                EntryScorer,
                arguments=("self", "q", "compressed_kv", "hidden_states"),
                reads=("weights_proj", "relu"),
                is_alone=True,
            ),
        },
    ),
)
