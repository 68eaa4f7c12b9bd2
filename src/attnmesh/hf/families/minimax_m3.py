"""MiniMax-M3, whose indexer selects blocks of keys for each key head, and always the last ones.

The model's indexer scores all keys before it knows their mask. A subclass returns `BlockScores` instead, from which the
attention function selects when it has the mask.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from attnmesh.core.selection import NO_INDEX, Selection
from attnmesh.errors import KernelError, MaskError
from attnmesh.hf.family import ATTENTION_FIELDS, INDEXED, Family, LayerKind, SubclassedModule
from attnmesh.hf.models import SUBJECT, Opaque
from attnmesh.hf.shard_tensors import ShardPositions
from attnmesh.hf.sparse.select import ShardKeys
from attnmesh.hf.transformers_names import rope_of
from attnmesh.planner.selected import Selected


class BlockScores(Opaque):
    """Scores of an indexer's keys in blocks, before they are computed. They take the place of the selected blocks."""

    whole = False
    recognised: Any = None
    """The `RecognisedMask` of the layer; None before it is known."""

    def __init__(self, indexer: Any, q: Tensor, positions: Tensor, source: Any) -> None:
        self.operands = (q,)
        self.positions = positions
        self.source = source
        self.k, self.block, self.local = indexer.topk_blocks, indexer.block_size, indexer.local_blocks

    def run(self, keys: Tensor, operands: Sequence[Tensor]) -> Tensor:
        """Return the scores of some keys for some queries, (batch, key heads, queries, keys)."""
        return operands[0].transpose(1, 2).float() @ keys[:, None].float().mT

    def selected(self, recognised: Any) -> Selection:
        """Return the last blocks of each query and the best others, of those that the mask of a layer shows."""
        check_unpadded(recognised)
        self.recognised = recognised
        blocks = self.source.select(self, self.k)
        local = self.positions[..., None] // self.block - torch.arange(self.local, device=self.positions.device)
        return Selection(_join(local.clamp(min=0).to(blocks.dtype)[:, None], blocks), self.block)


def check_unpadded(recognised: Any) -> None:
    """Raise for padding and packed sequences: the model counts them in its blocks, but not in its positions."""
    masks = [recognised.token_mask, *([] if recognised.sequence is None else [recognised.sequence.token_mask])]
    packed = recognised.sequence is not None and recognised.sequence.documents.depends_on_length
    fits = not packed and all(mask is None for mask in masks)
    if not fits:
        expected = "one sequence a row without padding, in a model that selects blocks"
        given = "packed sequences" if packed else "padding"
        raise MaskError(f"{SUBJECT} attention_mask", expected, given, "pass sequences of one length")


def _join(local: Tensor, blocks: Tensor) -> Tensor:
    """Return the local blocks and then the best others, in all as many as `blocks` has, (batch, heads, queries, k)."""
    is_local = (blocks[..., None] == local[..., None, :]).any(-1)
    local = local.expand(*blocks.shape[:-1], -1)
    repeated = (local[..., None] == local[..., None, :]).tril(-1).any(-1)
    candidates = torch.cat((local.masked_fill(repeated, NO_INDEX), blocks.masked_fill(is_local, NO_INDEX)), -1)
    order = (candidates == NO_INDEX).to(torch.int8).sort(dim=-1, stable=True).indices[..., : blocks.shape[-1]]
    return candidates.gather(-1, order)


class BlockIndexer:
    """First base of a subclass of `MiniMaxM3VLIndexer`, whose keys are sharded."""

    @torch.compiler.disable  # type: ignore[untyped-decorator] # it waits for ranks
    def forward(
        self, hidden_states: Tensor, position_embeddings: Any, past_key_values: Any, position_ids: Tensor
    ) -> Any:
        """Return `BlockScores` on shards and over a cache of shards, and otherwise the selected blocks."""
        indexer: Any = self
        sequence = position_ids.sequence if isinstance(position_ids, ShardPositions) else None
        layer = None if past_key_values is None else past_key_values.layers[indexer.layer_idx]
        source: Any = ShardKeys(sequence) if layer is None and sequence is not None else layer
        if not hasattr(source, "select"):
            return super().forward(hidden_states, position_embeddings, past_key_values, position_ids)  # type: ignore[misc]
        with torch.no_grad():
            shape = (*hidden_states.shape[:2], -1, indexer.head_dim)
            q = indexer.q_norm(indexer.q_proj(hidden_states).view(shape)).transpose(1, 2)
            k = indexer.k_norm(indexer.k_proj(hidden_states).view(shape)).transpose(1, 2)
            rope = rope_of(indexer)
            q, k = rope(q, k, *(x[..., : indexer.head_dim] for x in position_embeddings))
        source.new_index_keys = k[:, 0]
        positions = position_ids.plain() if isinstance(position_ids, ShardPositions) else position_ids
        return BlockScores(indexer, q.transpose(1, 2), positions, source)


@torch.compiler.disable  # type: ignore[untyped-decorator] # it waits for ranks
def selected_blocks(module: Any, blocks: Any, recognised: Any) -> Selection:
    """Return the selection of a layer, from `BlockScores`, or on one device from the blocks that the model selected."""
    if isinstance(blocks, BlockScores):
        return blocks.selected(recognised)
    if recognised.sequence is not None:
        expected, given = "an indexer that keeps its keys in the cache", "one that scores the keys of a shard alone"
        raise KernelError(f"{SUBJECT} indexer", expected, given, "call hf.generate, or update attnmesh")
    check_unpadded(recognised)
    return Selection(blocks.masked_fill(blocks < 0, NO_INDEX).to(torch.int32), module.indexer.block_size)


def _size(config: Any, counts: Mapping[str, int], kv_heads: int) -> Selected:
    sizes = {"index_heads": config.index_n_heads, "index_dim": config.index_head_dim, "block": config.index_block_size}
    return Selected(config.index_topk_blocks, **sizes, heads=kv_heads, **counts)


BLOCK_INDEXER = SubclassedModule(
    BlockIndexer,
    arguments=("self", "hidden_states", "position_embeddings", "past_key_values", "position_ids"),
    reads=(
        *("q_proj", "k_proj", "q_norm", "k_norm", "head_dim", "block_size", "topk_blocks", "local_blocks"),
        *("apply_rotary_pos_emb", "update_index"),
    ),
)

FAMILIES = (
    Family(
        "minimax_m3_vl_text",
        f"{ATTENTION_FIELDS} head_dim intermediate_size num_experts num_experts_per_tok num_local_experts "
        "output_router_logits rope_parameters",
        sources={"MiniMaxM3VLIndexer.forward": "eba1b211b25c"},
        layers={**INDEXED, "minimax_m3_sparse": LayerKind(indexed=True)},
        subclassed={"MiniMaxM3VLIndexer": BLOCK_INDEXER},
        selection_argument="block_indices",
        read_selection=selected_blocks,
        planned_selection=_size,
    ),
)
