"""Forward passes that fill a cache with a prompt: one chunk of tokens after another, each shared by the ranks."""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from inspect import signature
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import PreTrainedConfig, PreTrainedModel

from attnmesh.comm.host_linear import MAX_SHARED_ROWS
from attnmesh.core.layout import Contiguous, Layout, Split
from attnmesh.errors import KernelError
from attnmesh.hf.cache.sharded_cache import ShardedCache
from attnmesh.hf.family import USE_SUPPORTED, family_of
from attnmesh.hf.images.image_merge import MergedPrompt
from attnmesh.hf.images.inputs import NO_SHIFT, ImageTokens
from attnmesh.hf.images.spans import PromptChunk, join_chunks_at_spans
from attnmesh.hf.models import is_recurrent
from attnmesh.hf.recurrent.prepare_recurrent import prepared
from attnmesh.hf.shard_tensors import ShardMask, ShardPositions
from attnmesh.hf.sharded_sequence import ShardedSequence
from attnmesh.hf.transformers_names import cache_argument

CHUNK = 8192
"""Tokens per chunk after cached tokens or with padding, where every rank attends the queries of all ranks.

More tokens take more memory on each rank, fewer take more forward passes.
"""

LATENT_CHUNK = 1024
"""`CHUNK` in latent attention, whose queries are wider: they are absorbed to the width of a latent."""

REPRODUCIBLE_CHUNK = min(MAX_SHARED_ROWS.values())
"""Tokens of all sequences per chunk with `reproducible=True`: the most that shared layers take in every dtype."""


def left_to_decode(config: PreTrainedConfig) -> int:
    """Return the tokens of a prompt that are left to the first forward pass of decoding.

    Two in models whose recurrent layers have a rule for one token and another for several: transformers may bound time
    steps in one of these rules alone.
    """
    family = family_of(config)
    return 2 if family.recurrences and not family.begins_at_zero else 1


def chunks_of(cache: ShardedCache, start: int, stop: int, size: int) -> list[PromptChunk]:
    """Split the tokens from `start` to `stop` into chunks of about `size` tokens."""
    recurrent = is_recurrent(cache.config)
    steps_alone = family_of(cache.config).begins_at_zero
    if cache.reproducible or cache.head_ranks > 1:  # ranks compute the same tokens
        chunks = _split_whole(start, stop, 1 if recurrent and steps_alone else size)
        return [] if recurrent and not steps_alone and stop - start == 1 else chunks
    if recurrent:
        unit = cache.ranks if cache.shares is None else cache.round_tokens
        return _split_evenly(start, stop, unit, size, steps_alone)
    return _split_prompt(start, stop, cache.round_tokens, size)


def _split_whole(start: int, stop: int, size: int) -> list[PromptChunk]:
    """Return chunks that all ranks compute. With a size of 3 or more, only a prompt of one token gives a chunk of one.

    >>> [tuple(chunk) for chunk in _split_whole(0, 9, 4)]
    [(0, 4, False), (4, 7, False), (7, 9, False)]
    """
    edges = [*range(start, stop, size), stop]
    if size > 2 and len(edges) > 2 and stop - edges[-2] == 1:
        edges[-2] -= 1
    return [PromptChunk(first, last, False) for first, last in pairwise(edges)]


def _split_evenly(start: int, stop: int, unit: int, size: int, steps_alone: bool) -> list[PromptChunk]:
    """Return chunks of whole units, which ranks share, and then the rest, which all ranks compute.

    `unit` is the fewest tokens of which each rank's share is a whole number: one for each rank if shares are even.
    With `steps_alone` each token of the rest is a chunk. Without it the rest is one chunk of two tokens or more, and a
    single token is left out.

    >>> cases = _split_evenly(0, 11, 4, 8, False), _split_evenly(0, 9, 4, 8, False), _split_evenly(0, 10, 4, 8, True)
    >>> [[tuple(chunk) for chunk in chunks] for chunks in cases]
    [[(0, 8, True), (8, 11, False)], [(0, 4, True), (4, 9, False)], [(0, 8, True), (8, 9, False), (9, 10, False)]]
    """
    even = (stop - start) // unit * unit
    if not steps_alone and stop - start - even == 1:
        even = max(even - unit, 0)
    size, edge = max(size // unit, 1) * unit, start + even
    chunks = [PromptChunk(first, last, True) for first, last in pairwise([*range(start, edge, size), edge])]
    if steps_alone:
        return chunks + [PromptChunk(token, token + 1, False) for token in range(edge, stop)]
    return chunks + [PromptChunk(edge, stop, False)] * (stop - edge > 1)


def _split_prompt(start: int, stop: int, unit: int, size: int) -> list[PromptChunk]:
    """Return chunks. Those that ranks share begin at multiples of `unit`, the tokens of a round of blocks.

    >>> cases = _split_prompt(0, 100, 32, 64), _split_prompt(20, 100, 32, 100)
    >>> [[tuple(chunk) for chunk in chunks] for chunks in cases]
    [[(0, 64, True), (64, 100, True)], [(20, 32, False), (32, 100, True)]]
    """
    aligned, size = -(-start // unit) * unit, max(size // unit, 1) * unit
    if stop - aligned < unit:
        return [PromptChunk(start, stop, False)] if stop > start else []
    edges = [*range(aligned, stop - unit + 1, size), stop]
    head = [PromptChunk(start, aligned, False)] if aligned > start else []
    return head + [PromptChunk(first, last, True) for first, last in pairwise(edges)]


@dataclass(frozen=True)
class Prompt:
    """The prompts of a call."""

    ids: Tensor
    attention_mask: Tensor | None = None
    """Zeros for padding; None without padding."""
    merged: MergedPrompt | None = None
    """The prompts with images merged; None without images."""

    @property
    def image_tokens(self) -> ImageTokens | None:
        """Places and digests of the images."""
        return None if self.merged is None else self.merged.image_tokens

    @cached_property
    def token_mask(self) -> Tensor | None:
        """False for padding; None where no sequence has any. The device is read once."""
        return None if self.attention_mask is None or bool(self.attention_mask.all()) else self.attention_mask.bool()

    def mark(self, sequences: Tensor) -> Tensor:
        """Return token ids of the prompts and of new tokens, with -1 for padding, and with marks for image tokens.

        Each prompt may have several sequences.
        """
        marked = sequences.clone() if self.image_tokens is None else self.image_tokens.mark(sequences)
        if self.attention_mask is None:
            return marked
        mask = self.attention_mask.repeat_interleave(len(sequences) // len(self.attention_mask), 0)
        return marked.masked_fill(pad(mask, (0, sequences.shape[1] - mask.shape[1]), value=1) == 0, -1)


def prefill_chunks(
    model: PreTrainedModel,
    prompt: Prompt,
    cache: ShardedCache,
    size: Callable[[], int],
    stop_before: Callable[[], int] | None = None,
) -> Iterator[int]:
    """Compute the prompt after the cached tokens, and yield the number of cached tokens after each chunk.

    `size` returns the tokens of each chunk. A chunk ends at the token that `stop_before` returns, if two tokens or more
    are left before it.

        tokens                                                      computed by
        before the first full round of blocks                       all ranks
        if the model takes no position_ids, the cache is            all ranks
          reproducible, or ranks share heads
        others, of a model with recurrent layers                    each rank a run: `Contiguous`, or `Split` by shares
        others                                                      each rank its blocks
    """
    prefill = ChunkedPrefill(model, prompt, cache)
    while (chunk := prefill.next_chunk(size(), None if stop_before is None else stop_before())) is not None:
        prefill.run(chunk)
        yield chunk.stop
    prefill.finish()


class ChunkedPrefill:
    """The forward passes that fill a cache with a prompt."""

    def __init__(self, model: PreTrainedModel, prompt: Prompt, cache: ShardedCache) -> None:
        self.model, self.prompt, self.cache = model, prompt, cache
        ids, merged = prompt.ids, prompt.merged
        self.start = cache.get_seq_length()
        end = max(ids.shape[1] - left_to_decode(cache.config), self.start)  # a checkpoint may have one token more
        self.recomputed_tokens = ids.shape[1] - end if merged is not None and merged.reaches_end else 0
        """Number of last tokens that earlier tokens see: they are computed here, and again where decoding begins."""
        self.end = end + self.recomputed_tokens
        self.token_mask = prompt.token_mask
        self.positions = self._positions()
        self.last_position = int(self.positions.max())
        self.recurrent = is_recurrent(cache.config)
        decoder = model if merged is None else merged.decoder
        self.in_shards = self.recurrent or "position_ids" in signature(decoder.forward).parameters
        cache.choose_block(self.end)
        cache.history.image_fingerprints = None if merged is None else merged.image_tokens.fingerprints
        cache.history.shift = NO_SHIFT if merged is None else merged.shift

    def _positions(self) -> Tensor:
        """Return the position of each token, as the model counts them."""
        ids, merged = self.prompt.ids, self.prompt.merged
        if merged is not None and merged.positions is not None:
            return merged.positions
        if self.token_mask is not None:
            return (self.token_mask.long().cumsum(1) - 1).masked_fill(~self.token_mask, 0)
        return torch.arange(ids.shape[1], device=ids.device).expand_as(ids)

    def next_chunk(self, size: int, stop_before: int | None) -> PromptChunk | None:
        """Return the next chunk, of at most `size` tokens; None after the last.

        The chunk ends at `stop_before`, if two tokens or more are left before it.
        """
        stop = self.end if stop_before is None or stop_before < self.start + 2 else min(self.end, stop_before)
        spans = [] if self.prompt.merged is None else self.prompt.merged.spans
        if self.cache.reproducible:  # models with recurrent layers compute one token by another rule than several
            size = min(size, max(REPRODUCIBLE_CHUNK // len(self.prompt.ids), 3 if self.recurrent else 1))
        chunks = join_chunks_at_spans(chunks_of(self.cache, self.start, stop, size), spans)
        return chunks[0] if chunks else None

    def run(self, chunk: PromptChunk) -> None:
        """Run the model on a chunk, and record its tokens in the cache."""
        first, stop, is_sharded = chunk
        padding = None if self.token_mask is None else self.token_mask[:, first:stop]
        layout = self._layout(stop - first)
        sequence = ShardedSequence(self.cache.mesh, layout, stop - first, start=first, token_mask=padding, cached=True)
        self.cache.history.is_consistent = False
        with torch.no_grad(), prepared(self.model) if self.recurrent else nullcontext():
            self._call(sequence, is_sharded=is_sharded and self.in_shards)
        self._record(stop)

    def _layout(self, tokens: int) -> Layout:
        """Return the layout of a chunk, in which each rank computes its share. Recurrent layers need runs of tokens."""
        if not self.recurrent:
            return self.cache.layout
        turns = self.cache.layout.turns(self.cache.ranks)
        is_split = self.cache.shares is not None and tokens % turns[0].period == 0  # or all ranks compute all
        return Split(tuple(turn.count(tokens) for turn in turns)) if is_split else Contiguous()

    def _call(self, sequence: ShardedSequence, *, is_sharded: bool) -> None:
        """Call the model, or its text model, with the tokens of this rank."""
        ids = self.prompt.ids
        merged = self.prompt.merged
        stop = sequence.start + sequence.length
        index = sequence.positions() if is_sharded else torch.arange(sequence.start, stop, device="cpu")
        index = index.to(ids.device)
        mask: Any = None if self.token_mask is None else self.token_mask[:, :stop].long()
        if is_sharded:
            mask = ShardMask.of(torch.ones_like(ids[:, index]), sequence=sequence)
        sequence_options: dict[str, Any] = {"last": self.last_position, "whole": not is_sharded}
        position_ids = ShardPositions.of(self.positions[..., index], sequence=sequence, **sequence_options)
        if merged is None:
            run_model(self.model, ids[:, index], position_ids, self.cache, mask)
            return
        mask = merged.mask(len(index), sequence.start, sequence if is_sharded else None) if merged.spans else mask
        merged.run(index, attention_mask=mask, position_ids=position_ids, past_key_values=self.cache)

    def _record(self, stop: int) -> None:
        """Record that the cache holds the tokens before `stop`. Raise if a layer does not hold them."""
        is_complete = all(layer.get_seq_length() == stop for layer in self.cache.attention_layers)
        if not is_complete:
            given = f"{type(self.model).__name__}, in which some layers cache no keys"
            raise KernelError("generate", "a model whose layers all cache their keys", given, USE_SUPPORTED)
        self.cache.set_length(stop)
        self.cache.tokens = self.prompt.mark(self.prompt.ids)[:, :stop]  # to continue from if a rank is lost
        self.cache.history.is_consistent, self.start = True, stop

    def finish(self) -> None:
        """Drop the tokens that decoding computes again."""
        if self.recomputed_tokens:
            self.cache.crop(-self.recomputed_tokens)


def run_model(
    model: PreTrainedModel,
    ids: Tensor,
    positions: Tensor,
    cache: ShardedCache,
    mask: Tensor | None = None,
    *,
    logits_to_keep: int = 1,
) -> Tensor:
    """Run the model on new tokens, and return the logits of the last `logits_to_keep` tokens of each row.

    A model that takes `logits_to_keep` computes no others.
    """
    parameters = signature(model.forward).parameters
    name = cache_argument(parameters)
    if name == "cache_params" and mask is not None:  # beside this argument the mask is of new tokens
        mask = mask[:, -ids.shape[1] :]
    optional = {"logits_to_keep": logits_to_keep, "position_ids": positions}
    optional = {key: value for key, value in optional.items() if key in parameters}
    output = model(input_ids=ids, attention_mask=mask, use_cache=True, **{name: cache}, **optional)
    logits: Tensor = output.logits[:, -logits_to_keep:].flatten(0, 1)
    return logits
