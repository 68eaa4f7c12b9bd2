"""Argument checks: one spelling of each, for every public function."""

import warnings
from collections.abc import Mapping
from numbers import Real

import torch
from torch import Tensor
from torch.autograd.forward_ad import unpack_dual

from attnmesh import errors
from attnmesh.errors import ArgumentError

DTYPES = ("float64", "float32", "bfloat16", "float16")


SHAPE = "(batch, heads, length, dim)"


SWAPPED = "if these are (batch, length, heads, dim), pass x.transpose(1, 2)"


MOST_HEADS = 256
"""More query heads than released models have: Falcon-180B has 232, Llama 3.1 405B and DeepSeek-V3 have 128."""


FEW_TOKENS = 128
"""A number that may well be one of heads."""


ELSEWHERE = {
    "dropout": "leave it out, and drop elsewhere in the layer",
    "softcap": "use a model without soft-capped logits",
    "score": "bring what is added to logits into q and k, or use a mask of positions",
    "bias": "bring what is added to logits into q and k, or use a mask of positions",
    "alibi": "bring what is added to logits into q and k, or use a mask of positions",
    "attn_mask": "pass mask=, a function of positions: Causal(), Window(left), Documents(lengths)",
    "block_mask": "pass mask=, a function of positions: Causal(), Window(left), Documents(lengths)",
    "is_causal": "pass mask=Causal() or mask=Full()",
    "enable_gqa": "leave it out: heads are grouped by their numbers",
}
"""What other attentions take and this one does not, by a part of the argument's name, and what to do instead."""


def check_qkv(subject: str, q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raise unless q, k and v are one attention problem; heads may be grouped, values may have another width."""
    named = {"q": q, "k": k, "v": v}
    check_same_kind(subject, named)
    for name, x in named.items():
        if x.ndim != 4:
            fix = "add or split the missing dims; the heads come before the length"
            raise errors.ShapeError(f"{subject} {name}", f"4 dims {SHAPE}", f"shape {tuple(x.shape)}", fix)
    _check_shapes(subject, q, k, v)


_warned: set[str] = set()


def warn_once(message: str) -> None:
    """Warn once a process, at the caller of the public function that calls the function that calls this one."""
    if message not in _warned:
        warnings.warn(message, UserWarning, stacklevel=4)
        _warned.add(message)  # afterwards: where warnings are errors, each call is one


def dims(x: object) -> tuple[int, int]:
    """Heads and length of a tensor as it is given; none of either if it has not 4 dims."""
    return (x.shape[1], x.shape[2]) if isinstance(x, Tensor) and x.ndim == 4 else (0, 0)


def hinted(error: errors.InputError, q: tuple[int, int], k: tuple[int, int]) -> errors.InputError:
    """The error, with a hint in its fix where the dims seem to be in flash-attn's order.

    Each of q and k is its heads and length, as given. The hint is for more key heads than keys, where the heads would
    also fit the other way round.
    """
    keys = k[1]
    if not 0 < keys < k[0] or q[1] % keys:
        return error
    subject, expected, given, fix = error.args
    return type(error)(subject, expected, given, f"{fix}; {SWAPPED}")


def swap_hint(fits: bool) -> str:
    """The same hint, to be added to a fix, where the dims fit the other way round."""
    return f"; {SWAPPED}" if fits else ""


def warn_if_swapped(subject: str, q: Tensor, key_heads: int) -> None:
    """Warn once where a call without an error has its dims very likely in flash-attn's order.

    It has more heads than any model, and its few queries would be heads that fit `key_heads`, also read so. A decode
    step of 1 to 16 queries and 128 heads is none of these. Only a batch that was folded into the heads looks the same.
    """
    if torch.compiler.is_compiling():
        return
    heads, length = dims(q)
    if heads > MOST_HEADS and 0 < length <= FEW_TOKENS and key_heads > 0 and length % key_heads == 0:
        given = f"q has more than {MOST_HEADS} heads and at most {FEW_TOKENS} tokens in dims {SHAPE}"
        warn_once(f"{subject}: {given}; {SWAPPED}.")


def check_no_more(subject: str, more: Mapping[str, object]) -> None:
    """Refuse by name what other attentions take, and what nobody takes."""
    for name in more:
        plain = name.replace("soft_cap", "softcap")
        fix = next((fix for part, fix in ELSEWHERE.items() if part in plain), None)
        if fix is None:
            raise errors.ArgumentError(subject, "the arguments of its signature", f"{name}=", f"see help({subject})")
        raise errors.KernelError(subject, "exact softmax attention under a mask of positions", f"{name}=", fix)


def autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Return the tensors as autocast casts those of PyTorch's own attention, where it is enabled."""
    if not autocasts(*tensors):
        return tensors
    dtype = torch.get_autocast_dtype(tensors[0].device.type)
    return tuple(x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x for x in tensors)


def autocasts(*tensors: Tensor) -> bool:
    """Return whether autocast is enabled where these tensors are."""
    if not all(isinstance(x, Tensor) and torch.amp.is_autocast_available(x.device.type) for x in tensors):
        return False
    return torch.is_autocast_enabled(tensors[0].device.type)


def check_same_kind(subject: str, named: dict[str, Tensor]) -> None:
    """Raise unless these are dense tensors of one supported dtype on one device."""
    for name, x in named.items():
        check_tensor(f"{subject} {name}", x)
    dtypes = {name: str(x.dtype).removeprefix("torch.") for name, x in named.items()}
    if len(set(dtypes.values())) > 1 or not set(dtypes.values()) <= set(DTYPES):
        fix = "cast them with .to(dtype)"
        raise errors.DtypeError(subject, f"one dtype of {', '.join(DTYPES)}", _listed(dtypes), fix)
    check_one_device(subject, named)


def check_tensor(subject: str, x: Tensor) -> None:
    """Raise unless it is a dense tensor of floats, and one that only reverse-mode gradients are asked of."""
    if not isinstance(x, Tensor):
        raise errors.DtypeError(subject, "a tensor of floats", type(x).__name__, "use torch.as_tensor")
    if x.layout != torch.strided:
        raise errors.DtypeError(subject, "a dense tensor", str(x.layout), "call .to_dense()")
    # No operator here has a rule for forward mode, and PyTorch would take a missing one for a tangent of zero.
    if not torch.compiler.is_compiling() and unpack_dual(x).tangent is not None:
        fix = "use reverse-mode gradients: torch.autograd.grad or backward"
        raise errors.KernelError(subject, "a tensor without a forward-mode tangent", "a dual number", fix)


def check_one_device(subject: str, named: dict[str, Tensor]) -> None:
    """Raise unless the tensors are on one device."""
    devices = {name: str(x.device) for name, x in named.items()}
    if len(set(devices.values())) > 1:
        raise errors.DeviceError(subject, "one device", _listed(devices), "move them with .to(device)")


def check_scale(subject: str, scale: float | None, q: Tensor) -> float:
    """The scale to use: 1/sqrt(dim) unless given. Kernels take it in float32, so its size has to fit there."""
    if scale is None:
        return float(q.shape[-1] ** -0.5)
    if isinstance(scale, bool) or not isinstance(scale, Real) or not (scale == 0 or 1e-30 <= abs(scale) <= 1e30):
        given = f"{scale!r} of type {type(scale).__name__}"
        raise errors.DtypeError(
            f"{subject} scale", "None, 0 or a number of size 1e-30 to 1e30", given, "pass a Python float"
        )
    return float(scale)


def check_sinks(subject: str, sinks: Tensor | None, q: Tensor) -> None:
    """Raise unless there are none, or one learned logit a query head."""
    if sinks is None:
        return
    check_tensor(subject, sinks)
    fix = "give each query head one logit"
    if not sinks.is_floating_point():
        raise errors.DtypeError(subject, "a tensor of floats", str(sinks.dtype), fix)
    if tuple(sinks.shape) != (q.shape[1],):
        raise errors.ShapeError(subject, f"shape ({q.shape[1]},)", f"shape {tuple(sinks.shape)}", fix)
    check_one_device(subject, {"sinks": sinks, "q": q})


def _check_shapes(subject: str, q: Tensor, k: Tensor, v: Tensor) -> None:
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"

    def require(true: bool, expected: str, fix: str) -> None:
        if not true:
            raise errors.ShapeError(subject, expected, shapes, fix)

    require(q.shape[0] == k.shape[0] == v.shape[0], "one batch size", "expand the smaller batch")
    require(k.shape[1:3] == v.shape[1:3], "k and v with the same heads and length", "pair each key with its value")
    require(q.shape[3] == k.shape[3], "q and k of one width", "project q and k to the same dim")
    require(q.shape[3] > 0 and v.shape[3] > 0, "widths of at least 1", "give q, k and v at least one dim")
    require(q.shape[1] > 0 and k.shape[1] > 0, "at least one head", "give q, k and v at least one head")
    divides = k.shape[1] > 0 and q.shape[1] % k.shape[1] == 0
    require(divides, "query heads a multiple of key heads", "group the query heads evenly over the key heads")


def _listed(values: dict[str, str]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items())


def check_checked(subject: str, checked: object) -> None:
    """Raise unless it says whether ranks are to ask each other if they were called alike."""
    if checked is not None and not isinstance(checked, bool):
        given, fix = repr(checked), "leave it out, or say True to have every call checked"
        raise ArgumentError(f"{subject} checked", "None, True or False", given, fix)
