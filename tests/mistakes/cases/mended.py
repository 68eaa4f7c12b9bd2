"""What users of two ranks do once they have read the fix, by the mistake: what they get, and what one device gets."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.functional import scaled_dot_product_attention

import attnmesh as am
import attnmesh.hf as hf
from tests.mistakes.cases import attention
from tests.mistakes.cases import batch as batches
from tests.mistakes.cases import loss as losses
from tests.support.models import families
from tests.support.models.families import small_llama

Q, K, V = attention.whole()
TOKENS, LAYOUT = attention.TOKENS, attention.ZIGZAG
CAUSAL = torch.ones(TOKENS, TOKENS).tril().bool()
IDS = families.prompt(12)
Pair = tuple[Tensor, Tensor]


def dense(visible: Tensor | None = CAUSAL, **options: Any) -> Tensor:
    return scaled_dot_product_attention(Q, K, V, visible, enable_gqa=True, **options)


def on_mesh(mesh: DeviceMesh, parts: list[Tensor], layout: Any = LAYOUT, **options: Any) -> Tensor:
    """Return attention of shards, gathered."""
    out = am.attention(*parts, mesh=mesh, layout=layout, **options)
    return am.unshard(out, mesh, layout=layout, mask=options.get("mask"))


def of_documents(mesh: DeviceMesh) -> Pair:
    mask = attention.DOCUMENTS
    within = torch.block_diag(torch.ones(20, 20), torch.ones(12, 12)).bool()
    return on_mesh(mesh, attention.parts(mesh, "auto", mask=mask), "auto", mask=mask), dense(CAUSAL & within)


def from_flash(mesh: DeviceMesh) -> Pair:
    parts = (am.shard(x.transpose(1, 2), mesh, layout=LAYOUT, dim=1) for x in (Q, K, V))
    return on_mesh(mesh, [x.transpose(1, 2) for x in parts]), dense()


def with_key_lengths(mesh: DeviceMesh) -> Pair:
    seen = torch.arange(TOKENS) < 20
    lengths = torch.tensor([20])
    return on_mesh(mesh, attention.parts(mesh), mask=am.Full(), key_lengths=lengths), dense(seen.expand(TOKENS, -1))


def last(cache: am.KVCache) -> Pair:
    return am.decode(Q[:, :, -2:], cache), dense()[:, :, -2:]


def appended(mesh: DeviceMesh, before: int = 0) -> Pair:
    """Append tokens alike on all ranks, and the others as shards with their positions."""
    cache = attention.cache(mesh, 0)
    cache.append(K[:, :, :before], V[:, :, :before])
    rest = [am.shard(x[:, :, before:], mesh, layout=LAYOUT) for x in (K, V)]
    positions = am.shard(torch.arange(before, TOKENS), mesh, layout=LAYOUT, dim=0)
    cache.append_shard(*rest, positions)
    return last(cache)


def reserved(mesh: DeviceMesh) -> Pair:
    cache = attention.cache(mesh, capacity=16)
    cache.reserve(TOKENS)
    cache.append(K, V)
    return last(cache)


def merged(mesh: DeviceMesh) -> Pair:
    parts = [x.chunk(2, 2)[dist.get_rank()] for x in (K, V)]
    return am.merge_across(am.attend(Q, *parts), mesh["queries"]).out, dense(None)


def generated(mesh: DeviceMesh) -> Pair:
    found = hf.generate(small_llama(), IDS, mesh=mesh, max_new_tokens=3)
    return found, small_llama("sdpa").generate(IDS, max_new_tokens=3)


def out_of_training(mesh: DeviceMesh) -> Pair:
    trained = small_llama().train()
    trained.gradient_checkpointing_enable()
    found = hf.generate(trained.eval(), IDS, mesh=mesh, max_new_tokens=3)
    return found, small_llama("sdpa").generate(IDS, max_new_tokens=3)


def learned(mesh: DeviceMesh, labels: Tensor, whole: dict[str, Any], /, **batch: Any) -> Pair:
    """Return the loss of a batch on the mesh, as ranks average it, and that of the labels on one device."""
    found = small_llama()(**hf.shard_batch({"input_ids": IDS} | batch, mesh)).loss.detach()
    dist.all_reduce(found)
    return found / 2, small_llama("sdpa")(IDS, labels=labels, **whole).loss.detach()


def at_padding(mesh: DeviceMesh) -> Pair:
    mask = batches.PADDED
    labels = IDS.masked_fill(mask == 0, -100)
    return learned(mesh, labels, {"attention_mask": mask}, attention_mask=mask, labels=labels)


def packed(mesh: DeviceMesh) -> Pair:
    labels = IDS.masked_fill(batches.Packing == 0, -100)
    found, _ = learned(mesh, labels, {}, labels=labels, position_ids=batches.Packing)
    apart = [small_llama("sdpa")(ids, labels=ids).loss.detach() for ids in (IDS[:, :5], IDS[:, 5:])]
    return found, (4 * apart[0] + 6 * apart[1]) / 10


def mean(mesh: DeviceMesh) -> Pair:
    part = hf.shard_batch({"input_ids": IDS, "labels": losses.LABELS}, mesh, am.Contiguous())
    logits = small_llama()(**part).logits[0]
    found = hf.mean_over_mesh(losses.losses(logits, part), losses.learned(part), mesh)
    return found.detach(), small_llama("sdpa")(IDS, labels=losses.LABELS).loss.detach()


MENDED: dict[str, Callable[[DeviceMesh], Pair]] = {
    "cuts shards in one layout and names another": lambda mesh: (
        on_mesh(mesh, attention.parts(mesh, am.Contiguous()), am.Contiguous()),
        dense(),
    ),
    "leaves layout= out on several ranks": lambda mesh: (on_mesh(mesh, attention.parts(mesh)), dense()),
    'shards with layout="auto" and no mask': of_documents,
    "passes (batch, length, heads, dim)": from_flash,
    "passes the length of the shard as length=": lambda mesh: (
        on_mesh(mesh, attention.parts(mesh), length=TOKENS),
        dense(),
    ),
    "passes flash-attn's window_size=": lambda mesh: (
        on_mesh(mesh, attention.parts(mesh), mask=am.Window(3)),
        dense(CAUSAL & ~CAUSAL.tril(-4)),
    ),
    "passes key_lengths= of its own shard's keys": with_key_lengths,
    "gathers logits to take their loss": lambda mesh: (
        am.unshard(attention.parts(mesh)[0].requires_grad_().detach(), mesh, layout=LAYOUT),
        Q,
    ),
    "appends its shard as if it were the next tokens": appended,
    "counts the positions of a shard from 0": lambda mesh: appended(mesh, 10),
    "appends beyond the capacity": reserved,
    "decodes before it appends": lambda mesh: last(attention.cache(mesh, TOKENS)),
    "merges over a mesh of several axes": merged,
    "cut a prompt before `hf.generate`": generated,
    "generate in training with gradient checkpointing": out_of_training,
    "pass a batch that `shard_batch` has cut already": lambda mesh: learned(mesh, IDS, {}, labels=IDS),
    "pass labels that are shifted already": lambda mesh: learned(mesh, IDS, {}, shift_labels=batches.NEXT),
    "learn padding": at_padding,
    "number packed documents in `attention_mask`": packed,
    "take `cross_entropy` with its mean": mean,
}
"""What follows the fix of a mistake, by what the user did."""
