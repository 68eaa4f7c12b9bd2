"""`attend`: attention on one device, as a partial."""

from typing import Any

from torch import Tensor

from attnmesh.checks.argument_checks import (
    check_distance_bias,
    check_key_lengths,
    check_lengths_within,
    check_positions,
    check_qkv,
    check_selection,
    check_unknown_options,
    heads_and_length,
    warn_if_transposed,
    with_transpose_hint,
    without_redundant,
)
from attnmesh.core.mask import FULL, Full, Mask, check_mask
from attnmesh.core.partial import Partial
from attnmesh.core.scaling import Scaling, with_distance_bias
from attnmesh.core.selection import Selection, Visible
from attnmesh.errors import MaskError, ShapeError
from attnmesh.kernels.choice import check_kernel
from attnmesh.kernels.local_op import attend_locally
from attnmesh.kernels.prepared_local import PREPARED_LOCAL, PreparedLocal, signature_of
from attnmesh.kernels.selected_keys import without_faulty
from attnmesh.kernels.traced import cast_for_autocast, without_autocast


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Mask = Full(),
    q_positions: Tensor | None = None,
    k_positions: Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    key_lengths: Tensor | None = None,
    kernel: str = "auto",
    selected: Selection | None = None,
    distance_bias: Tensor | None = None,
    **sdpa_options: Any,
) -> Partial:
    """Return attention of q over k and v on one device, as a partial `(out, lse)`.

    Positions are 0, 1, 2, ... by default, for q and for k alike: the first query is at the first key, also when there
    are fewer queries than keys. Tokens may be in any order.

    Args:
        q: Queries, (batch, heads, q_len, dim).
        k: Keys, (batch, kv_heads, k_len, dim); `kv_heads` divides `heads`.
        v: Values, (batch, kv_heads, k_len, value_dim).
        mask: The keys that each query sees, by position; `Full()` by default.
        q_positions: Position of each query, int64, (q_len,).
        k_positions: Position of each key, int64, (k_len,).
        scale: Factor of the logits, 1/sqrt(dim) by default.
        softcap: Bound of the logits: each becomes `softcap * tanh(logit / softcap)`. None for no bound.
        key_lengths: Real keys of each sequence, int64, (batch,): keys at this position or later are invisible.
        kernel: "auto" for the best that serves the call, or the name of one of `attnmesh.kernels.choice.KERNELS`.
        selected: The keys that each query attends, of those that it sees under the mask: `Selection(indices)`, by
            position. Keys that are not in k add nothing, so partials of all parts of k merge. None for all keys.
        distance_bias: Numbers to add to the logits of near keys, (batch, heads, q_len, distances), differentiable.
            Column d is for the key d positions before the query. Keys farther away, or after it, have none.
        **sdpa_options: Options of PyTorch's attention, as in `attention`. Others raise an error that names a
            substitute.

    Returns:
        The normalised output in q's dtype, and its lse in float32 or wider; both differentiable once.

    Raises:
        InputError: If the arguments do not fit together, or the kernel does not support them.

    >>> import torch
    >>> import attnmesh as am
    >>> q, k, v = torch.randn(3, 1, 2, 8, 4).unbind()
    >>> last = am.attend(q[:, :, -1:], k, v, mask=am.Causal(), q_positions=torch.tensor([7]))
    >>> torch.allclose(last.out, am.attend(q, k, v, mask=am.Causal()).out[:, :, -1:], atol=1e-6)
    True
    """
    if sdpa_options:
        sdpa_options = without_redundant(sdpa_options, mask)
    seldom_given = q_positions, k_positions, key_lengths, distance_bias, selected
    plain = not sdpa_options and all(x is None for x in seldom_given)
    options = (mask, scale, softcap, kernel)
    signature = None
    if plain:
        signature = signature_of(q, k, v, None, options, any_keys=mask is FULL, with_grad=False)
    if (prepared := PREPARED_LOCAL.find(signature)) is not None:
        return prepared.attend(q, k, v, None)
    check_unknown_options("attend", sdpa_options)
    q, k, v = cast_for_autocast(q, k, v)
    try:
        check_qkv("attend", q, k, v)
        in_order = [x.shape[2] for x, positions in ((q, q_positions), (k, k_positions)) if positions is None]
        check_mask("attend mask", mask, *in_order)
        for name, x, positions in (("q", q, q_positions), ("k", k, k_positions)):
            if positions is not None:
                check_positions(f"attend {name}_positions", positions, x.shape[2])
        check_key_lengths("attend key_lengths", key_lengths, q.shape[0])
        check_selection("attend selected", selected, q, k.shape[1], kernel)
        if k_positions is None:
            check_lengths_within("attend key_lengths", key_lengths, k.shape[2])
    except (MaskError, ShapeError) as error:
        raise with_transpose_hint(error, heads_and_length(q), heads_and_length(k)) from None
    scaling = Scaling.of("attend", scale, softcap, q.shape[-1])
    check_kernel(kernel)
    check_distance_bias("attend", distance_bias, q, scaling, kernel, selected)
    warn_if_transposed("attend", q, k.shape[2])
    if signature is not None:
        return PREPARED_LOCAL.keep(signature, PreparedLocal.of(q, k, v, mask, scaling, kernel)).attend(q, k, v, None)
    q = with_distance_bias(q, distance_bias)
    visible = Visible(mask, q_positions, k_positions, key_lengths, selected)
    with without_autocast(q):
        out, lse = attend_locally(q, k, v, visible, scaling, kernel)
        return Partial(out if selected is None else without_faulty(out, selected), lse)
