"""RecurrentGemma, whose RG-LRU decays by a number for each channel. Its layers keep their states themselves."""

from typing import Any

import torch
from torch import Tensor

from attnmesh.hf.family import RECURRENT, RECURRENT_STATES, Family, Recurrence
from attnmesh.hf.recurrent.chain import current_chain
from attnmesh.hf.recurrent.rules import StateLink, in_pieces, run_links, steps_of
from attnmesh.recurrent.scan import AffineMap


def rg_lru_link(hidden_states: Tensor, recurrent_gate: Tensor, reset: Tensor) -> StateLink:
    """Return the link of RecurrentGemma's RG-LRU, its A a scalar per channel. Its heads are channels, of (1, 1).

    Arguments are those of `_rnn_scan`, (batch, tokens, channels): inputs, decays without resets, and the tokens at
    position 0, before which the state is dropped. Outputs have the dtype of the inputs.
    """
    dtype = torch.promote_types(hidden_states.dtype, torch.float32)
    gates, inputs = (recurrent_gate * ~reset).to(dtype), hidden_states.to(dtype)
    decays: list[Tensor] = []
    states: list[Tensor] = []
    for t in steps_of(inputs, inputs.shape[1], "rg_lru"):
        decay, state = _scan(gates[:, t], inputs[:, t])
        if states:
            decay, state = decay * decays[-1][:, -1:], state + decay * states[-1][:, -1:]
        decays.append(decay)
        states.append(state)
    decay, state = torch.cat(decays, dim=1), torch.cat(states, dim=1)

    def finish(entering: Tensor) -> tuple[Tensor, Tensor]:
        contextualized = state + decay * entering.flatten(1)[:, None]
        return contextualized.to(hidden_states.dtype), contextualized[:, -1, :, None, None]

    return StateLink(AffineMap(decay[:, -1], state[:, -1, :, None, None]), finish)


def _scan(decay: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Decays since the first token, and states from zero, in log2(tokens) steps. Decays may be 0."""
    step = 1
    tokens = decay.shape[1]
    while step < tokens:
        later = decay[:, step:]
        state = torch.cat((state[:, :step], state[:, step:] + later * state[:, :-step]), dim=1)
        decay = torch.cat((decay[:, :step], later * decay[:, :-step]), dim=1)
        step *= 2
    return decay, state


class ShardedRglru:
    """First base of a subclass of `RecurrentGemmaRglru`, whose state goes across ranks on shards."""

    def _rnn_scan(self, hidden_states: Tensor, recurrent_gate: Tensor, reset: Tensor, *args: Any, **kwargs: Any) -> Any:
        if current_chain.get(None) is None:
            return super()._rnn_scan(hidden_states, recurrent_gate, reset, *args, **kwargs)  # type: ignore[misc]
        return run_links([rg_lru_link(*x) for x in in_pieces(1, hidden_states, recurrent_gate, reset)], 1)[0], None


FAMILIES = (
    Family(
        "recurrent_gemma",
        "head_dim intermediate_size layer_types num_attention_heads num_hidden_layers num_key_value_heads "
        "rope_parameters sliding_window",
        sources={
            "RecurrentGemmaRecurrentBlock.forward": "168a53604eb8",
            "RecurrentGemmaRglru.forward": "3849f7413eda",
            "RecurrentGemmaRglru._rnn_scan": "898aff8a3eea",
        },
        uses=(RECURRENT_STATES,),
        layers=RECURRENT,
        recurrences={
            "RecurrentGemmaRecurrentBlock": Recurrence(reads=("rg_lru",), convolution="conv_1d"),
            "RecurrentGemmaRglru": Recurrence(reads=("_rnn_scan",), base=ShardedRglru),
        },
        hides_states=True,
    ),
)
