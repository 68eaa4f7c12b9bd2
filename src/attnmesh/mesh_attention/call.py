"""One call of `attention`: its arguments, their checks, and the plan on which all ranks agree."""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from attnmesh.comm.topology import share_numbers
from attnmesh.core.digest import digest
from attnmesh.core.layout import Contiguous, Layout, check_layout
from attnmesh.core.logits import Logits
from attnmesh.core.mask import FAR, Causal, Mask, check_mask
from attnmesh.core.selection import Selection
from attnmesh.errors import KernelError, LayoutError, MaskError, ShapeError, require, warn_once
from attnmesh.guard.agreement import Agreement, describe_call, may_compare
from attnmesh.guard.checks import (
    check_checked,
    check_distance_bias,
    check_key_lengths,
    check_qkv,
    check_selection,
    check_sinks,
    check_unknown_options,
    heads_and_length,
    with_swap_hint,
)
from attnmesh.kernels.driver import check_kernel
from attnmesh.kernels.local_plan import kind_of
from attnmesh.mesh.axes import Axis, Mesh, flat_axis
from attnmesh.mesh.schedule import Problem, check_exchange
from attnmesh.mesh.shapes import AXES, check_heads_axis
from attnmesh.mesh_attention.auto_layout import check_auto, chosen_layout
from attnmesh.mesh_attention.mesh_op import MeshPlan
from attnmesh.mesh_attention.shard_marks import shard_marks
from attnmesh.runtime.caches import Kinds
from attnmesh.runtime.world import cached_per_world

Pair = tuple[int, int]
"""A count for the queries and one for the keys."""

Sizes = tuple[int, int, int, int]
"""Heads of q and of k, their width, and keys per index of a selection, 0 without one."""


class Options(NamedTuple):
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
    unsupported: dict[str, object] | None  # keywords of other attention functions, refused by name

    @property
    def applied_mask(self) -> Mask:
        """The mask given, or the causal one."""
        return Causal() if self.mask is None else self.mask

    def logits(self, dim: int) -> Logits:
        """Return the scale of the logits, 1/sqrt(dim) unless it was given, and their soft cap."""
        return Logits.of("attention", self.scale, self.softcap, dim)

    def problem(self, mesh: Mesh, tokens: Pair) -> Problem:
        """Return the problem of so many queries and keys on all ranks."""
        length = tokens[0] if self.length is None else self.length
        key_length = tokens[1] if self.key_length is None else self.key_length
        layouts = (self.layout or Contiguous(), self.key_layout or Contiguous())
        layout, key_layout = (chosen_layout(layout, self.applied_mask, mesh) for layout in layouts)
        return Problem(self.applied_mask, mesh.shape, layout, key_layout, length, key_length)


class Call(NamedTuple):
    """Arguments of one call, as this rank passes them."""

    q: Tensor
    k: Tensor
    v: Tensor
    sinks: Tensor | None
    key_lengths: Tensor | None
    options: Options
    selected: Selection | None = None
    distance_bias: Tensor | None = None

    @property
    def sizes(self) -> Sizes:
        """Sizes that all ranks have, but for lengths."""
        block = 0 if self.selected is None else self.selected.block
        return self.q.shape[1], self.k.shape[1], self.q.shape[3], block

    @property
    def tokens(self) -> Pair:
        """Tokens of q and of k on this rank."""
        return self.q.shape[2], self.k.shape[2]

    @property
    def numbers(self) -> tuple[int, int, int]:
        """Tokens of q and of k on this rank, and the highest index that a query selects, where the host reads it."""
        if self.selected is None or self.q.device.type != "cpu" or torch.compiler.is_compiling():
            return *self.tokens, -1
        return *self.tokens, self.selected.highest()

    def describe(self) -> str:
        """Return the text that ranks compare: all but the lengths of shards."""
        named = {"q": self.q, "k": self.k, "v": self.v} | ({} if self.sinks is None else {"sinks": self.sinks})
        shapes = {name: [n for dim, n in enumerate(x.shape) if dim != 2] for name, x in named.items()}
        learned = [name for name, x in named.items() if x.requires_grad and torch.is_grad_enabled()]
        fields = {"device": self.q.device.type, "dtype": self.q.dtype, **shapes, **self.options._asdict()}
        if self.key_lengths is not None:
            fields["key_lengths"] = self.key_lengths.tolist()
        if self.distance_bias is not None:
            fields["distance_bias"] = f"{self.distance_bias.shape[-1]} distances"
        if self.selected is not None:
            _, own, _, k = self.selected.indices.shape
            fields["selected"] = f"{k} blocks of {self.selected.block} for {own} key heads"
        return describe_call("attention", **fields, gradients=learned)


def agree_on_plan(mesh: Mesh, call: Call, checked: bool | None) -> MeshPlan:
    """Return the plan that all ranks follow together. Raise the same error on all ranks if there is none."""
    options, ranks = call.options, mesh.ranks
    if ranks == 1 or torch.compiler.is_compiling():  # ranks are compiled apart: their shards count as even
        check_call(mesh, call, checked)
        queries, keys, highest = call.numbers
        tokens = queries * ranks, keys * ranks
        if options.length is not None and queries == keys:  # keys of the queries' sequence
            tokens = options.length, options.length
        plan = _make_plan(mesh, options, call.sizes, tokens)._replace(even=options.length is None)
        _check_highest(highest, plan)
        return plan
    device = call.q.device if isinstance(call.q, Tensor) else torch.device(mesh.kind)
    if options.length is None or (checked is not False and may_compare(device)):
        with Agreement(mesh, "attention") as agreement:
            agreement.text, is_new = _checked_text(mesh, call, checked)
            agreement.numbers = (*call.numbers, _digest_of_some(call.k)) if is_new else call.numbers
        columns: list[tuple[int, ...]] = list(zip(*agreement.table, strict=True))
        table, tokens = tuple(zip(*columns[:2], strict=True)), (sum(columns[0]), sum(columns[1]))
        plan = _known_plan(mesh, options, call.sizes, tokens, table)
        _check_highest(max(columns[2]), plan)
        if len(columns) > 3:
            _warn_if_whole(columns[3])
        return plan
    if call.key_lengths is None:
        _checked_text(mesh, call, checked)
    else:  # a text would have their numbers, which a device may hold
        check_call(mesh, call, checked)
        _check_marks(mesh, call)
    plan = _known_plan(mesh, options, call.sizes, (options.length, options.length))
    _check_highest(call.numbers[2], plan)
    try:
        plan.check_own_shard(*call.tokens)  # nothing is counted: other shards are not known
    except ShapeError as error:
        raise with_swap_hint(error, heads_and_length(call.q), heads_and_length(call.k)) from None
    return plan


@cached_per_world()
def _texts(mesh: Mesh) -> Kinds[str]:
    """Return the texts of checked calls on a mesh. No check is made twice."""
    return Kinds()


def _checked_text(mesh: Mesh, call: Call, checked: bool | None) -> tuple[str, bool]:
    """Return the text of a call that ranks compare, and True for a new kind, or raise unless it can be served."""
    q, k, v, sinks, key_lengths, options, selected, distance_bias = call
    texts, kind, text = _texts(mesh), None, None
    if key_lengths is distance_bias is None and selected is None and not options.unsupported:
        kind = kind_of(q, k, v, sinks, (*options, checked))
        text = None if kind is None else texts.find(kind)
    is_new = text is None
    if text is None:
        check_call(mesh, call, checked)
        text = call.describe() if kind is None else texts.keep(kind, call.describe())
    if (marks := shard_marks()) and (id(q) in marks or id(k) in marks or id(v) in marks):
        _check_marks(mesh, call)
    return text, is_new and kind is not None


def _check_marks(mesh: Mesh, call: Call) -> None:
    """Raise for a shard that `shard` cut by another layout than the one named, for another mesh, or by another dim."""
    options, marks = call.options, shard_marks()
    layouts = options.layout, options.key_layout, options.key_layout
    for name, x, layout in zip("qkv", call[:3], layouts, strict=True):
        if (mark := marks.get(id(x))) is None or layout is None:
            continue
        if mark.layout is not layout or mark.place is not mesh or mark.dim != 2:
            mark.check(f"attention {name}", layout, options.applied_mask, mesh, 2)


def _digest_of_some(k: Tensor) -> int:
    """Return a digest of some keys of the first head; 0 if they are all alike."""
    some = k[:1, :1, :: max(1, k.shape[2] // 64)]
    return 0 if k.is_meta or bool((some == some[:, :, :1]).all()) else int(digest(some))


def _warn_if_whole(digests: Sequence[int]) -> None:
    """Warn once if all ranks passed the same keys, by their digests: shards of one sequence differ."""
    if digests[0] and len({*digests}) == 1:
        fix = "pass this rank's shard, as am.shard(k, mesh, layout=layout), if this is the whole sequence"
        warn_once(f"attention: k is the same on all {len(digests)} ranks, and counts as {len(digests)} shards; {fix}.")


def _make_plan(mesh: Mesh, options: Options, sizes: Sizes, tokens: Pair, table: Sequence[Pair] = ()) -> MeshPlan:
    """Return the plan, or raise where its mask, lengths and shards do not fit. All ranks pass the same values.

    Where keys are selected, in blocks, queries stay on their rank: all ranks are one column, along which keys travel.
    """
    problem, (q_heads, k_heads, dim, block) = options.problem(mesh, tokens), sizes
    try:
        _check_shards(problem, table)
        check_mask("attention mask", problem.mask, problem.length, problem.key_length)
        _check_cross(options, problem.length, problem.key_length, mesh.ranks)
    except (MaskError, ShapeError) as error:
        raise with_swap_hint(error, (q_heads, tokens[0]), (k_heads, tokens[1]), first=True) from None
    exchange = "bulk" if block and options.exchange == "auto" else options.exchange
    if block and mesh.ranks > 1:
        mesh, order = _one_column(mesh)
        problem = replace(problem, shape=mesh.shape, order=order)
    return MeshPlan(mesh, problem, exchange, options.kernel, options.logits(dim), block)


_known_plan = cached_per_world(1024)(_make_plan)


@cached_per_world()
def _one_column(mesh: Mesh) -> tuple[Mesh, tuple[int, ...]]:
    """Return all ranks of a mesh as one column, and the shard of each. All ranks make the first call at once."""
    long = [axis for axis in mesh.axes if axis.size > 1]
    axis = long[0] if len(long) == 1 else flat_axis(mesh.device_mesh, AXES)
    places = [place for (place,) in share_numbers([axis.index], mesh)]  # by shard
    return Mesh(Axis(), axis, Axis()), tuple(sorted(range(len(places)), key=places.__getitem__))


def check_call(mesh: Mesh, call: Call, checked: bool | None) -> None:
    """Raise unless each argument can be served on this mesh."""
    q, k, v, sinks, key_lengths, options, selected, distance_bias = call
    check_checked("attention", checked)
    try:
        check_unknown_options("attention", options.unsupported or {})
        check_qkv("attention", q, k, v)
        check_mask("attention mask", options.applied_mask)
        _check_layouts(options, mesh.ranks)
        check_exchange("attention exchange", options.exchange)
        _check_lengths(call, mesh.ranks)
        check_kernel(options.kernel)
        logits = options.logits(q.shape[-1])
        check_sinks("attention sinks", sinks, q)
        check_distance_bias("attention", distance_bias, q, logits, options.kernel, selected)
        check_key_lengths("attention key_lengths", key_lengths, q.shape[0])
        check_selection("attention selected", selected, q, k.shape[1], options.kernel)
        if selected is not None:
            _check_uncompiled(mesh)
        else:
            check_heads_axis("attention", mesh.shape, k.shape[1])
    except (MaskError, ShapeError) as error:
        raise with_swap_hint(error, heads_and_length(q), heads_and_length(k)) from None


def _check_uncompiled(mesh: Mesh) -> None:
    """Raise in a graph on several ranks, which may have to make a group of all of them.

    As a function it is traced by itself, also where its caller is not.
    """
    if mesh.ranks > 1 and torch.compiler.is_compiling():
        fix = "exclude the call with torch.compiler.disable"
        raise KernelError("attention selected", "a call outside of compiled graphs on several ranks", "one inside", fix)


def _check_highest(highest: int, plan: MeshPlan) -> None:
    """Raise if a query selects a key beyond the sequence; -1 for none."""
    if highest >= 0:
        blocks = -(-plan.problem.key_length // plan.block)
        expected = f"indices below {blocks}, of {plan.problem.key_length} keys in blocks of {plan.block}"
        fix = "count keys of the whole sequence, or blocks of them, and fill rows up with 2**31 - 1, for none"
        require(highest < blocks, ShapeError, "attention selected indices", expected, str(highest), fix)


def _check_layouts(options: Options, ranks: int) -> None:
    """Raise unless the layout is known: shards of another layout may have the same lengths."""
    if options.layout is None and ranks > 1:
        fix = "pass layout=am.Zigzag() if you sharded with am.shard(..., layout=am.Zigzag())"
        fix += ", am.Contiguous() for consecutive shards"
        raise LayoutError("attention layout", f"the layout of the shards of {ranks} ranks", "None", fix)
    for name, layout in (("layout", options.layout), ("key_layout", options.key_layout)):
        if layout is not None:
            check_layout(f"attention {name}", layout, auto=True)
        check_auto("attention", layout, options.mask, ranks)


def _check_lengths(call: Call, ranks: int) -> None:
    """Raise unless lengths count tokens. On one rank its shard is the whole sequence."""
    lengths = {"length": call.options.length, "key_length": call.options.key_length}
    for (name, length), tokens in zip(lengths.items(), call.tokens, strict=True):
        if length is not None and (isinstance(length, bool) or not isinstance(length, int) or length < 0):
            raise ShapeError(f"attention {name}", "a whole number", repr(length), "count the tokens of all ranks")
        if ranks == 1 and length not in (None, tokens):
            given, fix = f"{name}={length!r} with {tokens} tokens", f"leave {name} out on one device"
            raise ShapeError("attention", f"{name} to count the tokens given", given, fix)


def _check_cross(options: Options, length: int, key_length: int, ranks: int) -> None:
    """Raise where the keys that a query sees cannot be known.

    Queries and keys of unequal lengths may belong to two sequences, or the queries may be the last tokens of the keys.
    `key_length` alone does not select the causal mask, which is rarely meant over another sequence.
    """
    mask = options.applied_mask
    explicit = options.key_length is not None and options.mask is not None
    if length == key_length or explicit or min(mask.left, mask.right) >= FAR:
        return
    given = f"{length} queries, {key_length} keys and the {'default ' * (options.mask is None)}mask {mask}"
    fixes = ["pass mask=am.Full() for cross-attention"]
    if ranks > 1 and key_length == ranks * length:
        fixes.insert(0, "shard k and v as q, if they are the whole sequence")
    if length < key_length:
        positions = f"torch.arange({key_length - length}, {key_length})"
        fixes.append(f"call am.attend with q_positions={positions} for the last queries of a longer sequence")
    named = "mask=am.Causal(), " * (options.mask is None)
    fixes.append(f"pass {named}key_length={key_length} for {mask} over another sequence")
    raise ShapeError("attention", "as many queries as keys under a mask of positions", given, "; ".join(fixes))


def _check_shards(problem: Problem, table: Sequence[Sequence[int]]) -> None:
    """Raise unless every rank holds as many tokens as its layout gives it."""
    named = (("length", problem.layout, problem.length), ("key_length", problem.key_layout, problem.key_length))
    for column, (name, layout, length) in enumerate(named):
        expected = [len(layout.positions(length, len(table), shard)) for shard in range(len(table))]
        given = [row[column] for row in table]
        if given != expected:
            fix = f"shard with am.shard and this layout, or correct {name}"
            counts = f"{given}, {sum(given)} in all"
            raise ShapeError(
                "attention", f"shards of {layout} of {name} {length}: {expected} tokens by shard", counts, fix
            )
