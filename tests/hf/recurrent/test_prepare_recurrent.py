"""Recurrent layers that are not as attnmesh knows them: refused by name on all ranks, and never half prepared."""

import sys
from inspect import Parameter, Signature, signature, unwrap
from types import CodeType, FunctionType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

import attnmesh as am
import attnmesh.hf as hf
from attnmesh import errors
from attnmesh.hf import transformers_names as upstream
from attnmesh.hf.family import recurrences
from attnmesh.hf.recurrent.functions import recurrence_of
from attnmesh.hf.recurrent.prepare_recurrent import RecurrentLayer, prepared
from attnmesh.mesh.shapes import Shape
from tests.support.models.checks import AXES
from tests.support.models.families import prompt
from tests.support.models.recurrent import FAMILIES, model_of
from tests.support.ranks.pool import Pool, on_each_rank
from tests.support.truth.mesh_problems import named_mesh

INSTALLED = upstream.TRANSFORMERS.installed


def layer_of(model: PreTrainedModel, name: str = "") -> Any:
    """Return the first recurrent layer of a model, or the first of a class."""
    return next(x for x in model.modules() if (type(x).__name__ == name if name else recurrence_of(type(x))))


def renamed_forward(method: Any, old: str, new: str) -> FunctionType:
    """Return a `forward` that calls a function, or reads an attribute, by another name, as a new release might."""
    forward: Any = unwrap(method)
    code: CodeType = forward.__code__
    names = tuple(new if name == old else name for name in code.co_names)
    assert names != code.co_names
    known = {new: forward.__globals__.get(old, None)}
    found = FunctionType(code.replace(co_names=names), forward.__globals__ | known, forward.__name__)
    found.__defaults__, found.__kwdefaults__ = forward.__defaults__, forward.__kwdefaults__
    return found


def with_argument(forward: Any, old: str, new: str) -> FunctionType:
    """Return a `forward` with another name of an argument."""
    names = tuple(new if name == old else name for name in forward.__code__.co_varnames)
    return FunctionType(
        forward.__code__.replace(co_varnames=names), forward.__globals__, "forward", forward.__defaults__
    )


def refusal(model: PreTrainedModel) -> str:
    """Return the error of preparing a model. Nothing of the model is changed."""
    before = [(type(module), *module._forward_pre_hooks) for module in model.modules()]
    with pytest.raises(errors.KernelError) as caught, prepared(model):
        pass
    hf.restore(model)
    assert [(type(module), *module._forward_pre_hooks) for module in model.modules()] == before
    return str(caught.value)


def test_each_name_that_a_release_might_change_is_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = set()
    for model in map(model_of, FAMILIES):
        for layer in {type(x).__name__: x for x in model.modules() if recurrence_of(type(x))}.values():
            kind: Any = type(layer)
            needed = recurrences()[kind.__name__]
            for name in (*needed.functions, *needed.reads):
                with monkeypatch.context() as patch:
                    patch.setattr(kind, "forward", renamed_forward(kind.forward, name, "another_name"))
                    verb = "calls" if name in needed.functions else "reads"
                    assert refusal(model) == (
                        f"attnmesh.hf {kind.__name__}: expected a forward that {verb} {name}, given {INSTALLED}, in "
                        f'which it does not. Fix: run pip install "{upstream.TRANSFORMERS.requirement}".'
                    )
            seen.add(kind.__name__)
        with prepared(model):
            assert any(isinstance(x, RecurrentLayer) for x in model.modules())
    assert seen == {*recurrences()}


def test_other_parameters_functions_and_arguments_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("qwen3_next")
    kind = type(layer_of(model))
    stock, module = unwrap(kind.forward), sys.modules[kind.__module__]

    def rule(query: Tensor, key: Tensor, value: Tensor, beta: Tensor, **_: Any) -> None: ...

    with monkeypatch.context() as patch:
        patch.setattr(module, "torch_chunk_gated_delta_rule", rule)
        assert f"given {INSTALLED} with torch_chunk_gated_delta_rule(query, key, value, beta). Fix:" in refusal(model)
    with monkeypatch.context() as patch:
        patch.setattr(kind, "forward", renamed_forward(stock, "causal_conv1d_update", "mix_tokens"))
        assert f"expected a forward of known functions, given {INSTALLED}, in which it calls mix_tokens" in refusal(
            model
        )
    with monkeypatch.context() as patch:
        patch.setattr(kind, "forward", with_argument(stock, "cache_params", "cache"))
        assert f"expected a forward of known arguments, given {INSTALLED}, in which it takes cache." in refusal(model)
    with monkeypatch.context() as patch:
        patch.delitem(recurrences(), kind.__name__)
        assert "expected recurrent layers of known classes, given 0 of 2 of them in the Qwen3NextFor" in refusal(model)


def test_what_hides_the_forward_of_a_layer_is_refused() -> None:
    model = model_of("qwen3_next")
    layer = layer_of(model)
    layer.forward = layer.forward  # as kernels, and accelerate's hooks, do
    assert "expected the forward of its class, given another one on the layer" in refusal(model)


class LowRankConv1d(nn.Conv1d):
    """A convolution with an adapter."""


def test_a_convolution_that_takes_no_halo_is_refused() -> None:
    model = model_of("recurrent_gemma")
    layer: Any = layer_of(model, "RecurrentGemmaRecurrentBlock")
    layer.conv_1d.__class__ = LowRankConv1d
    assert "RecurrentGemmaRecurrentBlock: expected a causal nn.Conv1d as conv_1d, given LowRankConv1d(" in refusal(
        model
    )
    layer.conv_1d.__class__ = nn.Conv1d
    layer.conv_1d.padding = (0,)
    assert "expected a causal nn.Conv1d as conv_1d, given Conv1d(" in refusal(model)


def test_a_part_that_lightning_attention_does_not_have_is_refused() -> None:
    model = model_of("minimax")
    layer_of(model).k_norm = nn.Identity()
    assert f"expected a layer of known parts, given {INSTALLED}, in which it has k_norm" in refusal(model)


@on_each_rank
def call_after_a_new_release() -> list[str]:
    """Errors of a model whose rule has another name: in training twice, in a prefill, and once with whole tokens."""
    mesh, ids, model = named_mesh(Shape(1, 1, 2), AXES), prompt(12), model_of("qwen3_next")
    kind: Any = type(layer_of(model))
    stock, kind.forward = kind.forward, renamed_forward(kind.forward, "torch_chunk_gated_delta_rule", "chunk_rule")
    batch = hf.shard_batch({"input_ids": ids, "labels": ids}, mesh, am.Contiguous())
    calls = (
        lambda: model(**batch),
        lambda: model(**batch),
        lambda: hf.generate(model, ids, mesh=mesh, max_new_tokens=2),
        lambda: model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False),
    )
    found = []
    try:
        for call in calls:
            try:
                call()
                found.append("no error")
            except errors.InputError as error:
                found.append(str(error))
    finally:
        kind.forward = stock
    return found


def test_a_layer_of_a_new_release_is_refused_on_all_ranks_and_whole_tokens_are_not(pool: Pool) -> None:
    for training, again, prefill, whole in pool.run(2, call_after_a_new_release):
        assert training == again
        assert "attnmesh.hf Qwen3NextGatedDeltaNet: expected a forward that calls torch_chunk_gated_delta" in training
        assert training in prefill
        assert whole == "no error"


def as_module(function: Any) -> Any:
    """Return a function as the package `kernels` leaves it: a module that calls it and has its signature."""

    class Func(nn.Module):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs)

    self = Parameter("self", Parameter.POSITIONAL_OR_KEYWORD)
    found: Any = Func
    found.forward.__signature__ = Signature([self, *signature(function).parameters.values()])
    return Func()


@on_each_rank
def compute_losses_beside_kernels(family: str) -> tuple[float, float]:
    """Losses of a model, whose layers call functions and then modules."""
    ids = prompt(12)
    losses = []
    kind: Any = type(layer_of(model_of(family)))
    method, stock = kind.forward, unwrap(kind.forward)
    modules = {name: as_module(stock.__globals__[name]) for name in recurrences()[kind.__name__].functions}
    beside = FunctionType(stock.__code__, {**stock.__globals__, **modules}, "forward", stock.__defaults__)
    try:
        for forward in (method, beside):
            kind.forward = forward
            batch = hf.shard_batch({"input_ids": ids, "labels": ids}, named_mesh(Shape(1, 1, 2), AXES), am.Contiguous())
            losses.append(model_of(family)(**batch).loss.item())
    finally:
        kind.forward = method
    return losses[0], losses[1]


@pytest.mark.parametrize("family", ["mamba", "mamba2", "qwen3_next", "kimi_linear", "lfm2"])
def test_functions_that_the_package_kernels_hides_are_found(family: str, pool: Pool) -> None:
    for loss, beside in pool.run(2, compute_losses_beside_kernels, family):
        assert loss == beside
