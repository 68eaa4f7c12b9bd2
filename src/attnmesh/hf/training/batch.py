"""Training on shards: each rank's tokens of a batch, with the labels and positions of the whole sequence."""

from collections.abc import Callable, Mapping
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.functional import pad

from attnmesh.core.digest import fingerprints
from attnmesh.core.layout import Layout, Zigzag, check_layout
from attnmesh.core.mask import Causal, Documents, Full, Mask
from attnmesh.errors import ArgumentError, DtypeError, MaskError, ShapeError, short, type_and_shape
from attnmesh.guard.agreement import Agreement
from attnmesh.hf.images.inputs import IMAGE_INPUTS, are_all_text, check_cross_mask
from attnmesh.hf.options import USE_TOKENIZER, describe_value
from attnmesh.hf.shard_tensors import ShardIds, ShardMask, ShardPositions, ShardTensor, WholeIds, WholeMask
from attnmesh.hf.sharded_sequence import ShardedSequence
from attnmesh.hf.training.caller import prepare_caller, prepare_caller_with_images
from attnmesh.hf.training.labels import GuardedLabels, ItemCount, ShardLabels
from attnmesh.mesh.axes import RankMesh
from attnmesh.mesh_attention.auto_choices import agreed_layout
from attnmesh.mesh_attention.sharding import shard

IGNORE_INDEX = -100
"""Label of tokens that are not learned, as in transformers."""

RECURRENT_EXCHANGES = ("scan", "heads")
"""Exchanges of ranks in recurrent layers: their states, or the tokens of their heads."""

TOKEN_ARGUMENTS = ("input_ids", "labels", "shift_labels", "attention_mask", "position_ids")
"""Arguments with one value per token."""

PACKING_ARGUMENTS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")
"""Arguments of collators that pack sequences. They repeat `position_ids` and are dropped."""


def shard_batch(
    batch: Mapping[str, Any],
    mesh: DeviceMesh | None,
    layout: Layout | str = Zigzag(),
    *,
    exchange: str = "scan",
    **more: Any,
) -> dict[str, Any]:
    """Return this rank's share of a batch, as arguments of a model: `model(**shard_batch(batch, mesh)).loss`.

    The mean of the loss over all ranks is the loss on one device. The mean of the gradients, as DDP and FSDP take it,
    is the gradient on one device. `num_items_in_batch`, by which a loss of your own divides the sum of its tokens, is
    the number of labels of all ranks divided by the ranks. `Trainer` may pass its own count to the model.

    Args:
        batch: The same batch on every rank: `input_ids` (batch, length), and `labels` or `shift_labels` to learn from.
            `attention_mask` may have padding on the right. `position_ids` of packed sequences restart in each.
            Images are those that the model's processor returns. The model merges them into the whole sequence.
        mesh: The mesh that shares the sequence; None for one device.
        layout: The tokens that each rank gets. "auto" chooses for the documents of this batch, as `am.shard` does.
        exchange: What ranks exchange in recurrent layers. "scan": each runs its tokens, and sends its state. "heads":
            each runs all tokens for its share of the heads, which the ranks must divide evenly.
        more: Further entries of the batch, such as `num_items_in_batch`.

    Returns:
        Tensors of this rank's tokens, for a model with `attn_implementation="attnmesh"`. Labels are shifted. With
        images the tokens are whole, and the text model begins with those of this rank.

    Raises:
        InputError: An entry is missing, unknown or inconsistent, or the batch differs between ranks.

    >>> part = shard_batch({"input_ids": torch.arange(6)[None], "labels": torch.arange(6)[None]}, None)
    >>> part["shift_labels"].tolist(), float(part["num_items_in_batch"])
    ([[1, 2, 3, 4, 5, -100]], 5.0)
    """
    agreed = agree_on_batch(batch, mesh, layout, exchange, more)
    return shard_agreed(agreed, mesh, agreed_layout(layout, Causal() & agreed.documents, RankMesh.of(mesh)), exchange)


class AgreedBatch(NamedTuple):
    """A valid batch, the same on all ranks."""

    entries: dict[str, Any]
    positions: Tensor
    """Position of each token, (batch, length)."""
    documents: Mask
    """Mask of packed sequences; `Full()` without packing."""


def shard_agreed(agreed: AgreedBatch, device_mesh: DeviceMesh | None, layout: Layout, exchange: str) -> dict[str, Any]:
    """Return this rank's share of a batch, or raise on all ranks."""
    batch, positions, documents = agreed
    ids = batch["input_ids"]
    labels = _shift_labels(batch)
    ranks = RankMesh.of(device_mesh).ranks
    indices_by_rank = [layout.positions(ids.shape[1], ranks, rank) for rank in range(ranks)]
    if min(map(len, indices_by_rank)) == 0:  # models of transformers cannot compute none
        given = f"{ids.shape[1]} tokens in {layout} on {ranks} ranks"
        fix = "use longer sequences, fewer ranks or layout=am.Striped()"
        raise ShapeError("shard_batch input_ids", "at least one token per rank", given, fix)
    counts = None if labels is None else (labels != IGNORE_INDEX).sum(0).cpu()
    label_counts = () if counts is None else tuple(int(counts[indices].sum()) for indices in indices_by_rank)
    sequence = ShardedSequence(
        device_mesh, layout, ids.shape[1], documents, label_counts=label_counts, exchange=exchange
    )
    images = {name: x for name, x in batch.items() if name in IMAGE_INPUTS and x is not None}
    sequence.forward_pass.on_begin = prepare_caller_with_images if images else prepare_caller
    sequence.forward_pass.has_text_types = bool(images) and are_all_text(images)
    sequence.forward_pass.token_ranges = _token_ranges(ids, labels)

    def part(x: Tensor) -> Tensor:
        return shard(x, device_mesh, layout=layout, dim=1)

    loss = {} if labels is None else _loss_arguments(labels, batch.get("num_items_in_batch"), part, sequence)
    mask = batch.get("attention_mask")
    mask = torch.ones_like(ids) if mask is None else mask
    if images:  # the model merges them into the whole sequence, and computes its positions
        prompt = {
            "input_ids": WholeIds.of(ids, sequence=sequence),
            "attention_mask": WholeMask.of(mask, sequence=sequence),
        }
        return prompt | {"use_cache": False} | images | loss
    sequence_options = {"last": int(positions.max()), "ids": ids if batch.get("position_ids") is None else None}
    return {
        "input_ids": ShardIds.of(part(ids), sequence=sequence),
        "position_ids": ShardPositions.of(part(positions), sequence=sequence, **sequence_options),
        "attention_mask": ShardMask.of(part(mask), sequence=sequence),
        "use_cache": False,
    } | loss


def _token_ranges(ids: Tensor, labels: Tensor | None) -> dict[str, Tensor]:
    """Return the smallest and the largest token of all ranks, and those of the labels to learn."""
    ids_by_name = {"input_ids": ids}
    if labels is not None:
        ids_by_name["labels"] = labels.masked_fill(labels == IGNORE_INDEX, 0)
    ends = torch.stack([end.long() for x in ids_by_name.values() for end in x.aminmax()]).cpu()  # read once
    return dict(zip(ids_by_name, ends.split(2), strict=True))


def agree_on_batch(
    batch: Mapping[str, Any],
    device_mesh: DeviceMesh | None,
    layout: Layout | str,
    exchange: str,
    extras: Mapping[str, Any],
) -> AgreedBatch:
    """Return the batch. Raise on all ranks unless all pass the same valid one."""
    mesh = RankMesh.of(device_mesh)
    with Agreement(mesh, "shard_batch") as agreement:
        check_layout("shard_batch layout", layout, auto=True)
        is_known = isinstance(exchange, str) and exchange in RECURRENT_EXCHANGES
        if not is_known:
            expected = f"one of {', '.join(RECURRENT_EXCHANGES)}"
            raise ArgumentError("shard_batch exchange", expected, short(exchange), 'pass exchange="scan"')
        if not isinstance(batch, Mapping):
            fix = "pass the collator's output, or a dict"
            raise DtypeError("shard_batch", "a mapping of names to tensors", type(batch).__name__, fix)
        entries = {**batch, **extras}
        _check_batch(entries, mesh.ranks)
        positions, documents = _positions(entries)
        _check_packing(entries, documents)
        check_cross_mask("shard_batch", entries["input_ids"], entries)
        tensors = {name: x for name, x in entries.items() if isinstance(x, Tensor)}
        values = {name: describe_value(x) for name, x in entries.items() if name not in tensors}
        agreement.compare({"layout": layout, "exchange": exchange, **fingerprints(tensors), **values})
    return AgreedBatch(entries, positions, documents)


def _shift_labels(batch: Mapping[str, Any]) -> Tensor | None:
    """Return the target of each token: the next token's label in the whole sequence. None without labels."""
    if (targets := batch.get("shift_labels")) is not None:
        return targets  # type: ignore[no-any-return]
    labels = batch.get("labels")
    return None if labels is None else pad(labels, (0, 1), value=IGNORE_INDEX)[:, 1:]


def _loss_arguments(
    labels: Tensor, count: Any, part: Callable[[Tensor], Tensor], sequence: ShardedSequence
) -> dict[str, Any]:
    """Return the arguments that a model computes its loss from."""
    count = (labels != IGNORE_INDEX).sum().clamp(min=1) if count is None else torch.as_tensor(count)
    return {
        "labels": GuardedLabels.of(part(labels), sequence=sequence),
        "shift_labels": ShardLabels.of(part(labels), sequence=sequence),
        "num_items_in_batch": ItemCount.of(per_rank(count.to(labels.device), sequence.ranks), sequence=sequence),
    }


def per_rank(count: Any, ranks: int) -> Any:
    """Return a count divided by ranks. A tensor is in float32: the default dtype of PyTorch may round it."""
    return (count.float() if isinstance(count, Tensor) else count) / ranks


def _positions(batch: Mapping[str, Any]) -> tuple[Tensor, Mask]:
    """Return the position of each token, and the mask of packed sequences."""
    ids = batch["input_ids"]
    positions = batch.get("position_ids")
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
    _check_whole(batch)
    if batch.get("use_cache"):
        fix = "leave it out; hf.prefill fills a cache"
        raise ArgumentError("shard_batch use_cache", "False, as it returns", "True", fix)
    images = any(name in IMAGE_INPUTS and x is not None for name, x in batch.items())
    for name, x in batch.items():
        is_known = name in (*accepted, *PACKING_ARGUMENTS, *IMAGE_INPUTS) or name == "use_cache"
        if not is_known:
            fix = "leave it out, or pass it to the model yourself if it has no value per token"
            fix += "; else train on one device"
            raise ArgumentError("shard_batch", f"some of {', '.join(accepted)}", repr(name), fix)
        packs = images and x is not None and name in ("position_ids", *PACKING_ARGUMENTS)
        if packs:
            fix = "leave it out: the model computes positions; train packed rows without images"
            raise ArgumentError(f"shard_batch {name}", "no positions or packing beside images", short(x), fix)
    subject = "shard_batch input_ids"
    ids = batch.get("input_ids")
    if not (isinstance(ids, Tensor) and ids.ndim == 2 and not ids.is_floating_point()):
        raise DtypeError(subject, "token ids (batch, length)", type_and_shape(ids), USE_TOKENIZER)
    shape = (ids.shape[0], ids.shape[1])
    if shape[1] < ranks or shape[0] == 0:
        given, fix = f"{shape} on {ranks} ranks", "use longer sequences, or fewer ranks"
        raise ShapeError(subject, "a sequence, and at least one token per rank", given, fix)
    for name in TOKEN_ARGUMENTS:
        x = batch.get(name)
        shapes: set[Any] = {shape, (1, shape[1])} if name == "position_ids" else {shape}
        x_shape = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
        if x is not None and x_shape not in shapes:
            fix = "pass one value per token"
            fix += "; 4D and additive masks are not supported" if name == "attention_mask" else ""
            raise ShapeError(f"shard_batch {name}", f"shape {shape}", str(x_shape), fix)
    count = batch.get("num_items_in_batch")
    is_number = count is None or isinstance(count, Real) or (isinstance(count, Tensor) and count.numel() == 1)
    if not is_number:
        fix = "count the labels to learn, or leave it out"
        raise DtypeError("shard_batch num_items_in_batch", "a number", short(count), fix)
    _check_padding(batch)
    _check_shifts(batch)
    positions = batch.get("position_ids")
    is_equal = positions is None or torch.equal(positions.diff(), positions[:1].expand_as(positions).diff())
    if not is_equal:
        fix = "pack all rows of a batch alike, or into one row"
        raise MaskError("shard_batch position_ids", "the same positions in each row", "rows that differ", fix)


def _check_whole(batch: Mapping[str, Any]) -> None:
    """Raise if an entry is a shard already."""
    cut = next((name for name, x in batch.items() if isinstance(x, ShardTensor)), None)
    if cut is not None:
        fix = "call shard_batch once; hf.on_mesh and hf.prepare call it themselves"
        raise ArgumentError(f"shard_batch {cut}", "the whole batch", "what shard_batch has returned", fix)


def _check_shifts(batch: Mapping[str, Any]) -> None:
    """Raise if `labels` repeat the ids of the next tokens, or `shift_labels` the ids of the tokens themselves."""
    ids = batch["input_ids"]
    labels = batch.get("labels")
    targets = batch.get("shift_labels")
    shifted = labels is not None and _repeats(labels[:, :-1], ids[:, 1:]) and not _repeats(labels, ids)
    if shifted:
        given = "those of the next tokens, which would be shifted twice"
        fix = "pass them as shift_labels, or as they are"
        raise ArgumentError("shard_batch labels", "the label of each token itself", given, fix)
    unshifted = targets is not None and _repeats(targets, ids) and not _repeats(targets[:, :-1], ids[:, 1:])
    if unshifted:
        given, fix = "those of the tokens themselves", "pass them as labels, which shard_batch shifts"
        raise ArgumentError("shard_batch shift_labels", "the label of the next token", given, fix)


def _repeats(labels: Tensor, ids: Tensor) -> bool:
    """Return whether there are labels to learn, and all are equal to the ids in the same places."""
    counted = labels != IGNORE_INDEX
    return bool(counted.any()) and torch.equal(labels[counted], ids[counted])


def _check_padding(batch: Mapping[str, Any]) -> None:
    """Raise unless padding is on the right and without labels. A causal mask hides such padding from all tokens."""
    mask = batch.get("attention_mask")
    if mask is None:
        return
    if not bool((mask == mask.bool()).all()):
        fix = "give packed documents by position_ids"
        raise MaskError("shard_batch attention_mask", "1 for tokens, 0 for padding", "other numbers", fix)
    if bool(mask.all()):
        return
    mask = mask.bool()
    labels = _shift_labels(batch)
    if bool((mask.diff() & mask[:, 1:]).any()):
        fix = "set the tokenizer's padding_side to 'right', or pack sequences by position_ids"
        raise MaskError("shard_batch attention_mask", "padding on the right, if any", "padding before a token", fix)
    if labels is not None and bool(((labels != IGNORE_INDEX) & ~mask).any()):
        fix = f"set them with labels.masked_fill(attention_mask == 0, {IGNORE_INDEX})"
        raise MaskError("shard_batch labels", f"{IGNORE_INDEX} at padding", "labels of padding", fix)


def _check_packing(batch: Mapping[str, Any], documents: Mask) -> None:
    """Raise unless the packing arguments of a collator match `position_ids`."""
    has_positions, has_mask = (batch.get(name) is not None for name in ("position_ids", "attention_mask"))
    expected = documents.document_edges(0, batch["input_ids"].shape[1])
    for name in (name for name in PACKING_ARGUMENTS if batch.get(name) is not None):
        if not has_positions or has_mask:
            given, fix = "attention_mask", "leave attention_mask out"
            if not has_positions:
                given, fix = "no position_ids", "pass the collator's position_ids too, which restart in each sequence"
            raise MaskError(f"shard_batch {name}", "position_ids and no attention_mask", given, fix)
        if name.startswith("cu_seq_lens"):
            edges = torch.as_tensor(batch[name]).flatten().tolist()
            if edges != expected:
                fix = "pass the lengths and the position_ids of one collator"
                raise MaskError(f"shard_batch {name}", f"{expected}, as in position_ids", str(edges), fix)
