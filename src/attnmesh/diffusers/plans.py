"""Plans: which tensors of a transformer are split over the ranks, and which output is gathered.

A plan is the model's own `_cp_plan`, or one of `OWN`: diffusers has none for these models, or splits
more than it has to.
"""

from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from diffusers.models._modeling_parallel import ContextParallelInput, ContextParallelOutput
from torch import nn

from attnmesh.errors import ModelError

STREAM = "hidden_states"
"""Ending of the names of arguments whose tokens attend: the image or video, and text that is joined with it."""


@dataclass(frozen=True)
class Cut:
    """A tensor that is split along `dim`, if it has `ndim` dims.

    Args:
        name: An argument of the module; the index of an output if it is a number.
        dim: Dim of the tokens.
        ndim: Dims of the tensor; None for any.
        joins: Streams whose tokens lie one after the other in the tensor; () for tokens of one stream.
    """

    name: str | int
    dim: int
    ndim: int | None
    joins: tuple[str, ...] = ()

    @property
    def is_stream(self) -> bool:
        """Whether the tokens of the tensor attend."""
        return isinstance(self.name, str) and self.name.endswith(STREAM)


@dataclass(frozen=True)
class TokenPlan:
    """Where tokens are split and gathered.

    Args:
        cuts: For names of modules, with * for any index, the tensors that are split.
        gathers: For names of modules, the dim of the tokens of each output that is gathered; None for others.
        whole: Patterns of the names of attention modules that run on whole keys, as they do without a mesh.
    """

    cuts: dict[str, tuple[Cut, ...]]
    gathers: dict[str, tuple[int | None, ...]]
    whole: tuple[str, ...] = ()

    def is_whole(self, name: str) -> bool:
        """Return whether the attention module of this name runs on whole keys."""
        return any(fnmatchcase(name, pattern) for pattern in self.whole)


def _rope(dim: int, ndim: int) -> tuple[Cut, ...]:
    """Return the cuts of cosines and sines."""
    return tuple(Cut(index, dim, ndim) for index in (0, 1))


_IMAGE, _TEXT = Cut(STREAM, 1, 3), Cut(f"encoder_{STREAM}", 1, 3)
_OUTPUT: dict[str, tuple[int | None, ...]] = {"proj_out": (1,)}
_JOINT_MASK = (Cut("attention_mask", 3, 4, (STREAM, f"encoder_{STREAM}")),)

OWN = {
    "LTXVideoTransformer3DModel": TokenPlan(
        {"": (_IMAGE, Cut("timestep", 1, 2)), "rope": _rope(1, 3)}, _OUTPUT, ("*.attn2",)
    ),
    "HunyuanVideoTransformer3DModel": TokenPlan(
        {
            "rope": _rope(0, 2),
            "transformer_blocks.0": (_IMAGE, _TEXT),
            "transformer_blocks.*": _JOINT_MASK,
            "single_transformer_blocks.*": _JOINT_MASK,
        },
        _OUTPUT,
        ("context_embedder.*",),
    ),
    "HunyuanVideo15Transformer3DModel": TokenPlan(
        {
            "rope": _rope(0, 2),
            "transformer_blocks.0": (_IMAGE, _TEXT),
            "transformer_blocks.*": (Cut("attention_mask", 1, 2),),
        },
        _OUTPUT,
        ("context_embedder.*",),
    ),
}
"""Plans of attnmesh. Text that is attended by cross-attention alone stays whole."""

WHOLE = {
    "WanTransformer3DModel": ("*.attn2",),
    "ChronoEditTransformer3DModel": ("*.attn2",),
    "MiniMaxH3Transformer3DModel": ("token_refiner.*",),
}
"""Attention modules on whole keys, of models with a plan of diffusers."""

REFUSED = {
    "HeliosTransformer3DModel": "a plan that gathers the tokens again in each block",
    "LTX2VideoTransformer3DModel": "a plan that leaves the tokens of the sound whole",
}
"""Models whose plan cannot be followed."""


def plan_of(model: nn.Module) -> TokenPlan:
    """Return the plan of a model. Raise if it has none, or one that cannot be followed."""
    name = type(model).__name__
    fix = f"pass a transformer with a _cp_plan, as WanTransformer3DModel, or one of {', '.join(OWN)}"
    if name in REFUSED:
        raise ModelError(
            "diffusers.enable model", "a plan to split its tokens once", f"{name} with {REFUSED[name]}", fix
        )
    if getattr(getattr(model, "config", None), "image_condition_type", None) == "token_replace":
        given = f"{name} that replaces the first frame's tokens (image_condition_type='token_replace')"
        raise ModelError("diffusers.enable model", "a model that treats all tokens alike", given, "use 'latent_concat'")
    if name in OWN:
        return OWN[name]
    found = getattr(model, "_cp_plan", None)
    if not isinstance(found, dict) or not found:
        raise ModelError("diffusers.enable model", "a transformer with a plan to split its tokens", name, fix)
    return _converted(found, WHOLE.get(name, ()))


def _converted(plan: dict[str, Any], whole: tuple[str, ...]) -> TokenPlan:
    """Return a plan of diffusers in the form of attnmesh."""
    cuts: dict[str, tuple[Cut, ...]] = {}
    gathers: dict[str, tuple[int | None, ...]] = {}
    for module, entry in plan.items():
        if isinstance(entry, dict):
            cuts[module] = tuple(_cut(name, given) for name, given in entry.items())
        else:
            outputs = [entry] if isinstance(entry, ContextParallelOutput) else entry
            gathers[module] = tuple(None if output is None else output.gather_dim for output in outputs)
    return TokenPlan(cuts, gathers, whole)


def _cut(name: str | int, given: Any) -> Cut:
    if not isinstance(given, ContextParallelInput) or given.split_output != isinstance(name, int):
        fix = "name one tensor for each argument, or output, that is split"
        raise ModelError("diffusers.enable model", "a _cp_plan of single tensors", f"{name}: {given}", fix)
    return Cut(name, given.split_dim, given.expected_dims)


def modules_named(model: nn.Module, pattern: str) -> list[nn.Module]:
    """Return the modules of a name in a plan, in which * stands for each index of a list."""
    before, star, after = pattern.partition("*")
    if not star:
        return [model.get_submodule(pattern)]
    parts = model.get_submodule(before.rstrip("."))
    return [part.get_submodule(after.lstrip(".")) for part in parts.children()]
