"""Bad calls of models, and the calls that follow the fixes of their errors: these give what stock transformers do."""

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, pad

import attnmesh.hf as hf
from tests.refusals.refusal import Refusal, by_fix
from tests.support.models import families
from tests.support.models.families import small_llama
from tests.support.truth.tolerances import FLOAT32_MODEL

IDS = families.prompt(10)
like_stock = partial(by_fix, tolerance=FLOAT32_MODEL)


def generated(ids: Tensor = IDS, **options: Any) -> Tensor:
    options = {"mesh": None, "max_new_tokens": 3} | options
    return hf.generate(small_llama(), ids, **options)  # type: ignore[no-any-return]


def of_stock(ids: Tensor = IDS, **options: Any) -> Tensor:
    return small_llama("sdpa").generate(ids, max_new_tokens=3, **options)  # type: ignore[no-any-return]


def switched() -> Tensor:
    changed = small_llama("sdpa")
    changed.set_attn_implementation("attnmesh")
    return hf.generate(changed, IDS, mesh=None, max_new_tokens=3)  # type: ignore[no-any-return]


def prefilled(tokens: int = 10) -> hf.ShardedCache:
    cache = hf.ShardedCache(small_llama().config)
    hf.prefill(small_llama(), IDS[:, :tokens], cache)
    return cache


def cropped() -> Tensor:
    cache = prefilled()
    cache.crop(6 - cache.get_seq_length())
    return generated(cache=cache)


PADDED = (torch.arange(10) >= 3)[None].long()
LABELS = IDS.masked_fill(PADDED.flip(1) == 0, -100)


def loss(**batch: Any) -> Any:
    return small_llama()(**hf.shard_batch({"input_ids": IDS} | batch, None)).loss


def stock_loss() -> Any:
    logits = small_llama("sdpa")(IDS, attention_mask=PADDED.flip(1)).logits
    return cross_entropy(logits[0, :-1], LABELS[0, 1:])


def of_dynamic_rope() -> Any:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4, "original_max_position_embeddings": 12}
    return families.model("llama", "attnmesh", rope_parameters=rope, max_position_embeddings=16)


def submitted(ids: Any, served: Any = None, **options: Any) -> Tensor:
    """Return the prompt once an engine has taken it."""
    engine = hf.Engine(served or small_llama(), None, max_model_len=16)
    engine.submit(ids, **{"max_new_tokens": 3} | options)
    return IDS


IN_ONE_PROCESS: list[Refusal] = [
    like_stock(
        lambda: hf.generate(small_llama("sdpa"), IDS),
        'call model.set_attn_implementation("attnmesh")',
        switched,
        of_stock,
    ),
    like_stock(lambda: generated(IDS.int()), "pass tokenizer(text, ", lambda: generated(IDS.int().long()), of_stock),
    like_stock(
        lambda: generated(temprature=1.0, do_sample=False),
        "write temperature=",
        lambda: generated(temperature=1.0, do_sample=False),
        of_stock,
    ),
    like_stock(lambda: generated(max_tokens=3), "write max_new_tokens=", lambda: generated(max_new_tokens=3), of_stock),
    like_stock(
        lambda: generated(position_ids=torch.arange(10)[None]),
        "leave it out: prefill takes only token ids, attention_mask and images",
        generated,
        of_stock,
    ),
    like_stock(
        lambda: generated(attention_mask=PADDED.flip(1)),
        "set the tokenizer's padding_side to 'left'",
        lambda: generated(attention_mask=PADDED),
        lambda: of_stock(attention_mask=PADDED),
    ),
    like_stock(
        lambda: generated(IDS.expand(2, -1), cache=prefilled()),
        "pass a new cache",
        lambda: generated(IDS.expand(2, -1), cache=hf.ShardedCache(small_llama().config)),
        lambda: of_stock().expand(2, -1),
    ),
    like_stock(
        lambda: generated(past_key_values=prefilled()),
        "pass a ShardedCache as cache=",
        lambda: generated(cache=prefilled()),
        of_stock,
    ),
    like_stock(
        lambda: prefilled().crop(6), "pass length - cache.get_seq_length() to keep so many tokens", cropped, of_stock
    ),
    like_stock(
        lambda: loss(attention_mask=PADDED.flip(1), labels=IDS),
        "set them with labels.masked_fill(attention_mask == 0, -100)",
        lambda: loss(attention_mask=PADDED.flip(1), labels=IDS.masked_fill(PADDED.flip(1) == 0, -100)),
        stock_loss,
    ),
    like_stock(
        lambda: loss(labels=pad(LABELS, (0, 1), value=-100)[:, 1:]),
        "pass them as shift_labels",
        lambda: loss(shift_labels=pad(LABELS, (0, 1), value=-100)[:, 1:], attention_mask=PADDED.flip(1)),
        stock_loss,
    ),
    like_stock(
        lambda: hf.mean_over_mesh(torch.ones(10), LABELS[0], None),
        "pass targets != -100",
        lambda: hf.mean_over_mesh(torch.arange(10.0), LABELS[0] != -100, None),
        lambda: torch.arange(7.0).mean(),
    ),
    like_stock(lambda: submitted(IDS[0]), "and tokens.tolist()", lambda: submitted(IDS[0].tolist()), lambda: IDS),
    like_stock(
        lambda: submitted(IDS[0].tolist(), max_new_tokens=30),
        "shorten the prompt, or pass a smaller max_new_tokens",
        lambda: submitted(IDS[0].tolist(), max_new_tokens=6),
        lambda: IDS,
    ),
    like_stock(
        lambda: submitted(IDS[0].tolist(), of_dynamic_rope(), max_new_tokens=4),
        "stay within 12 tokens, or call hf.generate",
        lambda: submitted(IDS[0].tolist(), of_dynamic_rope(), max_new_tokens=2),
        lambda: IDS,
    ),
]
