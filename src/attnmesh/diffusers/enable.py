"""Put a transformer of diffusers on a mesh, and take it off again."""

from functools import partial as partial_of
from itertools import count
from typing import Any

from diffusers import ModelMixin
from torch.distributed.device_mesh import DeviceMesh

from attnmesh.checks.argument_checks import check_compare_option
from attnmesh.diffusers.backend import backend_of, register, unregister
from attnmesh.diffusers.diffusers_names import unwrap_module
from attnmesh.diffusers.family_plans import TokenPlan, plan_of
from attnmesh.diffusers.state import MeshState, split_attention
from attnmesh.errors import ModelError
from attnmesh.guard.agreement import Agreement
from attnmesh.kernels.choice import check_kernel
from attnmesh.mesh.axes import RankMesh
from attnmesh.mesh.schedule import check_exchange
from attnmesh.mesh.shapes import check_heads_axis

SUBJECT = "diffusers.enable"

BACKEND_NUMBERS = count()
"""Numbers for the names of backends, so that each model has a backend of its own."""

BACKEND_ATTRIBUTES = ("_attention_backend", "_parallel_config")
"""Attributes of a processor from which diffusers reads its backend."""


def enable(
    model: Any,
    mesh: DeviceMesh | None,
    exchange: str = "auto",
    *,
    kernel: str = "auto",
    checked: bool | None = None,
) -> None:
    """Split the tokens of a transformer over the ranks of a mesh, in inference and in training.

    Every rank calls the model, or its pipeline, with the same inputs, and gets the whole output. The model's weights
    stay whole. In training every rank computes the loss of the whole output; sum the gradients over the ranks.

    Args:
        model: A transformer of diffusers with a plan to split its tokens, changed in place.
        mesh: The mesh whose ranks share the tokens; None for one rank.
        exchange: How keys travel: "bulk", "pipelined", "ring" or "auto", as in `attnmesh.attention`.
        kernel: Kernel of one device, as in `attnmesh.attention`.
        checked: How ranks compare the inputs of the model at every forward pass. True: by their values. False: not at
            all. None: by their values on CPUs, by their shapes on GPUs, where the CPU would wait for values.

    Raises:
        ModelError: The model has no plan, is on a mesh already, or has layers that a mesh cannot serve.
        InputError: Another argument cannot be served. All ranks raise the same error.

    >>> import torch
    >>> from diffusers import WanTransformer3DModel
    >>> sizes = {"num_attention_heads": 2, "attention_head_dim": 12, "num_layers": 1, "ffn_dim": 8, "text_dim": 4}
    >>> model = WanTransformer3DModel(**sizes, in_channels=4, out_channels=4, freq_dim=4)
    >>> enable(model, None)
    >>> video, text = torch.randn(1, 4, 3, 6, 6), torch.randn(1, 5, 4)
    >>> model(video, torch.tensor([500]), text).sample.shape
    torch.Size([1, 4, 3, 6, 6])
    >>> disable(model)
    """
    model = unwrap_module(model)
    rank_mesh = RankMesh.of(mesh)
    fields = {"model": type(model).__name__, "exchange": exchange, "kernel": kernel, "checked": checked}
    with Agreement(rank_mesh, SUBJECT, fields):
        check_exchange(f"{SUBJECT} exchange", exchange)
        check_kernel(kernel)
        check_compare_option(SUBJECT, checked)
        _check_parallelism(model)
        plan = plan_of(model)
        _check_processors(model, plan)
        for module in split_attention(model, plan).values():
            check_heads_axis(f"{SUBJECT} mesh", rank_mesh.shape, getattr(module, "heads", rank_mesh.shape.heads))
    state = MeshState(model, plan, rank_mesh, checked)
    backend = backend_of(mesh, state.streams, exchange, kernel, checked)
    state.backend = register(f"attnmesh-{next(BACKEND_NUMBERS)}", backend)
    state.undo.append(partial_of(unregister, state.backend))
    for target in (model, *{id(processor): processor for processor in state.processors.values()}.values()):
        attributes = {name: vars(target).get(name, ...) for name in BACKEND_ATTRIBUTES}
        state.undo.append(partial_of(_restore, target, attributes))
        target._parallel_config = state
        if target is not model:
            target._attention_backend = state.backend
    state.add_hooks(model)


def disable(model: Any) -> None:
    """Take a transformer off its mesh: it is as it was before `enable`.

    Args:
        model: The transformer that `enable` changed.

    Raises:
        ModelError: The model is not on a mesh.
    """
    model = unwrap_module(model)
    state: Any = getattr(model, "_parallel_config", None)
    if not isinstance(state, MeshState):
        fix = "call it once for each enable"
        raise ModelError("diffusers.disable model", "a model on a mesh", type(model).__name__, fix)
    while state.undo:
        state.undo.pop()()


def _restore(target: Any, attributes: dict[str, Any]) -> None:
    """Give a module or a processor its former attributes. The value ... stands for an attribute that it had not."""
    for name, value in attributes.items():
        vars(target).pop(name, None)
        if value is not ...:
            vars(target)[name] = value


def _check_parallelism(model: Any) -> None:
    """Raise unless a model is one of diffusers, without parallelism."""
    subject = f"{SUBJECT} model"
    name = type(model).__name__
    if not isinstance(model, ModelMixin):
        fix = "pass the transformer itself, as pipeline.transformer or ddp.module"
        raise ModelError(subject, "a model of diffusers", name, fix)
    if model._parallel_config is not None:
        given, fix = f"{name} after enable_parallelism", "leave enable_parallelism out"
        if isinstance(model._parallel_config, MeshState):
            given, fix = f"{name} on a mesh already", "call attnmesh.diffusers.disable first"
        raise ModelError(subject, "a model without parallelism", given, fix)


def _check_processors(model: Any, plan: TokenPlan) -> None:
    """Raise unless split attention calls a backend, by processors that no module with whole keys shares."""
    subject = f"{SUBJECT} model"
    split = split_attention(model, plan)
    if not split:
        raise ModelError(subject, "layers of attention", type(model).__name__, "pass a transformer")
    unsplit = {id(m.processor) for m in model.modules() if hasattr(m, "processor") and m not in split.values()}
    for module in split.values():
        processor, kind = module.processor, type(module.processor).__name__
        calls_backend = all(hasattr(processor, name) for name in BACKEND_ATTRIBUTES) and "IPAdapter" not in kind
        if not calls_backend:
            expected = "attention processors that call a backend of diffusers"
            raise ModelError(subject, expected, kind, "leave the adapter out, or set the default processors")
        if id(processor) in unsplit:
            expected, fix = "other processors where keys are whole", "give each module a processor of its own"
            raise ModelError(subject, expected, f"one {kind} for both", fix)
