"""Generation with a context that is spread over a mesh: each rank computes its share of the prompt, and keeps its keys.

All of the prompt but its last token is prefilled, cut over the ranks; then transformers' own `generate` goes on, on
every rank alike, with a cache that decodes over the mesh. Ranks draw the same random numbers, so they sample alike.
"""

from collections.abc import Callable
from functools import partial
from inspect import signature
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel

from attnmesh.comm.p2p import all_gather_ints
from attnmesh.core.layout import Striped
from attnmesh.errors import KernelError, MaskError
from attnmesh.hf.cache import ShardedCache
from attnmesh.hf.checkpoint import Checkpoint, TokenCallback
from attnmesh.hf.models import rope_growth, rope_regime, unwrapped
from attnmesh.hf.opaque import FAMILIES
from attnmesh.hf.options import ASSISTED, CheckpointSpec, Settings, agree_on, check_left
from attnmesh.hf.shards import ShardMask, ShardPositions, Shards
from attnmesh.mesh.axes import Mesh, NotGiven, given_mesh

ALONE = "each rank generates alone, with all keys and values. Pass mesh= or a cache to spread them over the ranks"

CHUNK = 8192
"""Tokens that are prefilled at once on top of others, or with padding: there every rank holds all of their queries."""


def generate(
    model: PreTrainedModel,
    input_ids: Tensor,
    *,
    mesh: DeviceMesh | NotGiven | None = NotGiven.MESH,
    cache: ShardedCache | None = None,
    attention_mask: Tensor | None = None,
    prefill_chunk_size: int | None = None,
    checkpoint: Checkpoint | None = None,
    **options: Any,
) -> Any:
    """What `model.generate(input_ids, **options)` gives, with keys and values spread over the mesh.

    Every rank makes the same call: greedy, sampling, beams, assisted, streaming (where a streamer is passed), batches
    padded on the left. Without `mesh` and `cache` a rank generates alone, and warns once if there are other ranks;
    `mesh=None` says that this is meant. Pass a `cache` to go on with it: what its tokens share with the prompt is kept,
    the rest is cut. With a `checkpoint` what there is is kept in a folder, and the same call goes on from there.
    """
    if isinstance(mesh, NotGiven):
        mesh = given_mesh("generate", mesh, ALONE) if cache is None else None
    here, model = Mesh.of(cache.mesh if isinstance(cache, ShardedCache) else mesh), unwrapped(model)
    settings = Settings(model, options)
    kept = CheckpointSpec(checkpoint.folder, checkpoint.every) if isinstance(checkpoint, Checkpoint) else checkpoint
    own = {"prefill_chunk_size": prefill_chunk_size, "checkpoint": kept}
    agree_on(here, model, input_ids, attention_mask, cache, {**own, **options})
    cache = ShardedCache(model.config, mesh) if cache is None else cache
    if attention_mask is None:
        attention_mask = _inferred(input_ids, settings)
    if checkpoint is not None:
        if attention_mask is not None and not bool(attention_mask.all()):
            raise MaskError("generate checkpoint", "a prompt without padding", "some", "cut the padding off")
        chunk = prefill_chunk_size or settings["prefill_chunk_size"] or CHUNK
        return _with_checkpoint(model, input_ids, cache, checkpoint, chunk, settings, options)
    shared = _keep_shared(model, cache, input_ids, attention_mask)
    assisted, beams = any(settings[name] for name in ASSISTED), settings["num_beams"] or 1
    if assisted and shared:
        given, fix = f"{shared} tokens in the cache", "pass a new cache, or none"
        raise KernelError("generate", "an empty cache for assisted decoding", given, fix)  # it feeds the whole prompt
    if not assisted:
        _prefill(model, input_ids, cache, attention_mask, prefill_chunk_size or settings["prefill_chunk_size"])
        cache.batch_repeat_interleave(max(beams, settings["num_return_sequences"] or 1))
        options["prefill_chunk_size"] = None
    _draw_alike(here, input_ids.device)
    if not assisted and beams == 1:
        follow = TokenCallback(partial(_follow, cache, attention_mask))
        options["stopping_criteria"] = [*(options.get("stopping_criteria") or []), follow]
        if (settings["num_return_sequences"] or 1) == 1:
            cache.tokens = _all_marked(input_ids, attention_mask)  # as it is at the first of them
    output = model.generate(
        input_ids, past_key_values=cache, attention_mask=attention_mask, **{**options, "use_cache": True}
    )
    # Which of several beams is in which row, nobody can tell any more.
    cache.tokens = None if beams > 1 else _held(cache, getattr(output, "sequences", output), attention_mask)
    return output


def _follow(cache: ShardedCache, attention_mask: Tensor | None, tokens: Tensor) -> None:
    """Tell the cache what there is after each token, so that it is known if a rank is lost."""
    cache.tokens = tokens if attention_mask is None else _all_marked(tokens, attention_mask)


def _with_checkpoint(
    model: PreTrainedModel,
    prompt: Tensor,
    cache: ShardedCache,
    checkpoint: Checkpoint,
    chunk: int,
    settings: Settings,
    options: dict[str, Any],
) -> Any:
    """The same from where a checkpoint has come, keeping on what there is."""
    _draw_alike(Mesh.of(cache.mesh), prompt.device)
    if checkpoint.reached is None:
        checkpoint.begin(model, prompt, cache, settings)
    if rope_regime(model.config, prompt.shape[1]) != rope_regime(model.config, settings.total(prompt.shape[1])):
        given, fix = "one that the length of the text changes", "leave checkpoint= out, or generate fewer tokens"
        raise KernelError("generate checkpoint", "a rope that stays as it is", given, fix)
    ids, checkpoint.reached = checkpoint.reached, None  # another call is another one's
    assert ids is not None
    done, total = ids.shape[1] - prompt.shape[1], settings.total(prompt.shape[1])
    if ids.shape[1] >= total:
        if (streamer := options.get("streamer")) is not None:
            streamer.put(ids[:, :total])
            streamer.end()
        return ids[:, :total]
    least = settings["min_new_tokens"]
    fewer = {"max_new_tokens": total - ids.shape[1], "min_new_tokens": None if least is None else max(0, least - done)}
    options = {
        name: given for name, given in options.items() if name not in ("max_length", "stopping_criteria")
    } | fewer
    _prefill(model, ids, cache, None, chunk, lambda stop: checkpoint.save(cache, ids[:, :stop]))
    keep = TokenCallback(partial(checkpoint.keep, cache, prompt=prompt.shape[1], ends=settings["eos_token_id"]))
    more = {**options, "attention_mask": torch.ones_like(ids), "use_cache": True, "prefill_chunk_size": None}
    output = model.generate(ids, past_key_values=cache, stopping_criteria=[keep], **more)
    checkpoint.wait()
    cache.tokens = _held(cache, getattr(output, "sequences", output), None)
    return output


def _inferred(ids: Tensor, settings: Settings) -> Tensor | None:
    """The padding of a batch that comes without a mask, where padding can be told from ends, as transformers does."""
    pad, eos = settings["pad_token_id"], settings["eos_token_id"]
    ends = eos if isinstance(eos, (list, tuple)) else [eos]
    if pad is None or pad in ends or not bool((ids == pad).any()):
        return None
    mask: Tensor = (ids != pad).long()
    check_left(mask)
    return mask


def prefill(
    model: PreTrainedModel,
    input_ids: Tensor,
    cache: ShardedCache,
    *,
    attention_mask: Tensor | None = None,
    chunk_size: int | None = None,
    after: Callable[[int], None] | None = None,
) -> None:
    """Compute the prompt, each rank its share, and keep its keys: all but the last token, with which decoding begins.

    What the cache holds of it already is kept, and what it holds beyond is cut. `after` is told after each chunk how
    many tokens the cache holds.
    """
    model = unwrapped(model)
    agree_on(Mesh.of(getattr(cache, "mesh", None)), model, input_ids, attention_mask, cache, {"chunk_size": chunk_size})
    _keep_shared(model, cache, input_ids, attention_mask)
    _prefill(model, input_ids, cache, attention_mask, chunk_size, after)


def _prefill(
    model: PreTrainedModel,
    ids: Tensor,
    cache: ShardedCache,
    attention_mask: Tensor | None,
    chunk_size: int | None,
    after: Callable[[int], None] | None = None,
) -> None:
    """Tokens are dealt as the cache deals them, so the cache stays even. All ranks compute a few that fill no round.

    They compute the whole prompt of a model that counts positions itself, and cannot be told them.
    """
    start, end = cache.get_seq_length(), ids.shape[1] - 1
    real = None if attention_mask is None or bool(attention_mask.all()) else attention_mask.bool()
    positions = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
    if real is not None:
        positions = (real.long().cumsum(1) - 1).masked_fill(~real, 0)
    last, placed = int(positions.max()), "position_ids" in signature(model.forward).parameters
    if chunk_size is None and (start or real is not None):
        chunk_size = CHUNK
    with torch.no_grad():
        for first, stop, sharded in _pieces(start, end, cache.block * cache.ranks, chunk_size or end):
            piece = Piece(ids[:, first:stop], positions[:, first:stop], last, first, real)
            (_forward_sharded if sharded and placed else _forward)(model, piece, cache)
            _check_kept(model, cache, stop)
            cache.tokens = _marked(ids[:, :stop], attention_mask)  # as it is if a rank is lost in the next
            if after is not None:
                after(stop)
    cache.tokens = _marked(ids[:, : cache.get_seq_length()], attention_mask)


def _pieces(start: int, stop: int, unit: int, size: int) -> list[tuple[int, int, bool]]:
    """From where to where to compute at once, and whether cut over the ranks, as from a round of dealing's start on.

    >>> _pieces(0, 100, 32, 64), _pieces(20, 100, 32, 100)
    ([(0, 64, True), (64, 100, True)], [(20, 32, False), (32, 100, True)])
    """
    aligned, size = -(-start // unit) * unit, max(size // unit, 1) * unit
    if stop - aligned < unit:
        return [(start, stop, False)] if stop > start else []
    edges = [*range(aligned, stop - unit + 1, size), stop]
    head = [(start, aligned, False)] if aligned > start else []
    return head + [(first, last, True) for first, last in pairwise(edges)]


class Piece(NamedTuple):
    """Tokens of a prompt that are computed at once."""

    ids: Tensor
    positions: Tensor
    last: int
    """The largest position of the whole prompt."""
    start: int
    """Tokens before these."""
    real: Tensor | None
    """(batch, tokens of the whole prompt), False for padding; None if there is none."""

    @property
    def stop(self) -> int:
        """Tokens up to the last of these."""
        return self.start + self.ids.shape[1]


def _forward(model: PreTrainedModel, piece: Piece, cache: ShardedCache) -> None:
    """Run the model on tokens that every rank computes."""
    mask = None if piece.real is None else piece.real[:, : piece.stop].long()
    shards = Shards(cache.mesh, Striped(), piece.ids.shape[1], start=piece.start, cached=True)
    _run(model, piece.ids, mask, ShardPositions.within(piece.positions, shards, piece.last), cache)


def _forward_sharded(model: PreTrainedModel, piece: Piece, cache: ShardedCache) -> None:
    """Run the model on this rank's share of some tokens."""
    layout, length = Striped(cache.block), piece.ids.shape[1]
    own = layout.positions(length, cache.ranks, Mesh.of(cache.mesh).shard).to(piece.ids.device)
    real = None if piece.real is None else piece.real[:, piece.start : piece.stop]
    shards = Shards(cache.mesh, layout, length, start=piece.start, real=real, cached=True)
    ids, positions = piece.ids[:, own], ShardPositions.within(piece.positions[:, own], shards, piece.last)
    _run(model, ids, ShardMask.of(torch.ones_like(ids), shards), positions, cache)


def _run(model: PreTrainedModel, ids: Tensor, mask: Tensor | None, positions: Tensor, cache: ShardedCache) -> None:
    """Run the model, with as few logits as it can be asked for."""
    options: dict[str, Any] = {"attention_mask": mask, "past_key_values": cache, "use_cache": True}
    taken = signature(model.forward).parameters
    if "logits_to_keep" in taken:
        options["logits_to_keep"] = 1
    if "position_ids" in taken:
        options["position_ids"] = positions
    model(input_ids=ids, **options)


def _check_kept(model: PreTrainedModel, cache: ShardedCache, tokens: int) -> None:
    """Raise unless the model has put all tokens so far into the cache."""
    kept = {layer.get_seq_length() for layer in cache.layers}
    if kept != {tokens}:
        expected = "a model whose layers all keep their keys in the cache"
        given = f"{type(model).__name__}, some of whose layers keep none"
        raise KernelError("generate", expected, given, FAMILIES)


def _keep_shared(model: PreTrainedModel, cache: ShardedCache, ids: Tensor, attention_mask: Tensor | None) -> int:
    """Cut from the cache what is not a beginning of the prompt, or its last token; how many tokens are left."""
    cache.level()
    length: int = cache.get_seq_length()
    tokens = ids.shape[1] if attention_mask is None else int(attention_mask.sum(1).max())
    regime, cache.rope = cache.rope, rope_regime(cache.config, tokens, rope_growth(model))
    if cache.rope and regime != cache.rope and length:
        cache.crop(-length)  # its keys are turned by another rope than the whole of this prompt is
        return 0
    shared = 0 if cache.tokens is None else min(length, ids.shape[1] - 1, cache.tokens.shape[1])
    if cache.tokens is not None and shared:
        same = (_marked(ids, attention_mask)[:, :shared] == cache.tokens[:, :shared].to(ids.device)).all(0)
        shared = int(same.long().cumprod(0).sum())
    cache.crop(shared - length)
    return shared


def _marked(ids: Tensor, attention_mask: Tensor | None) -> Tensor:
    """These tokens, -1 for padding."""
    return ids.clone() if attention_mask is None else ids.masked_fill(attention_mask[:, : ids.shape[1]] == 0, -1)


def _held(cache: ShardedCache, sequences: Tensor, attention_mask: Tensor | None) -> Tensor:
    """The tokens of these sequences that the cache holds."""
    return _all_marked(sequences, attention_mask)[:, : cache.get_seq_length()]


def _all_marked(sequences: Tensor, attention_mask: Tensor | None) -> Tensor:
    """All tokens, new ones included, -1 for padding."""
    if attention_mask is not None:
        times, more = len(sequences) // len(attention_mask), sequences.shape[1] - attention_mask.shape[1]
        attention_mask = torch.nn.functional.pad(attention_mask.repeat_interleave(times, 0), (0, more), value=1)
    return _marked(sequences, attention_mask)


def _draw_alike(here: Mesh, device: torch.device) -> None:
    """Every rank's generators as those of the first shard: all are to sample the same tokens."""
    if here.shape.ranks == 1:
        return
    state = all_gather_ints(torch.get_rng_state().tolist(), here.axes)[0]
    torch.set_rng_state(torch.tensor(state, dtype=torch.uint8))
    if device.type == "cuda":
        state = all_gather_ints(torch.cuda.get_rng_state(device).tolist(), here.axes)[0]
        torch.cuda.set_rng_state(torch.tensor(state, dtype=torch.uint8), device)
