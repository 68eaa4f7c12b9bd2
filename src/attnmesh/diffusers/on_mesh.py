"""A transformer on a mesh: hooks that split its tokens and gather its output, and checks of each forward pass."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from diffusers.models.attention import AttentionModuleMixin
from diffusers.models.attention_processor import Attention, MochiAttention
from torch import Tensor, nn
from torch.utils._pytree import keystr, tree_flatten_with_path

from attnmesh.comm.consensus import CallChecker, compares_always
from attnmesh.core.digest import fingerprints
from attnmesh.diffusers.plans import Cut, TokenPlan, modules_named
from attnmesh.diffusers.tokens import Tokens
from attnmesh.errors import KernelError, ModelError, ShapeError
from attnmesh.mesh.axes import Mesh

SUBJECT = "attnmesh.diffusers forward"

PLAIN = (bool, int, float, str, type(None))


class OnMesh:
    """State of one model on a mesh, kept as its `_parallel_config`. So diffusers refuses a second kind of parallelism.

    Args:
        model: The transformer.
        plan: Its plan.
        place: This rank's place in the mesh.
        checked: When ranks compare inputs, as in `enable`.
    """

    context_parallel_config = tensor_parallel_config = None  # diffusers asks for these, as when it saves a model

    def __init__(self, model: nn.Module, plan: TokenPlan, place: Mesh, checked: bool | None) -> None:
        device = torch.device(place.kind)
        self.plan, self.tokens = plan, Tokens(place)
        self.checker = CallChecker(place, device, True if compares_always(checked, device) else checked)
        self.processors: dict[Any, Any] = {module: module.processor for module in split_attention(model, plan).values()}
        self.dropouts = [name for name, module in model.named_modules() if getattr(module, "p", 0) and _drops(module)]
        self.backend: Any = None
        """Name of the model's backend."""
        self.modules: dict[str, list[nn.Module]] = {}
        self.undo: list[Callable[[], None]] = []

    def add_hooks(self, model: nn.Module) -> None:
        """Add the hooks of the plan to the model's modules."""
        self._add(model.register_forward_pre_hook(self._begin, with_kwargs=True))
        self.modules = {name: modules_named(model, name) for name in (*self.plan.cuts, *self.plan.gathers)}
        for name, cuts in self.plan.cuts.items():
            inputs, outputs = ([c for c in cuts if isinstance(c.name, kind)] for kind in (str, int))
            for module in self.modules[name]:
                if inputs:
                    names = list(inspect.signature(module.forward).parameters)
                    before = partial(self._cut_inputs, inputs, names)
                    self._add(module.register_forward_pre_hook(before, with_kwargs=True))
                if outputs:
                    self._add(module.register_forward_hook(partial(self._cut_outputs, outputs)))
        for name, dims in self.plan.gathers.items():
            for module in self.modules[name]:
                self._add(module.register_forward_hook(partial(self._gather, dims)))

    def _add(self, handle: Any) -> None:
        self.undo.append(handle.remove)

    def _begin(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Check a forward pass before it splits tokens."""
        self.tokens.begin()
        if torch.compiler.is_compiling():
            return
        inputs, _ = tree_flatten_with_path((args, kwargs))
        tensors = {keystr(path): x for path, x in inputs if isinstance(x, Tensor)}
        others = {keystr(path): repr(x) for path, x in inputs if isinstance(x, PLAIN)}
        shapes = [(name, x.dtype, tuple(x.shape)) for name, x in tensors.items()]
        kind = f"{SUBJECT} of {type(model).__name__} {shapes if self.checker.checked is None else ''}"
        self.checker.check(
            kind, partial(self._check, model), lambda: {**_short(fingerprints(tensors)), **_short(others)}
        )

    def _check(self, model: nn.Module) -> None:
        """Raise where the model has changed since it was put on the mesh, or has layers that a mesh cannot serve."""
        fix = "call attnmesh.diffusers.disable and enable again after a change of the model"
        for module, processor in self.processors.items():
            places = processor._attention_backend, processor._parallel_config
            if module.processor is not processor or places[0] is not self.backend or places[1] is not self:
                given = f"{type(module.processor).__name__} in {type(module).__name__}"
                raise ModelError(SUBJECT, "the attention processors that the model was enabled with", given, fix)
        for name, modules in self.modules.items():
            found = modules_named(model, name)
            if [id(module) for module in found] != [id(module) for module in modules]:
                raise ModelError(SUBJECT, "the modules that the model was enabled with", f"another {name}", fix)
        if getattr(model, "is_cache_enabled", False):
            given, fix = "enable_cache: ranks may differ in what they skip", "call disable_cache()"
            raise ModelError(SUBJECT, "a model that computes all layers", given, fix)
        if model.training and self.dropouts:
            given, fix = f"{self.dropouts[0]} in training", "set the model's dropout to 0, or call eval()"
            raise KernelError(SUBJECT, "a model without dropout: results are exact", given, fix)

    def _cut_inputs(
        self, cuts: list[Cut], names: list[str], module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of a module with this rank's tokens."""
        given, changed = list(args), dict(kwargs)
        places: dict[str, Any] = {name: (given, index) for index, name in enumerate(names[: len(given)])}
        places |= {name: (changed, name) for name in changed}
        for cut in cuts:
            where, place = places.get(str(cut.name), ((None,), 0))
            if where[place] is not None:
                own = [where[place].shape[1] for where, place in (places[name] for name in cut.joins)]
                where[place] = self._cut(where[place], cut, own)
        return tuple(given), changed

    def _cut_outputs(self, cuts: list[Cut], module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """Return the outputs of a module with this rank's tokens."""
        parts = [output] if isinstance(output, Tensor) else list(output)
        for cut in cuts:
            parts[int(cut.name)] = self._cut(parts[int(cut.name)], cut)
        return parts[0] if isinstance(output, Tensor) else tuple(parts)

    def _cut(self, x: Tensor, cut: Cut, own: Sequence[int] = ()) -> Tensor:
        """Return this rank's tokens of a tensor. `own` counts this rank's tokens of the streams that lie in it."""
        alike = not cut.is_stream and x.ndim > cut.dim and x.shape[cut.dim] == 1
        if alike or (cut.ndim is not None and x.ndim < cut.ndim):
            return x  # one value for all tokens
        if cut.ndim is not None and x.ndim > cut.ndim:
            fix = f"leave out the first {x.ndim - cut.ndim}"
            raise ShapeError(f"{SUBJECT} {cut.name}", f"{cut.ndim} dims", f"{x.ndim} dims", fix)
        if cut.is_stream:
            self.tokens.add_stream(str(cut.name), x.shape[cut.dim])
        elif not own:
            self.tokens.others[str(cut.name)] = x.shape[cut.dim]
        return self.tokens.cut_joined(x, cut.dim, own) if own else self.tokens.cut(x, cut.dim)

    def _gather(self, dims: tuple[int | None, ...], module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """Return the whole outputs of a module."""
        parts = [output] if isinstance(output, Tensor) else list(output)
        parts = [x if dim is None else self.tokens.gather(x, dim) for x, dim in zip(parts, dims, strict=True)]
        return parts[0] if isinstance(output, Tensor) else tuple(parts)


def split_attention(model: nn.Module, plan: TokenPlan) -> dict[str, Any]:
    """Return the attention modules whose tokens are split, by name."""
    kinds = (Attention, MochiAttention, AttentionModuleMixin)
    return {name: m for name, m in model.named_modules() if isinstance(m, kinds) and not plan.is_whole(name)}


def _drops(module: nn.Module) -> bool:
    return isinstance(module, nn.modules.dropout._DropoutNd)


def _short(named: Mapping[str, str]) -> dict[str, str]:
    """Return the arguments by name: those of keywords without brackets."""
    return {name.replace("[0]", "args", 1).removeprefix("[1]").strip("[]'"): text for name, text in named.items()}
