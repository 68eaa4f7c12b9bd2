"""Bytes of memory that a rank needs, by the way in which attention runs."""

from attnmesh.core.layout import Striped, Zigzag
from attnmesh.core.mask import Full
from attnmesh.core.turns import Turn, widths_of
from attnmesh.cost.candidate_mesh import CandidateMesh
from attnmesh.cost.exchange_cost import layer_memory
from attnmesh.cost.exchange_cost import peak_activations as peak_activations
from attnmesh.mesh.shapes import Shape
from attnmesh.planner.workload import Workload

INDEX_BYTES = 4
"""Bytes of a selected index."""


def rank_memory(candidate: CandidateMesh, workload: Workload) -> float:
    """Return the bytes per rank: tensors kept by all layers, and the peak of one exchange.

    A prefill keeps the keys and values of all layers, but under a full mask those of one: no token follows that would
    attend to them. Training keeps all inputs of the backward pass.
    """
    key_layers = 1 if workload.phase == "prefill" and workload.mask == Full() else workload.layers
    query_layers = workload.layers if workload.phase == "training" else 1
    return layer_memory(candidate, workload.one_layer, key_layers, query_layers)


def cache_layouts(block: int, shares: tuple[int, ...]) -> list[Striped]:
    """Return the layouts of a cache: even shares, and those given if they are unequal.

    >>> cache_layouts(16, (3, 1))
    [Striped(block=16), Striped(block=(24, 8))]
    """
    return [Striped(block), *([Striped(widths_of(shares, block))] if len({*shares}) > 1 else [])]


def turns_of(candidate: CandidateMesh) -> tuple[Turn, ...]:
    """Return the turn of each rank that holds tokens of a cache, which is block-cyclic."""
    layout = candidate.layout
    ranks = candidate.shape.queries * candidate.shape.keys
    return (layout if isinstance(layout, Striped) else Striped()).turns(ranks)


def cached_bytes(candidate: CandidateMesh, workload: Workload) -> list[float]:
    """Return the bytes of keys and values on each rank that holds tokens, by their shares."""
    kept = workload.kept_bytes / candidate.shape.heads
    return [kept * turn.width / turn.period for turn in turns_of(candidate)]


def index_memory(shape: Shape, workload: Workload) -> float:
    """Return the bytes per rank of index keys. Prefill and training add those that arrive, and selected indices.

    Index keys have no gradients, so training keeps the indices alone.
    """
    selected, phase = workload.selected, workload.phase
    if selected is None:
        return 0.0
    index_keys = 0.0 if phase == "training" else workload.index_bytes / shape.ranks
    if phase == "decode":
        return index_keys
    arriving = workload.batch * workload.length * selected.index_dim * workload.itemsize
    indices = workload.batch * workload.length / shape.ranks * selected.heads * selected.k * INDEX_BYTES
    return index_keys + arriving + indices * (workload.indexers if phase == "training" else 1)


def min_memory(workload: Workload) -> float:
    """Return the bytes of all ranks together in the way that needs least: a ring, on many ranks."""
    if workload.phase == "decode":
        return workload.kept_bytes + workload.index_bytes
    ring = Shape(1, 4, 1)
    attention = rank_memory(CandidateMesh(ring, Shape(1, 1, 1), Zigzag(), "ring"), workload)
    return ring.ranks * (attention + index_memory(ring, workload))
