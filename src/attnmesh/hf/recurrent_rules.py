"""Rules of recurrent layers on a part of a sequence, around the functions with which transformers computes them.

A rule takes the arguments of transformers' function, and `enter`: a function that takes the affine map of the part's
tokens and returns the state with which the part begins. It returns what transformers' function returns.

    gated delta rule, KDA   S -> A S + B with a matrix A: the function itself is run on values [v | 0] from [0 | I]
    Mamba-2                 a factor per head, in closed form
    Mamba                   a factor per channel and entry of the state, in closed form
    Lightning attention     a factor per head, the same for all tokens
    RG-LRU                  a factor per channel
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import softplus

from attnmesh.comm.scan import AffineMap

Enter = Callable[[AffineMap], Tensor]
"""Returns the state with which a part begins, from the map of its tokens."""

CHUNK = 256
"""Tokens whose states are computed at once, where each token has a state of its own."""


def delta_rule(
    enter: Enter,
    stock: Callable[..., Any],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *args: Any,
    initial_state: None = None,
    output_final_state: bool = False,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Return (out, state or None) of `chunk_gated_delta_rule` or `chunk_kda`.

    The rule is linear in its values and in its state. So one call gives the output from a state of zero beside the
    output for each entry of the state, and the state that follows.
    """
    batch, _, heads, columns = value.shape
    rows, dtype = key.shape[-1], query.dtype
    if query.device.type == "cpu":  # transformers computes in float32 and casts at the end
        query = query.float()
    wide = torch.cat([value, value.new_zeros(*value.shape[:3], rows)], -1)
    eye = torch.eye(rows, dtype=torch.float32, device=value.device).expand(batch, heads, rows, rows)
    initial = torch.cat([eye.new_zeros(batch, heads, rows, columns), eye], -1)
    out, state = stock(query, key, wide, *args, initial_state=initial, output_final_state=True, **kwargs)
    part = AffineMap(state[..., columns:], state[..., :columns])
    entered = enter(part)
    out = out[..., :columns].float() + torch.einsum("bthk,bhkv->bthv", out[..., columns:].float(), entered)
    return out.to(dtype), part(entered) if output_final_state else None


def mamba2(
    enter: Enter,
    stock: Callable[..., Any],
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,  # noqa: N803 (the names of transformers)
    B: Tensor,  # noqa: N803
    *args: Any,
    initial_states: None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    **kwargs: Any,
) -> Any:
    """Return out, or (out, state), of `mamba_chunk_scan_combined`. Its state is (batch, heads, columns, rows)."""
    steps = _steps(dt, dt_bias, dt_softplus).clamp(*dt_limit).float()  # (batch, tokens, heads)
    log_decay = A.float() * steps
    left = log_decay.flip(1).cumsum(1).flip(1) - log_decay  # of the tokens after each
    inputs = hidden_states.float() * (steps * left.exp())[..., None]
    keys = B.float().repeat_interleave(inputs.shape[2] // B.shape[2], dim=2)
    part = AffineMap(log_decay.sum(1).exp(), torch.einsum("bthn,bthp->bhnp", keys, inputs))
    initial = enter(part).mT.contiguous()
    options = {"dt_bias": dt_bias, "dt_softplus": dt_softplus, "dt_limit": dt_limit}
    return stock(hidden_states, dt, A, B, *args, initial_states=initial, **options, **kwargs)


def mamba(
    enter: Enter,
    stock: Callable[..., Any],
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,  # noqa: N803 (the names of transformers)
    B: Tensor,  # noqa: N803
    C: Tensor,  # noqa: N803
    D: Tensor | None = None,  # noqa: N803
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
    **kwargs: Any,
) -> Any:
    """Return out, or (out, state), of `selective_scan_fn`, which begins with a state of zero.

    Shapes are (batch, channels, tokens) and, of B and C, (batch, rows, tokens).
    """
    kwargs |= {"delta_bias": delta_bias, "delta_softplus": delta_softplus, "return_last_state": True}
    out, state = stock(hidden_states, dt, A, B, C, D, None, **kwargs)
    elapsed = _steps(dt, None if delta_bias is None else delta_bias[:, None], delta_softplus).float().cumsum(2)
    linear = (A.float() * elapsed[..., -1:]).exp()  # (batch, channels, rows)
    part = AffineMap(linear, state.float()[..., None])
    entered = enter(part)[..., 0]
    pieces = zip(elapsed.split(CHUNK, 2), C.float().split(CHUNK, 2), strict=True)
    added = [
        torch.einsum("bdtn,bdn,bnt->bdt", (A.float()[:, None] * time[..., None]).exp(), entered, c)
        for time, c in pieces
    ]
    out = out + torch.cat(added, 2).to(out.dtype)
    out = out if z is None else out * torch.nn.functional.silu(z)
    return (out, part(entered[..., None])[..., 0].to(state.dtype)) if return_last_state else out


def lightning(enter: Enter, q: Tensor, k: Tensor, v: Tensor, slopes: Tensor, block: int) -> Tensor:
    """Return Lightning attention, (batch, heads, tokens, dim): S -> exp(-slope) S + k' v for each token.

    `slopes` are (heads,). The output of a token reads the state after it.
    """
    tokens = q.shape[2]
    left = torch.arange(tokens - 1, -1, -1, device=q.device)
    decay = (-slopes[:, None, None] * tokens).exp()
    faded = k * (-slopes[:, None] * left).exp()[..., None].to(k.dtype)
    part = AffineMap(decay[None, :, 0, 0].expand(len(q), -1).float(), (faded.mT @ v).float())
    state = enter(part).to(v.dtype)
    pieces = []
    for q_part, k_part, v_part in zip(*(x.split(block, 2) for x in (q, k, v)), strict=True):
        time = torch.arange(q_part.shape[2], device=q.device)
        age = time[:, None] - time
        fading = torch.where(age >= 0, (-slopes[:, None, None] * age).exp(), 0.0).to(v.dtype)
        reached = (-slopes[:, None] * (time + 1)).exp()[..., None].to(v.dtype)
        pieces.append((q_part @ k_part.mT * fading) @ v_part + (q_part * reached) @ state)
        rest = (-slopes[:, None] * (len(time) - 1 - time)).exp()[..., None].to(v.dtype)
        total = (-slopes[:, None, None] * len(time)).exp().to(v.dtype)
        state = state * total + (k_part * rest).mT @ v_part
    return torch.cat(pieces, 2)


def rg_lru(enter: Enter, inputs: Tensor, gates: Tensor) -> Tensor:
    """Return the states of `h -> gate h + input` after each token, (batch, tokens, channels), in float32."""
    inputs, gates = inputs.float(), gates.float()
    state, product = torch.zeros_like(inputs[:, 0]), torch.ones_like(gates[:, 0])
    states, products = [], []
    for gate, given in zip(gates.unbind(1), inputs.unbind(1), strict=True):
        state, product = gate * state + given, gate * product
        states.append(state)
        products.append(product)
    entered = enter(AffineMap(product[:, None], state[:, None, :, None]))[:, 0, :, 0]
    return torch.stack(states, 1) + torch.stack(products, 1) * entered[:, None]


RULES: dict[str, Callable[..., Any]] = {
    "torch_chunk_gated_delta_rule": delta_rule,
    "chunk_kimi_delta_attention": delta_rule,
    "mamba2_chunk_scan": mamba2,
    "mamba_selective_scan": mamba,
}
"""Rules by the names of transformers' functions."""


def _steps(dt: Tensor, bias: Tensor | None, positive: bool) -> Tensor:
    """Return the length of each token's step."""
    dt = dt if bias is None else dt + bias.to(dt.dtype)
    return softplus(dt) if positive else dt
