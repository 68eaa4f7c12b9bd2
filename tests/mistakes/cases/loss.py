"""Mistakes in a loss that is computed from a shard's logits. Ranks have 2 and 6 labels."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.functional import cross_entropy

import attnmesh as am
import attnmesh.hf as hf
from attnmesh import errors
from tests.mistakes.table import Mistake
from tests.support.models import families
from tests.support.models.families import prompt

IDS = prompt(12)
LABELS = IDS.masked_fill((torch.arange(12) >= 3) & (torch.arange(12) < 7), -100)
COUNT = "or call hf.mean_over_mesh(losses, mask, mesh)"
WEIGHED = "attnmesh.hf num_items_in_batch: expected a loss that weighs the tokens of all ranks equally, given"
WEIGHTS = f"{WEIGHED} a mean"
SHIFTED = "attnmesh.hf labels: expected tokens that are shifted before they are cut, given a shard without its first"
DIVISOR = "attnmesh.hf num_items_in_batch: expected the count of the batch, given"


def row(
    what: str, says: str, fix: str, loss: Callable[[Tensor, Any], Tensor], error: type[Exception] = errors.ArgumentError
) -> Mistake:
    """Return a row of a loss, which is given logits and what `shard_batch` returned."""

    def act(mesh: DeviceMesh) -> Any:
        part = hf.shard_batch({"input_ids": IDS, "labels": LABELS}, mesh, am.Contiguous())
        return loss(families.model("llama", "attnmesh", num_hidden_layers=1)(**part).logits[0], part)

    return Mistake(what, act, error, says, fix)


def losses(logits: Tensor, part: Any, reduction: str = "none") -> Tensor:
    return cross_entropy(logits, part["shift_labels"][0], reduction=reduction)


def learned(part: Any) -> Tensor:
    return part["shift_labels"][0] != -100


def log_probabilities(logits: Tensor, part: Any) -> Tensor:
    return at_labels(logits.log_softmax(-1), part)


def at_labels(values: Tensor, part: Any) -> Tensor:
    targets = part["shift_labels"][0].clamp(min=0)[:, None]
    return values.gather(-1, targets)[:, 0]


CASES = [
    row(
        "shift `logits[:-1]` and `input_ids[1:]` on each shard",
        SHIFTED,
        "pass labels to hf.shard_batch",
        lambda logits, part: cross_entropy(logits[:-1], part["input_ids"][:, 1:][0]),
    ),
    row(
        "shift `shift_labels` again",
        SHIFTED,
        "compare logits and shift_labels of equal places",
        lambda logits, part: cross_entropy(logits[:-1], part["shift_labels"][..., 1:][0]),
    ),
    row("take `cross_entropy` with its mean", WEIGHTS, COUNT, lambda logits, part: losses(logits, part, "mean")),
    row(
        "weigh classes in `cross_entropy` with its mean",
        f"{WEIGHTS} over one rank's tokens by weights of classes",
        COUNT,
        lambda logits, part: cross_entropy(logits, part["shift_labels"][0], weight=torch.ones(logits.shape[-1])),
    ),
    row(
        "call `backward` on a sum of losses",
        f"{WEIGHED} a sum over one rank's tokens, which nothing divides",
        COUNT,
        lambda logits, part: losses(logits, part, "sum").backward(),
    ),
    row(
        "change each token's loss, as by a power, and take the mean",
        WEIGHTS,
        COUNT,
        lambda logits, part: (losses(logits, part) ** 2 / 2)[learned(part)].mean(),
    ),
    row(
        "take the mean of the largest losses",
        f"{WEIGHED} topk of one rank's tokens",
        COUNT,
        lambda logits, part: losses(logits, part).topk(2).values.mean(),
    ),
    row(
        'take the masked mean of `cross_entropy(reduction="none")`',
        f"{DIVISOR} another tensor",
        COUNT,
        lambda logits, part: (losses(logits, part) * learned(part)).sum() / learned(part).sum(),
        errors.KernelError,
    ),
    row(
        "take the mean of the losses of one's labels",
        WEIGHTS,
        COUNT,
        lambda logits, part: losses(logits, part)[learned(part)].mean(),
    ),
    row(
        "take the mean of `log_softmax` at the labels",
        WEIGHTS,
        COUNT,
        lambda logits, part: -log_probabilities(logits, part)[learned(part)].mean(),
    ),
    row(
        "divide the sum of `log_softmax` at the labels by their number",
        f"{DIVISOR} another tensor",
        COUNT,
        lambda logits, part: -(log_probabilities(logits, part) * learned(part)).sum() / learned(part).sum(),
        errors.KernelError,
    ),
    row(
        "divide the sum by the number of this rank's labels",
        f"{DIVISOR} the labels of one rank",
        COUNT,
        lambda logits, part: losses(logits, part, "sum") / int(learned(part).sum()),
        errors.KernelError,
    ),
    row(
        "divide the sum by the number of all labels",
        f"{DIVISOR} the labels of all ranks, though gradients are averaged over them",
        COUNT,
        lambda logits, part: losses(logits, part, "sum") / 7,
        errors.KernelError,
    ),
    row(
        "take the mean of `logsumexp` less the labels' logits",
        WEIGHTS,
        COUNT,
        lambda logits, part: (logits.logsumexp(-1) - at_labels(logits, part))[learned(part)].mean(),
    ),
    row(
        "add a penalty to each token's loss and take the mean",
        WEIGHTS,
        COUNT,
        lambda logits, part: (losses(logits, part) + logits.logsumexp(-1) ** 2)[learned(part)].mean(),
    ),
    row(
        "average each sequence by its own labels",
        f"{DIVISOR} another tensor",
        COUNT,
        lambda logits, part: (losses(logits, part).sum(-1) / learned(part).sum(-1)).mean(),
        errors.KernelError,
    ),
    row(
        "leave the mesh out of `mean_over_mesh`",
        "mean_over_mesh mesh: expected one of 2 ranks, as of the values, given one of 1",
        "pass the mesh of shard_batch",
        lambda logits, part: hf.mean_over_mesh(losses(logits, part), learned(part), None),
        errors.MeshError,
    ),
    Mistake(
        "pass the labels to `mean_over_mesh` as the mask",
        lambda mesh: hf.mean_over_mesh(torch.zeros(1, 6), am.shard(LABELS, mesh, layout=am.Zigzag(), dim=1), mesh),
        errors.ArgumentError,
        "mean_over_mesh mask: expected True or 1 for tokens that count, False or 0 for others, given other numbers",
        "pass targets != -100",
    ),
    Mistake(
        "pass `mean_over_mesh` a mask of the whole sequence",
        lambda mesh: hf.mean_over_mesh(torch.zeros(1, 6), LABELS != -100, mesh),
        errors.ShapeError,
        "mean_over_mesh mask: expected a tensor of shape (1, 6), given torch.bool (1, 12)",
        "pass one value for each token",
    ),
    Mistake(
        "take the mean of a batch without labels",
        lambda mesh: hf.mean_over_mesh(torch.zeros(1, 6), torch.zeros(1, 6), mesh),
        errors.ShapeError,
        "mean_over_mesh mask: expected a token that counts on some rank, given none",
        "leave batches without labels out",
    ),
]
