"""Bad arguments of `attnmesh.hf`."""

from functools import cache as once
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from attnmesh.errors import ArgumentError, DtypeError, KernelError, MaskError, MeshError, ShapeError, StoreError
from tests.refusals.refusal import Place, T, Table

PADDED = torch.arange(40)[None] > 2


@once
def model(attention: str = "attnmesh") -> Any:
    from tests.support.models import families

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

    known = {
        "a stock model": lambda: model("sdpa"),
        "a model in training": model_in_training,
        "a stock cache": DynamicCache,
    }
    return {name: known[x]() if isinstance(x, str) and x in known else x for name, x in changes.items()}


def generate(at: Place, **changes: Any) -> None:
    import attnmesh.hf as hf

    hf.generate(
        **{"model": model(), "input_ids": prompt(), "mesh": at.mesh, "max_new_tokens": 2} | named_objects(changes)
    )


def model_in_training() -> Any:
    from tests.support.models import families

    found = families.model("llama", "attnmesh").train()
    found.gradient_checkpointing_enable()
    return found


def generate_by_default(at: Place, **changes: Any) -> None:
    """With settings of the model's generation configuration."""
    from tests.support.models import families

    found = families.model("llama", "attnmesh")
    found.generation_config.update(**changes)
    generate(at, model=found)


def generate_again(at: Place, **changes: Any) -> None:
    generate(at, cache=full_cache(at), **changes)


def generate_of_transformers(at: Place, **changes: Any) -> None:
    model().generate(prompt(), past_key_values=sharded_cache(at, mesh=None), max_new_tokens=3, **changes)


def generate_beyond_memory(at: Place) -> None:
    generate(at, cache=sharded_cache(at, capacity=2**47))


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


def forward_alone(_: Place, **changes: Any) -> None:
    with torch.no_grad():
        model()(prompt(), use_cache=False, **changes)


def forward_of_stock(at: Place) -> None:
    with torch.no_grad():
        model("sdpa")(prompt(), past_key_values=sharded_cache(at, config=model("sdpa").config))


def forward_that_reads_keys(_: Place) -> None:
    from transformers import AutoModelForCausalLM, DogeConfig

    import attnmesh.hf as hf

    sizes: dict[str, Any] = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    tokens: dict[str, Any] = {"vocab_size": 97, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}
    config = DogeConfig(**sizes, **tokens, num_key_value_heads=1, head_dim=8, attn_implementation="attnmesh")
    made = AutoModelForCausalLM.from_config(config, attn_implementation="attnmesh")
    with torch.no_grad():
        made(prompt(), past_key_values=hf.ShardedCache(config))


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


ON_ONE_RANK: Table = {
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
        ({"input_ids": prompt() + 90}, ArgumentError, r"generate input_ids: expected tokens from 0 to 96, the model's"),
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
        (
            {"stop_strings": ["a"]},
            ArgumentError,
            r"generate: expected a tokenizer beside stop strings, given stop_strings=\['a'\]",
        ),
        ({"cache_implementation": "static"}, ArgumentError, r"expected options that work .*, given cache_implementat"),
        (
            {"output_hidden_states": True, "return_dict_in_generate": True},
            ArgumentError,
            r"generate: expected options that work on a mesh, given output_hidden_",
        ),
        (
            {"model": "a model in training"},
            KernelError,
            r"generate: expected a model that uses its cache, given one in training with gradie",
        ),
        ({"max_new_tokens": 3}, MeshError, r"generate: expected the same .*:\n    ranks  max_new_tokens\n(.*\n)*"),
        ({"checkpoint": Path("x")}, ArgumentError, r"generate checkpoint: expected an hf.Checkpoint, given PosixPath"),
        ({"checkpoint": True}, ArgumentError, r"generate checkpoint: expected an hf.Checkpoint, given bool\. Fix: "),
    ],
    generate_by_default: [
        (
            {"guidance_scale": 2.0},
            ArgumentError,
            r"generate: expected options that work on a mesh, given guidance_scale=2.0 in model.generation_config\. "
            r"Fix: set model.generation_config.guidance_scale = None\.",
        ),
    ],
    prefill: [
        ({"input_ids": prompt().float()}, DtypeError, r"generate input_ids: expected int64 .*, given torch.float32"),
        ({"chunk_size": 7}, MeshError, r"generate: expected the same .*:\n    ranks  chunk_size\n(.*\n)*.*  7\n"),
    ],
    shard_batch: [
        ({"batch": "words"}, DtypeError, r"shard_batch: expected a mapping of names to tensors, given str\. "),
        ({"input_ids": [1, 2]}, DtypeError, r"shard_batch input_ids: expected token ids .*, given list\. Fix"),
        ({"input_ids": prompt(1)}, ShapeError, r"shard_batch input_ids: expected a sequence, .*\(1, 1\) on \d"),
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

ON_ALL_RANKS: Table = {
    sharded_cache: [
        (
            {"reproducible": True, "merge": "direct"},
            KernelError,
            r"ShardedCache reproducible: expected 1, 2, 4, 8, ... ranks along queries",
        ),
    ],
    generate: [
        (
            {"input_ids": prompt() * torch.arange(40).lt(30)},
            MaskError,
            r"generate attention_mask: expected no padding at the end of a sequence,",
        ),
    ],
    generate_beyond_memory: [
        ({}, ShapeError, r"KVCache capacity: expected tokens that fit the device's memory, given"),
    ],
    generate_again: [
        (
            {"input_ids": prompt(41), "prompt_lookup_num_tokens": 3},
            KernelError,
            r"generate: expected an empty cache for assisted decoding, given 39 toke",
        ),
        (
            {"input_ids": prompt(batch=2)},
            ShapeError,
            r"generate: expected as many sequences as the cache holds, given 2 and 1 in the cach",
        ),
    ],
    generate_of_transformers: [
        ({"use_cache": False}, KernelError, r"attnmesh.hf use_cache: expected use_cache=True with a"),
    ],
    forward_alone: [
        ({"attention_mask": T(1, 1, 40, 40)}, MaskError, r"attnmesh.hf attention_mask: expected one made by transform"),
        (
            {"position_ids": torch.arange(40)[None] % 13},
            MaskError,
            r"attention mask: expected a causal mask, a sliding window or chunks, gi",
        ),
        (
            {"output_attentions": True},
            KernelError,
            r"attnmesh.hf output_attentions: expected outputs without attention weights, given True",
        ),
        ({"cu_seq_lens_q": torch.arange(3)}, KernelError, r"attnmesh.hf cu_seq_lens_q: expected exact softmax attent"),
    ],
    forward_of_stock: [({}, KernelError, r"ShardedCache: expected a model with attn_implementation 'attnmesh'")],
    forward_that_reads_keys: [({}, KernelError, r"attnmesh.hf: expected a model that passes masks and cache")],
}
"""What each rank refuses by itself."""
