"""Attention over a mesh of devices, as a layer of a model calls it: shards in, the same shard out, differentiable.

Along the heads axis tokens are swapped for heads and back. Between, two operators of PyTorch run the schedule of the
queries x keys mesh forward and backward; from the first to the second only tensors of a shard's size are kept.
"""

from collections.abc import Sequence
from typing import NamedTuple, Never, cast

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from attnmesh.attention.operator import mesh_op
from attnmesh.attention.ulysses import swap_op
from attnmesh.comm.consensus import agree, askable, describe_call
from attnmesh.core.checks import (
    autocast,
    autocast_enabled,
    check_checked,
    check_qkv,
    check_scale,
    check_sinks,
    check_unknown_options,
    heads_and_length,
    warn_if_swapped,
    with_swap_hint,
)
from attnmesh.core.layout import Contiguous, Layout, check_layout
from attnmesh.core.mask import FAR, Causal, Mask, check_mask
from attnmesh.errors import InputError, LayoutError, MaskError, ShapeError
from attnmesh.kernels.attend import attend_op
from attnmesh.kernels.select import check_kernel
from attnmesh.mesh.axes import Mesh, NotGiven, cached_per_world, given_mesh
from attnmesh.mesh.schedule import Problem, check_exchange

ALONE = "each rank attends to its own tokens only. Pass mesh= for attention over the tokens of all ranks"


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mesh: DeviceMesh | NotGiven | None = NotGiven.MESH,
    mask: Mask | None = None,
    layout: Layout | None = None,
    exchange: str = "auto",
    scale: float | None = None,
    kernel: str = "auto",
    sinks: Tensor | None = None,
    length: int | None = None,
    key_layout: Layout | None = None,
    key_length: int | None = None,
    checked: bool | None = None,
    **more: Never,
) -> Tensor:
    """Attention of this rank's queries over the keys of every rank: shards in, the same shard out.

    Without `mask` it is `Causal()`, for as many keys as queries. Cross-attention takes `mask=Full()`. Any other mask
    over the keys of another sequence needs their `key_length` too. The last queries of a longer sequence are a case for
    `attend`, which takes positions. `sinks` is one learned logit per query head: it takes a share of the softmax and
    gives nothing.

    Without `mesh` a rank attends to its own tokens only, and warns once if there are other ranks; `mesh=None` says that
    this is meant. On a mesh of several ranks `layout` is required: it says which of `length` tokens each rank holds.
    Shards of another layout give a wrong result without an error. `exchange` says how keys travel: "bulk", at once;
    "pipelined", some heads at a time; "ring", round the queries axis, a chunk under way while the last is attended.
    The result does not depend on it. Gradients of `sinks` are those of this rank's tokens, as for any parameter.
    What is no exact softmax attention, as dropout or soft-capped logits, is refused by name.
    Before anyone waits for anyone, ranks tell each other what they were called with, and all raise the same error if
    that differs. `checked` says when: at every call, if True; never, if False; else at every call, but on GPUs, where
    it holds up the device, at the first of each kind. Without `length` they always do, to count the tokens.
    DTensors whose tokens are sharded along the mesh's axes may come in, and go out; their layout is `Contiguous()`.

    >>> import torch
    >>> q, k, v = torch.randn(3, 1, 2, 8, 4).unbind()
    >>> expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    >>> torch.allclose(attention(q, k, v), expected, atol=1e-6)
    True
    """
    key_layout = layout if key_layout is None else key_layout
    options = _Options(mask, layout, key_layout, exchange, kernel, scale, length, key_length, more or None)
    if "DTensor" in [type(x).__name__ for x in (q, k, v)]:
        out = _of_dtensors(q, k, v, sinks, None if isinstance(mesh, NotGiven) else mesh, options, checked)
    else:
        out = _of_shards(q, k, v, sinks, given_mesh("attention", mesh, ALONE), options, checked)
    warn_if_swapped("attention", q, k.shape[2])  # last, for a warning that is an error would be one rank's own
    return out


Pair = tuple[int, int]
"""A number of the queries and one of the keys."""


class _Options(NamedTuple):
    """All that does not depend on the rank."""

    mask: Mask | None
    layout: Layout | None
    key_layout: Layout | None
    exchange: str
    kernel: str
    scale: float | None
    length: int | None
    key_length: int | None
    more: dict[str, Never] | None  # what has no meaning here, to be refused by all ranks

    @property
    def applied(self) -> Mask:
        """The mask given; causal where it is left out."""
        return Causal() if self.mask is None else self.mask


def _of_shards(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    mesh: DeviceMesh | None,
    options: _Options,
    checked: bool | None,
) -> Tensor:
    if autocast_enabled(q, k, v):
        q, k, v = autocast(q, k, v)
        with torch.autocast(q.device.type, enabled=False):
            return _of_shards(q, k, v, sinks, mesh, options, checked)
    here = Mesh.of(mesh)
    if here.shape.ranks > 1:
        problem = _agreed(here, options, checked, q, k, v, sinks)
        return _on_mesh(q, k, v, sinks, here, problem, options)
    check_checked("attention", checked)
    _check(here, options, q, k, v, sinks)
    scale = check_scale("attention", options.scale, q)
    out: Tensor = attend_op(q, k, v, sinks, None, None, options.applied.encode(), scale, options.kernel)[0]
    return out


def _of_dtensors(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    mesh: DeviceMesh | None,
    options: _Options,
    checked: bool | None,
) -> Tensor:
    from attnmesh.attention.dtensor import (  # PyTorch's DTensor is slow to import, and seldom used
        first_of,
        unwrap,
        wrap,
    )

    here = Mesh.of(first_of(q, k, v).device_mesh)
    try:
        local = unwrap(q, k, v, mesh, (options.layout, options.key_layout))  # type: ignore[arg-type]
    except InputError as error:
        if asks(checked, torch.device(here.kind)) and not torch.compiler.is_compiling():
            agree(here, error)
        raise
    runs = Contiguous()
    options = options._replace(layout=runs, key_layout=runs, length=local.length, key_length=local.key_length)
    out = _of_shards(local.q, local.k, local.v, sinks, local.mesh, options, checked)
    return wrap(out, q, v.shape[-1])  # type: ignore[arg-type]


def _on_mesh(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, here: Mesh, problem: Problem, options: _Options
) -> Tensor:
    code = [*here.shape, *(axis.index for axis in here.axes), *problem.encode()]
    groups = here.group_names
    if here.shape.heads > 1:
        q, k, v = swap_op([q, k, v], [False, True, True], groups, code, True)
        sinks = sinks if sinks is None else sinks.chunk(here.shape.heads)[here.heads.index]
    scale = check_scale("attention", options.scale, q)
    out: Tensor = mesh_op(q, k, v, sinks, groups, code, options.exchange, options.kernel, scale)[0]
    return swap_op([out], [False], groups, code, False)[0] if here.shape.heads > 1 else out


def _agreed(
    here: Mesh, options: _Options, checked: bool | None, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None
) -> Problem:
    """What all ranks are about to do, or the error that all raise; a rank alone never raises."""
    if torch.compiler.is_compiling():  # ranks are traced apart from each other: their shards are taken to be even
        _check(here, options, q, k, v, sinks)
        tokens, keys = (x.shape[2] * here.shape.ranks for x in (q, k))
        return _fitting(here, options, (q.shape[1], k.shape[1]), (tokens, keys))
    device = q.device if isinstance(q, Tensor) else torch.device(here.kind)
    ask = options.length is None or asks(checked, device)
    try:
        check_checked("attention", checked)
        _check(here, options, q, k, v, sinks)
        call = _described(options, q, k, v, sinks)
    except InputError as error:
        if ask:
            agree(here, error)  # where the others ask too
        raise
    heads, lengths = (q.shape[1], k.shape[1]), (q.shape[2], k.shape[2])
    if ask:
        return _asked(here, call, heads, lengths, options)
    if checked is None and askable(device):
        return _asked_once(here, call, heads, lengths, options)
    length = cast(int, options.length)  # or ranks would have asked each other
    return _fitting(here, options, heads, (length, length))


def asks(checked: bool | None, device: torch.device) -> bool:
    """Whether ranks ask each other at every call: of the CPU as well if nothing is said."""
    return checked is True or (checked is not False and asked_each_time(device))


def asked_each_time(device: torch.device) -> bool:
    """Whether ranks of such devices may as well ask each other at every call."""
    return device.type == "cpu"


def _asked(here: Mesh, call: str, heads: Pair, lengths: Pair, options: _Options) -> Problem:
    """What all ranks say that they are about to do."""
    table = agree(here, call, lengths)
    tokens, keys = (sum(column) for column in zip(*table, strict=True))
    return _fitting(here, options, heads, (tokens, keys), table)


_asked_once = cached_per_world(1024)(_asked)
"""The same, asked at the first call of each kind; what came of it holds for the others."""


def _problem(here: Mesh, options: _Options, tokens: int, keys: int) -> Problem:
    length = tokens if options.length is None else options.length
    key_length = keys if options.key_length is None else options.key_length
    layouts = cast(tuple[Layout, Layout], (options.layout, options.key_layout))  # which several ranks have to give
    return Problem(options.applied, here.shape, *layouts, length, key_length)


def _fitting(here: Mesh, options: _Options, heads: Pair, tokens: Pair, table: Sequence[Sequence[int]] = ()) -> Problem:
    """The problem of so many heads and tokens, as all ranks know them alike; and each rank's tokens, if they do."""
    problem = _problem(here, options, *tokens)
    try:
        if table:
            _check_shards(problem, table)
        check_mask("attention mask", options.applied, problem.length, problem.key_length)
        _check_cross(options, problem.length, problem.key_length)
    except (MaskError, ShapeError) as error:
        raise with_swap_hint(error, (heads[0], tokens[0]), (heads[1], tokens[1])) from None
    return problem


def _described(options: _Options, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> str:
    """The call, as ranks tell each other of it: all but the lengths of their shards."""
    named = {"q": q, "k": k, "v": v} | ({} if sinks is None else {"sinks": sinks})
    shapes = {name: [n for dim, n in enumerate(x.shape) if dim != 2] for name, x in named.items()}
    learned = [name for name, x in named.items() if x.requires_grad and torch.is_grad_enabled()]
    return describe_call(
        "attention", device=q.device.type, dtype=q.dtype, **shapes, **options._asdict(), gradients=learned
    )


def _check(mesh: Mesh, options: _Options, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> None:
    try:
        _check_call(mesh, options, q, k, v, sinks)
        if mesh.shape.ranks == 1:
            _check_whole(options, q, k)
    except (MaskError, ShapeError) as error:
        raise with_swap_hint(error, heads_and_length(q), heads_and_length(k)) from None


def _check_call(mesh: Mesh, options: _Options, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> None:
    check_unknown_options("attention", options.more or {})
    check_qkv("attention", q, k, v)
    check_mask("attention mask", options.applied)
    _check_layouts(options, mesh.shape.ranks)
    check_exchange("attention exchange", options.exchange)
    for name, length in (("length", options.length), ("key_length", options.key_length)):
        if length is not None and (isinstance(length, bool) or not isinstance(length, int) or length < 0):
            raise ShapeError(f"attention {name}", "a whole number", repr(length), "count the tokens of all ranks")
    check_kernel(options.kernel)
    check_scale("attention", options.scale, q)
    check_sinks("attention sinks", sinks, q)
    if k.shape[1] % mesh.shape.heads:
        given = f"{k.shape[1]} key heads and a heads axis of {mesh.shape.heads}"
        fix = "give those ranks to the queries or the keys axis"
        raise ShapeError("attention", "key heads that the heads axis divides", given, fix)


def _check_layouts(options: _Options, ranks: int) -> None:
    """Only the user knows how tokens were sharded, and shards of another layout may have the same lengths."""
    if options.layout is None and ranks > 1:
        fix = "pass layout=am.Zigzag() if you sharded with am.shard(..., layout=am.Zigzag())"
        fix += ", am.Contiguous() for consecutive shards"
        raise LayoutError("attention layout", f"the layout of the shards of {ranks} ranks", "None", fix)
    for name, layout in (("layout", options.layout), ("key_layout", options.key_layout)):
        if layout is not None:
            check_layout(f"attention {name}", layout)


def _check_whole(options: _Options, q: Tensor, k: Tensor) -> None:
    """On one device the shard is the whole."""
    for name, given, x in (("length", options.length, q), ("key_length", options.key_length, k)):
        if given is not None and given != x.shape[2]:
            fix = f"leave {name} out on one device"
            raise ShapeError(
                "attention", f"{name} to count the tokens given", f"{name}={given!r} with {x.shape[2]} tokens", fix
            )
    check_mask("attention mask", options.applied, q.shape[2], k.shape[2])
    _check_cross(options, q.shape[2], k.shape[2])


def _check_cross(options: _Options, length: int, key_length: int) -> None:
    """Raise where it cannot be known which keys a query sees.

    Queries and keys of unlike lengths may be of two sequences, or the queries the last of the keys' own. `key_length`
    alone does not ask for the causal mask: over another sequence it is seldom meant.
    """
    mask = options.applied
    asked_for = options.key_length is not None and options.mask is not None
    if length == key_length or asked_for or min(mask.left, mask.right) >= FAR:
        return
    given = f"{length} queries, {key_length} keys and the {'default ' * (options.mask is None)}mask {mask}"
    fixes = ["pass mask=am.Full() for cross-attention"]
    if length < key_length:
        positions = f"torch.arange({key_length - length}, {key_length})"
        fixes.append(f"call am.attend with q_positions={positions} for the last queries of a longer sequence")
    named = "mask=am.Causal(), " * (options.mask is None)
    fixes.append(f"pass {named}key_length={key_length} for {mask} over another sequence")
    raise ShapeError("attention", "as many queries as keys under a mask of positions", given, "; ".join(fixes))


def _check_shards(problem: Problem, table: Sequence[Sequence[int]]) -> None:
    """Every rank holds as many tokens as its layout says; all ranks see the same table, so all raise alike."""
    named = (("length", problem.layout, problem.length), ("key_length", problem.key_layout, problem.key_length))
    for column, (name, layout, length) in enumerate(named):
        expected = [len(layout.positions(length, len(table), shard)) for shard in range(len(table))]
        given = [row[column] for row in table]
        if given != expected:
            fix = f"shard with am.shard and this layout, or mend {name}"
            said = f"{given}, {sum(given)} in all"
            raise ShapeError("attention", f"shards of {layout} of {name} {length}: {expected} tokens", said, fix)
