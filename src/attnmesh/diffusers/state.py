"""State of a transformer on a mesh: hooks that split its tokens and gather its output, checks of each forward pass."""

import inspect
from collections.abc import Callable, Sequence
from functools import partial as partial_of
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd
from torch.utils._pytree import keystr, tree_flatten_with_path

from attnmesh.core.digest import fingerprints
from attnmesh.diffusers.diffusers_names import Attention, AttentionModuleMixin, MochiAttention
from attnmesh.diffusers.family_plans import TokenPlan, TokenSplit, modules_named
from attnmesh.diffusers.tokens import Streams
from attnmesh.errors import KernelError, ModelError, ShapeError
from attnmesh.guard.agreement import CallGuard
from attnmesh.mesh.axes import RankMesh

SUBJECT = "attnmesh.diffusers forward"

COMPARED_TYPES = (bool, int, float, str, type(None))
"""Types of arguments that ranks compare, beside tensors."""


class MeshState:
    """State of one model on a mesh.

    It is the model's `_parallel_config`, so diffusers refuses a second kind of parallelism.

    Args:
        model: The transformer.
        plan: Its plan.
        mesh: The mesh as this rank sees it.
        checked: When ranks compare inputs, as in `enable`.
    """

    context_parallel_config = tensor_parallel_config = None  # diffusers reads these, for example to save a model

    def __init__(self, model: nn.Module, plan: TokenPlan, mesh: RankMesh, checked: bool | None) -> None:
        device = torch.device(mesh.device_type)
        self.plan = plan
        self.streams = Streams(mesh)
        self.guard = CallGuard(mesh, device, checked is not False)
        self.compares_values = checked is True or device.type == "cpu"  # elsewhere the CPU would wait for them
        self.processors: dict[Any, Any] = {module: module.processor for module in split_attention(model, plan).values()}
        self.modules = {name: modules_named(model, name) for name in (*plan.splits, *plan.gathers)}
        self.backend: Any = None
        """Name of the model's backend."""
        self.undo: list[Callable[[], None]] = []

    def __deepcopy__(self, memo: object) -> "MeshState":
        fix = "copy it before attnmesh.diffusers.enable, and enable the copy"
        raise ModelError("copy.deepcopy", "a model that is not on a mesh", "one that is", fix)

    def add_hooks(self, model: nn.Module) -> None:
        """Add the hooks of the plan to the model's modules."""
        self._add(model.register_forward_pre_hook(self._begin, with_kwargs=True))
        for name, splits in self.plan.splits.items():
            inputs, outputs = ([split for split in splits if split.is_output is kind] for kind in (False, True))
            for module in self.modules[name]:
                if inputs:
                    names = list(inspect.signature(module.forward).parameters)
                    split_inputs = partial_of(self._split_inputs, inputs, names)
                    self._add(module.register_forward_pre_hook(split_inputs, with_kwargs=True))
                if outputs:
                    self._add(module.register_forward_hook(partial_of(self._split_outputs, outputs)))
        for name, dims in self.plan.gathers.items():
            for module in self.modules[name]:
                self._add(module.register_forward_hook(partial_of(self._gather, dims)))

    def _add(self, handle: Any) -> None:
        self.undo.append(handle.remove)

    def _begin(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Check a forward pass before it splits tokens. Ranks compare its inputs, but not in a compiled graph."""
        self.streams.begin()
        if torch.compiler.is_compiling():
            self._check_model(model)
            return
        arguments = dict(zip(inspect.signature(model.forward).parameters, args, strict=False)) | kwargs
        inputs = {f"{cast(Any, path[0]).key}{keystr(path[1:])}": x for path, x in tree_flatten_with_path(arguments)[0]}
        tensors = {name: x for name, x in inputs.items() if isinstance(x, Tensor)}
        values = {name: repr(x) for name, x in inputs.items() if isinstance(x, COMPARED_TYPES)}
        shapes = [(name, x.dtype, tuple(x.shape)) for name, x in tensors.items()]
        fields = fingerprints(tensors) if self.compares_values else {"shapes": shapes}
        with self.guard.agreement(f"{SUBJECT} of {type(model).__name__}", {**fields, **values}):
            self._check(model, list(tensors))

    def _check(self, model: nn.Module, tensors: Sequence[str]) -> None:
        """Raise where the model has changed since it was put on the mesh, or cannot be served."""
        fix = "call attnmesh.diffusers.disable and enable again after a change of the model"
        for module, processor in self.processors.items():
            attributes = processor._attention_backend, processor._parallel_config
            if module.processor is not processor or attributes[0] is not self.backend or attributes[1] is not self:
                given = f"{type(module.processor).__name__} in {type(module).__name__}"
                raise ModelError(SUBJECT, "the attention processors that the model was enabled with", given, fix)
        for name, modules in self.modules.items():
            if [id(module) for module in modules_named(model, name)] != [id(module) for module in modules]:
                raise ModelError(SUBJECT, "the modules that the model was enabled with", f"another {name}", fix)
        control = next((name for name in tensors if "control" in name), None)
        if control is not None:
            given, fix = f"{control}, which stays whole", "leave the ControlNet out, or take the model off the mesh"
            raise ModelError(SUBJECT, "hidden states that the plan splits", given, fix)
        self._check_model(model)

    def _check_model(self, model: nn.Module) -> None:
        """Raise if ranks could compute different things."""
        if getattr(model, "is_cache_enabled", False):
            given, fix = "enable_cache: ranks may differ in what they skip", "call disable_cache()"
            raise ModelError(SUBJECT, "a model that computes all layers", given, fix)
        modules = model.named_modules() if model.training else ()
        dropout = next((name for name, module in modules if isinstance(module, _DropoutNd) and module.p), None)
        if dropout is not None:
            given, fix = f"{dropout} in training", "set the model's dropout to 0, or call eval()"
            raise KernelError(SUBJECT, "a model without dropout: results are exact", given, fix)

    def _split_inputs(
        self,
        splits: list[TokenSplit],
        names: list[str],
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        inputs = dict(zip(names, args, strict=False)) | kwargs
        for split in splits:
            x = inputs.get(str(split.name))
            if x is not None:
                inputs[str(split.name)] = self._split(x, split, [inputs[name].shape[1] for name in split.joins])
        self._check_companions()
        return tuple(inputs[name] for name in names[: len(args)]), {name: inputs[name] for name in kwargs}

    def _split_outputs(self, splits: list[TokenSplit], module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        by_index = {split.name: split for split in splits}
        out = _map_outputs(lambda i, x: self._split(x, by_index[i]) if i in by_index else x, output)
        self._check_companions()
        return out

    def _split(self, x: Tensor, split: TokenSplit, own: Sequence[int] = ()) -> Tensor:
        """Return this rank's tokens of a tensor. `own` counts this rank's tokens of each stream that lies in x."""
        if split.ndim is not None and x.ndim > split.ndim:
            fix = f"leave out the first {x.ndim - split.ndim}"
            raise ShapeError(f"{SUBJECT} {split.name}", f"{split.ndim} dims", f"{x.ndim} dims", fix)
        has_one_value = not split.is_stream and x.ndim > split.dim and x.shape[split.dim] == 1
        if has_one_value or (split.ndim is not None and x.ndim < split.ndim):
            return x  # one value for all tokens
        if own:
            return self.streams.split_joined(x, split.dim, own)
        if split.is_stream:
            self.streams.add_stream(str(split.name), x.shape[split.dim])
        else:
            self.streams.companions[str(split.name)] = x.shape[split.dim]
        return self.streams.split(x, split.dim)

    def _check_companions(self) -> None:
        if self.plan.streams <= self.streams.lengths.keys():
            self.streams.check_companions()

    def _gather(self, dims: tuple[int | None, ...], module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        self.streams.check_companions()

        def whole(index: int, x: Tensor) -> Tensor:
            dim = dims[index]
            return x if dim is None else self.streams.gather(x, dim)

        return _map_outputs(whole, output)


def split_attention(model: nn.Module, plan: TokenPlan) -> dict[str, Any]:
    """Return the attention modules whose tokens are split, by name."""
    kinds = (Attention, MochiAttention, AttentionModuleMixin)
    return {name: module for name, module in model.named_modules() if isinstance(module, kinds) and plan.is_split(name)}


def _map_outputs(function: Callable[[int, Any], Any], output: Any) -> Any:
    """Return the output of a module, a tensor or several, with each changed by a function of its index and itself."""
    if isinstance(output, Tensor):
        return function(0, output)
    return tuple(function(index, x) for index, x in enumerate(output))
