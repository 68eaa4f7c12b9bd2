"""Sizes of the layers that ranks of a host can share, for the planner."""

from collections.abc import Mapping

from torch import nn
from transformers import PreTrainedModel

from attnmesh.comm.host_linear import BOARD_BYTES, MOST_ROWS
from attnmesh.comm.shared_memory import MOST_RANKS
from attnmesh.hf.shared_weights import shared_layers, weights_of
from attnmesh.planner.decode_cost import SharedLayers


def sizes_of_shared(model: PreTrainedModel) -> SharedLayers | None:
    """Return the sizes of the layers that ranks of a host can share, for the planner; None without any."""
    layers, _ = shared_layers(model)
    if not layers:
        return None
    weights = sum(layer.weight.nbytes for layer in layers.values())
    rows = min(MOST_ROWS[layer.weight.dtype] for layer in layers.values())
    return SharedLayers(weights, tuple(_outputs_of_calls(layers)), rows, MOST_RANKS, BOARD_BYTES)


def _outputs_of_calls(layers: Mapping[str, nn.Module]) -> list[int]:
    """Return the outputs of each call of a step, as they are expected before one.

    Layers of one module that take as many columns are one call, but for its last, which takes what the others make.
    """
    found: list[int] = []
    last, before = {name.rpartition(".")[0]: name for name in layers}, None
    for name, layer in layers.items():
        module = name.rpartition(".")[0]
        outputs, columns = weights_of(layer)[0].shape
        kind = module, columns, name == last[module]
        if kind == before:
            found[-1] += outputs
        else:
            found.append(outputs)
        before = kind
    return found
