"""Generation as Tree Attention's public benchmark times it: the whole prompt read, then a token at a time.

Its code reads the prompt in either case with a ring, tokens in order and keys repeated for all query heads. Then, in
each layer and for each token, it turns the kept keys to their positions anew, repeats keys and values, broadcasts the
query, waits at a barrier, and decodes. Every rank holds the whole model. The time includes reading the prompt.
"""

from dataclasses import dataclass
from math import ceil, log2

import attnmesh as am
from attnmesh.cost.candidate_mesh import CandidateMesh
from attnmesh.cost.cluster import Cluster
from attnmesh.mesh.shapes import Shape
from attnmesh.planner.workload import Workload
from attnmesh.planner.workload_cost import cost
from benchmarks.papers.baselines import HALF, algorithm_3, crossed, ring_decode

TOKENS = 10
"""New tokens; the first comes of reading the prompt."""

CALLS = 43
"""Operations of one layer for one token beside its merge: 16 of two norms, 7 of projections and the MLP, 10 of
positions, 4 that join and repeat keys and values, 6 others. Counted in the public code."""

REBUILT = 20
"""Bytes of memory read or written for each byte of kept keys, to turn them again (10), repeat them and the values (10).
Counted in the public code."""


@dataclass(frozen=True)
class Llama:
    """A model's sizes."""

    name: str
    layers: int
    hidden: int
    inner: int
    q_heads: int
    kv_heads: int
    head_dim: int
    words: int = 128256

    @property
    def weights(self) -> int:
        """Numbers that each token is multiplied with."""
        attention = 2 * self.hidden * self.head_dim * (self.q_heads + self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.inner) + self.hidden * self.words

    def workload(self, tokens: int, phase: str, *, repeated: bool = False) -> Workload:
        """Return the attention of the model in all layers."""
        kv_heads = self.q_heads if repeated else self.kv_heads
        return Workload(self.q_heads, kv_heads, self.head_dim, tokens, layers=self.layers, phase=phase)


LLAMA_8B = Llama("Llama-3.1-8B", 32, 4096, 14336, 32, 8, 128)
LLAMA_1B = Llama("Llama-3.2-1B", 16, 2048, 8192, 32, 8, 64)


def generated(model: Llama, tokens: int, cluster: Cluster, decode: str) -> float:
    """Seconds of TOKENS new tokens as the public code makes them, decoding with "tree" or "ring"."""
    ranks, device = cluster.world, cluster.device
    ring = CandidateMesh(Shape(1, ranks, 1), Shape(1, cluster.ranks, 1), am.Contiguous(), "ring")
    prompt = cost(ring, model.workload(tokens, "prefill", repeated=True), cluster).seconds
    repeated = model.workload(tokens, "decode", repeated=True)
    shard = repeated.kept_bytes / repeated.layers / ranks
    keys = tokens / ranks * model.kv_heads * model.head_dim * HALF
    announced = 2 * ceil(log2(ranks)) * crossed(cluster).merge_latency  # a broadcast and a barrier
    merged = (
        ring_decode(cluster, shard) if decode == "ring" else algorithm_3(cluster, shard, model.q_heads, model.head_dim)
    )
    layer = REBUILT * keys / device.memory_rate + announced + merged
    return prompt + _rest(model, tokens, cluster) + (TOKENS - 1) * model.layers * layer


def generated_best(model: Llama, tokens: int, cluster: Cluster) -> tuple[float, str]:
    """Seconds with attnmesh's best plans for the prompt and for decoding, the rest of the model alike; the plans."""
    plans = [am.plan(model.workload(tokens, phase), cluster)[0] for phase in ("prefill", "decode")]
    seconds = plans[0].seconds + (TOKENS - 1) * plans[1].seconds
    return _rest(model, tokens, cluster) + seconds, ", then ".join(plan.name for plan in plans)


def _rest(model: Llama, tokens: int, cluster: Cluster) -> float:
    """Return the seconds of all but attention: products at its rate, then weights read and calls made each token."""
    device = cluster.device
    prompt = 2 * model.weights * tokens / cluster.world / device.forward_rate
    token = HALF * model.weights / device.memory_rate + model.layers * CALLS * device.call
    return prompt + (TOKENS - 1) * token
