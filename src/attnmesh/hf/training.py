"""Training on shards: each rank's tokens of a batch, with labels and positions as they are in the whole."""

from collections.abc import Callable, Mapping
from numbers import Real
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from attnmesh.attention.sharding import shard
from attnmesh.comm.consensus import describe_call, run_agreed
from attnmesh.core.digest import fingerprints
from attnmesh.core.layout import Layout, Zigzag, check_layout
from attnmesh.core.mask import Documents, Full, Mask
from attnmesh.errors import ArgumentError, DtypeError, MaskError, ShapeError
from attnmesh.hf.shards import ItemCount, OtherLabels, ShardIds, ShardLabels, ShardMask, ShardPositions, Shards
from attnmesh.mesh.axes import Mesh

IGNORED = -100
"""The label of what is not to be learned, as in transformers."""

TOKENS = ("input_ids", "labels", "shift_labels", "attention_mask", "position_ids")
"""Arguments with a number for each token."""

PACKING = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")
"""Arguments of collators that pack sequences. They say what `position_ids` say, and go no further."""

KNOWN = (*TOKENS, "num_items_in_batch", *PACKING)


def shard_batch(
    batch: Mapping[str, Any], mesh: DeviceMesh | None, layout: Layout = Zigzag(), **more: Any
) -> dict[str, Any]:
    """Return this rank's share of a batch, as arguments of a model: `model(**shard_batch(batch, mesh)).loss`.

    The model has to have `attn_implementation="attnmesh"`. The mean of the loss over all ranks is the loss on one
    device. So are the means of gradients, as DDP and FSDP take them. `Trainer` may pass its own `num_items_in_batch` to
    the model, which counts the tokens of all ranks.

    Args:
        batch: The same batch on every rank: `input_ids` (batch, length). To learn from it, `labels` or `shift_labels`.
            `attention_mask` may have padding on the right. `position_ids` of packed sequences begin again in each;
            what else padding-free collators pass is checked against them.
        mesh: The mesh that shares the sequence, or None for one device.
        layout: The tokens that each rank gets.
        more: More of the batch, such as `num_items_in_batch`.

    Returns:
        Tensors of this rank's tokens. Labels are shifted before they are cut.

    Raises:
        InputError: The batch is not one of these, or differs between ranks.

    >>> part = shard_batch({"input_ids": torch.arange(6)[None], "labels": torch.arange(6)[None]}, None)
    >>> part["shift_labels"].tolist(), float(part["num_items_in_batch"])
    ([[1, 2, 3, 4, 5, -100]], 5.0)
    """
    here = Mesh.of(mesh)

    def look() -> tuple[dict[str, Any], Tensor, Mask]:
        check_layout("shard_batch layout", layout)
        whole = _joined(batch, more)
        _check(whole, here.shape.ranks)
        positions, documents = _positions(whole)
        _check_packing(whole, documents)
        return whole, positions, documents

    batch, positions, documents = run_agreed(
        here, look, lambda found: describe_call("shard_batch", **{"layout": layout, **_described(found[0])})
    )
    length, labels = batch["input_ids"].shape[1], _shifted(batch)
    parts = [layout.positions(length, here.shape.ranks, shard) for shard in range(here.shape.ranks)]
    learned = {int((labels[:, part.to(labels.device)] != IGNORED).sum()) for part in parts if labels is not None}
    shards = Shards(mesh, layout, length, documents, even=len(learned) < 2)

    def own(x: Tensor) -> Tensor:
        return shard(x, mesh, layout=layout, dim=1)

    counted = batch["input_ids"] if batch.get("position_ids") is None else None
    mask = batch.get("attention_mask")
    mask = torch.ones_like(batch["input_ids"]) if mask is None else mask
    part = {
        "input_ids": ShardIds.of(own(batch["input_ids"]), shards),
        "position_ids": ShardPositions.within(own(positions), shards, int(positions.max()), counted),
        "attention_mask": ShardMask.of(own(mask), shards),
        "use_cache": False,
    }
    return part | _learned(batch, labels, own, shards)


def _learned(
    batch: Mapping[str, Any], labels: Tensor | None, own: Callable[[Tensor], Tensor], shards: Shards
) -> dict[str, Any]:
    """Return what a loss is made from, if the batch has labels."""
    if labels is None:
        return {}
    count = batch.get("num_items_in_batch")
    count = (labels != IGNORED).sum().clamp(min=1) if count is None else torch.as_tensor(count)
    return {
        "labels": OtherLabels.of(own(labels), shards),
        "shift_labels": ShardLabels.of(own(labels), shards),
        "num_items_in_batch": ItemCount.of(count.to(labels.device) / shards.ranks, shards),
    }


def _described(batch: Mapping[str, Any]) -> dict[str, Any]:
    """A batch, as ranks tell each other of it."""
    tensors = {name: x for name, x in batch.items() if isinstance(x, Tensor)}
    return {**fingerprints(tensors), **{name: x for name, x in batch.items() if name not in tensors}}


def _joined(batch: object, more: Mapping[str, Any]) -> dict[str, Any]:
    if not isinstance(batch, Mapping):
        given, fix = type(batch).__name__, "pass what a collator made, or a dict"
        raise DtypeError("shard_batch", "a mapping of names to tensors", given, fix)
    return {**batch, **more}


def _shifted(batch: Mapping[str, Any]) -> Tensor | None:
    """What each token is to foretell: the token after it in the whole sequence."""
    if (given := batch.get("shift_labels")) is not None:
        return given  # type: ignore[no-any-return]
    labels = batch.get("labels")
    return None if labels is None else torch.nn.functional.pad(labels, (0, 1), value=IGNORED)[:, 1:]


def _positions(batch: Mapping[str, Any]) -> tuple[Tensor, Mask]:
    """Where each token stands for rotary embeddings, and the sequences that are packed."""
    ids = batch["input_ids"]
    positions = batch.get("position_ids")
    if positions is None:
        return torch.arange(ids.shape[1], device=ids.device).expand_as(ids), Full()
    positions = positions.expand_as(ids)
    starts = (positions[0].diff() != 1).nonzero().flatten() + 1
    if not len(starts) or batch.get("attention_mask") is not None:  # with a mask given, transformers packs nothing
        return positions, Full()
    edges = torch.nn.functional.pad(starts.cpu(), (1, 1))
    edges[-1] = ids.shape[1]
    return positions, Documents(edges.diff().tolist())


def _check(batch: Mapping[str, Any], ranks: int) -> None:
    if unknown := [name for name in batch if name not in KNOWN]:
        fix = "leave it out, or pass it to the model yourself if it does not go by tokens"
        raise ArgumentError(
            "shard_batch", f"some of {', '.join((*TOKENS, 'num_items_in_batch'))}", f"{unknown[0]!r}", fix
        )
    ids = batch.get("input_ids")
    if not isinstance(ids, Tensor) or ids.ndim != 2 or ids.is_floating_point():
        given = f"{ids.dtype} {tuple(ids.shape)}" if isinstance(ids, Tensor) else type(ids).__name__
        raise DtypeError("shard_batch input_ids", "token ids (batch, length)", given, "tokenize with return_tensors")
    if ids.shape[1] < ranks or not ids.shape[0]:
        given, fix = f"{tuple(ids.shape)} on {ranks} ranks", "use longer sequences, or fewer ranks"
        raise ShapeError("shard_batch input_ids", "a sequence, and at least one token a rank", given, fix)
    for name in TOKENS[1:]:
        x = batch.get(name)
        shapes = [tuple(ids.shape)] + [(1, ids.shape[1])] * (name == "position_ids")
        if x is not None and (not isinstance(x, Tensor) or tuple(x.shape) not in shapes):
            given = str(tuple(x.shape)) if isinstance(x, Tensor) else type(x).__name__
            fix = "pass one of each token" + ("; a 4D or additive mask cannot be served" * (name == "attention_mask"))
            raise ShapeError(f"shard_batch {name}", f"shape {tuple(ids.shape)}", given, fix)
    count = batch.get("num_items_in_batch")
    if count is not None and not (isinstance(count, Tensor) and count.numel() == 1) and not isinstance(count, Real):
        given, fix = repr(count), "count the labels that are to be learned, or leave it out"
        raise DtypeError("shard_batch num_items_in_batch", "a number", given, fix)
    _check_padding(batch)
    positions = batch.get("position_ids")
    if positions is not None and not torch.equal(positions.diff(), positions[:1].expand_as(positions).diff()):
        fix = "pack the rows of a batch alike, or into one row"
        raise MaskError("shard_batch position_ids", "the same positions in each row", "rows that differ", fix)


def _check_packing(batch: Mapping[str, Any], documents: Mask) -> None:
    """Raise unless what a collator says of packed sequences is what `position_ids` say."""
    given = {name: batch[name] for name in PACKING if batch.get(name) is not None}
    fix = "pass the collator's position_ids too, which begin again in each sequence"
    if given and (batch.get("position_ids") is None or batch.get("attention_mask") is not None):
        raise MaskError(
            f"shard_batch {next(iter(given))}", "position_ids beside it, and no attention_mask", "none", fix
        )
    length = batch["input_ids"].shape[1]
    for name in ("cu_seq_lens_q", "cu_seq_lens_k"):
        edges = torch.as_tensor(given[name]).flatten().tolist() if name in given else None
        expected = [0, *documents.ends] if documents.ends else [0, length]
        if edges is not None and edges != expected:
            raise MaskError(f"shard_batch {name}", f"{expected}, as position_ids begin", str(edges), fix)


def _check_padding(batch: Mapping[str, Any]) -> None:
    """Right padding is seen by nobody under a causal mask, if nothing is learned from it."""
    mask = batch.get("attention_mask")
    if mask is None or bool(mask.all()):
        return
    if bool((mask.bool().diff() & mask.bool()[:, 1:]).any()):
        fix = "set the tokenizer's padding_side to 'right', or pack sequences by position_ids"
        raise MaskError("shard_batch attention_mask", "padding on the right, if any", "padding before a token", fix)
    labels = _shifted(batch)
    if labels is not None and bool(((labels != IGNORED) & ~mask.bool()).any()):
        fix = f"set them to {IGNORED}: labels.masked_fill(attention_mask == 0, {IGNORED})"
        raise MaskError("shard_batch labels", f"{IGNORED} where there is padding", "labels of padding", fix)
