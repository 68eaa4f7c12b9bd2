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
    """Return the sizes of the layers that ranks of a host can share, for the planner; None without such layers."""
    layers, _ = shared_layers(model)
    if not layers:
        return None
    return SharedLayers(
        weight_bytes=sum(layer.weight.nbytes for layer in layers.values()),
        outputs=tuple(_outputs_of_calls(layers)),
        most_tokens=min(MAX_SHARED_ROWS[layer.weight.dtype] for layer in layers.values()),
        most_ranks=MAX_MEMBERS,
        board_bytes=BOARD_BYTES,
    )


def sizes_of_experts(model: PreTrainedModel) -> Experts | None:
    """Return the experts; None without experts, or if it is not known how many a token takes."""
    config = model.config.get_text_config(decoder=True)
    weight_bytes = sum(weight.nbytes for name, weight in model.named_parameters() if EXPERTS in name)
    counts = (getattr(config, name, None) for name in ("num_local_experts", "n_routed_experts", "num_experts"))
    per_token: int | None = getattr(config, "num_experts_per_tok", None)
    per_layer: int | None = next(filter(None, counts), None)
    if not (weight_bytes and per_layer and per_token):
        return None
    return Experts(weight_bytes, per_layer, per_token, shareable_layers=len(shared_layers(model)[1]))


def active_parameters(model: PreTrainedModel, experts: Experts | None) -> int | None:
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
    return None if experts is None else sum(sizes.values()) - unused + unused * experts.per_token // experts.per_layer


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
