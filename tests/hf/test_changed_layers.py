"""Models, layers and inputs that change once weights are shared: steps are those of the changed ones, shared or not."""

from copy import deepcopy
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import attnmesh.hf as hf
from attnmesh import errors
from attnmesh.hf.shared_weights import SharedConv1D, SharedLinear
from attnmesh.hf.transformers_names import Conv1D
from tests.support.models import families
from tests.support.models.families import prompt
from tests.support.models.shared_weights import SIZES, counted_calls, load, mesh_of, saved_stock, step_of
from tests.support.models.tiny_models import Case, build
from tests.support.process.needs import needs_library
from tests.support.ranks.pool import Pool, on_each_rank
from tests.support.truth.tolerances import FLOAT32_SUMS

pytestmark = needs_library


def test_a_model_of_gpt2_is_restored() -> None:
    model = build(Case("gpt2", "gpt2"), "attnmesh", torch.float32)
    with counted_calls() as calls:
        plain = step_of(model)
        hf.share_weights(model, None)
        shared = [one for one in model.modules() if isinstance(one, SharedConv1D)]
        assert len(shared) == 4 * model.config.n_layer
        torch.testing.assert_close(step_of(model), plain, rtol=0, atol=FLOAT32_SUMS * float(plain.abs().max()))
        count = len(calls)
        assert count == 4 * model.config.n_layer + 1
        hf.restore(model)
        assert all(type(one) is Conv1D for one in shared)
        assert torch.equal(step_of(model), plain)
        assert len(calls) == count


class Changed(NamedTuple):
    """The tokens after a change of the model that shares, and the numbers of shared calls before it and after."""

    tokens: list[list[int]]
    calls_before: int
    calls_after: int


@on_each_rank
def generate_after_change(folder: str, change: str) -> Changed:
    mesh, ids = mesh_of(2), prompt(30)
    with counted_calls() as calls:
        model = hf.share_weights(load(folder), mesh)
        hf.generate(model, ids, mesh=mesh, max_new_tokens=3, do_sample=False)
        before = len(calls)
        if change == "moved weights":
            for weight in model.parameters():
                weight.data = weight.data.flip(0).contiguous().flip(0).clone()
        elif change == "another mesh":
            hf.share_weights(model, mesh := init_device_mesh("cpu", (1, 2), mesh_dim_names=("queries", "keys")))
        elif change == "a copy":
            model = load(folder)
            model.load_state_dict(hf.share_weights(load(folder), mesh).state_dict())
            hf.share_weights(model, mesh)
        tokens = hf.generate(model, ids, mesh=mesh, max_new_tokens=5, do_sample=False)
    return Changed(tokens.tolist(), before, len(calls) - before)


@pytest.mark.parametrize("change", ["moved weights", "another mesh", "a copy"])
def test_a_model_that_was_changed_shares_its_weights_again(change: str, pool: Pool, tmp_path: Path) -> None:
    expected = saved_stock(tmp_path, 30, 5)
    for answer in pool.run(2, generate_after_change, str(tmp_path), change):
        assert answer.tokens == expected
        assert answer.calls_before > 0
        assert answer.calls_after > 0


def assert_same_step(shared: Any, plain: Any) -> None:
    """Float32 rounds a sum of another order differently, by little of the largest logit."""
    found, expected = step_of(shared), step_of(plain)
    torch.testing.assert_close(found, expected, rtol=0, atol=FLOAT32_SUMS * float(expected.abs().max()))


def change_layer(layer: Any, change: str) -> None:
    numbers = torch.randn(layer.out_features, generator=torch.Generator().manual_seed(0))
    weight = layer.weight
    if change == "a bias":
        layer.bias = torch.nn.Parameter(numbers)
    elif change == "another bias":
        layer.bias.data = numbers
    elif change == "no bias":
        layer.bias = None
    elif change == "strides":
        weight.data = weight.data.as_strided(weight.shape, (1, len(weight)))
    elif change == "fewer outputs":
        weight.data = weight.data[:48]
    elif change == "a subclass":
        layer.weight = Scaled(2 * weight.data)


class Scaled(torch.nn.Parameter):
    """A weight that only functions of PyTorch may read, as quantized ones are."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.nn.functional.linear:
            x, weight, bias = args
            return func(x, weight.as_subclass(Tensor) / 2, bias)
        return super().__torch_function__(func, types, args, kwargs or {})


CHANGES = ("a bias", "another bias", "no bias", "strides", "fewer outputs", "a subclass")


@pytest.mark.parametrize("change", CHANGES)
def test_a_layer_may_change_in_place(change: str) -> None:
    """Its weight stays where it was, or is none that a call takes."""
    plain, shared = (families.model("llama", "attnmesh", **SIZES) for _ in range(2))
    if "bias" in change and change != "a bias":
        for model in (plain, shared):
            model.lm_head.bias = torch.nn.Parameter(torch.ones(97))
    with counted_calls() as calls:
        hf.share_weights(shared, None)
        step_of(shared)
        assert calls
        for model in (plain, shared):
            change_layer(model.lm_head, change)
        assert_same_step(shared, plain)


def test_layers_of_one_input_may_change_apart() -> None:
    plain, shared = (families.model("llama", "attnmesh", **SIZES) for _ in range(2))
    with counted_calls() as calls:
        hf.share_weights(shared, None)
        step_of(shared)
        step_of(shared)
        assert max(calls) == 3
        for model in (plain, shared):
            change_layer(model.model.layers[0].self_attn.v_proj, "strides")
        for _ in range(2):
            assert_same_step(shared, plain)


def test_an_input_that_does_not_fit_is_refused_as_without() -> None:
    with counted_calls():
        model = hf.share_weights(families.model("llama", "attnmesh", **SIZES), None)
        model.lm_head.register_forward_pre_hook(lambda _, args: (args[0].flatten()[:, None],))
        with pytest.raises(RuntimeError, match="cannot be multiplied"):
            step_of(model)


def double_the_input(_: Any, args: Any, __: Any) -> None:
    args[0].mul_(2)


@pytest.mark.parametrize("inference", [False, True])
def test_an_input_that_changes_between_layers_is_read_again(inference: bool) -> None:
    plain, shared = (families.model("llama", "attnmesh", **SIZES) for _ in range(2))
    with counted_calls() as calls, torch.inference_mode(inference):
        hf.share_weights(shared, None)
        step_of(shared)
        step_of(shared)
        for model in (plain, shared):
            first = model.model.layers[0].self_attn.q_proj
            first.register_forward_hook(double_the_input)
        before = len(calls)
        assert_same_step(shared, plain)
    assert len(calls) > before


def test_a_model_is_restored_before_it_is_copied() -> None:
    plain = families.model("llama", "attnmesh", **SIZES)
    with counted_calls() as calls, torch.no_grad():
        model = hf.share_weights(plain, None)
        with pytest.raises(errors.ModelError, match=r"call hf\.restore"):
            deepcopy(model)
        hf.restore(model)
        assert not any(isinstance(module, SharedLinear) for module in model.modules())
        model(prompt(1), past_key_values=hf.ShardedCache(model.config, None))
        deepcopy(model)
        hf.restore(model)
        assert not calls
