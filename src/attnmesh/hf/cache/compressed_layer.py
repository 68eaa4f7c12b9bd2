"""A layer of a `ShardedCache` that attends to a window of tokens and, in the same softmax, to entries of older ones."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from attnmesh.cache.cache import KVCache
from attnmesh.core.candidates import unpack_candidates
from attnmesh.core.mask import Causal
from attnmesh.core.partial import Partial, merge_partials
from attnmesh.core.selection import Selection
from attnmesh.decoding.index_search import top_k_tokens
from attnmesh.errors import KernelError, MaskError
from attnmesh.hf.cache.layer import PendingKV, TailLayer
from attnmesh.hf.cache.layer_protocols import LayersCache
from attnmesh.hf.family import has_entries
from attnmesh.hf.models import SUBJECT, check_implementation
from attnmesh.hf.sharded_sequence import ShardedSequence
from attnmesh.hf.sparse.entries import UNPREPARED, IndexEntries
from attnmesh.kernels.indexer import IndexKeys, Score, indexer_top_k
from attnmesh.kernels.local import attend


@dataclass(frozen=True)
class JoinedKV(PendingKV):
    """Keys of new tokens, which are their values too. The model joins them with the entries it was given: none."""

    @property
    def tensors_to_append(self) -> tuple[Tensor, None]:
        """The keys alone."""
        return self.k, None

    @classmethod
    def __torch_function__(cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Return itself joined with no entries. Raise for other functions."""
        keys, *entries = args[0] if func is torch.cat else (None,)
        if not isinstance(keys, cls) or any(x.numel() for x in entries):
            cls.raise_read(func.__name__)
        return keys


class CompressedLayer(TailLayer):
    """Keys of a window of tokens, and entries in caches of their own. What the next entries need is on all ranks."""

    def __init__(self, cache: LayersCache, kind: str, entries: Mapping[str, str]) -> None:
        super().__init__(cache)
        self.other_formats, config = entries, cache.config
        self.entry_tokens, self.k = int(config.compress_rates[kind]), int(config.index_topk)
        self.new: dict[str, Tensor] = {}
        """Entries of this forward pass, (batch, entries, dim)."""
        self.sequence: ShardedSequence | None = None
        self.attends_locally = False
        """True if queries attend on their own rank, where the entries of all ranks are made."""
        self.query_positions: Tensor | None = None
        """Tokens whose queries attend on this rank; None unless a prepared compressor has run in this forward pass."""
        self.selected: Selection | None = None

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Any, Any]:
        """Return the new keys with their layer, for the attention function to store."""
        self.sharded_cache.history.check_order("ShardedCache")
        check_implementation("ShardedCache", self.sharded_cache.config)
        self.query_positions = self.selected = None
        pending = JoinedKV(key_states, value_states, self)
        return pending, pending

    def begin_entries(self, new_count: int, sequence: ShardedSequence | None) -> None:
        """Begin a forward pass of new tokens on this rank, before the model compresses them."""
        self.sequence = sequence
        self.attends_locally = sequence is not None and not sequence.has_prefix
        if sequence is not None and self.attends_locally:
            self.query_positions = sequence.positions()
        else:
            tokens = new_count if sequence is None else sequence.length
            self.query_positions = self.get_seq_length() + torch.arange(tokens, device="cpu")

    def store_compression_weights(self, name: str, kv: Tensor, gate: Tensor) -> tuple[Tensor, Tensor, int]:
        """Return the projections `kv` and `gate` of whole blocks, and their first token. Keep those of the rest."""
        projections = torch.cat((kv, gate), -1)
        projections = projections if self.sequence is None else self.sequence.gather_tokens(projections)
        projections = torch.cat((self.tensors[name], projections), 1) if name in self.tensors else projections
        blocks_stop = projections.shape[1] // self.entry_tokens * self.entry_tokens
        self.tensors[name] = projections[:, blocks_stop:].clone()
        first_token = self.other_kv_caches[name].length * self.entry_tokens if name in self.other_kv_caches else 0
        kv, gate = projections[:, :blocks_stop].chunk(2, -1)
        return kv, gate, first_token

    def update_overlap_state(self, name: str, kv: Tensor, gate: Tensor, dim: int) -> tuple[Tensor | None, ...]:
        """Return what these blocks need of the block before, None at first. Keep what the next block needs of the last.

        `dim` columns of a block overlap with the next one.
        """
        names = f"{name} kv", f"{name} gate"
        earlier = tuple(map(self.tensors.get, names))
        self.tensors |= {key: x[:, -1, :, :dim].clone() for key, x in zip(names, (kv, gate), strict=True)}
        return earlier

    @torch.no_grad()
    def update_compressor_states(self, name: str, compressed: Tensor) -> Any:
        """Store new entries, (batch, entries, dim). Return them for the model to score, or none for it to attend."""
        new = compressed[:, None]
        entries = self.reserve_other(name, new, new.shape[2])
        if new.shape[2]:
            entries.append(new)
        self.new = {**self.new, name: compressed}  # a fork shares the dict
        return IndexEntries(compressed, self) if name == "indexer" else compressed[:, :0]

    @torch.no_grad()
    def select(self, score: Score, operands: Sequence[Tensor]) -> None:
        """Select the best entries of each query. `operands` are of this rank's tokens."""
        index = self.other_kv_caches["indexer"]
        seen = self._seen().to(operands[0].device)
        k = min(self.k, index.length)
        last = seen - 1
        if not k:
            return
        if self.attends_locally:
            keys = self.new["indexer"]
            positions = torch.arange(index.length, device=last.device)
            bounds = torch.zeros_like(last)[None], last[None]
            candidates = indexer_top_k(score, operands, IndexKeys(keys, positions, positions[None]), *bounds, k)
            indices = unpack_candidates(candidates)[1]
        else:
            all_operands = operands if self.sequence is None else [self.sequence.gather_tokens(x) for x in operands]
            indices = top_k_tokens(index, score, all_operands, k, last=last)
        self.selected = Selection(indices[:, None])

    def _seen(self) -> Tensor:
        """Return how many entries each query sees: those of blocks that end with its token or before."""
        assert self.query_positions is not None
        return (self.query_positions + 1) // self.entry_tokens

    def attend_other_keys(self, q: Tensor, scale: float | None) -> Partial | None:
        """Return attention of the queries over the entries on this rank; None if there are no entries yet."""
        entries = self.other_kv_caches["compressor"]
        parts = [self._attend(q, *held, scale) for held in self._held(entries)] if entries.length else []
        self.new = {}
        return merge_partials(parts) if parts else None

    def _attend(self, q: Tensor, keys: Tensor, numbers: Tensor, scale: float | None) -> Partial:
        """Return attention of the queries over entries with these numbers."""
        keys = keys.to(q.dtype)
        if self.selected is not None:
            return attend(q, keys, keys, k_positions=numbers, scale=scale, selected=self.selected)
        seen = self._seen()
        positions = numbers + 1  # from 1 on: a query that sees n entries is at n
        kernel = self.sharded_cache.settings.kernel
        return attend(q, keys, keys, mask=Causal(), q_positions=seen, k_positions=positions, scale=scale, kernel=kernel)

    def _held(self, entries: KVCache) -> list[tuple[Tensor, Tensor]]:
        """Return the entries that this rank attends to, (batch, 1, entries, dim), and their numbers, in parts."""
        if self.attends_locally:
            new = self.new["compressor"]
            return [(new[:, None], torch.arange(new.shape[1], device="cpu"))]
        view = entries.own_shard.view
        pieces = [(piece, piece.count_used_slots()) for piece in (*view.earlier_pieces, view)]
        return [(piece.keys[:, :, :count], piece.token_index[:count].cpu()) for piece, count in pieces]


def check_entries(
    module: nn.Module, pending: PendingKV | None, sequence: ShardedSequence | None, token_mask: Tensor | None
) -> None:
    """Raise unless the entries of a layer that attends to compressed tokens are in a cache of shards.

    Without such a cache the model joins entries to its keys, and extends the mask only if it is a tensor. In training a
    shard's entries would be made of its own tokens alone.
    """
    if not has_entries(module):
        return
    layer: Any = None if pending is None else pending.layer
    if not isinstance(layer, CompressedLayer):
        expected = "a ShardedCache, which keeps the entries of compressed tokens"
        fix = 'call hf.generate; to train, call model.set_attn_implementation("eager"), on one device'
        raise KernelError(f"{SUBJECT} past_key_values", expected, "another cache, or none", fix)
    if layer.query_positions is None or layer.sequence is not sequence:
        raise KernelError(*UNPREPARED)
    if token_mask is not None:
        expected = "sequences without padding in a model that compresses tokens"
        raise MaskError(f"{SUBJECT} attention_mask", expected, "padding", "pass sequences of one length")
