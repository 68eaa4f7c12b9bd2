"""Shares of unequal ranks of a `ShardedCache`, and the layout of a prompt that follows from them."""

from collections.abc import Sequence

import torch
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedConfig

from attnmesh.cache.block_cyclic import BlockCyclic
from attnmesh.core.layout import Striped
from attnmesh.core.storage import STORAGES
from attnmesh.hf.latent_states import latent_widths
from attnmesh.hf.models import is_compressed, key_heads, layers_of, num_cached_layers
from attnmesh.mesh.axes import RankMesh
from attnmesh.setup.init_mesh import device_for
from attnmesh.setup.measure_shares import agreed_shares


def agreed_rank_shares(
    config: PreTrainedConfig,
    device_mesh: DeviceMesh | None,
    shares: Sequence[float] | str | None,
    capacity: int | None,
    storage: str | None,
) -> tuple[float, ...] | None:
    """Return the ratios of the tokens of each rank; None for even shares. Collective with "auto": ranks measure."""
    if isinstance(shares, str):
        needed = 0 if capacity is None else capacity * token_bytes(config, storage)
        return agreed_shares(RankMesh.of(device_mesh), device_for(device_mesh, None), needed)
    return None if shares is None else tuple(shares)


def token_bytes(config: PreTrainedConfig, storage: str | None) -> int:
    """Return the bytes that a token takes in the layers that keep all tokens; 0 where they are not known.

    >>> from transformers import LlamaConfig
    >>> sizes = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    >>> token_bytes(LlamaConfig(**sizes, dtype="float32"), None)
    512
    """
    config = config.get_text_config(decoder=True)
    if is_compressed(config) or (heads := key_heads(config)) is None:
        return 0
    layers = [layer for layer in layers_of(config)[: num_cached_layers(config)] if layer.attends and not layer.windowed]
    latents = latent_widths(config)
    dim = getattr(config, "head_dim", None)
    columns = [dim or config.hidden_size // config.num_attention_heads] * 2 * heads if latents is None else [*latents]
    if storage is not None:
        return len(layers) * sum(map(STORAGES[storage].row_width, columns))
    return len(layers) * sum(columns) * (config.dtype or torch.bfloat16).itemsize


def prompt_layout(block: int, ranks: int, shares: tuple[float, ...] | None) -> Striped:
    """Return the layout in which each rank computes the tokens that it keeps."""
    return Striped(BlockCyclic.of(block, ranks, shares).block)
