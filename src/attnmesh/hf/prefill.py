"""Prefill: compute a prompt over a mesh, each rank its share, and fill a cache."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from attnmesh.guard.agreement import Agreement
from attnmesh.hf.cache.sharded_cache import ShardedCache
from attnmesh.hf.chunked_prefill import CHUNK, LATENT_CHUNK, Prompt, left_to_decode, prefill_chunks
from attnmesh.hf.generation_checkpoint import identify_model
from attnmesh.hf.images.image_merge import merge_images
from attnmesh.hf.images.inputs import shared_with_images, split_images, without_absent
from attnmesh.hf.latent_states import latent_widths
from attnmesh.hf.models import forget_images, rope_growth, rope_regime, unwrap
from attnmesh.hf.options import agree_on_call
from attnmesh.hf.shared_weights import end_step
from attnmesh.hf.sparse.prepare_indexer import prepare_indexers
from attnmesh.mesh.axes import RankMesh


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

    In a model with recurrent layers the last two tokens are left. Each rank computes its share of the tokens. The
    prefix that the cache holds already is kept, the rest is cut.

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

    >>> import torch
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
    mesh = RankMesh.of(getattr(cache, "mesh", None))
    options = {"chunk_size": chunk_size, **without_absent(images)}
    agree_on_call(mesh, model, input_ids, attention_mask, cache, options)
    images, _ = split_images(model, options)
    prompt = begin_prompt(mesh, model, input_ids, attention_mask, images)
    crop_to_shared_prefix(model, prompt, cache)
    prefill_rest(model, prompt, cache, chunk_size, after)


def prepare_model(model: PreTrainedModel) -> None:
    """Prepare a model for a cache of shards, and for tokens that may follow other images than its last ones."""
    end_step(model)
    forget_images(model)
    prepare_indexers(model)


def begin_prompt(
    mesh: RankMesh, model: PreTrainedModel, ids: Tensor, attention_mask: Tensor | None, images: Mapping[str, Any]
) -> Prompt:
    """Begin to generate from prompts on a mesh. Return them with their images merged."""
    prepare_model(model)
    if not images:
        return Prompt(ids, attention_mask)
    left = left_to_decode(model.config)
    with Agreement(mesh, "generate images"):
        merged = merge_images(model, ids, attention_mask, images, left)
    return Prompt(ids, attention_mask, merged)


def prefill_rest(
    model: PreTrainedModel,
    prompt: Prompt,
    cache: ShardedCache,
    chunk_size: int | None,
    after: Callable[[int], None] | None = None,
) -> None:
    """Compute the prompt after the cached tokens, chunk by chunk, in the cache's block-cyclic layout."""
    start = cache.get_seq_length()
    padded = prompt.token_mask is not None
    if chunk_size is None and (start or padded or cache.head_ranks > 1):
        chunk_size = CHUNK if latent_widths(cache.config) is None else LATENT_CHUNK
    for stop in prefill_chunks(model, prompt, cache, lambda: chunk_size or prompt.ids.shape[1]):
        if after is not None:
            after(stop)


def crop_to_shared_prefix(model: PreTrainedModel, prompt: Prompt, cache: ShardedCache) -> int:
    """Crop the cache to the prefix that it shares with the prompt, without its last token. Return the prefix length."""
    if cache.folder is not None:
        cache.folder.identify(lambda: identify_model(model))
    length = cache.get_seq_length()
    ids, cached_ids = prompt.ids, cache.tokens
    tokens = ids.shape[1] if prompt.attention_mask is None else int(prompt.attention_mask.sum(1).max())
    regime = rope_regime(cache.config, tokens, rope_growth(model))
    longest = ids.shape[1] - left_to_decode(cache.config)
    has_one_rope = not regime or cache.history.rope_regime == regime  # keys of others are useless
    shared = 0 if cached_ids is None or not has_one_rope else min(length, longest, cached_ids.shape[1])
    if cached_ids is not None and shared:
        is_same = (prompt.mark(ids)[:, :shared] == cached_ids[:, :shared].to(ids.device)).all(0)
        same_tokens = int(is_same.long().cumprod(0).sum())
        shared = shared_with_images(cached_ids, cache.history.image_fingerprints, prompt.image_tokens, same_tokens)
    shared = cache.restorable_length(shared)  # 0 if a layer has forgotten what it needs
    cache.crop(shared - length)
    cache.history.rope_regime = regime
    return shared
