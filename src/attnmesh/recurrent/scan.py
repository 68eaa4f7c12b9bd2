"""Scan of affine maps across ranks: the state of a recurrent layer at the beginning of each rank's shard.

A recurrent layer maps its state by `S -> A S + B` over a shard of the sequence. Two maps compose to one of the same
size, in order, so the messages do not depend on the length. Seven ranks, in ceil(log2 7) rounds:

  rank  0   1   2   3   4   5   6
   map  a   b   c   d   e   f   g
        |-ba|   |-dc|   |-fe|   |     round 1: each pair exchanges its maps; rank 6 has no peer
        |-dcba------|   |-gfe---|     round 2: ranks 0 and 2, 1 and 3, 4 and 6 exchange the maps of their pairs
        |-gfedcba---------------|     round 3: 0 to 4, 1 to 5, 2 to 6

A rank composes what comes from earlier ranks into its prefix. The gradient is the same scan in the other direction,
of the transposed maps.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from attnmesh.checks.argument_checks import check_compare_option, check_one_device, check_tensor
from attnmesh.comm.p2p import Channel
from attnmesh.core.partial import sum_dtype
from attnmesh.errors import ArgumentError, DtypeError, ShapeError
from attnmesh.guard.agreement import Agreement, may_compare
from attnmesh.kernels.traced import without_autocast
from attnmesh.mesh.axes import Axis, axis_of, group_named, mesh_of_axis
from attnmesh.runtime.operators import custom_operator


class AffineMap(NamedTuple):
    """A map of states, `S -> linear S + bias`."""

    linear: Tensor
    bias: Tensor

    def __call__(self, state: Tensor) -> Tensor:
        """Return the mapped state. Autocast, which would round it, has no effect."""
        with without_autocast(self.bias):
            return _apply_linear(self.linear, state) + self.bias

    def after(self, first: "AffineMap") -> "AffineMap":
        """Return the composition: `first`, then this map."""
        compose = torch.matmul if self.linear.ndim == self.bias.ndim else torch.mul
        with without_autocast(self.bias):
            return AffineMap(compose(self.linear, first.linear), self(first.bias))


def scan_across(
    linear: Tensor,
    bias: Tensor,
    group: ProcessGroup | DeviceMesh | None,
    *,
    reverse: bool = False,
    checked: bool | None = None,
) -> AffineMap:
    """Return the composition of the affine maps of all earlier ranks: the exclusive prefix of this rank.

    The first rank gets the identity. Gradients flow to the maps of all ranks, so each rank uses its result in the loss,
    or none does.

    Args:
        linear: One factor per state (batch, heads), a diagonal (batch, heads, K), or a matrix (batch, heads, K, K).
        bias: The state after this rank's tokens, from a state of zero: (batch, heads, K, V).
        group: A process group, a mesh of one axis, or None for a single rank.
        reverse: True to compose the maps of later ranks, the last rank's first.
        checked: By default ranks compare their calls, so that all raise the same error. False leaves that out.

    Returns:
        `linear` and `bias` of the composition, in float32 or wider.

    Raises:
        InputError: An argument cannot be served, or the ranks' calls differ.
        RankFailure: A rank is lost.

    >>> linear, bias = torch.rand(1, 2, 4, 4), torch.rand(1, 2, 4, 3)
    >>> scan_across(linear, bias, None).bias.abs().sum()
    tensor(0.)
    """
    axis = axis_of(group, "scan_across")
    device = bias.device if isinstance(bias, Tensor) else torch.device(mesh_of_axis(axis).device_type)
    is_compared = axis.size > 1 and checked is not False and may_compare(device)
    with Agreement(mesh_of_axis(axis), "scan_across", lambda: _fields(linear, bias, reverse), is_compared=is_compared):
        _check_maps(linear, bias, reverse, checked)
    dtype = torch.promote_types(sum_dtype(linear.dtype), sum_dtype(bias.dtype))
    order = range(axis.size)[:: -1 if reverse else 1]
    return scan(AffineMap(linear.to(dtype), bias.to(dtype)), axis, order)


def scan(
    element: AffineMap, axis: Axis, order: Sequence[int], *, linear_needs_grad: bool = True, resets: Sequence[int] = ()
) -> AffineMap:
    """Return the composition of the maps of the ranks that come before this one in `order`, indices of the axis.

    Without `linear_needs_grad`, only the bias has a gradient: a state that begins as zero needs no more. `resets` has 1
    for each rank whose linear part is 0. The state before such a rank may be infinite or NaN, and is not read there.
    """
    linear, bias = element
    if scalar := linear.ndim == bias.ndim - 2:  # a diagonal of one entry on the flattened state
        linear, bias = linear[..., None], bias.flatten(-2)[..., None, :]
    index_and_order = [axis.index, *order]
    linear, bias = scan_op(
        linear.contiguous(), bias.contiguous(), axis.group_name, index_and_order, linear_needs_grad, [*resets]
    )
    return AffineMap(linear[..., 0], bias.view(element.bias.shape)) if scalar else AffineMap(linear, bias)


def _fake_states(linear: Tensor, bias: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(linear), torch.empty_like(bias)


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    linear, _, ctx.group, ctx.index_and_order, ctx.linear_needs_grad, ctx.resets = inputs
    ctx.save_for_backward(linear, *output)
    if not ctx.linear_needs_grad:
        ctx.mark_non_differentiable(output[0])


def _scan_backward(ctx: Any, dlinear: Tensor | None, dbias: Tensor) -> tuple[Tensor | None, ...]:
    """Scan the gradients of the states from the last rank to the first.

    The state X = [bias | linear] of rank r becomes A X + [B | 0] on rank r + 1. So a gradient G of X on rank r adds to
    A' times the gradient of X on rank r + 1.
    """
    linear, prefix_linear, prefix_bias = ctx.saved_tensors
    matrix = linear.ndim == prefix_bias.ndim
    state, dstate = [prefix_bias], [dbias]
    if ctx.linear_needs_grad:
        state.append(prefix_linear if matrix else prefix_linear[..., None])
        dstate.append(dlinear if matrix else dlinear[..., None])  # type: ignore[index, arg-type]
    index, *order = ctx.index_and_order
    transposed = linear.mT.contiguous() if matrix else linear
    index_and_order = [index, *reversed(order)]
    _, later = scan_op(transposed, torch.cat(dstate, -1), ctx.group, index_and_order, False, [*reversed(ctx.resets)])
    states = torch.cat(state, -1)
    with without_autocast(later):
        dlinear = later @ states.mT if matrix else (later * states).sum(-1)
    return dlinear, later[..., : prefix_bias.shape[-1]]


@custom_operator("scan_across", _fake_states, _save_for_backward, _scan_backward)
def scan_op(
    linear: Tensor,
    bias: Tensor,
    group: str,
    index_and_order: Sequence[int],
    linear_needs_grad: bool,
    resets: Sequence[int],
) -> tuple[Tensor, Tensor]:
    """Run the scan as an operator. `index_and_order` is this rank's index and the order of the ranks."""
    index, *order = index_and_order
    ranks = len(order)
    channel = Channel(Axis(ranks, index, group_named(group)), bias.device)
    place = order.index(index)
    total = AffineMap(linear, bias)
    prefix = None
    step = 1
    while step < ranks:
        # In the last round only the later rank of a pair receives: nobody needs `total` after it.
        peer = place ^ step
        last = 2 * step >= ranks
        if peer < ranks:
            sends = {order[peer]: tuple(total)} if peer > place or not last else {}
            wanted = {order[peer]: tuple(torch.empty_like(x, device="meta") for x in total)}
            arrived = channel.begin_messages(sends, wanted if peer < place or not last else {}, "scanning")()
            if peer < place:
                earlier = AffineMap(*arrived[order[peer]])
                first = place & -step  # `total` is the map of the `step` ranks from `first` on
                if prefix is None or not any(resets[first:place]):
                    prefix = earlier if prefix is None else prefix.after(earlier)
                if not last and not any(resets[first : first + step]):
                    total = total.after(earlier)
            elif not last:
                later = AffineMap(*arrived[order[peer]])
                total = later if any(resets[peer & -step :][:step]) else later.after(total)
        step *= 2
    if prefix is None:
        return identity_linear(linear, bias.ndim).contiguous(), torch.zeros_like(bias)
    return prefix.linear.clone(), prefix.bias.clone()  # what has arrived shares the memory of one message


def _apply_linear(linear: Tensor, state: Tensor) -> Tensor:
    """Return a linear map of a state (..., K, V). Factors and diagonals have fewer dims than matrices."""
    if linear.ndim == state.ndim:
        return linear @ state
    return linear[(...,) + (None,) * (state.ndim - linear.ndim)] * state


def identity_linear(linear: Tensor, ndim: int) -> Tensor:
    """Return the identity in the form of a linear map of states of `ndim` dims."""
    if linear.ndim == ndim:
        return torch.eye(linear.shape[-1], dtype=linear.dtype, device=linear.device).expand_as(linear)
    return torch.ones_like(linear)


def _fields(linear: Tensor, bias: Tensor, reverse: bool) -> dict[str, object]:
    requires_grad = torch.is_grad_enabled() and (linear.requires_grad or bias.requires_grad)
    shapes = {"linear": list(linear.shape), "bias": list(bias.shape), "dtypes": f"{linear.dtype} {bias.dtype}"}
    return {**shapes, "reverse": reverse, "requires_grad": requires_grad}


def _check_maps(linear: Tensor, bias: Tensor, reverse: bool, checked: bool | None) -> None:
    check_compare_option("scan_across", checked)
    for name, x in (("linear", linear), ("bias", bias)):
        check_tensor(f"scan_across {name}", x)
        if not x.is_floating_point():
            raise DtypeError(f"scan_across {name}", "a tensor of floats", f"{x.dtype}", "cast it with .float()")
    check_one_device("scan_across", {"linear": linear, "bias": bias})
    shape = tuple(bias.shape)
    if len(shape) != 4:
        fix = "pass one state per batch and head; V may be 1"
        raise ShapeError("scan_across bias", "4 dims (batch, heads, K, V)", f"shape {shape}", fix)
    shapes = [shape[:2], shape[:3], (*shape[:3], shape[2])]
    if tuple(linear.shape) not in shapes:
        expected = f"shape {shapes[0]}, {shapes[1]} or {shapes[2]} for bias {shape}"
        fix = "pass a factor, a diagonal or a matrix per batch and head"
        raise ShapeError("scan_across linear", expected, f"shape {tuple(linear.shape)}", fix)
    if not isinstance(reverse, bool):
        fix = "pass reverse=True to scan from the last rank"
        raise ArgumentError("scan_across reverse", "True or False", repr(reverse), fix)
