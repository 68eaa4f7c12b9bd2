"""Layers of a model that are not its text model: towers of images, videos and audio, which "sdpa" computes.

A tower gets pixels, which no rank shards, so it is exact on each rank as it is. Only the text model is on the mesh.
"""

from logging import getLogger
from typing import Any

import torch.distributed as dist
from torch import Tensor

from attnmesh.hf.transformers_names import sdpa_attention

TEXT_KEYS = ("", "text_config", "decoder_config")
"""Names under which a model's configuration may hold that of its text model."""

SAID = set[type]()
"""Configurations of towers whose layers were logged."""


def in_tower(config: Any) -> bool:
    """Return whether this is the configuration of a tower: its name is not in `TEXT_KEYS`, or it has no vocabulary.

    >>> from transformers import LlamaConfig, SiglipVisionConfig
    >>> in_tower(SiglipVisionConfig()), in_tower(LlamaConfig()), in_tower(None)
    (True, False, False)
    """
    kind: Any = type(config)  # config.__class__ would call functions of transformers
    if config is None:
        return False
    has_words = "vocab_size" in kind.__dataclass_fields__  # a compiler cannot trace `fields`
    return kind.base_config_key not in TEXT_KEYS or not (has_words or "text_config" in kind.sub_configs)


def attend_in_tower(module: Any, query: Tensor, key: Any, value: Any, mask: Any, **options: Any) -> Any:
    """Return attention of a tower's layer, as "sdpa" computes it. Log on the first rank that it is not on the mesh."""
    if (kind := module.config.__class__) not in SAID:
        SAID.add(kind)
        if not dist.is_initialized() or dist.get_rank() == 0:
            name = kind.__name__.removesuffix("Config")
            getLogger(__name__).warning('%s runs with "sdpa" on each rank. The text model runs on the mesh.', name)
    return sdpa_attention(module, query, key, value, mask, **options)
