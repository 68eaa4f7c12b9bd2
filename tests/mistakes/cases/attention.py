"""Mistakes at `attention`, `shard`, `unshard`, caches, `decode` and merges."""

from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import attnmesh as am
from attnmesh.errors import DtypeError, KernelError, LayoutError, MaskError, MeshError, ShapeError
from tests.mistakes.table import Mistake

ZIGZAG, TOKENS = am.Zigzag(), 32


def whole(length: int = TOKENS, heads: tuple[int, int, int] = (4, 2, 2)) -> list[Tensor]:
    """Return q, k and v of the whole sequence, equal on all ranks."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, count, length, 8, generator=generator) for count in heads]


def parts(mesh: DeviceMesh, layout: Any = ZIGZAG, **options: Any) -> list[Tensor]:
    """Return this rank's shards of q, k and v."""
    return [am.shard(x, mesh, layout=layout, **options) for x in whole()]


def attend(mesh: DeviceMesh, qkv: list[Tensor], **options: Any) -> None:
    am.attention(*qkv, **{"mesh": mesh, "layout": ZIGZAG} | options)


def attend_transposed(mesh: DeviceMesh) -> None:
    swapped = (x.transpose(1, 2).contiguous() for x in whole())
    attend(mesh, [am.shard(x, mesh, layout=ZIGZAG, dim=1).clone() for x in swapped])


def cache(mesh: DeviceMesh | None, tokens: int = 0, **options: Any) -> am.KVCache:
    sizes: dict[str, Any] = {"batch": 1, "kv_heads": 2, "head_dim": 8, "capacity": 64, "dtype": torch.float32}
    made = am.KVCache(mesh, **sizes | options)
    if tokens:
        made.append(*whole(tokens)[1:])
    return made


def append_shard(mesh: DeviceMesh, positions: Tensor) -> None:
    cache(mesh).append_shard(*parts(mesh)[1:], positions)


def one_query() -> Tensor:
    return whole(1)[0]


def partial() -> am.Partial:
    return am.attend(*whole())


DOCUMENTS = am.Causal() & am.Documents([20, 12])

CASES: list[Mistake] = [
    Mistake(
        "cuts shards in one layout and names another",
        lambda mesh: attend(mesh, parts(mesh, am.Contiguous())),
        LayoutError,
        "attention q: expected a shard of Zigzag(), given one of Contiguous()",
        "pass the layout that am.shard got",
    ),
    Mistake(
        "leaves layout= out on several ranks",
        lambda mesh: attend(mesh, parts(mesh), layout=None),
        LayoutError,
        "expected the layout of the shards of 2 ranks",
        "pass layout=am.Zigzag() if you sharded with",
    ),
    Mistake(
        'shards with layout="auto" and no mask',
        lambda mesh: am.shard(whole()[0], mesh, layout="auto"),
        LayoutError,
        'shard layout: expected mask= beside layout="auto"',
        "pass the mask of the attention to shard, attention and unshard alike",
    ),
    Mistake(
        'shards with layout="auto" for one mask and attends under another',
        lambda mesh: attend(
            mesh, parts(mesh, "auto", mask=DOCUMENTS), layout="auto", mask=am.Full() & am.Documents([20, 12])
        ),
        LayoutError,
        'expected a shard of layout="auto" for Full() & Documents([20, 12])',
        "pass one mask to am.shard and to this call",
    ),
    Mistake(
        "shards a shard again",
        lambda mesh: am.shard(parts(mesh)[0], mesh, layout=ZIGZAG),
        LayoutError,
        "shard: expected a whole tensor, given a shard of this mesh",
        "cut the whole tensor once",
    ),
    Mistake(
        "cuts the heads, with the tokens in another dim",
        lambda mesh: attend(mesh, parts(mesh, dim=1)),
        LayoutError,
        "expected a shard cut along dim 2, given one cut along dim 1",
        "call am.shard with dim=2",
    ),
    Mistake(
        "cuts for one device and attends on a mesh",
        lambda mesh: attend(mesh, [am.shard(x, None, layout=ZIGZAG) for x in whole()]),
        LayoutError,
        "of 2, given shard 0 of 1",
        "call am.shard with the mesh of this call",
    ),
    Mistake(
        "gathers shards in another layout",
        lambda mesh: am.unshard(parts(mesh)[0], mesh, layout=am.Contiguous()),
        LayoutError,
        "unshard: expected a shard of Contiguous(), given one of Zigzag()",
        "pass the layout that am.shard got",
    ),
    Mistake(
        "shards q and passes k and v whole",
        lambda mesh: attend(mesh, [parts(mesh)[0], *whole()[1:]]),
        ShapeError,
        "given 32 queries, 64 keys",
        "shard k and v as q, if they are the whole sequence",
    ),
    Mistake(
        "passes the length of the shard as length=",
        lambda mesh: attend(mesh, parts(mesh), length=TOKENS // 2),
        ShapeError,
        "expected shards of Zigzag() of length 16: [8, 8] tokens by shard, given [16, 16]",
        "correct length",
    ),
    Mistake(
        "passes (batch, length, heads, dim)",
        attend_transposed,
        ShapeError,
        "expected as many queries as keys",
        "pass x.transpose(1, 2)",
    ),
    Mistake(
        "passes a tensor of True and False as the mask",
        lambda mesh: attend(mesh, parts(mesh), mask=torch.ones(TOKENS, TOKENS).tril().bool()),
        MaskError,
        "attention mask: expected Full(), Causal()",
        "say which keys a query sees by position, not with a tensor",
    ),
    Mistake(
        "passes attn_mask= of packed documents",
        lambda mesh: attend(mesh, parts(mesh), attn_mask=torch.ones(TOKENS, TOKENS)),
        KernelError,
        "given attn_mask=a tensor (32, 32)",
        "Causal() & Documents(lengths)",
    ),
    Mistake(
        "counts the documents of its own shard",
        lambda mesh: attend(mesh, parts(mesh), mask=am.Causal() & am.Documents([10, 6])),
        MaskError,
        "expected documents that add up to 32 tokens, given 16 tokens",
        "let Documents(lengths) cover every token",
    ),
    Mistake(
        "asks for is_causal=False without a mask",
        lambda mesh: attend(mesh, parts(mesh), is_causal=False),
        KernelError,
        "given is_causal=False",
        "let mask= say it: am.Causal(), as attention without mask=, or am.Full()",
    ),
    Mistake(
        "passes flash-attn's window_size=",
        lambda mesh: attend(mesh, parts(mesh), window_size=(3, 0)),
        KernelError,
        "given window_size=tuple",
        "pass mask=am.Window(left)",
    ),
    Mistake(
        "passes key_lengths= of its own shard's keys",
        lambda mesh: attend(mesh, parts(mesh), mask=am.Full(), key_lengths=torch.tensor([16 - 4 * mesh.get_rank()])),
        MeshError,
        "attention: expected the same call on every rank",
        "call it alike on all ranks of the mesh",
    ),
    Mistake(
        "gathers logits to take their loss",
        lambda mesh: am.unshard(parts(mesh)[0].requires_grad_(), mesh, layout=ZIGZAG),
        KernelError,
        "unshard: expected a tensor without gradients",
        "keep the loss on the shards",
    ),
    Mistake(
        "decodes before it appends",
        lambda mesh: am.decode(one_query(), cache(mesh)),
        ShapeError,
        "given 1 queries and 0 of 64 tokens in the cache",
        "append before decode",
    ),
    Mistake(
        "appends its shard as if it were the next tokens",
        lambda mesh: cache(mesh).append(*parts(mesh)[1:]),
        LayoutError,
        "append k: expected all tokens, given a shard of 2 ranks",
        "call append_shard with its positions",
    ),
    Mistake(
        "appends its shard after whole tokens of the same shape",
        lambda mesh: cache(mesh, TOKENS // 2).append(*parts(mesh)[1:]),
        LayoutError,
        "append k: expected all tokens, given a shard of 2 ranks",
        "call append_shard with its positions",
    ),
    Mistake(
        "appends shards to a cache without the mesh",
        lambda mesh: cache(None).append(*parts(mesh)[1:]),
        LayoutError,
        "append k: expected all tokens, given a shard of 2 ranks",
        "call append_shard with its positions, on a cache of its mesh",
    ),
    Mistake(
        "appends shards and their positions to a cache without the mesh",
        lambda mesh: cache(None).append_shard(*parts(mesh)[1:], torch.arange(TOKENS // 2)),
        LayoutError,
        "append_shard k: expected all tokens, given a shard of 2 ranks",
        "make the cache with the mesh of am.shard",
    ),
    Mistake(
        "passes whole q, k and v, or calls am.attention in code that has no am.shard",
        lambda mesh: attend(mesh, whole(26)),
        UserWarning,
        "attention: k is the same on all 2 ranks, and counts as 2 shards",
        "pass this rank's shard, as am.shard(k, mesh, layout=layout), if this is the whole sequence",
    ),
    Mistake(
        "gathers a tensor that was not cut",
        lambda mesh: am.unshard(whole()[0], mesh, layout=ZIGZAG),
        UserWarning,
        "unshard: x is the same on all 2 ranks, and counts as 2 shards",
        "leave unshard out if it is whole",
    ),
    Mistake(
        "appends a shard with the positions of another layout",
        lambda mesh: append_shard(mesh, am.shard(torch.arange(TOKENS), mesh, layout=am.Contiguous(), dim=0)),
        LayoutError,
        "append_shard: expected shards of one layout, given k of Zigzag(), v of Zigzag(), positions of Contiguous()",
        "cut them with one layout",
    ),
    Mistake(
        "counts the positions of a shard from 0",
        lambda mesh: append_shard(mesh, torch.arange(TOKENS // 2)),
        LayoutError,
        "expected positions from 0 to 31, each on one rank",
        "counted from the cache's length",
    ),
    Mistake(
        "decodes a query of its own on each rank",
        lambda mesh: am.decode(one_query() + mesh.get_rank(), cache(mesh, TOKENS)),
        MeshError,
        "decode: expected the same call on every rank",
        "with the same inputs",
    ),
    Mistake(
        "truncates to another length on each rank",
        lambda mesh: cache(mesh, TOKENS).truncate(TOKENS - 1 - mesh.get_rank()),
        MeshError,
        "truncate: expected the same call on every rank",
        "call it alike on all ranks of the mesh",
    ),
    Mistake(
        "appends beyond the capacity",
        lambda mesh: cache(mesh, 65),
        ShapeError,
        "append: expected room for the new tokens, given 0 tokens and 65 more in a cache of 64",
        "call cache.reserve(65)",
    ),
    Mistake(
        "appends in another dtype",
        lambda mesh: cache(mesh).append(*(x.bfloat16() for x in whole()[1:])),
        DtypeError,
        "append k: expected torch.float32 on cpu, given torch.bfloat16",
        "call .to() with the cache's dtype",
    ),
    Mistake(
        "reads a window's cache with the causal mask",
        lambda mesh: am.decode(one_query(), cache(mesh, TOKENS, mask=am.Window(7))),
        MaskError,
        "decode mask: expected Window(7), by which the cache forgets tokens",
        "pass mask=cache.config.mask",
    ),
    Mistake(
        "merges over a mesh of several axes",
        lambda mesh: am.merge_across(partial(), mesh),
        MeshError,
        "expected a process group that holds this rank, or a mesh of one axis",
        'mesh["keys"]',
    ),
    Mistake(
        "merges outputs without their lse",
        lambda mesh: am.merge_across(partial().out, mesh["keys"]),  # type: ignore[arg-type]
        DtypeError,
        "merge_across: expected a partial (out, lse), given Tensor",
        "pass what attend returned",
    ),
]
