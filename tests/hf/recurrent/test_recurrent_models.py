"""Models with recurrent layers on shards: training and generation as stock transformers does them on one device."""

import copy
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

import attnmesh as am
import attnmesh.hf as hf
from attnmesh import errors
from attnmesh.core.layout import Layout
from attnmesh.hf.recurrent.prepare_recurrent import RecurrentLayer, prepared
from attnmesh.mesh.shapes import Shape
from attnmesh.runtime.counters import count_traffic
from tests.support.models.checks import AXES, DoublePrecision, prompt
from tests.support.models.recurrent import FAMILIES, GENERATING, check_trained, model_of, tolerance_of, trained
from tests.support.models.tiny_models import Case, build, tiny_config
from tests.support.ranks.pool import Pool, on_each_rank
from tests.support.truth.mesh_problems import named_mesh
from tests.support.truth.tolerances import FLOAT32_SUMS, worst

PLACES = (
    (Shape(1, 2, 1), am.Zigzag(), 61),
    (Shape(1, 1, 3), am.Contiguous(), 64),
    (Shape(1, 2, 2), am.Zigzag(), 64),
    (Shape(1, 3, 1), am.Zigzag(), 61),
    (Shape(1, 1, 4), am.Contiguous(), 61),
    (Shape(1, 3, 1), am.Zigzag(), 4),  # parts of 0 and 1 tokens: convolutions are 4 wide
    (Shape(1, 1, 4), am.Contiguous(), 7),  # shards of 2, 2, 2 and 1 tokens
)


def places() -> list[Any]:
    """Return a third of the families at one place each by default, and all at all places in the long run."""
    return [
        pytest.param(family, *place, marks=[pytest.mark.long] if f % 3 or (f // 3 + p) % len(PLACES) else [])
        for f, family in enumerate(FAMILIES)
        for p, place in enumerate(PLACES)
    ]


@on_each_rank
def train_on_ranks(family: str, shape: Shape, layout: Layout, length: int) -> tuple[float, dict[str, Tensor]]:
    ids = prompt(length, batch=2)
    batch = hf.shard_batch({"input_ids": ids, "labels": ids}, named_mesh(shape, AXES), layout)
    return trained(model_of(family), batch)


@pytest.mark.parametrize(("family", "shape", "layout", "length"), places())
def test_loss_and_gradients_are_those_of_one_device(
    family: str, shape: Shape, layout: Layout, length: int, pool: Pool
) -> None:
    ids = prompt(length, batch=2)
    loss, gradients = trained(model_of(family, "eager"), {"input_ids": ids, "labels": ids, "use_cache": False})
    results = pool.run(shape.ranks, train_on_ranks, family, shape, layout, length)
    check_trained(results, loss, gradients, tolerance_of(family))


@on_each_rank
def step_on_ranks(shape: Shape, layout: Layout, steps: int) -> list[float]:
    torch.manual_seed(0)
    config = tiny_config(Case("olmo_hybrid", "olmo_hybrid"))
    model = AutoModelForCausalLM.from_config(config, attn_implementation="attnmesh").train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mesh = named_mesh(shape, AXES) if shape.ranks > 1 else None
    losses = []
    for step in range(steps):
        ids = prompt(33, seed=step % 5)
        loss = model(**hf.shard_batch({"input_ids": ids, "labels": ids}, mesh, layout)).loss
        loss.backward()
        summed = [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]
        for x in summed if shape.ranks > 1 else ():
            torch.distributed.all_reduce(x)
            x /= shape.ranks
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(summed[0]))
    return losses


@pytest.mark.parametrize(
    ("ranks", "steps"), [(2, 8), *(pytest.param(ranks, 30, marks=pytest.mark.long) for ranks in (2, 3, 4))]
)
def test_training_has_the_same_losses_on_any_number_of_ranks(ranks: int, steps: int, pool: Pool) -> None:
    expected = step_on_ranks(Shape(1, 1, 1), am.Zigzag(), steps)
    assert expected[-1] < expected[0] - 0.05
    shape = Shape(1, 2, 2) if ranks == 4 else Shape(1, ranks, 1)
    for losses in pool.run(ranks, step_on_ranks, shape, am.Contiguous() if ranks == 3 else am.Zigzag(), steps):
        assert losses == pytest.approx(expected, rel=FLOAT32_SUMS)


@on_each_rank
def measure_errors_of_checkpointing(shape: Shape) -> tuple[float, float]:
    """Difference of loss and gradients with gradient checkpointing."""
    ids = prompt(61, batch=2)
    results = []
    for recompute in (False, True):
        model = model_of("qwen3_next", dtype=torch.float32).train()
        if recompute:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        loss = model(**hf.shard_batch({"input_ids": ids, "labels": ids}, named_mesh(shape, AXES))).loss
        loss.backward()
        results.append((loss.item(), [p.grad for p in model.parameters() if p.grad is not None]))
    (loss, gradients), (again, others) = results
    return abs(loss - again), worst(float((x - y).abs().max()) for x, y in zip(gradients, others, strict=True))


def test_gradient_checkpointing_computes_the_states_again(pool: Pool) -> None:
    for loss, gradient in pool.run(2, measure_errors_of_checkpointing, Shape(1, 2, 1)):
        assert loss == 0
        assert gradient < 1e-6  # float32, in which the same operations run again


@on_each_rank
def generate_and_watch_chunks(family: str, shape: Shape | None, length: int, new: int) -> tuple[Tensor, list[int]]:
    """New tokens, and the most tokens that each recurrent layer computed at once."""
    gc.collect()  # batches of earlier tests: models that are called while there is one are prepared
    model = model_of(family)
    mesh = named_mesh(shape, AXES) if shape else None
    seen = []
    for module in model.modules():
        if hasattr(module, "conv1d") or type(module).__name__.endswith(("ShortConv", "CCAProjection")):
            module.register_forward_pre_hook(
                lambda _, args, kwargs: seen.append((args[0] if args else kwargs["hidden_states"]).shape[1]),
                with_kwargs=True,
            )
    with DoublePrecision():
        ids = hf.generate(model, prompt(length), mesh=mesh, max_new_tokens=new, do_sample=False)
    assert not any(isinstance(module, RecurrentLayer) for module in model.modules())
    return ids[:, length:], [max(seen)]


@pytest.mark.parametrize(
    ("family", "shape"),
    [
        pytest.param(family, shape, marks=[] if family in marked else [pytest.mark.long])
        for family in GENERATING
        for shape, marked in (
            (Shape(1, 1, 3), ("qwen3_next", "mamba2")),
            (Shape(1, 2, 1), ("jamba",)),
            (Shape(1, 2, 2), ("lfm2",)),
        )
    ],
)
def test_tokens_after_a_prompt_in_shards_are_those_of_stock(family: str, shape: Shape, pool: Pool) -> None:
    stock = model_of(family, "eager")
    length = 320 if getattr(stock.config, "max_position_embeddings", 10**6) >= 640 else 33
    ids = prompt(length)
    with DoublePrecision():
        expected = stock.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=7, do_sample=False)
    for found, (most,) in pool.run(shape.ranks, generate_and_watch_chunks, family, shape, length, 7):
        assert torch.equal(found, expected[:, length:])
        assert most <= -(-length // shape.ranks)


@on_each_rank
def continue_saved_and_forked(folder: Path, shape: Shape, first: Shape) -> tuple[Tensor, Tensor]:
    """Tokens after a cache that is saved and restored, and after two forks of it."""
    model, ids = model_of("bamba"), prompt(40)
    options: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False}
    with DoublePrecision():
        cache = hf.ShardedCache(model.config, named_mesh(shape, AXES), block=4)
        if shape == first:
            hf.prefill(model, ids, cache)
            cache.save(folder)
        else:
            cache.restore(folder)
        forks = cache.fork(), copy.deepcopy(cache)
        tails = [
            hf.generate(model, torch.cat([ids, prompt(3, seed=s)], 1), cache=c, **options) for s, c in enumerate(forks)
        ]
        whole = hf.generate(model, ids, cache=cache, **options)
    return whole, torch.cat(tails)


def test_states_are_saved_restored_on_other_ranks_and_forked(pool: Pool, tmp_path: Path) -> None:
    stock, ids, first = model_of("bamba", "eager"), prompt(40), Shape(1, 1, 2)
    prompts = [ids, *(torch.cat([ids, prompt(3, seed=seed)], 1) for seed in range(2))]
    with DoublePrecision():
        expected = [stock.generate(x, attention_mask=torch.ones_like(x), max_new_tokens=8) for x in prompts]
    for shape in (first, Shape(1, 3, 1), Shape(1, 1, 1)):
        for whole, tails in pool.run(shape.ranks, continue_saved_and_forked, tmp_path / "cache", shape, first):
            assert torch.equal(whole, expected[0])
            assert torch.equal(tails, torch.cat(expected[1:]))


@on_each_rank
def count_layer_bytes(length: int, layout: Layout) -> tuple[int, int]:
    """Bytes received by one Gated DeltaNet layer, forward and backward."""
    case = Case("qwen3_next", "qwen3_next", {"layer_types": ["linear_attention"], "num_hidden_layers": 1})
    model = build(case, "attnmesh", torch.float32).train()
    ids = prompt(length)
    batch = hf.shard_batch({"input_ids": ids, "labels": ids}, named_mesh(Shape(1, 2, 2), AXES), layout)
    model(**batch)  # weights are compared in the first call
    batch = hf.shard_batch({"input_ids": ids, "labels": ids}, named_mesh(Shape(1, 2, 2), AXES), layout)
    with count_traffic() as forward:
        loss = model(**batch).loss
    with count_traffic() as backward:
        loss.backward()
    return forward.bytes, backward.bytes


@pytest.mark.parametrize("layout", [am.Contiguous(), am.Zigzag()], ids=str)
def test_bytes_of_a_layer_do_not_depend_on_the_length(layout: Layout, pool: Pool) -> None:
    short, long = (pool.run(4, count_layer_bytes, length, layout) for length in (256, 768))
    assert short == long
    config = model_of("qwen3_next").config
    recurrent = am.Recurrent(
        config.linear_num_value_heads,
        config.linear_key_head_dim,
        config.linear_value_head_dim,
        conv_channels=2 * config.linear_num_key_heads * config.linear_key_head_dim
        + config.linear_num_value_heads * config.linear_value_head_dim,
        conv_width=config.linear_conv_kernel_dim,
    )
    sizes = {"layers": 1, "dtype": "float32", "recurrent": recurrent}
    training, forward = (am.Workload(2, 2, 8, 256, phase=phase, **sizes) for phase in ("training", "prefill"))
    most = forward.scan_bytes(4, layout) + forward.halo_bytes(4, layout)
    both = training.scan_bytes(4, layout) + training.halo_bytes(4, layout)
    found = max(f for f, _ in short), max(b for _, b in short)
    if layout == am.Contiguous():  # the last rank of a pass receives in each round
        assert found == (most, both - most)
    else:  # the last rank of one of two scans is the first of the other
        assert max(found) <= most


@on_each_rank
def compare_several_calls(family: str) -> list[float]:
    """Differences of logits from stock: of two models on a batch made before them, after a plain call, one token."""
    mesh, ids = named_mesh(Shape(1, 1, 2), AXES), prompt(2)
    batch = hf.shard_batch({"input_ids": ids}, mesh, am.Contiguous())
    models, stock, rank = [model_of(family), model_of(family)], model_of(family, "eager"), torch.distributed.get_rank()
    with torch.no_grad(), DoublePrecision():
        whole = stock(input_ids=ids, use_cache=False).logits[:, rank]
        found = [model(**batch).logits[:, 0] - whole for model in models]
        hf.restore(models[0])
        found.append(models[0](**batch).logits[:, 0] - whole)
        alone = stock.model(input_ids=ids[:, :1], use_cache=False).last_hidden_state
        found.append(models[1].model(input_ids=ids[:, :1], use_cache=False).last_hidden_state - alone)
    return [float(x.abs().max()) for x in found]


@pytest.mark.parametrize("family", ["qwen3_next", "recurrent_gemma"])
def test_each_model_on_a_batch_is_prepared_and_plain_tokens_are_no_shards(family: str, pool: Pool) -> None:
    for errors_found in pool.run(2, compare_several_calls, family):
        assert worst(errors_found) < 1e-5  # gates and rotary angles


@on_each_rank
def reorder_unlike() -> dict[str, bool]:
    """Reorder a cache by other indices on rank 1, and then by one out of range there. Return what is as before."""
    model = model_of("qwen3_next")
    is_odd = torch.distributed.get_rank() == 1
    cache = hf.ShardedCache(model.config, named_mesh(Shape(1, 1, 2), AXES), block=4)
    hf.prefill(model, prompt(21, batch=2), cache)

    def content() -> dict[str, Tensor]:
        tensors = {
            f"keys {n}": kv_cache.keys[:, :, : kv_cache.used] for n, kv_cache in enumerate(cache.kv_caches)
        } | cache.states
        assert cache.tokens is not None
        return {name: x.clone() for name, x in {**tensors, "tokens": cache.tokens}.items()}

    before = content()
    right = {}
    with pytest.raises(errors.MeshError, match="the same call on every rank"):
        cache.reorder_cache(torch.tensor([1, 1] if is_odd else [1, 0]))
    right["unlike"] = all(x.equal(content()[name]) for name, x in before.items())
    cache.reorder_cache(torch.tensor([1, 0]))
    right["alike"] = all(x.flip(0).equal(content()[name]) for name, x in before.items())
    before = content()
    with pytest.raises(errors.ShapeError, match="a number of a sequence below 2"):
        cache.reorder_cache(torch.tensor([0, 2]))
    return right | {"out of range": all(x.equal(content()[name]) for name, x in before.items())}


def test_an_order_that_is_refused_changes_no_layer(pool: Pool) -> None:
    for right in pool.run(2, reorder_unlike):
        assert right == dict.fromkeys(right, True)


# --- what is refused ---


def striped(mesh: Any) -> None:
    ids = prompt(12)
    model_of("bamba")(**hf.shard_batch({"input_ids": ids, "labels": ids}, mesh, am.Striped()))


def cropped(mesh: Any) -> None:
    model = model_of("bamba")
    cache = hf.ShardedCache(model.config, mesh)
    hf.prefill(model, prompt(12), cache)
    cache.crop(-2)


def recovered(mesh: Any) -> None:
    hf.ShardedCache.recover(None, model_of("bamba").config, mesh)


def assisted(mesh: Any) -> None:
    hf.generate(model_of("bamba"), prompt(12), mesh=mesh, max_new_tokens=2, prompt_lookup_num_tokens=2)


def saved(mesh: Any) -> None:
    model = model_of("mamba")
    cache = hf.ShardedCache(model.config, mesh)
    hf.prefill(model, prompt(12), cache)
    cache.save("nowhere")


def kept_elsewhere(mesh: Any) -> None:
    hf.generate(model_of("recurrent_gemma"), prompt(12), mesh=mesh, max_new_tokens=2)


REFUSED: dict[Callable[[Any], None], str] = {
    striped: "LayoutError: attnmesh.hf layout: expected a layout whose shards are runs of tokens",
    cropped: "ShapeError: ShardedCache crop: expected all tokens or none, as states cannot go back, given 8",
    recovered: "KernelError: ShardedCache.recover: expected a model without states, given bamba",
    assisted: "ArgumentError: generate: expected options that work on states, given prompt_lookup_num_t",
    saved: "KernelError: ShardedCache save: expected a cache with layers of attention, given recurrent states alone",
    kept_elsewhere: "KernelError: generate: expected a model whose cache holds its recurrent states, given recurrent_g",
}


@on_each_rank
def catch_refusal(name: str) -> str:
    call = next(call for call in REFUSED if call.__name__ == name)
    try:
        call(named_mesh(Shape(1, 1, 2), AXES))
    except errors.InputError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


@pytest.mark.parametrize("call", REFUSED, ids=lambda call: call.__name__)
def test_what_states_cannot_do_is_refused_on_all_ranks(call: Callable[[Any], None], pool: Pool) -> None:
    for error in pool.run(2, catch_refusal, call.__name__):
        assert error.startswith(REFUSED[call]), error
        assert " Fix: " in error


def test_a_prepared_model_is_as_before_without_shards() -> None:
    model, ids = model_of("recurrent_gemma"), prompt(20)
    stock = model_of("recurrent_gemma", "eager")
    classes = [type(module) for module in model.modules()]
    with torch.no_grad(), prepared(model):
        assert [type(module) for module in model.modules()] != classes
        found = model(input_ids=ids, use_cache=False).logits
        # gates and rotary angles are computed in float32
        torch.testing.assert_close(found, stock(input_ids=ids, use_cache=False).logits, rtol=1e-5, atol=1e-5)
    assert [type(module) for module in model.modules()] == classes
    assert not model._forward_pre_hooks
