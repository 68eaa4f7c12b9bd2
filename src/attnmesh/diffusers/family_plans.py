"""Plans: which tensors of a transformer are split over the ranks, and which output is gathered.

A plan is the model's own `_cp_plan`, or one of `OWN_PLANS`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, TypeVar

from torch import nn

from attnmesh.diffusers.diffusers_names import ContextParallelInput, ContextParallelOutput
from attnmesh.errors import ModelError

STREAM = "hidden_states"
"""Ending of the names of streams: tokens of the image or video, and of text that attends beside them."""

Entry = TypeVar("Entry")


@dataclass(frozen=True)
class TokenSplit:
    """A tensor that is split along `dim`.

    Args:
        name: The name of an argument of the module, or the index of an output.
        dim: Dim of the tokens.
        ndim: Dims of the tensor, or None for any. A tensor with fewer dims stays whole, one with more is refused.
        joins: Streams whose tokens lie one after the other in the tensor; () for tokens of one stream.
    """

    name: str | int
    dim: int
    ndim: int | None
    joins: tuple[str, ...] = ()

    @property
    def is_output(self) -> bool:
        """True for an output of the module."""
        return isinstance(self.name, int)

    @property
    def is_stream(self) -> bool:
        """True for a stream, False for a tensor that belongs to one."""
        return isinstance(self.name, str) and self.name.endswith(STREAM)


@dataclass(frozen=True)
class TokenPlan:
    """Places in a model where tokens are split and gathered.

    Args:
        splits: For names of modules, with * for any index, the tensors that are split.
        gathers: For names of modules, the dim of the tokens of each output that is gathered; None for others.
        unsplit: Patterns of the names of attention modules that see whole keys, as they do without a mesh.
    """

    splits: dict[str, tuple[TokenSplit, ...]]
    gathers: dict[str, tuple[int | None, ...]]
    unsplit: tuple[str, ...] = ()

    @property
    def streams(self) -> set[str]:
        """Names of all streams."""
        return {str(split.name) for splits in self.splits.values() for split in splits if split.is_stream}

    def is_split(self, name: str) -> bool:
        """Return False if the attention module of this name sees whole keys."""
        return not any(fnmatchcase(name, pattern) for pattern in self.unsplit)


def _rope(dim: int, ndim: int) -> tuple[TokenSplit, ...]:
    """Return the splits of cosines and sines."""
    return tuple(TokenSplit(index, dim, ndim) for index in (0, 1))


_IMAGE, _TEXT = TokenSplit(STREAM, 1, 3), TokenSplit(f"encoder_{STREAM}", 1, 3)
_OUTPUT: dict[str, tuple[int | None, ...]] = {"proj_out": (1,)}
_JOINT_MASK = (TokenSplit("attention_mask", 3, 4, (STREAM, f"encoder_{STREAM}")),)

OWN_PLANS = {
    # diffusers splits the text, too, and its padding with it
    "LTXVideoTransformer3DModel": TokenPlan(
        {"": (_IMAGE, TokenSplit("timestep", 1, 2)), "rope": _rope(1, 3)}, _OUTPUT, ("*.attn2",)
    ),
    # diffusers has no plan for these
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
            "transformer_blocks.*": (TokenSplit("attention_mask", 1, 2),),
        },
        _OUTPUT,
        ("context_embedder.*",),
    ),
}
"""Plans of attnmesh. Text that is attended by cross-attention alone stays whole."""

UNSPLIT = {
    "WanTransformer3DModel": ("*.attn2",),
    "ChronoEditTransformer3DModel": ("*.attn2",),
    "MiniMaxH3Transformer3DModel": ("token_refiner.*",),
}
"""Attention modules that see whole keys, of models with a plan of diffusers."""

REFUSED_MODELS = {
    "HeliosTransformer3DModel": "a plan that gathers the tokens again in each block",
    "LTX2VideoTransformer3DModel": "a plan that leaves the tokens of the sound whole",
}
"""Models whose plan cannot be followed."""


WITH_PLAN = "pass a transformer with a _cp_plan, as WanTransformer3DModel"


def plan_of(model: nn.Module) -> TokenPlan:
    """Return the plan of a model. Raise if it has none, or one that cannot be followed."""
    name = type(model).__name__
    subject = "diffusers.enable model"
    fix = f"{WITH_PLAN}, or one of {', '.join(OWN_PLANS)}"
    reason = _entry(REFUSED_MODELS, model)
    if reason is not None:
        raise ModelError(subject, "a plan to split its tokens once", f"{name} with {reason}", fix)
    if getattr(getattr(model, "config", None), "image_condition_type", None) == "token_replace":
        given = f"{name} that replaces the first frame's tokens (image_condition_type='token_replace')"
        raise ModelError(subject, "a model that treats all tokens alike", given, "use a model of 'latent_concat'")
    plan = _entry(OWN_PLANS, model)
    if plan is None:
        cp_plan: Any = getattr(model, "_cp_plan", None)
        if not (isinstance(cp_plan, dict) and cp_plan):
            raise ModelError(subject, "a transformer with a plan to split its tokens", name, fix)
        plan = _converted(cp_plan, _entry(UNSPLIT, model) or ())
    for pattern in (*plan.splits, *plan.gathers):
        try:
            modules_named(model, pattern)
        except AttributeError:
            expected, given = "a plan of modules that the model has", f"{name} without {pattern}"
            fix = "mend the model's _cp_plan: each name is a module, with at most one *"
            raise ModelError(subject, expected, given, fix) from None
    return plan


def _entry(table: Mapping[str, Entry], model: nn.Module) -> Entry | None:
    """Return a table's entry for the class of a model, or for the class that FSDP has derived it from."""
    return next((table[kind.__name__] for kind in type(model).__mro__ if kind.__name__ in table), None)


def _converted(plan: dict[str, Any], unsplit: tuple[str, ...]) -> TokenPlan:
    """Return a plan of diffusers in the form of attnmesh."""
    splits: dict[str, tuple[TokenSplit, ...]] = {}
    gathers: dict[str, tuple[int | None, ...]] = {}
    for module, entry in plan.items():
        if isinstance(entry, dict):
            splits[module] = tuple(_token_split(name, cp_input) for name, cp_input in entry.items())
        else:
            outputs = [entry] if isinstance(entry, ContextParallelOutput) else entry
            gathers[module] = tuple(None if output is None else output.gather_dim for output in outputs)
    return TokenPlan(splits, gathers, unsplit)


def _token_split(name: str | int, cp_input: Any) -> TokenSplit:
    if not isinstance(cp_input, ContextParallelInput) or cp_input.split_output != isinstance(name, int):
        expected, fix = "a _cp_plan of single tensors", "name one tensor for each argument, or output, that is split"
        raise ModelError("diffusers.enable model", expected, f"{name}: {cp_input}", fix)
    return TokenSplit(name, cp_input.split_dim, cp_input.expected_dims)


def modules_named(model: nn.Module, pattern: str) -> list[nn.Module]:
    """Return the modules of a name in a plan, in which * stands for each index of a list."""
    prefix, star, suffix = pattern.partition("*")
    if not star:
        return [model.get_submodule(pattern)]
    parts = model.get_submodule(prefix.rstrip("."))
    return [part.get_submodule(suffix.lstrip(".")) for part in parts.children()]
