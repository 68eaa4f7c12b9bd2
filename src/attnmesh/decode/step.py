"""One decode step as a record: everything about it that is not a tensor, its checks, and its code for operators."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Never

import torch
from torch import Tensor

from attnmesh.comm.consensus import may_compare
from attnmesh.comm.merge_ranks import check_merge
from attnmesh.core.checks import check_same_kind, check_scale, check_sinks, check_unknown_options, swap_first
from attnmesh.core.mask import Mask, check_mask
from attnmesh.decode.cache import KVCache
from attnmesh.errors import DtypeError, KernelError, LayoutError, MaskError, ShapeError
from attnmesh.kernels.driver import check_kernel
from attnmesh.mesh.axes import Axis, group_named
from attnmesh.mesh.world import cached_per_world, decode_cached


class DecodeStep(NamedTuple):
    """Options of one step, and the axes and sizes of its cache."""

    heads: Axis
    tokens: Axis
    block: int
    capacity: int
    mask: Mask
    scale: float
    merge: str
    output: str
    reproducible: bool
    kernel: str

    @property
    def options(self) -> tuple[Any, ...]:
        """The values that the caller passes, which are equal on all ranks."""
        return self[4:]

    def encode(self) -> tuple[str, list[int]]:
        """Return the step as names and numbers, which the schema of an operator can carry."""
        names = [self.heads.group_name, self.tokens.group_name, self.merge, self.output, self.kernel, repr(self.scale)]
        places = [self.heads.size, self.heads.index, self.tokens.size, self.tokens.index]
        return ",".join(names), [*places, self.block, self.capacity, int(self.reproducible), *self.mask.encode()]

    @staticmethod
    def decode(names: str, numbers: Sequence[int]) -> "DecodeStep":
        """Return the step that `encode` wrote."""
        return decode_cached(_decoded, names, numbers)

    def output_shape(self, q: Tensor, values: Tensor) -> tuple[int, ...]:
        """Return the shape of the output on this rank."""
        heads = q.shape[1]
        for axis in (self.heads, self.tokens) if self.output == "heads" else ():
            share = axis.share_of(heads)
            heads = share.stop - share.start
        return q.shape[0], heads, q.shape[2], values.shape[-1]


@cached_per_world(1024)
def _decoded(names: str, numbers: tuple[int, ...]) -> DecodeStep:
    heads, tokens, merge, output, kernel, scale = names.split(",")
    axes = Axis(numbers[0], numbers[1], group_named(heads)), Axis(numbers[2], numbers[3], group_named(tokens))
    block, capacity, reproducible, *mask = numbers[4:]
    return DecodeStep(
        *axes, block, capacity, Mask.decode(mask), float(scale), merge, output, bool(reproducible), kernel
    )


def check_step(
    q: Tensor, cache: KVCache, sinks: Tensor | None, step: DecodeStep, unsupported: Mapping[str, Never]
) -> DecodeStep:
    """Return the step with its scale, or raise unless each argument can be served."""
    sizes = cache.sizes
    if torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in (q, sinks)):
        fix = "decode under torch.no_grad(), or train with attention"
        raise KernelError("decode", "a query and sinks without gradients", "some that ask for them", fix)
    check_unknown_options("decode", unsupported)
    check_same_kind("decode", {"q": q})
    shape = (sizes.batch, "heads", "length", sizes.head_dim)
    if q.ndim != 4 or (q.shape[0], q.shape[3]) != (sizes.batch, sizes.head_dim) or not q.shape[2]:
        fix = "pass the queries of the cache's last tokens"
        raise ShapeError("decode q", f"shape {shape}", f"{tuple(q.shape)}", fix)
    if q.shape[1] % sizes.kv_heads or not q.shape[1]:
        given = f"{q.shape[1]} query heads on {sizes.kv_heads} key heads"
        fix = swap_first("pass the model's heads", q.shape[1] > 0 and q.shape[2] % sizes.kv_heads == 0)
        raise ShapeError("decode q", "query heads a multiple of key heads", given, fix)
    if q.dtype != sizes.dtype or q.device.type != cache.device.type:
        given = f"{q.dtype} on {q.device}"
        raise DtypeError("decode q", f"{sizes.dtype} on {cache.device}", given, "call .to(cache.sizes.dtype)")
    check_mask("decode mask", step.mask)
    check_merge("decode", step.merge, step.output)
    check_kernel(step.kernel)
    scale = check_scale("decode", step.scale, q)
    check_sinks("decode sinks", sinks, q)
    if cache.padding is not None and step.mask.ends:
        fix = "keep documents in sequences of their own"
        raise MaskError("decode mask", "no documents in a padded batch", f"{step.mask}", fix)
    check_reproducible("decode reproducible", step.reproducible, step.tokens.size, step.merge)
    if step.reproducible:
        _check_block_cyclic(cache)
    if may_compare(q.device):  # a graph does not read the length
        _check_length(q, cache, step.mask)
    return step._replace(scale=scale)


def _check_length(q: Tensor, cache: KVCache, mask: Mask) -> None:
    if not cache.holds(q.shape[2]):
        given = f"{q.shape[2]} queries and {cache.length} of {cache.sizes.capacity} tokens in the cache"
        fits = q.shape[2] % cache.sizes.kv_heads == 0 and cache.holds(q.shape[1])
        fix = swap_first("append before decode", fits)
        raise ShapeError("decode q", "as many queries as tokens in the cache, or fewer", given, fix)
    if mask.ends:
        mask.check_length("decode mask", cache.length)


def check_reproducible(subject: str, reproducible: object, ranks: int, merge: str) -> None:
    """Raise unless the result can have the same bits on any number of ranks, where that is wanted."""
    if not isinstance(reproducible, bool):
        raise KernelError(subject, "True or False", repr(reproducible), "pass True or False")
    if not reproducible:
        return
    expected = "1, 2, 4, 8, ... ranks along queries and keys, and a tree"
    if ranks & (ranks - 1):
        fix = "use a power of two of ranks, or leave it out"
        raise KernelError(subject, expected, f"{ranks} ranks", fix)
    if merge not in ("auto", "tree"):
        raise KernelError(subject, expected, f"merge {merge!r}", 'leave merge at "auto"')


def _check_block_cyclic(cache: KVCache) -> None:
    if not cache.is_block_cyclic or cache.padding is not None:
        given = "a padded batch" if cache.padding is not None else "tokens in the layout of a sharded prefill"
        fix = "fill it with append, or prefill in Striped(cache.sizes.block)"
        raise LayoutError("decode reproducible", "a cache with block-cyclic tokens", given, fix)
