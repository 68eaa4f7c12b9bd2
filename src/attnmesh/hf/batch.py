"""Training on shards: each rank's tokens of a batch, with labels and positions as they are in the whole."""

from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from attnmesh.agree import agreed, fingerprints, told
from attnmesh.errors import ArgumentError, DtypeError, MaskError, ShapeError
from attnmesh.layout import Layout, Zigzag, check_layout
from attnmesh.mask import Documents, Full, Mask
from attnmesh.mesh import Mesh
from attnmesh.shards import shard

IGNORED = -100
"""The label of what is not to be learned, as in transformers."""

KNOWN = ("input_ids", "labels", "shift_labels", "attention_mask", "position_ids", "num_items_in_batch")


@dataclass(frozen=True)
class Shards:
    """Whose tokens a forward pass is given. It travels as the model's `attention_mask`, to what attnmesh makes of it.

    So it reaches every layer, and a model whose attention is another's, which would take a shard for the whole,
    stumbles over it at once.
    """

    mesh: DeviceMesh | None
    layout: Layout
    length: int
    """Tokens of all ranks."""
    shape: tuple[int, ...]
    """(batch, tokens here), as the mask would have it."""
    documents: Mask = Full()
    start: int = 0
    """Tokens before these, in a cache."""
    real: Tensor | None = None
    """(batch, tokens of all ranks), False for padding; None if there is none."""

    @property
    def on_top(self) -> bool:
        """Whether the cache is looked at, for the tokens before these or for padding."""
        return self.start > 0 or self.real is not None

    ndim = 3
    """Neither a table of padding nor a whole mask: transformers hands it on as it is."""


def shard_batch(
    batch: Mapping[str, Any], mesh: DeviceMesh | None, layout: Layout = Zigzag(), **more: Any
) -> dict[str, Any]:
    """This rank's share of a batch, as the arguments of a model: `model(**shard_batch(batch, mesh)).loss.backward()`.

    Every rank of the mesh passes the same batch: `input_ids` (batch, length), and if it is to be learned from, `labels`
    or `shift_labels`, `attention_mask` of right padding, `position_ids` (of packed sequences they start again). Labels
    are shifted before they are cut. The mean of the loss over all ranks is the loss on one device, and so are means of
    gradients, as DDP and FSDP take them. The model has to have `attn_implementation="attnmesh"`.

    >>> part = shard_batch({"input_ids": torch.arange(6)[None], "labels": torch.arange(6)[None]}, None)
    >>> part["shift_labels"].tolist(), float(part["num_items_in_batch"])
    ([[1, 2, 3, 4, 5, -100]], 5.0)
    """
    here = Mesh.of(mesh)

    def look() -> dict[str, Any]:
        check_layout("shard_batch layout", layout)
        whole = _joined(batch, more)
        _check(whole, here.shape.ranks)
        return whole

    batch = agreed(here, look, lambda found: told("shard_batch", **{"layout": layout, **_described(found)}))
    device = batch["input_ids"].device
    positions, documents = _positions(batch)
    whole = {"input_ids": batch["input_ids"], "position_ids": positions}
    labels = _shifted(batch)
    if labels is not None:
        whole["shift_labels"] = labels
    part: dict[str, Any] = {name: shard(x, mesh, layout=layout, dim=1) for name, x in whole.items()}
    if labels is not None:
        count = batch.get("num_items_in_batch")
        count = (labels != IGNORED).sum().clamp(min=1) if count is None else torch.as_tensor(count)
        part |= {"labels": part["shift_labels"], "num_items_in_batch": count.to(device) / here.shape.ranks}
    shards = Shards(mesh, layout, batch["input_ids"].shape[1], tuple(part["input_ids"].shape), documents)
    return {**part, "use_cache": False, "attention_mask": shards}


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
        raise ArgumentError("shard_batch", f"some of {', '.join(KNOWN)}", f"{unknown[0]!r}", fix)
    ids = batch.get("input_ids")
    if not isinstance(ids, Tensor) or ids.ndim != 2 or ids.is_floating_point():
        given = f"{ids.dtype} {tuple(ids.shape)}" if isinstance(ids, Tensor) else type(ids).__name__
        raise DtypeError("shard_batch input_ids", "token ids (batch, length)", given, "tokenize with return_tensors")
    if ids.shape[1] < ranks or not ids.shape[0]:
        given, fix = f"{tuple(ids.shape)} on {ranks} ranks", "use longer sequences, or fewer ranks"
        raise ShapeError("shard_batch input_ids", "a sequence, and at least one token a rank", given, fix)
    for name in KNOWN[1:5]:
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
