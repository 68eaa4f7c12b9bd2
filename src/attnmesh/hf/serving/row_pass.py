"""One forward pass of the next tokens of several requests, each with a cache of its own."""

from collections import defaultdict
from collections.abc import Sequence
from inspect import signature
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from attnmesh.errors import ArgumentError, KernelError, MaskError, MeshError, ShapeError
from attnmesh.hf.cache.interruption import can_continue, length_before_step, take_back_step
from attnmesh.hf.cache.sharded_cache import ShardedCache
from attnmesh.hf.chunked_prefill import run_model
from attnmesh.hf.family import family_of
from attnmesh.hf.models import (
    attends,
    check_can_decode_rows,
    indexed_layer_indices,
    is_compressed,
    rope_regime,
    unwrap,
    vocabulary_size,
)
from attnmesh.hf.options import agreement_with_peers
from attnmesh.hf.prefill import prepare_model
from attnmesh.hf.serving.rows_cache import RowsCache
from attnmesh.mesh.axes import RankMesh

SUBJECT = "hf.decode_rows"

NextIds = int | Sequence[int]
"""The next token of a request, or its next tokens."""


@torch.no_grad()
def decode_rows(model: PreTrainedModel, tokens: Sequence[NextIds], caches: Sequence[ShardedCache]) -> Tensor:
    """Return the logits after one more token of each request, (requests, vocabulary), by one forward pass.

    Row r is what the model computes from `tokens[r]` and `caches[r]` alone. Every rank makes the same call. Models that
    take no position_ids, count tokens of the cache themselves, select keys or compress them run a row at a time.
    A call that raised may leave tokens in caches, which the next call removes. It refuses caches with recurrent states
    that the tokens have changed, and caches whose window has forgotten tokens for them.

    Args:
        model: A causal language model with `attn_implementation="attnmesh"`.
        tokens: The next token of each request, which is added to its cache; or a list of its next tokens, such as
            guesses to check. The logits are then those after each of all tokens, request by request.
        caches: The cache of each request, on one mesh, with the tokens before, as `prefill` or `generate` leaves it.

    Returns:
        The logits, equal on all ranks.

    Raises:
        InputError: An argument is not supported, or ranks differ in one.

    >>> from transformers import AutoModelForCausalLM, LlamaConfig
    >>> from attnmesh.hf.prefill import prefill
    >>> sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    >>> config = LlamaConfig(vocab_size=97, eos_token_id=None, **sizes)
    >>> model = AutoModelForCausalLM.from_config(config, attn_implementation="attnmesh").eval()
    >>> caches = [ShardedCache(model.config) for _ in range(2)]
    >>> for prompt, cache in zip(([5, 6, 7], [8, 9]), caches, strict=True):
    ...     prefill(model, torch.tensor([prompt]), cache)
    >>> decode_rows(model, [7, 9], caches).shape
    torch.Size([2, 97])
    """
    model = unwrap(model)
    _agree(model, tokens, caches)
    for cache in caches:
        take_back_step(cache)
    prepare_model(model)
    rows = [_ids_of(row) for row in tokens]
    groups = defaultdict(list)
    for row, cache in enumerate(caches):  # a forward pass has one rope, and an empty cache needs one of its own
        length = cache.get_seq_length()
        new_count = len(rows[row])
        together = length and _runs_rows(model) and (new_count == 1 or not cache.irreversible_layers)
        pass_number = -1 if together else row  # a row that is not run with others has a pass of its own
        groups[pass_number, rope_regime(cache.config, length + new_count)].append(row)
    for cache in caches:  # by this the next call finds the tokens of a call that has raised
        cache.history.rollback_length = cache.get_seq_length()
    logits = dict[int, Tensor]()
    for members in groups.values():
        own = [rows[row] for row in members]
        own_logits = _run_pass(model, own, [caches[row] for row in members])
        logits.update(zip(members, own_logits.split([*map(len, own)]), strict=True))
    for cache in caches:  # after all groups: if one fails, no row keeps its tokens
        cache.history.rollback_length = None
    return torch.cat([logits[row] for row in sorted(logits)])


def _ids_of(row: NextIds) -> list[int]:
    return [row] if isinstance(row, int) else [*row]


def _run_pass(model: PreTrainedModel, next_ids: Sequence[Sequence[int]], caches: Sequence[ShardedCache]) -> Tensor:
    """Run the model over the new tokens of each cache. Return the logits after each, (tokens, vocabulary)."""
    counts = [*map(len, next_ids)]
    lengths = [cache.get_seq_length() for cache in caches]
    rows = RowsCache(caches, counts) if len(caches) > 1 else None
    new_positions = [
        range(cache.next_position, cache.next_position + count) for cache, count in zip(caches, counts, strict=True)
    ]
    batch, last = ((-1, 1), 1) if max(counts) == 1 else ((1, -1), sum(counts))  # as `RowTokens` cuts it
    ids, positions = (torch.tensor([*chain(*x)], device=model.device).view(batch) for x in (next_ids, new_positions))
    for cache in caches:
        cache.history.is_consistent = False
    logits = run_model(model, ids, positions, rows or caches[0], logits_to_keep=last)
    if rows is not None:
        rows.finish()
    for own, cache, length in zip(ids.flatten().split(counts), caches, lengths, strict=True):
        note_tokens(cache, own[None], length)
    return logits


def note_tokens(cache: ShardedCache, ids: Tensor, length: int) -> None:
    """Record tokens that the model has added to a cache of `length` tokens."""
    cache.history.is_consistent = True
    cache.set_length(length + ids.shape[1])
    if cache.tokens is not None and cache.tokens.shape[1] == length:
        cache.tokens = torch.cat((cache.tokens, ids.to(cache.tokens.device)), 1)
    elif not length:
        cache.tokens = ids


def _runs_rows(model: PreTrainedModel) -> bool:
    """Return whether one forward pass may have rows of several lengths: the model takes positions from its caller."""
    config = model.config.get_text_config(decoder=True)
    if family_of(config).counts_tokens(config) or indexed_layer_indices(config) or is_compressed(config):
        return False
    return "position_ids" in signature(model.forward).parameters or not attends(config)


def _agree(model: PreTrainedModel, next_ids: Sequence[NextIds], caches: Sequence[ShardedCache]) -> None:
    """Raise the same error on all ranks unless all make the same valid call."""

    def fields() -> dict[str, object]:
        return {"tokens": [*map(_ids_of, next_ids)], "lengths": [length_before_step(cache) for cache in caches]}

    first = caches[0] if isinstance(caches, Sequence) and len(caches) else None
    mesh = RankMesh.of(first.mesh if isinstance(first, ShardedCache) else None)
    with agreement_with_peers(mesh, model, SUBJECT, fields):
        _check_rows(model, next_ids, caches)


def _check_rows(model: PreTrainedModel, next_ids: Any, caches: Any) -> None:
    """Raise unless each request has a token and a cache of its own, and one forward pass serves them."""
    check_can_decode_rows(SUBJECT, model)
    if not (isinstance(caches, Sequence) and len(caches) > 0):
        given = "none" if isinstance(caches, Sequence) else type(caches).__name__
        raise KernelError(f"{SUBJECT} caches", "caches", given, "pass a list of hf.ShardedCache")
    _check_tokens(model, next_ids, len(caches))
    if len({id(cache) for cache in caches}) < len(caches):
        raise ArgumentError(f"{SUBJECT} caches", "each cache once", "one cache twice", "pass cache.fork()")
    counts = [len(_ids_of(row)) for row in next_ids]
    for cache, count in zip(caches, counts, strict=True):
        _check_cache(cache, caches[0], count)
    config = model.config.get_text_config(decoder=True)
    longest = None if rope_regime(config, 0) else getattr(config, "max_position_embeddings", None)
    length = max(length_before_step(cache) + count for cache, count in zip(caches, counts, strict=True))
    if longest is not None and length > longest:
        expected = f"at most {longest} tokens, the model's context"
        fix = "end the request, or use a model with a longer context"
        raise ShapeError(SUBJECT, expected, f"{length}", fix)


def _check_tokens(model: PreTrainedModel, next_ids: Any, rows: int) -> None:
    """Raise unless `next_ids` has `rows` rows, each of tokens that the model knows."""
    fits = isinstance(next_ids, Sequence) and all(
        type(row) is int or (isinstance(row, list) and row) for row in next_ids
    )
    fits = fits and len(next_ids) == rows
    new_ids = [*chain(*map(_ids_of, next_ids))] if fits else []
    if not fits or not all(type(token) is int for token in new_ids):
        fix = "pass the next token of each request, or a list of its next tokens"
        raise ShapeError(f"{SUBJECT} tokens", f"a list of {rows} ints", f"{next_ids}", fix)
    vocab_size = vocabulary_size(model)
    wrong = [token for token in new_ids if not 0 <= token < vocab_size]
    if wrong:
        expected = f"tokens from 0 to {vocab_size - 1}"
        raise ArgumentError(f"{SUBJECT} tokens", expected, f"{wrong}", "use the tokenizer of this model")


def _check_cache(cache: Any, first: Any, new_count: int) -> None:
    """Raise unless a cache holds one request, can take `new_count` tokens, and fits the first cache.

    Both have one mesh, one model and the same options.
    """
    subject = f"{SUBJECT} caches"
    if not isinstance(cache, ShardedCache) or isinstance(cache, RowsCache):
        fix = "pass attnmesh.hf.ShardedCache(model.config, mesh)"
        raise KernelError(subject, "ShardedCaches", type(cache).__name__, fix)
    if cache.batch_size not in (-1, 1):
        fix = "make a cache for each request"
        raise ShapeError(subject, "caches of one sequence", f"one of {cache.batch_size}", fix)
    if RankMesh.of(cache.mesh) != RankMesh.of(first.mesh):
        raise MeshError(subject, "caches on one mesh", "caches on several", "make all caches on one mesh")
    differing = first.settings.difference_of_rows(cache.settings)
    same_layers = [type(layer) for layer in cache.layers] == [type(layer) for layer in first.layers]
    if differing is not None or not same_layers:
        given = f"another {differing}" if differing is not None else f"one of {len(cache.layers)} layers"
        fix = "make all caches with the same config and options"
        raise KernelError(subject, "caches of one model with the same options", given, fix)
    if any(kv_cache.padding is not None for kv_cache in cache.kv_caches):
        raise MaskError(subject, "caches without padding", "padding", "prefill the prompt without its padding")
    if not can_continue(cache):
        expected = "a cache that no error interrupted"
        raise KernelError(subject, expected, "an interrupted one", "prefill the prompt again")
    length = length_before_step(cache)
    shift = cache.history.shift
    knows_images = shift is not None and shift.text_start <= length
    if length and not knows_images:
        fix = "prefill the prompt again, with its images"
        raise ShapeError(subject, "caches whose images are whole and known", "another", fix)
    if length and cache.history.rope_regime not in (None, rope_regime(cache.config, length + new_count)):
        given = f"{length + new_count} tokens, where it changes"
        fix = "call hf.generate with the tokens so far as the prompt"
        raise ShapeError(subject, "a rope that stays the same", given, fix)
