"""Recurrent layers of transformers on one shard of a sequence, as affine maps of their state.

A recurrent layer changes its state along a shard by S -> A S + B. Neither A nor B depends on the entering state, so
ranks compute both at once, exchange them, and then read the outputs with the state that enters their shard:

        link = RULES["torch_chunk_gated_delta_rule"](stock, query, key, value, g=g, beta=beta)
        entering = exchange(link.map)                              # the maps of the earlier shards, from a zero state
        outputs, leaving = link.finish(entering)

A link uses its layer's stock rule where the rule takes an initial state or is applied from zero. The rest is closed
form in float32. All results are differentiable. A shard has at least one token.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad, silu, softplus

from attnmesh.errors import ArgumentError, MaskError, require
from attnmesh.hf.recurrent.chain import split
from attnmesh.hf.recurrent.head_rules import Stock, delta_by_heads, mamba2_by_heads
from attnmesh.kernels.traced import without_autocast
from attnmesh.recurrent.scan import AffineMap

SEGMENTS = {"gated_delta": 128, "kimi_delta": 64, "selective": 64, "lightning": 256, "rg_lru": 256}
"""Tokens that one step of a rule computes on a CPU: temporaries stay in its caches. Other devices take 8 times more."""

LOWEST = -87.0
"""Logarithm of the smallest decay that outputs are corrected with. CPUs take 50 times longer for denormal results."""

PACKED = ("cu_seqlens", "cu_seq_lens_q", "seq_idx")
"""Arguments that begin a new sequence inside the tokens."""


class ShardOfStates(NamedTuple):
    """One shard of a recurrent layer: an affine map of its state, and the outputs once the entering state is known."""

    map: AffineMap
    """A: scalar per head (batch, heads), diagonal (batch, heads, K) or matrix (batch, heads, K, K).

    B, (batch, heads, K, V): the state after this shard from a zero state.
    """
    finish: Callable[[Tensor], tuple[Tensor, Tensor]]
    """Return outputs as the stock rule returns them, and the leaving state, of the entering (batch, heads, K, V)."""


@dataclass(frozen=True)
class Rule:
    """How one rule of transformers becomes a `ShardOfStates`, and how it names and lays out its states."""

    link: Callable[..., ShardOfStates]
    """Return the link. Called with the stock rule and the arguments of the model, without the initial state."""
    returns_state: str
    """Argument of the stock rule that requests the last state."""
    initial_state: str | None
    """Argument of the stock rule for the initial state. None if it always begins at zero."""
    always_pair: bool
    """True if the stock rule returns (outputs, None), not the outputs alone, where no state is requested."""
    to_stock: Callable[[Tensor], Tensor] = lambda state: state
    """Return a state (batch, heads, K, V) in the layout of the stock rule and of the model's cache."""
    from_stock: Callable[[Tensor], Tensor] = lambda state: state
    """Return a state of the stock rule as (batch, heads, K, V)."""
    by_heads: Callable[..., Any] | None = None
    """Run the stock rule over all tokens of this rank's heads, see `head_rules`. None if only a scan can run it."""
    dim: int = 1
    """Dimension of the tokens, in the outputs and in the arguments per token: those with 3 dimensions or more."""

    def __call__(self, stock: Stock, *args: Any, **kwargs: Any) -> ShardOfStates:
        """Return the link of a shard: `link(stock, *args, **kwargs)`, without the request for a state."""
        self.check_rows(kwargs)
        begins, fix = kwargs.get(self.initial_state or "") is None, "pass it to link.finish"
        require(begins, ArgumentError, f"recurrent layer {self.initial_state}", "None", "a tensor", fix)
        ignored = {self.returns_state, self.initial_state}
        return self.link(stock, *args, **{name: value for name, value in kwargs.items() if name not in ignored})

    def cut(self, lengths: Sequence[int], args: Sequence[Any], options: Mapping[str, Any]) -> Iterator[tuple[Any, Any]]:
        """Yield the positional and the named arguments of each run of tokens."""
        named = [*enumerate(args), *options.items()]
        tokens = {name: split(x, lengths, self.dim) for name, x in named if isinstance(x, Tensor) and x.ndim > 2}
        for part in range(len(lengths)):
            own = {name: tokens[name][part] if name in tokens else x for name, x in named}
            yield [own.pop(number) for number in range(len(args))], own

    def outputs(self, stock: Stock, lengths: Sequence[int], *args: Any, **options: Any) -> Tensor:
        """Return the outputs of the stock rule, which begins anew with each run of tokens."""
        found = [stock(*own, **named) for own, named in self.cut(lengths, args, options)]
        return torch.cat([out[0] if self.always_pair else out for out in found], self.dim)

    def check_rows(self, options: Mapping[str, Any]) -> None:
        """Raise if the options begin a new sequence inside the tokens."""
        for name in PACKED:
            subject, given = f"recurrent layer {name}", options.get(name)
            fix = "leave it out, and pass shard_batch position_ids that restart in each sequence"
            require(given is None, MaskError, subject, "None over a mesh", type(given).__name__, fix)

    def returned(self, outputs: Tensor, state: Tensor | None, requested: bool) -> Any:
        """Return what the stock rule returns for outputs and a leaving state (batch, heads, K, V)."""
        if requested:
            return outputs, None if state is None else self.to_stock(state)
        return (outputs, None) if self.always_pair else outputs


def joined(links: Sequence[ShardOfStates], dim: int) -> ShardOfStates:
    """Return the link of several documents, of the links of each. No state passes from one to the next, so A is 0."""
    first, *later = links
    if not later:
        return first

    def finish(entering: Tensor) -> tuple[Tensor, Tensor]:
        found = [first.finish(entering), *(link.finish(torch.zeros_like(entering)) for link in later)]
        return torch.cat([outputs for outputs, _ in found], dim), found[-1][1]

    return ShardOfStates(AffineMap(torch.zeros_like(first.map.linear), later[-1].map.bias), finish)


def _spans(x: Tensor, tokens: int, rule: str) -> Iterator[slice]:
    """The tokens of each step of a rule, on the device of a tensor."""
    size = SEGMENTS[rule] * (1 if x.device.type == "cpu" else 8)
    return (slice(start, min(start + size, tokens)) for start in range(0, tokens, size))


def _delta_link(
    stock: Stock, query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, *, rule: str, **options: Any
) -> ShardOfStates:
    """Link of a delta rule, its A a matrix: the stock rule over values [v | 0] from the state [0 | I].

    The columns of a state never mix, so the last state is [B | A], and the outputs are [from zero | of the identity].
    Kernels of flash-linear-attention refuse float32 queries; without them, outputs are rounded once, at the end.
    """
    (batch, tokens, heads, columns), rows = value.shape, key.shape[-1]
    exact = query if find_spec("fla") else query.float()
    identity = torch.eye(rows, dtype=torch.float32, device=value.device).expand(batch, heads, rows, rows)
    state, value, parts = pad(identity, (columns, 0)), pad(value, (0, rows)), []
    for t in _spans(query, tokens, rule):
        inputs = exact[:, t], key[:, t], value[:, t], g[:, t], beta[:, t]
        part, state = stock(
            *inputs[:3], g=inputs[3], beta=inputs[4], **options, initial_state=state, output_final_state=True
        )
        parts.append(part.transpose(1, 2).split((columns, rows), dim=-1))
    bias, linear = (x.contiguous() for x in state.split((columns, rows), dim=-1))

    def finish(entering: Tensor) -> tuple[Tensor, Tensor]:
        with without_autocast(entering):
            outputs = [(zero + (unit.float() @ entering)).to(query.dtype).transpose(1, 2) for zero, unit in parts]
            return torch.cat(outputs, dim=1), linear @ entering + bias

    return ShardOfStates(AffineMap(linear, bias), finish)


def _step_sizes(dt: Tensor, bias: Tensor | None, positive: bool) -> Tensor:
    """Step sizes of a state-space rule, rounded as the stock rules round them."""
    dt = dt if bias is None else dt + bias.to(dt.dtype)
    return softplus(dt) if positive else dt


def _mamba2_link(
    stock: Stock, hidden_states: Tensor, dt: Tensor, rates: Tensor, writes: Tensor, reads: Tensor, **options: Any
) -> ShardOfStates:
    """Link of Mamba-2, its A a scalar per head. States are (state size, head size); outputs are the stock rule's.

    Decays are summed from the end of the shard, where they are close to one, so long shards keep their precision.
    """
    dt_options = options.get("dt_bias"), bool(options.get("dt_softplus"))
    sizes = torch.clamp(_step_sizes(dt, *dt_options), *options.get("dt_limit", (0.0, float("inf")))).float()
    decay = sizes * rates.float()
    after = decay.flip(1).cumsum(1).flip(1) - decay
    linear = decay.sum(1).exp()
    weighted = hidden_states.float() * (sizes * after.exp())[..., None]
    grouped = weighted.unflatten(2, (writes.shape[2], -1))
    with without_autocast(grouped):
        bias = torch.einsum("btgk,btghv->bghkv", writes.float(), grouped).flatten(1, 2)

    def finish(entering: Tensor) -> tuple[Tensor, Tensor]:
        states = {"initial_states": entering.transpose(-1, -2), "return_final_states": True}
        outputs, leaving = stock(hidden_states, dt, rates, writes, reads, **options, **states)
        return outputs, leaving.transpose(-1, -2)

    return ShardOfStates(AffineMap(linear, bias), finish)


def _mamba1_link(
    stock: Stock, hidden_states: Tensor, dt: Tensor, rates: Tensor, writes: Tensor, reads: Tensor, **options: Any
) -> ShardOfStates:
    """Link of Mamba-1, its A diagonal. Its heads are channels, of (state size, 1).

    The stock rule begins at zero. The entering state adds C_t . (exp(A (dt_1 + ... + dt_t)) S), gated by z.
    """
    outputs, last = stock(hidden_states, dt, rates, writes, reads, **options, return_last_state=True)
    shift, z = options.get("delta_bias"), options.get("z")
    steps = _step_sizes(dt, None if shift is None else shift[:, None], bool(options.get("delta_softplus")))
    elapsed, rates = steps.float().cumsum(-1), rates.float()
    linear, bias = (rates * elapsed[..., -1:]).exp(), last.float().unsqueeze(-1)

    def finish(entering: Tensor) -> tuple[Tensor, Tensor]:
        state, added = entering.squeeze(-1)[:, :, None], []
        for t in _spans(outputs, outputs.shape[-1], "selective"):
            states = (rates[None, :, None] * elapsed[:, :, t, None]).clamp(min=LOWEST).exp() * state
            with without_autocast(states):
                added.append(torch.einsum("bdtk,bkt->bdt", states, reads[:, :, t].float()))
        correction = torch.cat(added, dim=-1) * (1 if z is None else silu(z.float()))
        return (outputs + correction).to(outputs.dtype), linear.unsqueeze(-1) * entering + bias

    return ShardOfStates(AffineMap(linear, bias), finish)


def lightning_link(query: Tensor, key: Tensor, value: Tensor, slope_rate: Tensor) -> ShardOfStates:
    """Return the link of MiniMax's lightning attention, its A a scalar per head.

    Args:
        query: Queries (batch, heads, tokens, K), after the activation and the padding mask.
        key: Keys (batch, heads, tokens, K).
        value: Values (batch, heads, tokens, V).
        slope_rate: Decay per token and head, (heads, 1, 1), as the layer's buffer.

    Returns:
        The link. Outputs are (batch, heads, tokens, V) in the dtype of the values, as before the layer's norm.
    """
    dtype = torch.promote_types(value.dtype, torch.float32)
    tokens, (q, k, v, slope) = value.shape[2], (x.to(dtype) for x in (query, key, value, slope_rate))
    position = torch.arange(tokens, dtype=dtype, device=value.device)[:, None]
    linear = torch.exp(-slope * tokens).view(1, -1).expand(value.shape[0], -1)
    with without_autocast(v):
        bias = (k * torch.exp(-slope * (tokens - 1 - position))).mT @ v

    def finish(entering: Tensor) -> tuple[Tensor, Tensor]:
        state, outputs = entering.to(dtype), []
        with without_autocast(entering):
            for t in _spans(value, tokens, "lightning"):
                at = position[: t.stop - t.start]
                reach = torch.exp(-slope * (at - at.T).clamp(min=0)).tril()
                within = (q[:, :, t] @ k[:, :, t].mT * reach) @ v[:, :, t]
                outputs.append(within + q[:, :, t] * torch.exp(-slope * (at + 1)) @ state)
                written = (k[:, :, t] * torch.exp(-slope * (len(at) - 1 - at))).mT @ v[:, :, t]
                state = torch.exp(-slope * len(at)) * state + written
        return torch.cat(outputs, dim=2).to(value.dtype), state

    return ShardOfStates(AffineMap(linear, bias), finish)


def rg_lru_link(hidden_states: Tensor, recurrent_gate: Tensor, reset: Tensor) -> ShardOfStates:
    """Return the link of RecurrentGemma's RG-LRU, its A a scalar per channel. Its heads are channels, of (1, 1).

    Args:
        hidden_states: Normalized inputs (batch, tokens, channels), as `_rnn_scan` receives them.
        recurrent_gate: Decays (batch, tokens, channels), without resets.
        reset: Tokens at position 0, (batch, tokens, 1) of bool: the state before them is dropped.

    Returns:
        The link. Outputs are (batch, tokens, channels) in the dtype of the inputs.
    """
    dtype = torch.promote_types(hidden_states.dtype, torch.float32)
    gates, inputs = (recurrent_gate * ~reset).to(dtype), hidden_states.to(dtype)
    decays: list[Tensor] = []
    states: list[Tensor] = []
    for t in _spans(inputs, inputs.shape[1], "rg_lru"):
        decay, state = _scan(gates[:, t], inputs[:, t])
        if states:
            decay, state = decay * decays[-1][:, -1:], state + decay * states[-1][:, -1:]
        decays.append(decay)
        states.append(state)
    decay, state = torch.cat(decays, dim=1), torch.cat(states, dim=1)

    def finish(entering: Tensor) -> tuple[Tensor, Tensor]:
        contextualized = state + decay * entering.flatten(1)[:, None]
        return contextualized.to(hidden_states.dtype), contextualized[:, -1, :, None, None]

    return ShardOfStates(AffineMap(decay[:, -1], state[:, -1, :, None, None]), finish)


def _scan(decay: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Decays since the first token, and states from zero, in log2(tokens) steps. Decays may be 0."""
    step, tokens = 1, decay.shape[1]
    while step < tokens:
        later = decay[:, step:]
        state = torch.cat((state[:, :step], state[:, step:] + later * state[:, :-step]), dim=1)
        decay = torch.cat((decay[:, :step], later * decay[:, :-step]), dim=1)
        step *= 2
    return decay, state


def _swap(state: Tensor) -> Tensor:
    """The state with its last two dimensions exchanged."""
    return state.transpose(-1, -2)


_DELTA = partial(Rule, returns_state="output_final_state", initial_state="initial_state", always_pair=True)
_GATED_DELTA = _DELTA(partial(_delta_link, rule="gated_delta"), by_heads=delta_by_heads)
_KIMI_DELTA = _DELTA(partial(_delta_link, rule="kimi_delta"), by_heads=delta_by_heads)

RULES: dict[str, Rule] = {
    "torch_chunk_gated_delta_rule": _GATED_DELTA,
    "torch_recurrent_gated_delta_rule": _GATED_DELTA,
    "chunk_kimi_delta_attention": _KIMI_DELTA,
    "recurrent_kimi_delta_attention": _KIMI_DELTA,
    "mamba2_chunk_scan": Rule(
        _mamba2_link, "return_final_states", "initial_states", False, _swap, _swap, mamba2_by_heads
    ),
    "mamba_selective_scan": Rule(
        _mamba1_link,
        "return_last_state",
        None,
        False,
        lambda state: state.squeeze(-1),
        lambda state: state.unsqueeze(-1),
        dim=2,
    ),
}
"""Rules by the name of transformers' function; the same name has the same signature in all models."""
