"""Weights that ranks of a host share: tokens are those of stock transformers, bits do not depend on the ranks."""

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import attnmesh.hf as hf
from attnmesh import errors
from attnmesh.comm.host_linear import MAX_SHARED_ROWS
from attnmesh.hf import shared_weights
from attnmesh.hf.shared_weights import SharedLinear
from attnmesh.kernels.native.build import library
from tests.support.models import families
from tests.support.models.families import STOCK, prompt
from tests.support.models.shared_weights import SIZES, counted_calls, load, mesh_of, saved_stock, step_of
from tests.support.models.tiny_models import Case, build
from tests.support.process.needs import needs_library
from tests.support.ranks.pool import Pool, on_each_rank

pytestmark = needs_library

FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "gemma3", "gpt-oss", "gemma2", "gemma4", "llama4")


def answers(model: Any, call: Any) -> list[list[Any]]:
    """Tokens of one prompt, of a padded batch, sampled ones, and those of beams."""
    ids, mask = prompt(50, batch=2, seed=2), torch.ones(2, 50, dtype=torch.long)
    mask[0, :9] = 0
    options: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False}
    first = call(model, prompt(70), **options)
    padded = call(model, ids.masked_fill(mask == 0, 0), attention_mask=mask, **options)
    torch.manual_seed(7)
    sampled = call(model, prompt(33), max_new_tokens=5, do_sample=True, top_k=5)
    beams = call(model, prompt(21), num_beams=3, **options)
    return [x.tolist() for x in (first, padded, sampled, beams)]


class Shared(NamedTuple):
    """Answers of a model that shares its weights, and the numbers of projections that one call computes."""

    answers: list[list[Any]]
    projections: set[int]


@on_each_rank
def answer_with_shared_weights(folder: str, ranks: int) -> Shared:
    mesh = mesh_of(ranks)
    with counted_calls() as calls:
        model = hf.share_weights(load(folder), mesh)
        found = answers(model, lambda model, ids, **options: hf.generate(model, ids, mesh=mesh, **options))
    return Shared(found, set(calls))


QUICK = {("llama", 2), ("gpt-oss", 3), ("qwen3", 1)}


@pytest.mark.parametrize(
    ("family", "ranks"),
    [
        pytest.param(family, ranks, marks=[] if (family, ranks) in QUICK else pytest.mark.long)
        for family in FAMILIES
        for ranks in (1, 2, 3, 4)
    ],
)
def test_tokens_are_those_of_stock(family: str, ranks: int, pool: Pool, tmp_path: Path) -> None:
    stock = families.model(family, STOCK[family], **SIZES)
    stock.save_pretrained(tmp_path)
    expected = answers(stock, lambda model, ids, **options: model.generate(ids, **options))
    for shared in pool.run(ranks, answer_with_shared_weights, str(tmp_path), ranks):
        assert shared.answers == expected
        assert max(shared.projections) == 3  # queries, keys and values are one call
        assert 1 in shared.projections


@pytest.mark.parametrize(
    ("ranks", "variant"),
    [
        (2, {}),
        *(pytest.param(*one, marks=pytest.mark.long) for one in ((1, {}), (3, {"tie_word_embeddings": False}))),
    ],
)
def test_layers_of_gpt2_are_shared(ranks: int, variant: dict[str, Any], pool: Pool, tmp_path: Path) -> None:
    stock = build(Case("gpt2", "gpt2", variant), "eager", torch.float32)
    stock.save_pretrained(tmp_path)
    expected = answers(stock, lambda model, ids, **options: model.generate(ids, **options))
    for shared in pool.run(ranks, answer_with_shared_weights, str(tmp_path), ranks):
        assert shared.answers == expected
        assert shared.projections


@on_each_rank
def compute_logits_of_steps(folder: str, ranks: int, dtype: torch.dtype, length: int) -> Tensor:
    """Logits of the answer to a prompt, whose tokens all ranks compute."""
    mesh = mesh_of(ranks)
    with counted_calls():
        model = hf.share_weights(load(folder).to(dtype), mesh)
        cache = hf.ShardedCache(model.config, mesh, block=4, reproducible=True)
        options: dict[str, Any] = {"do_sample": False, "return_dict_in_generate": True, "output_logits": True}
        made = hf.generate(model, prompt(length), cache=cache, max_new_tokens=6, **options)
    return torch.stack(made.logits)


@pytest.mark.parametrize(
    ("family", "dtype", "length"),
    [
        pytest.param("llama", torch.float32, 2, marks=pytest.mark.long),
        ("llama", torch.bfloat16, 66),
        ("gpt-oss", torch.float32, 90),
        pytest.param("gemma3", torch.float32, 200, marks=pytest.mark.long),
        pytest.param("llama4", torch.bfloat16, 131, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_logits_have_the_same_bits_on_any_number_of_ranks(
    family: str, dtype: torch.dtype, length: int, pool: Pool, tmp_path: Path
) -> None:
    families.model(family, STOCK[family], **SIZES).save_pretrained(tmp_path)
    first, *others = (
        pool.run(ranks, compute_logits_of_steps, str(tmp_path), ranks, dtype, length) for ranks in (1, 2, 4)
    )
    for found in (logits for ranks in others for logits in ranks):
        assert torch.equal(found, first[0])


@on_each_rank
def compare_passes_of_one_model(folder: str) -> dict[str, bool]:
    """Whether ranks that share weights leave passes as they were: without a cache, with gradients, and alone."""
    ids = prompt(8)
    plain, mesh = load(folder), mesh_of(2)
    with counted_calls() as calls:
        model = hf.share_weights(load(folder), mesh)
        assert isinstance(model.lm_head, SharedLinear)
        same = {"without a cache": torch.equal(model(ids).logits, plain(ids).logits)}
        model(ids, labels=ids).loss.backward()
        plain(ids, labels=ids).loss.backward()
        gradients = [(a.grad, b.grad) for a, b in zip(model.parameters(), plain.parameters(), strict=True)]
        same["gradients"] = all(a is not None and b is not None and torch.equal(a, b) for a, b in gradients)
        with torch.no_grad():
            alone = hf.ShardedCache(model.config, None)
            found = model(ids[:, :1], past_key_values=alone).logits
            same["a cache without a mesh"] = torch.equal(found, plain(ids[:, :1]).logits)
        same["no shared calls so far"] = not calls
        hf.generate(model, ids, mesh=mesh, max_new_tokens=2, do_sample=False)
        same["shared calls on the mesh"] = bool(calls)
    return same


def test_passes_that_share_no_weights_give_what_a_plain_model_gives(pool: Pool, tmp_path: Path) -> None:
    families.model("llama", STOCK["llama"], **SIZES).save_pretrained(tmp_path)
    for same in pool.run(2, compare_passes_of_one_model, str(tmp_path)):
        assert same == dict.fromkeys(same, True)


def test_autocast_gives_what_it_gives_a_plain_model() -> None:
    plain, shared = (families.model("llama", "attnmesh", **SIZES) for _ in range(2))
    with counted_calls(), torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(step_of(hf.share_weights(shared, None)), step_of(plain))


@on_each_rank
def generate_compiled(folder: str, ranks: int, how: str) -> list[list[int]]:
    """Tokens of a model that is compiled after its weights are shared."""
    mesh = mesh_of(ranks)
    with counted_calls():
        model = hf.share_weights(load(folder), mesh)
        if how == "forward":
            model.forward = torch.compile(model.forward, backend="eager")
        else:
            {"model": model, "decoder": model.model, "layer": model.model.layers[0]}[how].compile(backend="eager")
        tokens: list[list[int]] = hf.generate(model, prompt(20), mesh=mesh, max_new_tokens=3, do_sample=False).tolist()
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()  # else a later failure of this rank is blamed on its compiler
    return tokens


@pytest.mark.long
@pytest.mark.parametrize("how", ["forward", "model", "decoder", "layer"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_model_that_is_compiled_has_the_tokens_of_stock(ranks: int, how: str, pool: Pool, tmp_path: Path) -> None:
    expected = saved_stock(tmp_path, 20, 3)
    assert pool.run(ranks, generate_compiled, str(tmp_path), ranks, how) == [expected] * ranks


@on_each_rank
def decode_rows_of(folder: str) -> list[int]:
    """The next token of three requests of unlike lengths, which are rows of one pass."""
    mesh, lengths = mesh_of(2), (9, 30, 44)
    with counted_calls() as calls:
        model = hf.share_weights(load(folder), mesh)
        caches = [hf.ShardedCache(model.config, mesh) for _ in lengths]
        for n, cache in zip(lengths, caches, strict=True):
            hf.prefill(model, prompt(n, seed=n), cache)
        calls.clear()
        logits = hf.decode_rows(model, [int(prompt(n, seed=n)[0, -1]) for n in lengths], caches)
        assert calls
    return logits.argmax(-1).tolist()


def test_rows_of_an_engine_are_shared(pool: Pool, tmp_path: Path) -> None:
    stock = families.model("llama", STOCK["llama"], **SIZES)
    stock.save_pretrained(tmp_path)
    expected = [int(stock(prompt(n, seed=n)).logits[0, -1].argmax()) for n in (9, 30, 44)]
    assert pool.run(2, decode_rows_of, str(tmp_path)) == [expected] * 2


@on_each_rank
def catch_refusal(folder: str, how: str) -> str:
    mesh = mesh_of(2)
    model = load(folder)
    if how == "another model" and dist.get_rank():
        model.lm_head = torch.nn.Linear(96, 33, bias=False)
    if how == "other weights" and dist.get_rank():
        model.lm_head.weight.data.neg_()
    if how == "sharded":
        hf.tensor_parallel(model, mesh["keys"])
    if how == "no library":
        shared_weights.library = lambda: library()._replace(reason="there is no C++ compiler")  # type: ignore[assignment]
    try:
        with counted_calls():
            hf.share_weights(model, mesh)
    except errors.InputError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        shared_weights.library = library
    return "shared"


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("another model", "MeshError: share_weights: expected the same call on every rank"),
        ("other weights", "MeshError: share_weights: expected the same call on every rank"),
        ("sharded", "ModelError: share_weights: expected whole weights"),
        ("no library", "KernelError: share_weights: expected the native library, given there is no C++ compiler"),
    ],
)
def test_what_cannot_be_shared_is_refused_on_all_ranks(how: str, said: str, pool: Pool, tmp_path: Path) -> None:
    families.model("llama", STOCK["llama"], **SIZES).save_pretrained(tmp_path)
    found = pool.run(2, catch_refusal, str(tmp_path), how)
    assert found[0] == found[1]
    assert found[0].startswith(said)


def test_more_rows_than_a_call_takes_are_computed_by_each_rank() -> None:
    with counted_calls() as calls, torch.no_grad():
        model = hf.share_weights(families.model("llama", "attnmesh", **SIZES), None)
        cache = hf.ShardedCache(model.config, None)
        model(prompt(MAX_SHARED_ROWS[torch.float32] + 1), past_key_values=cache)
        assert not calls
        model(prompt(MAX_SHARED_ROWS[torch.float32]), past_key_values=cache)
        assert set(calls) == {1}  # which layers share an input is not known yet
        calls.clear()
        model(prompt(1), past_key_values=cache)
        assert set(calls) == {1, 2, 3}
