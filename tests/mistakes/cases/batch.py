"""Mistakes in batches that are passed to `hf.shard_batch`."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import attnmesh.hf as hf
from attnmesh import errors
from tests.mistakes.table import Mistake
from tests.support.models.families import prompt

LENGTH = 12
IDS = prompt(LENGTH)
NEXT = torch.nn.functional.pad(IDS, (0, 1), value=-100)[:, 1:]
PADDED = (torch.arange(LENGTH) < 9)[None].long()


def row(what: str, error: type[Exception], says: str, fix: str, **batch: Any) -> Mistake:
    """Return a row of a batch that is passed to `shard_batch`."""
    entries: dict[str, Any] = {"input_ids": IDS, **batch}
    return Mistake(what, lambda mesh: hf.shard_batch(entries, mesh), error, says, fix)


def of_rank() -> Tensor:
    return prompt(LENGTH, seed=dist.get_rank())


def two_axes(mesh: DeviceMesh) -> Any:
    world = torch.distributed.device_mesh.DeviceMesh("cpu", [[0, 1]], mesh_dim_names=("dp", "cp"))
    return hf.shard_batch({"input_ids": IDS}, world)


def twice(mesh: DeviceMesh) -> Any:
    return hf.shard_batch(hf.shard_batch({"input_ids": IDS}, mesh), mesh)


Batch, Packing = {"input_ids": IDS}, torch.cat((torch.arange(5), torch.arange(7)))[None]

CASES = [
    Mistake(
        "pass each rank a batch of its own",
        lambda mesh: hf.shard_batch({"input_ids": of_rank()}, mesh),
        errors.MeshError,
        "shard_batch: expected the same call on every rank",
        "call it alike on all ranks of the mesh, with the same inputs",
    ),
    Mistake(
        "pass a batch that `shard_batch` has cut already",
        twice,
        errors.ArgumentError,
        "shard_batch input_ids: expected the whole batch, given what shard_batch has returned",
        "call shard_batch once; hf.on_mesh and hf.prepare call it themselves",
    ),
    Mistake(
        "pass the list of a dataset's rows",
        lambda mesh: hf.shard_batch([Batch], mesh),  # type: ignore[arg-type]
        errors.DtypeError,
        "shard_batch: expected a mapping of names to tensors, given list",
        "pass the collator's output, or a dict",
    ),
    Mistake(
        "pass a mesh of axes `dp` and `cp`",
        two_axes,
        errors.MeshError,
        "mesh: expected one axis or more of heads, queries, keys, each once, given axes ('dp', 'cp')",
        'slice the axis that shares a sequence, as mesh["cp"]',
    ),
    Mistake(
        'pass `layout="zigzag"`',
        lambda mesh: hf.shard_batch(Batch, mesh, "zigzag"),
        errors.LayoutError,
        'shard_batch layout: expected "auto", Contiguous',
        "make one by calling it, as in Zigzag()",
    ),
    row(
        "pass labels that are shifted already",
        errors.ArgumentError,
        "shard_batch labels: expected the label of each token itself, given those of the next tokens",
        "pass them as shift_labels",
        labels=NEXT,
    ),
    row(
        "pass the ids as `shift_labels`",
        errors.ArgumentError,
        "shard_batch shift_labels: expected the label of the next token, given those of the tokens themselves",
        "pass them as labels, which shard_batch shifts",
        shift_labels=IDS,
    ),
    row(
        "number packed documents in `attention_mask`",
        errors.MaskError,
        "shard_batch attention_mask: expected 1 for tokens, 0 for padding, given other numbers",
        "give packed documents by position_ids",
        attention_mask=1 + (torch.arange(LENGTH) > 4)[None].long(),
    ),
    row(
        "pass an additive mask, of 0 and minus infinity",
        errors.MaskError,
        "shard_batch attention_mask: expected 1 for tokens, 0 for padding, given other numbers",
        "give packed documents by position_ids",
        attention_mask=torch.where(PADDED.bool(), 0.0, -torch.inf),
    ),
    row(
        "pad on the left",
        errors.MaskError,
        "shard_batch attention_mask: expected padding on the right, if any, given padding before a token",
        "set the tokenizer's padding_side to 'right'",
        attention_mask=PADDED.flip(1),
    ),
    row(
        "learn padding",
        errors.MaskError,
        "shard_batch labels: expected -100 at padding, given labels of padding",
        "labels.masked_fill(attention_mask == 0, -100)",
        attention_mask=PADDED,
        labels=IDS,
    ),
    row(
        "pass a mask of 4 dims",
        errors.ShapeError,
        "shard_batch attention_mask: expected shape (1, 12), given (1, 1, 12, 12)",
        "4D and additive masks are not supported",
        attention_mask=torch.ones(1, 1, LENGTH, LENGTH),
    ),
    row(
        "pass labels of another length",
        errors.ShapeError,
        "shard_batch labels: expected shape (1, 12), given (1, 11)",
        "pass one value per token",
        labels=IDS[:, 1:],
    ),
    row(
        "pass logits as ids",
        errors.DtypeError,
        "shard_batch input_ids: expected token ids (batch, length), given torch.float32",
        'tokenizer(text, return_tensors="pt")["input_ids"]',
        input_ids=torch.randn(1, LENGTH),
    ),
    row(
        "pass fewer tokens than ranks",
        errors.ShapeError,
        "shard_batch input_ids: expected a sequence, and at least one token per rank, given (1, 1) on 2 ranks",
        "use longer sequences, or fewer ranks",
        input_ids=IDS[:, :1],
    ),
    row(
        "pack each row of a batch in its own way",
        errors.MaskError,
        "shard_batch position_ids: expected the same positions in each row, given rows that differ",
        "pack all rows of a batch alike, or into one row",
        input_ids=IDS.expand(2, -1),
        position_ids=torch.cat((Packing, torch.arange(LENGTH)[None])),
    ),
    row(
        "pass `cu_seq_lens_q` without `position_ids`",
        errors.MaskError,
        "shard_batch cu_seq_lens_q: expected position_ids and no attention_mask, given no position_ids",
        "pass the collator's position_ids too",
        cu_seq_lens_q=torch.tensor([0, 5, LENGTH]),
    ),
    row(
        "pass `cu_seq_lens_q` of other documents than `position_ids`",
        errors.MaskError,
        "shard_batch cu_seq_lens_q: expected [0, 5, 12], as in position_ids, given [0, 6, 12]",
        "pass the lengths and the position_ids of one collator",
        position_ids=Packing,
        cu_seq_lens_q=torch.tensor([0, 6, LENGTH]),
    ),
    row(
        "pass `window_size=`",
        errors.ArgumentError,
        "shard_batch: expected some of input_ids, labels",
        "leave it out",
        window_size=8,
    ),
    row(
        "pass `use_cache=True`",
        errors.ArgumentError,
        "shard_batch use_cache: expected False, as it returns, given True",
        "leave it out; hf.prefill fills a cache",
        use_cache=True,
    ),
]
