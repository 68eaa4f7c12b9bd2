"""Families whose indexers run as they are: DeepSeek-V3.2, GLM-5, AX-K2, HY-V4 and dots3."""

from collections.abc import Mapping
from typing import Any

from attnmesh.hf.family import INDEXED, LATENT_FIELDS, Family
from attnmesh.planner.selected import Selected


def _size(config: Any, counts: Mapping[str, int], _: int) -> Selected:
    heads, dim = config.index_n_heads, config.index_head_dim
    return Selected(config.index_topk, index_heads=heads, index_dim=dim, **counts)


FAMILIES = tuple(
    Family(kind, f"{LATENT_FIELDS} n_routed_experts rope_parameters {fields}", layers=INDEXED, planned_selection=_size)
    for kind, fields in {
        "axk2": "",
        "deepseek_v32": "",
        "dots3_note_text": "sliding_window",
        "glm_moe_dsa": "indexer_types",
        "hy_v4": "indexer_types",
    }.items()
)
