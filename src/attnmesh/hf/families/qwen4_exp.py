"""Qwen4-exp, whose indexer scores means of whole blocks of keys, and always selects the last keys.

Blocks begin at a sequence's first token. The model scores each query in a loop over all keys. A subclass keeps, for
each token, the mean of the block that would end with it. Scores of tokens that end no block are -inf.
"""

from collections.abc import Mapping, Sequence
from math import sqrt
from typing import Any

import torch
from torch import Tensor

from attnmesh.core.selection import NO_INDEX, Selection
from attnmesh.hf.families.delta_rules import GATED_DELTA, GATED_DELTA_SOURCES
from attnmesh.hf.family import (
    ATTENTION_FIELDS,
    EXPERT_FIELDS,
    RECURRENT,
    RECURRENT_STATES,
    Family,
    LayerKind,
    SubclassedModule,
)
from attnmesh.hf.sparse.select import ShardKeys
from attnmesh.hf.traced_mask import LayerMask
from attnmesh.hf.transformers_names import rope_of
from attnmesh.planner.selected import Selected


class PooledScores:
    """Scores of the means of blocks, before they are computed."""

    block, whole = 1, True

    def __init__(self, q: Tensor, recognised: Any) -> None:
        self.operands = (q,)
        self.recognised = recognised

    def run(self, keys: Tensor, operands: Sequence[Tensor]) -> Tensor:
        """Return the scores of some means for some queries, (batch, queries, keys)."""
        q, means, bias = operands[0], keys[:, None, :, :-1], keys[:, None, :, -1]
        scores = (q.transpose(1, 2).float() @ means.float().mT).relu().sum(1)
        return scores / sqrt(q.shape[-1]) + bias


class PooledIndexer:
    """First base of a subclass of `Qwen4ExpTextQSAIndexer`, whose keys are sharded."""

    @torch.compiler.disable  # type: ignore[untyped-decorator] # it waits for ranks
    @torch.no_grad()
    def forward(
        self, hidden_states: Tensor, position_embeddings: Any, attention_mask: Any, past_key_values: Any
    ) -> Any:
        """Return the tokens that each query selects."""
        indexer: Any = self
        is_ours = isinstance(attention_mask, LayerMask)  # or another attention is set
        ratio = indexer.compress_ratio
        recognised: Any = attention_mask.recognised() if is_ours else None
        layer = None if past_key_values is None else past_key_values.layers[indexer.layer_idx]
        source: Any = (
            ShardKeys(recognised.sequence) if is_ours and layer is None and recognised.sequence is not None else layer
        )
        if not (is_ours and hasattr(source, "join_earlier")):
            args = hidden_states, position_embeddings, attention_mask, past_key_values
            return super().forward(*args)  # type: ignore[misc]
        attention_mask.allow_selection()
        cos, sin = position_embeddings
        heads = (indexer.index_n_heads, indexer.index_kv_heads)
        q, keys = indexer.index_qk_proj(hidden_states).unflatten(-1, (sum(heads), -1)).split(heads, 2)
        rope = rope_of(indexer)
        q = rope(indexer.q_layernorm(q), cos=cos, sin=sin, unsqueeze_dim=2)
        rows = torch.cat((keys.squeeze(2), cos, sin), -1)
        rows = rows if recognised.sequence is None else recognised.sequence.gather_tokens(rows)
        positions = _positions(source.lengths, rows, recognised)
        keys, cos, sin = source.join_earlier(rows, ratio - 1).split((keys.shape[-1], *[cos.shape[-1]] * 2), -1)
        means = keys.unfold(1, ratio, 1).float().mean(-1).to(keys.dtype)
        first = slice(0, means.shape[1])  # a mean stands where its block begins
        means = rope(indexer.k_layernorm(means)[:, :, None], cos=cos[:, first], sin=sin[:, first], unsqueeze_dim=2)
        ends = (positions >= 0) & ((positions + 1) % ratio == 0)
        bias = torch.zeros_like(means[..., 0]).masked_fill(~ends[..., None], -torch.inf)
        source.new_index_keys = torch.cat((means[:, :, 0], bias), -1)
        blocks = source.select(PooledScores(q, recognised), indexer.block_topk)
        if recognised.sequence is None:
            indices = source.get_seq_length() + torch.arange(rows.shape[1], device="cpu")
            own_positions = positions
        else:
            indices = recognised.sequence.positions()
            own_positions = positions[:, indices - recognised.sequence.start]
        return Selection(_indices(blocks, indices.to(blocks), own_positions, ratio)[:, None])


def _positions(lengths: Tensor | int, rows: Tensor, recognised: Any) -> Tensor:
    """Return the position of each new token in its sequence or document, (batch, tokens), -1 for padding."""
    mask = recognised.token_mask if recognised.sequence is None else recognised.sequence.token_mask
    is_real = (
        rows.new_ones(rows.shape[:2], dtype=torch.bool) if mask is None else mask[:, -rows.shape[1] :].to(rows.device)
    )
    earlier = lengths[:, None].to(rows.device) if isinstance(lengths, Tensor) else lengths
    positions = (earlier + is_real.cumsum(1) - 1).masked_fill(~is_real, -1)
    if recognised.sequence is None or not recognised.sequence.documents.depends_on_length:
        return positions
    first, _ = recognised.sequence.documents.bounds(torch.arange(positions.shape[1], device="cpu"))
    in_document: Tensor = positions - first.to(positions.device)
    return in_document


def _indices(ends: Tensor, queries: Tensor, positions: Tensor, ratio: int) -> Tensor:
    """Return the indices of the tokens of the blocks that end with `ends`, and of each query's incomplete block."""
    offsets = torch.arange(ratio, dtype=ends.dtype, device=ends.device)
    blocks = (ends[..., None] - offsets).masked_fill((ends == NO_INDEX)[..., None], NO_INDEX).flatten(-2)
    tail = (queries[:, None] - offsets[:-1]).expand(*positions.shape, -1)
    tail = tail.masked_fill(offsets[:-1] >= (positions[..., None] + 1) % ratio, NO_INDEX)
    return torch.cat((blocks, tail), -1)


def _size(config: Any, counts: Mapping[str, int], _: int) -> Selected:
    ratio = config.indexer_compress_ratio
    width = config.indexer_head_dim + 1  # a column more: whether the block is whole
    k, heads = config.indexer_budget // ratio, config.indexer_n_heads
    return Selected(k, index_heads=heads, index_dim=width, block=ratio, **counts)


POOLED_INDEXER = SubclassedModule(
    PooledIndexer,
    arguments=("self", "hidden_states", "position_embeddings", "attention_mask", "past_key_values"),
    reads=(
        *("index_qk_proj", "index_n_heads", "index_kv_heads", "q_layernorm", "k_layernorm", "compress_ratio"),
        *("block_topk", "token_budget", "apply_rotary_pos_emb", "update_indexer"),
    ),
)

FAMILIES = (
    Family(
        "qwen4_exp_text",
        f"{ATTENTION_FIELDS} {EXPERT_FIELDS} head_dim number_of_conv_states ple_layer_ids rope_parameters",
        sources={
            "Qwen4ExpTextGatedDeltaNet.forward": "3bb52a268f55",
            **GATED_DELTA_SOURCES,
            "Qwen4ExpTextQSAIndexer.forward": "40e885d5332b",
        },
        uses=(RECURRENT_STATES,),
        layers={**RECURRENT, "indexed_attention": LayerKind(indexed=True, pooled=True)},
        recurrences={"Qwen4ExpTextGatedDeltaNet": GATED_DELTA},
        subclassed={"Qwen4ExpTextQSAIndexer": POOLED_INDEXER},
        planned_selection=_size,
    ),
)
