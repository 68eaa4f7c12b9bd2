"""Training on shards: each rank's tokens of a batch, with the labels and positions of the whole sequence."""

from collections.abc import Callable, Mapping
from numbers import Real
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.functional import pad

from attnmesh.attention.sharding import shard
from attnmesh.comm.consensus import describe_call, run_agreed
from attnmesh.core.digest import fingerprints
from attnmesh.core.layout import Layout, Zigzag, check_layout
from attnmesh.core.mask import Documents, Full, Mask
from attnmesh.errors import ArgumentError, DtypeError, MaskError, ShapeError
from attnmesh.hf.shards import GuardedLabels, ItemCount, ShardIds, ShardLabels, ShardMask, ShardPositions, Shards
from attnmesh.mesh.axes import Mesh

IGNORE_INDEX = -100
"""Label of tokens that are not learned, as in transformers."""

TOKEN_ARGUMENTS = ("input_ids", "labels", "shift_labels", "attention_mask", "position_ids")
"""Arguments with one value per token."""

PACKING_ARGUMENTS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")
"""Arguments of collators that pack sequences. They repeat `position_ids` and are dropped."""


def shard_batch(
    batch: Mapping[str, Any], mesh: DeviceMesh | None, layout: Layout = Zigzag(), **more: Any
) -> dict[str, Any]:
    """Return this rank's share of a batch, as arguments of a model: `model(**shard_batch(batch, mesh)).loss`.

    The mean of the loss over all ranks is the loss on one device. The mean of the gradients, as DDP and FSDP take it,
    is the gradient on one device. `Trainer` may pass its count of all ranks' labels to the model.

    Args:
        batch: The same batch on every rank: `input_ids` (batch, length), and `labels` or `shift_labels` to learn from.
            `attention_mask` may have padding on the right. `position_ids` of packed sequences restart in each.
        mesh: The mesh that shares the sequence; None for one device.
        layout: The tokens that each rank gets.
        more: Further entries of the batch, such as `num_items_in_batch`.

    Returns:
        Tensors of this rank's tokens, for a model with `attn_implementation="attnmesh"`. Labels are shifted.

    Raises:
        InputError: An entry is missing, unknown or inconsistent, or the batch differs between ranks.

    >>> part = shard_batch({"input_ids": torch.arange(6)[None], "labels": torch.arange(6)[None]}, None)
    >>> part["shift_labels"].tolist(), float(part["num_items_in_batch"])
    ([[1, 2, 3, 4, 5, -100]], 5.0)
    """
    batch, positions, documents = _agree_on_batch(batch, mesh, layout, more)
    ids, labels = batch["input_ids"], _shift_labels(batch)
    even = labels is None or _labels_even(labels, Mesh.of(mesh).shape.ranks, layout)
    shards = Shards(mesh, layout, ids.shape[1], documents, even=even)

    def part(x: Tensor) -> Tensor:
        return shard(x, mesh, layout=layout, dim=1)

    counted_ids = ids if batch.get("position_ids") is None else None
    mask = batch.get("attention_mask")
    return {
        "input_ids": ShardIds.of(part(ids), shards),
        "position_ids": ShardPositions.of_sequence(part(positions), shards, int(positions.max()), counted_ids),
        "attention_mask": ShardMask.of(part(torch.ones_like(ids) if mask is None else mask), shards),
        "use_cache": False,
    } | ({} if labels is None else _loss_arguments(labels, batch.get("num_items_in_batch"), part, shards))


def _agree_on_batch(
    batch: Mapping[str, Any], mesh: DeviceMesh | None, layout: Layout, more: Mapping[str, Any]
) -> tuple[dict[str, Any], Tensor, Mask]:
    """Return the batch with all its entries, its positions, and the mask of packed sequences.

    Raise the same error on all ranks unless all pass the same valid batch.
    """
    place = Mesh.of(mesh)

    def check() -> tuple[dict[str, Any], Tensor, Mask]:
        check_layout("shard_batch layout", layout)
        if not isinstance(batch, Mapping):
            given, fix = type(batch).__name__, "pass the collator's output, or a dict"
            raise DtypeError("shard_batch", "a mapping of names to tensors", given, fix)
        whole = {**batch, **more}
        _check_batch(whole, place.shape.ranks)
        positions, documents = _positions(whole)
        _check_packing(whole, documents)
        return whole, positions, documents

    def describe(checked: tuple[dict[str, Any], Tensor, Mask]) -> str:
        tensors = {name: x for name, x in checked[0].items() if isinstance(x, Tensor)}
        others = {name: x for name, x in checked[0].items() if name not in tensors}
        return describe_call("shard_batch", **{"layout": layout, **fingerprints(tensors), **others})

    return run_agreed(place, check, describe)


def _shift_labels(batch: Mapping[str, Any]) -> Tensor | None:
    """Return the target of each token: the next token's label in the whole sequence. None without labels."""
    if (given := batch.get("shift_labels")) is not None:
        return given  # type: ignore[no-any-return]
    labels = batch.get("labels")
    return None if labels is None else pad(labels, (0, 1), value=IGNORE_INDEX)[:, 1:]


def _labels_even(labels: Tensor, ranks: int, layout: Layout) -> bool:
    """Return True if all ranks have equally many labels to learn."""
    parts = [layout.positions(labels.shape[1], ranks, rank).to(labels.device) for rank in range(ranks)]
    return len({int((labels[:, part] != IGNORE_INDEX).sum()) for part in parts}) < 2


def _loss_arguments(labels: Tensor, count: Any, part: Callable[[Tensor], Tensor], shards: Shards) -> dict[str, Any]:
    """Return the arguments that a model computes its loss from."""
    count = (labels != IGNORE_INDEX).sum().clamp(min=1) if count is None else torch.as_tensor(count)
    return {
        "labels": GuardedLabels.of(part(labels), shards),
        "shift_labels": ShardLabels.of(part(labels), shards),
        "num_items_in_batch": ItemCount.of(count.to(labels.device) / shards.ranks, shards),
    }


def _positions(batch: Mapping[str, Any]) -> tuple[Tensor, Mask]:
    """Return the position of each token, and the mask of packed sequences."""
    ids, positions = batch["input_ids"], batch.get("position_ids")
    if positions is None:
        return torch.arange(ids.shape[1], device=ids.device).expand_as(ids), Full()
    positions = positions.expand_as(ids)
    starts = (positions[0].diff() != 1).nonzero().flatten() + 1
    if not len(starts) or batch.get("attention_mask") is not None:  # with a mask, transformers ignores packing
        return positions, Full()
    edges = pad(starts.cpu(), (1, 1))
    edges[-1] = ids.shape[1]
    return positions, Documents(edges.diff().tolist())


def _check_batch(batch: Mapping[str, Any], ranks: int) -> None:
    """Raise unless all entries are known and have matching shapes."""
    accepted = (*TOKEN_ARGUMENTS, "num_items_in_batch")
    if unknown := [name for name in batch if name not in (*accepted, *PACKING_ARGUMENTS)]:
        fix = "leave it out, or pass it to the model yourself if it has no value per token"
        raise ArgumentError("shard_batch", f"some of {', '.join(accepted)}", f"{unknown[0]!r}", fix)
    ids = batch.get("input_ids")
    if not isinstance(ids, Tensor) or ids.ndim != 2 or ids.is_floating_point():
        given = f"{ids.dtype} {tuple(ids.shape)}" if isinstance(ids, Tensor) else type(ids).__name__
        fix = 'pass tokenizer(text, return_tensors="pt")["input_ids"]'
        raise DtypeError("shard_batch input_ids", "token ids (batch, length)", given, fix)
    if ids.shape[1] < ranks or not ids.shape[0]:
        given, fix = f"{tuple(ids.shape)} on {ranks} ranks", "use longer sequences, or fewer ranks"
        raise ShapeError("shard_batch input_ids", "a sequence, and at least one token per rank", given, fix)
    for name in TOKEN_ARGUMENTS[1:]:
        x = batch.get(name)
        shapes = [tuple(ids.shape)] + [(1, ids.shape[1])] * (name == "position_ids")
        if x is not None and (not isinstance(x, Tensor) or tuple(x.shape) not in shapes):
            given = str(tuple(x.shape)) if isinstance(x, Tensor) else type(x).__name__
            hint = "; 4D and additive masks are not supported" if name == "attention_mask" else ""
            raise ShapeError(
                f"shard_batch {name}", f"shape {tuple(ids.shape)}", given, "pass one value per token" + hint
            )
    _check_count(batch.get("num_items_in_batch"))
    _check_padding(batch)
    positions = batch.get("position_ids")
    if positions is not None and not torch.equal(positions.diff(), positions[:1].expand_as(positions).diff()):
        fix = "pack all rows of a batch alike, or into one row"
        raise MaskError("shard_batch position_ids", "the same positions in each row", "rows that differ", fix)


def _check_count(count: object) -> None:
    """Raise unless it is a number, a tensor of one, or None."""
    if count is not None and not (isinstance(count, Tensor) and count.numel() == 1) and not isinstance(count, Real):
        fix = "count the labels to learn, or leave it out"
        raise DtypeError("shard_batch num_items_in_batch", "a number", repr(count), fix)


def _check_padding(batch: Mapping[str, Any]) -> None:
    """Raise unless padding is on the right and without labels. A causal mask hides such padding from all tokens."""
    mask = batch.get("attention_mask")
    if mask is None or bool(mask.all()):
        return
    if bool((mask.bool().diff() & mask.bool()[:, 1:]).any()):
        fix = "set the tokenizer's padding_side to 'right', or pack sequences by position_ids"
        raise MaskError("shard_batch attention_mask", "padding on the right, if any", "padding before a token", fix)
    labels = _shift_labels(batch)
    if labels is not None and bool(((labels != IGNORE_INDEX) & ~mask.bool()).any()):
        fix = f"set them with labels.masked_fill(attention_mask == 0, {IGNORE_INDEX})"
        raise MaskError("shard_batch labels", f"{IGNORE_INDEX} at padding", "labels of padding", fix)


def _check_packing(batch: Mapping[str, Any], documents: Mask) -> None:
    """Raise unless the packing arguments of a collator match `position_ids`."""
    packing = {name: batch[name] for name in PACKING_ARGUMENTS if batch.get(name) is not None}
    fix = "pass the collator's position_ids too, which restart in each sequence"
    if packing and (batch.get("position_ids") is None or batch.get("attention_mask") is not None):
        given = "no position_ids" if batch.get("position_ids") is None else "attention_mask"
        raise MaskError(f"shard_batch {next(iter(packing))}", "position_ids and no attention_mask", given, fix)
    length = batch["input_ids"].shape[1]
    for name in ("cu_seq_lens_q", "cu_seq_lens_k"):
        edges = torch.as_tensor(packing[name]).flatten().tolist() if name in packing else None
        expected = [0, *documents.ends] if documents.ends else [0, length]
        if edges is not None and edges != expected:
            raise MaskError(f"shard_batch {name}", f"{expected}, as in position_ids", str(edges), fix)
