"""Put a transformer of diffusers on a mesh, and take it off again."""

from functools import partial
from itertools import count
from typing import Any

from diffusers import ModelMixin
from diffusers.utils.torch_utils import unwrap_module
from torch.distributed.device_mesh import DeviceMesh

from attnmesh.comm.consensus import describe_call, run_agreed
from attnmesh.core.checks import check_checked, require
from attnmesh.diffusers.backend import backend_of, register, unregister
from attnmesh.diffusers.on_mesh import OnMesh, split_attention
from attnmesh.diffusers.plans import plan_of
from attnmesh.errors import ModelError
from attnmesh.kernels.driver import check_kernel
from attnmesh.mesh.axes import Mesh
from attnmesh.mesh.schedule import check_exchange

SUBJECT = "diffusers.enable"

NUMBERS = count()
"""Numbers of the backends that were made."""

PLACES = ("_attention_backend", "_parallel_config")
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
        checked: When ranks compare the inputs of the model: True at every forward pass, False never, None at every
            forward pass on CPUs, and on GPUs at the first of each shape.

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
    model, place = unwrap_module(model), Mesh.of(mesh)
    call = describe_call(SUBJECT, model=type(model).__name__, exchange=exchange, kernel=kernel, checked=checked)

    def check() -> None:
        check_exchange(f"{SUBJECT} exchange", exchange)
        check_kernel(kernel)
        check_checked(SUBJECT, checked)
        _check_model(model)

    run_agreed(place, check, call)
    on_mesh = OnMesh(model, plan_of(model), place, checked)
    backend = backend_of(mesh, on_mesh.tokens, exchange, kernel, checked)
    member = register(f"attnmesh-{next(NUMBERS)}", backend)
    on_mesh.backend = member
    on_mesh.undo.append(lambda: unregister(member))
    for processor in {id(p): p for p in on_mesh.processors.values()}.values():
        on_mesh.undo.append(
            partial(_restore, processor, {name: x for name, x in vars(processor).items() if name in PLACES})
        )
        processor._attention_backend, processor._parallel_config = member, on_mesh
    model._parallel_config = on_mesh
    on_mesh.add_hooks(model)


def disable(model: Any) -> None:
    """Take a transformer off its mesh: it is as it was before `enable`.

    Args:
        model: The transformer that `enable` changed.

    Raises:
        ModelError: The model is not on a mesh.
    """
    model = unwrap_module(model)
    on_mesh = getattr(model, "_parallel_config", None)
    given, fix = type(model).__name__, "call it once for each enable"
    require(isinstance(on_mesh, OnMesh), ModelError, "diffusers.disable model", "a model on a mesh", given, fix)
    assert on_mesh is not None
    while on_mesh.undo:
        on_mesh.undo.pop()()
    model._parallel_config = None


def _restore(processor: Any, before: dict[str, Any]) -> None:
    for name in PLACES:
        vars(processor).pop(name, None)
    vars(processor).update(before)


def _check_model(model: Any) -> None:
    """Raise unless a model can be put on a mesh."""
    fix = "pass the transformer itself, as pipeline.transformer or ddp.module"
    fits = isinstance(model, ModelMixin)
    require(fits, ModelError, f"{SUBJECT} model", "a model of diffusers", type(model).__name__, fix)
    plan, name = plan_of(model), type(model).__name__
    if model._parallel_config is not None:
        is_ours = isinstance(model._parallel_config, OnMesh)
        given = f"{name} on a mesh already" if is_ours else f"{name} after enable_parallelism"
        fix = "call attnmesh.diffusers.disable first" if is_ours else "leave enable_parallelism out"
        raise ModelError(f"{SUBJECT} model", "a model without parallelism", given, fix)
    split = split_attention(model, plan)
    require(bool(split), ModelError, f"{SUBJECT} model", "layers of attention", name, "pass a transformer")
    others = {id(m.processor) for m in model.modules() if hasattr(m, "processor") and m not in split.values()}
    for module in split.values():
        processor, kind = module.processor, type(module.processor).__name__
        expected = "attention processors that call a backend of diffusers"
        if not all(hasattr(processor, place) for place in PLACES) or "IPAdapter" in kind:
            raise ModelError(f"{SUBJECT} model", expected, kind, "leave the adapter out, or set the default processors")
        if id(processor) in others:
            given, fix = f"one {kind} for both", "give each module a processor of its own"
            raise ModelError(f"{SUBJECT} model", "other processors where keys are whole", given, fix)
