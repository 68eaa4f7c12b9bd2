"""Generation with weights and heads shared by tensor parallelism: tokens are those of stock transformers."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import AutoModelForCausalLM, DeepseekV3Config, GPT2Config, PreTrainedModel
from transformers.distributed import DistributedConfig

import attnmesh.hf as hf
from attnmesh import errors
from attnmesh.hf.tensor_parallel import rank_weights
from tests.support.models import families
from tests.support.models.families import STOCK, prompt
from tests.support.models.tiny_models import Case, build
from tests.support.ranks.pool import Pool, on_each_rank

FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "gemma3", "gpt-oss", "gemma2", "gemma4", "llama4")
SIZES = {"num_attention_heads": 8, "hidden_size": 64}


def load(folder: str, **options: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation="attnmesh", **options).eval()


def by_config(folder: str, whole: DeviceMesh) -> Any:
    """Load with transformers' own tensor parallelism."""
    sizes = {"tp_size": whole["tp"].size(), "dp_replicate_size": whole["keys"].size()}
    return load(folder, distributed_config=DistributedConfig(**sizes))


def by_styles(folder: str, whole: DeviceMesh) -> Any:
    """Shard a Llama with PyTorch's own styles."""
    model = load(folder)
    columns = {f"self_attn.{name}_proj": ColwiseParallel() for name in "qkv"} | {"mlp.up_proj": ColwiseParallel()}
    rows = {"self_attn.o_proj": RowwiseParallel(), "mlp.down_proj": RowwiseParallel()}
    for layer in model.model.layers:
        parallelize_module(layer, whole["tp"], {**columns, **rows, "mlp.gate_proj": ColwiseParallel()})
    return model


def by_plan(folder: str, whole: DeviceMesh) -> Any:
    return hf.tensor_parallel(load(folder), whole["tp"])


Tokens = list[list[int]]


def generate(model: Any, call: Callable[..., Any]) -> list[Tokens]:
    """Return tokens of one prompt and of a padded batch, sampled ones, and those of a second turn."""
    ids, mask = prompt(50, batch=2, seed=2), torch.ones(2, 50, dtype=torch.long)
    mask[0, :9] = 0
    options: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False}
    padded = call(model, ids.masked_fill(mask == 0, 0), attention_mask=mask, **options)
    first = call(model, prompt(70), **options)
    torch.manual_seed(7)
    sampled = call(model, prompt(33), max_new_tokens=5, do_sample=True, top_k=5)
    return [first.tolist(), padded.tolist(), sampled.tolist()]


class Answers(NamedTuple):
    """Tokens of a model whose weights are shared, and the columns of an output projection that a rank holds."""

    own_columns: int
    tokens: list[Tokens]


@on_each_rank
def generate_with_shared_weights(family: str, folder: str, way: str, keys: int, tp: int) -> Answers:
    """Generate with weights shared along tp and keys along the other axis; or both by the same ranks if tp is 0."""
    if tp:
        whole = init_device_mesh("cpu", (keys, tp), mesh_dim_names=("keys", "tp"))
        model = {"config": by_config, "styles": by_styles, "plan": by_plan}[way](folder, whole)
        call = lambda model, ids, **options: hf.generate(model, ids, mesh=whole["keys"], **options)  # noqa: E731
    else:
        mesh = init_device_mesh("cpu", (keys,), mesh_dim_names=("keys",))
        model = hf.tensor_parallel(load(folder), mesh, output="heads")

        def call(model: Any, ids: Any, **options: Any) -> Any:
            cache = hf.ShardedCache(model.config, mesh, output="heads", block=4)
            return hf.generate(model, ids, cache=cache, prefill_chunk_size=19, **options)

    if torch.distributed.get_rank() % max(tp, 1):
        torch.manual_seed(9)  # ranks that share weights draw the numbers of the first
    projection = model.model.layers[0].self_attn.o_proj.weight
    own = projection.to_local() if isinstance(projection, DTensor) else projection
    return Answers(own.shape[1], generate(model, call))


def cases() -> list[Any]:
    """Return a family, a way, and ranks along keys and tp; 0 for ranks that share both."""
    ways = [("plan", 2, 2), ("plan", 1, 4), ("plan", 4, 0), ("plan", 2, 0), ("config", 2, 2), ("styles", 2, 2)]
    quick = {("gpt-oss", 2), ("gemma3", 4), ("gemma4", 0)}
    return [
        pytest.param(family, *way, marks=[] if (family, number) in quick else pytest.mark.long)
        for family in FAMILIES
        for number, way in enumerate(ways)
        if not (way[0] == "styles" and family != "llama")
    ]


@pytest.mark.parametrize(("family", "way", "keys", "tp"), cases())
def test_tokens_are_those_of_one_process(family: str, way: str, keys: int, tp: int, pool: Pool, tmp_path: Path) -> None:
    stock = families.model(family, STOCK[family], **SIZES)
    stock.save_pretrained(tmp_path)
    expected = generate(stock, lambda model, ids, **options: model.generate(ids, **options))
    columns = stock.model.layers[0].self_attn.o_proj.in_features
    own = columns if family == "gpt-oss" and tp else columns // (tp or keys)
    for answers in pool.run(keys * max(tp, 1), generate_with_shared_weights, family, str(tmp_path), way, keys, tp):
        assert answers.own_columns == own
        assert answers.tokens == expected


@on_each_rank
def generate_with_latents(folder: str) -> list[Tokens]:
    whole = init_device_mesh("cpu", (2, 2), mesh_dim_names=("keys", "tp"))
    model = by_plan(folder, whole)
    assert isinstance(model.lm_head.weight, DTensor)
    return generate(model, lambda model, ids, **options: hf.generate(model, ids, mesh=whole["keys"], **options))


def test_latents_stay_whole_while_other_weights_are_shared(pool: Pool, tmp_path: Path) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        stock = AutoModelForCausalLM.from_config(latent(), attn_implementation="eager").eval()
    stock.save_pretrained(tmp_path)
    expected = generate(stock, lambda model, ids, **options: model.generate(ids, **options))
    assert pool.run(4, generate_with_latents, str(tmp_path)) == [expected] * 4


@on_each_rank
def generate_with_shared_projections(kind: str) -> list[Tokens]:
    """Generate with a model whose plan shards the projections of latents, too."""
    whole = init_device_mesh("cpu", (2, 2), mesh_dim_names=("keys", "tp"))
    model = hf.tensor_parallel(tiny(kind), whole["tp"])
    return generate(model, lambda model, ids, **options: hf.generate(model, ids, mesh=whole["keys"], **options))


@pytest.mark.parametrize("kind", ["deepseek_v32", "glm4_moe_lite"])
@pytest.mark.long
def test_projections_of_latents_are_shared(kind: str, pool: Pool) -> None:
    stock = tiny(kind, "eager")
    expected = generate(stock, lambda model, ids, **options: model.generate(ids, **options))
    assert pool.run(4, generate_with_shared_projections, kind) == [expected] * 4


@on_each_rank
def measure_held_weights(family: str, output: str, tie: bool) -> tuple[int, int]:
    """Return the bytes of weights that this rank holds, and the predicted ones."""
    model = families.model(family, "attnmesh", **SIZES, tie_word_embeddings=tie, vocab_size=96)
    ranks = torch.distributed.get_world_size()
    predicted = rank_weights(model, ranks, output)
    hf.tensor_parallel(model, init_device_mesh("cpu", (ranks,), mesh_dim_names=("tp",)), output=output)
    own = [x.to_local() if isinstance(x, DTensor) else x for x in model.parameters()]
    return sum(x.numel() * x.element_size() for x in own), predicted


@pytest.mark.parametrize(("family", "tie"), [("llama", False), ("llama", True), ("qwen2", False), ("gpt-oss", True)])
@pytest.mark.parametrize("output", ["replicated", "heads"])
def test_a_rank_holds_the_weights_that_the_planner_counts(family: str, tie: bool, output: str, pool: Pool) -> None:
    for held, predicted in pool.run(4, measure_held_weights, family, output, tie):
        assert held == predicted


# --- bad input ---


MeshCall = Callable[[DeviceMesh], object]
"""A call on a mesh of 2 x 2 ranks, with axes keys and tp."""


def llama(attention: str = "attnmesh", **sizes: int) -> PreTrainedModel:
    return families.model("llama", attention, **(sizes or SIZES))


def deepseek_of_six_heads() -> PreTrainedModel:
    case = Case("six heads", "deepseek_v32", {"num_attention_heads": 6, "num_key_value_heads": 6})
    return build(case, "attnmesh", torch.float32)


def generate_two(whole: DeviceMesh, ids: Tensor, **options: Any) -> None:
    """Generate two tokens by a model whose weights are split."""
    model = hf.tensor_parallel(llama(), whole["tp"])
    hf.generate(model, ids, mesh=whole["keys"], max_new_tokens=2, do_sample=False, **options)


def is_rank(number: int) -> bool:
    return torch.distributed.get_rank() == number


def tiny(kind: str, attention: str = "attnmesh") -> PreTrainedModel:
    return build(Case(kind, kind), attention, torch.float32)


def other(config: Any) -> PreTrainedModel:
    return AutoModelForCausalLM.from_config(config, attn_implementation="attnmesh").eval()


def latent() -> DeepseekV3Config:
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4, "hidden_size": 16}
    ranks = {"kv_lora_rank": 8, "q_lora_rank": None, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "n_shared_experts": 1}
    widths = {"intermediate_size": 16, "moe_intermediate_size": 16, "vocab_size": 97, "pad_token_id": 0}
    return DeepseekV3Config(initializer_range=0.4, first_k_dense_replace=1, **sizes, **ranks, **experts, **widths)


BAD: dict[str, tuple[MeshCall, str]] = {
    "heads on two ranks": (
        lambda whole: hf.tensor_parallel(llama(num_attention_heads=3, num_key_value_heads=1), whole["tp"]),
        "ShapeError: tensor_parallel: expected whole heads on every rank, given 3 query and 1 key heads on 2",
    ),
    "key heads on four ranks": (
        lambda whole: hf.tensor_parallel(
            llama(num_attention_heads=12, num_key_value_heads=3), init_device_mesh("cpu", (4,))
        ),
        "ShapeError: tensor_parallel: expected whole heads on every rank, given 12 query and 3 key heads on 4",
    ),
    "a mesh of two axes": (
        lambda whole: hf.tensor_parallel(llama(), whole),
        "MeshError: tensor_parallel mesh: expected a DeviceMesh of one axis, or None, given",
    ),
    "split weights": (
        lambda whole: hf.tensor_parallel(hf.tensor_parallel(llama(), whole["tp"]), whole["tp"]),
        "ModelError: tensor_parallel: expected whole weights, given sharded ones. Fix: load the model without",
    ),
    "an unknown output on one rank": (
        lambda whole: hf.tensor_parallel(llama(), whole["tp"], output="tokens" if is_rank(1) else "heads"),
        "KernelError: tensor_parallel output: expected one of replicated, heads, given 'tokens'",
    ),
    "a model without a plan": (
        lambda whole: hf.tensor_parallel(other(GPT2Config(n_embd=8, n_head=2, n_layer=1, vocab_size=97)), whole["tp"]),
        "KernelError: tensor_parallel: expected a model with a plan, given gpt2 without one. Fix: leave",
    ),
    "heads of latents": (
        lambda whole: hf.tensor_parallel(other(latent()), whole["tp"], output="heads"),
        "KernelError: tensor_parallel output: expected layers with q_proj, k_proj and o_proj, without gates or",
    ),
    "projections of latents": (
        lambda whole: hf.tensor_parallel(deepseek_of_six_heads(), init_device_mesh("cpu", (4,))),
        "ShapeError: tensor_parallel: expected whole heads on every rank, given 6 heads on 4",
    ),
    "latents of several widths": (
        lambda whole: hf.tensor_parallel(tiny("dots3_note_text"), whole["tp"]),
        "KernelError: tensor_parallel: expected latents of one width in all layers,",
    ),
    "heads of indexers": (
        lambda whole: hf.tensor_parallel(tiny("minimax_m3_vl_text"), whole["tp"], output="heads"),
        "KernelError: tensor_parallel output: expected layers with q_proj, k_proj and o_proj, without gates or",
    ),
    "heads of latents in a cache": (
        lambda whole: hf.ShardedCache(latent(), whole["keys"], output="heads"),
        "KernelError: ShardedCache output: expected keys and values with heads, given latents, which",
    ),
    "stock attention": (
        lambda whole: hf.tensor_parallel(families.model("llama", "sdpa"), whole["tp"]),
        "KernelError: ",
    ),
    "another prompt on one rank": (
        lambda whole: generate_two(whole, prompt(20, seed=int(is_rank(3)))),
        "MeshError: generate: expected the same call on every rank, given:",
    ),
    "an option of one rank": (
        lambda whole: generate_two(whole, prompt(20), **({"max_time": 1.0} if is_rank(2) else {})),
        "ArgumentError: generate: expected options that work on a mesh, given max_time=1.0.",
    ),
}


@on_each_rank
def catch_error_of(name: str) -> str:
    call, _ = BAD[name]
    try:
        call(init_device_mesh("cpu", (2, 2), mesh_dim_names=("keys", "tp")))
    except errors.InputError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


@pytest.mark.parametrize("name", BAD)
def test_bad_calls_raise_on_every_rank(name: str, pool: Pool) -> None:
    for answer in pool.run(4, catch_error_of, name):
        assert answer.startswith(BAD[name][1]), answer
