"""Sizes of the layers that a step reads, for the planner: those that ranks of a host can share, and experts."""

from collections.abc import Mapping

from torch import nn
from transformers import PreTrainedModel

from attnmesh.comm.host_linear import BOARD_BYTES, MAX_SHARED_ROWS
from attnmesh.comm.mailboxes import MAX_MEMBERS
from attnmesh.hf.shared_weights import shared_layers, weights_of
from attnmesh.planner.decode_cost import Experts, SharedLayers

EXPERTS = ".experts."
"""Part of the names of experts' weights."""


def sizes_of_shared(model: PreTrainedModel) -> SharedLayers | None:
    """Return the sizes of the layers that ranks of a host can share, for the planner; None without any."""
    layers, _ = shared_layers(model)
    if not layers:
        return None
    weights = sum(layer.weight.nbytes for layer in layers.values())
    rows = min(MAX_SHARED_ROWS[layer.weight.dtype] for layer in layers.values())
    return SharedLayers(weights, tuple(_outputs_of_calls(layers)), rows, MAX_MEMBERS, BOARD_BYTES)


def sizes_of_experts(model: PreTrainedModel) -> Experts | None:
    """Return the experts; None without any, or if it is not known how many a token takes."""
    config = model.config.get_text_config(decoder=True)
    weights = sum(weight.nbytes for name, weight in model.named_parameters() if EXPERTS in name)
    counts = (getattr(config, name, None) for name in ("num_local_experts", "n_routed_experts", "num_experts"))
    chosen: int | None = getattr(config, "num_experts_per_tok", None)
    count: int | None = next(filter(None, counts), None)
    return Experts(weights, count, chosen, len(shared_layers(model)[1])) if weights and chosen and count else None


def active_weights(model: PreTrainedModel, experts: Experts | None) -> int | None:
    """Return the weights that one token of a prompt is multiplied by; None if the experts that it takes are unknown.

    The output head is left out: it multiplies the last token alone.
    """
    ends = {id(part.weight) for part in (model.get_input_embeddings(), model.get_output_embeddings()) if part}
    sizes: dict[str, int] = {
        name: weight.numel() for name, weight in model.named_parameters() if id(weight) not in ends
    }
    unused = sum(size for name, size in sizes.items() if EXPERTS in name)
    if not unused:
        return sum(sizes.values())
    return None if experts is None else sum(sizes.values()) - unused + unused * experts.chosen // experts.each


def _outputs_of_calls(layers: Mapping[str, nn.Module]) -> list[int]:
    """Return the outputs of each call of a step, as they are expected before the first step.

    Layers of one module with equally many columns are one call, but for the last layer, whose input the others compute.
    """
    call_outputs: list[int] = []
    last = {name.rpartition(".")[0]: name for name in layers}
    previous = None
    for name, layer in layers.items():
        module = name.rpartition(".")[0]
        outputs, columns = weights_of(layer)[0].shape
        kind = module, columns, name == last[module]
        if kind == previous:
            call_outputs[-1] += outputs
        else:
            call_outputs.append(outputs)
        previous = kind
    return call_outputs
