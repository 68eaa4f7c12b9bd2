"""Mask function registered with transformers: what it returns every layer gets as its `attention_mask`.

transformers describes a mask by a function of indices and a 2D table of padding. `mask_function` recognises causal
masks, causal sliding windows, chunks and spans of images from the function's values, and raises on any other mask.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial as partial_of
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import PreTrainedConfig

from attnmesh.core.mask import FAR, Causal, Chunks, Full, Mask, Spans, Window
from attnmesh.core.selection import Selection
from attnmesh.errors import MaskError, ShapeError
from attnmesh.hf.cache.layer_protocols import StepCache
from attnmesh.hf.images.spans import check_spans_unpadded, spans_of, unsupported_span
from attnmesh.hf.images.towers import in_tower
from attnmesh.hf.models import SUBJECT, check_layers, window_of
from attnmesh.hf.shard_tensors import ShardMask, WholeMask
from attnmesh.hf.sharded_sequence import BEGUN, FORWARD_ALL, OF_SHARD_BATCH, ShardedSequence
from attnmesh.hf.traced_mask import LayerMask, TracedMask, in_trace, needs_tensor
from attnmesh.hf.transformers_names import bidirectional_mask_function, causal_mask_function, sdpa_mask


@dataclass(frozen=True)
class RecognisedMask(LayerMask):
    """Mask as positions, and padding."""

    mask: Mask
    q_length: int
    q_offset: int
    """Position of the first query."""
    kv_offset: int
    """Position of the first key."""
    token_mask: Tensor | None = None
    """(batch, keys), False for padding; None without padding. The mask may be shorter than a static cache."""
    sequence: ShardedSequence | None = None
    """Tokens of this rank; None if every rank has all tokens."""
    covered: int | None = None
    """Keys that the given `attention_mask` covers; None if it covers all."""
    left_padding: Tensor | None = None
    """Tokens of padding before each sequence, (batch,); None if no mask was given."""
    selected: Selection | None = None
    """Keys that each query selects among the keys that it sees; None for all."""
    row_masks: tuple[Mask, ...] = ()
    """Mask of each sequence, if their images are in different places; `mask` is that of the first."""

    def __getitem__(self, key: Any) -> Any:
        """Return the mask of the last queries, `mask[:, :, -n:, :]`, for models of few logits; or `mask[:, 0]`."""
        full_slice = slice(None)
        rows = key[2] if isinstance(key, tuple) and len(key) == 4 and (*key[:2], key[3]) == (full_slice,) * 3 else None
        first, stop, step = rows.indices(self.q_length) if isinstance(rows, slice) else (0, 0, 0)
        in_prefill = self.sequence is not None and self.sequence.cached  # the logits of a prefill are discarded
        if rows is None:
            return super().__getitem__(key)
        if (stop, step) != (self.q_length, 1) or (first and self.sequence is not None and not in_prefill):
            self.raise_read("getitem")
        offset, length = self.q_offset + first, self.q_length - first
        return replace(self, q_offset=offset, q_length=length)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the mask as a tensor, with the keys up to the last query."""
        return 1, 1, self.q_length, self.q_offset + self.q_length - self.kv_offset

    @property
    def last(self) -> int:
        """Position of the last query of all ranks."""
        tokens = self.sequence
        return (self.q_offset + self.q_length if tokens is None else tokens.start + tokens.length) - 1

    @property
    def has_spans(self) -> bool:
        """Return whether tokens of an image see each other both ways, in some sequence."""
        return any(mask.span_pairs for mask in (self.mask, *self.row_masks))

    def recognised(self) -> "RecognisedMask":
        """Return itself."""
        return self

    def seen(self, keys: int) -> Tensor:
        """Return which keys each query sees on one device, (1 or batch, queries, keys)."""
        positions = torch.arange(keys, device="cpu") + self.kv_offset
        queries = torch.arange(self.q_length, device="cpu") + self.q_offset
        seen = torch.stack([mask.visible(queries, positions) for mask in self.row_masks or (self.mask,)])
        if self.token_mask is None:
            return seen
        return seen.to(self.token_mask.device) & pad(self.token_mask, (0, keys - self.token_mask.shape[1]))[:, None]


USE_SDPA = 'call model.set_attn_implementation("sdpa"), on one device'
"""Fix in errors about masks that positions do not describe."""

DROP_TOKEN_TYPES = f"leave token types out if there are no images, or {USE_SDPA}"
"""Fix in errors about masks that a model makes of token types, or by itself."""

SAME_PLACES, ONE_PROMPT = (
    "spans in the same places of all sequences, without padding before them",
    "pass one prompt at a time, and pad batches to learn on the right",
)
"""Error about images whose tokens see each other, in sequences of a prompt; and the error's fix."""

SPANS = "image tokens that see earlier tokens in the layer's window, and later ones of their own image alone"
"""Words of errors: the masks of images that are expected."""

IndexFunction = Callable[..., Tensor]
"""(batch, head, query, key) indices -> True where the query attends to the key, as transformers defines masks."""


class DescribedMask(NamedTuple):
    """A mask as transformers describes it: a function of indices, and the tokens of its queries and keys."""

    function: IndexFunction
    config: PreTrainedConfig
    queries: tuple[int, int]
    """Position of the first query, and the number of queries."""
    keys: tuple[int, int]
    """Position of the first key, and the number of keys."""
    first: Tensor
    """Position of the first token of each sequence."""

    def sees(self, rows: Tensor | int, queries: Tensor, keys: Tensor) -> Tensor | None:
        """Return where queries see keys; None if the function looks positions up in a table of other tokens."""
        zero = torch.zeros((), dtype=torch.long, device="cpu")
        try:
            return self.function(zero + rows, zero, queries, keys).cpu()
        except (IndexError, RuntimeError):
            return None


def mask_function(**arguments: Any) -> RecognisedMask | TracedMask | Tensor | None:
    """Return the mask of one kind of layer. transformers calls it once per kind and forward pass."""
    if in_tower(arguments.get("config")):
        return sdpa_mask(**arguments)  # type: ignore[no-any-return]
    if BEGUN.sequence_ref is not None:
        arguments = _with_lost_mask(arguments)
    mask = arguments.get("attention_mask")
    if isinstance(mask, RecognisedMask | TracedMask):
        return mask  # with a static cache, `generate` makes the mask before the model runs
    if isinstance(mask, ShardMask | WholeMask) or not needs_tensor(arguments):
        return recognised_mask(**arguments)
    if arguments.get("mask_function") is bidirectional_mask_function:
        return RecognisedMask(Full(), arguments["q_length"], 0, 0)
    if not in_trace(arguments):
        covered = None if mask is None else mask.shape[-1]
        check_covers(covered, int(arguments["q_offset"]) + arguments["q_length"])
    visible = sdpa_mask(**{**arguments, "allow_is_causal_skip": False})
    return TracedMask(visible, partial_of(_recognised_outside_graphs, **arguments))


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _with_lost_mask(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments with the mask of the tokens that were embedded, if a wrapper of the model has dropped it."""
    sequence = BEGUN.of_this_thread()
    mask = arguments.get("attention_mask")
    tokens = arguments["q_length"]
    if sequence is None or isinstance(mask, ShardMask | WholeMask | LayerMask):
        return arguments
    if sequence.ranks > 1 and tokens == sequence.length:  # another model, of all tokens
        return arguments
    ones = torch.ones(arguments["batch_size"], len(sequence.positions()), dtype=torch.long, device="cpu")
    fits = tokens == ones.shape[1] and (mask is None or (mask.shape == ones.shape and bool(mask.all())))
    if not fits:
        BEGUN.sequence_ref = None
        given = f"another one, or none, for {tokens} tokens where {ones.shape[1]} were embedded"
        raise MaskError(f"{SUBJECT} attention_mask", OF_SHARD_BATCH, given, FORWARD_ALL)
    ones = ones.to(arguments.get("device"))
    return {**arguments, "attention_mask": ShardMask.of(ones, sequence=sequence)}


def check_covers(covered: int | None, tokens: int) -> None:
    """Raise if an attention mask covers fewer tokens than a cache of transformers has, with the new ones."""
    fits = covered is None or covered >= tokens
    if not fits:
        fix = "put the mask of cached tokens first"
        raise ShapeError(f"{SUBJECT} attention_mask", f"one of all {tokens} tokens", f"one of {covered}", fix)


def recognised_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    config: PreTrainedConfig,
    q_offset: int = 0,
    kv_offset: int = 0,
    attention_mask: Tensor | None = None,
    **options: Any,
) -> RecognisedMask:
    """Return the mask as positions, from the arguments that transformers describes it with."""
    function: IndexFunction = options.get("mask_function", causal_mask_function)
    local_size: int | None = options.get("local_size")
    sequence = attention_mask.sequence if isinstance(attention_mask, ShardMask | WholeMask) else None
    token_mask = covered = left_padding = None
    if sequence is not None:
        check_layers(config)
    elif attention_mask is not None:
        token_mask = _token_mask(attention_mask, kv_length, kv_offset)
        left_padding = (attention_mask.bool().cumsum(1) == 0).sum(1)
        covered = attention_mask.shape[1] if attention_mask.shape[1] < q_offset + q_length else None
    first = torch.zeros(batch_size, dtype=torch.long, device="cpu") if left_padding is None else left_padding.cpu()
    described = DescribedMask(function, config, (q_offset, q_length), (kv_offset, kv_length), first)
    has_text_types = sequence is not None and sequence.forward_pass.has_text_types
    rows = () if isinstance(attention_mask, ShardMask) else _with_spans(described, local_size, has_text_types)
    mask = rows[0] if rows else None
    if mask is None and q_length == 1 and local_size is None:
        mask = _of_one_token(described)
    if rows and isinstance(attention_mask, WholeMask):
        check_spans_unpadded(rows, attention_mask.plain().bool())
    if mask is None:
        if options.get("use_vmap"):
            expected = "a causal mask, a sliding window, chunks or spans"
            raise MaskError("attention mask", expected, "a mask function of the model's own", DROP_TOKEN_TYPES)
        mask = _recognise(described, local_size)
    row_masks = rows if len({*rows}) > 1 else ()
    return RecognisedMask(
        mask, q_length, q_offset, kv_offset, token_mask, sequence, covered, left_padding, row_masks=row_masks
    )


_recognised_outside_graphs = torch.compiler.disable(recognised_mask)
"""`recognised_mask` for a cache of shards, which reads positions: a graph cannot."""


def _recognise(described: DescribedMask, local_size: int | None) -> Mask:
    """Return the mask that a function of indices computes, by its values at some positions. Raise on other masks.

    Chunks are counted from the first token of a sequence.
    """
    if local_size == 0 or (local_size is None and described.function is causal_mask_function):  # size 0 means no window
        return Causal()
    if local_size is None and described.function is bidirectional_mask_function:
        return Full()  # transformers also makes it for cross-attention that is never called
    seen = _neighbours(described)
    first = int(described.first[0])
    if local_size is not None and seen is not None and not bool(seen[0].any()):
        samples = _sample_pairs(described, local_size, first)
        for mask in (Window(local_size - 1), Causal() & Chunks(local_size)):
            sees_previous = _sees_previous(mask, local_size, *described.queries, described.first)
            if torch.equal(seen[1], sees_previous) and _equals(described, mask, *samples, first):
                return mask
    given, fix = "another mask", DROP_TOKEN_TYPES
    if seen is not None and bool(seen[0].any()):
        given = "tokens that see later ones, as those of an image do"
    elif seen is not None and not bool(seen[1].all()):
        given = "packed sequences, whose positions restart"
        fix = "pass them through attnmesh.hf.shard_batch, with mesh=None on one device"
    raise MaskError("attention mask", "a causal mask, a sliding window or chunks", given, fix)


def _with_spans(described: DescribedMask, local_size: int | None, has_text_types: bool) -> tuple[Mask, ...]:
    """Return the causal mask with spans that a function of indices computes for each sequence; none of another mask.

    The mask has a window if the function has one. Without spans a function is known by text types alone: each token has
    the type of its neighbours, and sees none. With other types single tokens may see others further on.
    """
    if described.function in (causal_mask_function, bidirectional_mask_function) or described.queries[1] < 2:
        return ()  # one token, as in decoding, sees no later one
    seen = _neighbours(described)
    if seen is None or not (has_text_types or bool(seen[0].any())):
        return ()
    if bool(described.first.any()):
        raise MaskError("attention mask", SAME_PLACES, "padding before a sequence with images", ONE_PROMPT)
    window = window_of(described.config) or FAR
    masks = list[Mask]()
    sampled = _sample_pairs(described, min(window, described.queries[1]), 0)
    for row, sees_next in enumerate(seen[0]):
        spans = spans_of(sees_next, described.queries[0])
        beside = [edge + near for edge in chain(*spans) for near in (-1, 0, 1)]
        edges = torch.tensor(beside, dtype=torch.long, device="cpu")
        queries, keys = (  # the function may look tokens up in a table
            torch.cat((positions, edges)).clamp(start, start + length - 1).unique()
            for positions, (start, length) in zip(sampled, (described.queries, described.keys), strict=True)
        )
        fits = not local_size or all(stop - start <= local_size for start, stop in spans)
        # A longer span that the layer's window does not cut is refused: attention would cut it.
        candidates = *([Spans(spans)] if fits else []), Spans(spans, window - 1)
        mask = next((mask for mask in candidates if _equals(described, mask, queries, keys, 0, row)), None)
        if mask is None:
            row_and_head = torch.tensor([row, 0], device="cpu")
            if given := unsupported_span(partial_of(described.function, *row_and_head), spans, window):
                raise MaskError("attention mask", SPANS, given, USE_SDPA)
            return ()
        masks.append(mask)
    return tuple(masks)


def _of_one_token(described: DescribedMask) -> Mask | None:
    """Return the causal mask or the window that a function of indices computes for one token, as in decoding; or None.

    With no more keys than the window has, both masks are equal: then the causal one is returned.
    """
    if described.function in (causal_mask_function, bidirectional_mask_function):
        return None
    rows = torch.arange(len(described.first), device="cpu")[:, None]
    query = torch.tensor([described.queries[0]], device="cpu")
    keys = described.keys[0] + torch.arange(described.keys[1], device="cpu")
    if (seen := described.sees(rows, query[None], keys[None])) is None:
        return None
    window = window_of(described.config)
    masks = [Causal(), *([Window(window - 1)] if window else [])]
    seen = seen.expand(len(rows), len(keys))
    return next((mask for mask in masks if torch.equal(mask.visible(query, keys).expand_as(seen), seen)), None)


def _neighbours(described: DescribedMask) -> tuple[Tensor, Tensor] | None:
    """Return whether each token sees the next one, and whether the next one sees it, of each sequence; None if unknown.

    So all edges of packed sequences and of blocks are found, wherever the batch has them.
    """
    offset, length = described.queries
    batch = len(described.first)
    rows = torch.arange(batch, device="cpu")[:, None]
    earlier = torch.arange(offset, offset + length - 1, device="cpu")[None]
    sees_next, seen_by_next = described.sees(rows, earlier, earlier + 1), described.sees(rows, earlier + 1, earlier)
    if sees_next is None or seen_by_next is None:
        return None
    return sees_next.expand(batch, length - 1), seen_by_next.expand(batch, length - 1)


def _sees_previous(mask: Mask, size: int, offset: int, length: int, first: Tensor) -> Tensor:
    """Return whether each token but the first of a range sees the one before it, (batch, length - 1)."""
    later = torch.arange(offset + 1, offset + length, device="cpu") - first[:, None]
    return later % size != 0 if mask.period > 1 else torch.full(later.shape, size > 1, device="cpu")


def _token_mask(attention_mask: Tensor, kv_length: int, kv_offset: int) -> Tensor | None:
    """Return the part of a 2D mask that covers the keys, as bools; None without padding."""
    if attention_mask.ndim != 2:
        fix = "pass a 2D attention_mask of padding, or none"
        raise MaskError("attention mask", "a 2D mask of padding", f"one of shape {tuple(attention_mask.shape)}", fix)
    token_mask = attention_mask.bool()[:, kv_offset : kv_offset + kv_length]
    return None if bool(token_mask.all()) else token_mask


def check_left_padded(subject: str, token_mask: Tensor) -> None:
    """Raise if there is padding after a sequence's first token.

    transformers counts such padding in windows and chunks. A cache counts real tokens alone.
    """
    real = token_mask.bool()
    gaps = real[:, :-1] & ~real[:, 1:]
    if bool(gaps.any()):
        expected = "padding before the first token of a sequence only"
        given = "padding between tokens, in a model with windows or chunks"
        raise MaskError(subject, expected, given, "pass an attention_mask with padding on the left")


def check_cached_padding(kv_cache: StepCache, token_mask: Tensor | None, new_count: int, mask: Mask) -> None:
    """Raise unless the attention mask covers all tokens, repeats the padding of cached ones, and fits the layer."""
    subject, fix = f"{SUBJECT} attention_mask", "pass the attention_mask of all tokens, cached tokens first"
    if token_mask is not None and token_mask.shape[1] != kv_cache.length + new_count:
        expected, given = f"one of {kv_cache.length} cached and {new_count} new tokens", f"one of {token_mask.shape[1]}"
        raise ShapeError(subject, expected, given, fix)
    if kv_cache.padding is None:
        is_same = token_mask is None or bool(token_mask[:, :-new_count].all())
    else:
        cached_mask = kv_cache.padding.token_mask[:, : kv_cache.length]
        is_same = token_mask is not None and torch.equal(token_mask[:, :-new_count], cached_mask)
    if not is_same:
        raise MaskError(subject, "the padding of the cached tokens", "other padding", fix)
    if token_mask is not None and mask != Causal():
        check_left_padded(subject, token_mask)


def _sample_pairs(described: DescribedMask, size: int, first: int) -> tuple[Tensor, Tensor]:
    """Return some positions of queries and keys, from `first` on: of their ranges, and around multiples of `size`.

    A shard's range may be too short to tell a window from chunks, so the first edges of chunks are always among them.
    """
    edges = first + (torch.arange(1, 4, device="cpu")[:, None] * size + torch.arange(-1, 2, device="cpu")).flatten()
    queries = torch.cat((_spread(*described.queries), edges)).clamp(min=first)
    keys = torch.cat((_spread(*described.keys), edges, queries - size)).clamp(min=first)
    return queries.unique(), keys.unique()


def _spread(first: int, count: int) -> Tensor:
    """Return some positions of a range, evenly spread from its first to its last."""
    return torch.linspace(0, max(count - 1, 0), 17, dtype=torch.float32, device="cpu").long() + first


def _equals(described: DescribedMask, mask: Mask, queries: Tensor, keys: Tensor, first: int, row: int = 0) -> bool:
    """Return True if a function of indices is this mask at these positions, which the mask counts from `first`."""
    seen = described.sees(row, queries[:, None], keys[None])
    return seen is not None and torch.equal(seen, mask.visible(queries - first, keys - first))
