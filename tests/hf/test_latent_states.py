"""Multi-head latent attention: the tokens of stock transformers, from latents that are cached and attended in place."""

from collections.abc import Callable
from copy import deepcopy
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from transformers import Mistral4Config, PreTrainedModel
from transformers.models.mistral4.modeling_mistral4 import Mistral4ForCausalLM

import attnmesh.hf as hf
from attnmesh import errors
from attnmesh.mesh.shapes import AXES, Shape
from attnmesh.runtime.counters import count_traffic
from tests.support.models.families import prompt
from tests.support.models.tiny_models import Case, build, randomise
from tests.support.ranks.pool import Pool, on_each_rank
from tests.support.truth.mesh_problems import named_mesh

TYPES = ("axk1", "deepseek_v2", "deepseek_v3", "glm4_moe_lite", "longcat_flash", "minicpm3", "mistral4", "youtu")

SHAPES = (Shape(1, 1, 1), Shape(1, 2, 1), Shape(1, 1, 3), Shape(1, 2, 2))

SAMPLED = dict(zip(("minicpm3", "deepseek_v2", "longcat_flash", "deepseek_v3"), SHAPES, strict=True))
"""Each mesh with one type in `make test`."""

RANK, ROTATED, LAYERS = 16, 4, 3
"""Sizes of the tiny models."""

Generate = Callable[..., Tensor]


MISTRAL4: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 32, "moe_intermediate_size": 32, "n_routed_experts": 4,
    "num_hidden_layers": LAYERS, "num_attention_heads": 4, "num_key_value_heads": 4, "num_experts_per_tok": 2,
    "n_group": 1, "topk_group": 1, "kv_lora_rank": RANK, "q_lora_rank": 16, "qk_rope_head_dim": ROTATED,
    "qk_nope_head_dim": 8, "v_head_dim": 8, "max_position_embeddings": 512, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": None,
    "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 64,
        "llama_4_scaling_beta": 0.5,
    },
}  # fmt: skip
"""Sizes of a type that `AutoModelForCausalLM` does not list."""


@lru_cache(maxsize=4)
def model(kind: str, attention: str) -> PreTrainedModel:
    """Return a tiny model in float64."""
    if kind != "mistral4":
        return build(Case(kind, kind), attention, torch.float64)
    config = Mistral4Config(**MISTRAL4)
    config._attn_implementation, config._experts_implementation = attention, "eager"
    made = Mistral4ForCausalLM(config).to(torch.float64)
    randomise(made)
    return made.eval()


def plain(generate: Generate) -> list[Tensor]:
    return [generate(prompt(90), max_new_tokens=6)]


def padded(generate: Generate) -> list[Tensor]:
    """Generate from a batch padded on the left."""
    ids = prompt(80, batch=3)
    mask = torch.ones_like(ids)
    for row, count in enumerate((0, 30, 73)):
        ids[row, :count], mask[row, :count] = 0, 0
    return [generate(ids, attention_mask=mask, max_new_tokens=4)]


def chunked(generate: Generate) -> list[Tensor]:
    return [generate(prompt(100), max_new_tokens=4, prefill_chunk_size=40)]


def beams(generate: Generate) -> list[Tensor]:
    return [generate(prompt(71, batch=2), max_new_tokens=4, num_beams=3)]


def turns(generate: Generate) -> list[Tensor]:
    """Generate in three turns, the last of which goes back to an earlier one."""
    first = generate(prompt(70), max_new_tokens=3)
    second = generate(torch.cat((first, prompt(30, seed=1)), 1), max_new_tokens=3)
    return [first, second, generate(torch.cat((second[:, :72], prompt(20, seed=2)), 1), max_new_tokens=3)]


CHECKS = (plain, padded, chunked, beams, turns)


Check = Callable[[Generate], list[Tensor]]


def checks_of(kind: str, every: int) -> list[Check]:
    """Return the checks of a type, or every second one: the others are those of the next type."""
    return [*CHECKS[[*TYPES].index(kind) % every :: every]]


@on_each_rank
def generate_for_checks(kind: str, shape: Shape, checks: list[Check]) -> dict[str, Any]:
    """Return the tokens of each check on a rank."""
    small, mesh = model(kind, "attnmesh"), named_mesh(shape, AXES)
    found = {}
    for check in checks:
        cache = hf.ShardedCache(small.config, mesh, block=4)

        def generate(ids: Tensor, cache: hf.ShardedCache = cache, **options: Any) -> Tensor:
            return hf.generate(small, ids, cache=cache, do_sample=False, **options)

        found[check.__name__] = [tokens.tolist() for tokens in check(generate)]
    return found


@lru_cache
def stock(kind: str, check: Check) -> list[Any]:
    """Return the tokens of stock transformers in a check."""

    def generate(ids: Tensor, **options: Any) -> Tensor:
        options = {"attention_mask": torch.ones_like(ids), **options, "prefill_chunk_size": None}
        return model(kind, "sdpa").generate(ids, do_sample=False, **options)

    return [tokens.tolist() for tokens in check(generate)]


def types_on_meshes() -> list[Any]:
    """Return each type on each mesh, which are long, and those of `SAMPLED` with every second check."""
    return [
        pytest.param(kind, shape, every, id=f"{kind}-{'x'.join(map(str, shape))}{'-some' * (every > 1)}", marks=marks)
        for kind in TYPES
        for shape in SHAPES
        for every, marks in ((1, [pytest.mark.long]), (2, []))
        if every == 1 or SAMPLED.get(kind) == shape
    ]


@pytest.mark.parametrize(("kind", "shape", "every"), types_on_meshes())
def test_each_type_gives_the_tokens_of_stock_transformers(kind: str, shape: Shape, every: int, pool: Pool) -> None:
    checks = checks_of(kind, every)
    for found in pool.run(shape.ranks, generate_for_checks, kind, shape, checks):
        assert found == {check.__name__: stock(kind, check) for check in checks}


def test_each_check_is_in_the_sample() -> None:
    assert {check for kind in SAMPLED for check in checks_of(kind, 2)} == {*CHECKS}


# --- what is kept, computed and sent ---


class Held(NamedTuple):
    """What a rank holds and receives in prefill, and the rows of latents that each step after it expands."""

    bytes: int
    tokens: int
    expanded_rows: list[int]
    received_elements: int


@on_each_rank
def count_bytes_and_elements(shape: Shape, length: int) -> Held:
    small = model("deepseek_v3", "attnmesh")
    rows = []
    cache = hf.ShardedCache(small.config, named_mesh(shape, AXES), exchange="bulk")
    with count_traffic() as traffic:
        hf.prefill(small, prompt(length), cache)
    held, tokens = cache.held_bytes, cache.held
    hook = small.model.layers[0].self_attn.kv_b_proj.register_forward_hook(
        lambda _, inputs, __: rows.append(inputs[0].numel() // RANK)
    )
    hf.generate(small, prompt(length), cache=cache, max_new_tokens=4, do_sample=False)
    hook.remove()
    return Held(held, tokens, rows, traffic.vectors)


@pytest.mark.parametrize("shape", SHAPES[1:3], ids=lambda shape: "x".join(map(str, shape)))
def test_latents_are_held_once_travel_and_are_never_expanded_in_decoding(shape: Shape, pool: Pool) -> None:
    length = 257
    answers = pool.run(shape.ranks, count_bytes_and_elements, shape, length)
    assert sum(held.bytes for held in answers) == (length - 1) * (RANK + ROTATED) * LAYERS * 8
    for held in answers:
        assert held.expanded_rows == [1] * 4
        if shape.keys == 1:  # latents of the other ranks' tokens and nothing else
            assert held.received_elements <= LAYERS * (length - 1 - held.tokens) * (RANK + ROTATED)


@on_each_rank
def generate_by_exchange(exchange: str) -> list[list[int]]:
    """Return tokens whose prefill exchanged keys in this way, on a rank."""
    small, mesh = model("deepseek_v2", "attnmesh"), named_mesh(Shape(1, 2, 2), AXES)
    cache = hf.ShardedCache(small.config, mesh, exchange=exchange)
    return hf.generate(small, prompt(150), cache=cache, max_new_tokens=6, do_sample=False).tolist()


@pytest.mark.parametrize("exchange", ["bulk", "pipelined", "ring"])
def test_latents_travel_in_each_exchange(exchange: str, pool: Pool) -> None:
    expected = model("deepseek_v2", "sdpa").generate(prompt(150), max_new_tokens=6, do_sample=False).tolist()
    assert pool.run(4, generate_by_exchange, exchange) == [expected] * 4


# --- caches ---


@on_each_rank
def save_latents(folder: Path, shape: Shape) -> None:
    small = model("deepseek_v3", "attnmesh")
    cache = hf.ShardedCache(small.config, named_mesh(shape, AXES), copies=2)
    hf.prefill(small, prompt(90), cache)
    cache.save(folder)


@on_each_rank
def continue_saved_and_copied(folder: Path, shape: Shape) -> list[list[list[int]]]:
    """Return the tokens from a restored cache, from a copy, and from a recovered cache, on a rank."""
    small, mesh = model("deepseek_v3", "attnmesh"), named_mesh(shape, AXES)
    cache = hf.ShardedCache(small.config, mesh, capacity=200)
    cache.restore(folder)
    caches = [cache, deepcopy(cache), hf.ShardedCache.recover(deepcopy(cache), small.config, mesh, capacity=200)]
    assert all(each.layers[0].kv_cache.config.values == "prefix" for each in caches)
    return [hf.generate(small, prompt(90), cache=each, max_new_tokens=8, do_sample=False).tolist() for each in caches]


def test_saved_copied_and_recovered_latents_continue(pool: Pool, tmp_path: Path) -> None:
    pool.run(2, save_latents, tmp_path, Shape(1, 1, 2))
    expected = model("deepseek_v3", "sdpa").generate(prompt(90), max_new_tokens=8, do_sample=False).tolist()
    assert pool.run(3, continue_saved_and_copied, tmp_path, Shape(1, 3, 1)) == [[expected] * 3] * 3


# --- other layers than nn.Linear, and layers that are no projection ---


class Adapted(nn.Module):
    """A linear layer with a low-rank adapter, like PEFT's."""

    def __init__(self, base: nn.Linear, bias: float = 0.0) -> None:
        super().__init__()
        self.base, self.bias = base, bias
        self.down, self.up = (nn.Linear(*sizes, bias=False) for sizes in ((RANK, 2), (2, base.out_features)))
        for linear in (self.down, self.up):
            nn.init.normal_(linear.to(torch.float64).weight, generator=torch.Generator().manual_seed(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(nn.functional.dropout(x, 0.0))) * 0.5 + self.bias


def changed_model(attention: str, change: Callable[[nn.Linear], nn.Module | None]) -> PreTrainedModel:
    """Return a model whose first layer has another `kv_b_proj`."""
    small = deepcopy(model("deepseek_v3", attention))
    first = small.model.layers[0].self_attn
    first.kv_b_proj = change(first.kv_b_proj)
    return small


def test_an_adapter_is_projected_once() -> None:
    small = changed_model("attnmesh", Adapted)
    rows = []
    small.model.layers[0].self_attn.kv_b_proj.register_forward_hook(lambda _, x, __: rows.append(x[0].numel() // RANK))
    given = hf.generate(small, prompt(40), max_new_tokens=6, do_sample=False)
    assert given.equal(changed_model("sdpa", Adapted).generate(prompt(40), max_new_tokens=6, do_sample=False))
    assert rows == [39, RANK + 1, *[1] * 6]


def offloaded(base: nn.Linear) -> nn.Linear:
    """Return a linear layer whose weight is on the device only while it runs, as accelerate offloads it."""
    empty, weight = nn.Linear(RANK, base.out_features, bias=False, device="meta"), base.weight
    empty.forward = lambda x: nn.functional.linear(x, weight)
    return empty


def test_an_offloaded_weight_is_found_by_running_its_layer() -> None:
    given = hf.generate(changed_model("attnmesh", offloaded), prompt(40), max_new_tokens=6, do_sample=False)
    assert given.equal(model("deepseek_v3", "sdpa").generate(prompt(40), max_new_tokens=6, do_sample=False))


def test_a_weight_is_read_in_each_step() -> None:
    """FSDP frees the weights of a layer after each step and gathers them into other tensors."""
    small, ids = deepcopy(model("deepseek_v3", "attnmesh")), prompt(40)
    cache, first = hf.ShardedCache(small.config), small.model.layers[0].self_attn.kv_b_proj
    hf.prefill(small, ids, cache)
    first.weight = nn.Parameter(torch.full_like(first.weight, 7.0))
    hf.generate(small, ids, cache=cache, max_new_tokens=1, do_sample=False)
    assert float(cache.layers[0].projection.keys.amin()) == 7.0


def with_bias(base: nn.Linear) -> nn.Module:
    biased = nn.Linear(RANK, base.out_features, dtype=torch.float64)
    nn.init.ones_(biased.bias)
    return biased


class Squared(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * x)


CHANGES: dict[str, Callable[[nn.Linear], nn.Module | None]] = {
    "one with a bias": with_bias,
    "an adapter with a bias": partial(Adapted, bias=0.5),
    "no projection": lambda base: Squared(RANK, base.out_features, bias=False, dtype=torch.float64),
}

REASON = dict.fromkeys(CHANGES, "one with a bias") | {"no projection": "other keys and values than its weight"}


@on_each_rank
def catch_refusal(name: str) -> str:
    """Return the error on a rank where the first rank alone has another projection."""
    unusual = torch.distributed.get_rank() == 0
    small = changed_model("attnmesh", CHANGES[name] if unusual else lambda base: base)
    try:
        hf.generate(small, prompt(40), mesh=named_mesh(Shape(1, 2, 1), AXES), max_new_tokens=2)
    except errors.InputError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


@pytest.mark.parametrize("name", CHANGES)
def test_another_projection_is_refused_on_all_ranks_alike(name: str, pool: Pool) -> None:
    answers = pool.run(2, catch_refusal, name)
    expected = "KernelError: attnmesh.hf kv_b_proj: expected a linear layer from latents to keys and values, given "
    assert answers[0].startswith(expected + REASON[name])
    assert answers == answers[:1] * 2


@on_each_rank
def catch_error_of_heads_axis() -> str:
    try:
        hf.generate(model("deepseek_v3", "attnmesh"), prompt(40), mesh=named_mesh(Shape(2, 1, 1), AXES))
    except errors.InputError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def test_a_heads_axis_is_refused_on_all_ranks_alike(pool: Pool) -> None:
    answers = pool.run(2, catch_error_of_heads_axis)
    assert answers[0].startswith("ShapeError: ShardedCache mesh: expected a mesh without a heads axis for latents")
    assert answers == answers[:1] * 2


def test_a_model_that_attends_to_new_latents_alone_is_refused() -> None:
    layer = hf.ShardedCache(model("deepseek_v3", "attnmesh").config).layers[0]
    c, rotated = layer.update(torch.randn(1, 1, 5, RANK), torch.randn(1, 1, 5, ROTATED))
    with pytest.raises(errors.KernelError, match="given one that reads them with matmul"):
        torch.matmul(torch.randn(1, 2, 5, RANK), c.mT)
    with pytest.raises(errors.KernelError, match="given one that reads them with softmax"):
        rotated.softmax(-1)


def test_latents_follow_autocast() -> None:
    small = model("deepseek_v3", "attnmesh").to(torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cache = hf.ShardedCache(small.config)
        given = hf.generate(small, prompt(40), cache=cache, max_new_tokens=2, do_sample=False)
    small.to(torch.float64)
    assert cache.layers[0].kv_cache.config.dtype == torch.bfloat16
    assert given.shape == (1, 42)
