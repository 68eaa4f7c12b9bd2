"""Rows of several requests in one forward pass give the tokens and logits that each gives alone."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import attnmesh.hf as hf
from attnmesh import errors
from attnmesh.mesh.shapes import AXES, Shape
from attnmesh.runtime.counters import count_traffic
from tests.support.models import families
from tests.support.models.checks import precisely
from tests.support.models.families import CONFIGS, FEW, prompt
from tests.support.models.tiny_models import Case, build
from tests.support.ranks.odd_rank import alert
from tests.support.ranks.pool import Pool, on_each_rank
from tests.support.truth.mesh_problems import named_mesh
from tests.support.truth.seeds import seeds, some

LENGTHS, LONGER, NEW = (37, 2, 92, 1, 16), (37, 12, 92, 30, 16), 4
SHAPES = [Shape(1, 1, 1), Shape(1, 1, 2), Shape(1, 3, 1), Shape(2, 1, 2)]
OTHERS = ("deepseek_v3", "qwen3_next", "mamba", "falcon_h1", "bart", "deepseek_v32", "gpt2")
"""Model types with latents, recurrent states alone and beside keys, no position_ids, and indexers."""

FLOAT32_PART, FLOAT64_PART = 1e-3, 1e-6
"""Parts of the deviation of logits, above what layers round: in float64 too, where norms and angles are float32."""


def alone(model: PreTrainedModel, ids: Tensor, new: int, **place: Any) -> Tensor:
    """Return the logits of the new tokens, of `generate`. Some models force the last token, so tokens are not read."""
    options: dict[str, Any] = {"return_dict_in_generate": True, "output_logits": True, "do_sample": False}
    return torch.cat(hf.generate(model, ids, max_new_tokens=new, **options, **place).logits)


def check_together(model: PreTrainedModel, mesh: Any, tolerance: float, **options: Any) -> None:
    """Decode prompts together: one is a fork, one joins late, one leaves early."""
    prompts = [prompt(length, seed=length) for length in LENGTHS]
    caches = [hf.ShardedCache(model.config, mesh, **options) for _ in prompts]
    wanted = [alone(model, ids, NEW, mesh=mesh) for ids in prompts]
    given: list[list[int]] = [[] for _ in prompts]
    for row, (ids, cache) in enumerate(zip(prompts, caches, strict=True)):
        given[row].append(int(alone(model, ids, 1, cache=cache).argmax()))
    if not caches[0].irreversible_layers:
        caches[2] = caches[2].fork()
    for step in range(NEW + 1):
        rows = [row for row in range(len(prompts)) if len(given[row]) < NEW - (row == 1) and (row != 4 or step > 1)]
        if not rows:
            break
        logits = hf.decode_rows(model, [given[row][-1] for row in rows], [caches[row] for row in rows])
        for row, scores in zip(rows, logits, strict=True):
            expected = wanted[row][len(given[row])]
            assert float((scores - expected).abs().max()) <= tolerance * float(expected.std())
            given[row].append(int(scores.argmax()))
    for row, expected in enumerate(wanted):
        assert given[row] == expected.argmax(-1).tolist()[: len(given[row])]
        text = torch.cat((prompts[row][0], torch.tensor(given[row][:-1])))
        assert torch.equal(caches[row].tokens, text[None])


@on_each_rank
def pass_several_tokens(family: str, shape: Shape) -> None:
    """Give each row several tokens at once, and take some back: logits are those of all tokens in one forward pass."""
    model, mesh = families.model(family, "attnmesh"), named_mesh(shape, AXES)
    texts = [prompt(length, seed=length)[0].tolist() for length in (LENGTHS if family == "qwen2" else LONGER)]
    caches = [hf.ShardedCache(model.config, mesh) for _ in texts]
    for text, cache in zip(texts, caches, strict=True):
        hf.generate(model, torch.tensor([text]), cache=cache, max_new_tokens=1, do_sample=False)
    caches[2] = caches[2].fork()
    for step, counts in enumerate([(3, 1, 6, 2, 1), (1, 1, 1, 1, 1), (1, 5, 1, 1, 4)]):
        new = [prompt(count, seed=step)[0].tolist() for count in counts]
        tokens = [own[0] if len(own) == 1 and row % 2 else own for row, own in enumerate(new)]
        for row, logits in enumerate(hf.decode_rows(model, tokens, caches).split(counts)):
            own, cache = new[row], caches[row]
            with torch.no_grad():
                expected = model(torch.tensor([texts[row] + own])).logits[0, -len(own) :]
            assert float((logits - expected).abs().max()) <= FLOAT32_PART * float(expected.std())
            texts[row] += own[: max(1, len(own) - row)]
            cache.crop(len(texts[row]) - cache.get_seq_length())
            assert cache.tokens is not None
            assert cache.tokens[0].tolist() == texts[row]


@pytest.mark.parametrize("family", some([*CONFIGS], "gemma3", "llama", "qwen2"))
def test_rows_of_several_tokens_are_one_forward_pass(family: str, pool: Pool) -> None:
    shape = SHAPES[1 - [*CONFIGS].index(family) % 2]
    pool.run(shape.ranks, pass_several_tokens, family, shape)


@on_each_rank
def pass_a_family_together(family: str, shape: Shape) -> None:
    check_together(families.model(family, "attnmesh"), named_mesh(shape, AXES), FLOAT32_PART)


@pytest.mark.parametrize(
    "number", seeds({[*CONFIGS].index(family) for family in FEW if family not in ("llama", "qwen3")}, len(CONFIGS))
)
def test_rows_give_what_each_gives_alone(number: int, pool: Pool) -> None:
    shape = SHAPES[number % len(SHAPES)]
    pool.run(shape.ranks, pass_a_family_together, list(CONFIGS)[number], shape)


@pytest.mark.long
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("family", CONFIGS)
def test_rows_of_every_family_give_what_each_gives_alone(family: str, shape: Shape, pool: Pool) -> None:
    pool.run(shape.ranks, pass_a_family_together, family, shape)


@on_each_rank
def pass_a_type_together(name: str, shape: Shape) -> None:
    model = build(Case(name, name), "attnmesh", torch.float64)
    with precisely(model, torch.float64):
        check_together(model, named_mesh(shape, AXES), FLOAT64_PART)


@pytest.mark.parametrize("name", some(OTHERS, "qwen3_next", "bart"))
def test_rows_of_other_types_give_what_each_gives_alone(name: str, pool: Pool) -> None:
    pool.run(2, pass_a_type_together, name, Shape(1, 1, 2))


def test_rows_of_recurrent_layers_give_the_same_on_one_rank(pool: Pool) -> None:
    pool.run(1, pass_a_type_together, "mamba", Shape(1, 1, 1))


@on_each_rank
def pass_with_options(shape: Shape, options: dict[str, Any]) -> None:
    check_together(families.model("gemma3", "attnmesh"), named_mesh(shape, AXES), FLOAT32_PART, **options)


@pytest.mark.parametrize(
    "options", [{"reproducible": True}, {"merge": "gather", "windows": False, "block": 4, "checked": False}]
)
def test_caches_with_options_give_the_same(options: dict[str, Any], pool: Pool) -> None:
    pool.run(2, pass_with_options, Shape(1, 1, 2), options)


@on_each_rank
def pass_while_sharing_weights(ranks: int) -> None:
    """Compare rows on ranks that share weights and keys with rows on one rank."""
    mesh = named_mesh(Shape(1, 1, ranks), AXES)
    assert mesh is not None
    sizes = {"num_attention_heads": 6, "num_key_value_heads": 2}
    whole = families.model("llama", "attnmesh", **sizes)
    shared = hf.tensor_parallel(families.model("llama", "attnmesh", **sizes), mesh["keys"], output="heads")
    prompts = [prompt(length, seed=length) for length in LENGTHS]
    found = []
    for model, place, output in ((whole, None, "replicated"), (shared, mesh, "heads")):
        caches = [hf.ShardedCache(model.config, place, output=output) for _ in prompts]
        tokens = [int(ids[0, -1]) for ids in prompts]
        for ids, cache in zip(prompts, caches, strict=True):
            hf.prefill(model, ids, cache)
        steps = []
        for _ in range(NEW):
            steps.append(hf.decode_rows(model, tokens, caches))
            tokens = steps[-1].argmax(-1).tolist()
        found.append(torch.stack(steps))
    torch.testing.assert_close(found[1], found[0], atol=2 * FLOAT32_PART, rtol=2 * FLOAT32_PART)


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.long), 3])
def test_ranks_that_share_weights_and_keys_give_the_same(ranks: int, pool: Pool) -> None:
    pool.run(ranks, pass_while_sharing_weights, ranks)


@on_each_rank
def count_merges_of_a_step() -> tuple[float, float]:
    """Return the merges of a step of one row, and of five, for each layer."""
    model, mesh = families.model("llama", "attnmesh"), named_mesh(Shape(1, 1, 2), AXES)
    caches = [hf.ShardedCache(model.config, mesh) for _ in LENGTHS]
    for length, cache in zip(LENGTHS, caches, strict=True):
        hf.generate(model, prompt(length), cache=cache, max_new_tokens=2, do_sample=False)
    found = []
    for rows in (1, len(LENGTHS)):
        hf.decode_rows(model, [3] * rows, caches[:rows])
        with count_traffic() as traffic:
            hf.decode_rows(model, [3] * rows, caches[:rows])
        found.append(len(traffic.merges) / model.config.num_hidden_layers)
    return found[0], found[1]


def test_a_layer_takes_one_merge_for_all_rows(pool: Pool) -> None:
    assert pool.run(2, count_merges_of_a_step) == [(1, 1)] * 2


# --- interrupted calls ---


def fail(*_: Any) -> None:
    raise MemoryError


def interrupt(model: PreTrainedModel, tokens: list[int], caches: list[Any], part: str, *, on_all: bool) -> None:
    """Raise in a part of the model, on all ranks or on rank 1 alone: rank 0 finds it in the next call of rank 1."""
    if not on_all and torch.distributed.get_rank() == 0:
        with pytest.raises(errors.MeshError):
            hf.decode_rows(model, tokens, caches)
        return
    handle = model.get_submodule(part).register_forward_pre_hook(fail)
    with pytest.raises(MemoryError):
        hf.decode_rows(model, tokens, caches)
    handle.remove()
    if not on_all:
        with pytest.raises(errors.MeshError):
            hf.decode_rows(model, tokens, caches)


@on_each_rank
def check_after_interruption(family: str, ranks: int, lengths: list[int], part: str, on_all: bool) -> None:
    """Interrupt a call, and make it again: the logits are those of a call that nothing interrupted."""
    model, mesh = families.model(family, "attnmesh"), named_mesh(Shape(1, 1, ranks), AXES)
    tokens, caches = [5 + row for row in range(len(lengths))], [hf.ShardedCache(model.config, mesh) for _ in lengths]
    for length, cache in zip(lengths, caches, strict=True):
        if length:
            hf.prefill(model, prompt(length + 1, seed=length), cache)
    expected = [hf.decode_rows(model, [token], [cache.fork()]) for token, cache in zip(tokens, caches, strict=True)]
    with alert():
        interrupt(model, tokens, caches, part, on_all=on_all)
    logits = hf.decode_rows(model, tokens, caches)
    for row, (length, cache) in enumerate(zip(lengths, caches, strict=True)):
        assert [kv_cache.length for kv_cache in cache.kv_caches] == [length + 1] * len(cache.kv_caches)
        assert cache.tokens.shape[1] == length + 1
        difference = float((logits[row : row + 1] - expected[row]).abs().max())
        assert difference <= FLOAT32_PART * float(expected[row].std())


PLACES = [(ranks, part, True) for ranks in (1, 2) for part in ("model.layers.1", "model.layers.1.mlp", "lm_head")]
"""Ranks, a part that raises, and whether it does on all ranks. On one alone, the others have one more merge."""


FAMILIES_AND_LENGTHS = [
    *(("llama", lengths) for lengths in ([9], [9, 30], [9, 30, 0])),
    *(pytest.param("gemma3", lengths, marks=pytest.mark.long) for lengths in ([9], [9, 30])),
    ("gemma3", [9, 30, 0]),
]


@pytest.mark.parametrize(("ranks", "part", "on_all"), [*PLACES, (2, "model.layers.1", False)])
@pytest.mark.parametrize(("family", "lengths"), FAMILIES_AND_LENGTHS, ids=str)
def test_a_call_that_raised_adds_no_tokens(
    family: str, ranks: int, part: str, on_all: bool, lengths: list[int], pool: Pool
) -> None:
    pool.run(ranks, check_after_interruption, family, ranks, lengths, part, on_all)


def test_a_cache_goes_on_after_a_call_that_another_row_broke_off() -> None:
    """Its own group had succeeded: no later call takes tokens back that were added since."""
    model = families.model("llama", "attnmesh")
    caches = [hf.ShardedCache(model.config) for _ in range(2)]
    hf.prefill(model, prompt(10), caches[0])
    layer, left = model.get_submodule("model.layers.1"), [1]

    def fail_in_second_group(*_: Any) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise MemoryError

    handle = layer.register_forward_pre_hook(fail_in_second_group)
    with pytest.raises(MemoryError):
        hf.decode_rows(model, [5, 6], caches)  # an empty cache is a group of its own
    handle.remove()
    hf.prefill(model, prompt(30), caches[0])
    expected = hf.ShardedCache(model.config)
    hf.prefill(model, prompt(30), expected)
    rows = [hf.decode_rows(model, [7], [cache]) for cache in (caches[0], expected)]
    assert caches[0].get_seq_length() == expected.get_seq_length() == 30
    assert float((rows[0] - rows[1]).abs().max()) <= FLOAT32_PART * float(rows[1].std())


@on_each_rank
def catch_refusal_after_interruption() -> str:
    """Interrupt a call on rank 1 after the last merge of rank 0, whose call ends. Return the error of the next."""
    model, mesh = families.model("llama", "attnmesh"), named_mesh(Shape(1, 1, 2), AXES)
    cache = hf.ShardedCache(model.config, mesh)
    hf.prefill(model, prompt(10), cache)
    if torch.distributed.get_rank() == 0:
        hf.decode_rows(model, [5], [cache])
    else:
        interrupt(model, [5], [cache], "lm_head", on_all=True)
    with pytest.raises(errors.MeshError) as caught:
        hf.decode_rows(model, [5], [cache])
    return str(caught.value)


def test_a_call_that_raised_on_one_rank_alone_is_told_by_its_tokens(pool: Pool) -> None:
    first, second = pool.run(2, catch_refusal_after_interruption)
    assert first == second
    assert "lengths" in first
    assert "10" in first


def test_an_interrupted_generation_is_refused_until_its_prompt_is_prefilled() -> None:
    model = families.model("llama", "attnmesh")
    cache = hf.ShardedCache(model.config)
    handle = model.model.layers[1].register_forward_pre_hook(fail)
    ids = prompt(9)
    with pytest.raises(MemoryError):
        hf.generate(model, ids, cache=cache, max_new_tokens=2)
    handle.remove()
    with pytest.raises(errors.KernelError, match="a cache that no error interrupted, given an interrupted one"):
        hf.decode_rows(model, [5], [cache])
    for _ in range(2):  # the second computes nothing
        hf.prefill(model, ids, cache)
    assert hf.decode_rows(model, [5], [cache]).shape == (1, 97)


@on_each_rank
def catch_refusal_after_a_call_of_the_model(on_all: bool) -> str:
    """Interrupt a call of the model itself, on both ranks or on the second alone. Return the error of `decode_rows`."""
    model, mesh = families.model("llama", "attnmesh"), named_mesh(Shape(1, 1, 2), AXES)
    cache, ids = hf.ShardedCache(model.config, mesh), prompt(10)
    hf.prefill(model, ids, cache)
    expected = hf.decode_rows(model, [5], [cache.fork()])
    raises = on_all or torch.distributed.get_rank() == 1
    handle = model.model.layers[1].register_forward_pre_hook(fail) if raises else None
    with alert():
        with pytest.raises(MemoryError if raises else errors.InputError), torch.no_grad():
            model(torch.tensor([[5]]), past_key_values=cache, use_cache=True)
        if handle is not None:
            handle.remove()
        if raises and not on_all:  # the first rank waits in its call
            with pytest.raises(errors.InputError):
                hf.decode_rows(model, [5], [cache])
    with pytest.raises(errors.InputError) as caught:
        hf.decode_rows(model, [5], [cache])
    cache = cache if on_all else hf.ShardedCache(model.config, mesh)
    hf.prefill(model, ids, cache)
    torch.testing.assert_close(hf.decode_rows(model, [5], [cache]), expected)
    return str(caught.value)


@pytest.mark.parametrize("on_all", [True, False])
def test_a_call_of_the_model_that_raised_is_told_by_its_layers(on_all: bool, pool: Pool) -> None:
    first, second = pool.run(2, catch_refusal_after_a_call_of_the_model, on_all)
    assert first == second
    assert "hf.decode_rows caches: expected a cache that no error interrupted, given an interrupted one" in first


def test_caches_that_cannot_go_back_are_refused_after_an_error() -> None:
    model = build(Case("qwen3_next", "qwen3_next"), "attnmesh", torch.float32)
    caches = [hf.ShardedCache(model.config) for _ in range(2)]
    for length, cache in zip((9, 30), caches, strict=True):
        hf.prefill(model, prompt(length), cache)
    interrupt(model, [5, 6], caches, "lm_head", on_all=True)
    with pytest.raises(errors.KernelError, match="a cache that no error interrupted, given an interrupted one"):
        hf.decode_rows(model, [5, 6], caches)
    for length, cache in zip((9, 30), caches, strict=True):
        hf.prefill(model, prompt(length), cache)
    assert hf.decode_rows(model, [5, 6], caches).shape == (2, 97)


# --- refusals ---

Spoil = Callable[[PreTrainedModel, list[int], list[Any]], Any]
"""Makes a call wrong, in place."""


def unequal(_: Any, tokens: list[int], __: Any) -> None:
    tokens.pop()


def unknown_token(_: Any, tokens: list[int], __: Any) -> None:
    tokens[0] = 97


def twice(_: Any, __: Any, caches: list[Any]) -> None:
    caches[1] = caches[0]


def no_cache(_: Any, __: Any, caches: list[Any]) -> None:
    caches[1] = None


def padding(model: PreTrainedModel, _: Any, caches: list[Any]) -> None:
    caches[1] = hf.ShardedCache(model.config, caches[0].mesh)
    hf.prefill(model, prompt(9), caches[1], attention_mask=(torch.arange(9) > 3)[None].long())


def batch(model: PreTrainedModel, _: Any, caches: list[Any]) -> None:
    caches[1] = hf.ShardedCache(model.config, caches[0].mesh)
    hf.prefill(model, prompt(9, batch=2), caches[1])


def options(model: PreTrainedModel, _: Any, caches: list[Any]) -> None:
    caches[1] = hf.ShardedCache(model.config, caches[0].mesh, kernel="reference")


def other_token(_: Any, tokens: list[int], __: Any) -> None:
    tokens[0] += 1


ON_ALL: dict[Spoil, str] = {
    unequal: "hf.decode_rows tokens: expected a list of 2 ints, given [3]. Fix: pass the next token of each request",
    unknown_token: "hf.decode_rows tokens: expected tokens from 0 to 96, given [97]",
    twice: "hf.decode_rows caches: expected each cache once, given one cache twice. Fix: pass cache.fork()",
    no_cache: "hf.decode_rows caches: expected ShardedCaches, given NoneType",
    padding: "hf.decode_rows caches: expected caches without padding, given padding",
    batch: "hf.decode_rows caches: expected caches of one sequence, given one of 2",
    options: "hf.decode_rows caches: expected caches of one model with the same options, given another kernel",
}

ON_ONE: dict[Spoil, str] = {
    unequal: ON_ALL[unequal],
    unknown_token: ON_ALL[unknown_token],
    no_cache: ON_ALL[no_cache],
    other_token: "hf.decode_rows: expected the same call on every rank",
}


@on_each_rank
def catch_refusal(spoil: Spoil, on_all: bool) -> str:
    model, mesh = families.model("llama", "attnmesh"), named_mesh(Shape(1, 1, 2), AXES)
    caches: list[Any] = [hf.ShardedCache(model.config, mesh) for _ in range(2)]
    for length, cache in zip((9, 30), caches, strict=True):
        hf.prefill(model, prompt(length), cache)
    tokens, given = [3, 4], [*caches]
    if on_all or torch.distributed.get_rank() == 1:
        spoil(model, tokens, given)
    with pytest.raises(errors.InputError) as caught:
        hf.decode_rows(model, tokens, given)
    assert hf.decode_rows(model, [3, 4], caches).shape == (2, 97)
    return str(caught.value)


@pytest.mark.parametrize("spoil", ON_ALL, ids=lambda spoil: spoil.__name__)
def test_wrong_calls_are_refused_alike(spoil: Spoil, pool: Pool) -> None:
    answers = pool.run(2, catch_refusal, spoil, True)
    assert len(set(answers)) == 1
    assert ON_ALL[spoil] in answers[0]


@pytest.mark.parametrize("spoil", ON_ONE, ids=lambda spoil: spoil.__name__)
def test_a_call_that_is_wrong_on_one_rank_is_refused_on_all(spoil: Spoil, pool: Pool) -> None:
    answers = pool.run(2, catch_refusal, spoil, False)
    assert len(set(answers)) == 1
    assert ON_ONE[spoil] in answers[0]


def test_a_rope_that_would_change_is_refused() -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    model = families.model("llama", "attnmesh", rope_parameters=rope, max_position_embeddings=32)
    short, long = hf.ShardedCache(model.config), hf.ShardedCache(model.config)
    hf.prefill(model, prompt(9), short)
    hf.prefill(model, prompt(32), long)
    hf.decode_rows(model, [3, 4], [short, long])
    with pytest.raises(errors.ShapeError, match="a rope that stays the same, given 33 tokens, where it changes"):
        hf.decode_rows(model, [3, 4], [short, long])


def test_the_models_context_ends() -> None:
    model = families.model("llama", "attnmesh", max_position_embeddings=16)
    cache = hf.ShardedCache(model.config)
    hf.prefill(model, prompt(16), cache)
    hf.decode_rows(model, [3], [cache])
    with pytest.raises(errors.ShapeError, match="at most 16 tokens, the model's context, given 17"):
        hf.decode_rows(model, [3], [cache])
