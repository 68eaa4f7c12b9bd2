"""Bad calls in one process, and the calls that follow the fixes of their errors: these work, and are exact."""

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import attnmesh as am
from attnmesh import errors
from tests.refusals.refusal import Refusal, by_fix

HEADS, KEY_HEADS, LENGTH, WIDTH = 4, 2, 12, 8
GENERATOR = torch.Generator().manual_seed(0)
Q, K, V = (torch.randn(1, heads, LENGTH, WIDTH, generator=GENERATOR) for heads in (HEADS, KEY_HEADS, KEY_HEADS))


def truth(
    visible: Tensor | None = None, q: Tensor = Q, k: Tensor = K, v: Tensor = V, scale: float | None = None
) -> Tensor:
    """Return dense attention of PyTorch."""
    return scaled_dot_product_attention(q, k, v, visible, scale=scale, enable_gqa=True)


def band(left: int = LENGTH, queries: int = LENGTH) -> Tensor:
    """Return the mask of the last queries under a causal window."""
    distance = torch.arange(LENGTH - queries, LENGTH)[:, None] - torch.arange(LENGTH)
    return (distance >= 0) & (distance <= left)


def attend(**changes: Any) -> Tensor:
    return am.attend(**{"q": Q, "k": K, "v": V} | changes).out


def attention(**changes: Any) -> Tensor:
    return am.attention(**{"q": Q, "k": K, "v": V} | changes)


def cache(tokens: int = 0, **options: Any) -> am.KVCache:
    sizes: dict[str, Any] = {"batch": 1, "kv_heads": KEY_HEADS, "head_dim": WIDTH, "capacity": LENGTH}
    made = am.KVCache(None, **sizes | {"dtype": torch.float32} | options)
    if tokens:
        made.append(K[:, :, :tokens], V[:, :, :tokens])
    return made


def all_but_last() -> Tensor:
    return truth(band(queries=2), Q[:, :, -2:])


FEW = Q[:, :, -2:]
MASKS = [
    by_fix(
        lambda: attend(mask=am.Causal), "call it: Causal()", lambda: attend(mask=am.Causal()), lambda: truth(band())
    ),
    by_fix(
        lambda: attend(mask=am.Window),
        "call it: Window(left)",
        lambda: attend(mask=am.Window(3)),
        lambda: truth(band(3)),
    ),
    by_fix(
        lambda: attend(mask=am.Chunks),
        "call it: Causal() & Chunks(size)",
        lambda: attend(mask=am.Causal() & am.Chunks(LENGTH)),
        lambda: truth(band()),
    ),
    by_fix(
        lambda: attend(mask=lambda batch, head, query, key: query >= key),
        "by position, not with a tensor or a function",
        lambda: attend(mask=am.Causal()),
        lambda: truth(band()),
    ),
    by_fix(
        lambda: am.Spans([(1, 3)]) & am.Spans([(5, 8)]),
        "pass all spans, and the window of earlier tokens, to one Spans(ranges, left)",
        lambda: attend(mask=am.Spans([(1, 3), (5, 8)])),
        lambda: truth(band() | spans((1, 3), (5, 8))),
    ),
    by_fix(
        lambda: am.Spans([(1, 3)]) & am.Window(4, 1),
        "pass all spans, and the window of earlier tokens, to one Spans(ranges, left)",
        lambda: attend(mask=am.Spans([(1, 3)], 4)),
        lambda: truth(band(4) | spans((1, 3))),
    ),
    by_fix(
        lambda: attend(mask=am.Full() & am.Documents([5, 5])),
        "let Documents(lengths) cover every token, padding as a document of its own",
        lambda: attend(mask=am.Full() & am.Documents([5, 5, 2]))[:, :, :10],
        lambda: truth(torch.block_diag(torch.ones(5, 5), torch.ones(5, 5), torch.ones(2, 2)).bool())[:, :, :10],
    ),
    by_fix(
        lambda: am.Documents(5),  # type: ignore[arg-type]
        "list each document's number of tokens",
        lambda: am.Documents([5]).ends,
        lambda: (5,),
    ),
    by_fix(
        lambda: am.Split(torch.tensor([5, 7])),  # type: ignore[arg-type]
        "pass a tuple of Python ints",
        lambda: am.Split((5, 7)).positions(12, 2, 1),
        lambda: torch.arange(5, 12),
    ),
    by_fix(
        lambda: am.Zigzag().positions(-1, 2, 0),
        "pass the length of the whole sequence, its number of shards, and this shard's index",
        lambda: am.Zigzag().positions(8, 2, 0),
        lambda: torch.tensor([0, 1, 6, 7]),
    ),
    by_fix(
        lambda: am.Packed([3, 3], (1, 2)),  # type: ignore[arg-type]
        "pass am.Shape(heads, queries, keys)",
        lambda: am.Packed([3, 3], am.Shape(1, 1, 2)).shape,
        lambda: (1, 1, 2),
    ),
]


def spans(*ranges: tuple[int, int]) -> Tensor:
    """Return which keys queries see beside earlier ones: those of their own span."""
    visible = torch.zeros(LENGTH, LENGTH, dtype=torch.bool)
    for start, stop in ranges:
        visible[start:stop, start:stop] = True
    return visible


def by_key_lengths() -> Tensor:
    k, v = (x.to_padded_tensor(0.0) for x in nested())
    out = attend(q=Q.expand(2, -1, -1, -1), k=k, v=v, key_lengths=torch.tensor([LENGTH, 7]))
    return out[1:]


def nested() -> tuple[Tensor, Tensor]:
    """Return keys and values of sequences of 12 and 7 tokens."""
    k, v = ([x[0].transpose(0, 1), x[0, :, :7].transpose(0, 1)] for x in (K, V))
    k, v = (torch.nested.nested_tensor(x, layout=torch.jagged).transpose(1, 2) for x in (k, v))
    return k, v


def first_gradient(run: Callable[[Tensor], Tensor]) -> Tensor:
    q = Q.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(run(q).sum(), q)
    return gradient


def second_gradient(run: Callable[[Tensor], Tensor]) -> Tensor:
    q = Q.double().requires_grad_()
    (first,) = torch.autograd.grad(run(q).square().sum(), q, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), q)
    return second


def by_energy(q: Tensor) -> Tensor:
    source = torch.zeros_like(q, requires_grad=True)
    (out,) = torch.autograd.grad(am.energy(q, K.to(q), V.to(q), source).sum(), source, create_graph=True)
    return out


def of_pytorch(q: Tensor) -> Tensor:
    with sdpa_kernel(SDPBackend.MATH):
        return scaled_dot_product_attention(q, K.to(q), V.to(q), is_causal=True, enable_gqa=True)


def by_hand(q: Tensor, visible: Tensor | None = None) -> Tensor:
    k, v = (x.to(q).repeat_interleave(2, 1) for x in (K, V))
    logits = q @ k.transpose(-1, -2) * WIDTH**-0.5
    logits = logits if visible is None else logits.masked_fill(~visible, -torch.inf)
    return logits.softmax(-1) @ v


def capped() -> Tensor:
    k, v = (x.repeat_interleave(2, 1) for x in (K, V))
    return (2.0 * torch.tanh(Q @ k.transpose(-1, -2) * WIDTH**-0.5 / 2.0)).softmax(-1) @ v


ATTENTION = [
    by_fix(
        lambda: attend(k=K.tolist()),
        "use torch.as_tensor on numbers",
        lambda: attend(k=torch.as_tensor(K.tolist())),
        truth,
    ),
    by_fix(lambda: attend(k=K.to_sparse()), "call .to_dense()", lambda: attend(k=K.to_sparse().to_dense()), truth),
    by_fix(
        lambda: attend(k=nested()[0], v=nested()[1]),
        "call .to_padded_tensor(0.0), and hide the padding, as by key_lengths=",
        by_key_lengths,
        lambda: truth(k=K[:, :, :7], v=V[:, :, :7]),
    ),
    by_fix(
        lambda: attend(q=torch._neg_view(-Q)),
        "call .resolve_neg()",
        lambda: attend(q=torch._neg_view(-Q).resolve_neg()),
        truth,
    ),
    by_fix(lambda: attend(q=Q[0]), "add or split the missing dims", lambda: attend(q=Q[0][None]), truth),
    by_fix(lambda: attend(q=Q.double()), "cast them with .to(dtype)", lambda: attend(q=Q.double().to(K.dtype)), truth),
    by_fix(
        lambda: attend(scale=np.array(0.5)), "pass a Python float", lambda: attend(scale=0.5), lambda: truth(scale=0.5)
    ),
    by_fix(lambda: attend(logits_soft_cap=2.0), "pass softcap=", lambda: attend(softcap=2.0), capped),
    by_fix(lambda: attend(kernel="cuda"), 'leave it at "auto"', lambda: attend(kernel="auto"), truth),
    by_fix(lambda: attend(dropout_p=0.1), "leave it out", attend, truth),
    by_fix(
        lambda: attention(window_size=(3, 0)),
        "pass mask=am.Window(left)",
        lambda: attention(mask=am.Window(3)),
        lambda: truth(band(3)),
    ),
    by_fix(lambda: attention(is_causal=False), "or am.Full()", lambda: attention(mask=am.Full()), truth),
    by_fix(
        lambda: attention(q=FEW),
        "pass mask=am.Full() for cross-attention",
        lambda: attention(q=FEW, mask=am.Full()),
        lambda: truth(q=FEW),
    ),
    by_fix(
        lambda: attention(q=FEW),
        "call am.attend with mask=am.Causal() and q_positions=torch.arange(10, 12) for the last queries",
        lambda: am.attend(FEW, K, V, mask=am.Causal(), q_positions=torch.arange(10, 12)).out,
        all_but_last,
    ),
    by_fix(
        lambda: attention(q=FEW, mask=am.Window(3)),
        "call am.attend with mask=am.Window(3) and q_positions=torch.arange(10, 12)",
        lambda: am.attend(FEW, K, V, mask=am.Window(3), q_positions=torch.arange(10, 12)).out,
        lambda: truth(band(3, 2), FEW),
    ),
    by_fix(
        lambda: attention(q=FEW),
        "pass mask=am.Causal(), key_length=12 for Causal() over another sequence",
        lambda: attention(q=FEW, mask=am.Causal(), key_length=12),
        lambda: truth(band()[:2], FEW),
    ),
    by_fix(lambda: attention(length=7), "leave length out", attention, lambda: truth(band())),
    by_fix(
        lambda: attention(length=np.int64(LENGTH)),
        "count the tokens of all ranks as a Python int",
        lambda: attention(length=int(np.int64(LENGTH))),
        lambda: truth(band()),
    ),
    by_fix(
        lambda: attend(key_lengths=torch.tensor([7], dtype=torch.int32)),
        "pass torch.tensor([...]), the number of real keys",
        lambda: attend(key_lengths=torch.tensor([7])),
        lambda: truth(k=K[:, :, :7], v=V[:, :, :7]),
    ),
    by_fix(
        lambda: attend(selected=torch.arange(LENGTH).expand(1, 1, LENGTH, LENGTH)),
        "pass am.Selection(indices), indices of dtype torch.int32",
        lambda: attend(selected=am.Selection(torch.arange(LENGTH, dtype=torch.int32).expand(1, 1, LENGTH, LENGTH))),
        truth,
    ),
    by_fix(
        lambda: attend(distance_bias=torch.zeros(HEADS, 3)),
        "expand a bias of each head: bias[None, :, None].expand(batch, -1, length, -1)",
        lambda: attend(distance_bias=torch.zeros(HEADS, 3)[None, :, None].expand(1, -1, LENGTH, -1)),
        truth,
    ),
    by_fix(
        lambda: second_gradient(lambda q: attend(q=q, k=K.to(q), v=V.to(q))),
        "differentiate energy, which is dense and without a mask",
        lambda: second_gradient(by_energy),
        lambda: second_gradient(by_hand),
    ),
    by_fix(
        lambda: second_gradient(lambda q: attention(q=q, k=K.to(q), v=V.to(q))),
        "or PyTorch's attention under SDPBackend.MATH",
        lambda: second_gradient(of_pytorch),
        lambda: second_gradient(lambda q: by_hand(q, band())),
    ),
    by_fix(
        lambda: torch.func.grad(lambda q: attend(q=q).sum())(Q),
        "functions with gradients have those of torch.autograd.grad or backward",
        lambda: first_gradient(lambda q: attend(q=q)),
        lambda: first_gradient(by_hand),
    ),
    by_fix(
        lambda: torch.func.grad(lambda out: am.merge_across((out, Q[..., 0]), None).out.sum())(Q),
        "call it outside",
        lambda: am.merge_across((Q, Q[..., 0]), None).out,
        lambda: Q,
    ),
    by_fix(
        lambda: torch.vmap(lambda q: attend(q=q))(torch.stack((Q, 2 * Q))),
        "call it outside, with the mapped dim in the batch: x.flatten(0, 1)",
        lambda: attend(q=torch.stack((Q, 2 * Q)).flatten(0, 1), k=K.expand(2, -1, -1, -1), v=V.expand(2, -1, -1, -1)),
        lambda: torch.cat((truth(), truth(q=2 * Q))),
    ),
]


def partials(dtype: torch.dtype = torch.float32) -> list[am.Partial]:
    """Return attention over two parts of the keys, with the log-sum-exp in this dtype."""
    parts = (am.attend(Q, K[:, :, part], V[:, :, part]) for part in (slice(5), slice(5, None)))
    return [am.Partial(out, lse.to(dtype)) for out, lse in parts]


def reserved() -> Tensor:
    kv_cache = cache(10, capacity=10)
    with pytest.raises(errors.ShapeError) as error:
        kv_cache.append(K[:, :, 10:], V[:, :, 10:])
    kv_cache.reserve(int(re.search(r"cache.reserve\((\d+)\)", str(error.value))[1]))  # type: ignore[index]
    kv_cache.append(K[:, :, 10:], V[:, :, 10:])
    return am.decode(FEW, kv_cache)


def forked() -> Tensor:
    kv_cache = cache(LENGTH)
    return am.decode_rows(Q[:, :, -1:].expand(2, -1, -1, -1), [kv_cache, kv_cache.fork()])


def gone_back(keep: int) -> Tensor:
    """Append tokens to a cache with a window, go back by 30, and decode the last one."""
    k, v = (torch.cat([x] * 20, 2) for x in (K, V))
    kv_cache = cache(capacity=240, mask=am.Window(3), keep=keep, block=1)
    for token in range(200):
        kv_cache.append(k[:, :, token : token + 1], v[:, :, token : token + 1])
    kv_cache.truncate(170)
    return am.decode(Q[:, :, -1:], kv_cache, mask=kv_cache.config.mask or am.Full())


def last_of_170() -> Tensor:
    k, v = (torch.cat([x] * 20, 2)[:, :, 166:170] for x in (K, V))
    return truth(q=Q[:, :, -1:], k=k, v=v)


def appended(**options: Any) -> Tensor:
    kv_cache = cache(**options)
    kv_cache.append(K, V)
    return am.decode(FEW, kv_cache, mask=kv_cache.config.mask or am.Causal())


def fail_to_append(*tensors: Any, **options: Any) -> None:
    cache(**options).append(*tensors)


CACHES = [
    by_fix(
        lambda: cache(capacity=np.int64(LENGTH)),
        "pass a Python int of 1 or more",
        lambda: appended(capacity=int(np.int64(LENGTH))),
        all_but_last,
    ),
    by_fix(
        lambda: am.merge(partials()),
        "pass each as an argument: merge(*partials)",
        lambda: am.merge(*partials()).out,
        truth,
    ),  # type: ignore[arg-type]
    by_fix(
        lambda: am.merge_across(partials(torch.float64)[0], None),
        "cast lse",
        lambda: (
            am.merge(*(am.merge_across(am.Partial(out, lse.float()), None) for out, lse in partials(torch.float64))).out
        ),
        truth,
    ),
    by_fix(lambda: fail_to_append(K, V, capacity=8), "call cache.reserve(12) on every rank", reserved, all_but_last),
    by_fix(lambda: fail_to_append(K.half(), V.half()), "call .to() with the cache's dtype", appended, all_but_last),
    by_fix(lambda: fail_to_append(K), "pass v, or make the cache with values=", appended, all_but_last),
    by_fix(
        lambda: am.decode(FEW, cache()), "append before decode", lambda: am.decode(FEW, cache(LENGTH)), all_but_last
    ),
    by_fix(
        lambda: am.decode(FEW, cache(LENGTH, mask=am.Window(3))),
        "pass mask=cache.config.mask",
        lambda: appended(mask=am.Window(3)),
        lambda: truth(band(3, 2), FEW),
    ),
    by_fix(
        lambda: am.decode(Q[:, :, -1:].transpose(1, 2), cache(LENGTH)),
        "if these are (batch, length, heads, dim), pass x.transpose(1, 2)",
        lambda: am.decode(Q[:, :, -1:].transpose(1, 2).transpose(1, 2), cache(LENGTH)),
        lambda: truth(q=Q[:, :, -1:]),
    ),
    by_fix(lambda: gone_back(0), "make the cache with keep=30 or more", lambda: gone_back(30), last_of_170),
    by_fix(
        lambda: am.decode_rows(Q[:, :, -1:].expand(2, -1, -1, -1), [cache(LENGTH)] * 2),
        "pass cache.fork()",
        forked,
        lambda: truth(q=Q[:, :, -1:]).expand(2, -1, -1, -1),
    ),
    by_fix(
        lambda: cache(LENGTH).reorder([0]),  # type: ignore[arg-type]
        "pass torch.tensor([...])",
        lambda: (kv_cache := cache(LENGTH)).reorder(torch.tensor([0])) or am.decode(FEW, kv_cache),
        all_but_last,
    ),
    by_fix(
        lambda: cache(head_dim=7, storage="int8"),
        "leave out storage=",
        lambda: cache(head_dim=7).config.storage,
        lambda: None,
    ),
    by_fix(lambda: cache(copies=2), "pass copies=1", lambda: appended(copies=1), all_but_last),
    by_fix(
        lambda: cache(values="none", value_dim=8),
        "leave out value_dim",
        lambda: cache(values="none").config.value_dim,
        lambda: 0,
    ),
    by_fix(
        lambda: cache(LENGTH).append_pages(K, V, torch.tensor([[0]])),
        "append the pages first, or make a new cache",
        lambda: paged(),
        all_but_last,
    ),
]


def paged() -> Tensor:
    kv_cache = cache(block=4)
    pools = (x[0].transpose(0, 1).reshape(3, 4, KEY_HEADS, WIDTH) for x in (K, V))
    kv_cache.append_pages(*pools, torch.arange(3)[None])
    return am.decode(FEW, kv_cache)


def hosts_of_fix() -> bool:
    """Return whether a plan fits the number of hosts that the error names."""
    with pytest.raises(errors.ClusterError) as error:
        am.plan(WORK, am.Cluster.preset("dgx-h100", hosts=1))
    hosts = int(re.search(r"about ([\d,]+) hosts", str(error.value))[1].replace(",", ""))  # type: ignore[index]
    return len(am.plan(WORK, am.Cluster.preset("dgx-h100", hosts=hosts))) > 0


WORK = am.Workload(64, 8, 128, 100_000_000, phase="decode", layers=80)
PLANS = [
    by_fix(lambda: am.plan(WORK, am.Cluster.preset("dgx-h100", hosts=1)), "take about", hosts_of_fix, lambda: True),
    by_fix(
        lambda: am.mesh_shape(np.int64(4), 8, 8),  # type: ignore[arg-type]
        "pass the number of ranks and the model's head counts, as Python ints",
        lambda: am.mesh_shape(4, 8, 8).ranks,
        lambda: 4,
    ),
    by_fix(
        lambda: am.init_mesh((1, 1, 1)),
        "or pass mesh=None for one process",
        lambda: attention(mesh=None),
        lambda: truth(band()),
    ),
    by_fix(lambda: am.set_deadline(0), "pass seconds, or None", lambda: am.set_deadline(None), lambda: None),
    by_fix(
        lambda: am.top_k_across(torch.arange(4), torch.arange(4), 2, None),
        "pass the scores of this rank's keys in floats",
        lambda: am.top_k_across(torch.arange(4.0), torch.arange(4), 2, None)[1],
        lambda: torch.tensor([3, 2]),
    ),
]


IN_ONE_PROCESS: list[Refusal] = [*MASKS, *ATTENTION, *CACHES, *PLANS]
