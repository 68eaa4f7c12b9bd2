"""Latents of a model between its cache's `update` and its attention call.

A model with multi-head latent attention expands what `update` returns. Stock transformers returns all cached latents,
for each new token again. A `ShardedCache` returns the new latents alone, as `LatentStates`. The keys and values that a
model expands from them have this class too, so attention receives the latents with them.
"""

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.functional import pad
from transformers import PreTrainedConfig

from attnmesh.errors import KernelError
from attnmesh.hf.family import USE_SUPPORTED
from attnmesh.hf.models import SUBJECT, Opaque
from attnmesh.hf.shard_tensors import METADATA_FUNCTIONS, VIEW_FUNCTIONS, DispatchedTensor
from attnmesh.mesh_attention.latents import Projection

EXPANDING = {
    *(METADATA_FUNCTIONS | VIEW_FUNCTIONS),
    *("linear", "split", "cat", "new_empty", "copy_", "add", "mul", "dropout"),
}
"""Functions of PyTorch that expand latents, also through adapters such as LoRA."""

TOLERANCE = 0.02
"""Largest error of a projected key or value, relative to the largest element: about five roundings of bfloat16."""


class LatentStates(DispatchedTensor):
    """New latents, or the keys and values that a model expands from them. Functions that do not expand them raise."""

    latents: Tensor
    """The new latents, (batch, 1, tokens, columns), the rotated columns last."""
    layer: Any
    """The layer of the cache that returned them."""

    def dispatch(self, name: str, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the result, of the same latents. Raise for functions that do not expand latents."""
        if name not in EXPANDING:
            Opaque.raise_read(name.strip("_"))
        result = call()
        return tuple(map(self.wrap, result)) if isinstance(result, (tuple, list)) else self.wrap(result)


def latent_states(c: Tensor, rotated: Tensor, layer: Any) -> tuple[LatentStates, LatentStates]:
    """Return both parts of new latents, for the model to expand."""
    origin: dict[str, Any] = {"latents": torch.cat((c, rotated), -1), "layer": layer}
    return LatentStates.of(c, **origin), LatentStates.of(rotated, **origin)


def latent_widths(config: PreTrainedConfig, layer: int = 0) -> tuple[int, int] | None:
    """Return the columns of a latent that a layer projects, and its rotated ones; None if it caches keys and values.

    >>> from transformers import DeepseekV3Config, LlamaConfig
    >>> latent_widths(DeepseekV3Config()), latent_widths(LlamaConfig())
    ((512, 64), None)
    """
    config = config.get_text_config(decoder=True)
    config = config.per_layer_config[layer] if config.is_heterogeneous else config
    kv_lora_rank, rotated = getattr(config, "kv_lora_rank", None), getattr(config, "qk_rope_head_dim", None)
    return None if not kv_lora_rank or not rotated else (kv_lora_rank, rotated)


def projection_of(module: nn.Module, k: Tensor, v: Tensor, latents: Tensor, kv_lora_rank: int) -> Projection:
    """Return the projection of a layer, whose model expands latents to k and v."""
    key_columns = k.shape[3] - (latents.shape[3] - kv_lora_rank)
    matrix = _matrix(module, kv_lora_rank, latents)
    if tuple(matrix.shape) != (k.shape[1] * (key_columns + v.shape[3]), kv_lora_rank):
        _raise_projection(f"one of shape {tuple(matrix.shape)} for {k.shape[1]} heads")
    keys, values = matrix.unflatten(0, (k.shape[1], -1)).tensor_split([key_columns], dim=1)
    return Projection(keys, values).to(k.dtype)


def check_projection(projection: Projection, k: Tensor, v: Tensor, latents: Tensor) -> None:
    """Raise unless the first token is projected to the keys and values that the model expands from it."""
    for projected, expanded in zip(projection.expand(latents[:1, :, :1].to(k.dtype)), (k, v), strict=True):
        expanded = expanded[:1, :, :1]
        if expanded.numel() and bool((projected - expanded).abs().max() > TOLERANCE * expanded.abs().max()):
            _raise_projection("other keys and values than its weight projects")


def has_weight(module: nn.Module, latents: Tensor) -> bool:
    """Return True if a layer's `kv_b_proj` is a plain linear layer, whose whole weight is on the latents' device."""
    layer: Any = getattr(module, "kv_b_proj", None)
    is_whole = type(layer) is nn.Linear and not isinstance(layer.weight, DTensor)
    return is_whole and bool(layer.weight.device == latents.device)


def _matrix(module: nn.Module, kv_lora_rank: int, latents: Tensor) -> Tensor:
    """Return the matrix of a layer's `kv_b_proj`, from the identity matrix unless it is a plain linear layer."""
    layer: Any = getattr(module, "kv_b_proj", None)
    matrix: Tensor
    if layer is None:
        _raise_projection(f"{type(module).__name__} without it")
    if has_weight(module, latents):
        matrix = layer.weight.detach()
        bias = layer.bias
    else:
        rows = layer(pad(torch.eye(kv_lora_rank, dtype=latents.dtype, device=latents.device), (0, 0, 1, 0))).detach()
        matrix = rows[1:].mT
        bias = rows[0]
    if bias is not None and bool(bias.any()):
        _raise_projection("one with a bias")
    return matrix


def _raise_projection(given: str) -> NoReturn:
    raise KernelError(f"{SUBJECT} kv_b_proj", "a linear layer from latents to keys and values", given, USE_SUPPORTED)
