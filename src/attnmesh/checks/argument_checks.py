"""Checks of arguments, shared by all public functions. Each raises an error of `attnmesh.errors`."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.autograd.forward_ad import unpack_dual

from attnmesh.core.mask import Mask
from attnmesh.core.partial import DTYPE_NAMES
from attnmesh.core.scaling import Scaling
from attnmesh.core.selection import Selection
from attnmesh.errors import (
    ArgumentError,
    DeviceError,
    DtypeError,
    InputError,
    KernelError,
    ShapeError,
    short,
    warn_once,
)
from attnmesh.runtime.tensors import is_dtensor

SHAPE = "(batch, heads, length, dim)"

TRANSPOSE_HINT = "if these are (batch, length, heads, dim), pass x.transpose(1, 2)"

MAX_HEADS = 256
"""More query heads than released models have: Falcon-180B has 232, Llama 3.1 405B and DeepSeek-V3 have 128."""

MAX_TRANSPOSED_LENGTH = 128
"""The longest q that may be transposed: beyond it, a length is too large to be a number of heads."""

WRAP = "pass am.Selection(indices), indices of dtype torch.int32"

_SCORE_FIX = "bring what is added to logits into q and k, or use a mask of positions"
_MASK_FIX = "pass mask=, a function of positions: Causal(), Window(left), Causal() & Documents(lengths)"

UNSUPPORTED_OPTIONS = {
    "dropout": "leave it out, and drop elsewhere in the layer",
    "softcap": "pass softcap=",
    "score": _SCORE_FIX,
    "bias": f"pass distance_bias= for a bias by distance, or {_SCORE_FIX}",
    "alibi": _SCORE_FIX,
    "attn_mask": _MASK_FIX,
    "block_mask": _MASK_FIX,
    "causal": "let mask= say it: am.Causal(), as attention without mask=, or am.Full()",
    "window": "pass mask=am.Window(left), or am.Window(left, right)",
    "enable_gqa": "leave it out: heads are grouped by their numbers",
}
"""Fixes for options of other attention functions, by a part of the option's name."""


def check_qkv(
    subject: str, q: Tensor, k: Tensor, v: Tensor, check_each: Callable[[str, Tensor], None] | None = None
) -> None:
    """Raise unless q, k and v fit together. Heads may be grouped, and v may have another width."""
    tensors = {"q": q, "k": k, "v": v}
    check_same_kind(subject, tensors, check_each)
    for name, x in tensors.items():
        if x.ndim != 4:
            fix = "add or split the missing dims; the heads come before the length"
            raise ShapeError(f"{subject} {name}", f"4 dims {SHAPE}", f"shape {tuple(x.shape)}", fix)
    heads, kv_heads = q.shape[1], k.shape[1]
    for fits, expected, fix in (
        (q.shape[0] == k.shape[0] == v.shape[0], "one batch size", "expand the smaller batch"),
        (k.shape[1:3] == v.shape[1:3], "k and v with the same heads and length", "pair each key with its value"),
        (q.shape[3] == k.shape[3], "q and k of one width", "project q and k to the same dim"),
        (q.shape[3] > 0 and v.shape[3] > 0, "widths of at least 1", "give q, k and v at least one dim"),
        (heads > 0 and kv_heads > 0, "at least one head", "give q, k and v at least one head"),
        (
            kv_heads > 0 and heads % kv_heads == 0,
            "query heads a multiple of key heads",
            "group the query heads evenly over the key heads",
        ),
    ):
        if not fits:
            shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
            raise ShapeError(subject, expected, shapes, fix)


def check_same_kind(
    subject: str, tensors: Mapping[str, Tensor], check_each: Callable[[str, Tensor], None] | None = None
) -> None:
    """Raise unless the tensors are of one supported dtype and on one device, and each passes `check_tensor`.

    A function that is made of operators of PyTorch alone passes `check_dense` as `check_each`.
    """
    check_each = check_each or check_tensor
    for name, x in tensors.items():
        check_each(f"{subject} {name}", x)
    dtypes = {name: str(x.dtype).removeprefix("torch.") for name, x in tensors.items()}
    if len(set(dtypes.values())) > 1 or not set(dtypes.values()) <= set(DTYPE_NAMES):
        given = ", ".join(f"{name} {dtype}" for name, dtype in dtypes.items())
        raise DtypeError(subject, f"one dtype of {', '.join(DTYPE_NAMES)}", given, "cast them with .to(dtype)")
    check_one_device(subject, tensors)


def check_dense(subject: str, x: Tensor) -> None:
    """Raise unless x is a dense tensor, whose memory holds its numbers."""
    if not isinstance(x, Tensor):
        raise DtypeError(subject, "a tensor of floats", type(x).__name__, "use torch.as_tensor on numbers")
    if x.is_nested:
        fix = "call .to_padded_tensor(0.0), and hide the padding, as by key_lengths="
        raise DtypeError(subject, "a dense tensor", "a nested tensor", fix)
    if x.layout != torch.strided:
        raise DtypeError(subject, "a dense tensor", str(x.layout), "call .to_dense()")
    if not torch.compiler.is_compiling() and x.is_neg():  # kernels would read its numbers with the other sign
        raise DtypeError(subject, "a tensor whose memory holds its numbers", "a lazy -x", "call .resolve_neg()")


def check_tensor(subject: str, x: Tensor) -> None:
    """Raise unless x is a dense tensor of this rank, whose gradients, if there are any, are those of autograd."""
    check_dense(subject, x)
    if is_dtensor(x):
        fix = "pass x.to_local(), this rank's part, or x.full_tensor()"
        raise DtypeError(subject, "a plain tensor", "a DTensor", fix)
    if torch.compiler.is_compiling():
        return
    _check_unmapped(subject, x)
    # The operators have no forward-mode rule, and PyTorch would take a missing rule for a tangent of zero.
    if unpack_dual(x).tangent is not None:
        fix = "leave the tangent out; functions with gradients have those of torch.autograd.grad or backward"
        raise KernelError(subject, "a tensor without a forward-mode tangent", "a dual number", fix)
    if _is_wrapped(x, torch._C._functorch.is_gradtrackingtensor):
        fix = "call it outside; functions with gradients have those of torch.autograd.grad or backward"
        raise KernelError(subject, "a tensor outside of torch.func.grad and vjp", "one inside", fix)


def _check_unmapped(subject: str, x: Tensor) -> None:
    """Raise for a tensor whose first dim torch.vmap hides. One rank alone may be under it."""
    if not torch.compiler.is_compiling() and _is_wrapped(x, torch._C._functorch.is_batchedtensor):
        fix = "call it outside, with the mapped dim in the batch: x.flatten(0, 1)"
        raise KernelError(subject, "a tensor outside of torch.vmap", "one inside", fix)


def _is_wrapped(x: Tensor, is_wrapper: Callable[[Tensor], bool]) -> bool:
    """Return True if a transform of torch.func has wrapped x so: transforms wrap a tensor, one in another."""
    while torch._C._functorch.is_functorch_wrapped_tensor(x):
        if is_wrapper(x):
            return True
        x = torch._C._functorch.get_unwrapped(x)
    return False


def check_readable(subject: str, x: Tensor, fix: str) -> None:
    """Raise unless the CPU can read the numbers of x."""
    if is_dtensor(x):
        raise DtypeError(subject, "a plain tensor", "a DTensor", fix)
    if x.layout != torch.strided or x.is_nested:
        raise DtypeError(subject, "a dense tensor", "a nested or sparse tensor", fix)
    if x.is_meta:
        raise DeviceError(subject, "a tensor with values", "one on the meta device", fix)
    _check_unmapped(subject, x)


def check_one_device(subject: str, tensors: Mapping[str, Tensor]) -> None:
    """Raise unless the tensors are on one device."""
    if len({str(x.device) for x in tensors.values()}) > 1:
        given = ", ".join(f"{name} {x.device}" for name, x in tensors.items())
        raise DeviceError(subject, "one device", given, "move them with .to(device)")


def check_sinks(subject: str, sinks: Tensor | None, q: Tensor) -> None:
    """Raise unless sinks is None or has one logit per query head."""
    if sinks is None:
        return
    check_tensor(subject, sinks)
    fix = "give each query head one logit"
    if not sinks.is_floating_point():
        raise DtypeError(subject, "a tensor of floats", str(sinks.dtype), fix)
    if tuple(sinks.shape) != (q.shape[1],):
        raise ShapeError(subject, f"shape ({q.shape[1]},)", f"shape {tuple(sinks.shape)}", fix)
    check_one_device(subject, {"sinks": sinks, "q": q})


def check_positions(subject: str, positions: Tensor, length: int) -> None:
    """Raise unless positions is an int64 tensor with one position per token."""
    fix = "pass layout.positions(length, shards, index), or torch.tensor([...])"
    if not isinstance(positions, Tensor) or positions.dtype != torch.int64:
        given = str(positions.dtype) if isinstance(positions, Tensor) else type(positions).__name__
        raise DtypeError(subject, "a tensor of torch.int64", given, fix)
    check_readable(subject, positions, fix)
    if tuple(positions.shape) != (length,):
        raise ShapeError(subject, f"shape ({length},), one position a token", f"shape {tuple(positions.shape)}", fix)


def check_key_lengths(subject: str, key_lengths: Tensor | None, batch: int, *, may_read: bool = True) -> None:
    """Raise unless key_lengths is None or counts keys: a dense int64 tensor with a number of 0 or more per sequence.

    Without `may_read` no number is read: the CPU would wait for the device.
    """
    if key_lengths is None:
        return
    fix = "pass torch.tensor([...]), the number of real keys of each sequence"
    if not isinstance(key_lengths, Tensor) or key_lengths.dtype != torch.int64:
        given = str(key_lengths.dtype) if isinstance(key_lengths, Tensor) else type(key_lengths).__name__
        raise DtypeError(subject, "a tensor of torch.int64", given, fix)
    check_readable(subject, key_lengths, fix)
    if tuple(key_lengths.shape) != (batch,):
        raise ShapeError(subject, f"shape ({batch},), one number a sequence", f"shape {tuple(key_lengths.shape)}", fix)
    reads = batch and may_read and not torch.compiler.is_compiling()
    if reads and int(key_lengths.min()) < 0:
        raise ShapeError(subject, "numbers of 0 or more", str(int(key_lengths.min())), fix)


def check_lengths_within(subject: str, key_lengths: Tensor | None, keys: int) -> None:
    """Raise if a sequence has more real keys than there are keys."""
    if key_lengths is not None and len(key_lengths) and not torch.compiler.is_compiling():
        longest = int(key_lengths.max())
        if longest > keys:
            raise ShapeError(subject, f"at most {keys}, the number of keys", str(longest), "count real keys")


def check_selection(
    subject: str, selected: Selection | None, q: Tensor, kv_heads: int, kernel: str, keys: int | None = None
) -> None:
    """Raise unless selected is None or fits q and the key heads.

    On a CPU rows are read: no index is below 0, twice in a row, or beyond the last of `keys`, if their number is given.
    On other devices, and in a graph, no row is read: the output of a faulty one becomes NaN.
    """
    if selected is None:
        return
    if not isinstance(selected, Selection):
        raise DtypeError(subject, "a Selection", type(selected).__name__, WRAP)
    x = selected.indices
    plain = isinstance(x, Tensor) and not is_dtensor(x) and x.layout == torch.strided and not x.is_nested
    if not plain or x.dtype != torch.int32:
        given = str(x.dtype) if plain else type(x).__name__
        raise DtypeError(f"{subject} indices", "a tensor of torch.int32", given, WRAP)
    _check_unmapped(f"{subject} indices", x)
    batch = len(q)
    queries = q.shape[2]
    if x.ndim != 4:
        fix = "add the missing dims: (batch, key heads, queries, selected)"
    elif (x.shape[0], x.shape[2]) != (batch, queries):
        fix = "select keys for each of q's queries"
    elif x.shape[1] not in (1, kv_heads):
        fix = "pass one row a key head, or one for all"
    else:
        fix = "" if x.shape[3] else "select at least one key for each query, 2**31 - 1 for none"
    if fix:
        expected = f"shape ({batch}, 1 or {kv_heads}, {queries}, 1 or more)"
        raise ShapeError(f"{subject} indices", expected, f"shape {tuple(x.shape)}", fix)
    check_one_device(subject, {"indices": x, "q": q})
    if kernel not in ("auto", "reference"):
        fix = 'leave it at "auto": selected keys have a kernel of their own'
        raise KernelError(f"{subject} with kernel", "auto or reference", kernel, fix)
    if x.is_cpu and not torch.compiler.is_compiling() and bool((faulty := selected.faulty(keys)).any()):
        lowest = int(x[faulty].min())
        highest = selected.highest()
        fix = "fill rows up with 2**31 - 1, for none"
        beyond = keys is not None and highest * selected.block >= keys
        given = str(lowest) if lowest < 0 else str(highest) if beyond else "an index twice in a row"
        expected = "indices of 0 or more, each once in a row" + f", of {keys} keys" * beyond
        raise ShapeError(f"{subject} indices", expected, given, fix)


def check_distance_bias(
    subject: str, bias: Tensor | None, q: Tensor, scaling: Scaling, kernel: str, selected: Selection | None = None
) -> None:
    """Raise unless bias is None or has a row for each query, and nothing else changes the logits."""
    if bias is None:
        return
    subject = f"{subject} distance_bias"
    check_tensor(subject, bias)
    if not bias.is_floating_point():
        raise DtypeError(subject, "a tensor of floats", str(bias.dtype), "cast it to q's dtype")
    if bias.ndim != 4 or bias.shape[:3] != q.shape[:3] or bias.shape[3] == 0:
        expected, given = f"shape {(*q.shape[:3], 'distances')}", f"{tuple(bias.shape)}"
        fix = "expand a bias of each head: bias[None, :, None].expand(batch, -1, length, -1)"
        raise ShapeError(subject, expected, given, fix)
    check_one_device(subject, {"distance_bias": bias, "q": q})
    for fits, expected, given in (
        (kernel in ("auto", "reference"), 'kernel="auto" or "reference"', f"kernel={kernel!r}"),
        (selected is None, "no selected= beside it", "a Selection"),
        (not scaling.capped, "no softcap= beside it", f"softcap={scaling.softcap}"),
        (scaling.scale > 0, "a positive scale", f"{scaling.scale}"),
    ):
        if not fits:
            raise KernelError(subject, expected, given, "leave one of them out")


def check_dtype(subject: str, dtype: object, fix: str) -> None:
    """Raise unless dtype is None or one of `DTYPE_NAMES`."""
    is_supported = isinstance(dtype, torch.dtype) and str(dtype).removeprefix("torch.") in DTYPE_NAMES
    if dtype is not None and not is_supported:
        raise DtypeError(subject, f"None or one of {', '.join(DTYPE_NAMES)}", repr(dtype), fix)


def check_compare_option(subject: str, checked: object) -> None:
    """Raise unless `checked`, which says whether ranks compare calls, is None, True or False."""
    if checked is not None and not isinstance(checked, bool):
        fix = "leave it out, or pass True to compare every call across ranks"
        raise ArgumentError(f"{subject} checked", "None, True or False", repr(checked), fix)


ELSEWHERE = {"merge": "pass exchange= to attention, merge= to decode", "exchange": "pass merge= to decode"}
"""Fixes for options of one function that are passed to another."""


def check_unknown_options(subject: str, options: Mapping[str, object]) -> None:
    """Raise for any option; the error has a fix for options of other attention functions."""
    for name, value in options.items():
        plain = name.replace("soft_cap", "softcap")
        given = f"{name}={short(value)}"
        fix = next((fix for part, fix in UNSUPPORTED_OPTIONS.items() if part in plain), None)
        if fix is None:
            fix = ELSEWHERE.get(name, f"see help(attnmesh.{subject})")
            raise ArgumentError(subject, "the arguments of its signature", given, fix)
        raise KernelError(subject, "exact softmax attention under a mask of positions", given, fix)


def without_redundant(options: Mapping[str, object], mask: Mask) -> dict[str, object]:
    """Return options of PyTorch's attention without those that say what is done anyway under this mask.

    Heads are grouped by their numbers, whatever `enable_gqa` says.
    """
    redundant: dict[str, tuple[object, ...]] = {
        "is_causal": (isinstance(mask, Mask) and mask.is_causal,),
        "enable_gqa": (True, False),
        "dropout_p": (0, 0.0),
        "attn_mask": (None,),
    }
    plain = (bool, int, float, type(None))  # values that may be compared
    return {name: x for name, x in options.items() if type(x) not in plain or x not in redundant.get(name, ())}


def heads_and_length(x: object) -> tuple[int, int]:
    """Return the heads and length of a tensor, or (0, 0) unless it has 4 dims."""
    return (x.shape[1], x.shape[2]) if isinstance(x, Tensor) and x.ndim == 4 else (0, 0)


def with_transpose_hint(
    error: InputError, q_sizes: tuple[int, int], k_sizes: tuple[int, int], *, hint_first: bool = False
) -> InputError:
    """Return the error, with `TRANSPOSE_HINT` last or first in its fix if q and k seem to be in flash-attn's order.

    Sizes are (heads, length) as passed. They seem transposed if k has more heads than keys, and the number of keys
    would divide q's heads, as passed or transposed, as a number of key heads.
    """
    key_heads, keys = k_sizes
    if not 0 < keys < key_heads or all(size % keys for size in q_sizes):
        return error
    subject, expected, given, fix = error.args
    fix = transpose_hint_first(fix, True) if hint_first else f"{fix}; {TRANSPOSE_HINT}"
    return type(error)(subject, expected, given, fix)


def transpose_hint_first(fix: str, fits: bool) -> str:
    """Return the fix, after `TRANSPOSE_HINT` if the dims fit the other way round."""
    return f"{TRANSPOSE_HINT}; if not, {fix}" if fits else fix


def warn_if_transposed(subject: str, q: Tensor, key_heads: int) -> None:
    """Warn once of dims that are likely in flash-attn's order. The call is valid.

    Read in attnmesh's order, a q in flash-attn's has more heads than any model, and a length that is a multiple of
    `key_heads`. A decode step of 1 to 16 queries and 128 heads does not match. A batch folded into the heads does.
    """
    if torch.compiler.is_compiling():
        return
    _, heads, length, _ = q.shape
    if heads > MAX_HEADS and 0 < length <= MAX_TRANSPOSED_LENGTH and key_heads > 0 and length % key_heads == 0:
        given = f"q has more than {MAX_HEADS} heads and at most {MAX_TRANSPOSED_LENGTH} tokens in dims {SHAPE}"
        warn_once(f"{subject}: {given}; {TRANSPOSE_HINT}.")
