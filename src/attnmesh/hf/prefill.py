"""Prefill: compute a prompt over a mesh, each rank its share, and fill a cache."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import PreTrainedModel

from attnmesh.core.layout import Contiguous, Layout, Striped
from attnmesh.errors import KernelError, require
from attnmesh.guard.agreement import Agreement
from attnmesh.hf.cache.sharded_cache import ShardedCache
from attnmesh.hf.chunks import chunks_of, default_size, left_to_decode
from attnmesh.hf.families.family import USE_SUPPORTED
from attnmesh.hf.images.image_merge import Merged, merge_images
from attnmesh.hf.images.inputs import Pictures, shared_with_images, split_images, without_absent
from attnmesh.hf.images.spans import uncut
from attnmesh.hf.models import forget_images, is_recurrent, rope_growth, rope_regime, unwrap
from attnmesh.hf.options import agree_on_call
from attnmesh.hf.recurrent.prepare_recurrent import prepared
from attnmesh.hf.shards import ShardMask, ShardPositions, Shards
from attnmesh.hf.sparse.prepare_indexer import prepare_indexers
from attnmesh.hf.transformers_names import cache_argument
from attnmesh.mesh.axes import Mesh


def prefill(
    model: PreTrainedModel,
    input_ids: Tensor,
    cache: ShardedCache,
    *,
    attention_mask: Tensor | None = None,
    chunk_size: int | None = None,
    after: Callable[[int], None] | None = None,
    **images: Any,
) -> None:
    """Fill the cache with all tokens of the prompt but the last one, from which `generate` decodes.

    A model with recurrent layers leaves two.
    Each rank computes its share of the tokens. The prefix that the cache holds already is kept, the rest is cut.

    Args:
        model: A causal language model with `attn_implementation="attnmesh"`.
        input_ids: The prompts, (batch, length), the same on every rank.
        cache: The cache to fill.
        attention_mask: Padding of the prompts, on the left.
        chunk_size: Tokens per forward pass. None for all of them, or 8192 after cached tokens and with padding.
        after: Called after each chunk with the number of cached tokens.
        images: Images, as the model's processor returns them: `pixel_values` and what comes with it.

    Raises:
        InputError: The model or an argument is not supported, or ranks differ in an argument.

    >>> from transformers import AutoModelForCausalLM, LlamaConfig
    >>> sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    >>> config = LlamaConfig(vocab_size=97, eos_token_id=None, **sizes)
    >>> model = AutoModelForCausalLM.from_config(config, attn_implementation="attnmesh").eval()
    >>> cache = ShardedCache(model.config)
    >>> prefill(model, torch.tensor([[5, 6, 7]]), cache)
    >>> cache.get_seq_length()
    2
    """
    model = unwrap(model)
    place, options = Mesh.of(getattr(cache, "mesh", None)), {"chunk_size": chunk_size, **without_absent(images)}
    agree_on_call(place, model, input_ids, attention_mask, cache, options)
    images, _ = split_images(model, options)
    prompt = begin_prompt(place, model, input_ids, attention_mask, images)
    crop_to_shared_prefix(model, prompt, cache)
    prefill_rest(model, prompt, cache, chunk_size, after)


@dataclass(frozen=True)
class Prompt:
    """The prompts of a call."""

    ids: Tensor
    mask: Tensor | None = None
    """Zeros for padding; None without padding."""
    merged: Merged | None = None
    """The same with images merged; None without images."""

    @property
    def pictures(self) -> Pictures | None:
        """Places and digests of the images."""
        return None if self.merged is None else self.merged.pictures

    def mark(self, sequences: Tensor) -> Tensor:
        """Return token ids of the prompts and of new tokens, with -1 for padding, and with marks for image tokens.

        Each prompt may have several sequences.
        """
        marked = sequences.clone() if self.pictures is None else self.pictures.mark(sequences)
        if self.mask is None:
            return marked
        mask = self.mask.repeat_interleave(len(sequences) // len(self.mask), 0)
        return marked.masked_fill(pad(mask, (0, sequences.shape[1] - mask.shape[1]), value=1) == 0, -1)


def prepare_model(model: PreTrainedModel) -> None:
    """Prepare a model for a cache of shards, and for tokens that may follow other images than its last ones."""
    forget_images(model)
    prepare_indexers(model)


def begin_prompt(
    place: Mesh, model: PreTrainedModel, ids: Tensor, mask: Tensor | None, images: Mapping[str, Any]
) -> Prompt:
    """Begin to generate from prompts on a mesh. Return them with their images merged."""
    prepare_model(model)
    if not images:
        return Prompt(ids, mask)
    left = left_to_decode(model.config)
    with Agreement(place, "generate images"):
        merged = merge_images(model, ids, mask, images, left)
    return Prompt(ids, mask, merged)


def prefill_rest(
    model: PreTrainedModel,
    prompt: Prompt,
    cache: ShardedCache,
    chunk_size: int | None,
    after: Callable[[int], None] | None = None,
) -> None:
    """Compute the prompt after the cached tokens, chunk by chunk, in the cache's block-cyclic layout."""
    start, padded = cache.get_seq_length(), prompt.mask is not None and not bool(prompt.mask.all())
    if chunk_size is None and (start or padded or cache.shares > 1):
        chunk_size = default_size(cache.config)
    for stop in prefill_chunks(model, prompt, cache, lambda: chunk_size or prompt.ids.shape[1]):
        if after is not None:
            after(stop)


def prefill_chunks(
    model: PreTrainedModel,
    prompt: Prompt,
    cache: ShardedCache,
    size: Callable[[], int],
    stop_before: Callable[[], int] | None = None,
) -> Iterator[int]:
    """Compute the prompt after the cached tokens, and yield the number of cached tokens after each chunk.

    `size` is asked for the tokens of each chunk, and `stop_before` for a token before which it has to end, if more than
    one is left to that. All ranks compute the tokens before the first full round of blocks,
    and every token if the model takes no position_ids or the ranks share its weights. Models with recurrent layers,
    which need runs of tokens, compute in the contiguous layout.
    """
    ids, merged = prompt.ids, prompt.merged
    start, end = cache.get_seq_length(), max(ids.shape[1] - left_to_decode(cache.config), 0)
    token_mask = None if prompt.mask is None or bool(prompt.mask.all()) else prompt.mask.bool()
    positions = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
    if token_mask is not None:
        positions = (token_mask.long().cumsum(1) - 1).masked_fill(~token_mask, 0)
    decoder, spans, left = model, [], 0
    if merged is not None:
        decoder, spans = merged.decoder, merged.spans
        positions = positions if merged.positions is None else merged.positions
        left = max(ids.shape[1] - end, 0) if merged.reaches_end else 0
    last, recurrent = int(positions.max()), is_recurrent(cache.config)
    in_shards = recurrent or "position_ids" in signature(decoder.forward).parameters
    end += left
    cache.begin(end)
    cache.images = None if merged is None else merged.pictures.fingerprints
    cache.shift = (0, 0) if merged is None else merged.shift
    layout: Layout = Contiguous() if recurrent else Striped(cache.block)
    while True:
        last_stop = end if stop_before is None or stop_before() < start + 2 else min(end, stop_before())
        if not (chunks := uncut(chunks_of(cache, start, last_stop, size()), spans)):
            break
        first, stop, sharded = chunks[0]
        index = torch.arange(first, stop, device=ids.device)
        mask: Any = None if token_mask is None else token_mask[:, :stop].long()
        padding = None if token_mask is None else token_mask[:, first:stop]
        shards = Shards(cache.mesh, layout, stop - first, start=first, token_mask=padding, cached=True)
        sharded = sharded and in_shards
        if sharded:
            index = first + layout.positions(stop - first, cache.ranks, Mesh.of(cache.mesh).shard).to(ids.device)
            mask = ShardMask.of(torch.ones_like(ids[:, index]), shards=shards)
        local = ShardPositions.of(positions[..., index], shards=shards, last=last, whole=not sharded)
        cache.intact = False
        with torch.no_grad(), prepared(model) if recurrent else nullcontext():
            if merged is None:
                run_model(model, ids[:, index], local, cache, mask)
            else:
                mask = merged.mask(len(index), first, shards if sharded else None) if spans else mask
                merged.run(index, attention_mask=mask, position_ids=local, past_key_values=cache)
        kept = all(layer.get_seq_length() == stop for layer in cache.attention_layers)
        given = f"{type(model).__name__}, in which some layers cache no keys"
        require(kept, KernelError, "generate", "a model whose layers all cache their keys", given, USE_SUPPORTED)
        cache.count(stop)
        cache.tokens = prompt.mark(ids)[:, :stop]  # to continue from if a rank is lost
        cache.intact, start = True, stop
        yield stop
    if left:
        cache.crop(-left)  # tokens that earlier ones see are computed here, and again where decoding begins


def run_model(
    model: PreTrainedModel, ids: Tensor, positions: Tensor, cache: ShardedCache, mask: Tensor | None = None
) -> Tensor:
    """Run the model on new tokens, and return the logits of the last of each row. It computes as few as it can."""
    parameters = signature(model.forward).parameters
    name = cache_argument(parameters)
    if name == "cache_params" and mask is not None:  # Mamba takes the mask of the new tokens
        mask = mask[:, -ids.shape[1] :]
    optional = {"logits_to_keep": 1, "position_ids": positions}
    optional = {key: value for key, value in optional.items() if key in parameters}
    output = model(input_ids=ids, attention_mask=mask, use_cache=True, **{name: cache}, **optional)
    logits: Tensor = output.logits[:, -1]
    return logits


def crop_to_shared_prefix(model: PreTrainedModel, prompt: Prompt, cache: ShardedCache) -> int:
    """Crop the cache to the prefix that it shares with the prompt, without its last token. Return the prefix length."""
    cache.truncate_to_shortest()
    length, ids = cache.get_seq_length(), prompt.ids
    tokens = ids.shape[1] if prompt.mask is None else int(prompt.mask.sum(1).max())
    cached_rope, cache.rope = cache.rope, rope_regime(cache.config, tokens, rope_growth(model))
    if cache.rope and cached_rope != cache.rope and length:
        cache.crop(-length)  # the rope of this prompt differs from the rope of the cached keys
        return 0
    most = ids.shape[1] - left_to_decode(cache.config)
    shared = 0 if cache.tokens is None else min(length, most, cache.tokens.shape[1])
    if cache.tokens is not None and shared:
        same = (prompt.mark(ids)[:, :shared] == cache.tokens[:, :shared].to(ids.device)).all(0)
        shared = shared_with_images(cache.tokens, cache.images, prompt.pictures, int(same.long().cumprod(0).sum()))
    shared = cache.prefix(shared)  # layers that have forgotten what it needs compute it again
    cache.crop(shared - length)
    return shared
