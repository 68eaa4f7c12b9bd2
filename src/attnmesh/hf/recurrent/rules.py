"""Recurrent layers of transformers on one shard of a sequence, as affine maps of their state.

A recurrent layer changes its state along a shard by S -> A S + B. Neither A nor B depends on the entering state, so
ranks compute both at once, exchange them, and then read the outputs with the state that enters their shard:

        link = rule(stock, query, key, value, g=g, beta=beta)
        entering = exchange(link.map)                              # the maps of the earlier shards, from a zero state
        outputs, leaving = link.finish(entering)

A link uses its layer's stock rule where the rule takes an initial state or is applied from zero. The rest is closed
form in float32. All results are differentiable. A shard has at least one token.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial as partial_of
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import softplus

from attnmesh.errors import ArgumentError, MaskError
from attnmesh.hf.recurrent.chain import HeadChain, current_chain, split
from attnmesh.recurrent.scan import AffineMap

Stock = Callable[..., Any]
"""A rule of transformers: one function for all tokens of a layer."""

SEGMENT_TOKENS = {"gated_delta": 128, "kimi_delta": 64, "selective": 64, "lightning": 256, "rg_lru": 256}
"""Tokens that one step of a rule computes on a CPU, whose temporaries stay in its caches.

Other devices take 8 times as many: fewer launches, for more memory.
"""

PACKED = ("cu_seqlens", "cu_seq_lens_q", "seq_idx")
"""Arguments that begin a new sequence inside the tokens."""


class StateLink(NamedTuple):
    """One shard of a recurrent layer: an affine map of its state, and the outputs once the entering state is known."""

    map: AffineMap
    """A: scalar per head (batch, heads), diagonal (batch, heads, K) or matrix (batch, heads, K, K).

    B, (batch, heads, K, V): the state after this shard from a zero state.
    """
    finish: Callable[[Tensor], tuple[Tensor, Tensor]]
    """Return outputs as the stock rule returns them, and the leaving state, of the entering (batch, heads, K, V)."""


@dataclass(frozen=True)
class Rule:
    """One rule of transformers as a `StateLink`: how it names and lays out its states."""

    link: Callable[..., StateLink]
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
    """Run the stock rule over the whole sequence for this rank's share of the heads. None if only a scan can run it."""
    parameters: tuple[str, ...] = ()
    """Parameters of the stock rule before its `**kwargs`."""
    dim: int = 1
    """Dimension of the tokens, in the outputs and in the arguments per token, which have 3 dimensions or more."""

    def __call__(self, stock: Stock, *args: Any, **kwargs: Any) -> StateLink:
        """Return the link of a shard: `link(stock, *args, **kwargs)`, without the request for a state."""
        self.check_one_sequence(kwargs)
        if kwargs.get(self.initial_state or "") is not None:
            raise ArgumentError(f"recurrent layer {self.initial_state}", "None", "a tensor", "pass it to link.finish")
        ignored = {self.returns_state, self.initial_state}
        return self.link(stock, *args, **{name: value for name, value in kwargs.items() if name not in ignored})

    def of(self, stock: Stock) -> Stock:
        """Return the rule as it runs on shards: from the state that earlier parts leave, or by heads."""

        def run(*args: Any, **kwargs: Any) -> Any:
            chain = current_chain.get()
            if isinstance(chain, HeadChain) and self.by_heads is not None:
                self.check_one_sequence(kwargs)
                whole_rule = partial_of(self.outputs, stock, chain.all_document_lengths)
                out = self.by_heads(whole_rule, chain, *args, **{**kwargs, self.returns_state: False})
                return self.stock_result(chain.scatter(out), None, False)
            pieces = self.cut(chain.document_lengths, args, kwargs)
            out, leaving = run_links([self(stock, *x, **more) for x, more in pieces], self.dim, self.from_stock)
            return self.stock_result(out, leaving, bool(kwargs.get(self.returns_state)))

        return run

    def cut(self, lengths: Sequence[int], args: Sequence[Any], options: Mapping[str, Any]) -> Iterator[tuple[Any, Any]]:
        """Yield the positional and the named arguments of each run of tokens."""
        arguments = [*enumerate(args), *options.items()]
        parts = {name: split(x, lengths, self.dim) for name, x in arguments if isinstance(x, Tensor) and x.ndim > 2}
        for part in range(len(lengths)):
            run_arguments = {name: parts[name][part] if name in parts else x for name, x in arguments}
            yield [run_arguments.pop(number) for number in range(len(args))], run_arguments

    def outputs(self, stock: Stock, lengths: Sequence[int], *args: Any, **options: Any) -> Tensor:
        """Return the outputs of the stock rule, which begins anew with each run of tokens."""
        results = [stock(*piece_args, **piece_kwargs) for piece_args, piece_kwargs in self.cut(lengths, args, options)]
        return torch.cat([out[0] if self.always_pair else out for out in results], self.dim)

    def check_one_sequence(self, options: Mapping[str, Any]) -> None:
        """Raise if the options begin a new sequence inside the tokens."""
        for name in PACKED:
            given = options.get(name)
            if given is not None:
                fix = "leave it out, and pass shard_batch position_ids that restart in each sequence"
                raise MaskError(f"recurrent layer {name}", "None over a mesh", type(given).__name__, fix)

    def stock_result(self, outputs: Tensor, state: Tensor | None, requested: bool) -> Any:
        """Return what the stock rule returns for outputs and a leaving state (batch, heads, K, V)."""
        if requested:
            return outputs, None if state is None else self.to_stock(state)
        return (outputs, None) if self.always_pair else outputs


def link_of_documents(links: Sequence[StateLink], dim: int) -> StateLink:
    """Return the link of several documents, of the links of each. No state passes from one to the next, so A is 0."""
    first, *later = links
    if not later:
        return first

    def finish(entering: Tensor) -> tuple[Tensor, Tensor]:
        results = [first.finish(entering), *(link.finish(torch.zeros_like(entering)) for link in later)]
        return torch.cat([outputs for outputs, _ in results], dim), results[-1][1]

    return StateLink(AffineMap(torch.zeros_like(first.map.linear), later[-1].map.bias), finish)


def steps_of(x: Tensor, tokens: int, rule: str) -> Iterator[slice]:
    """The tokens of each step of a rule, on the device of a tensor."""
    size = SEGMENT_TOKENS[rule] * (1 if x.is_cpu else 8)
    return (slice(start, min(start + size, tokens)) for start in range(0, tokens, size))


def step_sizes(dt: Tensor, bias: Tensor | None, positive: bool) -> Tensor:
    """Step sizes of a state-space rule, rounded as the stock rules round them."""
    dt = dt if bias is None else dt + bias.to(dt.dtype)
    return softplus(dt) if positive else dt


def run_links(
    links: Sequence[StateLink], dim: int, convert: Callable[[Tensor], Tensor] = lambda state: state
) -> tuple[Tensor, Tensor]:
    """Return the outputs of this rank's tokens, along `dim`, and the state after them. Collective.

    Each piece of this rank's part has a link. `convert` is the argument of `Chain.enter`.
    """
    link = link_of_documents(links, dim)
    return link.finish(current_chain.get().enter(link.map, convert))


def in_pieces(dim: int, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield the tokens of each piece of this rank's part."""
    return zip(*(split(x, current_chain.get().document_lengths, dim) for x in tensors), strict=True)
