"""Models that select their keys: tokens and gradients of stock transformers, with the keys of indexers in shards."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from functools import lru_cache, partial
from io import BytesIO
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import attnmesh as am
import attnmesh.hf as hf
from attnmesh import errors
from attnmesh.core.layout import Layout
from attnmesh.mesh.shapes import AXES, Shape
from tests.support.models.families import prompt
from tests.support.models.sparse_models import CASES, model
from tests.support.models.tiny_models import Case, build, tiny_config
from tests.support.ranks.pool import Pool, on_each_rank
from tests.support.truth.mesh_problems import named_mesh
from tests.support.truth.seeds import some
from tests.support.truth.tolerances import FLOAT64_LOSS, FLOAT64_MODEL, worst

SHAPES = (Shape(1, 1, 1), Shape(1, 2, 1), Shape(1, 1, 3), Shape(1, 2, 2))

SAMPLED = {("ties", SHAPES[1]), ("dots3", SHAPES[2]), ("qwen4", SHAPES[1]), ("deepseek_v4", SHAPES[0])}
SAMPLED |= {("deepseek_v32", SHAPES[3])}
"""The cases of `make test`, each with every third check."""

Generate = Callable[..., Tensor]


NEW = 6
"""Tokens of a plain answer."""


def plain(generate: Generate) -> list[Tensor]:
    return [generate(prompt(61), max_new_tokens=NEW)]


def chunked(generate: Generate) -> list[Tensor]:
    return [generate(prompt(61, batch=2), max_new_tokens=4, prefill_chunk_size=24)]


def beams(generate: Generate) -> list[Tensor]:
    return [
        generate(prompt(47, batch=2), max_new_tokens=4, num_beams=3),
        generate(prompt(30), max_new_tokens=3, num_beams=2),
    ]


def turns(generate: Generate) -> list[Tensor]:
    """Generate in three turns, the last of which goes back to an earlier one."""
    first = generate(prompt(50), max_new_tokens=3)
    second = generate(torch.cat((first, prompt(20, seed=1)), 1), max_new_tokens=3)
    return [first, second, generate(torch.cat((second[:, :52], prompt(10, seed=2)), 1), max_new_tokens=3)]


def lookup(generate: Generate) -> list[Tensor]:
    """Generate from drafts, some of which are rejected."""
    ids = prompt(61)
    ids[:, 40:] = ids[:, 10:31]
    return [generate(ids, max_new_tokens=6, prompt_lookup_num_tokens=3)]


def padded(generate: Generate) -> list[Tensor]:
    """Generate from a batch padded on the left."""
    ids = prompt(50, batch=3)
    mask = torch.ones_like(ids)
    for row, count in enumerate((0, 20, 43)):
        ids[row, :count], mask[row, :count] = 0, 0
    return [generate(ids, attention_mask=mask, max_new_tokens=4)]


DTYPES = dict.fromkeys((plain, chunked, beams, turns, lookup), torch.float64) | {padded: torch.float32}
"""Checks, and the dtype of each: stock attention gives NaN for padding in float64."""


Check = Callable[[Generate], list[Tensor]]


def checks_of(name: str, every: int) -> list[Check]:
    """Return the checks of a case, or every third one: the others are those of the next cases."""
    refused = {"deepseek_v4": (lookup, padded), "minimax_m3": (padded,), "qwen4": (lookup,)}.get(name, ())
    first = list(CASES).index(name) % every
    return [check for check in list(DTYPES)[first::every] if check not in refused]


@on_each_rank
def generate_for_checks(name: str, shape: Shape, every: int) -> dict[str, Any]:
    """Return the tokens of some checks on a rank."""
    mesh = named_mesh(shape, AXES)

    def run(check: Check, dtype: torch.dtype) -> list[Any]:
        small = model(name, "attnmesh", dtype)
        cache = hf.ShardedCache(small.config, mesh, block=4)

        def generate(ids: Tensor, **options: Any) -> Tensor:
            used = cache if check is turns else hf.ShardedCache(small.config, mesh, block=4)
            options = {"attention_mask": torch.ones_like(ids), **options}
            return hf.generate(small, ids, cache=used, do_sample=False, **options)

        return [tokens.tolist() for tokens in check(generate)]

    return {check.__name__: run(check, DTYPES[check]) for check in checks_of(name, every)}


@contextmanager
def lowest_index_first() -> Iterator[None]:
    """Let `topk` return the lowest index of equal scores first, which on a CPU is any of them."""
    stock = Tensor.topk

    def topk(x: Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Any:
        if type(x) is not Tensor or x.ndim != 3:  # a router's scores, or scores that are recorded
            return stock(x, k, dim, largest, sorted)
        ordered = x.sort(dim=dim, descending=True, stable=True)
        return torch.return_types.topk((ordered.values[..., :k], ordered.indices[..., :k]))

    with patch.object(Tensor, "topk", topk):
        yield


@lru_cache
def stock(name: str, check: Check) -> list[Any]:
    """Return the tokens of stock transformers in a check."""

    def generate(ids: Tensor, **options: Any) -> Tensor:
        options = {"attention_mask": torch.ones_like(ids), "do_sample": False, **options}
        options |= {"prefill_chunk_size": None, "prompt_lookup_num_tokens": None}
        return model(name, "eager", DTYPES[check]).generate(ids, **options)

    with lowest_index_first() if name == "ties" else nullcontext():
        return [tokens.tolist() for tokens in check(generate)]


def cases_on_meshes() -> list[Any]:
    """Return each case on each mesh, which are long, and those of `SAMPLED` with every third check."""
    return [
        pytest.param(name, shape, every, id=f"{name}-{'x'.join(map(str, shape))}{'-some' * (every > 1)}", marks=marks)
        for name in CASES
        for shape in SHAPES
        for every, marks in ((1, [pytest.mark.long]), (3, []))
        if every == 1 or (name, shape) in SAMPLED
    ]


@pytest.mark.parametrize(("name", "shape", "every"), cases_on_meshes())
def test_each_type_gives_the_tokens_of_stock_transformers(name: str, shape: Shape, every: int, pool: Pool) -> None:
    expected = {check.__name__: stock(name, check) for check in checks_of(name, every)}
    for found in pool.run(shape.ranks, generate_for_checks, name, shape, every):
        assert found == expected


def test_each_check_is_in_the_sample() -> None:
    assert {check for name, _ in SAMPLED for check in checks_of(name, 3)} == {*DTYPES}


@on_each_rank
def generate_with_own_best(shape: Shape) -> list[list[int]]:
    """Return the tokens of a rank that keeps its own best keys, and does not merge them with those of other ranks."""
    small = model("deepseek_v32", "attnmesh", torch.float64)
    cache = hf.ShardedCache(small.config, named_mesh(shape, AXES), checked=False)
    with patch("attnmesh.decoding.index_search.best_across", lambda found, *_, **__: found):
        out: Tensor = hf.generate(small, prompt(61), cache=cache, max_new_tokens=6, do_sample=False)
    return out.tolist()


def test_candidates_that_are_not_merged_are_noticed(pool: Pool) -> None:
    for found in pool.run(2, generate_with_own_best, Shape(1, 1, 2)):
        assert found != stock("deepseek_v32", plain)[0]


# --- training ---


def batch(packed: bool) -> dict[str, Tensor]:
    ids = prompt(61, batch=1 if packed else 2)
    positions = {"position_ids": torch.cat((torch.arange(25), torch.arange(36)))[None]} if packed else {}
    return {"input_ids": ids, "labels": ids, **positions}


def trained(small: PreTrainedModel, arguments: dict[str, Any]) -> tuple[float, dict[str, Tensor]]:
    small.train().zero_grad()
    loss = small(**arguments).loss
    loss.backward()
    small.eval()
    return loss.item(), {name: p.grad for name, p in small.named_parameters() if p.grad is not None}


@on_each_rank
def train_on_shards(
    name: str, shape: Shape, layout: Layout, packed: bool, again: bool
) -> tuple[float, dict[str, Tensor]]:
    small = build(CASES[name], "attnmesh", torch.float64)
    if again:
        small.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return trained(small, hf.shard_batch(batch(packed), named_mesh(shape, AXES), layout))


TRAINING = [
    ("deepseek_v32", Shape(1, 2, 1), am.Zigzag(), False, True),
    ("glm", Shape(1, 1, 3), am.Zigzag(), False, True),
    ("ties", Shape(1, 2, 2), am.Striped(4), False, False),
    ("deepseek_v32", Shape(1, 4, 1), am.Contiguous(), True, False),
    ("dots3", Shape(1, 3, 1), am.Zigzag(), False, False),
    ("hy_v4", Shape(1, 1, 2), am.Zigzag(), True, True),
    ("axk2", Shape(1, 2, 1), am.Contiguous(), False, True),
    ("minimax_m3", Shape(1, 1, 3), am.Zigzag(), False, True),
    ("minimax_m3", Shape(1, 2, 2), am.Contiguous(), False, False),
    ("qwen4", Shape(1, 2, 1), am.Zigzag(), False, True),
    ("qwen4", Shape(1, 1, 3), am.Contiguous(), False, False),
]


AT_ONCE = {1, 2, 3, 5, 7, 9}
"""Trainings of `make test`: indexers, ties, packs and means of blocks on each axis and both. The others are long."""


@pytest.mark.parametrize(
    ("name", "shape", "layout", "packed", "again"),
    [pytest.param(*one, marks=[] if number in AT_ONCE else pytest.mark.long) for number, one in enumerate(TRAINING)],
)
def test_gradients_are_those_of_one_device(
    name: str, shape: Shape, layout: Layout, packed: bool, again: bool, pool: Pool
) -> None:
    """With `again`, layers are computed again for the backward pass."""
    with lowest_index_first() if name == "ties" else nullcontext():
        loss, gradients = trained(model(name, "eager", torch.float64), {**batch(packed), "use_cache": False})
    results = pool.run(shape.ranks, train_on_shards, name, shape, layout, packed, again)
    assert sum(found for found, _ in results) / len(results) == pytest.approx(loss, rel=FLOAT64_LOSS)
    largest = worst(float(x.abs().max()) for x in gradients.values())
    for weight, expected in gradients.items():
        found = torch.stack([each.get(weight, torch.zeros_like(expected)) for _, each in results]).mean(0)
        torch.testing.assert_close(found, expected, rtol=FLOAT64_MODEL, atol=FLOAT64_MODEL * largest, msg=weight)


@on_each_rank
def train_compiled(name: str) -> dict[str, bool]:
    """Return whether a compiled model has the loss, and each gradient, of a model that is not compiled."""
    shape = Shape(1, 2, 1)
    results = []
    for wrap in (lambda model: model, partial(torch.compile, backend="eager")):
        small = build(CASES[name], "attnmesh", torch.float64).train()
        loss = wrap(small)(**hf.shard_batch(batch(False), named_mesh(shape, AXES))).loss
        loss.backward()
        gradients = {name: p.grad for name, p in small.named_parameters() if p.grad is not None}
        results.append({"loss": loss.detach(), **gradients})
    eager, compiled = results
    assert eager.keys() == compiled.keys()
    return {name: torch.allclose(x, compiled[name], rtol=FLOAT64_MODEL, atol=FLOAT64_LOSS) for name, x in eager.items()}


@pytest.mark.long
@pytest.mark.parametrize("name", ["deepseek_v32", "minimax_m3", "qwen4"])
def test_a_compiled_model_trains_as_one_that_is_not(name: str, pool: Pool) -> None:
    for right in pool.run(2, train_compiled, name, deadline=60.0):
        assert right == dict.fromkeys(right, True)


def test_blocks_begin_with_each_document(pool: Pool) -> None:
    """Stock recurrent layers mix documents, so the reference has each alone."""
    small, ids = model("qwen4", "eager", torch.float64), batch(True)["input_ids"]
    parts = [trained(small, {"input_ids": x, "labels": x, "use_cache": False}) for x in (ids[:, :25], ids[:, 25:])]
    found = pool.run(2, train_documents, "qwen4", Shape(1, 2, 1), am.Zigzag())
    counts = 24, 35  # of labels
    loss = sum(count * part[0] for count, part in zip(counts, parts, strict=True)) / sum(counts)
    assert sum(each for each, _ in found) / len(found) == pytest.approx(loss, rel=FLOAT64_LOSS)


@on_each_rank
def train_documents(name: str, shape: Shape, layout: Layout) -> tuple[float, dict[str, Tensor]]:
    labels = batch(True)["input_ids"].clone()
    labels[:, 25] = -100
    shards = hf.shard_batch({**batch(True), "labels": labels}, named_mesh(shape, AXES), layout)
    return trained(build(CASES[name], "attnmesh", torch.float64), shards)


@on_each_rank
def refuse_documents() -> str:
    shards = hf.shard_batch(batch(True), named_mesh(Shape(1, 2, 1), AXES))
    with pytest.raises(errors.MaskError, match="packed sequences"):
        build(CASES["minimax_m3"], "attnmesh", torch.float64)(**shards)
    return "refused"


def test_documents_in_blocks_that_count_all_tokens_are_refused(pool: Pool) -> None:
    assert pool.run(2, refuse_documents) == ["refused"] * 2


# --- the cache ---


@on_each_rank
def continue_saved(folder: Path) -> dict[str, bool]:
    """Save, restore and fork a cache with recurrent states. Return which caches then give the tokens of a new one."""
    small, mesh = model("qwen4", "attnmesh", torch.float64), named_mesh(Shape(1, 1, 2), AXES)
    cache, restored = (hf.ShardedCache(small.config, mesh, block=4) for _ in range(2))

    def tokens(used: hf.ShardedCache, prompted: Tensor) -> Tensor:
        found: Tensor = hf.generate(small, prompted, cache=used, max_new_tokens=6, do_sample=False)
        return found

    later = torch.cat((tokens(cache, prompt(61)), prompt(7, seed=4)), 1)
    cache.save(folder)
    restored.restore(folder)
    expected = tokens(hf.ShardedCache(small.config, None), later)
    caches = {"restored": restored, "forked": cache.fork(), "saved": cache}
    return {name: torch.equal(tokens(used, later), expected) for name, used in caches.items()}


def test_last_tokens_are_saved_and_forked(tmp_path: Path, pool: Pool) -> None:
    for right in pool.run(2, continue_saved, tmp_path):
        assert right == dict.fromkeys(right, True)


@on_each_rank
def live_with_index_keys(folder: Path, lost: int) -> dict[str, bool]:
    """Fork, save, restore, recover and reset a cache. Return after which steps it gives the tokens of a new one."""
    small, mesh = model("glm", "attnmesh", torch.float64), named_mesh(Shape(1, 1, 2), AXES)
    cache = hf.ShardedCache(small.config, mesh, block=4, copies=2)
    ids, options = prompt(61), {"max_new_tokens": 6, "do_sample": False}

    def tokens(used: hf.ShardedCache, prompted: Tensor = ids) -> list[list[int]]:
        return hf.generate(small, prompted, cache=used, **options).tolist()

    expected, other = tokens(cache), torch.cat((ids[:, :40], prompt(21, seed=3)), 1)
    forked, shorter = cache.fork(), prompt(61)[:, :50]
    right = {"fork": tokens(forked, other) == tokens(hf.ShardedCache(small.config, mesh, block=4), other)}
    right["beside the fork"] = tokens(cache) == expected
    cache.save(folder)
    restored = hf.ShardedCache(small.config, mesh, block=4)
    restored.restore(folder)
    right["restored lengths"] = [kv_cache.length for kv_cache in restored.kv_caches] == [66] * 6
    right["restore"] = tokens(restored) == expected
    kept = None if torch.distributed.get_rank() == lost else cache
    recovered = hf.ShardedCache.recover(kept, small.config, mesh)
    right["recovered layers"] = len(recovered.kv_caches) == 6
    right["recover"] = tokens(recovered, shorter) == tokens(cache, shorter)
    cache.reset()
    return right | {"empty after reset": not cache.kv_caches, "reset": tokens(cache) == expected}


def test_a_changed_cache_gives_the_tokens_of_a_new_one(tmp_path: Path, pool: Pool) -> None:
    for right in pool.run(2, live_with_index_keys, tmp_path, 1):
        assert right == dict.fromkeys(right, True)


@on_each_rank
def take_pooled_turns() -> tuple[list[list[int]], str]:
    """Return the tokens of turns, of which one goes back, where all layers are indexed; and the error of a crop."""
    small = build(POOLED, "attnmesh", torch.float64)
    cache = hf.ShardedCache(small.config, named_mesh(Shape(1, 1, 2), AXES), block=4)
    options = {"cache": cache, "max_new_tokens": NEW, "do_sample": False}
    found = [hf.generate(small, ids, **options).tolist()[0] for ids in POOLED_TURNS]
    with pytest.raises(errors.ShapeError) as raised:
        cache.crop(-2)
    return found, str(raised.value)


POOLED = Case("qwen4_indexed", "qwen4_exp_text", {"layer_types": ["indexed_attention"] * 3})
POOLED_TURNS = prompt(43), torch.cat((prompt(43)[:, :30], prompt(30, seed=3)), 1)  # back into a block of 4 tokens


def test_means_of_blocks_have_no_tokens_of_an_earlier_turn(pool: Pool) -> None:
    alone = build(POOLED, "eager", torch.float64)
    expected = [alone.generate(ids, max_new_tokens=NEW, do_sample=False).tolist()[0] for ids in POOLED_TURNS]
    for found, error in pool.run(2, take_pooled_turns):
        assert found == expected
        assert error.startswith("ShardedCache crop: expected all tokens or none, as states cannot go back")


# --- what is refused ---


@on_each_rank
def refuse_mesh() -> str:
    small = model("deepseek_v32", "attnmesh", torch.float64)
    with pytest.raises(errors.ShapeError, match="heads axis"):
        hf.generate(small, prompt(20), mesh=named_mesh(Shape(2, 1, 1), AXES), max_new_tokens=3)
    return "refused"


def test_a_heads_axis_is_refused(pool: Pool) -> None:
    assert pool.run(2, refuse_mesh) == ["refused"] * 2


def test_embeddings_of_several_tokens_are_refused() -> None:
    config = tiny_config(CASES["qwen4"])
    config.ple_layer_ids = [1]
    with pytest.raises(errors.KernelError, match="embeddings of several tokens"):
        hf.ShardedCache(config, None)


@on_each_rank
def train_without_hooks() -> float:
    small = build(CASES["deepseek_v32"], "attnmesh", torch.float64)
    shards = hf.shard_batch(batch(False), named_mesh(Shape(1, 2, 1), AXES))
    with patch("attnmesh.hf.training.caller.prepare_indexers"):
        return float(small(**shards).loss)


def test_an_indexer_that_scores_a_shard_alone_is_refused(pool: Pool) -> None:
    with pytest.raises(errors.KernelError, match="one that scores the keys of a shard alone"):
        pool.run(2, train_without_hooks)


def test_hooks_are_removed_with_the_rest() -> None:
    small = build(CASES["deepseek_v32"], "attnmesh", torch.float64)
    small(**hf.shard_batch(batch(False), None)).loss.backward()
    hooks = [module._forward_pre_hooks for module in small.modules() if type(module).__name__.endswith("Indexer")]
    assert all(hooks)
    hf.restore(small)
    assert not any(hooks)


# --- one device ---


@pytest.mark.parametrize("name", some(["deepseek_v32", "deepseek_v4", "minimax_m3", "qwen4"], "deepseek_v32", "qwen4"))
def test_copies_and_other_attention_give_the_same_after_generation(name: str) -> None:
    small, ids = build(CASES[name], "attnmesh", torch.float64), prompt(30)
    options = {"max_new_tokens": 4, "do_sample": False}
    tokens = hf.generate(small, ids, mesh=None, **options)
    torch.save(small, file := BytesIO())
    file.seek(0)
    for other in (small, deepcopy(small), torch.load(file, weights_only=False)):
        assert torch.equal(hf.generate(other, ids, mesh=None, **options), tokens)
        other.set_attn_implementation("eager")
        assert torch.equal(other.generate(ids, **options), tokens)


@pytest.mark.parametrize("name", ["deepseek_v32", "glm", "dots3"])
def test_caches_of_transformers_give_stock_tokens_on_one_device(name: str) -> None:
    small, expected = model(name, "attnmesh", torch.float64), stock(name, plain)[0]
    options = {"max_new_tokens": NEW, "do_sample": False}
    static = {"cache_implementation": "static", "disable_compile": True}
    for more in ({}, static, {"use_cache": False}):
        assert small.generate(prompt(61), **options, **more).tolist() == expected


def test_padding_changes_no_tokens_on_one_device() -> None:
    def generate(ids: Tensor, **options: Any) -> Tensor:
        return model("deepseek_v32", "attnmesh", torch.float32).generate(ids, do_sample=False, **options)

    assert [tokens.tolist() for tokens in padded(generate)] == stock("deepseek_v32", padded)
