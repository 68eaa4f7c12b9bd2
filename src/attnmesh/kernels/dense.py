"""The formula of attention: rows of one matrix over keys of another, all pairs at once, and its gradients.

Each tensor is a batch of matrices: `rows` (batch, rows, dim), with a column more for each distance of a bias, `keys`
(batch, keys, dim), and `values` (batch, keys, value_dim). Numbers of rows, as lse and delta, are (batch, rows, 1).
`columns`, those of a bias, are (rows, keys), and `hidden` broadcasts to (batch, rows, keys).
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from attnmesh.core.partial import Partial, sum_dtype
from attnmesh.core.scaling import Scaling
from attnmesh.kernels.rectangles import Gradients


def attend_dense(
    rows: Tensor,
    keys: Tensor,
    values: Tensor,
    hidden: Tensor | None,
    scaling: Scaling,
    columns: Tensor | None = None,
) -> Partial:
    """Return `lse = log sum_a w_a` and `out = sum_a w_a v_a / sum_a w_a`, with weights `w_a = e^logit_a`."""
    rows, biases = _without_bias(rows, keys)
    logits = _logits_or_tanh(rows, widen(keys), scaling)
    if scaling.capped:
        logits.mul_(scaling.softcap)
    if columns is not None:
        logits.add_(pad(biases, (0, 1)).gather(-1, columns.expand(len(biases), -1, -1)))
    if hidden is not None:
        logits.masked_fill_(hidden, -torch.inf)
    peak = logits.amax(-1, keepdim=True)
    # Empty rows have peak -inf. Relative to 0 instead, their weights are e^-inf = 0, and never NaN.
    peak.masked_fill_(peak == -torch.inf, 0.0)
    weights = logits.sub_(peak).exp_()
    total = weights.sum(-1, keepdim=True)
    out = (weights @ widen(values)).div_(total.masked_fill(total == 0, 1.0))
    return Partial(out, peak.add_(total.log()))


def backward_dense(
    rows: Tensor,
    keys: Tensor,
    values: Tensor,
    inputs: Sequence[Tensor],
    hidden: Tensor | None,
    scaling: Scaling,
    columns: Tensor | None = None,
) -> Gradients:
    """Return the gradients: `dv = w'dout` and `dlogit = w (dout v' - delta)`, with `delta = sum(out * dout)`.

    Under a soft cap `dlogit` has the factor `1 - tanh^2` more. The gradient of a bias is the sum over its logits.
    """
    lse, dout, delta = inputs
    keys = widen(keys)
    rows, biases = _without_bias(rows, keys)
    products = _logits_or_tanh(rows, keys, scaling)
    exponents = torch.add(-lse, products, alpha=scaling.softcap if scaling.capped else 1.0)
    dbiases = biases.new_zeros(*biases.shape[:-1], biases.shape[-1] + 1)
    if columns is not None:
        columns = columns.expand(len(biases), -1, -1)
        exponents.add_(pad(biases, (0, 1)).gather(-1, columns))
    if hidden is not None:
        exponents.masked_fill_(hidden, -torch.inf)
    weights = exponents.exp_()
    dlogits = (dout @ widen(values).mT).sub_(delta).mul_(weights)
    if scaling.capped:
        torch.ops.aten.tanh_backward.grad_input(dlogits, products, grad_input=dlogits)
    if columns is not None:
        dbiases.scatter_add_(-1, columns, dlogits)
    dlogits.mul_(scaling.scale)
    dq = torch.cat((dlogits @ keys, dbiases[..., :-1]), -1) if biases.shape[-1] else dlogits @ keys
    return Gradients(dq, dlogits.mT @ rows, weights.mT @ dout)


def _without_bias(rows: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
    """Return rows as wide as keys, and their biases by distance."""
    return rows[..., : keys.shape[-1]], rows[..., keys.shape[-1] :]


def _logits_or_tanh(rows: Tensor, keys: Tensor, scaling: Scaling) -> Tensor:
    """Return the logits. Under a soft cap return the tanh alone: the caller multiplies it by the cap."""
    if scaling.capped:
        return (rows * (scaling.scale / scaling.softcap) @ keys.mT).tanh_()
    return rows * scaling.scale @ keys.mT


def widen(x: Tensor) -> Tensor:
    """Return x in the dtype of sums."""
    return x.to(sum_dtype(x.dtype))
