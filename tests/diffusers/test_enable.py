"""What `enable` changes and `disable` takes back, and errors that all ranks raise alike."""

import copy
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
import torch.distributed as dist
from diffusers.models.attention_dispatch import _AttentionBackendRegistry as Registry
from diffusers.models.attention_dispatch import dispatch_attention_fn
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from attnmesh import errors
from attnmesh.diffusers import disable, enable
from attnmesh.diffusers.backend import visible_keys
from attnmesh.diffusers.family_plans import plan_of
from attnmesh.mesh.shapes import AXES, Shape
from tests.support.models.diffusion import MODELS, Inputs
from tests.support.ranks.pool import Pool, on_each_rank
from tests.support.truth.mesh_problems import named_mesh
from tests.support.truth.tolerances import FLOAT32, FLOAT32_SUMS, assert_near, worst


def registered() -> tuple[Any, ...]:
    tables = Registry._backends, Registry._constraints, Registry._supported_arg_names
    return *map(dict, tables), set(Registry._supports_context_parallel), Registry._active_backend


def attributes(model: nn.Module) -> list[dict[str, Any]]:
    processors = [vars(m.processor).copy() for m in model.modules() if hasattr(m, "processor")]
    return [*processors, {"hooks": [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()]}]


def test_disable_leaves_everything_as_it_was() -> None:
    model, other = MODELS["wan"].model(), MODELS["flux"].model()
    before, processors = registered(), attributes(model)
    enable(model, None)
    enable(other, None)
    assert registered() != before
    disable(model)
    assert attributes(model) == processors
    disable(other)
    assert registered() == before
    assert model._parallel_config is other._parallel_config is None


@on_each_rank
def check_two_models() -> None:
    """A model on the mesh and one beside it, in turn."""
    model, other, given = MODELS["wan"].model(), MODELS["wan"].model(), MODELS["wan"].given(5)
    expected = other(**given).sample
    enable(model, named_mesh(Shape(1, 2, 1), AXES))
    for _ in range(2):
        assert_near(model(**given).sample, expected, FLOAT32)
        assert_near(other(**given).sample, expected)
    disable(model)


@on_each_rank
def measure_error_with_one_time(name: str) -> float:
    """The error of a model whose times have a dim for tokens, of one time for all of them."""
    model, given = MODELS[name].model(), MODELS[name].given(5)
    given["timestep"] = given["timestep"][:, None]
    expected = model(**given).sample
    enable(model, named_mesh(Shape(1, 2, 1), AXES))
    out = model(**given).sample
    disable(model)
    return float((out - expected).detach().abs().max())


@pytest.mark.parametrize("name", ["wan", "ltx"])
def test_one_time_is_for_all_tokens(pool: Pool, name: str) -> None:
    assert worst(pool.run(2, measure_error_with_one_time, name)) < FLOAT32_SUMS


def test_a_model_on_a_mesh_is_saved(tmp_path: Path) -> None:
    model = MODELS["wan"].model()
    enable(model, None)
    model.save_pretrained(tmp_path)
    disable(model)
    loaded = diffusers.WanTransformer3DModel.from_pretrained(tmp_path)
    assert all(torch.equal(x, y) for x, y in zip(model.parameters(), loaded.parameters(), strict=True))


def test_a_copy_of_a_model_on_a_mesh_is_refused() -> None:
    model = MODELS["wan"].model()
    enable(model, None)
    with pytest.raises(errors.ModelError, match=r"copy it before attnmesh\.diffusers\.enable"):
        copy.deepcopy(model)
    disable(model)
    copy.deepcopy(model)


@pytest.mark.parametrize("name", ["wan", "hunyuan-video"])
def test_a_class_made_from_the_model_has_its_plan(name: str) -> None:
    model = MODELS[name].model()
    expected = plan_of(model)
    model.__class__ = type(f"FSDP{type(model).__name__}", (type(model),), {})  # as fully_shard does
    assert plan_of(model) == expected


def test_a_model_beside_one_on_the_mesh_stays_as_it_is(pool: Pool) -> None:
    pool.run(2, check_two_models)


# --- the backend ---


@on_each_rank
def measure_backend_errors(sizes: tuple[int, ...], heads: tuple[int, int], causal: bool) -> tuple[float, float]:
    """Errors of the backend's output and gradient, for a stream of uneven runs."""
    model = MODELS["wan"].model()
    enable(model, named_mesh(Shape(1, len(sizes), 1), AXES))
    processor = model.blocks[0].attn1.processor
    streams, rank = processor._parallel_config.streams, dist.get_rank()
    streams.lengths, streams.sizes_by_own = {"hidden_states": sum(sizes)}, {sizes[rank]: sizes}
    torch.manual_seed(0)
    q = torch.randn(2, sum(sizes), heads[0], 8, requires_grad=True)
    k, v = (torch.randn(2, sum(sizes), heads[1], 8, requires_grad=True) for _ in range(2))
    options = {"is_causal": causal, "enable_gqa": True}
    whole = scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), **options).transpose(1, 2)
    start = sum(sizes[:rank])
    mine = [x[:, start : start + sizes[rank]] for x in (q, k, v)]
    places = {"backend": processor._attention_backend, "parallel_config": processor._parallel_config}
    out = dispatch_attention_fn(*mine, **options, **places)
    (dk,) = torch.autograd.grad(out.square().sum(), [k])
    dist.all_reduce(dk)
    (expected,) = torch.autograd.grad(whole.square().sum(), [k])
    disable(model)
    error = (out - whole[:, start : start + sizes[rank]]).detach().flatten()
    return float(error.abs().sum()), float((dk - expected).abs().max())


@pytest.mark.parametrize("causal", [False, True])
def test_grouped_heads_and_causal_layers_are_served(pool: Pool, causal: bool) -> None:
    for output, gradient in pool.run(3, measure_backend_errors, (5, 0, 7), (4, 2), causal):
        assert output < 1e-4  # a sum of 448 numbers
        assert gradient < FLOAT32_SUMS


def test_masks_of_keys_alone_are_taken() -> None:
    keys = torch.tensor([[True, True, False, True], [True, False, False, False]])
    square = keys[:, None, None, :] & keys[:, None, :, None]
    for mask in (keys, keys[:, None], keys[:, None, None], square):
        assert torch.equal(visible_keys(mask, 2, 4, 4), keys)
    for mask, match in (
        (keys.float()[:, None, None], "boolean mask of 4 keys of 2 sequences, given torch.float32"),
        (square.tril(), "in which queries see different keys"),
        (keys[:, None, None].expand(-1, 3, -1, -1), r"given torch.bool \[2, 3, 1, 4\]"),
        (keys[:, None, None, :3], r"given torch.bool \[2, 1, 1, 3\]"),
    ):
        with pytest.raises(errors.MaskError, match=match):
            visible_keys(mask, 2, 4, 4)


# --- bad input ---


Spoil = Callable[[nn.Module, Inputs, int], None]


def _batch(model: nn.Module, given: Inputs, rank: int) -> None:
    for name in ("hidden_states", "encoder_hidden_states", "timestep"):
        given[name] = torch.cat([given[name]] * 2) if rank else given[name]


def _content(model: nn.Module, given: Inputs, rank: int) -> None:
    given["encoder_hidden_states"] = given["encoder_hidden_states"] + rank


def _processor(model: nn.Module, given: Inputs, rank: int) -> None:
    model.blocks[0].attn1.set_processor(type(model.blocks[0].attn1.processor)())


def _one_processor(model: nn.Module, given: Inputs, rank: int) -> None:
    if rank == 1:
        _processor(model, given, rank)


def _dropout(model: nn.Module, given: Inputs, rank: int) -> None:
    model.train()
    model.blocks[0].attn1.to_out[1].p = 0.1


def _cache(model: nn.Module, given: Inputs, rank: int) -> None:
    model.enable_cache(diffusers.FirstBlockCacheConfig(threshold=0.1))


def _adapter(model: nn.Module, given: Inputs, rank: int) -> None:
    model.proj_out = nn.Linear(model.proj_out.in_features, model.proj_out.out_features)


def _dims(model: nn.Module, given: Inputs, rank: int) -> None:
    given["timestep"] = torch.full((1, 45, 1), 500)


def _times(model: nn.Module, given: Inputs, rank: int) -> None:
    given["timestep"] = torch.full((1, 2), 500)


def _time_of_one_token(model: nn.Module, given: Inputs, rank: int) -> None:
    given["timestep"] = torch.full((1, 3), 500)  # rank 1 has one of them, which would do for all of its tokens


def _control(model: nn.Module, given: Inputs, rank: int) -> None:
    given["control_hidden_states"] = torch.zeros(1)


def _backend(model: nn.Module, given: Inputs, rank: int) -> None:
    model.set_attention_backend("native")


def _short(model: nn.Module, given: Inputs, rank: int) -> None:
    given["hidden_states"] = given["hidden_states"][..., :2, :2][:, :, :1]


FORWARDS: dict[str, tuple[Spoil, str]] = {
    "batches differ": (_batch, r"the same call on every rank(.|\n)*hidden_states"),
    "prompts differ": (_content, r"the same call on every rank(.|\n)*encoder_hidden_states(.|\n)*same inputs"),
    "another processor": (_processor, "processors that the model was enabled with, given WanAttnProcessor"),
    "another processor on one rank": (_one_processor, "processors that the model was enabled with"),
    "dropout": (_dropout, r"a model without dropout.* given blocks.0.attn1.to_out.1 in training"),
    "a cache": (_cache, "a model that computes all layers, given enable_cache"),
    "an adapter": (
        _adapter,
        "modules that the model was enabled with, given another proj_out",
    ),
    "times of some tokens": (_times, "timestep: expected values of 45 tokens, given 2. Fix: pass one value for all"),
    "times of three tokens": (_time_of_one_token, "timestep: expected values of 45 tokens, given 3"),
    "residuals of a ControlNet": (
        _control,
        "given control_hidden_states, which stays whole. Fix: leave the ControlNet",
    ),
    "another backend": (_backend, "processors that the model was enabled with, given WanAttnProcessor"),
    "too few tokens": (_short, "hidden_states: expected 2 tokens or more, one a rank, given 1 tokens"),
    "dims": (_dims, "timestep: expected 2 dims, given 3 dims"),
}


@on_each_rank
def catch_error_of_forward(case: str) -> str:
    """The error of a forward pass, on one rank."""
    model, given = MODELS["wan"].model(), MODELS["wan"].given(5)
    enable(model, named_mesh(Shape(1, 2, 1), AXES))
    FORWARDS[case][0](model, given, dist.get_rank())
    try:
        model(**given)
    except errors.InputError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("case", FORWARDS)
def test_a_bad_forward_pass_raises_alike(pool: Pool, case: str) -> None:
    found = pool.run(2, catch_error_of_forward, case)
    assert found[0] == found[1]
    with pytest.raises(ValueError, match=FORWARDS[case][1]):
        raise ValueError(found[0])


def _no_plan() -> nn.Module:
    sizes = {"num_layers": 1, "attention_head_dim": 4, "num_attention_heads": 2, "caption_projection_dim": 8}
    return diffusers.SD3Transformer2DModel(**sizes, sample_size=4, joint_attention_dim=4, pooled_projection_dim=4)


def _replaces_frames() -> nn.Module:
    model = MODELS["hunyuan-video"].model()
    model.register_to_config(image_condition_type="token_replace")
    return model


def _no_module() -> nn.Module:
    model = MODELS["wan"].model()
    model._cp_plan = {**model._cp_plan, "blocks.*.attention.*": model._cp_plan["blocks.0"]}
    return model


def _own_kernel() -> nn.Module:
    model = MODELS["wan"].model()
    model.blocks[1].attn1.processor = lambda attn, x, *_: x
    return model


def _shared_processor() -> nn.Module:
    model = MODELS["wan"].model()
    model.blocks[0].attn1.processor = model.blocks[0].attn2.processor
    return model


def _parallel() -> nn.Module:
    model = MODELS["wan"].model()
    model._parallel_config = diffusers.ContextParallelConfig(ulysses_degree=2)
    return model


def _on_mesh() -> nn.Module:
    model = MODELS["wan"].model()
    enable(model, None)
    return model


def _one_head() -> nn.Module:
    sizes = {"num_attention_heads": 1, "attention_head_dim": 12, "num_layers": 1, "ffn_dim": 8, "text_dim": 4}
    return diffusers.WanTransformer3DModel(**sizes, in_channels=4, out_channels=4, freq_dim=4)


ENABLES: dict[str, tuple[Callable[[], Any], dict[str, Any], str]] = {
    "no model": (lambda: nn.Linear(2, 2), {}, "expected a model of diffusers, given Linear.*ddp.module"),
    "no plan": (_no_plan, {}, "a transformer with a plan .* given SD3Transformer2DModel.*_cp_plan"),
    "a refused plan": (
        lambda: diffusers.HeliosTransformer3DModel(num_layers=1, num_attention_heads=1, ffn_dim=8),
        {},
        "given HeliosTransformer3DModel with a plan that gathers",
    ),
    "a plan of another model": (
        _no_module,
        {},
        r"modules that the model has, given Wan.* without blocks.\*.attention.\*",
    ),
    "frames replaced": (_replaces_frames, {}, "treats all tokens alike, given .*token_replace"),
    "a processor of one's own": (_own_kernel, {}, "processors that call a backend of diffusers, given function"),
    "a shared processor": (_shared_processor, {}, "other processors where keys are whole, given one WanAttnProcessor"),
    "parallelism of diffusers": (_parallel, {}, "without parallelism, given .* after enable_parallelism"),
    "enabled twice": (_on_mesh, {}, "without parallelism, given .* on a mesh already.*disable first"),
    "fewer heads than ranks": (_one_head, {"shape": (2, 1, 1)}, "at least one key head a rank .* 1 key heads and a he"),
    "an unknown exchange": (MODELS["wan"].model, {"exchange": "rings"}, "exchange: expected one of .* given 'rings'"),
    "an unknown kernel": (MODELS["wan"].model, {"kernel": "fast"}, "kernel: expected one of .* given 'fast'"),
    "checked": (MODELS["wan"].model, {"checked": "yes"}, "checked: expected None, True or False, given 'yes'"),
}


@on_each_rank
def catch_error_of_enable(case: str, alone: bool) -> str:
    """The error of `enable`, on one rank; with `alone` only rank 1 passes what is wrong."""
    make, given, _ = ENABLES[case]
    options = {**given}
    mesh = named_mesh(Shape(*options.pop("shape", (1, 2, 1))), AXES)
    wrong = not alone or dist.get_rank() == 1
    model = make() if wrong else MODELS["wan"].model()
    before = copy.copy(getattr(model, "_parallel_config", None)), registered()
    try:
        enable(model, mesh, **(options if wrong else {}))
    except errors.InputError as error:
        assert registered() == before[1], "the registry changed"
        return str(error)
    return "no error"


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("case", ENABLES)
def test_a_model_that_cannot_be_put_on_a_mesh_is_refused_alike(pool: Pool, case: str, alone: bool) -> None:
    found = pool.run(2, catch_error_of_enable, case, alone)
    assert found[0] == found[1]
    with pytest.raises(ValueError, match=ENABLES[case][2]):
        raise ValueError(found[0])


def test_parallelism_of_diffusers_is_refused_on_a_mesh() -> None:
    model = _on_mesh()
    with pytest.raises(RuntimeError, match="Parallelism is already applied"):
        model.enable_parallelism(config=diffusers.ContextParallelConfig(ulysses_degree=2))
    disable(model)
    with pytest.raises(errors.ModelError, match="disable model: expected a model on a mesh, given Wan"):
        disable(model)


def test_residuals_of_a_controlnet_are_refused_by_place_too() -> None:
    model, given = MODELS["flux"].model(), MODELS["flux"].inputs(3, 1)
    enable(model, None)
    names = list(inspect.signature(model.forward).parameters)
    given["controlnet_block_samples"] = [torch.zeros(1)]
    args = [given.get(name) for name in names[: names.index("controlnet_block_samples") + 1]]
    with pytest.raises(errors.ModelError, match="given controlnet_block_samples"):
        model(*args)
