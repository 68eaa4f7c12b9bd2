"""One call of `attention`: its arguments, and their checks."""

from typing import NamedTuple

import torch
from torch import Tensor

from attnmesh.checks.argument_checks import (
    check_compare_option,
    check_distance_bias,
    check_key_lengths,
    check_qkv,
    check_selection,
    check_sinks,
    check_unknown_options,
    heads_and_length,
    with_transpose_hint,
)
from attnmesh.core.digest import digest
from attnmesh.core.layout import Contiguous, Layout, check_layout
from attnmesh.core.mask import Causal, Mask, check_mask
from attnmesh.core.scaling import Scaling, with_distance_bias
from attnmesh.core.selection import Selection
from attnmesh.errors import KernelError, LayoutError, MaskError, ShapeError
from attnmesh.guard.call_text import describe_call
from attnmesh.kernels.choice import check_kernel, choose
from attnmesh.kernels.kernel import KernelRequest
from attnmesh.mesh.axes import RankMesh
from attnmesh.mesh.schedule import Problem, check_exchange
from attnmesh.mesh.shapes import check_heads_axis
from attnmesh.mesh_attention.auto_choices import agreed_layout, check_auto

QueryKeyCounts = tuple[int, int]
"""A count for the queries and one for the keys."""


class TensorSizes(NamedTuple):
    """Sizes of a call's tensors that its spec takes, the same on all ranks."""

    q_heads: int
    k_heads: int
    dim: int
    """Columns of q and of k."""
    index_block: int
    """Keys per index of a selection; 0 if there is none."""


class AttentionOptions(NamedTuple):
    """Arguments that every rank passes alike."""

    mask: Mask | None
    layout: Layout | str | None
    key_layout: Layout | str | None
    exchange: str
    kernel: str
    scale: float | None
    softcap: float | None
    length: int | None
    key_length: int | None
    unsupported: dict[str, object] | None
    """Keywords of other attention functions, refused by name."""

    @property
    def applied_mask(self) -> Mask:
        """The mask given, or the causal one."""
        return Causal() if self.mask is None else self.mask

    def scaling(self, dim: int) -> Scaling:
        """Return the scale of the logits, 1/sqrt(dim) unless it was given, and their soft cap."""
        return Scaling.of("attention", self.scale, self.softcap, dim)

    def problem(self, mesh: RankMesh, counts: QueryKeyCounts) -> Problem:
        """Return the problem. `counts` are the queries and keys of all ranks, where the options give no length.

        Ranks agree on a layout "auto" in the first call.
        """
        length = counts[0] if self.length is None else self.length
        key_length = counts[1] if self.key_length is None else self.key_length
        layouts = (self.layout or Contiguous(), self.key_layout or Contiguous())
        layout, key_layout = (agreed_layout(layout, self.applied_mask, mesh) for layout in layouts)
        return Problem(
            self.applied_mask, mesh.shape, layout=layout, key_layout=key_layout, length=length, key_length=key_length
        )


class CallPayload(NamedTuple):
    """Numbers that a rank sends to all others beside the text of its call. They may differ."""

    queries: int
    """Queries on this rank."""
    keys: int
    """Keys on this rank."""
    highest_selected: int
    """Highest index that a query selects; -1 if there is none, or if the CPU reads no index."""
    digest: int = 0
    """Digest of some keys in the first call of a signature; 0 in later calls."""


class AttentionArguments(NamedTuple):
    """Arguments of one call, as this rank passes them."""

    q: Tensor
    k: Tensor
    v: Tensor
    sinks: Tensor | None
    key_lengths: Tensor | None
    options: AttentionOptions
    selected: Selection | None = None
    distance_bias: Tensor | None = None

    def with_wide_queries(self) -> "AttentionArguments":
        """Return the arguments with the bias by distance in the last columns of the queries."""
        return self._replace(q=with_distance_bias(self.q, self.distance_bias))

    @property
    def has_signature(self) -> bool:
        """True if the checks of the call depend on shapes, dtypes and options alone."""
        plain = self.key_lengths is None and self.selected is None and self.distance_bias is None
        return plain and not self.options.unsupported

    @property
    def indices(self) -> Tensor | None:
        """Indices of the selected keys."""
        return None if self.selected is None else self.selected.indices

    @property
    def sizes(self) -> TensorSizes:
        """Sizes that the tensors of all ranks share."""
        index_block = 0 if self.selected is None else self.selected.block
        return TensorSizes(self.q.shape[1], self.k.shape[1], self.q.shape[3], index_block)

    @property
    def counts(self) -> QueryKeyCounts:
        """Tokens of q and of k on this rank."""
        return self.q.shape[2], self.k.shape[2]

    @property
    def payload(self) -> CallPayload:
        """Numbers that this rank sends beside the text, without the digest."""
        if self.selected is None or not self.q.is_cpu or torch.compiler.is_compiling():
            return CallPayload(*self.counts, -1)
        return CallPayload(*self.counts, self.selected.highest())

    def digest_of_some_keys(self) -> int:
        """Return a digest of some keys of the first head; 0 if they are all alike."""
        sample = self.k[:1, :1, :: max(1, self.k.shape[2] // 64)]
        return 0 if self.k.is_meta or bool((sample == sample[:, :, :1]).all()) else int(digest(sample))

    def describe(self) -> str:
        """Return the text that ranks compare: all but the lengths of shards."""
        tensors = {"q": self.q, "k": self.k, "v": self.v} | ({} if self.sinks is None else {"sinks": self.sinks})
        shapes = {name: [size for dim, size in enumerate(x.shape) if dim != 2] for name, x in tensors.items()}
        learned = tensors if self.distance_bias is None else {**tensors, "distance_bias": self.distance_bias}
        requires_grad = [name for name, x in learned.items() if x.requires_grad and torch.is_grad_enabled()]
        fields = {"device": self.q.device.type, "dtype": self.q.dtype, **shapes, **self.options._asdict()}
        if self.key_lengths is not None:
            fields["key_lengths"] = self.key_lengths.tolist()
        if self.distance_bias is not None:
            fields["distance_bias"] = f"{self.distance_bias.shape[-1]} distances"
        if self.selected is not None:
            _, own, _, k = self.selected.indices.shape
            fields["selected"] = f"{k} blocks of {self.selected.block} for {own} key heads"
        return describe_call("attention", **fields, gradients=requires_grad)


def check_arguments(mesh: RankMesh, arguments: AttentionArguments, checked: bool | None) -> None:
    """Raise unless each argument can be served on this mesh."""
    q, k, options, selected = arguments.q, arguments.k, arguments.options, arguments.selected
    check_compare_option("attention", checked)
    try:
        check_unknown_options("attention", options.unsupported or {})
        check_qkv("attention", q, k, arguments.v)
        check_mask("attention mask", options.applied_mask)
        _check_layouts(options, mesh.ranks)
        check_exchange("attention exchange", options.exchange)
        _check_lengths(arguments, mesh.ranks)
        check_kernel(options.kernel)
        scaling = options.scaling(q.shape[-1])
        check_sinks("attention sinks", arguments.sinks, q)
        check_distance_bias("attention", arguments.distance_bias, q, scaling, options.kernel, selected)
        check_key_lengths("attention key_lengths", arguments.key_lengths, q.shape[0])
        check_selection("attention selected", selected, q, k.shape[1], options.kernel)
        if selected is not None:
            _check_uncompiled(mesh)
        else:
            check_heads_axis("attention", mesh.shape, k.shape[1])
            if options.kernel != "auto" and not torch.compiler.is_compiling():  # now, while all ranks can raise alike
                choose(KernelRequest.of(q, k, arguments.v, scaling), options.kernel)
    except (MaskError, ShapeError) as error:
        raise with_transpose_hint(error, heads_and_length(q), heads_and_length(k)) from None


def _check_uncompiled(mesh: RankMesh) -> None:
    """Raise in a graph on several ranks, which may have to make a group of all of them.

    As a function it is traced by itself, also where its caller is not.
    """
    if mesh.ranks > 1 and torch.compiler.is_compiling():
        fix = "exclude the call with torch.compiler.disable"
        raise KernelError("attention selected", "a call outside of compiled graphs on several ranks", "one inside", fix)


def _check_layouts(options: AttentionOptions, ranks: int) -> None:
    """Raise unless the layout is known: shards of another layout may have the same lengths."""
    if options.layout is None and ranks > 1:
        fix = "pass layout=am.Zigzag() if you sharded with am.shard(..., layout=am.Zigzag())"
        fix += ", am.Contiguous() for consecutive shards"
        raise LayoutError("attention layout", f"the layout of the shards of {ranks} ranks", "None", fix)
    for name, layout in (("layout", options.layout), ("key_layout", options.key_layout)):
        if layout is not None:
            check_layout(f"attention {name}", layout, auto=True)
        check_auto("attention", layout, options.mask, ranks)


def _check_lengths(arguments: AttentionArguments, ranks: int) -> None:
    """Raise unless lengths count tokens. On one rank its shard is the whole sequence."""
    lengths = {"length": arguments.options.length, "key_length": arguments.options.key_length}
    for (name, length), count in zip(lengths.items(), arguments.counts, strict=True):
        if length is not None and (isinstance(length, bool) or not isinstance(length, int) or length < 0):
            fix = "count the tokens of all ranks as a Python int"
            raise ShapeError(f"attention {name}", "a whole number", repr(length), fix)
        if ranks == 1 and length not in (None, count):
            given, fix = f"{name}={length!r} with {count} tokens", f"leave {name} out on one device"
            raise ShapeError("attention", f"{name} to count the tokens given", given, fix)
