"""Bad arguments of `decode`."""

from typing import Any

import torch

import attnmesh as am
from attnmesh.errors import ArgumentError, DeviceError, DtypeError, KernelError, MaskError, MeshError, ShapeError
from tests.refusals.refusal import HEADS, NO_VALUES, Q_HEADS, WIDTH, Place, T, Table, filled, new_cache, unchanged
from tests.support.truth.problems import numbers


def tokens(indices: Any, block: int = 1) -> am.Selection:
    """A selection of one query, or of several."""
    x = torch.tensor(indices, dtype=torch.float32 if isinstance(indices, float) else torch.int32)
    return am.Selection(x.reshape(1, 1, -1 if x.ndim > 1 else 1, x.shape[-1] if x.ndim else 1), block)


def decode(at: Place, **changes: Any) -> None:
    with unchanged(filled(at)) as cache:
        am.decode(**{"q": numbers(1, Q_HEADS, 1, WIDTH), "cache": cache} | changes)


def decode_many(at: Place, **changes: Any) -> None:
    """Its message is long."""
    am.decode(numbers(1, Q_HEADS, 30, WIDTH), filled(at, 30), **changes)


def decode_by_gather(at: Place, **changes: Any) -> None:
    decode(at, merge="gather", **changes)


def decode_by_allreduce(at: Place, **changes: Any) -> None:
    decode(at, merge="allreduce", **changes)


def decode_along_tree(at: Place, **changes: Any) -> None:
    decode(at, merge="tree", **changes)


def decode_directly(at: Place, **changes: Any) -> None:
    decode(at, merge="direct", **changes)


def decode_reproducibly(at: Place, **changes: Any) -> None:
    decode(at, reproducible=True, **changes)


def decode_after_padding(at: Place, real: bool = True) -> None:
    """No rank compares the padding till the step."""
    cache = new_cache(at, batch=2, checked=False)
    cache.append(*numbers(2, 2, HEADS, 6, WIDTH), token_mask=torch.full((2, 6), real))
    am.decode(numbers(2, Q_HEADS, 1, WIDTH), cache, checked=True)


def decode_after_reorder(at: Place, first: int = 0) -> None:
    """No rank compares the order till the step."""
    cache = new_cache(at, batch=2, checked=False)
    cache.append(*numbers(2, 2, HEADS, 6, WIDTH))
    cache.reorder(torch.tensor([first, 0]))
    am.decode(numbers(2, Q_HEADS, 1, WIDTH), cache, checked=True)


ON_ONE_RANK: Table = {
    decode: [
        ({"q": [1.0]}, DtypeError, r"decode q: expected a tensor of floats, given list\. Fix: use torch"),
        ({"q": T(12, 1, 4)}, ShapeError, r"decode q: expected shape \(1, 'heads', 'length', 4\), given \(12, 1, 4\)"),
        ({"q": T(1, 12, 0, 4)}, ShapeError, r"decode q: expected shape \(1, 'heads', 'length, 1 or more', 4\), given"),
        (
            {"q": T(1, 1, 12, 4)},
            ShapeError,
            r"given 1 query heads on 6 .*Fix: if these are \(batch, length, heads, dim\)",
        ),
        ({"q": T(1, 12, 1, 3)}, ShapeError, r"decode q: expected shape .*, given \(1, 12, 1, 3\)\. Fix: pass"),
        ({"q": T(1, 12, 2, 4)}, MeshError, r"decode: expected the same call .*:\n(.*\n)*.*\[1, 12, 2, 4\]"),
        ({"q": T(1, 7, 1, 4)}, ShapeError, r"query heads a multiple of key heads, given 7 query heads on 6"),
        ({"q": T(1, 12, 1, 4).double()}, DtypeError, r"decode q: expected torch.float32 on cpu, given torch.float64"),
        ({"q": T(1, 12, 11, 4)}, ShapeError, r"as many queries as tokens in .*, given 11 queries and 10 of 32"),
        ({"q": T(1, 12, 1, 4)}, MeshError, r"decode: expected the same call .*:\n    ranks  q\n(.*\n)*.*of digest"),
        (
            {"q": T(1, 12, 1, 4, requires_grad=True)},
            KernelError,
            r"decode q: expected a tensor without gradients, given one with requires_grad=True\. Fix: decode under",
        ),
        ({"mask": am.Full}, MaskError, r"decode mask: expected Full.*, given Full itself\. Fix: call it: Full"),
        (
            {"mask": am.Full() & am.Documents((4, 7))},
            MaskError,
            r"decode mask: expected documents that add up to 10 tokens, ",
        ),
        ({"mask": am.Window(2)}, MeshError, r"decode: .*:\n    ranks  mask\n(.*\n)*.*  Window\(2\)\n"),
        ({"scale": float("nan")}, DtypeError, r"decode scale: expected None, 0 or a number .*, given nan of type"),
        ({"scale": 0.7}, MeshError, r"decode: .*:\n    ranks  scale\n(.*\n)*.*  0.7\n"),
        (
            {"softcap": -1},
            DtypeError,
            r"decode softcap: expected None or a number .*, given -1 of type int\. Fix: pass",
        ),
        ({"key_lengths": torch.tensor([3], dtype=torch.int32)}, DtypeError, r"torch.int64, given torch.int32\. Fix"),
        (
            {"key_lengths": NO_VALUES},
            DeviceError,
            r"decode key_lengths: expected a tensor with values, given one on the m",
        ),
        (
            {"key_lengths": torch.tensor([3]).to_sparse()},
            DtypeError,
            r"decode key_lengths: expected a dense tensor, giv",
        ),
        (
            {"key_lengths": torch.tensor([99])},
            ShapeError,
            r"key_lengths: expected at most 10, the number of keys, given 99",
        ),
        ({"key_lengths": torch.tensor([3])}, MeshError, r"decode: .*:\n    ranks  key_lengths\n(.*\n)*.*\[3\]\n"),
        ({"softcap": 9.0}, MeshError, r"decode: .*:\n    ranks  softcap\n(.*\n)*.*  9.0\n"),
        ({"sinks": T(3)}, ShapeError, r"decode sinks: expected shape \(12,\), given shape \(3,\)\. Fix: give each"),
        ({"sinks": T(12)}, MeshError, r"decode: .*:\n    ranks  sinks\n(.*\n)*.*torch.float32 \[12\] of digest"),
        ({"merge": "ring"}, KernelError, r"decode merge: expected one of auto, tree, .*, given 'ring'\. Fix: use"),
        ({"merge": ["tree"]}, KernelError, r"decode merge: expected one of auto, tree, .*, given \['tree'\]\. Fix"),
        ({"output": "heads"}, MeshError, r"decode: .*:\n    ranks  output\n(.*\n)*.*  heads\n"),
        ({"output": "mine"}, KernelError, r"decode output: expected one of replicated, heads, given 'mine'\. Fix"),
        ({"merge": "direct"}, MeshError, r"decode: .*:\n    ranks  merge\n(.*\n)*.*  direct\n"),
        ({"reproducible": "yes"}, KernelError, r"decode reproducible: expected True or False, given 'yes'\. Fix"),
        (
            {"kernel": ["cpu"]},
            KernelError,
            r"kernel: expected one of auto, .*, given \['cpu'\]\. Fix: leave it",
        ),
        ({"kernel": "cuda"}, KernelError, r"kernel cuda: expected tensors that it supports, given others: "),
        ({"checked": "no"}, ArgumentError, r"decode checked: expected None, True or False, given 'no'\. Fix: leave"),
        (
            {"selected": T(1, 1, 1, 2).int()},
            DtypeError,
            r"decode selected: expected a Selection, given Tensor\. Fix: pass",
        ),
        ({"selected": tokens(1.5)}, DtypeError, r"selected indices: .* torch.int32, given torch.float32\. Fix: pass"),
        (
            {"selected": tokens([[1], [2]])},
            ShapeError,
            r"selected indices: expected shape \(1, 1 or 6, 1, 1 or more\), .*\. Fix: select keys for each of q's",
        ),
        (
            {"selected": am.Selection(torch.ones(1, Q_HEADS, 1, 3, dtype=torch.int32))},
            ShapeError,
            r"selected indices: expected .*, given shape \(1, 12, 1, 3\)\. Fix: pass one row a key head, or one",
        ),
        (
            {"selected": am.Selection(torch.ones(1, 3, dtype=torch.int32))},
            ShapeError,
            r"selected indices: expected shape .*, given shape \(1, 3\)\. Fix: add the missing dims",
        ),
        (
            {"selected": tokens([])},
            ShapeError,
            r"decode selected indices: expected shape .*, given shape \(1, 1, 1, 0\)\. Fix: select at least one key",
        ),
        ({"selected": tokens([10])}, ShapeError, r"selected indices: .*each once in a row, of 10 keys, given 10\. Fix"),
        (
            {"selected": tokens([3], 4)},
            ShapeError,
            r"selected indices: .*each once in a row, of 10 keys, given 3\. Fix",
        ),
        (
            {"selected": tokens([-1])},
            ShapeError,
            r"selected indices: expected indices of 0 or more, .*, given -1\. Fix",
        ),
        ({"selected": tokens([3, 3])}, ShapeError, r"selected indices: .*, given an index twice in a row\. Fix: fill"),
        ({"selected": tokens([3])}, MeshError, r"decode: .*:\n    ranks  .*selected\n(.*\n)*.*int32 \[1, 1, 1, 1\] of"),
        (
            {"selected": tokens([3]), "kernel": "native"},
            KernelError,
            r"decode selected with kernel: expected auto or reference, given native\. Fix: leave it",
        ),
        (
            {"selected": tokens([3]), "reproducible": True},
            KernelError,
            r"decode reproducible: expected no selected= beside reproducible=True, given a Selection\. Fix: leave",
        ),
        ({"dropout_p": 0.1}, KernelError, r"decode: expected exact softmax attention .*, given dropout_p=0.1\. Fix"),
        ({"mesk": 0}, ArgumentError, r"decode: expected the arguments of its signature, given mesk=0\. Fix: see"),
    ],
    decode_many: [
        ({"scale": "big"}, DtypeError, r"decode scale: expected None, 0 or a number"),
    ],
    decode_by_gather: [
        ({"scale": "big"}, DtypeError, r"decode scale: expected None, 0 or a number"),
    ],
    decode_by_allreduce: [
        ({"q": T(1, 12, 2, 4)}, MeshError, r"decode: expected the same call on every rank"),
    ],
}

ON_ALL_RANKS: Table = {
    decode: [
        ({"cache": None}, DtypeError, r"decode cache: expected a KVCache, given NoneType\. Fix: make one"),
    ],
}

_Q_OF_OTHER_WIDTH = ({"q": T(1, 12, 1, 3)}, ShapeError, r"decode q: expected shape \(1, 'heads', 'length', 4\), given")
ON_ONE_OF_FOUR: Table = {
    call: [_Q_OF_OTHER_WIDTH] for call in (decode, decode_along_tree, decode_directly, decode_reproducibly)
}

ON_ALL_OF_THREE: Table = {
    decode_reproducibly: [({}, KernelError, r"ranks along queries and keys, and a tree, given 3 ranks")],
}

_OTHER_HISTORY = r"decode: .*:\n    ranks  padding and order\n    0      "
AFTER_UNCOMPARED_CALLS: Table = {
    decode_after_padding: [({"real": False}, MeshError, _OTHER_HISTORY)],
    decode_after_reorder: [({"first": 1}, MeshError, _OTHER_HISTORY)],
}
