"""Bad arguments of `attnmesh.hf`."""

from functools import cache as once
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from attnmesh.errors import ArgumentError, DtypeError, KernelError, MaskError, MeshError, ShapeError, StoreError
from tests.support.refusals import Place, T, Table

PADDED = torch.arange(40)[None] > 2


@once
def model(attention: str = "attnmesh") -> Any:
    from tests.support import families

    return families.model("llama", attention)


def prompt(length: int = 40, batch: int = 1) -> Tensor:
    return torch.randint(2, 97, (batch, length), generator=torch.Generator().manual_seed(0))


def sharded_cache(at: Place, **changes: Any) -> Any:
    import attnmesh.hf as hf

    return hf.ShardedCache(**{"config": model().config, "mesh": at.mesh} | changes)


def full_cache(at: Place) -> Any:
    """After a prompt, and asked about at every call."""
    import attnmesh.hf as hf

    cache = sharded_cache(at, checked=True)
    hf.prefill(model(), prompt(), cache)
    return cache


def named_objects(changes: dict[str, Any]) -> dict[str, Any]:
    """With models and caches for their names, which are not to be made where nobody needs them."""
    from transformers import DynamicCache

    known = {"a stock model": lambda: model("sdpa"), "a stock cache": DynamicCache}
    return {name: known[x]() if isinstance(x, str) and x in known else x for name, x in changes.items()}


def generate(at: Place, **changes: Any) -> None:
    import attnmesh.hf as hf

    hf.generate(
        **{"model": model(), "input_ids": prompt(), "mesh": at.mesh, "max_new_tokens": 2} | named_objects(changes)
    )


def prefill(at: Place, **changes: Any) -> None:
    import attnmesh.hf as hf

    hf.prefill(**{"model": model(), "input_ids": prompt(), "cache": sharded_cache(at)} | changes)


def crop(at: Place, tokens_to_remove: Any = -3) -> None:
    full_cache(at).crop(tokens_to_remove)


def reorder_cache(at: Place, beam_idx: Any = torch.tensor([0])) -> None:  # noqa: B008
    full_cache(at).reorder_cache(beam_idx)


def shard_batch(at: Place, **changes: Any) -> None:
    import attnmesh.hf as hf

    batch = changes.pop("batch", {"input_ids": prompt(), "labels": prompt()} | changes)
    hf.shard_batch(batch, at.mesh, **{"layout": changes["layout"]} if "layout" in changes else {})


def forward(at: Place, full: bool = False, **changes: Any) -> None:
    cache = full_cache(at) if full else sharded_cache(at)
    with torch.no_grad():
        model()(prompt(1), past_key_values=cache, **{"use_cache": True} | changes)


def forward_again(at: Place, **changes: Any) -> None:
    forward(at, full=True, **changes)


def prefill_again(at: Place, **changes: Any) -> None:
    """Another turn in shards, where nobody asks about new tokens any more."""
    import attnmesh.hf as hf

    cache, ids = sharded_cache(at), prompt(160)
    hf.prefill(model(), ids[:, :33], cache)
    with torch.no_grad():
        model()(ids[:, 32:64], past_key_values=cache, use_cache=True)
    with mock.patch.object(model(), "forward", partial(model().forward, **changes)):
        hf.prefill(model(), ids, cache)


def forward_anew(at: Place, **changes: Any) -> None:
    """Other sequences, in a cache that was emptied: room is made anew for them."""
    cache = sharded_cache(at)
    with torch.no_grad():
        model()(prompt(4), past_key_values=cache, use_cache=True)
        cache.crop(-4)
        model()(prompt(4, batch=2), past_key_values=cache, use_cache=True, **changes)


def save_all(at: Place, **changes: Any) -> None:
    full_cache(at).save(at.folder / "all", **changes)


def recover_all(at: Place, **changes: Any) -> None:
    import attnmesh.hf as hf

    hf.ShardedCache.recover(**{"cache": full_cache(at), "config": model().config, "mesh": at.mesh} | changes)


def train(at: Place, **changes: Any) -> None:
    import attnmesh.hf as hf

    model()(**hf.shard_batch({"input_ids": prompt(), "labels": prompt()}, at.mesh), **changes)


OF_TRANSFORMERS: Table = {
    sharded_cache: [
        ({"config": "llama"}, KernelError, r"ShardedCache config: expected a configuration .*, given str\. "),
        ({"capacity": 0}, ShapeError, r"ShardedCache capacity: expected a whole number, 1 or more, given 0"),
        ({"block": "x"}, ShapeError, r"ShardedCache block: expected a whole number, 1 or more, given 'x'\."),
        ({"merge": "ring"}, KernelError, r"ShardedCache merge: expected one of auto, .*, given 'ring'\. Fix"),
        ({"merge": "tree"}, MeshError, r"ShardedCache: expected the same .*:\n    ranks  merge\n(.*\n)*.*tree"),
        ({"kernel": "fast"}, KernelError, r"kernel: expected one of auto, .*, given 'fast'\. Fix: leave"),
        ({"exchange": "tree"}, KernelError, r"ShardedCache exchange: expected one of auto, .* given 'tree'"),
        ({"checked": "no"}, ArgumentError, r"ShardedCache checked: expected None, True or False, given 'no'"),
        ({"reproducible": "yes"}, KernelError, r"ShardedCache reproducible: expected True or .* given 'yes'"),
    ],
    crop: [
        (
            {"tokens_to_remove": 3},
            ShapeError,
            r"crop: expected 0 or a negative number, given 3\. Fix: pass length - cache",
        ),
        ({"tokens_to_remove": "x"}, ShapeError, r"crop: expected 0 or a negative number, given 'x'\. Fix: pass"),
    ],
    reorder_cache: [
        ({"beam_idx": [0]}, DtypeError, r"reorder: expected a tensor of torch.int64, given list\. Fix: pass"),
    ],
    generate: [
        ({"input_ids": "what?"}, DtypeError, r"generate input_ids: expected int64 token ids .*, given str\. Fix"),
        ({"input_ids": prompt(0)}, ShapeError, r"generate input_ids: expected at least one token, given an empty"),
        ({"input_ids": prompt(1) - 99}, ArgumentError, r"generate input_ids: expected tokens from 0 to 96, .* given -"),
        ({"input_ids": prompt(2049)}, ShapeError, r"generate input_ids: expected at most 2048 tokens, .*given 2049"),
        ({"input_ids": prompt(41)}, MeshError, r"generate: expected the same .*:\n    ranks  prompt\n(.*\n)*.*41\]"),
        ({"attention_mask": T(1, 1, 4, 4)}, ShapeError, r"generate attention_mask: expected 2D, .* given \(1, 1, 4"),
        (
            {"attention_mask": T(1, 40)},
            MaskError,
            r"generate attention_mask: expected no padding at the end .*padding",
        ),
        (
            {"attention_mask": T(1, 40).numpy()},
            DtypeError,
            r"generate attention_mask: expected a tensor, given ndarray",
        ),
        ({"cache": "a stock cache"}, KernelError, r"generate cache: expected a ShardedCache, given DynamicCache"),
        ({"model": torch.nn.ReLU()}, KernelError, r"generate: expected a causal language model .*given ReLU\. Fix"),
        (
            {"model": "a stock model"},
            KernelError,
            r"generate: expected a model with attn_implementation 'attnmesh', given 'sd",
        ),
        ({"max_time": 0.5}, ArgumentError, r"generate: expected options that work .*, given max_time=0.5\. Fix: "),
        ({"use_cache": False}, ArgumentError, r"generate: expected options that work .*, given use_cache=False\."),
        ({"position_ids": T(1)}, ArgumentError, r"generate: expected options of transformers.*, given position_ids"),
        ({"max_new_tokens": 3}, MeshError, r"generate: expected the same .*:\n    ranks  max_new_tokens\n(.*\n)*"),
        ({"checkpoint": Path("x")}, ArgumentError, r"generate checkpoint: expected an hf.Checkpoint, given PosixPath"),
        ({"checkpoint": True}, ArgumentError, r"generate checkpoint: expected an hf.Checkpoint, given bool\. Fix: "),
    ],
    prefill: [
        ({"input_ids": prompt().float()}, DtypeError, r"generate input_ids: expected int64 .*, given torch.float32"),
        ({"chunk_size": 7}, MeshError, r"generate: expected the same .*:\n    ranks  chunk_size\n(.*\n)*.*  7\n"),
    ],
    shard_batch: [
        ({"batch": "words"}, DtypeError, r"shard_batch: expected a mapping of names to tensors, given str\. "),
        ({"input_ids": [1, 2]}, DtypeError, r"shard_batch input_ids: expected token ids .*, given list\. Fix"),
        ({"input_ids": prompt(1)}, ShapeError, r"shard_batch input_ids: expected a sequence, .*\(1, 1\) on 2"),
        ({"labels": prompt(39)}, ShapeError, r"shard_batch labels: expected shape \(1, 40\), given \(1, 39\)"),
        ({"pixels": T(1)}, ArgumentError, r"shard_batch: expected some of input_ids, .*, given 'pixels'\. Fix"),
        ({"attention_mask": T(1, 40)}, MaskError, r"shard_batch labels: expected -100 at .*, given labels"),
        ({"num_items_in_batch": "all"}, DtypeError, r"shard_batch num_items_in_batch: expected a .*given 'all'"),
        ({"num_items_in_batch": 7}, MeshError, r"shard_batch: .*:\n    ranks  num_items_in_batch\n(.*\n)*.* 7"),
        ({"labels": prompt() * 0}, MeshError, r"shard_batch: .*:\n    ranks  labels\n(.*\n)*.*of digest"),
    ],
    forward: [
        ({"output_attentions": True}, KernelError, r"attnmesh.hf output_attentions: expected outputs without att"),
    ],
    forward_again: [
        ({"cu_seq_lens_q": T(3)}, KernelError, r"attnmesh.hf cu_seq_lens_q: expected .*given .*a tensor \(3,\)"),
        (
            {"use_cache": False, "position_ids": torch.arange(40)[None]},
            KernelError,
            r"use_cache: expected use_cache=True with a ShardedCache, given use_cache=False",
        ),
        (
            {"attention_mask": PADDED},
            MaskError,
            r"attention_mask: expected the padding of the cached tokens, given other",
        ),
    ],
    forward_anew: [
        ({"cu_seq_lens_q": T(3)}, KernelError, r"attnmesh.hf cu_seq_lens_q: expected .*given .*a tensor \(3,\)"),
    ],
    save_all: [
        (
            {"more": {"held": T(3)}},
            StoreError,
            r"save more: expected names other than held and recurrent\.\*, given held\. Fix: rename it",
        ),
        ({"more": [1]}, StoreError, r"save more: expected tensors by their names, given list\. Fix: pass a dict"),
    ],
    recover_all: [
        (
            {"cache": "x"},
            KernelError,
            r"ShardedCache.recover cache: expected a ShardedCache, given str\. Fix: pass the",
        ),
    ],
    prefill_again: [
        ({"cu_seq_lens_q": T(3)}, KernelError, r"attnmesh.hf cu_seq_lens_q: expected .*given .*a tensor \(3,\)"),
    ],
    train: [
        ({"output_attentions": True}, KernelError, r"attnmesh.hf output_attentions: expected outputs without att"),
        ({"output_router_logits": True}, KernelError, r"output_router_logits: expected no router loss on shards"),
    ],
}
